"""Source trees by commit: from the upstream, or from a site's own folder; kept in the cache, verified by git's ids."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from envbuild.components.base import Tree
from envbuild.errors import DataError, HostError, LockError
from envbuild.lock.checked_sources import (
    MOST_SUBMODULES,
    CheckedTree,
    below,
    check_source,
    checked_source,
    choice,
    differs,
    direct,
    inner_tree,
    strays_of,
    url_or_none,
)
from envbuild.lock.gitfiles import read_gitmodules, submodule_url
from envbuild.lock.model import GitSource, Submodule
from envbuild.lock.objects import DamagedError, ObjectStore, made, repository_name, whole
from envbuild.lock.trees import copy_tree, tree_id, unpack
from envbuild.settings import Settings, redact
from envbuild.util.below import OutsideError, path_below
from envbuild.util.names import TreePath, checked, shown
from envbuild.util.scratch import scratch

_DEEPEST = 8  # submodules in one another


@dataclass(frozen=True, kw_only=True)
class SourceStore:
    """A folder of git objects and checked-out trees, filled on demand."""

    settings: Settings
    note: Callable[[str], object] = field(default=lambda _: None, repr=False, compare=False)
    """Takes a line about what was damaged and is made again."""
    patience_s: int = 60
    """Seconds without progress after which a fetch ends."""

    @functools.cached_property
    def objects(self) -> ObjectStore:
        """The git objects that trees are made from."""
        folder = self.settings.cache_dir / "git" / "objects.git"
        return ObjectStore(settings=self.settings, folder=folder, note=self.note, patience_s=self.patience_s)

    @property
    def _trees(self) -> Path:
        return self.settings.cache_dir / "git" / "trees"

    def pin(self, wanted: Tree) -> GitSource:
        """Return `wanted` with its tree id and the pins of its submodules.

        Raises:
            DataError: its name, its address or a submodule of it is none that is used.
            LockError: the upstream answers and has no such commit, or its tree is none that can be used.
            HostError: neither the site's folder nor the upstream can give it; the message names the host.

        """
        check_source(wanted.name, wanted.url, wanted.commit)
        return self.objects.again(lambda: self._pin(wanted))

    def _pin(self, wanted: Tree) -> GitSource:
        self.objects.have(wanted.name, wanted.url, wanted.commit)
        tree = self.objects.tree_at(wanted.commit)
        submodules = self._submodules(wanted.name, wanted.url, wanted.commit, wanted.submodules)
        return GitSource(name=wanted.name, url=wanted.url, commit=wanted.commit, tree=tree, submodules=submodules)

    def _submodules(
        self, what: str, url: str, commit: str, chosen: tuple[str, ...] | None, depth: int = 0
    ) -> tuple[Submodule, ...]:
        listing = self.objects.listing(what, commit)
        if not listing.links:
            return ()
        if depth == _DEEPEST:
            raise DataError(f"{shown(what)} has submodules nested deeper than {_DEEPEST}", where=redact(url))
        urls = read_gitmodules(self.objects.modules(listing), what=what)
        found: list[Submodule] = []
        for path, linked in sorted(listing.links.items()):
            if chosen is not None and path not in chosen:
                found.append(Submodule(path=path, url=url_or_none(urls.get(path, "")), commit=linked, used=False))
                continue
            if path not in urls:
                raise DataError(
                    f"{shown(what)} links {path} at {linked} and its .gitmodules has no address for it",
                    where=redact(url),
                )
            inner, inner_url = f"{what}/{path}", submodule_url(url, urls[path], what=f"{what}/{path}")
            self.objects.have(inner, inner_url, linked)
            found.append(Submodule(path=path, url=inner_url, commit=linked, tree=self.objects.tree_at(linked)))
            nested = self._submodules(inner, inner_url, linked, None, depth + 1)
            for each in nested:
                try:
                    found.append(each.model_copy(update={"path": checked(TreePath, f"{path}/{each.path}")}))
                except ValueError as error:
                    raise DataError(f"a submodule of {shown(what)} is too deep: {error}", where=redact(url)) from None
            if len(found) > MOST_SUBMODULES:
                raise DataError(f"{shown(what)} has more than {MOST_SUBMODULES} submodules", where=redact(url))
        return tuple(found)

    def checkout(self, source: GitSource) -> Path:
        """Return a folder with exactly the files of `source` and its submodules.

        Raises:
            DataError: a name or an address of it is none that is used.
            LockError: the tree at that commit is not the one that the lock names.
            HostError: it cannot be had.

        """
        plain = self.plain_folder(source)
        if plain is not None:
            return plain
        tree = checked_source(source)

        def made() -> Path:
            return self._cached(f"{source.name}-{source.commit}{choice(tree)}", self._known(tree), self._fill)

        return self.objects.again(made)

    def plain_folder(self, source: GitSource) -> Path | None:
        """Return the site's own unpacked tree or archive of `source`, verified, or None when it has none.

        Looked for as `<name>-<commit>` and the repository's name likewise: a folder, or a .tar, .tar.gz or .tar.xz with
        one folder in it.

        Raises:
            DataError: a name or an address of `source` is none that is used.
            LockError: it is not what the lock names.

        """
        if self.settings.sources is None:
            return None
        tree = checked_source(source)
        for name in (source.name, repository_name(source.url)):
            for suffix in ("", ".tar", ".tar.gz", ".tar.xz") if name else ():
                place = self.settings.sources / f"{name}-{source.commit}{suffix}"
                if suffix == "" and place.is_dir():
                    return self.objects.again(functools.partial(self._own, source.name, tree, place))
                if suffix and place.is_file():
                    return self.objects.again(functools.partial(self._unpacked, source.name, tree, place))
        return None

    def tree_of(self, folder: Path, submodules: tuple[Submodule, ...] = ()) -> str:
        """Return the git tree id of the files in `folder`, with `submodules` as links.

        Raises:
            LockError: it holds what no git tree does.

        """
        return self._id_of(folder, submodules, None)

    def _own(self, name: str, source: CheckedTree, place: Path) -> Path:
        """Return the site's own folder, or a copy without what the lock does not name where it holds such."""
        place = place.resolve()
        self._verify(source, place)
        strays = strays_of(source, place)
        if not strays:
            return place

        def fill(_: CheckedTree, part: Path) -> None:
            copy_tree(place, part, without=strays)

        return self._cached(f"{name}-{source.commit}-own{choice(source)}", source, fill)

    def _unpacked(self, name: str, source: CheckedTree, archive: Path) -> Path:
        def fill(_: CheckedTree, part: Path) -> None:
            with scratch("source", made(self._trees)) as own:
                place = own / "tree"
                unpack(archive, place)
                entries = list(place.iterdir())
                one = len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink()
                tree = entries[0] if one else place
                self._verify(source, tree, shown_as=archive)
                copy_tree(tree, part, without=strays_of(source, tree))

        return self._cached(f"{name}-{source.commit}-archive{choice(source)}", source, fill)

    def _cached(self, name: str, tree: CheckedTree, fill: Callable[[CheckedTree, Path], None]) -> Path:
        """Return the cached tree `name`, verified; what is not there or was changed is made by `fill`.

        Raises:
            DamagedError: what `fill` made is not the tree.

        """
        try:
            folder = path_below(self._trees, name)
        except OutsideError as error:
            raise LockError(
                f"the cached source of {tree.what} is a link", where=str(error), hint="remove it"
            ) from error
        if folder.is_dir() and self._fault(tree, folder) is None:
            return folder
        self.objects.make()
        with self.objects.alone():  # another run may have made it meanwhile, and must not find half of it
            fault = self._fault(tree, folder) if folder.is_dir() else None
            if folder.is_dir() and fault is None:
                return folder
            if fault is not None:
                self.note(f"the cached source of {tree.what} was changed ({fault}); it is made again")
                with scratch("source", made(self._trees)) as own:
                    folder.rename(own / "tree")
        try:
            with whole(folder) as part:
                fill(tree, part)
                part.chmod(0o755)
                fault = self._fault(tree, part)
                if fault is not None:
                    raise DamagedError(f"the source of {tree.what} at {tree.commit}: {fault}")
        except OSError as error:
            raise HostError(
                f"the source of {tree.what} cannot be written: {error.strerror}",
                where=str(error.filename or folder),
                hint="look at the disk and the setting cache_dir",
            ) from error
        return folder

    def _known(self, source: CheckedTree) -> CheckedTree:
        """Return `source` with the tree ids that its lock does not name taken from the objects."""
        found = []
        for submodule in source.submodules:
            if submodule.used and submodule.tree is None:
                self.objects.have(f"{source.what}/{submodule.path}", submodule.url, submodule.commit)
                found.append(submodule.model_copy(update={"tree": self.objects.tree_at(submodule.commit)}))
            else:
                found.append(submodule)
        tree = source.tree
        if tree is None:
            self.objects.have(source.what, source.url, source.commit)
            tree = self.objects.tree_at(source.commit)
        return replace(source, tree=tree, submodules=tuple(found))

    def _fill(self, source: CheckedTree, folder: Path) -> None:
        """Write the files of `source` and of its submodules that are used into the empty `folder`."""
        self.objects.have(source.what, source.url, source.commit)
        tree = self.objects.tree_at(source.commit)
        if source.tree is not None and tree != source.tree:
            raise differs(source, tree, source.url)
        links = self.objects.listing(source.what, source.commit).links
        unlisted = sorted(set(links) - {submodule.path for submodule in direct(source.submodules)})
        if unlisted:
            raise LockError(
                f"the lock does not list the submodules of {source.what} at {source.commit}: {shown(', '.join(unlisted), 200)}",
                hint="make the lock again",
            )
        self.objects.write_tree(source.commit, folder)
        for submodule in direct(source.submodules):
            if links.get(submodule.path) != submodule.commit:
                raise LockError(
                    f"the source of {source.what} has no submodule {submodule.path} at {submodule.commit}, which the lock names",
                    where=redact(source.url),
                    hint="make the lock again",
                )
            if submodule.used:
                inner = below(folder, submodule.path)
                inner.mkdir(exist_ok=True)
                self._fill(inner_tree(source, submodule), inner)

    def _id_of(
        self, folder: Path, submodules: tuple[Submodule, ...], wanted: CheckedTree | None, *, own: bool = False
    ) -> str:
        links = {s.path: s.commit for s in direct(submodules)}
        try:
            found = tree_id(folder, links, own=own)
            if (
                wanted is not None
                and wanted.tree not in {None, found}
                and self.objects.identity()
                and self.objects.has(wanted.commit)
            ):
                odd = self.objects.listing(wanted.what, wanted.commit).odd_modes
                found = tree_id(folder, links, own=own, odd_modes=odd) if odd else found
        except OSError as error:
            raise LockError(f"a source tree cannot be read: {error.strerror}", where=str(folder)) from error
        return found

    def _fault(self, source: CheckedTree, folder: Path) -> str | None:
        """Return what a tree in the cache is that it should not be, or None."""
        try:
            found = self._id_of(folder, source.submodules, source, own=True)
            if source.tree is not None and found != source.tree:
                return f"its tree is {found}, not {source.tree}"
            for submodule in direct(source.submodules):
                inner = below(folder, submodule.path)
                if submodule.used:
                    fault = self._fault(inner_tree(source, submodule), inner)
                    if fault is not None:
                        return f"{submodule.path}: {fault}"
                elif inner.exists() and any(inner.iterdir()):
                    return f"{submodule.path} should be empty"
        except LockError as error:
            return error.what
        return None

    def _verify(self, source: CheckedTree, folder: Path, *, shown_as: Path | None = None) -> None:
        """Raise LockError where a site's own tree is not what the lock names."""
        found = self._id_of(folder, source.submodules, source) if folder.is_dir() else "missing"
        if source.tree is not None and found != source.tree:
            raise differs(source, found, str(shown_as or folder))
        for submodule in direct(source.submodules):
            inner = below(folder, submodule.path)
            if submodule.used and submodule.tree is not None:
                self._verify(inner_tree(source, submodule), inner, shown_as=shown_as)
