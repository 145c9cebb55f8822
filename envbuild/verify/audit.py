"""Image -> audit: what an image contains, compared with its lock, without a GPU.

Two looks. One from outside reads the image's files as the engine hands them over, and needs no trust in the image. The
other runs a probe in the image's own Python, which alone can say what imports; it is confined, and its words are only
taken for what the first look cannot see.
"""

import shlex
import uuid
from collections.abc import Callable
from typing import Any

from envbuild.engine.client import last_line
from envbuild.engine.image import Image
from envbuild.errors import AuditError
from envbuild.lock.model import Lock
from envbuild.paths import data_dir
from envbuild.run.runtime import Runtime, runtime_for
from envbuild.settings import Settings
from envbuild.util.foreign_tar import TarError
from envbuild.util.names import shown
from envbuild.util.text import count_of
from envbuild.verify.binaries.files import Files
from envbuild.verify.binaries.image import binary_checks, reader
from envbuild.verify.checks import Audit
from envbuild.verify.contents import (
    apptainer_check,
    carried_check,
    files_check,
    locked_check,
    unlisted_check,
    volumes_check,
)
from envbuild.verify.installed import CARRIED, Tree, hold_to_records, read_tree
from envbuild.verify.judge import judge
from envbuild.verify.probe import LIMIT, read_probe
from envbuild.verify.wheels import Wheels

_PROBE_S = 900.0
"""Seconds that the probe may take: it imports every package, from a cold disk perhaps."""
_EXPORT_S = 3600.0
"""Seconds that the engine may take to hand the files over; 5.5 GB take half a minute."""
_VOLUMES = 64
"""Volumes that an image may declare: the engine makes each of them for every container."""


def audit(settings: Settings, image: str, *, deep: bool = False, note: Callable[[str], None] = lambda _: None) -> Audit:
    """Look into `image` and hold it against the expectation that it carries.

    Args:
        settings: say where the engine is, and the caches and indexes.
        image: its tag, digest or id, or the path of an archive, a layout, a .sif or a sandbox.
        deep: download each locked wheel whose RECORD is not kept here yet, to compare the installed files with it.
        note: called with what takes its time.

    Raises:
        HostError: no engine, or no such image; it is for another processor; with `deep`, an index that cannot be reached.
        AuditError: the image has no Python, or no expectation: it was not made by envbuild. Or it says what cannot be read.
        LockError: with `deep`, no index has a locked wheel.

    """
    runtime = runtime_for(settings, image)
    found = runtime.look_up(image, note)
    if len(found.volumes) > _VOLUMES:
        raise AuditError(
            f"the image declares {count_of(len(found.volumes), 'volume')}",
            where=image,
            hint="no image of envbuild has one",
        )
    runtime.require_runnable(found)
    facts = _probe(runtime, found)
    if facts["expected"] is None:
        raise AuditError(
            "the image does not list what must be in it",
            where=f"{image}: /{CARRIED}/expected.json",
            hint=_to_do(found),
        )
    note("reading the image's files")
    tree, binaries = _tree(runtime, found)
    installed = hold_to_records(tree)
    facts |= {
        "compilers": tree.compilers,
        "cuda_runtimes": tree.cuda_runtimes,
        "caches": tree.caches,
        "caches_total": tree.caches_total,
        # what the image's Python does not name, and what lies there all the same
        "distributions": {d.name: d.version for d in installed.distributions} | facts["distributions"],
    }
    lock, carried = carried_check(tree, found, facts)
    wheels = Wheels(settings)
    if deep and lock is not None:
        _fetch(settings, wheels, lock, note)
    checks = (
        carried,
        *judge(facts),
        *([volumes_check(found)] if found.volumes else []),
        *([apptainer_check()] if found.place is not None else []),
        files_check(installed, facts),
        unlisted_check(installed, facts["expected"]),
        locked_check(installed, tree, lock, facts, wheels),
        *binary_checks(binaries, facts, found.environment),
    )
    return Audit(image=image, digest=found.digest, checks=checks, facts=facts)


def _to_do(image: Image) -> str:
    """Return what to do about an image that gives no answer, by whether it says that envbuild built it."""
    if any(name.startswith("io.envbuild.") for name in image.labels):
        look = f"envbuild run {shlex.quote(image.reference)} -- python -V"
        return f"its labels say that envbuild built it: see `{shown(look)}`, and pull or build it again"
    return "it has no label of envbuild, and `envbuild audit` reads only images that envbuild built"


def _probe(runtime: Runtime, image: Image) -> dict[str, Any]:
    probe = (data_dir("dockerfiles") / "recipe" / "image-probe").read_bytes()
    word = uuid.uuid4().hex
    hint = _to_do(image)
    # The image's own entry point has no say: it would run instead.
    ran = runtime.confined(
        "audit",
        image,
        ["-", word],
        entrypoint="python",
        seconds=_PROBE_S,
        limit=LIMIT,
        stdin=probe,
    )
    if ran.fault:
        raise AuditError(f"the image's Python {ran.fault}", where=image.reference, hint=hint)
    if ran.code:
        what = f"the image's Python does not run: {last_line(ran) or 'it printed nothing'} (exit code {ran.code})"
        raise AuditError(what, where=image.reference, hint=hint)
    try:
        return read_probe(ran.out, word)
    except ValueError as error:
        raise AuditError(
            f"the output of the image's Python cannot be read: {error}", where=image.reference, hint=hint
        ) from None


def _tree(runtime: Runtime, image: Image) -> tuple[Tree, Files]:
    try:
        with runtime.export(image, seconds=_EXPORT_S) as stream, reader() as binaries:
            return read_tree(stream, binaries.take), binaries.files
    except TarError as error:
        raise AuditError(f"the image's files cannot be read: {error}", where=image.reference) from None
    except TimeoutError as error:
        raise AuditError(f"reading the image's files {error}", where=image.reference) from None


def _fetch(settings: Settings, wheels: Wheels, lock: Lock, note: Callable[[str], None]) -> None:
    from envbuild.lock.python import torch_index

    official = "https://download.pytorch.org/whl"
    for name in ("torch", "env"):
        python_set = lock.python_set(name)
        if python_set is None:
            continue
        indexes = [settings.index_url, *settings.extra_index_urls]
        if python_set.index and python_set.index.startswith(official):  # of foreign addresses this one alone is known
            indexes.insert(0, torch_index(settings, python_set.index))
        for package in python_set.packages:
            if not any(wheels.known(sha256) is not None for sha256 in package.hashes):
                wheels.fetch(package.name, package.version, package.hashes, indexes, note)
