"""An image that was built, and this machine's notes of what it built itself."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from envbuild import __version__
from envbuild.engine.client import EngineClient
from envbuild.engine.kept import unsigned_wheels_from, wheels_from
from envbuild.engine.progress import StageTime
from envbuild.engine.shared_wheels import Taken
from envbuild.evidence.content import ImageContent
from envbuild.plan.dockerfile import recipe_digest
from envbuild.plan.plan import Plan
from envbuild.settings import Settings
from envbuild.util.names import is_digest

# The digest comes last, so that half a note is none.
_NOTE = re.compile(
    r"(config (?P<config>sha256:[0-9a-f]{64})\n)?(layers (?P<layers>[!-~]+)\n)?(steps from (?P<steps_from>[!-~]+)\n)?(wheels from (?P<wheels_from>[!-~]+)\n)?(?P<digest>sha256:[0-9a-f]{64})"
)
_RECIPE = re.compile(r"release (?P<release>[0-9A-Za-z][0-9A-Za-z._+!-]{0,127})\n(?P<recipe>sha256:[0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class Built:
    """An image in the engine's store.

    Attributes:
        tag: its name, `envbuild:<cell id>` unless another was asked for.
        digest: sha256 digest of its manifest.
        size: bytes, unpacked.
        stages: what took part in this run; empty when the image was there already.
        log: the build's output.
        taken: the compiled wheels that came from a registry.
        pushed: the repository that holds the image already, under its digest alone.

    """

    tag: str
    digest: str
    size: int
    seconds: float = 0.0
    stages: tuple[StageTime, ...] = ()
    log: Path | None = None
    taken: tuple[Taken, ...] = ()
    pushed: str | None = None

    @property
    def executed(self) -> int:
        """How many build steps ran, rather than coming from the cache."""
        return sum(s.executed for s in self.stages)


def _note_of_build(settings: Settings, plan: Plan) -> Path:
    # Not `made`: notes of that name were written for images that came from a registry, too.
    # One image for each compression: a note has one digest.
    other = "" if settings.compression == "zstd" else f"-{settings.compression}"
    return settings.cache_dir / "built" / f"{plan.key}{other}"


@dataclass(frozen=True, kw_only=True)
class OwnBuild:
    """A note of this machine on an image that it built.

    Attributes:
        digest: `sha256:…` of the image.
        steps_from: the repository that finished steps of the build may have come from, which nobody signs, or the bundle
            without a trusted signature that a compiled wheel came from; None when this machine's builder ran every step.
        wheels_from: where a compiled wheel of it came from, signed by a trusted key; None when all were compiled here.
        layers: the digests of its layers, uncompressed, the lowest first: what follows from the lock, whoever compresses
            them. Empty in a note of an earlier release.
        config: how a container of it starts, as `Image.config`. Empty in a note of an earlier release.

    """

    digest: str
    steps_from: str | None = None
    wheels_from: str | None = None
    layers: tuple[str, ...] = ()
    config: str = ""

    @property
    def content(self) -> ImageContent:
        """What the image is, however its layers are compressed."""
        return ImageContent(layers=self.layers, config=self.config or None)

    @property
    def alone(self) -> bool:
        """Whether this machine ran every step and compiled every wheel: what it may sign as built here."""
        return self.steps_from is None and self.wheels_from is None


def note_of(settings: Settings, plan: Plan, digest: str, *, cache: bool) -> OwnBuild:
    """Return the note on an image that was just built, by where its steps and its compiled wheels came from.

    Args:
        settings: name the cache, and the repository of finished steps.
        plan: what was built.
        digest: the image's.
        cache: whether finished steps were used.

    """
    steps = (settings.cache_from if cache else None) or unsigned_wheels_from(settings, plan)
    return OwnBuild(digest=digest, steps_from=steps, wheels_from=wheels_from(settings, plan))


def remember_built(settings: Settings, plan: Plan, build: OwnBuild) -> None:
    """Note an image that this machine built from exactly this plan. Only a build may call it.

    The note is kept here and not in the image, whose bytes follow from the lock alone.
    """
    if is_digest(build.digest):  # first: a run that finds the other note builds nothing and writes no note
        _remember_recipe(settings, plan, build.digest)
    place = _note_of_build(settings, plan)
    place.parent.mkdir(parents=True, exist_ok=True)
    parts = (("steps", build.steps_from), ("wheels", build.wheels_from))
    lines = [f"config {build.config}\n"] if build.config else []
    lines += [f"layers {','.join(build.layers)}\n"] if build.layers else []
    lines += [f"{what} from {origin}\n" for what, origin in parts if origin]
    place.write_text("".join(lines) + build.digest, encoding="utf-8")


def _remember_recipe(settings: Settings, plan: Plan, digest: str) -> None:
    """Note by which recipe an image was built. An image does not state that, and a plan's key does not cover it."""
    place = settings.cache_dir / "made-by" / digest.removeprefix("sha256:")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(f"release {__version__}\n{recipe_digest(plan)}", encoding="utf-8")


def recipe_of_image(settings: Settings, digest: str) -> ImageContent:
    """Return by which recipe and release this machine built the image of a digest; neither, where it did not or did not note it."""
    if not is_digest(digest):
        return ImageContent()
    try:
        text = (settings.cache_dir / "made-by" / digest.removeprefix("sha256:")).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ImageContent()
    note = _RECIPE.fullmatch(text)
    return ImageContent(recipe=note["recipe"], release=note["release"]) if note else ImageContent()


def own_build(settings: Settings, plan: Plan) -> OwnBuild | None:
    """Return the note of the image that this machine built from exactly this plan, or None."""
    try:
        note = _NOTE.fullmatch(_note_of_build(settings, plan).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if note is None:
        return None
    layers = tuple(note["layers"].split(",")) if note["layers"] else ()
    return OwnBuild(**note.groupdict() | {"layers": layers, "config": note["config"] or ""})


def with_content(client: EngineClient, build: OwnBuild) -> OwnBuild:
    """Return the note of an image that was just built with its layers and its configuration, where the engine has it."""
    found = client.find_image(build.digest)
    return build if found is None else replace(build, layers=found.layers, config=found.config)


def built_digest(settings: Settings, plan: Plan) -> str | None:
    """Return the digest (`sha256:…`) of the image that this machine built from exactly this plan, or None."""
    note = own_build(settings, plan)
    return note.digest if note else None


def is_other_recipe(recipe: str | None, plan: Plan) -> bool:
    """Return whether a recipe is known, and another one than this release's for the lock."""
    return recipe is not None and recipe != recipe_digest(plan)


def built_by_other_recipe(settings: Settings, plan: Plan, digest: str) -> bool:
    """Return whether this machine noted that it built the image of a digest by another recipe than this release's."""
    return is_other_recipe(recipe_of_image(settings, digest).recipe, plan)


def find_built(client: EngineClient, plan: Plan, tag: str) -> Built | None:
    """Return the image `tag` when the engine has it and this machine built it from exactly this plan.

    One that an earlier release built from the same lock by another recipe is another image: it is built again.
    """
    digest = built_digest(client.settings, plan)
    if digest is None or built_by_other_recipe(client.settings, plan, digest):
        return None
    return find_image(client, tag, digest)


def find_image(client: EngineClient, tag: str, digest: str) -> Built | None:
    """Return the image `tag` when the engine has it and its digest is `digest`."""
    image = client.find_image(tag)
    return Built(tag=tag, digest=image.id, size=image.size) if image is not None and image.id == digest else None
