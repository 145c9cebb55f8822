"""The files of releases that trials look at, read from an index once and kept in the cache: parts of wheels, sdists."""

import contextlib
import gzip
import hashlib
import io
import json
import re
import secrets
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuild.curate.ranges import RemoteWheel
from envbuild.curate.wheels import parse_filename
from envbuild.errors import HostError, LockError
from envbuild.lock.index import IndexFile, Listing, files_of
from envbuild.net.address import place_of
from envbuild.net.download import download
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, path_below, read_below
from envbuild.util.foreign_tar import Bounds, TarError, read_tar
from envbuild.util.foreign_zip import ZipError, opened_zip, read_member
from envbuild.util.git import empty_repository, objects_of, run_git
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

_LARGEST = 64 << 20
_SDIST = Bounds(bytes=2 << 30, members=100_000)
_SOURCES = (".py", ".pyi", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".inl", ".inc", ".toml", ".cfg", ".txt")
_ENTRY = re.compile(rb"(?:100(?:644|755|664)|160000) (blob|commit) ([0-9a-f]{40})\t(.+)", re.DOTALL)
_MACHINES = ("x86_64.whl", "none-any.whl")


class Files:
    """What indexes hold, and what of it lies in the cache.

    Args:
        settings: the index and the cache. Folders and indexes besides the main one are left out: a trial shows what anybody
            finds there.

    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings.model_copy(update={"find_links": (), "extra_index_urls": ()})
        self.folder = settings.cache_dir / "trials"
        self._listings: dict[str, Listing] = {}
        self._versions: dict[str, dict[Version, tuple[IndexFile, ...]]] = {}
        self._kept: dict[str, tuple[str, ...]] = {}

    def listing(self, distribution: str) -> Listing:
        """Return what the index lists for `distribution`, asked once; nothing where it has no such distribution.

        Raises:
            HostError: the index cannot be reached.

        """
        name = canonicalize_name(distribution)
        if name not in self._listings:
            try:
                self._listings[name] = files_of(self.settings, name)
            except LockError:
                self._listings[name] = Listing(files=())
        return self._listings[name]

    def versions(self, distribution: str) -> set[Version]:
        """Return the final versions that the index lists."""
        found = {parse_filename(file.filename) for file in self.listing(distribution)}
        return {version for version in found if version is not None and not version.is_prerelease}

    def of_version(self, distribution: str, version: str) -> tuple[IndexFile, ...]:
        """Return the files of one version, of whatever platform."""
        name = canonicalize_name(distribution)
        if name not in self._versions:
            grouped: dict[Version, list[IndexFile]] = {}
            for file in self.listing(name):
                if (parsed := parse_filename(file.filename)) is not None:
                    grouped.setdefault(parsed, []).append(file)
            self._versions[name] = {parsed: tuple(files) for parsed, files in grouped.items()}
        return self._versions[name].get(Version(version), ())

    def wheels(self, distribution: str, version: str) -> tuple[IndexFile, ...]:
        """Return its wheels for Linux on x86_64 and any CPython 3."""
        found = []
        for file in self.of_version(distribution, version):
            if file.filename.endswith(_MACHINES) and not any(w in file.filename for w in ("macosx", "musllinux")):
                tags = parse_wheel_filename(file.filename)[3]
                if any(tag.interpreter.startswith(("cp3", "py3", "py2.py3")) for tag in tags):
                    found.append(file)
        return tuple(found)

    def wheel(self, distribution: str, version: str, python: str | None = None) -> IndexFile | None:
        """Return one of `wheels`: for `python` (`3.12`), or else the first; None when there is none."""
        every = self.wheels(distribution, version)
        if python is not None:
            tag = "cp" + python.replace(".", "")
            for file in every:
                tags = parse_wheel_filename(file.filename)[3]
                if any((t.interpreter == tag and t.abi.removesuffix("m") == tag) or t.abi == "abi3" for t in tags):
                    return file
        return every[0] if every else None

    def sdist(self, distribution: str, version: str) -> IndexFile | None:
        """Return its source distribution, or None."""
        every = self.of_version(distribution, version)
        return next((file for file in every if file.filename.endswith((".tar.gz", ".tgz"))), None)

    def by_hash(self, distribution: str, hashes: Collection[str]) -> IndexFile | None:
        """Return the file of `distribution` with one of `hashes`, a wheel for x86_64 first."""
        every = [file for file in self.listing(distribution) if file.sha256 in hashes]
        return next((file for file in every if "x86_64" in file.filename), every[0] if every else None)

    # what is kept

    def _key(self, file: IndexFile) -> str:
        return file.sha256 or hashlib.sha256(file.url.encode()).hexdigest()

    def _read_kept(self, file: IndexFile, relative: str) -> bytes | None:
        try:
            return read_below(self.folder, f"{self._key(file)}/{relative}", limit=_LARGEST)
        except (OutsideError, OSError):
            return None

    def _keep(self, relative: str, data: bytes) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            place = path_below(self.folder, relative, make=True)
            part = place.with_name(f".{secrets.token_hex(6)}.part")
            part.write_bytes(data)
            part.replace(place)
        except OutsideError:
            return  # a name that no file here may have: it is read again when it is needed again
        except OSError as error:
            raise HostError(
                f"a file cannot be kept: {error.strerror}", where=str(self.folder), hint="free some space there"
            ) from None

    def paths(self, wheel: IndexFile) -> tuple[str, ...]:
        """Return the paths of the files in `wheel`.

        Raises:
            LockError: the wheel cannot be looked into.

        """
        key = self._key(wheel)
        if key not in self._kept:
            kept = self._read_kept(wheel, "paths.json")
            if kept is None:
                with RemoteWheel(self.settings, wheel) as archive:
                    kept = json.dumps(archive.names).encode()
                self._keep(f"{key}/paths.json", kept)
            self._kept[key] = tuple(json.loads(kept))
        return self._kept[key]

    def text(self, wheel: IndexFile, path: str) -> str:
        """Return the text of one file of `wheel`; raises LockError where it cannot be read."""
        return self.texts(wheel, (path,))[path]

    def texts(self, wheel: IndexFile, paths: Collection[str]) -> dict[str, str]:
        """Return the texts of some files of `wheel`; raises LockError where one cannot be read."""
        found: dict[str, str] = {}
        missing = []
        for path in paths:
            kept = self._read_kept(wheel, f"files/{path}")
            if kept is None:
                missing.append(path)
            else:
                found[path] = kept.decode("utf-8", "replace")
        if missing:
            with RemoteWheel(self.settings, wheel) as archive:
                for path, body in archive.read_many(missing):
                    self._keep(f"{self._key(wheel)}/files/{path}", body)
                    found[path] = body.decode("utf-8", "replace")
        return found

    def headers(self, wheel: IndexFile, wanted: Callable[[str], bool]) -> Path:
        """Return the folder that holds those files of `wheel` whose path is `wanted`, as they lie in site-packages."""
        key = self._key(wheel)
        place = self.folder / key / "headers"
        if self._read_kept(wheel, "headers.done") is None:
            with RemoteWheel(self.settings, wheel) as archive:
                for path, body in archive.read_many([name for name in archive.names if wanted(name)]):
                    self._keep(f"{key}/headers/{path}", body)
            self._keep(f"{key}/headers.done", b"")
        return place

    def programs(self, wheel: IndexFile, paths: Collection[str]) -> Path:
        """Return the folder that holds those files of `wheel`, to be run: the whole wheel is read and checked by its hash.

        Raises:
            LockError: the index states no hash, does not hold the wheel, or it is damaged.
            HostError: the index cannot be reached, or the folder cannot be written.

        """
        if wheel.sha256 is None:
            raise LockError(
                f"the index states no hash of {wheel.filename}, which would be run", where=place_of(wheel.url)
            )
        place = self.folder / wheel.sha256 / "programs"
        if self._read_kept(wheel, "programs.done") is None:
            with scratch("programs") as folder:
                downloaded, _ = download(self.settings, wheel.url, wheel.sha256, folder)
                try:
                    with opened_zip(downloaded) as archive:
                        for path in paths:
                            self._keep(f"{wheel.sha256}/programs/{path}", read_member(archive, path, _LARGEST))
                except ZipError as error:
                    raise LockError(
                        f"{wheel.filename} cannot be unpacked: {error}", where=place_of(wheel.url)
                    ) from None
            for path in paths:
                (place / path).chmod(0o755)
            self._keep(f"{wheel.sha256}/programs.done", b"")
        return place

    def source(self, sdist: IndexFile) -> Path:
        """Return the folder of the unpacked sources of `sdist`: Python, C++, headers and what setup reads.

        Raises:
            LockError: the index does not hold it, or it is no tar.
            HostError: the index cannot be reached, or the folder cannot be written.

        """
        key = self._key(sdist)
        if self._read_kept(sdist, "source.done") is None:
            with scratch("sdist") as folder:
                path, _ = download(self.settings, sdist.url, sdist.sha256, folder)
                try:
                    with gzip.open(path) as stream:
                        for member in read_tar(stream, _SDIST):
                            name = member.path.partition("/")[2]
                            plain = name.endswith(_SOURCES) or name.rpartition("/")[2] in {"PKG-INFO", "VERSION"}
                            if member.kind == "file" and plain and member.body and member.size <= _LARGEST:
                                body = b"".join(iter(lambda m=member: m.body.read(1 << 20), b""))  # type: ignore[misc]
                                self._keep(f"{key}/source/{name}", body)
                except (TarError, OSError, EOFError, zlib.error) as error:
                    raise LockError(
                        f"{sdist.filename} cannot be unpacked: {error}", where=place_of(sdist.url)
                    ) from None
            self._keep(f"{key}/source.done", b"")
        return self.folder / key / "source"

    def checkout(self, repository: Path, commit: str, submodules: Mapping[str, Path]) -> Path:
        """Return the folder of the sources at `commit`, as `source` does.

        Args:
            repository: a clone on this machine, bare or not.
            commit: 40 hex digits.
            submodules: clones of submodules, by the last part of their paths; those without one are left out.

        Raises:
            LockError: one is no clone, or does not hold its commit.
            HostError: git is not here, or the folder cannot be written.

        """
        key = hashlib.sha256(" ".join(["commit", commit, *sorted(submodules)]).encode()).hexdigest()
        if not (self.folder / key / "source.done").exists():
            todo = [("", repository, commit)]
            while todo:
                below, clone, wanted = todo.pop()
                for path, stated, body in _at_commit(clone, wanted):
                    if stated is None:
                        self._keep(f"{key}/source/{below}{path}", body)
                    elif (name := path.rpartition("/")[2]) in submodules:
                        todo.append((f"{below}{path}/", submodules[name], stated))
            self._keep(f"{key}/source.done", b"")
        return self.folder / key / "source"

    def note(self, file: IndexFile, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` worked out of `file`, kept as JSON under `name`."""
        kept = self._read_kept(file, f"{name}.json")
        if kept is not None:
            with contextlib.suppress(ValueError):
                return json.loads(kept)
        value = make()
        self._keep(f"{self._key(file)}/{name}.json", json.dumps(value).encode())
        return value

    def noted(self, key: str, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what `make` works out, kept as JSON under `key`, a sha256."""
        with contextlib.suppress(OutsideError, OSError, ValueError):
            kept = json.loads(read_below(self.folder, f"{key}/note.json", limit=_LARGEST))
            if isinstance(kept, dict):
                return kept
        value = make()
        self._keep(f"{key}/note.json", json.dumps(value).encode())
        return value


def _at_commit(repository: Path, commit: str) -> Iterator[tuple[str, str | None, bytes]]:
    """Yield the path and the bytes of each source of a commit; of each submodule the path and the commit that it states."""
    objects = objects_of(repository)
    if objects is None:
        raise LockError(f"{repository} is no git repository", hint="name a clone of the component's repository")
    with empty_repository() as own:
        listed = run_git(own, "ls-tree", "-r", "-z", commit, borrowed=(objects,))
        entries = [found for line in listed.stdout.split(b"\0") if (found := _ENTRY.fullmatch(line))]
        sources = {entry[3].decode("utf-8", "replace"): entry[2] for entry in entries if entry[1] == b"blob"}
        sources = {path: oid for path, oid in sources.items() if path.endswith(_SOURCES)}
        asked = b"".join(oid + b"\n" for oid in sources.values())
        ran = run_git(own, "cat-file", "--batch", stdin=asked, borrowed=(objects,), limit_bytes=_SDIST.bytes)
    if listed.code or ran.code:
        why = shown(((listed.stderr or ran.stderr).strip().splitlines() or ["no answer"])[-1])
        raise LockError(f"{repository} does not give commit {commit}: {why}", hint="fetch it there first")
    answer = io.BytesIO(ran.stdout)
    for path, oid in sources.items():
        head = answer.readline().split()
        if len(head) != 3 or head[0] != oid:
            raise LockError(f"{repository} does not hold {shown(path)} of commit {commit}", hint="fetch it there first")
        yield path, None, answer.read(int(head[2]))
        answer.read(1)
    for entry in entries:
        if entry[1] == b"commit":
            yield entry[3].decode("utf-8", "replace"), entry[2].decode(), b""
