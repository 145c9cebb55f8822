"""What a distribution's files say of themselves, read from an index without downloading them whole.

An index serves a wheel's METADATA beside it (PEP 658); a mirror often does not, and then the wheel's own directory is
read with range requests: a few tens of kilobytes of a file of a gigabyte.
"""

import datetime as dt
import email.parser
import email.policy
import io
import json
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from envbuild.errors import HostError, LockError
from envbuild.lock.index import IndexFile, fetch, files_of, opener, request_for
from envbuild.settings import Settings

_CHUNK = 1 << 16
_TIMEOUT_S = 60
_HTTP_PARTIAL = 206


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """The parts of a METADATA file that bear on compatibility."""

    requires_python: str | None
    requires: tuple[Requirement, ...]

    def pin(self, prefix: str) -> str | None:
        """Return the version in `prefix...==version` of the first requirement whose name starts with `prefix`."""
        for requirement in self.requires:
            if requirement.name.startswith(prefix):
                for specifier in requirement.specifier:
                    if specifier.operator == "==":
                        return specifier.version
        return None


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The files of one version of a distribution."""

    name: str
    version: Version
    files: tuple[IndexFile, ...]

    @property
    def date(self) -> dt.date | None:
        """The day of the first upload, where the index states it."""
        days = [file.upload_time[:10] for file in self.files if file.upload_time]
        return dt.date.fromisoformat(min(days)) if days else None

    @property
    def wheels(self) -> tuple[IndexFile, ...]:
        """The wheels for Linux on x86_64, and those for any machine."""
        linux = ("x86_64.whl", "linux1_x86_64.whl", "none-any.whl")
        return tuple(f for f in self.files if f.filename.endswith(linux) and "macosx" not in f.filename)


def parse_filename(filename: str) -> Version | None:
    """Return the version that a wheel's or sdist's name states; None for anything else."""
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except (InvalidWheelFilename, InvalidVersion, ValueError):
        return None


def python_tags(distribution: Distribution) -> set[str]:
    """Return the CPython minors (`3.12`) that the Linux wheels are built for, without free-threaded ones."""
    found = set()
    for file in distribution.wheels:
        for tag in parse_wheel_filename(file.filename)[3]:
            if tag.interpreter.startswith("cp3") and tag.abi in {tag.interpreter, tag.interpreter + "m"}:
                found.add(f"3.{tag.interpreter[3:]}")
    return found


def distributions(settings: Settings, name: str) -> dict[Version, Distribution]:
    """Return every final release of `name` that the index lists, oldest first.

    Raises:
        HostError: the index cannot be reached.
        LockError: it has no such distribution.

    """
    grouped: dict[Version, list[IndexFile]] = {}
    for file in files_of(settings, name):
        version = parse_filename(file.filename)
        if version is not None and not version.is_prerelease:
            grouped.setdefault(version, []).append(file)
    return {
        version: Distribution(name=canonicalize_name(name), version=version, files=tuple(grouped[version]))
        for version in sorted(grouped)
    }


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What the JSON API beside an index says of one version."""

    day: dt.date
    """The day of the first upload."""
    yanked: bool
    """Whether every file was withdrawn."""


def uploads(settings: Settings, name: str) -> dict[Version, Upload]:
    """Return what the JSON API beside the Simple API says of every version; {} where there is none.

    A mirror that serves HTML states no upload times, and most of them pass the JSON API on.
    """
    root = settings.index_url.rstrip("/").removesuffix("/simple")
    try:
        body, _ = fetch(settings, f"{root}/pypi/{canonicalize_name(name)}/json")
        releases: dict[str, list[dict[str, Any]]] = json.loads(body)["releases"]
    except (LockError, HostError, ValueError, KeyError):
        return {}
    found = {}
    for text, files in releases.items():
        try:
            version = Version(text)
        except InvalidVersion:
            continue
        days = [file["upload_time"][:10] for file in files if file.get("upload_time")]
        if days:
            yanked = all(file.get("yanked") for file in files)
            found[version] = Upload(day=dt.date.fromisoformat(min(days)), yanked=yanked)
    return found


def parse_metadata(text: str) -> Metadata:
    """Read a METADATA file; requirements that belong to an extra are left out."""
    message = email.parser.Parser(policy=email.policy.compat32).parsestr(text, headersonly=True)
    requires = []
    for line in message.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # a form of before PEP 508, in wheels of many years ago
        if requirement.marker is None or "extra" not in str(requirement.marker):
            requires.append(requirement)
    return Metadata(requires_python=message["Requires-Python"], requires=tuple(requires))


class _Ranges(io.RawIOBase):
    """A remote file, read in chunks as zipfile asks for them."""

    def __init__(self, settings: Settings, url: str) -> None:
        self._settings = settings
        self._opener = opener(settings)
        self._url = url
        self._at = 0
        self._held = (0, b"")
        with self._opener.open(
            request_for(settings, url, Range="bytes=0-0"),
            timeout=_TIMEOUT_S,
        ) as answer:
            if answer.status != _HTTP_PARTIAL:
                raise OSError("the index does not answer range requests")
            self._size = int(answer.headers["Content-Range"].rpartition("/")[2])

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = min(size if size >= 0 else self._size, self._size - self._at)
        if size <= 0:
            return b""
        start, held = self._held
        if not (start <= self._at and self._at + size <= start + len(held)):
            end = min(self._size, self._at + max(size, _CHUNK)) - 1
            request = request_for(self._settings, self._url, Range=f"bytes={self._at}-{end}")
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                start, held = self._held = (self._at, answer.read())
        data = held[self._at - start : self._at - start + size]
        self._at += len(data)
        return data


def member(settings: Settings, wheel: IndexFile, suffix: str) -> str:
    """Return the text of the file in `wheel` whose path ends with `suffix`.

    Raises:
        LockError: the wheel has no such file, or the index serves no ranges of it.

    """
    try:
        with zipfile.ZipFile(_Ranges(settings, wheel.url)) as archive:
            for name in archive.namelist():
                if name.endswith(suffix):
                    return archive.read(name).decode("utf-8", "replace")
    except (OSError, urllib.error.URLError, zipfile.BadZipFile, KeyError) as error:
        raise LockError(
            f"{wheel.filename} cannot be looked into: {error}",
            where=wheel.url,
            hint="try again, or with an index that answers range requests",
        ) from error
    raise LockError(f"{wheel.filename} holds no {suffix}", where=wheel.url, hint="look at the wheel by hand")


def metadata_of(settings: Settings, wheel: IndexFile) -> Metadata:
    """Return the METADATA of `wheel`, from beside it or from within.

    Raises:
        HostError: the index cannot be reached.
        LockError: neither way works.

    """
    try:
        body, _ = fetch(settings, wheel.url + ".metadata")
        return parse_metadata(body.decode("utf-8", "replace"))
    except (LockError, HostError):
        return parse_metadata(member(settings, wheel, ".dist-info/METADATA"))
