"""Records of this installation, in their compiled form where the same files were read and checked before."""

import contextlib
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from envbuild.errors import DataError
from envbuild.util import compiled, keys
from envbuild.util.bounded import read_file
from envbuild.util.model import Model, plain

_Record = TypeVar("_Record", bound=Model)


def records_of(
    folder: Path,
    suffix: str,
    kind: type[_Record],
    load: Callable[[Path], tuple[_Record, ...]],
    later: tuple[str, ...] = (),
) -> tuple[_Record, ...]:
    """Return what `load` returns for a folder of data files.

    Args:
        folder: the folder; what `load` raises of it is raised.
        suffix: how the names of its files end.
        kind: the class of a record.
        load: reads and checks the folder.
        later: large fields that are not kept: whoever reads one of them waits for `load`.

    """
    key = key_of_files(folder, suffix)
    if key is None:
        return load(folder)
    name = kind.__name__.lower()
    kept = compiled.read(name, key)
    if kept is not None:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            whole = cache(lambda: load(folder))
            return tuple(
                kind.from_plain(values, later={field: _of_same(whole, values, later, field) for field in later})
                for values in json.loads(kept[0])
            )
    found = load(folder)
    compiled.keep(name, key, [[_without(record, later) for record in found]])
    return found


def _without(record: Model, fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in plain(record).items() if name not in fields}


def _of_same(
    whole: Callable[[], tuple[Model, ...]], values: dict[str, Any], later: tuple[str, ...], field: str
) -> Callable[[], Any]:
    """Return what gives a field of the record that has these values otherwise."""

    def read() -> Any:
        for each in whole():
            if _without(each, later) == values:
                return getattr(each, field)
        raise DataError("a record changed while it was read", where=str(values.get("id")), hint="run it again")

    return read


def key_of_files(folder: Path, suffix: str) -> str | None:
    """Return the key of what is made from the files of a folder whose names end so; None where one cannot be read."""
    files = keys.files_in(str(folder), suffix)

    def compute() -> str:
        parts = [each for path in map(Path, files) for each in (path.name.encode(), read_file(path))]
        return compiled.hash_of(parts)

    try:
        return keys.key_of(keys.hash_of_files(f"the {suffix} of {folder}", files, compute).encode())
    except OSError:
        return None
