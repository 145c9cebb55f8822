"""What the cache holds, by kind, and how it is removed safely.

Only what has the place, the name and the type of something that envbuild keeps is ever removed. No link is followed, what
another user owns stays, and so does what has a mount in it. What a running build uses stays: it holds a lock.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from envbuild.util.in_use import alone
from envbuild.util.logs import is_written
from envbuild.util.names import shown
from envbuild.util.scratch import holds_mount, scratch, sweep

_HASH = r"[0-9a-f]{64}"
_BY_A_RUN = "a run of envbuild uses the cache"
_YOUNG_S = 60.0
_DEEPEST = 5000
"""Folders in one another of which sizes are added up."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of what the cache holds: the folder CACHE/NAME."""

    name: str
    about: str
    entries: str = ""
    """Names of its entries; empty where the whole folder is one."""
    type: Literal["folder", "file", "either"] = "folder"
    next_to: str = ""
    """Names of what belongs to an entry: `ENTRY` and this."""
    made_again: bool = True
    """Whether the next run that needs it makes or fetches it again, without many hours or a choice lost."""


KINDS = (
    Kind(name="apptainer", about="home and /tmp of containers that Apptainer ran", made_again=False),
    Kind(name="bisect", about="verdicts of `bisect`", entries="[0-9a-f]{16}", made_again=False),
    Kind(name="builds", about="folders of builds: Dockerfile, contexts", entries="[0-9a-f]{16}", next_to=".lock"),
    Kind(
        name="built", about="notes of images built here", entries=rf"{_HASH}(?:-gzip)?", type="file", made_again=False
    ),
    Kind(
        name="catalogs", about="versions of catalogues seen", entries=rf"{_HASH}\.json", type="file", made_again=False
    ),
    Kind(name="catalog-locks", about="locks from catalogues", entries=_HASH),
    Kind(
        name="compiled", about="the matrix in a form that loads quickly", entries=rf"[a-z]+-{_HASH}\.json", type="file"
    ),
    Kind(
        name="failures",
        about="images that failed their audit or tests",
        entries=rf"{_HASH}\.json",
        type="file",
        made_again=False,
    ),
    Kind(name="files", about="downloads, by hash", entries=_HASH),
    Kind(name="git", about="git objects and source trees"),
    Kind(name="helpers", about="compiled helpers of trees", entries=_HASH + r"(?:\.key|\.lock)?", type="either"),
    Kind(name="locks", about="locks made here", entries="[A-Za-z0-9][A-Za-z0-9._+-]{0,300}", made_again=False),
    Kind(
        name="logs",
        about="logs of builds and smoke tests",
        entries=r"[a-z0-9]+(?:-[a-z0-9]+)?-\d{8}-\d{6}-[0-9a-f]{4,6}\.log",
        type="file",
    ),
    Kind(name="made-by", about="recipes of images built here", entries=_HASH, type="file", made_again=False),
    Kind(name="proofs", about="what was proven of images", entries=rf"{_HASH}\.json", type="file", made_again=False),
    Kind(name="pulled", about="notes of images pulled", entries=_HASH, type="file", made_again=False),
    Kind(name="pytest", about="the smoke tests' pytest", entries="[0-9a-f]{16}"),
    Kind(name="records", about="file lists of wheels", entries=_HASH, type="file"),
    Kind(name="roots", about="Debian roots", entries=r"[0-9a-f]{32}\.tar", type="file", next_to=".sha256"),
    # a container that `run` started may use one, and holds no lock
    Kind(name="sandboxes", about="images unpacked for Apptainer", entries=_HASH, made_again=False),
    Kind(name="taken", about="notes of wheels from elsewhere", entries=_HASH, type="file", made_again=False),
    Kind(name="times", about="how long stages took", entries=_HASH, type="file"),
    Kind(name="trials", about="metadata and wheels of trials", entries=_HASH, type="either"),
    Kind(name="uv", about="uv's cache"),
    Kind(
        name="wheels",
        about="compiled wheels",
        entries="[a-z0-9][a-z0-9-]*-[0-9a-f]{32}",
        next_to=".json",
        made_again=False,
    ),
)
"""Every kind, by name."""

_BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One thing that the cache holds."""

    kind: str
    name: str
    """Its path below the cache."""
    size: int
    """Bytes on the disk; a file with several names counts where it is found first."""
    written: float
    """When something in it was last written, seconds since 1970."""
    in_use: str = ""
    """Why it stays; empty where it may go."""


@dataclass(kw_only=True)
class Contents:
    """What a cache holds."""

    cache: Path
    entries: list[Entry] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    """Names below the cache that are nothing of envbuild's, fit for a terminal; they stay."""

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return sum(entry.size for entry in self.entries)


@dataclass(kw_only=True)
class Pruned:
    """What was removed, or would be."""

    removed: list[Entry] = field(default_factory=list)
    stayed: list[tuple[Entry, str]] = field(default_factory=list)
    """Entries that were to go, and why each stayed."""
    size: int = 0
    """Bytes that are free again; a file that has a name elsewhere, too, frees none."""


def contents_of(cache: Path) -> Contents:
    """Return what the cache holds; removes nothing."""
    if not cache.is_dir():
        return Contents(cache=cache)
    with alone(cache) as quiet:
        return _contents(cache, quiet=quiet)


def prune(cache: Path, kinds: Collection[str], *, older_s: float = 0.0, dry_run: bool = False) -> Pruned:
    """Remove what the cache holds of `kinds`.

    Args:
        cache: the cache's folder.
        kinds: names of kinds.
        older_s: only what was last written more than so many seconds ago.
        dry_run: whether nothing is removed.

    """
    done, links = Pruned(), dict[tuple[int, int], int]()
    if not cache.is_dir():
        return done
    with alone(cache) as quiet:
        if not dry_run:
            for place in (cache, *(cache / kind.name for kind in KINDS)):
                if place == cache or _is_ours(place):
                    sweep(place)  # what killed runs left
        for entry in _contents(cache, quiet=quiet, kinds=kinds).entries:
            if time.time() - entry.written < older_s:
                continue
            files = [status for place in _places(cache, entry.kind, entry.name) for status in _walk(place)]
            why = entry.in_use or _remove(cache, entry, dry_run=dry_run)
            if why:
                done.stayed.append((entry, why))
                continue
            done.removed.append(entry)
            for status in files:
                names = links[status.st_dev, status.st_ino] = links.get((status.st_dev, status.st_ino), 0) + 1
                if stat.S_ISDIR(status.st_mode) or names == status.st_nlink:
                    done.size += status.st_blocks * 512
    return done


def _places(cache: Path, kind: str, name: str) -> list[Path]:
    """Return where an entry and what belongs to it lie; a lock's file stays, since somebody may wait for it."""
    next_to = _BY_NAME[kind].next_to
    return [cache / name, *([cache / f"{name}{next_to}"] if next_to and next_to != ".lock" else [])]


def _contents(cache: Path, *, quiet: bool, kinds: Collection[str] | None = None) -> Contents:
    found = Contents(cache=cache)
    seen: set[tuple[int, int]] = set()
    names = _names(cache)
    own = {kind.name for kind in KINDS}
    found.other += [shown(name) for name in names if name not in own and name != "use.lock" and not _is_scratch(name)]
    for kind in KINDS:
        if kind.name not in names or (kinds is not None and kind.name not in kinds):
            continue
        if not _is_ours(cache / kind.name):
            found.other.append(kind.name)
            continue
        for name, mine in _entries_of(cache, kind):
            if mine:
                found.entries.append(_measured(cache, kind, name, quiet=quiet, seen=seen))
            else:
                found.other.append(shown(f"{kind.name}/{name}"))
    return found


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names alone
    except OSError:
        return []


def _is_scratch(name: str) -> bool:
    return re.fullmatch(r"\.envbuild-[a-z]{1,32}-[0-9a-f]{16}\.tmp", name) is not None


def _is_ours(place: Path) -> bool:
    """Return whether `place` is a folder, no link, of this user."""
    try:
        status = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _entries_of(cache: Path, kind: Kind) -> Iterator[tuple[str, bool]]:
    """Yield what lies in the folder of a kind, by its path below it, and whether it is an entry."""
    if not kind.entries:
        yield "", True
        return
    pattern = re.compile(kind.entries, re.ASCII)
    belongs = re.compile(f"(?:{kind.entries}){re.escape(kind.next_to)}", re.ASCII) if kind.next_to else None
    for name in _names(cache / kind.name):
        if pattern.fullmatch(name):
            yield name, _has_type(cache / kind.name / name, kind)
        elif not _is_scratch(name) and not (belongs and belongs.fullmatch(name)):
            yield name, False


def _has_type(place: Path, kind: Kind) -> bool:
    try:
        status = place.lstat()
    except OSError:
        return False
    right = {"folder": (stat.S_ISDIR,), "file": (stat.S_ISREG,), "either": (stat.S_ISDIR, stat.S_ISREG)}[kind.type]
    return status.st_uid == os.geteuid() and any(check(status.st_mode) for check in right)


def _measured(cache: Path, kind: Kind, name: str, *, quiet: bool, seen: set[tuple[int, int]]) -> Entry:
    path = f"{kind.name}/{name}" if name else kind.name
    place, size, written = cache / path, 0, 0.0
    for status in (status for each in _places(cache, kind.name, path) for status in _walk(each)):
        written = max(written, status.st_mtime)
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            size += status.st_blocks * 512
    if kind.name == "builds":
        in_use = "its build goes on" if _is_locked(place.with_suffix(".lock")) else ""
    elif kind.name == "logs":
        young = time.time() - written < _YOUNG_S
        in_use = "it is being written" if is_written(place) or (young and not quiet) else ""
    else:
        in_use = "" if quiet else _BY_A_RUN
    return Entry(kind=kind.name, name=path, size=size, written=written, in_use=in_use)


def _walk(top: Path) -> Iterator[os.stat_result]:
    """Yield the status of `top` and of all below it; no link is followed, and what cannot be read is passed over."""
    left = [(top, 0)]
    while left:
        place, depth = left.pop()
        try:
            status = place.lstat()
        except OSError:
            continue
        yield status
        if stat.S_ISDIR(status.st_mode) and depth < _DEEPEST:
            with contextlib.suppress(OSError), os.scandir(place) as entries:
                left += [(Path(entry.path), depth + 1) for entry in entries]


def _is_locked(lock: Path) -> bool:
    with _held(lock) as mine:
        return not mine


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[bool]:
    """Hold the lock of a build, and yield whether that could be; where there is none, nobody holds it."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = True
    except OSError:
        mine = False
    try:
        yield mine
    finally:
        os.close(handle)


def _remove(cache: Path, entry: Entry, *, dry_run: bool) -> str:
    """Remove an entry; return why it stays, or nothing."""
    place = cache / entry.name
    if holds_mount(place):
        return "something is mounted in it"
    if dry_run:
        return ""
    with contextlib.ExitStack() as held:
        if entry.kind == "builds" and not held.enter_context(_held(place.with_suffix(".lock"))):
            return "its build goes on"
        try:
            # Taken from its place in one step, so that no run ever finds half of it; a kill in between leaves a temporary
            # folder, which the next run removes.
            with scratch("pruned", place.parent) as folder:
                _move(place.parent, folder, [each.name for each in _places(cache, entry.kind, entry.name)])
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _move(source: Path, target: Path, names: Iterable[str]) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    here = os.open(source, flags)  # a kind's folder is no link, the cache itself may be one
    there = os.open(target, flags | os.O_NOFOLLOW)
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
    finally:
        os.close(here)
        os.close(there)


def as_json(entry: Entry) -> dict[str, Any]:
    """Return an entry as JSON values."""
    written = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.written))
    return {
        "kind": entry.kind,
        "name": entry.name,
        "bytes": entry.size,
        "written": written,
        "in_use": entry.in_use or None,
    }
