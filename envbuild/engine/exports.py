"""What one run of the builder makes and where that goes: its bake file, the outputs, and the build cache in a registry."""

import json
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from envbuild.engine.builders import ASKED, asking
from envbuild.engine.replaced import label_of
from envbuild.plan.dockerfile import bake, dockerfile
from envbuild.plan.plan import Plan
from envbuild.settings import Settings
from envbuild.util import quote

# zstd level 1 exports three times faster than gzip and unpacks faster still; what cannot read it reads gzip.
_PACKED = {"zstd": "compression=zstd,compression-level=1", "gzip": "compression=gzip,compression-level=6"}
_EXPORT = "force-compression=true,oci-mediatypes=true"
# A builder that cannot write its cache has still built: `Watch.cache_errors` says why it could not.
_CACHE = "mode=max,image-manifest=true,oci-mediatypes=true,compression=zstd,compression-level=1,ignore-error=true"

CACHE_ONLY = "type=cacheonly"
"""The output of a run that makes nothing but the build cache."""


def write_context(plan: Plan, folder: Path) -> None:
    """Write Dockerfile and bake file to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Dockerfile").write_text(dockerfile(plan), encoding="utf-8")
    (folder / "docker-bake.json").write_text(bake(plan), encoding="utf-8")


def folder_output(folder: Path) -> str:
    """Return the output that writes a target's files to a folder."""
    return quote.csv_fields(type="local", dest=str(folder))


def _layers(settings: Settings, plan: Plan) -> str:
    """Return how layers are exported.

    BuildKit keeps a layer as it was compressed once. Where files have the time of the build it writes every layer again at
    each export, cuts their times to the lock's date, and keeps nothing of that.
    """
    packed = f"{_PACKED[settings.compression]},{_EXPORT}"
    return packed if plan.dated else f"{packed},rewrite-timestamp=true"


def store_output(settings: Settings, plan: Plan, name: str) -> str:
    """Return the output that puts the image where the engine keeps its images."""
    return f"{quote.csv_fields(type='image', name=name, unpack='false')},{_layers(settings, plan)}"


def archive_output(settings: Settings, plan: Plan, archive: Path, tag: str) -> str:
    """Return the output that sends the image here, as an archive."""
    return f"{quote.csv_fields(type='oci', dest=str(archive), name=tag)},{_layers(settings, plan)}"


def registry_output(settings: Settings, plan: Plan, repository: str) -> str:
    """Return the output that has the builder push the image to a repository, by its digest and under no tag."""
    options = {"type": "image", "name": repository, "push": "true", "push-by-digest": "true", "store": "false"}
    return f"{quote.csv_fields(**options)},{_layers(settings, plan)}"


def cache_of(settings: Settings, plan: Plan, target: str, *, taken: bool) -> dict[str, list[str]]:
    """Return where a run takes steps of other builders from, and where it leaves its own, as a bake file states it.

    The steps of an image lie under the image's own tag. Those of wheels lie under the key of the torch that they are
    compiled against: a wheel itself is found by its key, and what is left to share is what it is compiled with.

    Args:
        settings: the repositories.
        plan: what is built.
        target: what this run makes.
        taken: whether steps of other builders will do.

    """
    tag = plan.tag.partition(":")[2] if target == "image" else f"builder-{plan.stage('torch').key[:32]}"
    found = {}
    if settings.cache_from and taken:
        found["cache-from"] = [quote.csv_fields(type="registry", ref=f"{settings.cache_from}:{tag}")]
    if settings.cache_to and target != ASKED:
        found["cache-to"] = [f"{quote.csv_fields(type='registry', ref=f'{settings.cache_to}:{tag}')},{_CACHE}"]
    return {name: [quote.bake(text) for text in texts] for name, texts in found.items()}


def bake_file(
    plan: Plan,
    target: str,
    output: str,
    *,
    contexts: Mapping[str, str],
    secrets: Mapping[str, Path],
    shared: Mapping[str, list[str]],
    replaced: Collection[str] = (),
) -> str:
    """Return the bake file of one run.

    Args:
        plan: what is built.
        target: what this run makes: the image, a wheel, or `ASKED`.
        output: where it goes.
        contexts: where each external input is, by the name of its context.
        secrets: files that steps may read, by id.
        shared: the cache in a registry, as `cache_of` returns it.
        replaced: the inputs that come from elsewhere than the lock says; the image states them.

    """
    definition: dict[str, Any] = json.loads(bake(plan))
    if target == ASKED:
        text = quote.bake(asking(dockerfile(plan), uuid.uuid4().hex))
        own = {"context": ".", "dockerfile-inline": text, "target": ASKED}
        definition["target"][ASKED] = {**definition["target"]["image"], **own}
        del definition["target"][ASKED]["dockerfile"]
    for item in definition["target"].values():
        item.pop("tags", None)  # the output names the image as it was asked for
        item["contexts"] = {k: quote.bake(v) for k, v in contexts.items() if k != target}
        item["secret"] = [quote.bake(quote.csv_fields(id=name, src=str(path))) for name, path in secrets.items()]
    if labels := label_of(replaced):
        definition["target"]["image"]["labels"] = labels
    definition["target"][target] |= {"output": [quote.bake(output)], **shared}
    return json.dumps(definition)
