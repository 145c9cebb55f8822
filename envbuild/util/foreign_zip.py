"""A zip that came from outside: its directory is checked before anything of it is used, and nothing is unpacked.

Installers differ in what they make of a zip that says two things. So one that does is refused: a name twice, a name that
leads out, a link, bytes before the first member, a comment behind the last.
"""

import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from envbuild.util.names import shown

FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, UnicodeError)
"""What `zipfile` raises of a damaged file."""
_NAME = 1024
_PIECE = 1 << 20
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_ENCRYPTED = 0x1


class ZipError(ValueError):
    """A zip that is damaged, says two things, or is out of bounds."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much of a zip is read."""

    members: int = 200_000
    bytes: int = 32 << 30
    """All members, unpacked."""
    directory: int = 64 << 20
    """Bytes of the zip's own directory: it is read into memory before anything of it can be checked."""


ANY_WHEEL = Bounds()
"""More than any wheel that we know has: torch's, with 15,000 files of 2 GB, is the largest."""


@contextmanager
def opened_zip(path: Path, bounds: Bounds = ANY_WHEEL) -> Iterator[zipfile.ZipFile]:
    """Yield a zip whose directory is sound.

    Raises:
        ZipError: it is damaged, it names a member twice or outside its folder, it holds a link or anything else that is
            no file and no folder, it is encrypted or packed in a way that wheels are not, or it is out of bounds. Reading
            a member raises it for what is damaged there.

    """
    try:
        _check_end(path, bounds)
        with zipfile.ZipFile(path) as archive:
            check_directory(archive, bounds)
            yield archive
    except FAULTS as error:
        raise ZipError(f"it is damaged, or no zip file: {shown(str(error) or type(error).__name__)}") from None


def _check_end(path: Path, bounds: Bounds) -> None:
    """Check the size of the directory in the last record of the file, which no comment may follow."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < 22:
            raise ZipError("it is no zip")
        file.seek(-22, 2)
        end = file.read(22)
    if end[:4] != b"PK\x05\x06" or end[20:22] != b"\0\0":
        raise ZipError("it is no zip, or something follows its directory")
    length = int.from_bytes(end[12:16], "little")
    if length > bounds.directory:  # with zip64 this field is all ones, which is more
        raise ZipError(f"its directory has more than {bounds.directory:,} bytes")


def check_directory(archive: zipfile.ZipFile, bounds: Bounds) -> None:
    """Check every member of a zip by its directory.

    Raises:
        ZipError: as `opened_zip`.

    """
    members = archive.infolist()
    if len(members) > bounds.members:
        raise ZipError(f"more than {bounds.members:,} files")
    if members and min(info.header_offset for info in members) != 0:
        raise ZipError("something lies before its first file")
    seen: set[str] = set()
    folders: set[str] = set()
    total = 0
    for info in members:
        name = _checked_name(info)
        if name in seen:
            raise ZipError(f"it holds {shown(name)} twice")
        seen.add(name)
        folders |= {name[: slash.start()] for slash in re.finditer("/", name)}
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in {0, stat.S_IFDIR if info.is_dir() else stat.S_IFREG}:
            raise ZipError(f"{shown(name)} is a link or no plain file")
        if info.flag_bits & _ENCRYPTED or info.compress_type not in _METHODS:
            raise ZipError(f"{shown(name)} is encrypted, or packed in a way that no wheel is")
        total += info.file_size
        if total > bounds.bytes:
            raise ZipError(f"more than {bounds.bytes:,} bytes unpacked")
    files = {info.filename for info in members if not info.is_dir()}
    if both := sorted(files & folders):
        raise ZipError(f"{shown(both[0])} is a file and a folder")


def _checked_name(info: zipfile.ZipInfo) -> str:
    # `zipfile` cuts a name at its first zero byte: `orig_filename` is what the file says
    name = info.orig_filename
    parts = name.removesuffix("/").split("/")
    if (
        len(name) > _NAME
        or name != info.filename
        or not name.isprintable()
        or "\\" in name
        or any(part in {"", ".", ".."} for part in parts)
        or (len(parts[0]) > 1 and parts[0][1] == ":")
    ):
        raise ZipError(f"it holds {shown(name)!r}, which is no path below a folder")
    return name.removesuffix("/")


def pieces(archive: zipfile.ZipFile, name: str, limit: int) -> Iterator[bytes]:
    """Yield the content of one member, piece by piece.

    Raises:
        ZipError: it is damaged, or longer than `limit`.

    """
    try:
        done = 0
        with archive.open(name) as member:
            while piece := member.read(_PIECE):
                done += len(piece)
                if done > limit:
                    raise ZipError(f"{shown(name)} has more than {limit:,} bytes")
                yield piece
    except (*FAULTS, KeyError) as error:
        raise ZipError(f"{shown(name)} cannot be read: {shown(str(error))}") from None


def read_member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Return the content of one member.

    Raises:
        ZipError: as `pieces`.

    """
    return b"".join(pieces(archive, name, limit))
