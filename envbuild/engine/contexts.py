"""The external inputs of a build, downloaded and verified, as named contexts of buildx."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from envbuild.engine.kept import sha256_of
from envbuild.errors import LockError
from envbuild.lock.model import PythonSet
from envbuild.lock.python import local_wheel
from envbuild.lock.released import released_file
from envbuild.lock.sources import SourceStore
from envbuild.lock.wheels import wheels_in_folders
from envbuild.plan.plan import Plan
from envbuild.settings import Settings


def contexts_of(
    settings: Settings,
    plan: Plan,
    folder: Path,
    *,
    kept: Collection[str],
    substitutes: Mapping[str, str],
    note: Callable[[str], object],
) -> tuple[dict[str, str], bool]:
    """Download every external input of `plan` but the Debian root; return where each is, by the name of its context.

    The second part of the answer is whether every locked wheel is among them, so that no index need be asked.

    Args:
        settings: where the cache, clones and wheels of the user are.
        plan: what is built.
        folder: where folders that buildx takes are put together, under `contexts`.
        kept: names of sources that are not needed: the wheel that comes of them is there.
        substitutes: contexts that come from elsewhere, and from where.
        note: takes a line about what is done.

    Raises:
        HostError: an input cannot be reached.
        LockError: an input is not what the lock names.

    """
    files = settings.cache_dir / "files"
    uv = released_file(settings, plan.lock.uv, files)
    found = {"uv-wheel": _folder_of(folder, "uv-wheel", {"uv.whl": uv})}
    if settings.debs:
        found["debs"] = settings.debs
    wheels, whole = wheels_here(settings, plan)
    given = {**wheels, **_local_wheels(settings, plan.lock.python, wheels)}
    if given:
        found["wheels"] = _folder_of(folder, "wheels", given)
    store = SourceStore(settings=settings, note=note)
    for source in plan.lock.sources:
        if source.name not in kept and f"src-{source.name}" not in substitutes:
            note(f"fetching the source of {source.name} at {source.commit[:12]}")
            found[f"src-{source.name}"] = store.checkout(source)
    for file in plan.lock.files:
        if file.name not in kept and f"src-{file.name}" not in substitutes:
            path = released_file(settings, file, files)
            found[f"src-{file.name}"] = _folder_of(folder, f"src-{file.name}", {path.name: path})
    return {name: str(place) for name, place in found.items()} | dict(substitutes), whole


def wheels_here(settings: Settings, plan: Plan) -> tuple[dict[str, Path], bool]:
    """Return the plan's wheels that folders of the settings hold, by file name, and whether these are all that it needs."""
    if not any("://" not in place for place in settings.find_links) or not plan.lock.complete:
        return {}, False
    pylocks: dict[str, str] = {s.name: plan.lists[f"lock/pylock.{s.name}.toml"] for s in plan.lock.python if s.packages}
    try:
        found, missing = wheels_in_folders(settings, plan.lock, pylocks)
    except LockError:  # a package without a wheel that fits: the indexes are asked, and uv says what is wrong
        return {}, False
    return found, not missing


def _local_wheels(settings: Settings, sets: tuple[PythonSet, ...], seen: Mapping[str, Path]) -> dict[str, Path]:
    """Return the wheels that the lock has from a folder and that are not among those `seen`, which were hashed."""
    found: dict[str, Path] = {}
    for name in (w for s in sets for w in s.local_wheels if w not in seen):
        path = local_wheel(settings, name)
        if path is None:
            raise LockError(
                f"the lock takes {name} from a find-links folder, and no folder of the settings has it",
                hint="name the folder that holds it in the setting `find_links`, or lock again where the index serves it",
            )
        digest = sha256_of(path)
        if not any(digest in p.hashes for s in sets for p in s.packages):
            raise LockError(
                f"{name} is not the wheel that the lock names: its sha256 is {digest}",
                where=str(path.parent),
                hint="put the right file there, or lock again if the change is meant",
            )
        found[name] = path
    return found


def _folder_of(folder: Path, name: str, files: Mapping[str, Path]) -> Path:
    place = folder / "contexts" / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for target, source in files.items():
        try:
            os.link(source, place / target)
        except OSError:
            shutil.copyfile(source, place / target)
    return place
