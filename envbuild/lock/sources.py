"""Source trees by commit: from the upstream, or from a site's own folder; kept in the cache, verified by git's ids."""

import configparser
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

from envbuild.errors import DataError, HostError, LockError
from envbuild.lock.inputs import TreeInput
from envbuild.lock.model import GitSource, Submodule
from envbuild.settings import Settings, redact
from envbuild.util.scratch import scratch


@dataclass(frozen=True, kw_only=True)
class SourceStore:
    """A folder of git objects and checked-out trees, filled on demand."""

    settings: Settings

    @property
    def _objects(self) -> Path:
        return self.settings.cache_dir / "git" / "objects.git"

    @property
    def _trees(self) -> Path:
        return self.settings.cache_dir / "git" / "trees"

    def pin(self, wanted: TreeInput) -> GitSource:
        """Return `wanted` with its tree id and the pins of its submodules.

        Raises:
            LockError: the upstream answers and has no such commit.
            HostError: neither the site's folder nor the upstream can give it; the message names the host.

        """
        self._have(wanted.name, wanted.url, wanted.commit)
        tree = self._git("rev-parse", f"{wanted.commit}^{{tree}}").strip()
        submodules = self._submodules(wanted)
        return GitSource(name=wanted.name, url=wanted.url, commit=wanted.commit, tree=tree, submodules=submodules)

    def checkout(self, source: GitSource) -> Path:
        """Return a folder with exactly the files of `source` and its submodules.

        Raises:
            LockError: the tree at that commit is not the one that the lock names.
            HostError: it cannot be had.

        """
        plain = self.plain_folder(source)
        if plain is not None:
            return plain
        self._have(source.name, source.url, source.commit)
        tree = self._git("rev-parse", f"{source.commit}^{{tree}}").strip()
        if source.tree is not None and tree != source.tree:
            raise _differs(source, tree, source.url)
        used = [s for s in source.submodules if s.used]
        folder = self._trees / f"{source.name}-{source.commit}{_choice(source)}"
        if folder.is_dir():
            return folder
        with _whole(folder) as part:
            self._write_tree(source.commit, part)
            for submodule in used:
                self._have(f"{source.name}/{submodule.path}", submodule.url, submodule.commit)
                self._write_tree(submodule.commit, part / submodule.path)
            part.chmod(0o755)
        return folder

    def _write_tree(self, commit: str, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch("index") as index:
            env = {"GIT_INDEX_FILE": f"{index}/index", "GIT_WORK_TREE": str(folder)}
            self._git("read-tree", commit, env=env)
            self._git("checkout-index", "--all", env=env, cwd=folder)

    def _submodules(self, source: TreeInput) -> tuple[Submodule, ...]:
        listing = self._git("ls-tree", "-r", "-z", source.commit)
        links = {}
        for entry in filter(None, listing.split("\0")):
            meta, path = entry.split("\t", 1)
            mode, _, oid = meta.split()
            if mode == "160000":
                links[path] = oid
        if not links:
            return ()
        parser = configparser.ConfigParser(interpolation=None)
        stated = self._git("show", f"{source.commit}:.gitmodules") if "\t.gitmodules\0" in listing else ""
        parser.read_string("\n".join(line.strip() for line in stated.splitlines()))
        urls = {parser[s]["path"]: parser[s]["url"] for s in parser.sections()}
        found: list[Submodule] = []
        for path, commit in sorted(links.items()):
            used = source.submodules is None or path in source.submodules
            if not used:
                found.append(Submodule(path=path, url=urls.get(path, ""), commit=commit, used=False))
                continue
            if path not in urls:
                raise DataError(
                    f"{source.name} links {path} at {commit} and its .gitmodules does not say where from",
                    where=source.url,
                )
            url = (
                urljoin(source.url.removesuffix(".git") + "/", urls[path])
                if urls[path].startswith("..")
                else urls[path]
            )
            self._have(f"{source.name}/{path}", url, commit)
            tree = self._git("rev-parse", f"{commit}^{{tree}}").strip()
            found.append(Submodule(path=path, url=url, commit=commit, tree=tree))
            nested = self._submodules(TreeInput(name=f"{source.name}/{path}", url=url, commit=commit))
            found += [n.model_copy(update={"path": f"{path}/{n.path}"}) for n in nested]
        return tuple(found)

    def _have(self, name: str, url: str, commit: str) -> None:
        """Bring `commit` into the object store unless it is there."""
        self._make_store()
        if self._try("cat-file", "-e", f"{commit}^{{tree}}") is None:
            return
        with self._alone():
            for place in self._places(url):
                self._try("fetch", "--quiet", "--no-tags", "--depth=1", str(place), commit)
                if self._try("cat-file", "-e", f"{commit}^{{tree}}") is None:
                    return
            failure = self._try("fetch", "--quiet", "--no-tags", "--depth=1", url, commit)
        if failure is None:
            return
        if re.search(r"not our ref|couldn't find remote ref|did not match any", failure):
            raise LockError(
                f"{redact(url)} has no commit {commit}",
                where=f"the source of {name}",
                hint="correct the pin: all 40 digits, of a commit that the upstream has",
            )
        host = urlsplit(url).hostname or url
        last = redact(failure.strip().splitlines()[-1]) if failure.strip() else "no answer"
        raise HostError(
            f"the source of {name} at {commit[:12]} cannot be fetched from {host}: {last}",
            where=redact(url),
            hint="check the network and the proxy, or put a clone or the tree under the folder that the setting `sources` names",
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the store's lock: git itself refuses a second shallow fetch, and a killed one's lock stays for good."""
        with self._objects.with_suffix(".lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            (self._objects / "shallow.lock").unlink(missing_ok=True)
            yield

    def _make_store(self) -> None:
        if (self._objects / "HEAD").exists():
            return
        half_made = self._objects.is_dir()  # by a run that was killed
        with contextlib.nullcontext(self._objects) if half_made else _whole(self._objects) as folder:
            subprocess.run(["git", "init", "--quiet", "--bare", str(folder)], check=True, capture_output=True)

    def _places(self, url: str) -> list[Path]:
        """Return the clones in the site's `sources` folder that may hold a commit of `url`."""
        if self.settings.sources is None:
            return []
        name = urlsplit(url).path.rsplit("/", 1)[-1].removesuffix(".git")
        candidates = [self.settings.sources / name, self.settings.sources / f"{name}.git"]
        return [p for p in candidates if (p / ".git").exists() or (p / "HEAD").is_file()]

    def plain_folder(self, source: GitSource) -> Path | None:
        """Return the site's own unpacked tree or archive of `source`, verified, or None when it has none.

        Looked for as `<name>-<commit>` and the repository's name likewise: a folder, or a .tar, .tar.gz or .tar.xz with
        one folder in it.
        """
        if self.settings.sources is None:
            return None
        repository = urlsplit(source.url).path.rsplit("/", 1)[-1].removesuffix(".git")
        for name in (source.name, repository):
            for suffix in ("", ".tar", ".tar.gz", ".tar.xz"):
                place = self.settings.sources / f"{name}-{source.commit}{suffix}"
                if suffix == "" and place.is_dir():
                    return self._own(source, place)
                if suffix and place.is_file():
                    return self._unpack(source, place)
        return None

    def _own(self, source: GitSource, place: Path) -> Path:
        """Return the site's own folder, or a copy without what the lock does not name where it holds such."""
        self._verify_plain(source, place)
        strays = _strays(source, place)
        if not strays:
            return place
        folder = self._trees / f"{source.name}-{source.commit}-own{_choice(source)}"
        if not folder.is_dir():
            with _whole(folder) as part:
                shutil.copytree(
                    place,
                    part,
                    symlinks=True,
                    dirs_exist_ok=True,
                    ignore=lambda where, names: {name for name in names if Path(where, name) in strays},
                )
        self._verify_plain(source, folder)
        return folder

    def _unpack(self, source: GitSource, archive: Path) -> Path:
        folder = self._trees / f"{source.name}-{source.commit}-archive{_choice(source)}"
        if folder.is_dir():
            self._verify_plain(source, folder)
            return folder
        try:
            with _whole(folder) as part:
                unpacked = part.with_name("archive")
                with tarfile.open(archive) as tar:
                    tar.extractall(unpacked, filter="data")
                entries = list(unpacked.iterdir())
                tree = entries[0] if len(entries) == 1 and entries[0].is_dir() else unpacked
                self._verify_plain(source, tree)
                for stray in _strays(source, tree):
                    shutil.rmtree(stray) if stray.is_dir() else stray.unlink()
                tree.rename(part)
        except (tarfile.TarError, EOFError) as error:
            raise LockError(
                f"the archive of {source.name} cannot be unpacked: {error}", where=str(archive), hint="make it again"
            ) from error
        return folder

    def tree_of(self, folder: Path, submodules: tuple[Submodule, ...] = ()) -> str:
        """Return the git tree id of the files in `folder`, with `submodules` as links."""
        self._make_store()
        with scratch("index") as index:
            env = {"GIT_INDEX_FILE": f"{index}/index", "GIT_WORK_TREE": str(folder)}
            skip = [f":(exclude){s.path}" for s in submodules]
            self._git("add", "--all", "--force", "--", ".", *skip, env=env, cwd=folder)
            for submodule in _direct(submodules):
                self._git(
                    "update-index", "--add", "--cacheinfo", f"160000,{submodule.commit},{submodule.path}", env=env
                )
            return self._git("write-tree", env=env).strip()

    def _verify_plain(self, source: GitSource, folder: Path) -> None:
        found = self.tree_of(folder, source.submodules) if folder.is_dir() else "missing"
        if source.tree is not None and found != source.tree:
            raise _differs(source, found, str(folder))
        for submodule in _direct(source.submodules):
            if submodule.used and submodule.tree is not None:
                self._verify_plain(_as_source(source, submodule), folder / submodule.path)

    def _git(self, *args: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
        done = self._run(args, env, cwd)
        if done.returncode:
            raise LockError(
                f"git {args[0]} failed: {done.stderr.strip()}",
                where=str(self._objects),
                hint="remove that folder and run again",
            )
        return done.stdout

    def _try(self, *args: str) -> str | None:
        """Run git and return None when it succeeded, else its stderr."""
        done = self._run(args, None, None)
        return None if done.returncode == 0 else done.stderr or f"git exited with {done.returncode}"

    def _run(
        self, args: tuple[str, ...], env: dict[str, str] | None, cwd: Path | None
    ) -> subprocess.CompletedProcess[str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_CONFIG_GLOBAL": "/dev/null",
        }
        if self.settings.ca_bundle:
            base["GIT_SSL_CAINFO"] = str(self.settings.ca_bundle)
        if self.settings.https_proxy:
            base["https_proxy"] = self.settings.https_proxy
        settled = [f for key in ("safe.directory=*", "core.autocrlf=false", "core.fileMode=true") for f in ("-c", key)]
        command = ["git", f"--git-dir={self._objects}", *settled, *args]
        return subprocess.run(
            command, env=base | (env or {}), cwd=cwd, capture_output=True, text=True, errors="replace", check=False
        )


@contextlib.contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `folder` in one step, unless another run has made that meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch("tree", folder.parent) as own:
        part = own / "made"
        part.mkdir()
        try:
            yield part
            part.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _direct(submodules: tuple[Submodule, ...]) -> list[Submodule]:
    """Return those that are no submodule of another."""
    return [s for s in submodules if not any(s.path.startswith(f"{other.path}/") for other in submodules)]


def _as_source(source: GitSource, submodule: Submodule) -> GitSource:
    """Return a submodule of `source` as a source of its own, with its own submodules."""
    inner = f"{submodule.path}/"
    nested = (s for s in source.submodules if s.path.startswith(inner))
    return GitSource(
        name=f"{source.name}/{submodule.path}",
        url=submodule.url,
        commit=submodule.commit,
        tree=submodule.tree,
        submodules=tuple(s.model_copy(update={"path": s.path.removeprefix(inner)}) for s in nested),
    )


def _choice(source: GitSource) -> str:
    """Return what tells trees of one commit apart: another choice of submodules is another tree."""
    used = [s for s in source.submodules if s.used]
    return (
        "-" + hashlib.sha256("".join(f"{s.path} {s.commit}\n" for s in used).encode()).hexdigest()[:8] if used else ""
    )


def _strays(source: GitSource, folder: Path) -> set[Path]:
    """Return what a site's own tree holds that no id accounts for: git's own files, submodules that no build reads."""
    git = {folder / s.path / ".git" for s in source.submodules if s.used} | {folder / ".git"}
    unread = {folder / s.path for s in source.submodules if not s.used}
    return {p for p in git if p.exists()} | {p for p in unread if p.is_dir() and any(p.iterdir())}


def _differs(source: GitSource, found: str, where: str) -> LockError:
    return LockError(
        f"the source of {source.name} is not what the lock names: its tree is {found}, the lock says {source.tree} (commit {source.commit})",
        where=redact(where),
        hint="bring the tree of that commit, unchanged, or lock again if the change is meant",
    )
