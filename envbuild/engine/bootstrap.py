"""A Debian root filesystem of our own, the same bytes every time, and the exact OS packages that a list of names means.

`mmdebstrap` makes the root from a signed Debian archive; no image registry is involved. `apt-get` in a folder of its own
answers which packages, versions and hashes a list comes to, and never touches the host's own package state.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pydantic import ValidationError

from envbuild.errors import BuildError, EnvbuildError, HostError, LockError
from envbuild.lock.model import OsPackage
from envbuild.processes import end_group, guarded
from envbuild.settings import Settings, redact
from envbuild.util import quote
from envbuild.util.names import OsPackageName, OsVersion, checked, is_one_line, shown
from envbuild.util.scratch import scratch

# What a base image that others made may hold beside apt: the compilers that cuda-nvcc asks for, and what NVIDIA's
# Dockerfiles use to fetch their packages (gitlab.com/nvidia/container-images/cuda, dist/12.6.3/ubuntu2404).
_MADE_BY_OTHERS = ("build-essential", "curl", "gnupg2")

# Kept out of the root and of everything installed on it later, as Debian's own slim images do; licences stay.
_EXCLUDED = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
_KEPT = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")

# What a bootstrap leaves that a second one would write otherwise, or that belongs to the machine it ran on.
_LEFTOVERS = (
    "etc/.pwd.lock",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/group-",
    "etc/gshadow-",
    "etc/hostname",
    "etc/machine-id",
    "etc/passwd-",
    "etc/resolv.conf",
    "etc/shadow-",
    "etc/subgid-",
    "etc/subuid-",
    "var/cache/apt/pkgcache.bin",
    "var/cache/apt/srcpkgcache.bin",
    "var/cache/debconf/config.dat-old",
    "var/cache/debconf/passwords.dat",
    "var/cache/debconf/templates.dat-old",
    "var/cache/ldconfig/aux-cache",
    "var/lib/dbus/machine-id",
    "var/lib/dpkg/available",
    "var/lib/dpkg/diversions-old",
    "var/lib/dpkg/lock",
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/status-old",
    "var/lib/dpkg/triggers/Lock",
)


# Bytes of mmdebstrap's output, from its end, that are searched for what went wrong.
_LOG_END = 2**20


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


_DEBIAN = Archive(
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
    "bookworm": _DEBIAN,
    "trixie": _DEBIAN,
    "focal": _UBUNTU,
    "jammy": _UBUNTU,
    "noble": _UBUNTU,
}


@dataclass(frozen=True, kw_only=True)
class RootFS:
    """A root filesystem as an uncompressed tar at `path`, its SHA-256 in hex, and what is installed in it, by name."""

    path: Path
    sha256: str
    packages: tuple[OsPackage, ...]


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
    if archive is _DEBIAN:
        return settings.debian_mirror, settings.debian_security_mirror
    mirror = settings.ubuntu_mirror
    # Ubuntu's own archive has the security updates on a host of their own, and its mirrors hold them like the rest.
    return mirror, archive.security_mirror if mirror == archive.mirror else mirror


def bootstrap_root(
    settings: Settings,
    *,
    suite: str,
    packages: Sequence[str],
    epoch: int,
    dest: Path,
    log: Path,
    locked: Iterable[OsPackage] | None = None,
) -> RootFS:
    """Make the Debian root of `suite` with the essential packages, its archive's base packages and `packages` in it.

    Two runs over the same archive state give the same files, on any host and as any user; with the same tar, the same bytes.

    Args:
        settings: the archive to fetch from, and how to reach it; the root itself always names the public one.
        suite: bookworm or trixie.
        packages: further packages, as apt names them (`name` or `name=version`).
        epoch: seconds since 1970; no file in the root is newer.
        dest: the tar to write; it appears only when it is whole.
        log: where the output of mmdebstrap goes.
        locked: what a lock says the root holds; anything else is refused.

    Raises:
        HostError: mmdebstrap or the archive's keys are missing, or the mirror cannot be reached.
        LockError: the root would hold other packages than `locked`.
        BuildError: mmdebstrap failed for another reason.

    """
    archive = archive_of(suite)
    packages = _checked_packages(packages)
    if archive is not _DEBIAN:
        raise HostError(f"envbuild bootstraps Debian roots only, not {suite}", hint="use --os debian12 or debian13")
    if shutil.which("mmdebstrap") is None:
        raise HostError("mmdebstrap is missing, which makes the Debian root", hint="run scripts/install-engine")
    if not archive.keyring.is_file():
        raise _no_keyring(archive)
    mirror, security_mirror = mirrors_of(settings, suite)
    dest.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with scratch("root") as folder, scratch("part", dest.parent) as beside:
        part = beside / "rootfs.tar"
        for each in (folder, beside):
            each.chmod(0o755)  # without root, mmdebstrap works as another user id
        (folder / "sources.list").write_text(
            "\n".join(archive.sources(suite, mirror=archive.mirror, security_mirror=archive.security_mirror)) + "\n",
            encoding="utf-8",
        )
        (folder / "99envbuild").write_text(
            "".join(f"path-exclude=/usr/share/{name}/*\n" for name in _EXCLUDED)
            + "".join(f"path-include={path}\n" for path in _KEPT),
            encoding="utf-8",
        )
        proxies, options = _split_proxies(_apt_options(settings))
        # Not on the command line, which everybody on the machine can read: a mirror's address may carry a login.
        mirrors = folder / "mirrors"
        mirrors.touch(mode=0o600)
        lines = archive.sources(suite, mirror=mirror, security_mirror=security_mirror)
        mirrors.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [
            "mmdebstrap",
            "--variant=apt",
            "--format=tar",
            # BuildKit makes /dev itself, and without root the nodes could not be unpacked.
            "--skip=output/dev",
            f"--components={','.join(archive.components)}",
            f"--keyring={archive.keyring}",
            f"--include={','.join((*archive.base_packages, *packages))}",
            *(f"--aptopt={option}" for option in options),
            # This root is thrown away when the machine dies; no need to wait for its disk.
            "--dpkgopt=force-unsafe-io",
            *(f"--dpkgopt={line}" for line in (folder / "99envbuild").read_text(encoding="utf-8").splitlines()),
            "--hook-dir=/usr/share/mmdebstrap/hooks/maybe-merged-usr",
            *_hooks(folder, epoch),
            suite,
            str(part),
            "-",
        ]
        with log.open("wb") as output, mirrors.open("rb") as asked:
            # A session of its own: an mmdebstrap that fails hangs up its whole process group, the caller's make included.
            process = subprocess.Popen(
                guarded(command, patience=15.0),
                stdin=asked,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **_environment(settings),
                    **proxies,
                    "SOURCE_DATE_EPOCH": str(epoch),
                    "LC_ALL": "C.UTF-8",
                    "TMPDIR": str(folder),
                },
                start_new_session=True,
            )
        try:
            code = process.wait()
        except BaseException:
            end_group(process, first=signal.SIGTERM, patience=15.0)
            raise
        if code:
            raise _bootstrap_failure(log, (mirror, security_mirror))
        installed = _parse_stanzas((folder / "envbuild-packages").read_text(encoding="utf-8"))
        if locked is not None:
            _compare(locked, installed, suite)
        drop_member(part, "dev")
        with part.open("rb") as tar:
            digest = hashlib.file_digest(tar, "sha256").hexdigest()
        # The checksum is there before what it belongs to: a root without one is never taken for whole.
        stated = beside / "sha256"
        stated.write_text(digest + "\n", encoding="ascii")
        stated.replace(checksum_of(dest))
        part.replace(dest)
    return RootFS(path=dest, sha256=digest, packages=installed)


def checksum_of(root: Path) -> Path:
    """Return the file that holds the sha256, in hex, of the root that `bootstrap_root` wrote to `root`."""
    return root.with_name(f"{root.name}.sha256")


def end_of(log: Path, limit: int) -> str:
    """Return the last `limit` bytes of a log as text; nothing when it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - limit))
            return file.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def _checked_packages(packages: Iterable[str]) -> list[str]:
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


def drop_member(path: Path, name: str) -> None:
    """Take the empty folder `name` out of an uncompressed tar; the file keeps its size.

    mmdebstrap 1.4 leaves an empty /dev in a root that was asked for without one, and 1.3 does not.
    """
    with tarfile.open(path) as tar:
        member = next((m for m in tar if m.name.removeprefix("./") == name and m.isdir()), None)
    if member is not None:
        data = path.read_bytes()
        path.write_bytes(data[: member.offset] + data[member.offset_data :] + bytes(member.offset_data - member.offset))


def _hooks(folder: Path, epoch: int) -> list[str]:
    """Return the options that record what is installed, put our files in, and take away what differs between runs."""
    place = quote.shell(str(folder))  # mmdebstrap reads a hook of its own as a shell does
    leftovers = " ".join(f'"$1/{path}"' for path in _LEFTOVERS)
    steps = [
        # While the package lists are still there: they alone know the hashes of the .debs.
        'chroot "$1" dpkg-query -W -f "\\${Package}:\\${Architecture}=\\${Version}\\n" >"$1/envbuild-names"',
        'xargs chroot "$1" apt-cache show <"$1/envbuild-names" >"$1/envbuild-packages"',
        f"copy-out /envbuild-packages {place}",
        'rm "$1/envbuild-names" "$1/envbuild-packages"',
        f"upload {place}/sources.list /etc/apt/sources.list",
        f'chmod 644 "$1/etc/apt/sources.list"; rm -f {leftovers}',
        'rm -f "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap',
        f"upload {place}/99envbuild /etc/dpkg/dpkg.cfg.d/99envbuild",
        'chmod 644 "$1/etc/dpkg/dpkg.cfg.d/99envbuild"; find "$1/var/log" "$1/var/lib/apt/lists" -type f -delete',
        # The day on which each account's password was last set is the day of the bootstrap; trixie has no shadow file yet.
        f'[ ! -e "$1/etc/shadow" ] || sed -i -E \'s/^([^:]*:[^:]*):[0-9]+:/\\1:{epoch // 86400}:/\' "$1/etc/shadow"',
    ]
    return [f"--customize-hook={step}" for step in steps]


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
    packages = _checked_packages(packages)
    _checked_packages(f"{package.name}={package.version}" for package in installed)
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


class _IsolatedApt:
    """apt-get over a folder of its own: configuration, sources, lists, cache and dpkg status."""

    def __init__(self, folder: Path, arch: str, reach: Settings) -> None:
        self.folder = folder
        self.arch = arch
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
            *_apt_options(reach),
        ]
        config.write_text("".join(f"{line};\n" for line in settings), encoding="utf-8")
        self.env = {**_environment(reach), "APT_CONFIG": str(config), "LC_ALL": "C.UTF-8"}

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            guarded(command), env=self.env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )

    def write_sources(self, lines: Sequence[str]) -> None:
        (self.folder / "etc/apt/sources.list").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def update(self) -> str:
        """Fetch the package lists; return what went wrong, or nothing."""
        done = self._run("apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any")
        return "" if done.returncode == 0 else done.stdout + done.stderr

    def write_status(self, installed: Sequence[OsPackage]) -> None:
        """Write a dpkg status in which `installed` are installed, as the archive describes them.

        apt takes a package whose fields differ from the archive's for another build of the same version and would fetch it
        anew, so all of them are copied. Where the archive has moved on from a base image's version, only what the package
        provides is taken from the newer one: the base met its needs, and apt must not find them broken.
        """
        shown = self._run("apt-cache", "show", "--no-all-versions", *(package.name for package in installed)).stdout
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
        if done.returncode:
            raise LockError(
                f"apt cannot install these on {suite}: {_apt_complaint(done.stderr + done.stdout)}",
                hint="choose a package or version that the archive holds; it keeps one version per suite",
            )
        found = []
        for line in done.stdout.splitlines():
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


def _apt_options(settings: Settings) -> list[str]:
    """Return how apt reaches a mirror, as lines of an apt.conf: the host's own way, and the settings' where they say more.

    Of the host that is proxy, certificates, and leave for an old snapshot; the settings' proxies and CA bundle come after it.
    """
    done = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False)
    wanted = re.compile(
        r'(Acquire::(?:Check-Valid-Until|https?::(?:Proxy|CaInfo|Verify-Peer|SslCert|SslKey)[A-Za-z0-9:._-]*)) "([^"\\]*)";',
        re.IGNORECASE,
    )
    found = [match.groups() for line in done.stdout.splitlines() if (match := wanted.fullmatch(line))]
    lines = [f"{name} {_conf(value)}" for name, value in found if is_one_line(value)]
    own = {
        "http::Proxy": settings.http_proxy,
        "https::Proxy": settings.https_proxy,
        "https::CaInfo": settings.ca_bundle,
    }
    return lines + [f"Acquire::{name} {_conf(str(value))}" for name, value in own.items() if value]


def _split_proxies(options: Iterable[str]) -> tuple[dict[str, str], list[str]]:
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


def _environment(settings: Settings) -> dict[str, str]:
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


def _parse_stanzas(text: str) -> tuple[OsPackage, ...]:
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


def _compare(locked: Iterable[OsPackage], installed: Iterable[OsPackage], suite: str) -> None:
    """Raise a LockError that lists each package in which the root differs from the lock."""
    before = {package.name: package for package in locked}
    after = {package.name: package for package in installed}
    changes = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None and new is not None:
            changes.append(f"{name} {new.version} is new")
        elif new is None and old is not None:
            changes.append(f"{name} {old.version} is gone")
        elif old is not None and new is not None and (old.version, old.sha256) != (new.version, new.sha256):
            same = old.version == new.version
            changes.append(f"{name} {old.version} is now {'another file' if same else new.version}")
    if changes:
        raise LockError(
            f"the archive no longer gives {suite} as locked: {'; '.join(changes)}",
            hint="lock again, or set the Debian mirror to a snapshot or store that still holds the locked packages",
        )


_UNREACHABLE = re.compile(
    r"Could not resolve|Could not connect|Unable to connect|Temporary failure|timed out|Connection", re.IGNORECASE
)


# What apt and mmdebstrap add to the reason, and what follows from it.
_NOISE = re.compile(
    r"Some index files failed|is not signed|setup failed|command failed|mmdebstrap failed|Unmet dependencies|Unable to correct"
)


def _apt_complaint(output: str) -> str:
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


def _hosts(mirrors: Iterable[str], output: str) -> str:
    """Return the mirrors' hosts that `output` complains about; all of them when it names none."""
    hosts = sorted({urlsplit(url).hostname or url for url in mirrors})
    failed = "\n".join(line for line in output.splitlines() if line.startswith(("E:", "W:", "Err:")))
    return ", ".join([host for host in hosts if host in failed] or hosts)


def _no_keyring(archive: Archive) -> HostError:
    return HostError(
        f"the keys that sign the archive are missing: {archive.keyring}",
        hint=f"apt-get install {archive.keyring_package}, or run scripts/install-engine",
    )


def _update_failure(output: str, archive: Archive, mirrors: Sequence[str]) -> EnvbuildError:
    if not _UNREACHABLE.search(output) and not archive.keyring.is_file():
        return _no_keyring(archive)
    host = _hosts(mirrors, output)
    if _UNREACHABLE.search(output):
        return LockError(
            f"the package archive on {host} cannot be reached, so OS packages cannot be pinned",
            where=_apt_complaint(output),
            hint="set the mirror and proxy settings, or lock on a machine that reaches it",
        )
    return LockError(
        f"the package archive on {host} cannot be used",
        where=_apt_complaint(output),
        hint="check that the mirror holds this suite, its updates and its security updates",
    )


def _bootstrap_failure(log: Path, mirrors: Sequence[str]) -> EnvbuildError:
    output = end_of(log, _LOG_END)
    if _UNREACHABLE.search(output):
        return HostError(
            f"the Debian archive on {_hosts(mirrors, output)} cannot be reached",
            where=f"{_apt_complaint(output)} (whole log: {log})",
            hint="check the network, and the mirror and proxy settings",
        )
    if os.geteuid() and re.search(
        r"newuidmap|newgidmap|/etc/subuid|CLONE_NEWUSER|pick chroot mode|user namespace", output
    ):
        return HostError(
            "this user may not make a user namespace, which bootstrapping without root needs",
            where=str(log),
            hint="apt-get install uidmap and give the user a range in /etc/subuid and /etc/subgid, or run as root",
        )
    return BuildError(f"bootstrapping the Debian root failed: {_apt_complaint(output)}", where=f"whole log: {log}")
