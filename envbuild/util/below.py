"""Files and folders below a folder, reached without following a link.

The one place where a name from outside becomes a path. Every component is opened by itself, relative to the one before,
and a link anywhere below `folder` is refused, so that neither a name nor a tree leads out of it.
"""

import contextlib
import os
import re
import secrets
import stat
import time
from pathlib import Path

from envbuild.util.names import FileName, Sha256, TreePath, checked

_LEFT = re.compile(r"\.envbuild-[0-9a-f]{16}\.new")
_LEFT_S = 3600.0
"""Seconds after which such a file is one that a killed run left."""


class OutsideError(ValueError):
    """A name that leads out of its folder, or a link on the way."""


def _parts(relative: str) -> list[str]:
    hashed, slash, name = relative.partition("/")
    with contextlib.suppress(ValueError):
        # a file kept by its hash: a wheel's name may hold `!` and `~`, which no path of a tree needs
        return [checked(Sha256, hashed), checked(FileName, name)] if slash else [checked(FileName, relative)]
    try:
        return checked(TreePath, relative).split("/")
    except ValueError as error:
        raise OutsideError(str(error)) from None


def _enter(folder: Path, parts: list[str], *, make: bool) -> int:
    """Return a descriptor of the folder at `parts` below `folder`."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=handle)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
        except NotADirectoryError:
            link = stat.S_ISLNK(os.stat(part, dir_fd=handle, follow_symlinks=False).st_mode)
            raise (
                OutsideError(f"{part} is a link in {folder}") if link else NotADirectoryError(20, "not a folder", part)
            ) from None
        finally:
            os.close(handle)
        handle = inner
    return handle


def open_below(folder: Path, relative: str, flags: int = os.O_RDONLY, mode: int = 0o644, *, make: bool = False) -> int:
    """Open the file `relative` below `folder` and return its descriptor.

    Args:
        folder: a trusted folder; it may be reached through links itself.
        relative: a path from outside, with `/` between its parts.
        flags: as `os.open` takes them. A device, a socket or a FIFO is refused.
        mode: of a file that is made.
        make: whether folders that are missing are made.

    Raises:
        OutsideError: `relative` leads out of `folder`, or a part of it is a link.
        OSError: as `os.open`.

    """
    return _open(folder, _parts(relative), relative, flags, mode, make=make)


def _open(folder: Path, parts: list[str], relative: str, flags: int, mode: int, *, make: bool) -> int:
    *folders, name = parts
    inside = _enter(folder, folders, make=make)
    try:
        # a FIFO without a writer would hold an open for reading for good
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=inside)
    except OSError as error:
        if _is_link(name, inside):
            raise OutsideError(f"{relative} is a link in {folder}") from None
        raise error from None
    finally:
        os.close(inside)
    kind = os.fstat(handle).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        os.close(handle)
        raise OutsideError(f"{relative} is neither a file nor a folder in {folder}")
    os.set_blocking(handle, True)
    return handle


def _is_link(name: str, inside: int) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode)
    except OSError:
        return False


def read_below(folder: Path, relative: str, *, limit: int) -> bytes:
    """Return the bytes of the file `relative` below `folder`.

    Raises:
        OutsideError: as `open_below`, or the file has more than `limit` bytes.
        OSError: it cannot be read.

    """
    return _read(open_below(folder, relative), relative, limit)


def read_found(folder: Path, relative: str, *, limit: int) -> bytes:
    """Return the bytes of a file that a walk of `folder` found: any name will do, and nothing that became a link since.

    Raises:
        OutsideError: a part of it is a link, it is no regular file, or it has more than `limit` bytes.
        OSError: it cannot be read, or is gone.

    """
    parts = relative.split("/")
    if any(part in {"", ".", ".."} for part in parts):
        raise OutsideError(f"{relative!r} is not a path below a folder")
    return _read(_open(folder, parts, relative, os.O_RDONLY, 0, make=False), relative, limit)


def write_below(folder: Path, relative: str, body: bytes, *, mode: int) -> None:
    """Write the file `relative` below `folder` in one step, in the place of one that is there; missing folders are made.

    Whoever else writes to `folder` meanwhile cannot make it write elsewhere. A process that has the old file open keeps it.

    Raises:
        OutsideError: `relative` leads out of `folder`, or a part of it is a link.
        OSError: it cannot be written.

    """
    *folders, name = _parts(relative)
    inside = _enter(folder, folders, make=True)
    new = f".envbuild-{secrets.token_hex(8)}.new"
    try:
        _remove_left(inside)
        if _is_link(name, inside):
            raise OutsideError(f"{relative} is a link in {folder}")
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=inside)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body)
                os.fchmod(file.fileno(), mode)
            os.rename(new, name, src_dir_fd=inside, dst_dir_fd=inside)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=inside)
            raise
    finally:
        os.close(inside)


def _remove_left(inside: int) -> None:
    """Remove from a folder what runs of this user left there that were killed between the two steps of a write."""
    for name in os.listdir(inside):
        if _LEFT.fullmatch(name):
            with contextlib.suppress(OSError):
                found = os.stat(name, dir_fd=inside, follow_symlinks=False)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _LEFT_S:
                    os.unlink(name, dir_fd=inside)


def read_file(path: Path, *, limit: int) -> bytes:
    """Return the bytes of a file that the user named: it may be a link, and it is no device and no FIFO.

    Raises:
        OutsideError: it is no regular file, or has more than `limit` bytes.
        OSError: it cannot be read.

    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise OutsideError(f"{path.name} is {'a folder' if stat.S_ISDIR(kind) else 'no regular file'}")
    return _read(handle, path.name, limit)


def _read(handle: int, name: str, limit: int) -> bytes:
    with os.fdopen(handle, "rb") as file:
        body = file.read(limit + 1)
    if len(body) > limit:
        raise OutsideError(f"{name} has more than {limit} bytes")
    return body


def path_below(folder: Path, relative: str, *, make: bool = False) -> Path:
    """Return the path `relative` below `folder`, which need not exist; no part of it that exists is a link.

    For what takes a path and not a descriptor (git, tar, rename). Nothing but our own runs may write to `folder`.

    Args:
        folder: a trusted folder.
        relative: a path from outside, with `/` between its parts.
        make: whether the folders above the last part are made.

    Raises:
        OutsideError: it leads out of `folder`, or a part of it is a link.

    """
    parts = _parts(relative)
    if make:
        os.close(_enter(folder, parts[:-1], make=True))
    place = folder
    for part in parts:
        place /= part
        if place.is_symlink():
            raise OutsideError(f"{place} is a link")
    return place


def remove_below(folder: Path, relative: str) -> None:
    """Remove the file or folder `relative` below `folder`, and never what a link in it points to.

    Raises:
        OutsideError: `relative` leads out of `folder`.

    """
    *folders, name = _parts(relative)
    try:
        inside = _enter(folder, folders, make=False)
    except FileNotFoundError:
        return
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            import shutil

            shutil.rmtree(name, dir_fd=inside)
        else:
            os.unlink(name, dir_fd=inside)
    except FileNotFoundError:
        pass
    finally:
        os.close(inside)
