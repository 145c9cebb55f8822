"""The archives of Debian and Ubuntu: where a suite is kept, which keys sign it, and how apt reaches it."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.errors import HostError, LockError
from envbuild.settings import Settings
from envbuild.util import quote
from envbuild.util.names import is_one_line
from envbuild.util.processes import bounded


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Where a distribution keeps its packages, and the keys that sign them."""

    mirror: str
    security_mirror: str
    components: tuple[str, ...]
    keyring: Path
    keyring_package: str
    base_packages: tuple[str, ...]
    """What a root of it holds besides the essential packages."""

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


UBUNTU_PORTS = "http://ports.ubuntu.com/ubuntu-ports"
"""Where Ubuntu keeps what is of no Intel processor, security updates included."""


def mirrors_of(settings: Settings, suite: str, arch: str = "amd64") -> tuple[str, str]:
    """Return the URLs that a site takes `suite` and its security updates from.

    Args:
        settings: the site's mirrors.
        suite: a key of `ARCHIVES`.
        arch: Debian's name of the architecture. Ubuntu's own archive holds amd64 alone; of a site's mirror it is not known.

    Raises:
        LockError: no archive of that suite is known.

    """
    archive = archive_of(suite)
    if archive is DEBIAN:
        return settings.debian_mirror, settings.debian_security_mirror
    mirror = settings.ubuntu_mirror
    if arch != "amd64" and mirror == archive.mirror:
        return UBUNTU_PORTS, UBUNTU_PORTS
    # Ubuntu's own archive has the security updates on a separate host, and its mirrors hold them like the rest.
    return mirror, archive.security_mirror if mirror == archive.mirror else mirror


def no_keyring(archive: Archive) -> HostError:
    return HostError(
        f"the keys that sign the archive are missing: {archive.keyring}",
        hint=f"apt-get install {archive.keyring_package}, or run scripts/install-engine",
    )


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
    lines = [f"{name} {conf_value(value)}" for name, value in found if is_one_line(value)]
    own = {
        "http::Proxy": settings.http_proxy,
        "https::Proxy": settings.https_proxy,
        "https::CaInfo": settings.ca_bundle,
    }
    return lines + [f"Acquire::{name} {conf_value(str(value))}" for name, value in own.items() if value]


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


def apt_environment(settings: Settings) -> dict[str, str]:
    """Return this process's environment with the settings' no_proxy, which apt reads from there alone."""
    return {**os.environ, **({"no_proxy": settings.no_proxy} if settings.no_proxy else {})}


def conf_value(value: str) -> str:
    try:
        return quote.apt_conf(value)
    except ValueError as error:
        raise HostError(
            f"apt cannot take this: {error}", hint="set TMPDIR, or the setting, to a path without such a character"
        ) from None
