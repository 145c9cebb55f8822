"""Looking up a lock's inputs again: whether they still exist, and are still the same."""

import hashlib
from pathlib import Path

from envbuild.errors import LockError
from envbuild.lock.files import Locked
from envbuild.lock.index import files_of
from envbuild.lock.inputs import Inputs
from envbuild.lock.make import Note, current_os
from envbuild.lock.model import os_packages
from envbuild.lock.python import local_wheel
from envbuild.lock.sources import SourceStore
from envbuild.matrix.load import Matrix
from envbuild.net.download import download
from envbuild.net.registry import find_digest
from envbuild.settings import Settings


def differences(settings: Settings, matrix: Matrix, inputs: Inputs, locked: Locked, *, note: Note) -> list[str]:
    """Return, one line each, the inputs of a lock that are gone or no longer what it names.

    Files and trees are fetched and hashed; wheels are compared with the hash that their index lists; image tags are
    looked up by digest.

    Raises:
        HostError: a host cannot be reached or cannot serve now.

    """
    lock = locked.lock
    faults: list[str] = []
    for image in lock.images:
        note(f"checking {image.reference}")
        reference = f"{image.reference.rsplit(':', 1)[0]}@{image.digest}"
        if image.digest and find_digest(reference, settings=settings) is None:
            faults.append(f"{reference} is no longer in its registry")
    note("checking OS packages")
    served: dict[tuple[str, str], str] = {}
    locked_packages = os_packages(lock.root, lock.os)
    try:
        fresh = current_os(settings, matrix, inputs)
        served = {(p.name, p.version): p.sha256 for p in os_packages(fresh.root, fresh.os)}
    except LockError as error:  # the archive does not have what the cell asks for: one line, not one for each package
        faults.append(error.what)
        locked_packages = ()
    for package in locked_packages:
        found = served.get((package.name, package.version))
        if found != package.sha256:
            faults.append(
                f"OS package {package.name} {package.version} is "
                + ("no longer served" if found is None else f"another file: sha256 {found}")
            )
    for file in (lock.uv, *lock.files):
        note(f"checking {file.name}")
        try:
            download(settings, file.url, file.sha256, settings.cache_dir / "files")
        except LockError as error:
            faults.append(str(error.what))
    store = SourceStore(settings=settings, note=note)
    for source in lock.sources:
        note(f"checking the source of {source.name}")
        try:
            store.checkout(source)
        except LockError as error:
            faults.append(str(error.what))
    for python_set in lock.python:
        if python_set.packages:
            note(f"checking the {python_set.name} packages")
        local = set(python_set.local_wheels)
        for wheel in python_set.packages:
            if any(_normal(name) == wheel.name for name in local):
                faults += _local(settings, [n for n in local if _normal(n) == wheel.name], wheel.hashes)
                continue
            index = python_set.index if python_set.index and "+" in wheel.version else None
            try:
                listing = files_of(settings, wheel.name, index=index)
            except LockError as error:
                faults.append(f"{wheel.name} {wheel.version}: {error.what}")
                continue
            if not {f.sha256 for f in listing}.intersection(wheel.hashes):
                refused = listing.why_not(f"-{wheel.version}-", f"-{wheel.version}.tar")
                faults.append(
                    f"{wheel.name} {wheel.version} is not on the index with the lock's hash"
                    + (f"; the index lists {refused}" if refused else "")
                )
    return faults


def _normal(wheel: str) -> str:
    return wheel.split("-", maxsplit=1)[0].lower().replace("_", "-").replace(".", "-")


def _local(settings: Settings, names: list[str], hashes: tuple[str, ...]) -> list[str]:
    faults = []
    for name in names:
        path = local_wheel(settings, name)
        if path is None:
            faults.append(f"{name} is in no find-links folder of the settings")
        elif _sha256(path) not in hashes:
            faults.append(f"{name} is another file: sha256 {_sha256(path)}")
    return faults


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
