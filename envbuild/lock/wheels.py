"""The wheels that a lock's Python can install, by name and hash, and those of them that lie in folders of the settings."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from envbuild.errors import LockError
from envbuild.lock.model import Lock
from envbuild.lock.python import local_wheel, named_wheels
from envbuild.settings import Settings
from envbuild.util.names import shown

# PEP 600: the older names of three of its platforms, and the oldest glibc of each architecture.
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_OLDEST = {"x86_64": 5, "aarch64": 17}
# Two digits each: a lock may come from anybody, and there is a tag for every version up to this one.
_VERSION = re.compile(r"(\d{1,2})\.(\d{1,2})(?!\d)", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class LockedWheel:
    """One file that a lock names, and that its Python can install."""

    set_name: str
    project: str
    version: str
    filename: str
    sha256: str


def compatible_wheels(lock: Lock, pylocks: Mapping[str, str]) -> tuple[LockedWheel, ...]:
    """Return each wheel of a lock that its Python can install on its OS.

    A package may have several. uv chooses the best of those that it sees, so whoever replaces an index needs them all.

    Args:
        lock: the lock.
        pylocks: its pylock files, by the name of their set.

    Raises:
        LockError: a pylock or the cell's versions cannot be read, or no wheel of a package fits.

    """
    cell = lock.as_cell
    python, glibc = cell.versions["python"], cell.versions["glibc"]
    try:
        tags = frozenset(tags_of(python, glibc, cell.arch))
    except ValueError:
        what = f"the cell's Python {shown(python)} or glibc {shown(glibc)} is no version"
        raise LockError(what, where="lock.json", hint="lock again") from None
    found: list[LockedWheel] = []
    for python_set in lock.python:
        for project, version, files in named_wheels(pylocks[python_set.name], cell.arch) if python_set.packages else ():
            fitting = [
                LockedWheel(set_name=python_set.name, project=project, version=version, filename=name, sha256=sha256)
                for name, sha256 in files
                if fits(name, tags)
            ]
            if not fitting:
                raise LockError(
                    f"the lock names no wheel of {project} {version} for Python {cell.versions['python']}",
                    where=f"pylock.{python_set.name}.toml",
                    hint="lock again",
                )
            found += fitting
    return tuple(found)


def tags_of(python: str, glibc: str, machine: str) -> Iterator[Tag]:
    """Yield the tags of the wheels that CPython on Linux can install.

    Args:
        python: its version, of which major and minor count.
        glibc: the OS' glibc, such as 2.36.
        machine: x86_64 or aarch64.

    Raises:
        ValueError: one of them is no version.

    """
    versions = _VERSION.match(python), _VERSION.match(glibc)
    if versions[0] is None or versions[1] is None:
        raise ValueError("no version of Python or glibc")
    (major, minor), newest = (int(part) for part in versions[0].groups()), int(versions[1][2])
    platforms = []
    for each in range(newest, _OLDEST[machine] - 1, -1):
        platforms.append(f"manylinux_2_{each}_{machine}")
        if each in _LEGACY:
            platforms.append(f"{_LEGACY[each]}_{machine}")
    platforms.append(f"linux_{machine}")
    yield from cpython_tags((major, minor), platforms=platforms)
    yield from compatible_tags((major, minor), interpreter=f"cp{major}{minor}", platforms=platforms)


def fits(filename: str, tags: frozenset[Tag]) -> bool:
    """Return whether a wheel of this name has one of the tags."""
    try:
        return not tags.isdisjoint(parse_wheel_filename(filename)[3])
    except InvalidWheelFilename:
        return False


def wheels_in_folders(
    settings: Settings, lock: Lock, pylocks: Mapping[str, str]
) -> tuple[dict[str, Path], tuple[LockedWheel, ...]]:
    """Return the locked wheels that folders of `find_links` hold, by file name, and those that they do not.

    A file of a locked name with other content counts as missing.

    Raises:
        LockError: as `compatible_wheels`.

    """
    import hashlib

    found: dict[str, Path] = {}
    missing: list[LockedWheel] = []
    for wheel in compatible_wheels(lock, pylocks):
        path = local_wheel(settings, wheel.filename)
        same = False
        if path is not None:
            with path.open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
        if path is not None and same:
            found[wheel.filename] = path
        else:
            missing.append(wheel)
    return found, tuple(missing)
