"""Trials of shared libraries: whether each library that a component's binaries ask for is in the set that is installed."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.curate.ranges import RemoteWheel
from envbuild.curate.trials.files import Files
from envbuild.errors import LockError
from envbuild.lock.index import IndexFile
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

_LIBRARY = re.compile(r"[^/]+\.so(?:\.\d+)*")
# Of glibc and gcc's runtime, which every image has, and of the driver, which is the host's.
_OF_THE_SYSTEM = re.compile(
    r"(?:ld-linux-x86-64\.so\.2|linux-vdso\.so\.1|lib(?:c|m|dl|rt|util|pthread|resolv|gcc_s|stdc\+\+|gomp)\.so\.\d+)"
)
_OF_THE_DRIVER = re.compile(r"lib(?:cuda|nvidia-[a-z0-9-]+)\.so\.1")


@dataclass(frozen=True, kw_only=True)
class LibrariesFound:
    """What one trial of libraries found."""

    binaries: int
    needed: int
    missing: tuple[str, ...]
    """`PATH needs NAME` of what no wheel of the set holds."""


def needed_of(files: Files, wheel: IndexFile) -> Mapping[str, list[str]]:
    """Return the DT_NEEDED of each shared library in `wheel`, by path. Read once: a library may have a gigabyte.

    Raises:
        LockError: the wheel cannot be read, or a library in it is none.

    """

    def make() -> dict[str, Any]:
        paths = [path for path in files.paths(wheel) if is_library(path)]
        if not paths:
            return {}
        with RemoteWheel(files.settings, wheel) as archive:
            return {path: _needed(archive, path) for path in paths}

    found: Mapping[str, list[str]] = files.note(wheel, "needed", make)
    return found


def is_library(path: str) -> bool:
    """Return whether the name of `path` is that of a shared library."""
    return _LIBRARY.fullmatch(path.rpartition("/")[2]) is not None


def _needed(archive: RemoteWheel, path: str) -> list[str]:
    from elftools.common.exceptions import ELFError
    from elftools.elf.dynamic import DynamicSegment
    from elftools.elf.elffile import ELFFile

    # the dynamic section lies behind the kernels, and its names before them: all of the file must be unpacked
    with scratch("library") as folder:
        place = folder / "library.so"
        with place.open("wb") as out:
            for piece in archive.stream(path):
                out.write(piece)
        try:
            with place.open("rb") as file:
                for segment in ELFFile(file).iter_segments("PT_DYNAMIC"):
                    if isinstance(segment, DynamicSegment):
                        return [str(getattr(tag, "needed", "")) for tag in segment.iter_tags("DT_NEEDED")]
        except (ELFError, ValueError, KeyError, OverflowError) as error:
            raise LockError(f"{shown(path)} is not a shared library: {shown(str(error))}") from None
    return []


def provided_by(files: Files, wheels: Iterable[IndexFile]) -> frozenset[str]:
    """Return the names of the libraries that `wheels` hold."""
    return frozenset(path.rpartition("/")[2] for wheel in wheels for path in files.paths(wheel) if is_library(path))


def try_libraries(needed: Mapping[str, list[str]], provided: frozenset[str]) -> LibrariesFound:
    """Look up what binaries ask for.

    Args:
        needed: path of a binary -> the libraries that it names.
        provided: what the set holds.

    """
    missing = [
        shown(f"{path} needs {name}, which no wheel of the set holds")
        for path, names in sorted(needed.items())
        for name in names
        if name not in provided and not _OF_THE_SYSTEM.fullmatch(name) and not _OF_THE_DRIVER.fullmatch(name)
    ]
    return LibrariesFound(binaries=len(needed), needed=sum(map(len, needed.values())), missing=tuple(missing))
