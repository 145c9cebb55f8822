"""The metadata of a distribution's files, read from an index without downloading whole files.

An index serves a wheel's METADATA next to it (PEP 658); a mirror often does not, and then the wheel's own directory is
read with range requests: a few tens of kilobytes of a file of a gigabyte.
"""

import datetime as dt
import email.parser
import email.policy
import re
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from envbuild.curate.ranges import RemoteWheel
from envbuild.errors import HostError, LockError
from envbuild.lock.index import IndexFile, files_of
from envbuild.net.address import place_of
from envbuild.net.data import read_object, table
from envbuild.net.fetch import fetch
from envbuild.settings import Settings


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
    except ValueError:  # a number of 5000 digits, too
        return None


def python_tags(distribution: Distribution) -> set[str]:
    """Return the CPython minors (`3.12`) that the Linux wheels are built for, without free-threaded ones."""
    found = set()
    for file in distribution.wheels:
        for tag in parse_wheel_filename(file.filename)[3]:
            if re.fullmatch(r"cp3\d{1,2}", tag.interpreter, re.ASCII) and tag.abi.removesuffix("m") == tag.interpreter:
                found.add(f"3.{tag.interpreter[3:]}")
    return found


def distributions(
    settings: Settings, name: str, *, index: str | None = None, prereleases: bool = False
) -> dict[Version, Distribution]:
    """Return every final release of `name` that an index lists, oldest first.

    Args:
        settings: the index by default, proxies, CA bundle, logins.
        name: the distribution.
        index: another index than the settings'.
        prereleases: whether betas and the like are returned too.

    Raises:
        HostError: the index cannot be reached.
        LockError: it has no such distribution.

    """
    grouped: dict[Version, list[IndexFile]] = {}
    for file in files_of(settings, name, index=index):
        version = parse_filename(file.filename)
        if version is not None and (prereleases or not version.is_prerelease):
            grouped.setdefault(version, []).append(file)
    return {
        version: Distribution(name=canonicalize_name(name), version=version, files=tuple(grouped[version]))
        for version in sorted(grouped)
    }


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What the JSON API next to an index has on one version."""

    day: dt.date
    """The day of the first upload."""
    yanked: bool
    """Whether every file was withdrawn."""


def uploads(settings: Settings, name: str) -> dict[Version, Upload]:
    """Return what the JSON API next to the Simple API has on every version; {} where there is none.

    A mirror that serves HTML states no upload times, and most of them pass the JSON API on.

    Raises:
        HostError: the index cannot be reached or cannot serve now.

    """
    root = settings.index_url.rstrip("/").removesuffix("/simple")
    try:
        body, _ = fetch(settings, f"{root}/pypi/{canonicalize_name(name)}/json")
        return read_uploads(body)
    except LockError:
        return {}


def read_uploads(body: bytes) -> dict[Version, Upload]:
    """Return what an answer of the JSON API says of every version. Never fetches anything.

    Raises:
        LockError: it is no such answer. A version that cannot be read is left out.

    """
    try:
        releases = table(read_object(body).get("releases"))
    except ValueError as error:
        raise LockError(f"the answer is not from the JSON API of a package index: {error}") from None
    found = {}
    for text, listed in releases.items():
        files = [file for file in listed if isinstance(file, dict)] if isinstance(listed, list) else []
        days = []
        for file in files:
            try:
                days.append(dt.date.fromisoformat(str(file.get("upload_time"))[:10]))
            except ValueError:
                continue
        try:
            version = Version(text)
        except ValueError:  # a number of 5000 digits, too
            continue
        if days:
            found[version] = Upload(day=min(days), yanked=all(file.get("yanked") for file in files))
    return found


def parse_metadata(text: str) -> Metadata:
    """Read a METADATA file; requirements that belong to an extra are left out, as is what cannot be read."""
    message = email.parser.Parser(policy=email.policy.compat32).parsestr(text, headersonly=True)
    requires = []
    for line in message.get_all("Requires-Dist", []):
        try:
            requirement = Requirement(str(line))
            str(requirement.specifier)
        except (InvalidRequirement, ValueError, RecursionError):
            continue  # a form of before PEP 508, in wheels of many years ago; or nonsense
        if requirement.marker is None or "extra" not in str(requirement.marker):
            requires.append(requirement)
    return Metadata(requires_python=_specifiers(message["Requires-Python"]), requires=tuple(requires))


def _specifiers(stated: object) -> str | None:
    """Return the text of a Requires-Python in one line, None where it is none."""
    text = " ".join(str(stated or "").split())
    try:
        SpecifierSet(text).contains("3.12")
    except (InvalidSpecifier, ValueError):
        return None
    return text or None


def member(settings: Settings, wheel: IndexFile, suffix: str) -> str:
    """Return the text of the file in `wheel` whose path ends with `suffix`.

    Raises:
        HostError: the index cannot be reached or cannot serve now.
        LockError: the wheel has no such file, or the index serves no ranges of it.

    """
    with RemoteWheel(settings, wheel) as archive:
        for name in archive.names:
            if name.endswith(suffix):
                return archive.read(name).decode("utf-8", "replace")
    raise LockError(f"{wheel.filename} holds no {suffix}", where=place_of(wheel.url), hint="look at the wheel by hand")


def metadata_of(settings: Settings, wheel: IndexFile) -> Metadata:
    """Return the METADATA of `wheel`, from next to it or from within.

    Raises:
        HostError: the index cannot be reached.
        LockError: neither way works.

    """
    try:
        body, _ = fetch(settings, wheel.url + ".metadata")
        return parse_metadata(body.decode("utf-8", "replace"))
    except (LockError, HostError):  # an index need not serve it; where the index is out of reach, the next step fails
        return parse_metadata(member(settings, wheel, ".dist-info/METADATA"))
