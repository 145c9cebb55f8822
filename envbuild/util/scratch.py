"""Temporary folders: private, locked as long as their maker lives, and removed by a later run where that was killed.

The one way here to make a temporary folder. A maker holds a lock on a file in it; where no process holds it any more, the
maker is dead, and the next run that makes a folder in the same place, or sweeps it, removes what is left.
"""

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from envbuild.util.patterns import pattern

_NAME = pattern(r"\.?envbuild-[a-z]{1,32}-[0-9a-f]{16}\.tmp")
_LOCK = ".lock"
# A file system that is shared between hosts may keep locks for one host alone: a folder of another host counts as left
# only when no process can be at work in it any more.
_ELSEWHERE_S = 7 * 86400


@contextlib.contextmanager
def scratch(what: str, place: Path | None = None) -> Iterator[Path]:
    """Make a private folder (mode 0700) for as long as it is needed; what killed runs left in the same place goes first.

    What another user put there and this one may not remove stays, and is no error.

    Args:
        what: what it is for, in small letters; a part of its name.
        place: the folder that it is made in; `$TMPDIR` by default. What is renamed to its place in the end is made next
            to that place, on the same file system.

    Raises:
        OSError: it cannot be made.

    """
    where = place if place is not None else Path(tempfile.gettempdir())
    sweep(where)
    folder, lock = _make(where, f"{'' if place is None else '.'}envbuild-{what}")
    try:
        yield folder
    finally:
        # The lock goes last: a sweep that finds none in a folder takes the folder for one that is just being made.
        try:
            # A container's root may have left a folder that only root can empty. What the caller has is whole without that.
            with contextlib.suppress(PermissionError):
                _remove(folder)
        finally:
            os.close(lock)


def sweep(place: Path) -> list[str]:
    """Remove the temporary folders of dead runs of this user from `place`; return the names of those that went.

    Never follows a link, never goes below a mount, and leaves alone what another user owns, what a living run holds and
    what is not named as this module names it. What cannot be removed stays; the next sweep tries again.
    """
    gone = []
    try:
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    for name in names:
        with contextlib.suppress(OSError):
            if _sweep_one(place / name):
                gone.append(name)
    return gone


def _make(where: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = where / f"{prefix}-{secrets.token_hex(8)}.tmp"
        if not _NAME.fullmatch(folder.name):
            raise ValueError(f"{folder.name} is not a name that a sweep would find")
        folder.mkdir(mode=0o700)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            lock = os.open(folder / _LOCK, flags, 0o600)
        except FileNotFoundError:
            continue  # another run's sweep came before the lock
        try:
            os.write(lock, platform.node().encode())
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # a sweep holds it, and removes the folder
            os.close(lock)
            continue
        except OSError:
            pass  # a file system without locks: no sweep gets one either
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)


def _sweep_one(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_uid != os.geteuid() or holds_mount(folder):
            return False
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=handle)
        except FileNotFoundError:
            return _remove_without_lock(folder, handle)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(lock)
            here = os.read(lock, 256) == platform.node().encode()
            if not stat.S_ISREG(status.st_mode) or not (here or time.time() - status.st_mtime > _ELSEWHERE_S):
                return False
            _remove(folder)
        finally:
            os.close(lock)
    finally:
        os.close(handle)
    return True


def _remove_without_lock(folder: Path, handle: int) -> bool:
    """Remove a folder in which there was no lock; return whether it went."""
    try:
        folder.rmdir()  # its maker died before the lock, or is about to make it and tries again
    except OSError as error:
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise
        if _LOCK in os.listdir(handle):  # its maker was quicker
            return False
        # The lock is the first thing in a folder and goes last: this one was being removed while somebody still wrote to it.
        _remove(folder)
    return True


def holds_mount(folder: Path) -> bool:
    """Return whether something is mounted below `folder`: a root in the making has the host's own /proc there."""
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    below = str(folder.resolve()) + "/"
    for character in "\\ \t\n":  # as the table writes them
        below = below.replace(character, f"\\{ord(character):03o}")
    return any(line.split(" ", 5)[4].startswith(below) for line in table.splitlines())


def _remove(folder: Path) -> None:
    """Remove `folder`, its lock after everything else."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        for name in os.listdir(handle):  # noqa: PTH208 - of a descriptor
            if name != _LOCK:
                _remove_entry(name, handle)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_LOCK, dir_fd=handle)
    finally:
        os.close(handle)
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def _remove_entry(name: str, inside: int) -> None:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=inside)
            return
        try:
            shutil.rmtree(name, dir_fd=inside)
        except PermissionError:  # a source tree, or a root, may hold folders that even their owner may not write to
            _allow(name, inside)
            shutil.rmtree(name, dir_fd=inside)
    except FileNotFoundError:
        pass  # a process that was still ending removed it


def _allow(name: str, inside: int) -> None:
    """Let the owner write to the folder `name` and to every folder below it."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
    try:
        Path(f"/proc/self/fd/{handle}").chmod(0o700)
        with os.scandir(f"/proc/self/fd/{handle}") as entries:
            folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for each in folders:
            _allow(each, handle)
    finally:
        os.close(handle)
