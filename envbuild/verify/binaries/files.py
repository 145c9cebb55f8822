"""The files that the loader of an image, a folder or a wheel would meet: binaries, links, and a few texts.

An ELF file is spooled to one scratch file, read, and overwritten by the next; what is kept of it is a `Binary`.
"""

import contextlib
import os
import posixpath
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from envbuild.util.below import OutsideError, read_file
from envbuild.util.foreign_tar import Body, Member, TarError
from envbuild.util.names import shown
from envbuild.verify.binaries.elf import MAGIC, Binary, ElfError, read_elf

_LARGEST = 4 << 30
"""Bytes of an ELF file that is read; the largest that we know, libtorch_cuda.so of CUDA 11.8, has 1.6 GB."""
_BINARIES = 200_000
_NAMES = 20_000_000
"""Symbols that are kept of all files together; the default image has 1.2 million."""
_NAME_BYTES = 1 << 30
"""Bytes of those symbols; a C++ name has a hundred on average."""
_ENTRIES = 2_000_000
_LINKS = 1_000_000
_TEXT = 1 << 20
_RECORD = 32 << 20
_TEXTS = 256 << 20
_PIECE = 1 << 20
_HOPS = 40
"""Links that Linux follows in one path."""
_PARTS = 4096
"""Parts of a path that are followed, those of links among them."""
_KEPT = re.compile(r"etc/ld\.so\.conf|etc/ld\.so\.conf\.d/[^/]+\.conf|(?:.*/)?[^/]+\.dist-info/(?P<own>RECORD|WHEEL)")


@dataclass(kw_only=True)
class Files:
    """What was found. Paths are relative to the root, without a leading slash."""

    binaries: dict[str, Binary] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    """Symbolic links, as they are written."""
    texts: dict[str, str] = field(default_factory=dict)
    """The loader's configuration, and RECORD and WHEEL of each distribution."""
    unread: dict[str, str] = field(default_factory=dict)
    """ELF files that could not be read -> why."""
    folders: set[str] = field(default_factory=set)
    """Folders that hold something."""
    wheel: str = ""
    """The name of the wheel that was read; empty for an image or a folder."""
    _names: int = 0
    _name_bytes: int = 0
    _bytes: int = 0
    _entries: int = 0

    def note(self, path: str) -> None:
        """Count a file, and note the folders above it.

        Raises:
            TarError: too many.

        """
        self._entries += 1
        if self._entries > _ENTRIES:
            raise TarError(f"more than {_ENTRIES:,} files")
        folder = posixpath.dirname(path)
        while folder and folder not in self.folders:
            self.folders.add(folder)
            folder = posixpath.dirname(folder)

    def add(self, path: str, file: IO[bytes], size: int) -> None:
        """Read the ELF file `file` and keep what is asked of it later.

        Raises:
            TarError: more binaries or symbols than any image has.

        """
        try:
            binary = read_elf(file, posixpath.basename(path), size)
        except ElfError as error:
            self.unread[path] = str(error)
        else:
            self.binaries[path] = binary
            self._names += len(binary.offered) + len(binary.wanted)
            self._name_bytes += binary.name_bytes
        if len(self.binaries) + len(self.unread) > _BINARIES or self._names > _NAMES:
            raise TarError(f"more than {_BINARIES:,} binaries or {_NAMES:,} symbols")
        if self._name_bytes > _NAME_BYTES:
            raise TarError(f"symbols whose names have more than {_NAME_BYTES:,} bytes")

    def add_link(self, path: str, target: str) -> None:
        """Keep a symbolic link.

        Raises:
            TarError: more links than any image has.

        """
        self.links[path] = target
        if len(self.links) > _LINKS:
            raise TarError(f"more than {_LINKS:,} links")

    def add_text(self, path: str, body: bytes) -> None:
        """Keep a text.

        Raises:
            TarError: more of them than any image has.

        """
        self._bytes += len(body)
        if self._bytes > _TEXTS:
            raise TarError(f"more than {_TEXTS:,} bytes of RECORDs")
        self.texts[path] = body.decode("utf-8", "surrogateescape")

    def real(self, path: str) -> str:
        """Return where a path leads inside the root, its links followed; the path where a link goes in circles."""
        done: list[str] = []
        left = [part for part in reversed(path.split("/")) if part and part != "."]
        hops = steps = 0
        while left:
            part = left.pop()
            steps += 1
            if steps > _PARTS:
                return path
            if part == "..":
                del done[-1:]
                continue
            done.append(part)
            target = self.links.get("/".join(done))
            if target is None:
                continue
            hops += 1
            if hops > _HOPS:
                return path
            if target.startswith("/"):
                done.clear()
            else:
                done.pop()
            left.extend(part for part in reversed(target.split("/")) if part and part != ".")
        return "/".join(done)


def kept_text(path: str) -> int:
    """Return how many bytes of a text are kept, 0 where it is of no concern."""
    match = _KEPT.fullmatch(path)
    return 0 if match is None else _RECORD if match["own"] == "RECORD" else _TEXT


class _Joined:
    """Bytes that were read already, and the rest of their file."""

    def __init__(self, first: bytes, rest: Body) -> None:
        self.first, self.rest = first, rest

    def read(self, count: int) -> bytes:
        if self.first:
            piece, self.first = self.first[:count], self.first[count:]
            return piece
        return self.rest.read(count)


class Reader:
    """Takes the members of a tar one after the other, and leaves them readable for who comes next."""

    def __init__(self, folder: Path) -> None:
        self.files = Files()
        self._spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as this reader

    def take(self, member: Member) -> Member:
        """Read a member as far as the loader is concerned; return it with its whole content still to be read.

        Raises:
            TarError: the tar is damaged or out of bounds.

        """
        if member.kind == "folder":
            return member
        self.files.note(member.path)
        if member.kind == "link":
            self.files.add_link(member.path, member.link)
        elif member.kind == "hard link":
            self._again(member.path, "/".join(part for part in member.link.split("/") if part not in {"", "."}))
        if member.body is None:
            return member
        limit = kept_text(member.path)
        if limit > 0 and member.size <= limit:
            body = b"".join(iter(lambda: member.body.read(_PIECE), b""))  # type: ignore[union-attr]  # checked above
            self.files.add_text(member.path, body)
            return replace(member, body=_body(_Joined(body, member.body)))
        first = member.body.read(4)
        whole = _Joined(first, member.body)
        if first != MAGIC:
            return replace(member, body=_body(whole))
        if member.size > _LARGEST:
            self.files.unread[member.path] = f"more than {_LARGEST:,} bytes"
            return replace(member, body=_body(whole))
        self._spool.seek(0)
        self._spool.truncate()
        while piece := whole.read(_PIECE):
            self._spool.write(piece)
        self._spool.flush()
        self.files.add(member.path, self._spool, member.size)
        self._spool.seek(0)
        return replace(member, body=Body(self._spool))

    def _again(self, path: str, other: str) -> None:
        if other in self.files.binaries:
            self.files.binaries[path] = self.files.binaries[other]

    def close(self) -> None:
        """Let go of the scratch file."""
        self._spool.close()


def _body(stream: _Joined) -> Body:
    from typing import cast

    return Body(cast("IO[bytes]", stream))


def read_folder(folder: Path) -> Files:
    """Read the binaries below a folder of this machine. Links are kept as they are and never followed.

    Raises:
        TarError: more than any image has.
        OSError: the folder cannot be read.

    """
    files = Files()
    for path in _walk(str(folder)):
        relative = os.path.relpath(path, folder)
        status = os.lstat(path)
        files.note(relative)
        if stat.S_ISLNK(status.st_mode):
            files.add_link(relative, str(Path(path).readlink()))
        if not stat.S_ISREG(status.st_mode):
            continue
        if limit := kept_text(relative):
            with contextlib.suppress(OSError, OutsideError):
                files.add_text(relative, read_file(Path(path), limit=limit))
            continue
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            files.unread[relative] = error.strerror or str(error)
            continue
        with os.fdopen(handle, "rb") as file:
            if stat.S_ISREG(os.fstat(handle).st_mode) and file.read(4) == MAGIC:
                files.add(relative, file, os.fstat(handle).st_size)
    return files


def _walk(folder: str) -> Iterator[str]:
    left = [folder]
    while left:
        here = left.pop()
        try:
            with os.scandir(here) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except PermissionError:
            continue
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.path)
            else:
                yield entry.path


def read_wheel_binaries(path: Path, folder: Path) -> Files:
    """Read the binaries in a wheel, where an installer puts them: its `.data/platlib` lies at the top.

    Args:
        path: the wheel.
        folder: for scratch files.

    Raises:
        ValueError: it is no wheel, it is damaged, or it is out of bounds.

    """
    files = Files(wheel=path.name)
    try:
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryFile(dir=folder) as spool:
            for info in archive.infolist():
                name = re.sub(r"^[^/]+\.data/(?:platlib|purelib)/", "", info.filename)
                parts = [part for part in name.split("/") if part not in {"", "."}]
                if info.is_dir() or ".." in parts or not parts:
                    continue
                place = "/".join(parts)
                files.note(place)
                with archive.open(info) as member:
                    first = member.read(4)
                    if (limit := kept_text(place)) and info.file_size <= limit:
                        files.add_text(place, first + member.read(limit))
                    elif first == MAGIC:
                        spool.seek(0)
                        spool.truncate()
                        size = _copy(first, member, spool)
                        files.add(place, spool, size)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError, TarError) as error:
        raise ValueError(f"it cannot be read: {shown(str(error))}") from None
    return files


def _copy(first: bytes, member: IO[bytes], spool: IO[bytes]) -> int:
    size = spool.write(first)
    while piece := member.read(_PIECE):
        size += spool.write(piece)
        if size > _LARGEST:
            raise TarError(f"a binary of more than {_LARGEST:,} bytes")
    spool.flush()
    return size
