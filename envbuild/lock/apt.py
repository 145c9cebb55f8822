"""The exact OS packages that a list of names means: `apt-get` in a folder of its own answers.

It never touches the host's own package state, and asks the signed archives of Debian and Ubuntu alone.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from envbuild.errors import EnvbuildError, HostError, LockError
from envbuild.lock.model import OsPackage
from envbuild.settings import Settings, redact
from envbuild.util import quote
from envbuild.util.names import OsPackageName, OsVersion, checked, is_one_line, shown
from envbuild.util.processes import bounded
from envbuild.util.scratch import scratch

# What a base image that others made may hold beside apt: the compilers that cuda-nvcc asks for, and what NVIDIA's
# Dockerfiles use to fetch their packages (gitlab.com/nvidia/container-images/cuda, dist/12.6.3/ubuntu2404).
_MADE_BY_OTHERS = ("build-essential", "curl", "gnupg2")


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Where a distribution keeps its packages, and the keys that sign them."""

    mirror: str
    security_mirror: str
    components: tuple[str, ...]
    keyring: Path
    keyring_package: str
    base_packages: tuple[str, ...]
    """What a root of it holds beside the essential packages."""

    def sources(self, suite: str, *, mirror: str, security_mirror: str, options: str = "") -> list[str]:
        """Return the lines of a sources.list: the suite, its updates, its security updates.

        Raises:
            ValueError: a mirror or the suite cannot be a word of such a line.

        """
        return [
            f"deb {options}{quote.apt_source(url)} {quote.apt_source(name)} {' '.join(self.components)}"
            for url, name in (
                (mirror, suite),
                (mirror, f"{suite}-updates"),
                (security_mirror, f"{suite}-security"),
            )
        ]


DEBIAN = Archive(
    mirror="http://deb.debian.org/debian",
    security_mirror="http://deb.debian.org/debian-security",
    components=("main",),
    keyring=Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    keyring_package="debian-archive-keyring",
    # A package manager, and the roots of trust for https.
    base_packages=("apt", "ca-certificates", "usr-is-merged"),
)


_UBUNTU = Archive(
    mirror="http://archive.ubuntu.com/ubuntu",
    security_mirror="http://security.ubuntu.com/ubuntu",
    components=("main", "restricted", "universe", "multiverse"),
    keyring=Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg"),
    keyring_package="ubuntu-keyring",
    base_packages=("apt",),
)


ARCHIVES: Mapping[str, Archive] = {
    "bookworm": DEBIAN,
    "trixie": DEBIAN,
    "focal": _UBUNTU,
    "jammy": _UBUNTU,
    "noble": _UBUNTU,
}


def _by_name(package: OsPackage) -> tuple[str, str, str]:
    return package.name, package.arch, package.version


def archive_of(suite: str) -> Archive:
    """Return where `suite` (bookworm, trixie, focal, jammy, noble) is kept.

    Raises:
        LockError: it is none of those.

    """
    try:
        return ARCHIVES[suite]
    except KeyError:
        raise LockError(
            f"no package archive is known for the suite {suite!r}", hint=f"one of: {', '.join(sorted(ARCHIVES))}"
        ) from None


def mirrors_of(settings: Settings, suite: str) -> tuple[str, str]:
    """Return the URLs that a site takes `suite` and its security updates from.

    Raises:
        LockError: no archive of that suite is known.

    """
    archive = archive_of(suite)
    if archive is DEBIAN:
        return settings.debian_mirror, settings.debian_security_mirror
    mirror = settings.ubuntu_mirror
    # Ubuntu's own archive has the security updates on a host of their own, and its mirrors hold them like the rest.
    return mirror, archive.security_mirror if mirror == archive.mirror else mirror


def checked_packages(packages: Iterable[str]) -> list[str]:
    """Return names of packages as apt takes them, `name` or `name=version`, each checked: apt would read options and patterns.

    Raises:
        LockError: one of them is neither.

    """
    for package in packages:
        name, equals, version = package.partition("=")
        try:
            checked(OsPackageName, name)
            if equals:
                checked(OsVersion, version)
        except ValueError as error:
            raise LockError(
                f"{shown(package, 80)!r} is no OS package: {error}", hint="write a package's name, or name=version"
            ) from None
    return list(packages)


def resolve_os_packages(
    settings: Settings,
    *,
    suite: str,
    packages: Sequence[str],
    installed: Sequence[OsPackage] = (),
    arch: str = "amd64",
) -> tuple[OsPackage, ...]:
    """Return every package that installing `packages` on `suite` brings, by name, each with its version and hash.

    With `installed` it is what comes on top of those; without, it is a whole root: the essential packages and
    the archive's base packages too, on Debian just what `bootstrap_root` installs. Recommended packages are left out.

    Args:
        settings: the archive to ask, and how to reach it.
        suite: a key of `ARCHIVES`.
        packages: names as apt takes them (`name` or `name=version`).
        installed: what the base image holds already.
        arch: Debian's name of the architecture.

    Raises:
        HostError: apt-get or the archive's keys are missing.
        LockError: a mirror cannot be reached, or a package or version is not in the archive.

    """
    archive = archive_of(suite)
    if shutil.which("apt-get") is None:
        raise HostError(
            "apt-get is missing, which resolves OS packages", hint="lock on a Debian or Ubuntu machine, or use its lock"
        )
    packages = checked_packages(packages)
    checked_packages(f"{package.name}={package.version}" for package in installed)
    mirror, security_mirror = mirrors_of(settings, suite)
    with scratch("apt") as folder:
        apt = _IsolatedApt(folder, arch, settings)
        options = f"[arch={arch} signed-by={archive.keyring}] "
        apt.write_sources(archive.sources(suite, mirror=mirror, security_mirror=security_mirror, options=options))
        failure = apt.update()
        if failure:
            raise _update_failure(failure, archive, (mirror, security_mirror))
        if installed:
            apt.write_status(installed)
            wanted = list(packages)
        else:
            wanted = ["?essential", *archive.base_packages, *packages]
        return apt.closure(wanted, suite)


def resolve_on_image(
    settings: Settings, *, suite: str, packages: Sequence[str]
) -> tuple[tuple[OsPackage, ...], tuple[OsPackage, ...]]:
    """Return what installing `packages` on an image that others made brings, and what else it may have to renew there.

    Nobody can say from afar what the image holds, and a package that is newer in the archive often takes others along
    (libc6-dev asks for exactly its libc6). So nothing counts as installed: the essential packages are pinned as well. The
    build adds what the image lacks, and renews what that asks for.

    Args and Raises: as `resolve_os_packages`.

    """
    added = resolve_os_packages(settings, suite=suite, packages=packages)
    beside = resolve_os_packages(settings, suite=suite, packages=(*packages, *_MADE_BY_OTHERS))
    return added, tuple(package for package in beside if package not in set(added))


_APT_S = 1800.0
"""Seconds that one command of apt may take; the lists of an archive take a few over a slow line."""
_APT_BYTES = 256 << 20
"""Bytes that it may print; the descriptions of every package of a base have 2 MiB."""


class _Answer(NamedTuple):
    code: int
    out: str
    err: str


class _IsolatedApt:
    """apt-get over a folder of its own: configuration, sources, lists, cache and dpkg status."""

    def __init__(self, folder: Path, arch: str, reach: Settings) -> None:
        self.folder = folder
        for path in ("etc/apt/apt.conf.d", "etc/apt/preferences.d", "lists/partial", "cache/archives/partial"):
            (folder / path).mkdir(parents=True)
        self.status = folder / "status"
        self.status.touch()
        config = folder / "apt.conf"
        # apt reads this file before any other, so that Dir keeps it from the host's own configuration.
        settings = [
            f"Dir {_conf(f'{folder}/')}",
            f"Dir::State::Lists {_conf(f'{folder}/lists')}",
            f"Dir::State::Status {_conf(str(self.status))}",
            f"Dir::Cache {_conf(f'{folder}/cache')}",
            f"APT::Architecture {_conf(arch)}",
            f"APT::Architectures {{ {_conf(arch)}; }}",
            'APT::Sandbox::User "root"',
            'APT::Get::AllowUnauthenticated "false"',
            'APT::Install-Recommends "false"',
            # Or --print-uris gives MD5.
            'Acquire::ForceHash "SHA256"',
            'Acquire::Languages "none"',
            'Acquire::GzipIndexes "false"',
            'Acquire::Retries "1"',
            'Acquire::http::Timeout "20"',
            'Acquire::https::Timeout "20"',
            *apt_options(reach),
        ]
        config.write_text("".join(f"{line};\n" for line in settings), encoding="utf-8")
        self.env = {**apt_environment(reach), "APT_CONFIG": str(config), "LC_ALL": "C.UTF-8"}

    def _run(self, *command: str) -> _Answer:
        """Run one of apt's programs; when it is interrupted, its helpers end with it."""
        ran = bounded(command, env=self.env, seconds=_APT_S, limit=_APT_BYTES)
        if ran.fault:
            raise HostError(f"{command[0]} {ran.fault}", hint="check the mirrors and the proxy in the settings")
        return _Answer(ran.code, ran.out.decode("utf-8", "replace"), ran.err.decode("utf-8", "replace"))

    def write_sources(self, lines: Sequence[str]) -> None:
        (self.folder / "etc/apt/sources.list").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def update(self) -> str:
        """Fetch the package lists; return what went wrong, or nothing."""
        done = self._run("apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any")
        return done.out + done.err if done.code else ""

    def write_status(self, installed: Sequence[OsPackage]) -> None:
        """Write a dpkg status in which `installed` are installed, as the archive describes them.

        apt takes a package whose fields differ from the archive's for another build of the same version and would fetch it
        anew, so all of them are copied. Where the archive has moved on from a base image's version, only what the package
        provides is taken from the newer one: the base met its needs, and apt must not find them broken.
        """
        shown = self._run("apt-cache", "show", "--no-all-versions", *(package.name for package in installed)).out
        described = {stanza["Package"]: stanza for stanza in _split_stanzas(shown)}
        own = {
            "Package",
            "Status",
            "Version",
            "Architecture",
            "Filename",
            "Size",
            "MD5sum",
            "SHA256",
            "Description-md5",
        }
        stanzas = []
        for package in installed:
            fields = {
                "Package": package.name,
                "Status": "install ok installed",
                "Version": package.version,
                "Architecture": package.arch,
                "Maintainer": "unknown",
                "Description": "unknown",
            }
            known = described.get(package.name, {})
            if known.get("Version") == package.version:
                fields |= {key: text for key, text in known.items() if key not in own}
            else:
                fields |= {key: known[key] for key in ("Provides", "Multi-Arch", "Essential") if key in known}
            stanzas.append("".join(f"{key}: {text}\n" for key, text in fields.items()))
        self.status.write_text("\n".join(stanzas), encoding="utf-8")

    def closure(self, wanted: Sequence[str], suite: str) -> tuple[OsPackage, ...]:
        done = self._run("apt-get", "install", "-q", "-y", "--no-install-recommends", "--print-uris", *wanted)
        if done.code:
            raise LockError(
                f"apt cannot install these on {suite}: {complaint_of(done.err + done.out)}",
                hint="choose a package or version that the archive holds; it keeps one version per suite",
            )
        found = []
        for line in done.out.splitlines():
            # 'http://host/debian/pool/main/z/zlib/zlib1g_1%3a1.2.13_amd64.deb' zlib1g_1%3a1.2.13_amd64.deb 86692 SHA256:…
            match = re.fullmatch(r"'([^']+)' ([^_\s]+)_([^_\s]+)_([^_\s]+)\.deb \d+ SHA256:([0-9a-f]{64})", line)
            if match:
                url, name, version, arch, sha256 = match.groups()
                found.append(
                    _os_package(
                        name=name,
                        version=unquote(version),
                        arch=arch,
                        sha256=sha256,
                        filename="pool/" + unquote(url).partition("/pool/")[2],
                    )
                )
            elif line.startswith("'"):
                raise LockError("the archive gives no SHA-256 for a package", where=redact(shown(line)))
        return tuple(sorted(found, key=_by_name))


def apt_options(settings: Settings) -> list[str]:
    """Return how apt reaches a mirror, as lines of an apt.conf: the host's own way, and the settings' where they say more.

    Of the host that is proxy, certificates, and leave for an old snapshot; the settings' proxies and CA bundle come after it.
    """
    done = bounded(["apt-config", "dump", "Acquire"], seconds=60.0, limit=1 << 20)
    wanted = re.compile(
        r'(Acquire::(?:Check-Valid-Until|https?::(?:Proxy|CaInfo|Verify-Peer|SslCert|SslKey)[A-Za-z0-9:._-]*)) "([^"\\]*)";',
        re.IGNORECASE,
    )
    found = [
        match.groups() for line in done.out.decode("utf-8", "replace").splitlines() if (match := wanted.fullmatch(line))
    ]
    lines = [f"{name} {_conf(value)}" for name, value in found if is_one_line(value)]
    own = {
        "http::Proxy": settings.http_proxy,
        "https::Proxy": settings.https_proxy,
        "https::CaInfo": settings.ca_bundle,
    }
    return lines + [f"Acquire::{name} {_conf(str(value))}" for name, value in own.items() if value]


def split_proxies(options: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the proxies among lines of an apt.conf as variables of the environment, and the other lines.

    A proxy's address may carry a login, and an environment is for its owner's eyes alone.
    """
    found: dict[str, str] = {}
    others = []
    for line in options:
        match = re.fullmatch(r'Acquire::(https?)::Proxy "(.+)"', line, re.IGNORECASE)
        if match:
            found[f"{match[1].lower()}_proxy"] = match[2]  # the last one counts, as in a file
        else:
            others.append(line)
    if "http_proxy" in found:
        found.setdefault("https_proxy", found["http_proxy"])  # apt's own rule for its settings
    return found, others


def _conf(value: str) -> str:
    try:
        return quote.apt_conf(value)
    except ValueError as error:
        raise HostError(
            f"apt cannot take this: {error}", hint="set TMPDIR, or the setting, to a path without such a character"
        ) from None


def apt_environment(settings: Settings) -> dict[str, str]:
    """Return this process's environment with the settings' no_proxy, which apt reads from there alone."""
    return {**os.environ, **({"no_proxy": settings.no_proxy} if settings.no_proxy else {})}


def _split_stanzas(text: str) -> list[dict[str, str]]:
    """Return the fields of each stanza; a field that goes on over several lines keeps its first."""
    return [
        dict(line.split(": ", 1) for line in stanza.splitlines() if line[:1] not in {" ", ""} and ": " in line)
        for stanza in text.split("\n\n")
        if stanza.strip()
    ]


def _os_package(**fields: str | None) -> OsPackage:
    """Return a package as the archive describes it.

    Raises:
        LockError: a field is missing, or is not what it should be.

    """
    try:
        return OsPackage.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise LockError(
            f"the archive describes {shown(str(fields.get('name')), 80)} in no known way: "
            f"{first['loc'][0] if first['loc'] else 'package'}: {first['msg']}"
        ) from None


def parse_stanzas(text: str) -> tuple[OsPackage, ...]:
    # A package that two suites hold is shown twice.
    found = {
        _os_package(
            name=stanza.get("Package"),
            version=stanza.get("Version"),
            arch=stanza.get("Architecture"),
            sha256=stanza.get("SHA256"),
            filename=stanza.get("Filename"),
        )
        for stanza in _split_stanzas(text)
    }
    return tuple(sorted(found, key=_by_name))


UNREACHABLE = re.compile(
    r"Could not resolve|Could not connect|Unable to connect|Temporary failure|timed out|Connection", re.IGNORECASE
)


# What apt and mmdebstrap add to the reason, and what follows from it.
_NOISE = re.compile(
    r"Some index files failed|is not signed|setup failed|command failed|mmdebstrap failed|Unmet dependencies|Unable to correct"
)


def complaint_of(output: str) -> str:
    """Return apt's own words on what is wrong, in one line; of several, the first that tells the reason."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line[3:] for line in lines if line.startswith("E: ")]
    reasons = [line for line in errors if not _NOISE.search(line)]
    told = (
        reasons
        or [line for line in lines if re.search(r" : (Pre-)?[DCB]\w+: ", line)]
        or errors
        or lines
        or ["it said nothing"]
    )
    return redact(shown(" ".join(told[0].split()), 500))


def hosts_named(mirrors: Iterable[str], output: str) -> str:
    """Return the mirrors' hosts that `output` complains about; all of them when it names none."""
    hosts = sorted({urlsplit(url).hostname or url for url in mirrors})
    failed = "\n".join(line for line in output.splitlines() if line.startswith(("E:", "W:", "Err:")))
    return ", ".join([host for host in hosts if host in failed] or hosts)


def no_keyring(archive: Archive) -> HostError:
    return HostError(
        f"the keys that sign the archive are missing: {archive.keyring}",
        hint=f"apt-get install {archive.keyring_package}, or run scripts/install-engine",
    )


def _update_failure(output: str, archive: Archive, mirrors: Sequence[str]) -> EnvbuildError:
    if not UNREACHABLE.search(output) and not archive.keyring.is_file():
        return no_keyring(archive)
    host = hosts_named(mirrors, output)
    if UNREACHABLE.search(output):
        return LockError(
            f"the package archive on {host} cannot be reached, so OS packages cannot be pinned",
            where=complaint_of(output),
            hint="set the mirror and proxy settings, or lock on a machine that reaches it",
        )
    return LockError(
        f"the package archive on {host} cannot be used",
        where=complaint_of(output),
        hint="check that the mirror holds this suite, its updates and its security updates",
    )
