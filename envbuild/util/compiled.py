"""Data files in a form that loads quickly, kept between runs under the hash of all that it was made from.

What is kept is JSON: plain values, no code (marshal would save 0.4 ms of 1.2, and may crash on what it does not expect).
The name of a file is the hash of the data files' bytes, of the source of the modules that read them, and of Python's
version (`keys`), so that a change of any of them is another name and nothing kept is ever out of date. A file counts only
where this user owns it and its folder and nobody else may write to either, and only when the hash in its first line is that
of the rest. Anything else is as good as no file: the data files are read again.
"""

import contextlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from envbuild.util.homes import xdg_folder

_LIMIT = 32 * 2**20
_MOST_KEPT = 24
"""Files in the folder at most, so that what edited data left does not pile up."""


def hash_of(parts: Iterable[bytes]) -> str:
    """Return the sha256 (hex) over some parts and their lengths."""
    import hashlib

    found = hashlib.sha256()
    for part in parts:
        found.update(b"%d:" % len(part))
        found.update(part)
    return found.hexdigest()


def _folder() -> Path | None:
    base = xdg_folder(os.environ, "XDG_CACHE_HOME", ".cache")
    return base / "envbuild" / "compiled" if base else None


def _is_ours_alone(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(kind: str, key: str) -> list[bytes] | None:
    """Return what is kept of `kind` under `key`, each value as its JSON; None where nothing can be trusted."""
    folder = _folder()
    if folder is None:
        return None
    opened = []
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        opened.append(inside)
        if not _is_ours_alone(os.fstat(inside)):
            return None
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        handle = os.open(f"{kind}-{key}.json", flags, dir_fd=inside)
        opened.append(handle)
        status = os.fstat(handle)
        if not (stat.S_ISREG(status.st_mode) and _is_ours_alone(status) and status.st_size <= _LIMIT):
            return None
        with os.fdopen(os.dup(handle), "rb", buffering=0) as file:
            head, _, body = file.read(status.st_size).partition(b"\n")
        return body.split(b"\n") if head.decode() == hash_of((key.encode(), body)) else None
    except (OSError, ValueError):
        return None
    finally:
        for each in opened:
            os.close(each)


def keep(kind: str, key: str, values: Iterable[Any]) -> None:
    """Keep values of JSON, a line each, for later runs; where that cannot be, nothing is kept, and nothing is lost."""
    folder = _folder()
    if folder is None:
        return
    name = f"{kind}-{key}.json"
    part = f".{name}.{os.getpid()}.part"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not _is_ours_alone(os.fstat(inside)):
            return
        body = "\n".join(json.dumps(each, separators=(",", ":"), ensure_ascii=False) for each in values).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, 0o600, dir_fd=inside), "wb") as file:
            file.write(hash_of((key.encode(), body)).encode() + b"\n" + body)
        os.rename(part, name, src_dir_fd=inside, dst_dir_fd=inside)
        _prune(inside)
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=inside)
    finally:
        os.close(inside)


def _prune(inside: int) -> None:
    entries = sorted(os.scandir(inside), key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns, reverse=True)
    for entry in entries[_MOST_KEPT:]:
        with contextlib.suppress(OSError):
            os.unlink(entry.name, dir_fd=inside)
