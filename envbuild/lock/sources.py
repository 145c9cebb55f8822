"""Source trees by commit: from the upstream, or from a site's own folder; kept in the cache, verified by git's ids."""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from envbuild.components.base import Tree
from envbuild.errors import DataError, HostError, LockError
from envbuild.lock.gitfiles import MODULES_LIMIT, Listing, read_gitmodules, read_listing, submodule_url
from envbuild.lock.model import GitSource, Submodule
from envbuild.lock.trees import copy_tree, tree_id, unpack
from envbuild.settings import Settings, redact
from envbuild.util.below import OutsideError, path_below
from envbuild.util.git import Ran, Reach, make_repository, object_kind, objects_of, run_git
from envbuild.util.names import Commit, SafeName, SourceUrl, TreePath, checked, shown

T = TypeVar("T")
_DEEPEST = 8  # submodules in one another
_MOST_SUBMODULES = 500
_SCRATCH = ".scratch-"


class NotAllowedError(DataError):
    """A source is at an address whose protocol the settings do not allow."""


class _DamagedError(Exception):
    """The store of git objects does not give what it should hold, and may be damaged."""


@dataclass(frozen=True, kw_only=True)
class _Tree:
    """A source or one of its submodules, checked; `what` names it in messages and is part of no path."""

    what: str
    url: str
    commit: str
    tree: str | None
    submodules: tuple[Submodule, ...]


@dataclass(frozen=True, kw_only=True)
class SourceStore:
    """A folder of git objects and checked-out trees, filled on demand."""

    settings: Settings
    note: Callable[[str], object] = field(default=lambda _: None, repr=False, compare=False)
    """Takes a line about what was damaged and is made again."""
    patience_s: int = 60
    """Seconds without progress after which a fetch ends."""

    @property
    def _objects(self) -> Path:
        return self.settings.cache_dir / "git" / "objects.git"

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
        _check_source(wanted.name, wanted.url, wanted.commit)
        return self._again(lambda: self._pin(wanted))

    def _pin(self, wanted: Tree) -> GitSource:
        self._have(wanted.name, wanted.url, wanted.commit)
        tree = self._tree_at(wanted.commit)
        submodules = self._submodules(wanted.name, wanted.url, wanted.commit, wanted.submodules)
        return GitSource(name=wanted.name, url=wanted.url, commit=wanted.commit, tree=tree, submodules=submodules)

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
        tree = _checked_source(source)

        def made() -> Path:
            return self._cached(f"{source.name}-{source.commit}{_choice(tree)}", self._known(tree), self._fill)

        return self._again(made)

    def _cached(self, name: str, tree: _Tree, fill: Callable[[_Tree, Path], None]) -> Path:
        """Return the cached tree `name`, verified; what is not there or was changed is made by `fill`.

        Raises:
            _DamagedError: what `fill` made is not the tree.

        """
        try:
            folder = path_below(self._trees, name)
        except OutsideError as error:
            raise LockError(
                f"the cached source of {tree.what} is a link", where=str(error), hint="remove it"
            ) from error
        if folder.is_dir() and self._fault(tree, folder) is None:
            return folder
        self._make_store()
        with self._alone():  # another run may have made it meanwhile, and must not find half of it
            fault = self._fault(tree, folder) if folder.is_dir() else None
            if folder.is_dir() and fault is None:
                return folder
            if fault is not None:
                self.note(f"the cached source of {tree.what} was changed ({fault}); it is made again")
                with _scratch(self._trees) as scratch:
                    folder.rename(scratch / "tree")
        try:
            with _whole(folder) as part:
                fill(tree, part)
                part.chmod(0o755)
                fault = self._fault(tree, part)
                if fault is not None:
                    raise _DamagedError(f"the source of {tree.what} at {tree.commit}: {fault}")
        except OSError as error:
            raise HostError(
                f"the source of {tree.what} cannot be written: {error.strerror}",
                where=str(error.filename or folder),
                hint="look at the disk and the setting cache_dir",
            ) from error
        return folder

    def _known(self, source: _Tree) -> _Tree:
        """Return `source` with the tree ids that its lock does not name taken from the objects."""
        found = []
        for submodule in source.submodules:
            if submodule.used and submodule.tree is None:
                self._have(f"{source.what}/{submodule.path}", submodule.url, submodule.commit)
                found.append(submodule.model_copy(update={"tree": self._tree_at(submodule.commit)}))
            else:
                found.append(submodule)
        tree = source.tree
        if tree is None:
            self._have(source.what, source.url, source.commit)
            tree = self._tree_at(source.commit)
        return replace(source, tree=tree, submodules=tuple(found))

    def _fill(self, source: _Tree, folder: Path) -> None:
        """Write the files of `source` and of its submodules that are used into the empty `folder`."""
        self._have(source.what, source.url, source.commit)
        tree = self._tree_at(source.commit)
        if source.tree is not None and tree != source.tree:
            raise _differs(source, tree, source.url)
        links = self._listing(source.what, source.commit).links
        self._write_tree(source.commit, folder)
        for submodule in _direct(source.submodules):
            if links.get(submodule.path) != submodule.commit:
                raise LockError(
                    f"the source of {source.what} has no submodule {submodule.path} at {submodule.commit}, which the lock names",
                    where=redact(source.url),
                    hint="make the lock again",
                )
            if submodule.used:
                inner = _below(folder, submodule.path)
                inner.mkdir(exist_ok=True)
                self._fill(_inner(source, submodule), inner)

    def _write_tree(self, commit: str, folder: Path) -> None:
        with _scratch(self._objects.parent) as scratch:
            index = scratch / "index"
            self._git("read-tree", operands=(commit,), index=index, work_tree=folder)
            self._git("checkout-index", "--all", "--quiet", index=index, work_tree=folder)

    def _submodules(
        self, what: str, url: str, commit: str, chosen: tuple[str, ...] | None, depth: int = 0
    ) -> tuple[Submodule, ...]:
        listing = self._listing(what, commit)
        if not listing.links:
            return ()
        if depth == _DEEPEST:
            raise DataError(f"{shown(what)} has more than {_DEEPEST} submodules in one another", where=redact(url))
        urls = read_gitmodules(self._modules(listing), what=what)
        found: list[Submodule] = []
        for path, linked in sorted(listing.links.items()):
            if chosen is not None and path not in chosen:
                found.append(Submodule(path=path, url=_url_or_none(urls.get(path, "")), commit=linked, used=False))
                continue
            if path not in urls:
                raise DataError(
                    f"{shown(what)} links {path} at {linked} and its .gitmodules does not say where from",
                    where=redact(url),
                )
            inner, inner_url = f"{what}/{path}", submodule_url(url, urls[path], what=f"{what}/{path}")
            self._have(inner, inner_url, linked)
            found.append(Submodule(path=path, url=inner_url, commit=linked, tree=self._tree_at(linked)))
            nested = self._submodules(inner, inner_url, linked, None, depth + 1)
            for each in nested:
                try:
                    found.append(each.model_copy(update={"path": checked(TreePath, f"{path}/{each.path}")}))
                except ValueError as error:
                    raise DataError(f"a submodule of {shown(what)} is too deep: {error}", where=redact(url)) from None
            if len(found) > _MOST_SUBMODULES:
                raise DataError(f"{shown(what)} has more than {_MOST_SUBMODULES} submodules", where=redact(url))
        return tuple(found)

    def _modules(self, listing: Listing) -> bytes:
        if listing.modules is None:
            return b""
        found = self._object(listing.modules)
        if found is None:
            raise _DamagedError(f"the object {listing.modules} is missing")
        if found[2] > MODULES_LIMIT:
            raise DataError(f"a .gitmodules has {found[2]} bytes", hint="ask upstream to correct it")
        return self._git("cat-file", "blob", operands=(listing.modules,))

    def _listing(self, what: str, commit: str) -> Listing:
        return read_listing(self._git("ls-tree", "-r", "-z", "-l", "--full-tree", operands=(commit,)), what=what)

    def _tree_at(self, commit: str) -> str:
        found = self._object(f"{commit}^{{tree}}")
        if found is None:
            raise _DamagedError(f"the commit {commit} is missing")
        return found[0]

    def _object(self, name: str) -> tuple[str, str, int] | None:
        try:
            return object_kind(self._objects, name)
        except LockError as error:
            raise _DamagedError(error.what) from error

    def _has(self, commit: str) -> bool:
        return self._object(f"{commit}^{{tree}}") is not None

    def _have(self, what: str, url: str, commit: str) -> None:
        """Bring `commit` into the object store unless it is there."""
        self._make_store()
        if self._has(commit):
            return
        with self._alone():
            if self._has(commit):
                return
            for place in self._places(url):
                if self._borrow(place, commit):
                    return
            if url.startswith("file://"):
                self._from_folder(what, url, commit)
                return
            ran = self._fetch(what, url, commit)
        if ran.code == 0:
            if not self._has(commit):
                raise _DamagedError(f"the commit {commit} was fetched and cannot be read")
            return
        last = redact(shown(ran.said.strip().splitlines()[-1])) if ran.said.strip() else "no answer"
        if re.search(r"not our ref|couldn't find remote ref|did not match any", ran.said):
            raise _no_commit(what, url, commit)
        # the words may be the other side's: they have the store looked at, and what is found there decides
        own = r"index-pack|fetch-pack|necessary objects|existing object|collision|packfile|corrupt|shallow"
        if run_git(self._objects, "rev-parse", "--is-shallow-repository").code or (
            re.search(own, ran.said, re.IGNORECASE) and not self._is_sound()
        ):
            raise _DamagedError(last)
        host = urlsplit(url).hostname or url
        if ran.stalled:
            last = f"nothing came for {self.patience_s} s"
        raise HostError(
            f"the source of {shown(what)} at {commit[:12]} cannot be fetched from {host}: {last}",
            where=redact(url),
            hint="check the network and the proxy, or put a clone or the tree under the folder that the setting `sources` names",
        )

    def _fetch(self, what: str, url: str, commit: str) -> Ran:
        self._check_allowed(what, url)
        settings = self.settings
        reach = Reach(
            protocols=("https", *(p for p in settings.git_protocols if p == "ssh")),
            ca_bundle=settings.ca_bundle,
            https_proxy=settings.https_proxy,
            no_proxy=settings.no_proxy,
            patience_s=self.patience_s,
        )
        options = ("--quiet", "--no-tags", "--depth=1", "--no-recurse-submodules")
        return run_git(self._objects, "fetch", *options, operands=(url, commit), reach=reach, limit_s=4 * 3600)

    def _check_allowed(self, what: str, url: str) -> None:
        protocol = url.partition("://")[0]
        if protocol != "https" and protocol not in self.settings.git_protocols:
            raise NotAllowedError(
                f"the source of {shown(what)} is at {redact(url)}, and {protocol} is not allowed here",
                where="the setting git_protocols",
                hint=f'where you trust who wrote that address, set git_protocols = ["{protocol}"]; '
                "or put a clone or the tree under the folder that the setting `sources` names",
            )

    def _from_folder(self, what: str, url: str, commit: str) -> None:
        """Bring `commit` from the repository that a `file://` address names; no git runs there."""
        self._check_allowed(what, url)
        objects = objects_of(Path(unquote(urlsplit(url).path)))
        if objects is None:
            raise HostError(f"the source of {shown(what)} is no repository", where=url, hint="correct its address")
        if not self._borrow(objects, commit):
            raise _no_commit(what, url, commit)

    def _borrow(self, objects: Path, commit: str) -> bool:
        """Copy `commit` and its files from a clone's folder of objects, or return False where it does not hold them all.

        Only objects are read. Fetching from the clone would run a git there, which does what the clone's own
        configuration says.
        """
        try:
            if object_kind(self._objects, f"{commit}^{{tree}}", borrowed=(objects,)) is None:
                return False
            listed = run_git(
                self._objects, "ls-tree", "-r", "-t", "-z", "--full-tree", operands=(commit,), borrowed=(objects,)
            )
            root = object_kind(self._objects, f"{commit}^{{tree}}", borrowed=(objects,))
        except (LockError, HostError) as error:
            self.note(f"the clone {objects} is passed over: {error.what}")
            return False
        if listed.code or root is None:
            return False
        ids = {commit, root[0]}
        ids |= {m[1].decode() for m in re.finditer(rb"\d{6} (?:blob|tree) ([0-9a-f]{40})\t[^\0]*\0", listed.stdout)}
        wanted = "".join(f"{oid}\n" for oid in sorted(ids)).encode()
        with tempfile.TemporaryFile(dir=self._objects.parent) as pack:
            options = ("--stdout", "--quiet", "--window=0")
            packed = run_git(
                self._objects, "pack-objects", *options, stdin=wanted, stdout=pack, borrowed=(objects,), limit_s=3600
            )
            pack.seek(0)
            # this computes the id of each object from its content: a clone's word is not taken for it
            if packed.code or run_git(self._objects, "index-pack", "--stdin", stdin=pack, limit_s=3600).code:
                self.note(f"the clone {objects} is passed over: it does not hold all files of {commit}")
                return False
        held = run_git(self._objects, "cat-file", "--batch-check=%(objectname)", stdin=wanted)
        return held.code == 0 and held.stdout == wanted

    def _again(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; where the store of objects is damaged, make that anew and try once more."""
        seen = self._identity()
        try:
            return work()
        except _DamagedError as damage:
            if seen is None:
                seen = self._identity()
            with self._alone():
                if self._identity() == seen and self._objects.exists():  # no other run has made it anew
                    if self._is_sound():  # then what was asked for is at fault, and the other objects stay
                        raise LockError(shown(str(damage)), hint="look at the commit that is pinned") from damage
                    self.note(f"the store of git objects is damaged ({shown(str(damage))}); it is made again")
                    with _scratch(self._objects.parent) as scratch:
                        self._objects.rename(scratch / "objects.git")
        try:
            return work()
        except _DamagedError as damage:
            raise LockError(
                f"the store of git objects is damaged: {shown(str(damage))}",
                where=str(self._objects),
                hint="look at that disk, remove that folder and run again",
            ) from damage

    def _identity(self) -> int | None:
        """Return what tells this store from one that another run makes in its place."""
        try:
            return (self._objects / "info/attributes").stat().st_mtime_ns
        except OSError:
            return None

    def _is_sound(self) -> bool:
        """Return whether every object of the store is what its id says. Takes seconds to minutes."""
        ran = run_git(self._objects, "fsck", "--no-dangling", "--no-reflogs", "--no-progress", limit_s=3600)
        said = ran.stdout.decode("utf-8", "replace") + ran.said
        # a format that git warns of ("error in tree …") may be upstream's; a commit from a clone lacks its parents
        return ran.code < 128 and re.search(r"(?m)^(error: |missing (blob|tree) )", said) is None

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the store's lock: git itself refuses a second shallow fetch, and a killed one's lock stays for good."""
        self._objects.parent.mkdir(parents=True, exist_ok=True)
        with self._objects.with_suffix(".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            (self._objects / "shallow.lock").unlink(missing_ok=True)
            for left in (self._objects / "objects/pack").glob("tmp_*"):  # nobody else writes now
                left.unlink(missing_ok=True)
            yield

    def _make_store(self) -> None:
        self._trees.mkdir(parents=True, exist_ok=True)
        if (self._objects / "info/attributes").exists() and (self._objects / "HEAD").exists():
            return
        if self._objects.is_dir():  # half made, or by a release before this one
            make_repository(self._objects)
            return
        with _whole(self._objects) as folder:
            make_repository(folder)

    def _places(self, url: str) -> list[Path]:
        """Return the folders of objects of the clones in the site's `sources` folder that may hold a commit of `url`."""
        name = _repository(url)
        if self.settings.sources is None or name is None:
            return []
        # one component each, and the site's own folder may hold links of its own
        found = (objects_of(self.settings.sources / folder) for folder in (name, f"{name}.git"))
        return [objects for objects in found if objects is not None]

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
        tree = _checked_source(source)
        for name in (source.name, _repository(source.url)):
            for suffix in ("", ".tar", ".tar.gz", ".tar.xz") if name else ():
                place = self.settings.sources / f"{name}-{source.commit}{suffix}"
                if suffix == "" and place.is_dir():
                    return self._again(functools.partial(self._own, source.name, tree, place))
                if suffix and place.is_file():
                    return self._again(functools.partial(self._unpacked, source.name, tree, place))
        return None

    def _own(self, name: str, source: _Tree, place: Path) -> Path:
        """Return the site's own folder, or a copy without what the lock does not name where it holds such."""
        place = place.resolve()
        self._verify(source, place)
        strays = _strays(source, place)
        if not strays:
            return place

        def fill(_: _Tree, part: Path) -> None:
            copy_tree(place, part, without=strays)

        return self._cached(f"{name}-{source.commit}-own{_choice(source)}", source, fill)

    def _unpacked(self, name: str, source: _Tree, archive: Path) -> Path:
        def fill(_: _Tree, part: Path) -> None:
            with _scratch(self._trees) as scratch:
                unpack(archive, scratch)
                entries = list(scratch.iterdir())
                one = len(entries) == 1 and entries[0].is_dir() and not entries[0].is_symlink()
                tree = entries[0] if one else scratch
                self._verify(source, tree, shown_as=archive)
                copy_tree(tree, part, without=_strays(source, tree))

        return self._cached(f"{name}-{source.commit}-archive{_choice(source)}", source, fill)

    def tree_of(self, folder: Path, submodules: tuple[Submodule, ...] = ()) -> str:
        """Return the git tree id of the files in `folder`, with `submodules` as links.

        Raises:
            LockError: it holds what no git tree does.

        """
        return self._id_of(folder, submodules, None)

    def _id_of(
        self, folder: Path, submodules: tuple[Submodule, ...], wanted: _Tree | None, *, own: bool = False
    ) -> str:
        links = {s.path: s.commit for s in _direct(submodules)}
        try:
            found = tree_id(folder, links, own=own)
            if (
                wanted is not None
                and wanted.tree not in {None, found}
                and self._identity()
                and self._has(wanted.commit)
            ):
                odd = self._listing(wanted.what, wanted.commit).odd_modes
                found = tree_id(folder, links, own=own, odd_modes=odd) if odd else found
        except OSError as error:
            raise LockError(f"a source tree cannot be read: {error.strerror}", where=str(folder)) from error
        return found

    def _fault(self, source: _Tree, folder: Path) -> str | None:
        """Return what a tree in the cache is that it should not be, or None."""
        try:
            found = self._id_of(folder, source.submodules, source, own=True)
            if source.tree is not None and found != source.tree:
                return f"its tree is {found}, not {source.tree}"
            for submodule in _direct(source.submodules):
                inner = _below(folder, submodule.path)
                if submodule.used:
                    fault = self._fault(_inner(source, submodule), inner)
                    if fault is not None:
                        return f"{submodule.path}: {fault}"
                elif inner.exists() and any(inner.iterdir()):
                    return f"{submodule.path} should be empty"
        except LockError as error:
            return error.what
        return None

    def _verify(self, source: _Tree, folder: Path, *, shown_as: Path | None = None) -> None:
        """Raise LockError where a site's own tree is not what the lock names."""
        found = self._id_of(folder, source.submodules, source) if folder.is_dir() else "missing"
        if source.tree is not None and found != source.tree:
            raise _differs(source, found, str(shown_as or folder))
        for submodule in _direct(source.submodules):
            inner = _below(folder, submodule.path)
            if submodule.used and submodule.tree is not None:
                self._verify(_inner(source, submodule), inner, shown_as=shown_as)

    def _git(
        self,
        command: str,
        *options: str,
        operands: tuple[str, ...] = (),
        index: Path | None = None,
        work_tree: Path | None = None,
    ) -> bytes:
        ran = run_git(self._objects, command, *options, operands=operands, index=index, work_tree=work_tree)
        if ran.code:
            last = shown(ran.said.strip().splitlines()[-1]) if ran.said.strip() else f"git exited with {ran.code}"
            if "No space left on device" in ran.said:
                raise HostError(
                    f"git {command} failed: {last}", where=str(work_tree or self._objects), hint="free some space"
                )
            raise _DamagedError(f"git {command} failed: {last}")
        return ran.stdout


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """Give a folder below `parent` that is removed afterwards; what a killed run left there goes as well."""
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=parent, ignore_cleanup_errors=True) as name:
        handle = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)  # this says that it is in use
            yield Path(name)
        finally:
            os.close(handle)


def _sweep(parent: Path) -> None:
    for left in parent.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(handle).st_mtime > 60:  # it may be too new to be locked
                    shutil.rmtree(left)
            finally:
                os.close(handle)


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `folder` in one step, unless another run has made that meanwhile."""
    with _scratch(folder.parent) as scratch:
        part = scratch / "made"
        part.mkdir()
        yield part
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _check_source(name: str, url: str, commit: str) -> None:
    try:
        checked(SafeName, name)
        checked(SourceUrl, url)
        checked(Commit, commit)
    except ValueError as error:
        raise DataError(
            f"the source {shown(name, 80)!r} cannot be used: {redact(str(error))}",
            where="the sources of the lock or the stack",
            hint="look at who made it; nothing was fetched",
        ) from None


def _checked_source(source: GitSource) -> _Tree:
    """Return `source` with every name in it checked.

    Raises:
        DataError: one is none that is used.

    """
    _check_source(source.name, source.url, source.commit)
    paths = [s.path for s in source.submodules]
    if len(set(paths)) != len(paths) or len(paths) > _MOST_SUBMODULES:
        raise DataError(
            f"the source {source.name} names a submodule twice, or more than {_MOST_SUBMODULES}",
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
            hint="look at who made it; nothing was fetched",
        ) from None
    return _Tree(what=source.name, url=source.url, commit=source.commit, tree=source.tree, submodules=source.submodules)


def _below(folder: Path, relative: str) -> Path:
    try:
        return path_below(folder, relative, make=False)
    except (OutsideError, OSError) as error:
        raise LockError(
            f"the submodule {shown(relative, 80)} leads out of its tree: {shown(str(error))}",
            where=str(folder),
            hint="look at who made that tree",
        ) from None


def _repository(url: str) -> str | None:
    """Return the last part of an address, which names a clone of it, or None where that is no name."""
    try:
        return checked(SafeName, urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git"))
    except ValueError:
        return None


def _url_or_none(url: str) -> str:
    """Return an address that nothing is fetched from, or "" where it is none that could be."""
    try:
        return checked(SourceUrl, url)
    except ValueError:
        return ""


def _no_commit(what: str, url: str, commit: str) -> LockError:
    return LockError(
        f"{redact(url)} has no commit {commit}",
        where=f"the source of {shown(what)}",
        hint="correct the pin: all 40 digits, of a commit that the upstream has",
    )


def _direct(submodules: Collection[Submodule]) -> list[Submodule]:
    """Return those that are no submodule of another."""
    paths = {s.path for s in submodules}
    return [s for s in submodules if not any(above in paths for above in _above(s.path))]


def _above(path: str) -> Iterator[str]:
    at = path.find("/")
    while at > 0:
        yield path[:at]
        at = path.find("/", at + 1)


def _inner(source: _Tree, submodule: Submodule) -> _Tree:
    """Return a submodule of `source` with its own submodules."""
    inner = f"{submodule.path}/"
    nested = (s for s in source.submodules if s.path.startswith(inner))
    return _Tree(
        what=f"{source.what}/{submodule.path}",
        url=submodule.url,
        commit=submodule.commit,
        tree=submodule.tree,
        submodules=tuple(s.model_copy(update={"path": s.path.removeprefix(inner)}) for s in nested),
    )


def _choice(source: _Tree) -> str:
    """Return what tells trees of one commit apart: another choice of submodules is another tree."""
    used = [s for s in source.submodules if s.used]
    return (
        "-" + hashlib.sha256("".join(f"{s.path} {s.commit}\n" for s in used).encode()).hexdigest()[:8] if used else ""
    )


def _strays(source: _Tree, folder: Path) -> set[Path]:
    """Return what a site's own tree holds that no id accounts for: git's own files, submodules that no build reads."""
    places = {s.path: _below(folder, s.path) for s in source.submodules}
    git = {places[s.path] / ".git" for s in source.submodules if s.used} | {folder / ".git"}
    unread = {places[s.path] for s in source.submodules if not s.used}
    return {p for p in git if os.path.lexists(p)} | {p for p in unread if p.is_dir() and any(p.iterdir())}


def _differs(source: _Tree, found: str, where: str) -> LockError:
    return LockError(
        f"the source of {source.what} is not what the lock names: its tree is {found}, the lock says {source.tree} (commit {source.commit})",
        where=redact(where),
        hint="bring the tree of that commit, unchanged, or lock again if the change is meant",
    )
