"""What a source states, checked before a path or an address is made of it: its commit, its tree and its submodules."""

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.errors import DataError, LockError
from envbuild.lock.model import GitSource, Submodule
from envbuild.settings import redact
from envbuild.util.below import OutsideError, path_below
from envbuild.util.names import Commit, SafeName, SourceUrl, TreePath, checked, shown

MOST_SUBMODULES = 500


@dataclass(frozen=True, kw_only=True)
class CheckedTree:
    """A source or one of its submodules, checked; `what` names it in messages and is part of no path."""

    what: str
    url: str
    commit: str
    tree: str | None
    submodules: tuple[Submodule, ...]


def check_source(name: str, url: str, commit: str) -> None:
    try:
        checked(SafeName, name)
        checked(SourceUrl, url)
        checked(Commit, commit)
    except ValueError as error:
        raise DataError(
            f"the source {shown(name, 80)!r} cannot be used: {redact(str(error))}",
            where="the sources of the lock or the stack",
            hint="check who made it; nothing was fetched",
        ) from None


def checked_source(source: GitSource) -> CheckedTree:
    """Return `source` with every name in it checked.

    Raises:
        DataError: one is none that is used.

    """
    check_source(source.name, source.url, source.commit)
    paths = [s.path for s in source.submodules]
    if len(set(paths)) != len(paths) or len(paths) > MOST_SUBMODULES:
        raise DataError(
            f"the source {source.name} names a submodule twice, or more than {MOST_SUBMODULES}",
            where="the sources of the lock",
        )
    try:
        for submodule in source.submodules:
            checked(TreePath, submodule.path)
            checked(Commit, submodule.commit)
            if submodule.used:
                checked(SourceUrl, submodule.url)
        for tree in (source.tree, *(s.tree for s in source.submodules)):
            if tree is not None:
                checked(Commit, tree)
    except ValueError as error:
        raise DataError(
            f"a submodule of the source {source.name} cannot be used: {redact(str(error))}",
            where="the sources of the lock",
            hint="check who made it; nothing was fetched",
        ) from None
    return CheckedTree(
        what=source.name, url=source.url, commit=source.commit, tree=source.tree, submodules=source.submodules
    )


def direct(submodules: Collection[Submodule]) -> list[Submodule]:
    """Return those that are no submodule of another."""
    paths = {s.path for s in submodules}
    return [s for s in submodules if not any(above in paths for above in _above(s.path))]


def _above(path: str) -> Iterator[str]:
    at = path.find("/")
    while at > 0:
        yield path[:at]
        at = path.find("/", at + 1)


def inner_tree(source: CheckedTree, submodule: Submodule) -> CheckedTree:
    """Return a submodule of `source` with its own submodules."""
    inner = f"{submodule.path}/"
    nested = (s for s in source.submodules if s.path.startswith(inner))
    return CheckedTree(
        what=f"{source.what}/{submodule.path}",
        url=submodule.url,
        commit=submodule.commit,
        tree=submodule.tree,
        submodules=tuple(s.model_copy(update={"path": s.path.removeprefix(inner)}) for s in nested),
    )


def below(folder: Path, relative: str) -> Path:
    try:
        return path_below(folder, relative, make=False)
    except (OutsideError, OSError) as error:
        raise LockError(
            f"the submodule {shown(relative, 80)} leads out of its tree: {shown(str(error))}",
            where=str(folder),
            hint="check who made that tree",
        ) from None


def choice(source: CheckedTree) -> str:
    """Return what distinguishes trees of one commit: another choice of submodules is another tree."""
    used = [s for s in source.submodules if s.used]
    return (
        "-" + hashlib.sha256("".join(f"{s.path} {s.commit}\n" for s in used).encode()).hexdigest()[:8] if used else ""
    )


def strays_of(source: CheckedTree, folder: Path) -> set[Path]:
    """Return what a site's own tree holds that no id accounts for: git's own files, submodules that no build reads."""
    places = {s.path: below(folder, s.path) for s in source.submodules}
    git = {places[s.path] / ".git" for s in source.submodules if s.used} | {folder / ".git"}
    unread = {places[s.path] for s in source.submodules if not s.used}
    return {p for p in git if os.path.lexists(p)} | {p for p in unread if p.is_dir() and any(p.iterdir())}


def differs(source: CheckedTree, found: str, where: str) -> LockError:
    return LockError(
        f"the source of {source.what} is not what the lock names: its tree is {found}, the lock has {source.tree} (commit {source.commit})",
        where=redact(where),
        hint="supply the tree of that commit, unchanged, or lock again if the change is meant",
    )


def url_or_none(url: str) -> str:
    """Return an address that nothing is fetched from, or "" where it is none that could be."""
    try:
        return checked(SourceUrl, url)
    except ValueError:
        return ""
