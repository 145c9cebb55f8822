"""Reading a file that somebody else may have written: a regular file of a bounded size, or nothing of it."""

import errno
import os
import stat
from pathlib import Path

DATA_LIMIT = 16 * 2**20
"""Bytes of a data file at most: a lock, a stack, a manifest, a hostfile. The largest that ships has 0.3 MiB."""

_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


class UnfitFileError(OSError):
    """A file that is no regular file, or that is too large; `strerror` says which."""


def _unfit(number: int, what: str, path: Path) -> UnfitFileError:
    return UnfitFileError(number, what, str(path))


def read_file(path: Path, *, limit: int = DATA_LIMIT) -> bytes:
    """Return the bytes of the regular file `path`. A pipe, a device or a socket is refused at once and not opened.

    Args:
        path: the file; it may be reached through links.
        limit: bytes that it may have at most.

    Raises:
        UnfitFileError: it is no regular file, or it has more than `limit` bytes.
        OSError: it cannot be read.

    """
    if "\0" in str(path):
        raise _unfit(errno.EINVAL, "no file has such a name", path)
    _require_regular(path.stat().st_mode, path)
    # a pipe that took the file's place meanwhile would hold an open for good
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        _require_regular(os.fstat(handle).st_mode, path)
        body = file.read(limit + 1)
    if len(body) > limit:
        raise _unfit(errno.EFBIG, f"it has more than {limit:,} bytes", path)
    return body


def read_text(path: Path, *, limit: int = DATA_LIMIT) -> str:
    """Return the text of the regular file `path`, which is UTF-8 with or without a byte order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        OSError: as `read_file`.

    """
    return read_file(path, limit=limit).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _require_regular(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        what = next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")
        raise _unfit(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, f"it is {what}, not a file", path)
