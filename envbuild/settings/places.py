"""Where a user's cache lies."""

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from envbuild.util.homes import xdg_folder


def exists(file: Path) -> bool:
    """Return whether this user can see `file`."""
    try:
        return file.exists()
    except OSError:  # a home that this user may not even look into
        return False


def is_writable(folder: Path) -> bool:
    """Return whether `folder` can be written, or be made where it does not exist. Makes nothing."""
    for candidate in (folder, *folder.parents):
        if exists(candidate):
            return candidate.is_dir() and os.access(candidate, os.W_OK | os.X_OK)
    return False


def _is_ours_alone(folder: Path) -> bool:
    """Make `folder` unless it is there; return whether it is a folder, no link, of this user, that no other may write to."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return False
        os.fchmod(handle, 0o700)  # others need not read it either
    finally:
        os.close(handle)
    return True


def default_cache(env: Mapping[str, str], notices: list[str]) -> Path:
    """Return the cache where none was set; under `$TMPDIR`, with a notice, where the usual place cannot be written."""
    base = xdg_folder(env, "XDG_CACHE_HOME", ".cache")
    if base is not None and is_writable(base / "envbuild"):
        return base / "envbuild"
    place = Path(env.get("TMPDIR") or tempfile.gettempdir())
    folder = place / f"envbuild-{os.getuid()}"
    if not _is_ours_alone(folder):
        # Somebody else may have made it, in a folder that everybody can write: what it holds cannot be trusted.
        folder = Path(tempfile.mkdtemp(prefix="envbuild-", dir=place))
    reason = f"{base / 'envbuild'} cannot be written" if base else "this user has no home"
    notices.append(f"{reason}: the cache is {folder} for now; set cache_dir or ENVBUILD_CACHE_DIR to a lasting folder")
    return folder
