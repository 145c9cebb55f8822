"""Downloading a file from another host: the only function for it.

Each call writes to its own file and hashes it on the way; only a whole file with the right hash gets its name. Calls
for the same file, in threads or in processes, do not meet.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from envbuild.errors import HostError, LockError
from envbuild.net.address import login_for, place_of, read_address
from envbuild.net.exchange import Answer, Bounds
from envbuild.net.failures import BadAnswerError, NoAnswerError, failure_of, refusal_of
from envbuild.net.fetch import open_file_url
from envbuild.net.http import Client
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, open_below, path_below, remove_below
from envbuild.util.names import FileName, FileUrl, Sha256, checked
from envbuild.util.space import is_full

FILE = Bounds(size=8 << 30, total_s=3600.0)
"""A source distribution, a wheel, a Python build."""

_CHUNK = 1 << 18
_PART = ".part"
_LEFT_AFTER_S = 60.0
# Where a file system has no locks, only a file that no download could still be writing counts as left behind.
_LEFT_AFTER_WITHOUT_LOCKS_S = 2 * FILE.total_s


def file_name(url: str) -> str:
    """Return the name of the file that `url` ends in, percent-encoding undone.

    Raises:
        ValueError: it is no address of a file, carries a login, or its last part is no file name.

    """
    try:
        checked(FileUrl, url)
    except ValueError:
        # without the address as it is, which may carry a login
        raise ValueError(
            f"{place_of(url)} is not the address of a file: https://, http:// or file:///, no login"
        ) from None
    # The name is checked after it is decoded: `%2e%2e%2fx` has no slash before.
    return checked(FileName, unquote(urlsplit(url).path.rsplit("/", 1)[-1]))


def download(
    settings: Settings, url: str, sha256: str | None, folder: Path, *, bounds: Bounds = FILE
) -> tuple[Path, str]:
    """Return the file at `url`, kept under `folder` by its hash, and that hash.

    A file that is kept is hashed again before it is used, and replaced when it is damaged.

    Args:
        settings: logins, proxies, CA bundle.
        url: https://, http:// or file:///.
        sha256: what the file must have; None takes what comes.
        folder: made where it does not exist.
        bounds: for the size and the time.

    Raises:
        LockError: the address or the hash is none, the host does not hold the file, or its content is not what `sha256`
            says.
        HostError: the host cannot be reached or cannot serve now, or the folder cannot be written.

    """
    try:
        name = file_name(url)
        if sha256 is not None:
            checked(Sha256, sha256)
    except ValueError as error:
        raise LockError(
            f"a file cannot be downloaded: {error}",
            where=place_of(url),
            hint="do not use this lock or index; ask who maintains it",
        ) from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if sha256 and (kept := _kept(folder, name, sha256)):
            return kept, sha256
        _remove_left(folder)
        with _part(folder) as (file, part):
            found = _receive(settings, url, file, bounds, hashed=sha256 is not None)
            if sha256 and found != sha256:
                raise LockError(
                    f"{name} is not the file that the lock names: its sha256 is {found}, the lock has {sha256}",
                    where=place_of(url),
                    hint="do not use it; ask who runs the index, or lock again if the change is meant",
                )
            place = path_below(folder, f"{found}/{name}", make=True)
            part.replace(place)
    except OutsideError as error:
        raise _disk_failure(str(error), folder) from None
    except OSError as error:
        full = is_full(error)
        what = "the disk is full" if full else error.strerror or type(error).__name__
        raise _disk_failure(f"{name} cannot be written: {what}", folder) from None
    return place, found


def _disk_failure(what: str, folder: Path) -> HostError:
    return HostError(what, where=str(folder), hint="free some space there, or choose another cache_dir")


def _kept(folder: Path, name: str, sha256: str) -> Path | None:
    """Return the path of the file when it is here and whole."""
    relative = f"{sha256}/{name}"
    try:
        with os.fdopen(open_below(folder, relative), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                # A damaged file stays until the whole one replaces it: another call may have just done so.
                whole = hashlib.file_digest(file, "sha256").hexdigest() == sha256
                return path_below(folder, relative) if whole else None
    except FileNotFoundError:
        return None
    except (OutsideError, NotADirectoryError, IsADirectoryError):
        pass
    # A link, a folder, a device: nothing that this function makes.
    remove_below(folder, sha256)
    return None


@contextlib.contextmanager
def _part(folder: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file in `folder` and its path; it is gone afterwards, unless it was renamed."""
    name = secrets.token_hex(12) + _PART
    handle = open_below(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file, folder / name
    finally:
        (folder / name).unlink(missing_ok=True)


def _remove_left(folder: Path) -> None:
    """Remove the parts that killed runs left. A living run's part is young, or locked."""
    now = time.time()
    for part in [*folder.glob(f"*{_PART}"), *folder.glob(f"*/*{_PART}")]:
        with contextlib.suppress(OSError, OutsideError):  # removed meanwhile, or not envbuild's
            relative = str(part.relative_to(folder))
            with os.fdopen(open_below(folder, relative), "rb") as file:
                age = now - os.fstat(file.fileno()).st_mtime
                if age < _LEFT_AFTER_S:
                    continue
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                except OSError:
                    if age < _LEFT_AFTER_WITHOUT_LOCKS_S:
                        continue
                remove_below(folder, relative)


def _receive(settings: Settings, url: str, file: BinaryIO, bounds: Bounds, *, hashed: bool) -> str:
    """Write what `url` holds to `file` and return its sha256."""

    def take(_: Answer | None, chunks: Iterator[bytes]) -> str:
        file.seek(0)
        file.truncate()
        digest = hashlib.sha256()
        for chunk in chunks:
            digest.update(chunk)
            view = memoryview(chunk)
            while view:  # a file without a buffer may take a part
                view = view[file.write(view) :]
        return digest.hexdigest()

    if url.startswith("file:"):
        with os.fdopen(open_file_url(url), "rb") as local:
            return take(None, iter(lambda: local.read(_CHUNK), b""))
    try:
        with Client(settings) as client:
            login = login_for(settings, read_address(url))
            answer, found = client.ask(url, take, bounds=bounds, login=login, hashed=hashed)
    except (NoAnswerError, BadAnswerError) as error:
        raise failure_of(error, url) from None
    if found is None:
        raise refusal_of(answer, url)
    return found
