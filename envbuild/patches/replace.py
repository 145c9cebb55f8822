"""Replacing several files of a tree: all of them or none, also when the run is killed.

A list of the files (`.envbuild-patch` in the tree's root) is written before anything else. Then each file's new and old
content is written next to it, and the new ones are renamed to their places. Renaming the list to `.envbuild-patch.done` is
the moment from which the change holds. A run that finds the list puts the old contents back; one that finds the other name
only removes what is left. Both go by blob ids, below the tree alone and through no link.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IMODE
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from envbuild.errors import PatchError
from envbuild.patches.manifest import FILE_LIMIT, ObjectId, TreePath, blob_id
from envbuild.util.below import OutsideError, open_below, read_below
from envbuild.util.foreign_json import parse_json

BEGUN, DONE = ".envbuild-patch", ".envbuild-patch.done"
_NEW = ".envbuild-patch.new"  # the list while it is written
_LIST_LIMIT = 2**20  # bytes


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    path: TreePath
    old: ObjectId
    new: ObjectId


class _List(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    token: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    files: Annotated[tuple[_Entry, ...], Field(max_length=1000)]

    def staged(self, index: int, kind: str) -> str:
        """Return the path of what is written next to a file."""
        folder, slash, _ = self.files[index].path.rpartition("/")
        return f"{folder}{slash}.envbuild-{self.token}-{index}.{kind}"


@contextmanager
def alone(tree: Path) -> Iterator[None]:
    """Keep other calls on this tree waiting, and first settle what a killed one left.

    A tree that cannot be opened or locked is left to what comes next.

    Raises:
        PatchError: what was left cannot be settled.

    """
    handle, locked = None, False
    with suppress(OSError):
        handle = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(handle, fcntl.LOCK_EX)
        locked = True
    try:
        if handle is not None:
            _settle_before(tree.resolve(), locked=locked)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _settle_before(root: Path, *, locked: bool) -> None:
    if not any(os.path.lexists(root / name) for name in (BEGUN, DONE, _NEW)):
        return
    if not locked:
        raise PatchError(
            "an earlier run was killed or is still at work; this file system has no locks that show which",
            where=str(root / BEGUN),
            hint="where no run is at work, move the tree to a file system with locks and run this again there",
        )
    try:
        left = settle(root)
    except (OSError, OutsideError) as error:
        raise PatchError(f"what a killed run left cannot be removed: {error}", where=str(root)) from error
    if left:
        raise PatchError(
            f"a killed run left {', '.join(left)} changed, which cannot be put back",
            where=str(root),
            hint="let this user write there and run it again",
        )


def replace(root: Path, old: Mapping[str, tuple[bytes, int]], new: Mapping[str, bytes]) -> None:
    """Give every file of `new` its new content, or none of them.

    Args:
        root: the tree, whose lock `alone` holds.
        old: content and mode of each of these files as they were read; the mode stays.
        new: the new contents.

    Raises:
        PatchError: the tree cannot be written, or changed meanwhile; it is as it was.

    """
    if not new:
        return
    for path in new:
        _check_writable(root, path)
    entries = tuple(_Entry(path=p, old=blob_id(old[p][0]), new=blob_id(content)) for p, content in new.items())
    plan = _List(token=secrets.token_hex(8), files=entries)
    try:
        _write(root, _NEW, plan.model_dump_json().encode(), 0o600)
        _rename(root, _NEW, BEGUN)
        for index, (path, content) in enumerate(new.items()):
            _stage(root, path, plan.staged(index, "new"), content, old[path][1])
            _stage(root, path, plan.staged(index, "old"), *old[path])
        for index, path in enumerate(new):
            _swap(root, path, plan.staged(index, "new"), old[path][0])
        _rename(root, BEGUN, DONE)
        settle(root)
    except BaseException as error:
        if not (_give_up(root, error) and isinstance(error, OSError)):
            raise


def _give_up(root: Path, error: BaseException) -> bool:
    """Settle the tree after an error, and return whether the change holds: the error came after the last file."""
    done = os.path.lexists(root / DONE)
    try:
        left = settle(root)
    except (OSError, OutsideError) as second:
        left = [str(second)]
    if left:
        raise PatchError(
            f"the tree cannot be written, and {', '.join(left)} could not be {'removed' if done else 'put back'}",
            where=str(root),
            hint="let this user write there and run envbuild patch check, which tries again",
        ) from error
    if isinstance(error, OSError | OutsideError) and not done:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PatchError(
            f"the tree cannot be written: {reason}; it is as it was",
            where=str(root / str(getattr(error, "filename", None) or "")),
            hint="patch a copy that you may write to",
        ) from error
    return done


def settle(root: Path) -> list[str]:
    """Finish or put back what a run left in the tree, and return the paths that could not be put back.

    Raises:
        PatchError: the list is none that this module writes.
        OSError: something cannot be removed.
        OutsideError: a link is on the way.

    """
    left: list[str] = []
    for name in (DONE, BEGUN):
        plan = _read_list(root, name)
        if plan is None:
            continue
        if name == BEGUN:
            left = [entry.path for index, entry in enumerate(plan.files) if not _put_back(root, plan, index)]
            if left:
                return left
        for index in range(len(plan.files)):
            for kind in ("new", "old"):
                _remove(root, plan.staged(index, kind))
        _remove(root, name)
    _remove(root, _NEW)
    return left


def _read_list(root: Path, name: str) -> _List | None:
    try:
        return _List.model_validate(parse_json(read_below(root, name, limit=_LIST_LIMIT), limit=_LIST_LIMIT))
    except FileNotFoundError:
        return None
    except (ValidationError, ValueError) as error:  # OutsideError is a ValueError, too
        raise PatchError(
            f"{name} is not what envbuild writes there",
            where=str(root / name),
            hint="compare the tree with its revision, then remove that file",
        ) from error


def _put_back(root: Path, plan: _List, index: int) -> bool:
    """Give a file its old content where it has the new one, and return whether nothing stood against that."""
    entry, backup = plan.files[index], plan.staged(index, "old")
    try:
        if blob_id(read_below(root, entry.path, limit=FILE_LIMIT)) != entry.new:
            return True  # not replaced yet, or somebody has changed it since
        # nothing was replaced before every backup was whole
        if blob_id(read_below(root, backup, limit=FILE_LIMIT)) == entry.old:
            _rename(root, backup, entry.path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, OutsideError):
        return False
    return True


def _check_writable(root: Path, path: str) -> None:
    for what in (root / path, (root / path).parent, root):
        # root may write to what is marked read-only, but the mark means that it should not
        if not what.stat().st_mode & 0o222:
            raise PatchError(f"{what.name} is read-only", where=str(what), hint="patch a copy that you may write to")


def _stage(root: Path, path: str, staged: str, content: bytes, mode: int) -> None:
    """Write `content` as `staged`, ready to be renamed to `path`."""
    handle = open_below(root, path)
    try:
        status = os.fstat(handle)
    finally:
        os.close(handle)
    _write(root, staged, content, mode, owner=(status.st_uid, status.st_gid))


def _write(root: Path, path: str, content: bytes, mode: int, *, owner: tuple[int, int] | None = None) -> None:
    with os.fdopen(open_below(root, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
        if owner is not None and owner != (os.geteuid(), os.getegid()):
            with suppress(PermissionError):
                os.fchown(file.fileno(), *owner)
        os.fchmod(file.fileno(), S_IMODE(mode))


@contextmanager
def _folder_of(root: Path, path: str) -> Iterator[tuple[int, str]]:
    folder, _, name = path.rpartition("/")
    flags = os.O_RDONLY | os.O_DIRECTORY
    handle = open_below(root, folder, flags) if folder else os.open(root, flags | os.O_CLOEXEC)
    try:
        yield handle, name
    finally:
        os.close(handle)


def _swap(root: Path, path: str, staged: str, old: bytes) -> None:
    if read_below(root, path, limit=FILE_LIMIT) != old:
        raise PatchError(f"{path} changed while it was patched", where=str(root / path), hint="patch again")
    _rename(root, staged, path)


def _rename(root: Path, path: str, to: str) -> None:
    """Rename within one folder."""
    with _folder_of(root, path) as (folder, name):
        os.rename(name, to.rpartition("/")[2], src_dir_fd=folder, dst_dir_fd=folder)


def _remove(root: Path, path: str) -> None:
    with suppress(FileNotFoundError, NotADirectoryError), _folder_of(root, path) as (folder, name):
        os.unlink(name, dir_fd=folder)
