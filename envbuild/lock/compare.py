"""What differs between two locks, input by input; and the lock that a record names by its digest."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from envbuild.errors import DataError, LockError
from envbuild.lock.files import read_lock
from envbuild.lock.model import FileSource, Lock, OsPackage
from envbuild.util.frozen import Frozen


class Difference(Frozen):
    """One thing that two locks, or two runs, have in another way."""

    what: str
    """Which thing: `torch packages: numpy`, `cell: te`."""
    first: str
    """What the first has; empty where it has none."""
    second: str
    """Likewise the second."""

    def as_json(self) -> dict[str, str]:
        """Return it as JSON values."""
        return {"what": self.what, "first": self.first, "second": self.second}


def differences_of(first: dict[str, str], second: dict[str, str]) -> tuple[Difference, ...]:
    """Return where two tables differ, in the order of the first and then of the second."""
    return tuple(
        Difference(what=what, first=first.get(what, ""), second=second.get(what, ""))
        for what in dict.fromkeys([*first, *second])
        if first.get(what, "") != second.get(what, "")
    )


def lock_differences(first: Lock, second: Lock) -> tuple[Difference, ...]:
    """Return what differs between two locks, what both have first; an equal version of other files is named by the hashes.

    The matrix' digest and the date (`epoch`) are left out: neither is an input of what runs.
    """
    found = differences_of(dict(_inputs(first)), dict(_inputs(second)))
    return tuple(sorted(found, key=lambda each: not (each.first and each.second)))


def _inputs(lock: Lock) -> Iterator[tuple[str, str]]:
    for axis, version in lock.cell.items():
        yield f"cell: {axis}", version
    yield "flavor", lock.flavor
    if lock.stack and lock.stack_digest:
        yield "stack", f"{lock.stack} ({lock.stack_digest[:12]})"
    for axis, source in lock.asked_sources.items():
        if axis in lock.cell:
            yield f"source of {axis}", source
    yield "compiled", ", ".join(lock.components)
    for image in lock.images:
        yield f"image {image.stage}", f"{image.reference} {image.digest or ''}".rstrip()
    if lock.root:
        yield "root", lock.root.suite
        yield from _packages("root packages", lock.root.packages)
    for os_set in lock.os:
        yield from _packages(f"{os_set.name} OS packages", (*os_set.packages, *os_set.renewed))
    for python_set in lock.python:
        for package in python_set.packages:
            files = ",".join(sorted(each[:8] for each in package.hashes))
            yield f"{python_set.name} packages: {package.name}", f"{package.version} ({_short(files)})"
    for tree in lock.sources:
        yield f"source {tree.name}", f"{tree.commit[:12]} (tree {(tree.tree or 'unknown')[:12]})"
    for file in (lock.uv, *lock.files):
        yield f"file {file.name}", _file(file)


def _packages(of: str, packages: Iterable[OsPackage]) -> Iterator[tuple[str, str]]:
    for package in packages:
        yield f"{of}: {package.name}", f"{package.version} ({package.sha256[:8]})"


def _file(file: FileSource) -> str:
    return f"{file.url.rsplit('/', 1)[-1]} ({(file.sha256 or 'no hash')[:8]})"


def _short(text: str) -> str:
    """Return the hashes of a package's files, or a hash over them where there are many."""
    import hashlib

    return text if len(text) <= 17 else hashlib.sha256(text.encode()).hexdigest()[:8]


def lock_of(digest: str | None, folders: Iterable[Path]) -> Lock | None:
    """Return the lock with this digest from the folders, which are locks or hold locks; None where none of them has it.

    What cannot be read is passed over: it is not the lock that a record names.
    """
    if digest is None:
        return None
    for folder in folders:
        for path in (folder / "lock.json", *sorted(folder.glob("*/lock.json"))):
            try:
                lock = read_lock(path.parent).lock
            except (DataError, LockError):
                continue
            if lock.digest == digest:
                return lock
    return None


def differing_locks(
    digests: tuple[str | None, str | None], folders: Iterable[Path]
) -> tuple[tuple[Difference, ...] | None, str]:
    """Return what differs between the locks of two runs.

    Args:
        digests: of the locks, as the runs' records state them.
        folders: where locks are looked for.

    Returns:
        the differences, or None where one of the locks is not here, and a note about that in words.

    """
    first, second = digests
    if first is None or second is None:
        return None, "a run was of no lock"
    if first == second:
        return (), "both runs are of one lock"
    places = tuple(folders)
    one, other = lock_of(first, places), lock_of(second, places)
    if one is None or other is None:
        absent = [digest for digest, lock in ((first, one), (second, other)) if lock is None]
        return None, f"not in a folder of locks here: {', '.join(absent)}"
    return lock_differences(one, other), ""
