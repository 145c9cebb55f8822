"""Reading a data file that somebody else may have written: all of a regular file of a bounded size, or nothing of it."""

import errno
from pathlib import Path

from envbuild.util.below import OutsideError
from envbuild.util.below import read_file as read_regular

DATA_LIMIT = 16 * 2**20
"""Bytes of a data file at most: a stack, a manifest, a record. The largest that ships has 0.3 MiB."""


class UnfitFileError(OSError):
    """A file that is no regular file, or that is too large; `strerror` says which."""


def read_file(path: Path, *, limit: int = DATA_LIMIT) -> bytes:
    """Return the bytes of the regular file `path`. A pipe, a device or a socket is refused at once and not read.

    Args:
        path: the file; it may be reached through links.
        limit: bytes that it may have at most.

    Raises:
        UnfitFileError: it is no regular file, or it has more than `limit` bytes.
        OSError: it cannot be read.

    """
    if "\0" in str(path):
        raise UnfitFileError(errno.EINVAL, "no file has such a name", str(path))
    try:
        return read_regular(path, limit=limit)
    except OutsideError as error:
        raise UnfitFileError(errno.EINVAL, str(error), str(path)) from None
    except UnicodeEncodeError:  # half a surrogate pair
        raise UnfitFileError(errno.EINVAL, "no file has such a name", repr(str(path))) from None


def read_text(path: Path, *, limit: int = DATA_LIMIT) -> str:
    """Return the text of the regular file `path`, which is UTF-8 with or without a byte order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
        OSError: as `read_file`.

    """
    return read_file(path, limit=limit).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
