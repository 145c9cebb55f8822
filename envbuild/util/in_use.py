"""Whether somebody uses the cache: a run that uses it shares a lock on it for as long as it lives."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_LOCK = "use.lock"
_held: dict[Path, int] = {}
"""The locks of this process; the kernel drops them when it ends, however it ends."""


def _opened(cache: Path) -> int:
    cache.mkdir(parents=True, exist_ok=True)
    return os.open(cache / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def share(cache: Path, note: Callable[[str], object] = lambda _: None) -> None:
    """Say that this process uses the cache until it ends; waits while somebody removes files from it.

    Args:
        cache: the cache's folder.
        note: takes a line where this has to wait.

    """
    if cache in _held:
        return
    with contextlib.suppress(OSError):  # a file system without locks, or one that cannot be written
        handle = _opened(cache)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            note("waiting for `envbuild cache prune`")
            fcntl.flock(handle, fcntl.LOCK_SH)
        _held[cache] = handle


@contextlib.contextmanager
def alone(cache: Path) -> Iterator[bool]:
    """Yield whether nobody else uses the cache; then nobody begins to before the block ends."""
    try:
        handle = _opened(cache)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # held by a run, or a file system without locks: nobody knows
            yield False
        else:
            yield True
    finally:
        os.close(handle)
