"""The Python side of a lock: uv resolves each group of requirements to a pylock (PEP 751) with hashes."""

import contextlib
import dataclasses
import os
import re
import sys
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import tomli
from packaging.utils import canonicalize_name, parse_wheel_filename
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envbuild.errors import HostError, LockError
from envbuild.lock.inputs import PythonGroup
from envbuild.lock.model import PythonPackage, PythonSet
from envbuild.matrix.cell import X86_64
from envbuild.net.address import host_of, place_of
from envbuild.net.download import file_name
from envbuild.settings import Settings, redact
from envbuild.util.names import FileName, SafeName, Sha256, Version, checked, shown
from envbuild.util.processes import bounded
from envbuild.util.scratch import scratch

PYTORCH = "https://download.pytorch.org/whl"
_UNREACHABLE = re.compile(
    r"(?:Failed to fetch|error sending request for url|Request failed"
    r"|HTTP status (?:server|client) error \((?:5\d\d|407|408|429)\b[^)]*\) for url)[^`(]*[`(](?P<url>https?://[^`)]+)[`)]"
)
# uv takes an index that asks for a login for one without the package, and hints at it.
_NO_LOGIN = re.compile(r"An index URL \((?P<url>https?://[^)]+)\) could not be queried due to [^(]*\(401\b")
_OS_ERROR = re.compile(r"\(os error \d+\)")
"""How uv ends what the machine refused: a full disk, a folder that it may not write."""
_UV_SECONDS = 30
"""How long uv waits for an index; its own default, as the next one is."""
_UV_RETRIES = 3


def uv_executable() -> str:
    """Return the path of the uv that this installation depends on."""
    import uv

    return str(uv.find_uv_bin())


def torch_index(settings: Settings, index: str) -> str:
    """Return the variant index `index`, on the site's own copy of PyTorch's indexes when the settings name one."""
    return index.replace(PYTORCH, settings.torch_index.rstrip("/"), 1)


def uv_environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables that give uv the settings' indexes, proxies and CA bundle."""
    env = {"UV_DEFAULT_INDEX": settings.index_url, "UV_NO_PROGRESS": "1"}
    # A folder that poses as an index (file://) is this machine's own: no build container could reach it.
    remote = [url for url in settings.extra_index_urls if url.startswith("http")]
    if remote:
        env["UV_INDEX"] = " ".join(remote)
    if settings.ca_bundle:
        env["SSL_CERT_FILE"] = str(settings.ca_bundle)
    proxies = {"HTTP_PROXY": settings.http_proxy, "HTTPS_PROXY": settings.https_proxy, "NO_PROXY": settings.no_proxy}
    return env | {name: value for name, value in proxies.items() if value}


def uv_environment_here(settings: Settings) -> dict[str, str]:
    """Return the whole environment of a uv on this host: the user's but for uv's own, the settings', a cache that can be written."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("UV_")}
    cache = os.environ.get("UV_CACHE_DIR") or str(settings.cache_dir / "uv")
    patience = {"UV_HTTP_TIMEOUT": str(_UV_SECONDS), "UV_HTTP_RETRIES": str(_UV_RETRIES)}
    return kept | uv_environment(settings) | patience | {"UV_CACHE_DIR": cache}


def resolve(
    settings: Settings,
    group: PythonGroup,
    *,
    python: str,
    glibc: str,
    machine: str = X86_64,
    constraints: Sequence[str] = (),
    without: Sequence[str] = (),
    excludes: Sequence[str] = (),
) -> tuple[str, PythonSet]:
    """Resolve `group` for one Python on Linux.

    Args:
        settings: indexes, find-links, proxies, CA bundle.
        group: what is asked.
        python: major.minor of the interpreter.
        machine: the architecture that the wheels are for.
        glibc: the OS' glibc, e.g. 2.36: no wheel may ask for a newer one.
        constraints: `name==version` lines that must hold; what earlier groups installed.
        without: normalised names that earlier groups installed already and that are left out of the answer.
        excludes: distributions that come with the base image; whatever asks for them gets none.

    Returns:
        The text of its pylock, and the same as a set of the lock.

    Raises:
        HostError: an index cannot be reached, and the message names its host; or uv cannot write.
        LockError: nothing satisfies the requirements; uv's own derivation is in the message.

    """
    with scratch("uv") as folder:
        asked = folder / "requirements.in"
        asked.write_text("".join(f"{line}\n" for line in group.requirements), encoding="utf-8")
        excluded = folder / "excludes.txt"
        excluded.write_text("".join(f"{line}\n" for line in excludes), encoding="utf-8")
        held = folder / "constraints.txt"
        held.write_text("".join(f"{line}\n" for line in constraints), encoding="utf-8")
        out = folder / "pylock.toml"
        command = [uv_executable(), "pip", "compile", str(asked), "--constraints", str(held), "--output-file", str(out)]
        command += ["--format", "pylock.toml", "--no-header", "--quiet", "--no-config", "--only-binary", ":all:"]
        # Nothing is built, so that any interpreter does: uv would look for `python`, and download it.
        command += ["--python", sys.executable, "--python-version", python]
        command += ["--python-platform", _platform(glibc, machine)]
        # Several indexes count as one, as pip has it: a variant's local label exists on PyTorch's index alone, and the
        # rest may come from either. Hashes in the lock decide what is installed.
        command += ["--index-strategy", "unsafe-best-match"]
        for place in settings.find_links:
            command += ["--find-links", place]
        if excludes:
            command += ["--excludes", str(excluded)]
        for name in without:
            command += ["--no-emit-package", name]
        env = uv_environment_here(settings)
        variant = ["--index", torch_index(settings, group.index)] if group.index else []
        done = _resolve([*command, *variant], env)
        if done.code and variant and settings.find_links and isinstance(_failure(group, done.err), HostError):
            # The variant's index is out of reach, and a folder of this site may hold the wheel all the same.
            again = _resolve(command, env)
            if not again.code:
                return _read(dataclasses.replace(group, index=None), out.read_text(encoding="utf-8"), machine)
        if done.code:
            raise _failure(group, done.err)
        return _read(group, out.read_text(encoding="utf-8"), machine)


_UV_S = 1800.0
"""Seconds that one resolution may take; those of the matrix take ten."""
_UV_BYTES = 16 << 20


class _Resolved(NamedTuple):
    code: int
    err: str


def _resolve(command: Sequence[str], env: Mapping[str, str]) -> _Resolved:
    ran = bounded(command, env=env, seconds=_UV_S, limit=_UV_BYTES)
    if ran.fault:
        raise HostError(f"uv {ran.fault}", hint="check the indexes and the proxy in the settings, then try again")
    return _Resolved(ran.code, ran.err.decode("utf-8", "replace"))


# The newest glibc that the pinned uv knows a platform for; no wheel asks for a newer one yet.
_NEWEST_GLIBC = 40


def _platform(glibc: str, machine: str) -> str:
    major, minor = glibc.split(".")[:2]
    return f"{machine}-manylinux_{major}_{min(int(minor), _NEWEST_GLIBC)}"


def _failure(group: PythonGroup, stderr: str) -> HostError | LockError:
    unreachable = _UNREACHABLE.search(stderr)
    if unreachable:
        host = host_of(unreachable["url"])
        return HostError(
            f"{host} cannot be reached, and the {group.name} packages are resolved there",
            where=place_of(unreachable["url"]),
            hint="check the network, or name a mirror, proxy or CA bundle in your settings (docs/reference/settings.md)",
        )
    if login := _NO_LOGIN.search(stderr):
        return HostError(
            f"{host_of(login['url'])} asks for a login, and the {group.name} packages are resolved there",
            where=place_of(login["url"]),
            hint="put the login into the address in your settings (docs/reference/settings.md)",
        )
    lines = [line.strip() for line in redact(stderr).splitlines() if line.strip()]
    what = f"the {group.name} packages cannot be resolved: " + shown(" ".join(lines), 1200)
    if _OS_ERROR.search(stderr):
        return HostError(what, hint="free space on the disk, or make the folder writable, then try again")
    return LockError(
        what,
        where=", ".join(group.requirements),
        hint="loosen a requirement of the stack, or pin the axis that it conflicts with",
    )


_OTHER_MACHINES = {
    X86_64: re.compile(r"(?:aarch64|macosx|win32|win_amd64|musllinux)"),
    # musllinux too: a wheel may name both libcs
    "aarch64": re.compile(r"(?:x86_64|i686|armv7l|ppc64le|s390x|riscv64|macosx|win32|win_amd64|win_arm64|-musllinux)"),
}
"""What the names of wheels say that an architecture cannot use."""
_WHEELS = "wheels/"
"""Where a lock keeps the wheels that come from a folder; its pylocks name them by path."""


class _Wheel(BaseModel):
    """A wheel of a pylock, with the parts that are read here."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: FileName | None = None
    url: str | None = Field(default=None, max_length=8192)
    path: str | None = Field(default=None, max_length=8192)
    hashes: dict[str, str]

    @property
    def is_local(self) -> bool:
        """Whether it lies on a machine, and not on an index."""
        return self.url is None or self.url.startswith("file://")

    @property
    def filename(self) -> str:
        """The wheel's name; raises ValueError when it is none."""
        place = self.name or self.url or self.path or ""
        if self.url is not None and not self.is_local:
            of_url = file_name(self.url)
            return of_url if self.name is None else self.name
        return checked(FileName, urllib.parse.unquote(place.rsplit("/", 1)[-1]))


class _Package(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    name: SafeName
    version: Version
    wheels: list[_Wheel] = Field(default=[], max_length=10_000)

    def usable(self, machine: str) -> tuple[tuple[str, str, _Wheel], ...]:
        """Return name, sha256 and the rest of each wheel that Linux on `machine` can use; raises ValueError for a bad one."""
        every = ((wheel.filename, wheel) for wheel in self.wheels)
        return tuple(
            (name, checked(Sha256, wheel.hashes.get("sha256")), wheel)
            for name, wheel in every
            if not _OTHER_MACHINES[machine].search(name)
        )


class _Pylock(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    packages: list[_Package] = Field(default=[], max_length=100_000)


def _packages(text: str, machine: str) -> list[tuple[_Package, tuple[tuple[str, str, _Wheel], ...]]]:
    """Return the packages of a pylock, each with its usable wheels.

    Raises:
        LockError: it is no pylock, names a file in a way that is not safe, or a package has no such wheel.

    """
    what = ""
    try:
        packages = _Pylock.model_validate(tomli.loads(text)).packages
        found = []
        for package in packages:
            what = f"{package.name} {package.version}: "
            found.append((package, package.usable(machine)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise LockError(f"this is not a pylock: {shown(place)}: {shown(first['msg'])}", hint=_LOCK_AGAIN) from None
    except RecursionError:
        raise LockError("this is not a pylock: it is nested too deeply", hint=_LOCK_AGAIN) from None
    except ValueError as error:
        raise LockError(f"this is not a pylock: {what}{shown(str(error))}", hint=_LOCK_AGAIN) from None
    for package, wheels in found:
        if not wheels:
            raise LockError(
                f"{package.name} {package.version} has no wheel for {machine} Linux",
                hint="build it as a component of the stack",
            )
    return found


_LOCK_AGAIN = "take the whole folder as `envbuild lock` wrote it, or lock again"


def packages_of(text: str, machine: str = X86_64) -> tuple[PythonPackage, ...]:
    """Return what a pylock (PEP 751) names, by name, each with the hashes of the wheels that Linux on `machine` can use.

    Raises:
        LockError: it is no pylock, or a package of it has no such wheel.

    """
    found = [
        PythonPackage(
            name=canonicalize_name(package.name),
            version=package.version,
            hashes=tuple(sorted({digest for _, digest, _ in wheels})),
        )
        for package, wheels in _packages(text, machine)
    ]
    return tuple(sorted(found, key=lambda p: p.name))


def named_wheels(text: str, machine: str = X86_64) -> tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...]:
    """Return name, version and wheels (file name, sha256) of each package of a pylock, for Linux on `machine`.

    Raises:
        LockError: it is no pylock, or a package of it has no such wheel.

    """
    return tuple(
        (canonicalize_name(package.name), package.version, tuple((name, digest) for name, digest, _ in wheels))
        for package, wheels in _packages(text, machine)
    )


def _read(group: PythonGroup, text: str, machine: str) -> tuple[str, PythonSet]:
    """Return what uv wrote, its local wheels named by their place in a lock, and the same as a set."""
    local: list[str] = []
    for package, wheels in _packages(text, machine):
        for name, _, wheel in wheels:
            if not wheel.is_local:
                continue
            if name in local:
                continue
            local.append(name)
            # A lock travels: a wheel from a folder of this machine is named by its file, next to the lock.
            key, value = ("url", wheel.url) if wheel.url is not None else ("path", wheel.path)
            stated = f'{key} = "{value}"'
            if stated not in text:  # uv wrote it with escapes
                raise LockError(
                    f"{package.name} {package.version} is in a folder whose name has special characters",
                    where=shown(value or ""),
                    hint="move the wheels to a folder of letters, digits and . _ -",
                )
            text = text.replace(stated, f'path = "{_WHEELS}{name}"')
    return text, PythonSet(
        name=group.name,
        requirements=group.requirements,
        packages=packages_of(text, machine),
        index=group.index,
        local_wheels=tuple(sorted(local)),
    )


def local_wheel(settings: Settings, filename: str) -> Path | None:
    """Return the wheel `filename` in a find-links folder of the settings, or None."""
    try:
        # packaging looks at the name and the version; the tags may hold anything, `../` too
        parse_wheel_filename(checked(FileName, filename))
    except ValueError:
        return None
    for place in settings.find_links:
        with contextlib.suppress(OSError), os.scandir(place) as listed:  # a page's address is no folder
            for entry in listed:
                if entry.name == filename and entry.is_file():
                    return Path(entry.path)
    return None


def requirements_text(python_set: PythonSet) -> str:
    """Return the set as hash-checked requirement lines, which any index or mirror can serve."""
    lines = []
    for package in python_set.packages:
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in package.hashes)
        lines.append(f"{package.name}=={package.version} {hashes}\n")
    return "".join(lines)
