"""What runs that were killed left behind: temporary folders, containers, halves of git's packs."""

import contextlib
import fcntl
import os
import tempfile
import time
from pathlib import Path

from envbuild.engine.guest import remove_left
from envbuild.engine.own_tags import remove_left_tags
from envbuild.engine.podman import engine_of
from envbuild.settings import Settings
from envbuild.util.scratch import sweep

_OBJECT_S = 600.0


def clear(settings: Settings) -> None:
    """Remove what dead runs of this user left in `$TMPDIR`, in the cache, and of containers and tags in the engine.

    What cannot be removed, or may belong to a living run, stays.
    """
    sweep(Path(tempfile.gettempdir()))
    for place in _folders(settings.cache_dir):
        sweep(place)
    _packs(settings.cache_dir / "git" / "objects.git")
    remove_left(settings)
    remove_left_tags(engine_of(settings))


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
