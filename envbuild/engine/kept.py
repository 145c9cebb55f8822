"""What a build keeps for later ones: wheels that it compiled, and Debian roots."""

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from envbuild.engine.bootstrap import checksum_of
from envbuild.errors import LockError
from envbuild.plan.plan import Plan
from envbuild.plan.stages import Stage
from envbuild.settings import Settings
from envbuild.util.names import FileName, Sha256, checked
from envbuild.util.scratch import scratch

# Bytes of a wheel's record and of a root's checksum that are read; each has fewer.
_RECORD_BYTES = 2**20
# The start of a note on a wheel that no trusted key signed.
_UNSIGNED = "unsigned "


def place_of_wheel(settings: Settings, plan: Plan, axis: str) -> Path:
    """Return the folder where the wheel of `axis` is kept, if it is: by the key of the stage that makes it."""
    return settings.cache_dir / "wheels" / f"{axis}-{plan.stage(f'wheel-{axis}').key[:32]}"


def kept_wheel(settings: Settings, plan: Plan, axis: str, substitutes: Collection[str] = ()) -> Path | None:
    """Return the folder of the wheel that an earlier build made from the same inputs, or None; see `input_replaced`."""
    if input_replaced(plan, axis, substitutes):
        return None
    folder = place_of_wheel(settings, plan, axis)
    return folder if wheel_fault(folder) is None else None


def input_replaced(plan: Plan, axis: str, substitutes: Collection[str]) -> bool:
    """Return whether an input of the wheel of `axis` is replaced: any but what else is compiled, and the repository.

    Args:
        plan: the plan of the build.
        axis: the component.
        substitutes: the stages that come from elsewhere.

    """
    if not substitutes:
        return False
    names = {name for c in plan.components if c.axis != axis for name in (c.axis, *c.downloads)}
    if plan.stack:
        names.add(plan.stack.repository.name)
    return not {f"src-{name}" for name in names}.issuperset(substitutes)


def wheel_fault(folder: Path) -> str | None:
    """Return what is wrong with a kept wheel: `missing`, or why it is not what its record says; None when all is right."""
    record = folder / "record.json"
    try:
        with record.open("rb") as file:
            stated = json.loads(file.read(_RECORD_BYTES))
        name, digest = checked(FileName, stated["wheel"]), checked(Sha256, stated["sha256"])
    except FileNotFoundError:
        return "missing"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "its record cannot be read"
    return None if sha256_of(folder / name) == digest else f"{name} is not the file of its record"


def keep_wheel(made: Path, kept: Path, *, replace: bool) -> None:
    """Move a finished wheel to its place in one step: whoever finds it there finds all of it.

    Args:
        made: the folder that holds it.
        kept: its place.
        replace: whether it replaces a sound one.

    Raises:
        OSError: it cannot be moved there.

    """
    if not replace and wheel_fault(kept) is None:
        return  # another cell's run was faster, and may be reading it
    with contextlib.suppress(FileNotFoundError):
        kept.rename(made.with_name("replaced"))
    try:
        made.rename(kept)
    except OSError:
        if wheel_fault(kept) is not None:  # another run's, put there meanwhile, is as good
            raise


def inputs_file(folder: Path) -> Path:
    """Return where the inputs of a kept wheel are noted: next to its folder, which builds take as it is."""
    return folder.with_name(f"{folder.name}.json")


def keep_inputs(folder: Path, stage: Stage) -> None:
    """Note what a kept wheel was compiled from: the text that its key is the sha256 of.

    Args:
        folder: the wheel's place.
        stage: the stage that makes it.

    Raises:
        OSError: it cannot be written.

    """
    place = inputs_file(folder)
    with contextlib.suppress(OSError):
        if place.read_text(encoding="utf-8") == stage.text:
            return
    with scratch("inputs", folder.parent) as new:
        made = new / "inputs.json"
        made.write_text(stage.text, encoding="utf-8")
        made.rename(place)


def _note_of_taken(settings: Settings, sha256: str) -> Path:
    return settings.cache_dir / "taken" / checked(Sha256, sha256)


def remember_taken(settings: Settings, sha256: str, origin: str) -> None:
    """Note that a wheel came from elsewhere, or from steps that did: this machine must not sign it as compiled here.

    Raises:
        OSError: it cannot be written.

    """
    place = _note_of_taken(settings, sha256)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(origin, encoding="utf-8")


def remember_compiled(settings: Settings, folder: Path) -> None:
    """Note that the wheel in a folder was compiled here, whether or not an equal one came from elsewhere before.

    A build that takes finished steps from a registry cannot know that: nobody signs those.

    Args:
        settings: where the note is kept, and where steps may come from.
        folder: what this run has made, before it is moved to a place where another run's may be.

    Raises:
        LockError: it has no record of a wheel.
        OSError: the note cannot be written.

    """
    fault = wheel_fault(folder)
    if fault is not None:
        raise LockError(f"the compiled wheel is not to be kept: {fault}", where=str(folder), hint="build it again")
    sha256 = json.loads((folder / "record.json").read_bytes())["sha256"]
    if settings.cache_from:
        remember_taken(settings, sha256, settings.cache_from)
    else:
        _note_of_taken(settings, sha256).unlink(missing_ok=True)


def taken_from(settings: Settings, sha256: str) -> str | None:
    """Return where a wheel, or steps that made it, came from; None for one that was compiled here."""
    try:
        with _note_of_taken(settings, sha256).open(encoding="utf-8", errors="replace") as file:
            return file.read(_RECORD_BYTES)
    except FileNotFoundError:
        return None


def unsigned_origin(origin: str) -> str:
    """Return the origin of a wheel, for `remember_taken`, as that of one that no trusted key signed."""
    return f"{_UNSIGNED}{origin}"


def wheels_from(settings: Settings, plan: Plan) -> str | None:
    """Return where the first kept wheel of a plan came from that a trusted key signed; None where none did."""
    return next((_in_one_word(origin) for origin in _origins(settings, plan) if not origin.startswith(_UNSIGNED)), None)


def unsigned_wheels_from(settings: Settings, plan: Plan) -> str | None:
    """Return where the first kept wheel of a plan came from that was not compiled here and that no trusted key signed."""
    return next((_in_one_word(origin) for origin in _origins(settings, plan) if origin.startswith(_UNSIGNED)), None)


def _origins(settings: Settings, plan: Plan) -> Iterator[str]:
    for component in plan.components:
        folder = place_of_wheel(settings, plan, component.axis)
        if wheel_fault(folder) is None:
            origin = taken_from(settings, json.loads((folder / "record.json").read_bytes())["sha256"])
            if origin is not None:
                yield origin


def _in_one_word(origin: str) -> str:
    return re.sub(r"[^!-~]", "", origin.replace(" ", "-"))[:500] or "elsewhere"


def sha256_of(file: Path) -> str | None:
    """Return the sha256 of a file's content, or None when there is no such file."""
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return None


def root_state(kept: Path) -> str:
    """Return `whole`, `damaged` or `missing`: how a kept root compares with the checksum next to it."""
    if not kept.is_file():
        return "missing"
    try:
        with checksum_of(kept).open(encoding="ascii", errors="replace") as file:
            stated = file.read(_RECORD_BYTES).strip()
    except OSError:
        stated = ""
    return "whole" if stated and stated == sha256_of(kept) else "damaged"
