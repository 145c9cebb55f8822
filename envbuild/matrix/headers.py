"""The data files as bytes, and what the command line needs of them before it knows whether it needs the matrix."""

import contextlib
import hashlib
import json
from pathlib import Path

from envbuild.errors import DataError
from envbuild.paths import data_dir
from envbuild.util import compiled, keys
from envbuild.util.bounded import read_file


def _bytes(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise DataError(
            f"the data file cannot be read: {error.strerror}", where=str(path), hint="correct the file"
        ) from None


def axis_headers() -> tuple[tuple[str, str, str], ...]:
    """Return (name, title, use) of every axis of this installation, by the order of its files.

    Only the head of each file is read: the command line needs the names before it knows whether it needs the matrix.
    """
    folder = data_dir("matrices")
    key = keys.key_of(bytes.fromhex(digest_of(folder)))
    kept = compiled.read("axes", key)
    if kept is not None:
        with contextlib.suppress(TypeError, ValueError):
            return tuple((str(name), str(title), str(use)) for name, title, use in map(json.loads, kept))
    import tomli

    found = []
    for body in data_files(folder)[0].values():
        try:
            axis = tomli.loads(body.partition(b"\n[[")[0].decode()).get("axis")
        except ValueError:
            continue  # the loader names the mistake when the matrix is read
        if axis and "name" in axis:
            found.append((str(axis["name"]), str(axis.get("title", axis["name"])), str(axis.get("use", ""))))
    compiled.keep("axes", key, found)
    return tuple(found)


def digest_of(folder: Path) -> str:
    """Return the sha256 (hex) over the names and bytes of the data files of `folder`, read again only where one changed.

    Raises:
        DataError: one cannot be read.

    """
    place = str(folder)
    return keys.hash_of_files(f"the axes of {place}", keys.files_in(place, ".toml"), lambda: data_files(folder)[1])


def data_files(folder: Path) -> tuple[dict[Path, bytes], str]:
    """Return the data files of `folder`, and the sha256 (hex) over their names and bytes.

    Raises:
        DataError: one cannot be read.

    """
    bodies = {path: _bytes(path) for path in sorted(folder.glob("*.toml"))}
    digest = hashlib.sha256()
    for path, body in bodies.items():
        digest.update(path.name.encode() + b"\0" + body + b"\0")
    return bodies, digest.hexdigest()
