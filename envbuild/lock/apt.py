"""The exact OS packages that a list of names means: `apt-get` in its own folder answers.

It never touches the host's own package state, and asks the signed archives of Debian and Ubuntu alone.
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from envbuild.errors import EnvbuildError, HostError, LockError
from envbuild.lock.apt_answers import (
    UNREACHABLE,
    complaint_of,
    hosts_named,
    parse_uris,
    split_stanzas,
)
from envbuild.lock.archives import (
    Archive,
    apt_environment,
    apt_options,
    archive_of,
    conf_value,
    mirrors_of,
    no_keyring,
)
from envbuild.lock.model import OsPackage
from envbuild.settings import Settings
from envbuild.util.names import OsPackageName, OsVersion, checked, shown
from envbuild.util.processes import bounded
from envbuild.util.scratch import scratch

# What a base image that others made may hold besides apt: the compilers that cuda-nvcc asks for, and what NVIDIA's
# Dockerfiles use to fetch their packages (gitlab.com/nvidia/container-images/cuda, dist/12.6.3/ubuntu2404).
_MADE_BY_OTHERS = ("build-essential", "curl", "gnupg2")


class ArchiveError(HostError):
    """A package archive that does not answer, or cannot serve now."""


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
                f"{shown(package, 80)!r} is not an OS package: {error}", hint="write a package's name, or name=version"
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
    """Return every package that installing `packages` on `suite` installs, by name, each with its version and hash.

    With `installed` it is what comes on top of those; without, it is a whole root: the essential packages and
    the archive's base packages too, on Debian just what `bootstrap_root` installs. Recommended packages are left out.

    Args:
        settings: the archive to ask, and how to reach it.
        suite: a key of `ARCHIVES`.
        packages: names as apt takes them (`name` or `name=version`).
        installed: what the base image holds already.
        arch: Debian's name of the architecture.

    Raises:
        ArchiveError: a mirror cannot be reached or cannot serve now.
        HostError: apt-get or the archive's keys are missing.
        LockError: a mirror does not have the suite, or the archive a package or version.

    """
    archive = archive_of(suite)
    if shutil.which("apt-get") is None:
        raise HostError(
            "apt-get is missing, which resolves OS packages", hint="lock on a Debian or Ubuntu machine, or use its lock"
        )
    packages = checked_packages(packages)
    checked_packages(f"{package.name}={package.version}" for package in installed)
    mirror, security_mirror = mirrors_of(settings, suite, arch)
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
    settings: Settings, *, suite: str, packages: Sequence[str], arch: str = "amd64"
) -> tuple[tuple[OsPackage, ...], tuple[OsPackage, ...]]:
    """Return what installing `packages` on an image that others made adds, and what else it may have to renew there.

    It cannot be known from here what the image holds, and a package that is newer in the archive often takes others along
    (libc6-dev asks for exactly its libc6). So nothing counts as installed: the essential packages are pinned as well. The
    build adds what is missing in the image, and renews what that requires.

    Args and Raises: as `resolve_os_packages`.

    """
    added = resolve_os_packages(settings, suite=suite, packages=packages, arch=arch)
    together = resolve_os_packages(settings, suite=suite, packages=(*packages, *_MADE_BY_OTHERS), arch=arch)
    return added, tuple(package for package in together if package not in set(added))


_APT_S = 1800.0
"""Seconds that one command of apt may take; the lists of an archive take a few over a slow line."""
_APT_SECONDS = 20
"""How long apt waits for an archive, for each of two attempts."""
_APT_BYTES = 256 << 20
"""Bytes that it may print; the descriptions of every package of a base have 2 MiB."""


class _Answer(NamedTuple):
    code: int
    out: str
    err: str


class _IsolatedApt:
    """apt-get over its own folder: configuration, sources, lists, cache and dpkg status."""

    def __init__(self, folder: Path, arch: str, reach: Settings) -> None:
        self.folder = folder
        for path in ("etc/apt/apt.conf.d", "etc/apt/preferences.d", "lists/partial", "cache/archives/partial"):
            (folder / path).mkdir(parents=True)
        self.status = folder / "status"
        self.status.touch()
        config = folder / "apt.conf"
        # apt reads this file before any other, so that Dir keeps it from the host's own configuration.
        settings = [
            f"Dir {conf_value(f'{folder}/')}",
            f"Dir::State::Lists {conf_value(f'{folder}/lists')}",
            f"Dir::State::Status {conf_value(str(self.status))}",
            f"Dir::Cache {conf_value(f'{folder}/cache')}",
            f"APT::Architecture {conf_value(arch)}",
            f"APT::Architectures {{ {conf_value(arch)}; }}",
            'APT::Sandbox::User "root"',
            'APT::Get::AllowUnauthenticated "false"',
            'APT::Install-Recommends "false"',
            # Or --print-uris gives MD5.
            'Acquire::ForceHash "SHA256"',
            'Acquire::Languages "none"',
            'Acquire::GzipIndexes "false"',
            'Acquire::Retries "1"',
            f'Acquire::http::Timeout "{_APT_SECONDS}"',
            f'Acquire::https::Timeout "{_APT_SECONDS}"',
            *apt_options(reach),
        ]
        config.write_text("".join(f"{line};\n" for line in settings), encoding="utf-8")
        self.env = {**apt_environment(reach), "APT_CONFIG": str(config), "LC_ALL": "C.UTF-8"}

    def _run(self, *command: str) -> _Answer:
        """Run one of apt's programs; when it is interrupted, its helpers end with it."""
        ran = bounded(command, env=self.env, seconds=_APT_S, limit=_APT_BYTES)
        if ran.fault:
            raise ArchiveError(f"{command[0]} {ran.fault}", hint="check the mirrors and the proxy in the settings")
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
        again, so all of them are copied. Where the archive has moved on from a base image's version, only what the package
        provides is taken from the newer one: the base met its needs, and apt must not find them broken.
        """
        shown = self._run("apt-cache", "show", "--no-all-versions", *(package.name for package in installed)).out
        described = {stanza["Package"]: stanza for stanza in split_stanzas(shown)}
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
        return parse_uris(done.out)


def _update_failure(output: str, archive: Archive, mirrors: Sequence[str]) -> EnvbuildError:
    if not UNREACHABLE.search(output) and not archive.keyring.is_file():
        return no_keyring(archive)
    host = hosts_named(mirrors, output)
    if UNREACHABLE.search(output):
        return ArchiveError(
            f"the package archive on {host} cannot be reached, so OS packages cannot be pinned",
            where=complaint_of(output),
            hint="set the mirror and proxy settings, or lock on a machine that reaches it",
        )
    return LockError(
        f"the package archive on {host} cannot be used",
        where=complaint_of(output),
        hint="check that the mirror holds this suite, its updates and its security updates",
    )
