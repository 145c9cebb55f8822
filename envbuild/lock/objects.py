"""One store of git objects: commits from clones of a site, from a folder or from the upstream, each checked by its id."""

import contextlib
import fcntl
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from envbuild.errors import DataError, HostError, LockError
from envbuild.lock.gitfiles import MODULES_LIMIT, Listing, read_listing
from envbuild.settings import Settings, redact
from envbuild.util.git import GitResult, Reach, make_repository, object_kind, objects_of, run_git
from envbuild.util.names import SafeName, checked, shown
from envbuild.util.scratch import scratch

T = TypeVar("T")


class NotAllowedError(DataError):
    """A source is at an address whose protocol the settings do not allow."""


class DamagedError(Exception):
    """The store of git objects does not give what it should hold, and may be damaged."""


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """A bare repository that is filled on demand, by one run at a time, and made again where it is damaged."""

    settings: Settings
    folder: Path
    note: Callable[[str], object] = field(default=lambda _: None, repr=False, compare=False)
    """Takes a line about what was damaged and is made again."""
    patience_s: int = 60
    """Seconds without progress after which a fetch ends."""

    def have(self, what: str, url: str, commit: str) -> None:
        """Fetch `commit` into the object store unless it is there."""
        self.make()
        if self.has(commit):
            return
        with self.alone():
            if self.has(commit):
                return
            for place in self._places(url):
                if self._borrow(place, commit):
                    return
            if url.startswith("file://"):
                self._from_folder(what, url, commit)
                return
            ran = self._fetch(what, url, commit)
        if ran.code == 0:
            if not self.has(commit):
                raise DamagedError(f"the commit {commit} was fetched and cannot be read")
            return
        last = shown(redact(reason_of(ran.stderr)), 400) if ran.stderr.strip() else "no answer"
        if re.search(r"not our ref|couldn't find remote ref|did not match any", ran.stderr):
            raise _no_commit(what, url, commit)
        # the words may be the other side's: they have the store looked at, and what is found there decides
        own = r"index-pack|fetch-pack|necessary objects|existing object|collision|packfile|corrupt|shallow"
        if run_git(self.folder, "rev-parse", "--is-shallow-repository").code or (
            re.search(own, ran.stderr, re.IGNORECASE) and not self.is_sound()
        ):
            raise DamagedError(last)
        host = urlsplit(url).hostname or url
        if ran.stalled:
            last = f"nothing came for {self.patience_s} s"
        raise HostError(
            f"the source of {shown(what)} at {commit[:12]} cannot be fetched from {host}: {last}",
            where=redact(url),
            hint="check the network and the proxy, or put a clone or the tree under the folder that the setting `sources` names",
        )

    def _fetch(self, what: str, url: str, commit: str) -> GitResult:
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
        return run_git(self.folder, "fetch", *options, operands=(url, commit), reach=reach, limit_s=4 * 3600)

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
        """Fetch `commit` from the repository that a `file://` address names; no git runs there."""
        self._check_allowed(what, url)
        objects = objects_of(Path(unquote(urlsplit(url).path)))
        if objects is None:
            raise HostError(f"the source of {shown(what)} is not a repository", where=url, hint="correct its address")
        if not self._borrow(objects, commit):
            raise _no_commit(what, url, commit)

    def _borrow(self, objects: Path, commit: str) -> bool:
        """Copy `commit` and its files from a clone's folder of objects, or return False where it does not hold them all.

        Only objects are read. Fetching from the clone would run a git there, which does what the clone's own
        configuration says.
        """
        try:
            if object_kind(self.folder, f"{commit}^{{tree}}", borrowed=(objects,)) is None:
                return False
            listed = run_git(
                self.folder, "ls-tree", "-r", "-t", "-z", "--full-tree", operands=(commit,), borrowed=(objects,)
            )
            root = object_kind(self.folder, f"{commit}^{{tree}}", borrowed=(objects,))
        except (LockError, HostError) as error:
            self.note(f"the clone {objects} is skipped: {error.what}")
            return False
        if listed.code or root is None:
            return False
        ids = {commit, root[0]}
        ids |= {m[1].decode() for m in re.finditer(rb"\d{6} (?:blob|tree) ([0-9a-f]{40})\t[^\0]*\0", listed.stdout)}
        wanted = "".join(f"{oid}\n" for oid in sorted(ids)).encode()
        with tempfile.TemporaryFile(dir=self.folder.parent) as pack:
            options = ("--stdout", "--quiet", "--window=0")
            packed = run_git(
                self.folder, "pack-objects", *options, stdin=wanted, stdout=pack, borrowed=(objects,), limit_s=3600
            )
            pack.seek(0)
            # this computes the id of each object from its content: a clone's word is not taken for it
            if packed.code or run_git(self.folder, "index-pack", "--stdin", stdin=pack, limit_s=3600).code:
                self.note(f"the clone {objects} is skipped: it does not hold all files of {commit}")
                return False
        held = run_git(self.folder, "cat-file", "--batch-check=%(objectname)", stdin=wanted)
        return held.code == 0 and held.stdout == wanted

    def _places(self, url: str) -> list[Path]:
        """Return the folders of objects of the clones in the site's `sources` folder that may hold a commit of `url`."""
        name = repository_name(url)
        if self.settings.sources is None or name is None:
            return []
        # one component each, and the site's folder may itself hold links
        found = (objects_of(self.settings.sources / folder) for folder in (name, f"{name}.git"))
        return [objects for objects in found if objects is not None]

    def has(self, commit: str) -> bool:
        return self.kind_of(f"{commit}^{{tree}}") is not None

    def tree_at(self, commit: str) -> str:
        found = self.kind_of(f"{commit}^{{tree}}")
        if found is None:
            raise DamagedError(f"the commit {commit} is missing")
        return found[0]

    def kind_of(self, name: str) -> tuple[str, str, int] | None:
        try:
            return object_kind(self.folder, name)
        except LockError as error:
            raise DamagedError(error.what) from error

    def listing(self, what: str, commit: str) -> Listing:
        return read_listing(self._git("ls-tree", "-r", "-z", "-l", "--full-tree", operands=(commit,)), what=what)

    def modules(self, listing: Listing) -> bytes:
        if listing.modules is None:
            return b""
        found = self.kind_of(listing.modules)
        if found is None:
            raise DamagedError(f"the object {listing.modules} is missing")
        if found[2] > MODULES_LIMIT:
            raise DataError(f"a .gitmodules has {found[2]} bytes", hint="ask upstream to correct it")
        return self._git("cat-file", "blob", operands=(listing.modules,))

    def write_tree(self, commit: str, folder: Path) -> None:
        with scratch("source", made(self.folder.parent)) as own:
            index = own / "index"
            self._git("read-tree", operands=(commit,), index=index, work_tree=folder)
            self._git("checkout-index", "--all", "--quiet", index=index, work_tree=folder)

    def _git(
        self,
        command: str,
        *options: str,
        operands: tuple[str, ...] = (),
        index: Path | None = None,
        work_tree: Path | None = None,
    ) -> bytes:
        ran = run_git(self.folder, command, *options, operands=operands, index=index, work_tree=work_tree)
        if ran.code:
            last = shown(ran.stderr.strip().splitlines()[-1]) if ran.stderr.strip() else f"git exited with {ran.code}"
            if "No space left on device" in ran.stderr:
                raise HostError(
                    f"git {command} failed: {last}", where=str(work_tree or self.folder), hint="free some space"
                )
            raise DamagedError(f"git {command} failed: {last}")
        return ran.stdout

    def again(self, work: Callable[[], T]) -> T:
        """Return what `work` returns; where the store of objects is damaged, make it again and try once more."""
        seen = self.identity()
        try:
            return work()
        except DamagedError as damage:
            if seen is None:
                seen = self.identity()
            with self.alone():
                if self.identity() == seen and self.folder.exists():  # no other run has made it again
                    if self.is_sound():  # then what was asked for is at fault, and the other objects stay
                        raise LockError(shown(str(damage)), hint="look at the commit that is pinned") from damage
                    self.note(f"the store of git objects is damaged ({shown(str(damage))}); it is made again")
                    with scratch("source", made(self.folder.parent)) as own:
                        self.folder.rename(own / "objects.git")
        try:
            return work()
        except DamagedError as damage:
            raise LockError(
                f"the store of git objects is damaged: {shown(str(damage))}",
                where=str(self.folder),
                hint="look at that disk, remove that folder and run again",
            ) from damage

    def identity(self) -> int | None:
        """Return what distinguishes this store from one that another run makes in its place."""
        try:
            return (self.folder / "info/attributes").stat().st_mtime_ns
        except OSError:
            return None

    def is_sound(self) -> bool:
        """Return whether every object of the store is what its id says. Takes seconds to minutes."""
        ran = run_git(self.folder, "fsck", "--no-dangling", "--no-reflogs", "--no-progress", limit_s=3600)
        output = ran.stdout.decode("utf-8", "replace") + ran.stderr
        # a format that git warns of ("error in tree …") may be upstream's; a commit from a clone is without its parents
        return ran.code < 128 and re.search(r"(?m)^(error: |missing (blob|tree) )", output) is None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the store's lock: git itself refuses a second shallow fetch, and a killed one's lock stays for good."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        with self.folder.with_suffix(".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            (self.folder / "shallow.lock").unlink(missing_ok=True)
            for left in (self.folder / "objects/pack").glob("tmp_*"):  # no other process writes now
                left.unlink(missing_ok=True)
            yield

    def make(self) -> None:
        if (self.folder / "info/attributes").exists() and (self.folder / "HEAD").exists():
            return
        if self.folder.is_dir():  # half made, or by a release before this one
            make_repository(self.folder)
            return
        with whole(self.folder) as folder:
            make_repository(folder)


def reason_of(stderr: str) -> str:
    """Return why a fetch failed: git's last line without the address, which the message has anyway and a long one would hide."""
    return re.sub(r"^fatal: unable to access '[^']*': ", "", stderr.strip().splitlines()[-1])


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `folder` in one step, unless another run has made that meanwhile."""
    with scratch("source", made(folder.parent)) as own:
        part = own / "made"
        part.mkdir()
        yield part
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def repository_name(url: str) -> str | None:
    """Return the last part of an address, which names a clone of it, or None where that is no name."""
    try:
        return checked(SafeName, urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1].removesuffix(".git"))
    except ValueError:
        return None


def _no_commit(what: str, url: str, commit: str) -> LockError:
    return LockError(
        f"{redact(url)} has no commit {commit}",
        where=f"the source of {shown(what)}",
        hint="correct the pin: all 40 digits, of a commit that the upstream has",
    )
