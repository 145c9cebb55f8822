"""The files of a checkout: which of them are sources of what is compiled, and which folders hold none."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from envbuild.errors import HostError

SOURCES = (
    ".c",
    ".cc",
    ".cpp",
    ".cxx",
    ".cu",
    ".cuh",
    ".h",
    ".hh",
    ".hpp",
    ".hxx",
    ".inl",
    ".pyx",
    ".pxd",
    ".cmake",
    ".mk",
)
BUILT_BY = (
    "Makefile",
    "makefile",
    "GNUmakefile",
    "CMakeLists.txt",
    "meson.build",
    "setup.py",
    "setup.cfg",
    "pyproject.toml",
)
_PASSED_OVER = (".git", "__pycache__", "build", "node_modules")
"""Folders that hold no sources; hidden ones are passed over, too."""
MOST = 200_000
"""Files of a tree."""


def is_source(path: str) -> bool:
    """Return whether a file decides what is compiled: C, C++, CUDA, Cython, or what builds them."""
    name = path.rpartition("/")[2]
    return name in BUILT_BY or name.endswith(SOURCES)


def is_passed_over(folder: str) -> bool:
    """Return whether a folder of this name holds no sources."""
    return folder in _PASSED_OVER or folder.startswith(".")


def files_in(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files below a folder, by path, with what `lstat` says; no link is followed.

    A file that goes meanwhile is left out.

    Raises:
        HostError: there are too many files.

    """
    count = 0
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_passed_over(name))
        for name in sorted(names):
            count += 1
            if count > MOST:
                raise HostError(
                    f"the tree has more than {MOST} files", where=str(folder), hint="name the root of a checkout"
                )
            path = Path(place, name)
            try:
                found = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield str(path.relative_to(folder)), found
