"""A tar that came from outside, read as a stream within bounds: nothing is unpacked, and no more is kept than one member."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self, cast

from envbuild.util.names import shown

Kind = Literal["file", "folder", "link", "hard link", "device", "fifo"]
_HEADER = 1 << 20
"""Bytes of one extended header: a path, a link and extended attributes."""
_PATH = 4096
"""Bytes of a path; Linux takes no longer one."""
_DEPTH = 50
"""Extended headers in a row before one member; writers use two at most."""
_KINDS: dict[bytes, Kind] = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link",
    tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "device",
    tarfile.BLKTYPE: "device",
    tarfile.FIFOTYPE: "fifo",
}
_EXTENDED = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


class TarError(ValueError):
    """A tar that is damaged, of a kind that no image has, or out of bounds."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much of a tar is read."""

    bytes: int = 512 << 30
    """All of it, unpacked."""
    members: int = 1_000_000


class Readable(Protocol):
    """What bytes are read from."""

    def read(self, count: int, /) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""


class Body:
    """The content of one file."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count`; none at the end.

        Raises:
            TarError: the tar ends before the file does.

        """
        try:
            return self._stream.read(count)
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise error if isinstance(error, TarError) else TarError(f"a damaged tar ({error})") from None


@dataclass(frozen=True, kw_only=True)
class Member:
    """One member. `path` is relative, without `.` and `..`; empty for the root itself."""

    path: str
    kind: Kind
    size: int
    mode: int
    owner: int
    group: int
    mtime: float
    link: str
    """Where a link leads, as it is written; the device's numbers of a device."""
    body: "Body | None"
    """The content of a file, to be read before the next member is asked for."""


class _Info(tarfile.TarInfo):
    """A header, refused where reading it would take memory or go on without an end."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        # tarfile calls this for every header, and for the one behind an extended header again, each inside the other.
        stream = cast("_Tar", tar)
        if self.type in _EXTENDED:
            stream.extended += 1
            if self.size > _HEADER or stream.extended > _DEPTH:
                raise TarError("an extended header out of bounds")
        elif self.type not in _KINDS:
            raise TarError(f"a member of the unknown kind {self.type!r}")
        return super()._proc_member(tar)  # type: ignore[misc]  # documented in tarfile.py as the place to override

    def _proc_gnusparse_10(self, *_: Any) -> None:
        raise TarError("a sparse file")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> Self:
        """Read the next header; a damaged one is an error wherever it stands, and not the end of the tar."""
        try:
            return super().fromtarfile(tarfile_)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise TarError(f"a damaged header ({error})") from None


class _Tar(tarfile.TarFile):
    extended = 0
    tarinfo = _Info


class _Counted:
    """A stream of which no more than a number of bytes is read."""

    def __init__(self, stream: Readable, limit: int) -> None:
        self.stream, self.left, self.limit = stream, limit, limit

    def read(self, count: int) -> bytes:
        # tarfile takes a short answer for the end, and a pipe gives what it has
        piece = bytearray()
        while len(piece) < count and (more := self.stream.read(count - len(piece))):
            piece += more
        self.left -= len(piece)
        if self.left < 0:
            raise TarError(f"more than {self.limit:,} bytes unpacked")
        return bytes(piece)


def read_tar(stream: Readable, bounds: Bounds | None = None) -> Iterator[Member]:
    """Yield the members of a tar that is not compressed, in their order.

    Args:
        stream: only `read(n)` of it is used; it need not be able to go back.
        bounds: those of the largest images by default.

    Raises:
        TarError: it is damaged, holds a kind of member that no image has, leads outside, or is out of bounds.

    """
    bounds = bounds or Bounds()
    count = 0
    try:
        counted = cast("IO[bytes]", _Counted(stream, bounds.bytes))
        with _Tar.open(
            fileobj=counted, mode="r|", bufsize=1 << 18, errorlevel=2, errors="surrogateescape", encoding="utf-8"
        ) as tar:
            while (info := tar.next()) is not None:
                count += 1
                if count > bounds.members:
                    raise TarError(f"more than {bounds.members:,} members")
                yield _member(tar, info)
                tar.extended = 0
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps every one otherwise
    except (tarfile.TarError, EOFError, OverflowError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, TarError):
            raise
        raise TarError(f"a damaged tar ({shown(str(error))})") from None


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    for name in (info.name, info.linkname):
        if len(name.encode("utf-8", "surrogateescape")) > _PATH or "\0" in name:
            raise TarError(f"a path of more than {_PATH} bytes")
    parts = [part for part in info.name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise TarError(f"a path that leads outside: {shown(info.name)}")
    if info.size < 0:
        raise TarError("a member of negative size")
    kind = _KINDS[info.type]
    stream = tar.extractfile(info) if kind == "file" else None
    return Member(
        path="/".join(parts),
        kind=kind,
        size=info.size if kind == "file" else 0,
        mode=info.mode,
        owner=info.uid,
        group=info.gid,
        mtime=info.mtime,
        link=f"{info.devmajor}:{info.devminor}" if kind == "device" else info.linkname,
        body=Body(stream) if stream else None,
    )


def files_in(path: Path, bounds: Bounds | None = None) -> dict[str, tuple[int, int]]:
    """Return where in a tar on disk the content of each regular file lies: its offset and its size, in bytes.

    Raises:
        TarError: as `read_tar`, or a file is in it twice.

    """
    bounds = bounds or Bounds()
    found: dict[str, tuple[int, int]] = {}
    end = path.stat().st_size
    try:
        with _Tar.open(path, mode="r:", errors="surrogateescape", encoding="utf-8") as tar:
            while (info := tar.next()) is not None:
                tar.extended = 0
                tar.members.clear()  # type: ignore[attr-defined]
                if not info.isreg():
                    continue
                if len(found) >= bounds.members or info.size < 0 or info.offset_data + info.size > end:
                    raise TarError("a file out of bounds")
                if info.name in found:
                    raise TarError(f"{shown(info.name)} twice")
                found[info.name] = (info.offset_data, info.size)
    except (tarfile.TarError, EOFError, OverflowError, ValueError, RecursionError) as error:
        if isinstance(error, TarError):
            raise
        raise TarError(f"a damaged tar ({shown(str(error))})") from None
    return found
