"""Files that a lock names by hash, as a bundle takes them: from the settings' folders, indexes and archives."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from envbuild.engine.kept import sha256_of
from envbuild.errors import LockError
from envbuild.lock.archives import mirrors_of
from envbuild.lock.index import files_of
from envbuild.lock.model import Lock, OsPackage, os_packages
from envbuild.lock.python import PYTORCH, local_wheel, torch_index
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.net.download import download
from envbuild.settings import Settings
from envbuild.util.text import count_of

_SUITES = {"ubuntu24.04": "noble", "ubuntu22.04": "jammy", "ubuntu20.04": "focal"}


def fetch_wheel(
    settings: Settings,
    project: str,
    filename: str | None,
    sha256: str,
    index: str | None,
    folder: Path,
    *,
    note: Callable[[str], object],
) -> Path:
    """Return a wheel with this name (any where it is None) and hash, from a folder of the settings or from their indexes.

    No address in a lock is asked, but PyTorch's indexes or the site's copy of them: a lock may come from anybody.

    Args:
        settings: the folders and indexes.
        project: the distribution.
        filename: the wheel's name.
        sha256: its hash.
        index: a further index that the lock's set needs. Only one of PyTorch's is asked.
        folder: keeps downloads, by hash.
        note: takes a line about what is fetched.

    Raises:
        HostError: an index cannot be reached.
        LockError: none has the wheel.

    """
    local = local_wheel(settings, filename) if filename else None
    if local is not None and sha256_of(local) == sha256:
        return local
    further = (torch_index(settings, index),) if index and index.startswith(f"{PYTORCH}/") else ()
    for place in (*further, settings.index_url, *settings.extra_index_urls):
        try:
            listed = files_of(settings, project, index=place)
        except LockError:  # this index has no such distribution
            continue
        for file in listed:
            if file.sha256 == sha256 and file.filename.endswith(".whl"):
                note(f"fetching {file.filename}")
                return download(settings, file.url, sha256, folder)[0]
    raise LockError(
        f"no index has the wheel {filename or project} with the sha256 {sha256}",
        hint="name the index or folder that has it in the settings `index_url`, `extra_index_urls` or `find_links`",
    )


def suite_of(lock: Lock) -> str | None:
    """Return the suite of a lock's OS packages; None where no archive of it is known."""
    return lock.root.suite if lock.root else _SUITES.get(lock.cell["os"])


def fetch_debs(settings: Settings, lock: Lock, folder: Path, *, note: Callable[[str], object]) -> dict[str, Path]:
    """Return the file of every OS package that a lock pins, by its sha256.

    Args:
        settings: the folder `debs`, and the mirrors.
        lock: the lock.
        folder: keeps downloads, by hash.
        note: takes a line about what is fetched.

    Raises:
        HostError: an archive cannot be reached.
        LockError: none of them has a package any more.

    """
    wanted = os_packages(lock.root, lock.os)
    found = _in_folder(settings.debs, wanted) if settings.debs else {}
    missing = [package for package in wanted if package.sha256 not in found]
    suite = suite_of(lock)
    if not missing or suite is None:
        return found
    mirrors = dict.fromkeys(mirrors_of(settings, suite, DEBIAN_ARCH[lock.as_cell.arch]))
    note(f"fetching {count_of(len(missing), 'OS package')}")
    for package in missing:
        found[package.sha256] = _fetch_deb(settings, package, mirrors, folder)
    return found


def _fetch_deb(settings: Settings, package: OsPackage, mirrors: Iterable[str], folder: Path) -> Path:
    failure: LockError | None = None
    for mirror in mirrors:
        try:
            return download(settings, f"{mirror}/{package.filename}", package.sha256, folder)[0]
        except LockError as error:  # the other archive holds it, or nobody does any more
            failure = error
    raise LockError(
        f"no archive has {package.name} {package.version} any more",
        where=failure.where if failure else None,
        hint="lock the cell again, or name a folder that has the package in the setting `debs`",
    )


def _in_folder(folder: Path, wanted: Iterable[OsPackage]) -> dict[str, Path]:
    hashes = {package.sha256 for package in wanted}
    return {digest: path for digest, path in _hashed(folder) if digest in hashes}


def _hashed(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*.deb")):
        if digest := sha256_of(path):
            yield digest, path
