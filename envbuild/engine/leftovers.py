"""What runs that were killed left behind: temporary folders, containers, halves of git's packs."""

import contextlib
import fcntl
import os
import platform
import re
import subprocess
import tempfile
import time
from pathlib import Path

from envbuild.engine.container import docker
from envbuild.settings import Settings
from envbuild.util.scratch import sweep

LABEL = "io.envbuild.run"
"""The label of every container that a command starts for a moment: which process on which host it belongs to."""

_FIELDS = 5
_LIMIT_S = 60.0
_OBJECT_S = 600.0


def mark() -> str:
    """Return the label, `key=value`, of a container that ends with this process and is removed once it is dead."""
    pid = os.getpid()
    return f"{LABEL}={'/'.join((platform.node(), _boot(), _namespace(), str(pid), _started(pid)))}"


def clear(settings: Settings) -> None:
    """Remove what dead runs of this user left in `$TMPDIR`, in the cache, and of containers in the engine.

    What cannot be removed, or may belong to a living run, stays.
    """
    sweep(Path(tempfile.gettempdir()))
    for place in _folders(settings.cache_dir):
        sweep(place)
    _packs(settings.cache_dir / "git" / "objects.git")
    _containers(settings)


def _folders(cache: Path) -> list[Path]:
    """Return the folders in which a cache's parts are made before they are renamed to their places."""
    found = [cache]
    for folder in (cache, cache / "git", cache / "locks"):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            found += [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return found


def _packs(store: Path) -> None:
    """Remove what a killed `git fetch` left in the object store, unless another run is fetching."""
    try:
        handle = os.open(store.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for left in (*store.glob("objects/pack/tmp_*"), *store.glob("shallow.lock")):
            left.unlink()
        for left in store.glob("objects/??/tmp_obj_*"):  # single objects are written without the lock, too
            if time.time() - left.stat().st_mtime > _OBJECT_S:
                left.unlink()
    except OSError:
        pass
    finally:
        os.close(handle)


def _containers(settings: Settings) -> None:
    listing = ["ps", "--all", "--no-trunc", "--filter", f"label={LABEL}", "--format"]
    command = [*docker(settings), *listing, f'{{{{.ID}}}} {{{{.Label "{LABEL}"}}}}']
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=_LIMIT_S)
        left = [line.split(" ", 1)[0] for line in done.stdout.splitlines() if _is_left(line.partition(" ")[2])]
        left = [each for each in left if re.fullmatch(r"[0-9a-f]{12,64}", each)]
        if left:
            command = [*docker(settings), "rm", "--force", "--volumes", *left]
            subprocess.run(command, capture_output=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        pass  # the command itself will say that the engine does not answer


def _is_left(owner: str) -> bool:
    """Return whether the process that the label's value names was one of this host and is dead."""
    fields = owner.split("/")
    if len(fields) != _FIELDS or fields[0] != platform.node() or not fields[3].isascii() or not fields[3].isdecimal():
        return False
    _, boot, namespace, pid, started = fields
    if boot != _boot():
        return True
    # Another container's process may be alive under a number that means nothing here.
    return namespace == _namespace() and _started(int(pid)) != started


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _namespace() -> str:
    return "".join(filter(str.isdecimal, str(Path("/proc/self/ns/pid").readlink())))


def _started(pid: int) -> str:
    """Return when the process `pid` started, in ticks since the boot, or nothing when there is none."""
    try:
        # The second field, the program's name in parentheses, may hold anything.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
