"""The keys under which compiled forms are kept: hashes of data files and of modules, read again only where they changed.

A hash is taken from an earlier run by git's way with its index: a file is unchanged while its inode, size, time of writing
and time of change are, and no program can set the last of these. Two writes within one tick of the file system's clock look
alike, so nothing is kept of files that changed in the last seconds; they are hashed at each start. For the data files, the
records, the trials and the modules together this saves 8 ms of a `resolve`.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache

from envbuild.util import compiled

_FORMAT = 2
_SETTLED_NS = 5 * 10**9
"""How long ago the last change has to be: longer than any tick, and some difference of a file server's clock."""
_MOST_SETS = 50
_SOURCES = (
    "components",
    "matrix",
    *(f"evidence/{name}.py" for name in ("kept", "records", "report", "trials")),
    *(f"solver/{name}.py" for name in ("clauses", "compiled", "masks", "season")),
    *(f"util/{name}.py" for name in ("checked_model", "compiled", "keys", "model", "names", "patterns")),
)
"""What makes or reads a compiled form, below the package."""


def files_in(folder: str, suffix: str) -> list[str]:
    """Return the paths of the files of a folder whose names end so, sorted; none where it cannot be read."""
    try:
        return sorted(entry.path for entry in os.scandir(folder) if entry.name.endswith(suffix))
    except OSError:
        return []


def hash_of_files(what: str, files: Iterable[str], compute: Callable[[], str]) -> str:
    """Return what `compute` returns for files, from an earlier run where no file has changed since.

    Args:
        what: the name of this set of files, the folder among it.
        files: their paths, every one that `compute` reads.
        compute: reads the files and returns a hash over their names and bytes; what it raises is raised.

    """
    try:
        stated = [(path, os.stat(path)) for path in files]  # noqa: PTH116 - a tenth of pathlib's time
    except OSError:
        return compute()
    mark = compiled.hash_of(
        (repr([(path, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for path, s in stated]).encode(),)
    )
    known = _hashes().get(what)
    if known is not None and known[0] == mark:
        return known[1]
    before = time.time_ns()
    found = compute()
    if all(max(s.st_mtime_ns, s.st_ctime_ns) < before - _SETTLED_NS for _, s in stated):
        if len(_hashes()) >= _MOST_SETS:
            _hashes().clear()
        _hashes()[what] = mark, found
        compiled.keep("hashes", _own_key(), [_hashes()])
    return found


def _own_key() -> str:
    return compiled.hash_of((str(_FORMAT).encode(), __file__.encode()))


@cache
def _hashes() -> dict[str, tuple[str, str]]:
    """Return what is kept: name of a set of files -> hash over their times and sizes, hash over their bytes."""
    kept = compiled.read("hashes", _own_key())
    if kept is not None:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return {str(what): (str(mark), str(found)) for what, (mark, found) in json.loads(kept[0]).items()}
    return {}


@cache
def _code() -> str:
    """Return the hash of the modules that a compiled form depends on."""
    package = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    files = []
    for source in _SOURCES:
        place = f"{package}/{source}"
        files += [place] if source.endswith(".py") else files_in(place, ".py")

    def compute() -> str:
        parts: list[bytes] = []
        for name in files:
            with open(name, "rb", buffering=0) as file:  # noqa: PTH123
                parts += (name[len(package) :].encode(), file.read())
        return compiled.hash_of(parts)

    return hash_of_files(f"the modules of {package}", files, compute)


def key_of(*parts: bytes) -> str:
    """Return the name under which is kept what was made from `parts` by this version of the program."""
    return compiled.hash_of((str(_FORMAT).encode(), sys.version.encode(), _code().encode(), *parts))
