"""Records of this installation, in their compiled form where the same files were read and checked before."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from envbuild.util import compiled
from envbuild.util.bounded import read_file
from envbuild.util.model import Model, plain

_Record = TypeVar("_Record", bound=Model)


def records_of(
    folder: Path, pattern: str, kind: type[_Record], load: Callable[[Path], tuple[_Record, ...]]
) -> tuple[_Record, ...]:
    """Return what `load` returns for a folder of data files.

    Args:
        folder: the folder; what `load` raises of it is raised.
        pattern: the names of its files.
        kind: the class of a record.
        load: reads and checks the folder.

    """
    key = key_of_files(folder, pattern)
    if key is None:
        return load(folder)
    name = kind.__name__.lower()
    kept = compiled.read(name, key)
    if kept is not None:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return tuple(map(kind.from_plain, filter(None, kept)))
    found = load(folder)
    compiled.keep(name, key, [plain(record) for record in found])
    return found


def key_of_files(folder: Path, pattern: str) -> str | None:
    """Return the key of what is made from the files of a folder with such names; None where one cannot be read."""
    try:
        parts = [each for path in sorted(folder.glob(pattern)) for each in (path.name.encode(), read_file(path))]
    except OSError:
        return None
    return compiled.key_of(*parts)
