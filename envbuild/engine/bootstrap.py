"""A Debian root filesystem of our own, the same bytes every time, and the exact OS packages that a list of names means.

`mmdebstrap` makes the root from a signed Debian archive; no image registry is involved. `apt-get` in its own folder
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

from envbuild.errors import BuildError, EnvbuildError, HostError, LockError
from envbuild.lock.apt import checked_packages
from envbuild.lock.apt_answers import UNREACHABLE, complaint_of, hosts_named, parse_stanzas
from envbuild.lock.archives import (
    DEBIAN,
    apt_environment,
    apt_options,
    archive_of,
    mirrors_of,
    no_keyring,
    split_proxies,
)
from envbuild.lock.model import OsPackage
from envbuild.settings import Settings
from envbuild.util import quote
from envbuild.util.processes import bounded, end_group, guarded
from envbuild.util.scratch import scratch

# Kept out of the root and of everything installed on it later, as Debian's own slim images do; licences stay.
_EXCLUDED = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
_KEPT = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")

# What a bootstrap leaves that a second one would write otherwise, or that belongs to the machine it ran on.
# Where apt puts what it loads: its own user's, except where that user cannot enter the temporary folder on the host.
_APT_OWN = ("/var/cache/apt/archives/partial", "/var/lib/apt/lists/partial")
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
# Bytes of one package's control file; the largest of bookworm has 20 KiB.
_CONTROL = 2**20


@dataclass(frozen=True, kw_only=True)
class RootFS:
    """A root filesystem as an uncompressed tar at `path`, its SHA-256 in hex, and what is installed in it, by name."""

    path: Path
    sha256: str
    packages: tuple[OsPackage, ...]


def bootstrap_root(
    settings: Settings,
    *,
    suite: str,
    packages: Sequence[str],
    epoch: int,
    dest: Path,
    log: Path,
    locked: Iterable[OsPackage] | None = None,
    arch: str | None = None,
) -> RootFS:
    """Make the Debian root of `suite` with the essential packages, its archive's base packages and `packages` in it.

    Where the settings' folder `debs` holds every package that is locked, no archive is asked. Two runs over the same archive state give the same files, on any host and as any user; with the same tar, the same bytes.

    Args:
        settings: the archive to fetch from, and how to reach it; the root itself always names the public one.
        suite: bookworm or trixie.
        packages: further packages, as apt names them (`name` or `name=version`).
        epoch: seconds since 1970; no file in the root is newer.
        dest: the tar to write; it appears only when it is whole.
        log: where the output of mmdebstrap goes.
        locked: what a lock says the root holds; anything else is refused.
        arch: Debian's name of the architecture; this machine's own by default.

    Raises:
        HostError: mmdebstrap or the archive's keys are missing, or the mirror cannot be reached.
        LockError: the root would hold other packages than `locked`.
        BuildError: mmdebstrap failed for another reason.

    """
    archive = archive_of(suite)
    packages = checked_packages(packages)
    if archive is not DEBIAN:
        raise HostError(f"envbuild bootstraps Debian roots only, not {suite}", hint="use --os debian12 or debian13")
    if shutil.which("mmdebstrap") is None:
        raise HostError("mmdebstrap is missing, which makes the Debian root", hint="run scripts/install-engine")
    locked = None if locked is None else tuple(locked)
    debs = locked_debs(settings.debs, locked) if settings.debs and locked else None
    if debs is None and not archive.keyring.is_file():
        raise no_keyring(archive)
    mirror, security_mirror = mirrors_of(settings, suite)
    dest.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with scratch("root") as folder, scratch("part", dest.parent) as near:
        part = near / "rootfs.tar"
        for each in (folder, near):
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
        proxies, options = split_proxies(apt_options(settings))
        # Not on the command line, which everybody on the machine can read: a mirror's address may carry a login.
        mirrors = folder / "mirrors"
        mirrors.touch(mode=0o600)
        lines = archive.sources(suite, mirror=mirror, security_mirror=security_mirror)
        if debs is not None:  # by the hashes of the lock, which say more than an archive's signature
            write_archive(debs, folder / "debs")
            lines = [f"deb [trusted=yes] copy:{quote.apt_source(str(folder / 'debs'))} ./"]
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
            *([f"--architectures={arch}"] if arch else []),
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
            # Its own session: an mmdebstrap that fails hangs up its whole process group, the caller's make included.
            process = subprocess.Popen(
                guarded([*_own_mounts(), command[0], *_own_processes(debs), *command[1:]], patience=15.0),
                stdin=asked,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **apt_environment(settings),
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
        installed = parse_stanzas((folder / "envbuild-packages").read_text(encoding="utf-8"))
        if locked is not None:
            _compare(locked, installed, suite)
        drop_member(part, "dev")
        with part.open("rb") as tar:
            digest = hashlib.file_digest(tar, "sha256").hexdigest()
        # The checksum is there before what it belongs to: a root without one is never taken for whole.
        stated = near / "sha256"
        stated.write_text(digest + "\n", encoding="ascii")
        stated.replace(checksum_of(dest))
        part.replace(dest)
    return RootFS(path=dest, sha256=digest, packages=installed)


def locked_debs(folder: Path, locked: Iterable[OsPackage]) -> dict[str, Path] | None:
    """Return the files of the locked packages in a folder, by their sha256; None where it does not hold them all.

    Raises:
        OSError: a file of it cannot be read.

    """
    wanted = {package.sha256 for package in locked}
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.deb")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest in wanted:
                found[digest] = path
    return found if found.keys() == wanted else None


def write_archive(debs: Mapping[str, Path], folder: Path) -> None:
    """Write a package archive of these files, by their sha256, into a new folder: copies, and the list that apt reads.

    Raises:
        LockError: a file is no package.

    """
    folder.mkdir(mode=0o755)
    with (folder / "Packages").open("wb") as packages:
        for digest, path in debs.items():
            place = folder / f"{digest}.deb"
            shutil.copyfile(path, place)
            place.chmod(0o644)
            ran = bounded(["dpkg-deb", "--field", str(place)], seconds=60.0, limit=_CONTROL)
            if ran.code or ran.fault:
                raise LockError(
                    f"{path.name} is not a Debian package", where=str(path), hint="put the right file there"
                )
            lines = f"Filename: {place.name}\nSize: {place.stat().st_size}\nSHA256: {digest}\n\n"
            packages.write(ran.out.rstrip(b"\n") + b"\n" + lines.encode())


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


def drop_member(path: Path, name: str) -> None:
    """Take the empty folder `name` out of an uncompressed tar; the file keeps its size.

    mmdebstrap 1.4 leaves an empty /dev in a root that was asked for without one, and 1.3 does not.
    """
    with tarfile.open(path) as tar:
        member = next((m for m in tar if m.name.removeprefix("./") == name and m.isdir()), None)
    if member is not None:
        data = path.read_bytes()
        path.write_bytes(data[: member.offset] + data[member.offset_data :] + bytes(member.offset_data - member.offset))


def _own_mounts() -> list[str]:
    """Return the start of a command that keeps what it mounts to itself; nothing where this user may not have that.

    As root, mmdebstrap mounts this machine's /proc and /sys in the root. Those of a killed one would stay, and whoever then
    removes the folder would remove through them. In a separate namespace they go with its last process. Without root,
    mmdebstrap makes such a namespace itself; in a container that may mount nothing, it mounts nothing.
    """
    if os.geteuid():
        return []
    prefix = ["unshare", "--mount", "--"]
    try:
        may = not bounded([*prefix, "true"], seconds=30.0, limit=1 << 16).code
    except OSError:
        may = False
    return prefix if may else []


def _own_processes(debs: object) -> list[str]:
    """Return the options with which, as root, scripts of packages out of a folder see no process of this machine.

    No archive signed those packages. In mmdebstrap's mode `unshare` root gets separate processes, and the same bytes.
    The scripts are root's all the same, so this is no wall. Without root, mmdebstrap chooses that mode itself, with user
    ids that own nothing here. In a container that may mount nothing, that mode fails.
    """
    return ["--mode=unshare"] if debs is not None and _own_mounts() else []


def _hooks(folder: Path, epoch: int) -> list[str]:
    """Return the options that record what is installed, put our files in, and take away what differs between runs."""
    place = quote.shell(str(folder))  # mmdebstrap reads its hooks as a shell does
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
        # apt gives both to its own user, but only where that user can enter the temporary folder on the host.
        f'chroot "$1" chown _apt:root {" ".join(_APT_OWN)}',
        # The day on which each account's password was last set is the day of the bootstrap; trixie has no shadow file yet.
        f'[ ! -e "$1/etc/shadow" ] || sed -i -E \'s/^([^:]*:[^:]*):[0-9]+:/\\1:{epoch // 86400}:/\' "$1/etc/shadow"',
    ]
    return [f"--customize-hook={step}" for step in steps]


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


def _bootstrap_failure(log: Path, mirrors: Sequence[str]) -> EnvbuildError:
    output = end_of(log, _LOG_END)
    if UNREACHABLE.search(output):
        return HostError(
            f"the Debian archive on {hosts_named(mirrors, output)} cannot be reached",
            where=f"{complaint_of(output)} (whole log: {log})",
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
    return BuildError(f"bootstrapping the Debian root failed: {complaint_of(output)}", where=f"whole log: {log}")
