"""Logs with the time in their name, of which the last few of a kind are kept."""

import contextlib
import fcntl
import os
import re
import secrets
import time
from pathlib import Path
from typing import TextIO

KEPT = 5
"""Logs of one kind and subject that are kept."""

_PART = re.compile(r"[a-z0-9]{1,32}")


def new_log(folder: Path, kind: str, subject: str) -> TextIO:
    """Open a new log `KIND-SUBJECT-DATE-TIME-….log` in `folder`; the oldest of its kind and subject beyond five go.

    The log is locked while it is open, so that one of a run that goes on stays.

    Args:
        folder: where logs lie; it is made where it is missing.
        kind: what writes it, such as `build`; small letters and digits.
        subject: what it is about, such as the first digits of a plan's key; small letters and digits.

    Raises:
        OSError: it cannot be made.

    """
    if not (_PART.fullmatch(kind) and _PART.fullmatch(subject)):
        raise ValueError(f"{kind!r} or {subject!r} is no part of a log's name")
    folder.mkdir(parents=True, exist_ok=True)
    start = f"{kind}-{subject}-"
    _drop_oldest(folder, start)
    name = f"{start}{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.log"
    file = (folder / name).open("x", encoding="utf-8", errors="replace")  # never an existing file, nor through a link
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def is_written(log: Path) -> bool:
    """Return whether a run that goes on writes to `log`."""
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _drop_oldest(folder: Path, start: str) -> None:
    """Remove the logs whose names begin with `start`, but for the newest that leave room for one more."""
    name = re.compile(re.escape(start) + r"\d{8}-\d{6}-[0-9a-f]{4}\.log")
    with contextlib.suppress(OSError):
        for old in sorted(path for path in folder.iterdir() if name.fullmatch(path.name))[: -KEPT + 1]:
            if not is_written(old):
                old.unlink()
