"""Finding the lock of a cell: the one that was named, the committed one, the one this machine made earlier."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from envbuild.components import absent
from envbuild.errors import DataError, EnvbuildError, HostError, LockError
from envbuild.lock.files import Locked, read_lock
from envbuild.lock.inputs import Inputs
from envbuild.lock.model import COMPAT, Lock, Missing
from envbuild.matrix.cell import ARCHITECTURE, X86_64
from envbuild.matrix.model import AxisName
from envbuild.paths import data_dir
from envbuild.stacks.parts import digest_of
from envbuild.util.names import shown
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from envbuild.settings import Settings

_WHY = 600
"""Characters of why an input is missing: a host's name has 253 at most, and an address that it stands in has more."""


def lock_name(inputs: Inputs) -> str:
    """Return the folder name of a cell's lock: the cell's id, and what else decides its inputs."""
    parts = [inputs.cell.id]
    if inputs.stack:
        parts.append(inputs.stack.name)
    if inputs.flavor != "runtime":
        parts.append(inputs.flavor)
    if inputs.te_source != "pypi":
        parts.append("te-git")
    if inputs.compat:
        parts.append("compat")
    stack = [digest_of(inputs.stack)] if inputs.stack else []
    asked = json.dumps(
        [[g.name, g.requirements] for g in inputs.python] + [inputs.os_runtime, inputs.os_builder, *stack]
    )
    return "-".join([*parts, hashlib.sha256(asked.encode()).hexdigest()[:6]])


def own_lock(settings: "Settings", inputs: Inputs) -> Path:
    """Return the folder of the lock that this machine made of a cell, whether there is one or not."""
    return settings.cache_dir / "locks" / lock_name(inputs)


def _candidates(settings: "Settings", inputs: Inputs) -> Iterator[Path]:
    # This machine's own first: it was made where the committed one no longer built, or where there was none.
    yield own_lock(settings, inputs)
    yield data_dir("matrices") / "locks" / lock_name(inputs)


def find_lock(settings: "Settings", inputs: Inputs) -> tuple[Locked, Path] | None:
    """Return the lock of exactly these inputs and its folder, a complete one if there is any, or None when there is none.

    Raises:
        DataError, LockError: there is one, it cannot be read, and there is no other.

    """
    incomplete_one: tuple[Locked, Path] | None = None
    unreadable: EnvbuildError | None = None
    for folder in _candidates(settings, inputs):
        if not (folder / "lock.json").is_file():
            continue
        try:
            found = read_lock(folder), folder
        except (DataError, LockError) as error:
            unreadable = unreadable or error
            continue
        if found[0].lock.complete:
            return found
        incomplete_one = incomplete_one or found
    if incomplete_one is None and unreadable is not None:
        raise unreadable
    return incomplete_one


def place_for(folder: Path, lock: Lock) -> Path:
    """Return where a new lock for `folder` goes: one with missing inputs goes next to a complete one, not in its place."""
    try:
        held = not lock.complete and read_lock(folder).lock.complete
    except (DataError, LockError):  # nothing there, or nothing of use
        held = False
    return folder.with_name(f"{folder.name}-incomplete") if held else folder


def check_fits(lock: Lock, inputs: Inputs, where: str) -> None:
    """Raise DataError when `lock` pins other things than `inputs` asks for."""
    stated = {
        "cell": _differing(lock.cell, inputs.cell.versions),
        "flavor": _not_equal(lock.flavor, inputs.flavor),
        "Transformer Engine's source": _not_equal(lock.te_source, inputs.te_source),
        "stack": _not_equal(lock.stack, inputs.stack.name if inputs.stack else None),
    }
    for what, words in stated.items():
        if words:
            raise DataError(
                f"the lock is for another {what}: {words}",
                where=where,
                hint="leave --lock out, or lock this cell: envbuild lock",
            )
    if inputs.compat and lock.source(COMPAT) is None:
        raise DataError(
            f"the lock has no {inputs.compat.package}, and the driver needs it",
            where=where,
            hint="leave --lock out, or lock this cell with the same --driver: envbuild lock",
        )


def _not_equal(found: str | None, asked: str | None) -> str:
    return "" if found == asked else f"{found}, not {asked}"


def _differing(found: Mapping[AxisName, str], asked: Mapping[AxisName, str]) -> str:
    """Return each axis in which two cells differ, in words: `te 2.11.0, not 2.12.0; mpi none, not openmpi`."""
    axes = sorted(axis for axis in found.keys() | asked.keys() if found.get(axis) != asked.get(axis))
    defaults = {axis: X86_64 if axis == ARCHITECTURE else absent(axis) for axis in axes}
    return "; ".join(
        f"{axis} {found.get(axis, defaults[axis])}, not {asked.get(axis, defaults[axis])}" for axis in axes
    )


def require_complete(lock: Lock, where: str, replaced: Collection[str] = ()) -> None:
    """Raise LockError listing every missing hash and the host that holds it, unless the lock has all that is needed.

    `replaced` names the stages that come from elsewhere, such as `base`: what only they need may be missing.
    """
    missing = lock.still_missing(replaced)
    if missing:
        raise incomplete(missing, where)


def incomplete(missing: tuple[Missing, ...], where: str, *, unreached: bool = False) -> LockError | HostError:
    """Return the error that lists `missing`; a HostError where a host that did not answer is why, in this very run."""
    lines = "".join(f"\n  - {m.what}: held by {m.host}{f' ({shown(m.why, _WHY)})' if m.why else ''}" for m in missing)
    return (HostError if unreached else LockError)(
        f"the lock is not complete: {count_of(len(missing), 'input has', 'inputs have')} no hash{lines}",
        where=where,
        hint=(
            "choose another release"
            if all(m.kind == "file" for m in missing)
            else "run `envbuild lock` with the same flags where these hosts (or mirrors in the settings) can be reached"
        )
        + "; `envbuild render --unlocked` renders tags and versions instead",
    )


def needed(inputs: Inputs, settings: "Settings") -> tuple[Missing, ...]:
    """Return what a lock of `inputs` must pin and where each hash is to be had, for a cell that has no lock."""
    index = urlsplit(settings.index_url).hostname or settings.index_url
    found = [
        Missing(what=f"digest of {i.reference} ({i.stage})", host=i.reference.split("/")[0], kind="image")
        for i in inputs.images
    ]
    archive = settings.debian_mirror if inputs.cell.versions["os"].startswith("debian") else settings.ubuntu_mirror
    wanted = ", ".join((*inputs.os_runtime, *inputs.os_builder))
    found.append(
        Missing(
            what=f"OS packages on {inputs.cell.versions['os']}: {wanted}",
            host=urlsplit(archive).hostname or archive,
            kind="os",
        )
    )
    for group in inputs.python:
        if group.requirements:
            host = urlsplit(group.index).hostname if group.index else index
            found.append(
                Missing(
                    what=f"{group.name} packages: {', '.join(group.requirements)}", host=host or index, kind="python"
                )
            )
    found += [Missing(what=f"source of {s.distribution} {s.version}", host=index, kind="sdist") for s in inputs.sdists]
    found += [
        Missing(what=f"source tree of {t.name} at {t.commit}", host=urlsplit(t.url).hostname or t.url, kind="tree")
        for t in inputs.trees
    ]
    if inputs.compat:
        host = urlsplit(settings.cuda_repository).hostname or settings.cuda_repository
        found.append(Missing(what=f"OS package {inputs.compat.package}", host=host, kind="file"))
    return tuple(found)
