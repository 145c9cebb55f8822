"""Trees of files that came from outside: their git id, a copy of them, an archive of them. No link is followed."""

import bz2
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from envbuild.errors import LockError
from envbuild.util.names import shown
from envbuild.util.space import is_full

_DEEPEST = 200  # folders in one another; Linux takes a path of 4096 characters
_MOST_FILES = 500_000
_MOST_BYTES = 16 * 2**30
_MOST_AT_ONCE = 2**24  # tarfile reads a member's extended header whole, and a file piece by piece


def tree_id(
    folder: Path,
    links: Mapping[str, str] | None = None,
    *,
    odd_modes: Mapping[bytes, bytes] | None = None,
    own: bool = False,
) -> str:
    """Return git's id of the tree of the files in `folder`, byte for byte, without asking git.

    Args:
        folder: the tree. A `.git` at its top is not part of it.
        links: path -> commit of its submodules; what lies there is not looked at.
        odd_modes: files whose mode in the tree is none that git writes today.
        own: whether we made the tree: a `.git` is then refused.

    Raises:
        LockError: something in it is neither a file, a link nor a folder, or is in the place of a submodule; it is too deep.
        OSError: it cannot be read.

    """
    split = {tuple(os.fsencode(path).split(b"/")): commit for path, commit in (links or {}).items()}
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if own and ".git" in os.listdir(handle):  # noqa: PTH208 - of a descriptor
            raise LockError("the tree holds .git", where=str(folder))
        digest = _folder_id(handle, b"", split, odd_modes or {}, 0)
    finally:
        os.close(handle)
    return (digest or _object_id(b"tree", b"")).hex()


def _object_id(kind: bytes, body: bytes) -> bytes:
    return hashlib.sha1(b"%s %d\0" % (kind, len(body)) + body, usedforsecurity=False).digest()


def _folder_id(
    handle: int | None, path: bytes, links: Mapping[tuple[bytes, ...], str], odd: Mapping[bytes, bytes], depth: int
) -> bytes | None:
    """Return the id of an open folder, None where git would not know it: there is no file in it.

    Without a handle the folder is missing, and would hold nothing but submodules that are missing, too.
    """
    if depth > _DEEPEST:
        raise LockError(f"the tree has folders nested deeper than {_DEEPEST}", where=_shown(path))
    below: dict[bytes, dict[tuple[bytes, ...], str]] = {}
    for parts, commit in links.items():
        below.setdefault(parts[0], {})[parts[1:]] = commit
    listed = os.listdir(handle) if handle is not None else []  # noqa: PTH208 - of a descriptor
    names = {os.fsencode(name) for name in listed}
    entries: list[tuple[bytes, bytes]] = []
    for name in names | set(below):
        if depth == 0 and name == b".git":
            continue
        inner = path + b"/" + name if path else name
        status = os.stat(name, dir_fd=handle, follow_symlinks=False) if name in names else None
        here = below.get(name, {})
        if here and status is not None and not stat.S_ISDIR(status.st_mode):
            raise LockError("something else is in the place of a submodule", where=_shown(inner))
        if () in here:
            mode, digest = b"160000", bytes.fromhex(here[()])
            entries.append((name + b"/", mode + b" " + name + b"\0" + digest))
        elif status is None or stat.S_ISDIR(status.st_mode):
            found = _subfolder_id(handle if status else None, name, inner, here, odd, depth + 1)
            if found is not None:
                entries.append((name + b"/", b"40000 " + name + b"\0" + found))
        elif stat.S_ISLNK(status.st_mode):
            target = os.fsencode(os.readlink(name, dir_fd=handle))
            entries.append((name, b"120000 " + name + b"\0" + _object_id(b"blob", target)))
        elif stat.S_ISREG(status.st_mode):
            digest, executable = _blob_id(cast("int", handle), name, inner)
            mode = b"100755" if executable else odd.get(inner, b"100644")
            entries.append((name, mode + b" " + name + b"\0" + digest))
        else:
            raise LockError("the tree contains something that is not a file, a link or a folder", where=_shown(inner))
    if not entries:
        return None
    # git sorts a folder as if its name ended in a slash
    return _object_id(b"tree", b"".join(line for _, line in sorted(entries)))


def _subfolder_id(
    handle: int | None,
    name: bytes,
    path: bytes,
    links: Mapping[tuple[bytes, ...], str],
    odd: Mapping[bytes, bytes],
    depth: int,
) -> bytes | None:
    if handle is None:
        return _folder_id(None, path, links, odd, depth)
    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
    try:
        return _folder_id(inner, path, links, odd, depth)
    finally:
        os.close(inner)


def _blob_id(handle: int, name: bytes, path: bytes) -> tuple[bytes, bool]:
    """Return the id of a file and whether its owner may run it."""
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
    with os.fdopen(opened, "rb") as file:
        status = os.fstat(opened)
        digest = hashlib.sha1(b"blob %d\0" % status.st_size, usedforsecurity=False)
        seen = 0
        while part := file.read(2**20):
            seen += len(part)
            digest.update(part)
        if not stat.S_ISREG(status.st_mode) or seen != status.st_size:
            raise LockError("a file of the tree changed while it was read", where=_shown(path), hint="run it again")
    return digest.digest(), bool(status.st_mode & 0o100)


def _shown(path: bytes) -> str:
    return shown(os.fsdecode(path))


def copy_tree(source: Path, target: Path, *, without: Collection[Path] = ()) -> None:
    """Copy the tree `source` to `target`, which may be an empty folder, links as links.

    Args:
        source: a folder whose files are files, links and folders alone.
        target: where to.
        without: paths below `source` that stay out.

    Raises:
        LockError: a file is neither, or was one and is no more.

    """

    def ignored(where: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(where, name) in without}

    def copied(file: str, to: str) -> str:
        if not stat.S_ISREG(Path(file).lstat().st_mode):
            raise LockError("the tree contains something that is not a file, a link or a folder", where=shown(file))
        return str(shutil.copy2(file, to, follow_symlinks=False))

    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, ignore=ignored, copy_function=copied)


class _Bounded(io.RawIOBase):
    """An unpacked stream that ends with an error when it is longer than any source tree."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__()
        self._stream = stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:  # plain-words: allow tell - the name that file objects have
        return self._stream.tell()  # plain-words: allow tell - the name that file objects have

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._check(offset if whence == 0 else 0)
        return self._stream.seek(offset, whence)

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= _MOST_AT_ONCE:
            raise tarfile.ReadError("a header in it is larger than any that a name needs")
        self._check(self._stream.tell() + size)  # plain-words: allow tell - the name that file objects have
        return self._stream.read(size)

    @staticmethod
    def _check(end: int) -> None:
        if end > 2 * _MOST_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {2 * _MOST_BYTES // 2**30} GiB")


@contextlib.contextmanager
def _unpacked(archive: Path) -> Iterator[IO[bytes]]:
    with archive.open("rb") as raw:
        start = raw.read(6)
        raw.seek(0)
        if start.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast("IO[bytes]", stream)
        elif start.startswith(b"\xfd7zXZ\0"):
            with lzma.LZMAFile(raw) as stream:
                yield cast("IO[bytes]", stream)
        elif start.startswith(b"BZh"):
            with bz2.BZ2File(raw) as stream:
                yield cast("IO[bytes]", stream)
        else:
            yield raw


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .tar, .tar.gz, .tar.xz or .tar.bz2 into `folder`: files, folders and links that stay in it.

    Raises:
        LockError: it is none, or holds anything else, or more than a source tree has.
        OSError: the disk is full.

    """
    files = size = 0
    try:
        with _unpacked(archive) as stream, tarfile.open(fileobj=cast("IO[bytes]", _Bounded(stream)), mode="r:") as tar:
            for member in tar:
                files += 1
                size += member.size
                if files > _MOST_FILES or size > _MOST_BYTES:
                    raise tarfile.ReadError(f"it has more than {_MOST_FILES} files or {_MOST_BYTES // 2**30} GiB")
                if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    raise tarfile.ReadError(f"{shown(member.name, 80)!r} is neither a file, a folder nor a link")
                # the filter alone follows links that are there already, and some releases of Python resolve them wrongly
                _refuse_links(folder, member.name, itself=not member.isdir())
                if member.islnk():
                    _refuse_links(folder, member.linkname, itself=True)
                tar.extract(member, folder, filter="data")
                cast("Any", tar).members.clear()  # it would keep every one
    except (
        tarfile.TarError,
        EOFError,
        lzma.LZMAError,
        zlib.error,
        OSError,
        ValueError,
        OverflowError,
        KeyError,
    ) as error:
        if isinstance(error, OSError) and is_full(error):
            raise
        raise LockError(
            f"the archive cannot be unpacked: {shown(str(error))}", where=str(archive), hint="make it again"
        ) from error


def _refuse_links(folder: Path, name: str, *, itself: bool) -> None:
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise tarfile.ReadError(f"{shown(name, 80)!r} leads out of it")
    for part in parts if itself else parts[:-1]:
        folder /= part
        if folder.is_symlink():
            raise tarfile.ReadError(f"{shown(name, 80)!r} is a link, or is behind one")
