"""Reading a recipe's bytes: a regular file, a FIFO or standard input, of at most `LIMIT` bytes and not for ever."""

import os
import select
import stat
import time
from pathlib import Path

from envbuild.errors import DataError

LIMIT = 1 << 20
"""Bytes. The longest recipe found in public repositories has a tenth of it."""

PATIENCE = 10.0
"""Seconds that a FIFO may keep its reader waiting, all in all."""

_TOO_LARGE = f"the recipe has more than {LIMIT >> 20} MiB"
_KINDS = "a regular file, a FIFO, or - for standard input"


def read_text(path: Path) -> str:
    """Return the text of the recipe at `path`, without a byte order mark; `-` is standard input.

    Raises:
        DataError: it cannot be read, is a device, a socket or a folder, is too large, or is not UTF-8.

    """
    where = "standard input" if str(path) == "-" else str(path)
    try:
        body = _read_handle(0) if str(path) == "-" else _read_path(path, where)
    except OSError as error:
        raise DataError(f"the recipe cannot be read: {error.strerror or error}", where=where) from error
    if len(body) > LIMIT:
        raise DataError(_TOO_LARGE, where=where, hint="check its parts one by one")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"the recipe cannot be read: byte {error.start} is not UTF-8", where=where, hint="save it as UTF-8"
        ) from error


def _read_path(path: Path, where: str) -> bytes:
    # without O_NONBLOCK a FIFO without a writer would block the open
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISREG(kind):
            return _read_handle(handle)
        if stat.S_ISFIFO(kind):
            return _read_fifo(handle, where)
    finally:
        os.close(handle)
    raise DataError("the recipe is a folder, a device or a socket", where=where, hint=f"give {_KINDS}")


def _read_handle(handle: int) -> bytes:
    parts, size = [], 0
    while size <= LIMIT and (part := os.read(handle, min(1 << 16, LIMIT + 1 - size))):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _read_fifo(handle: int, where: str) -> bytes:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    ends, parts, size = time.monotonic() + PATIENCE, [], 0
    while size <= LIMIT:
        left = ends - time.monotonic()
        ready = poll.poll(left * 1000) if left > 0 else []
        if not ready:
            raise DataError(
                f"the FIFO was not closed within {PATIENCE:g} seconds", where=where, hint="write it, or give a file"
            )
        part = os.read(handle, 1 << 16)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)
