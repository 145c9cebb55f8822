"""envbuild itself as a wheel, and the wheels of what it needs, for a host without a network."""

import base64
import hashlib
import importlib.metadata
import platform
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement

from envbuild.engine.wheel_file import check_wheel
from envbuild.errors import HostError, LockError
from envbuild.lock.inputs import PythonGroup
from envbuild.lock.python import named_wheels, resolve, uv_environment_here, uv_executable
from envbuild.lock.wheels import fits, tags_of
from envbuild.pipeline.fetched import fetch_wheel
from envbuild.settings import Settings
from envbuild.util.processes import bounded
from envbuild.verify.suite import pytest_pins

_BUILD_S = 600.0
_OUTPUT = 1 << 20
_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==\S+ --hash=sha256:(?P<sha256>[0-9a-f]{64})")
# Written by an installer, and no part of a wheel.
_INSTALLERS = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json"}


def python_here() -> str:
    """Return major.minor of the Python that runs this."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def tool_wheels(settings: Settings, folder: Path, *, note: Callable[[str], object]) -> dict[str, Path]:
    """Return the wheel of this envbuild and those of all that it needs, by file name, for the Python that runs it.

    Args:
        settings: the indexes.
        folder: takes the wheel of envbuild, and the downloads.
        note: takes a line about what is fetched.

    Raises:
        HostError: an index cannot be reached, or envbuild's own wheel cannot be built.
        LockError: an index has no wheel of something that is needed, or this installation was changed.

    """
    own = _own_wheel(settings, folder)
    needed = tuple(
        str(requirement)
        for requirement in map(Requirement, _required(own))
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    )
    libc, glibc = platform.libc_ver()
    if libc != "glibc":
        raise HostError("the wheels of envbuild are chosen on Linux with glibc", hint="make the bundle there")
    python, machine = python_here(), platform.machine()
    text, _ = resolve(
        settings,
        PythonGroup(name="tools", requirements=needed),
        python=python,
        glibc=glibc,
        machine=machine,
        constraints=_installed(),
    )
    tags = frozenset(tags_of(python, glibc, machine))
    found = {own.name: own}
    for project, version, files in named_wheels(text, machine):
        fitting = {name: sha256 for name, sha256 in files if fits(name, tags)}
        if not fitting:
            raise LockError(
                f"{project} {version} has no wheel for Python {python}", hint="run envbuild on another Python"
            )
        for name, sha256 in fitting.items():
            found[name] = fetch_wheel(settings, project, name, sha256, None, folder, note=note)
    return found


def suite_wheels(settings: Settings, python: str, folder: Path, *, note: Callable[[str], object]) -> dict[str, Path]:
    """Return the wheels of the smoke suite's pytest, by file name, for the image's Python.

    Raises:
        HostError: an index cannot be reached.
        LockError: no index has one of them.

    """
    major, minor = (int(part) for part in python.split(".")[:2])
    found = {}
    for line in pytest_pins((major, minor)).read_text(encoding="utf-8").splitlines():
        if match := _PIN.match(line):
            path = fetch_wheel(settings, match["name"], None, match["sha256"], None, folder, note=note)
            found[path.name] = path
    return found


def _required(wheel: Path) -> list[str]:
    import email

    checked = check_wheel(wheel, wheel.name)
    return email.message_from_bytes(checked.metadata).get_all("Requires-Dist", [])


def _installed() -> list[str]:
    """Return the versions of this environment, so that the other host gets what runs here."""
    from packaging.utils import canonicalize_name

    found = {canonicalize_name(each.name): each.version for each in importlib.metadata.distributions() if each.name}
    return [
        f"{name}=={version}" for name, version in sorted(found.items()) if name != "envbuild" and "+" not in version
    ]


def _own_wheel(settings: Settings, folder: Path) -> Path:
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return _packed(folder)
    made = folder / "own"
    command = [uv_executable(), "build", "--wheel", "--no-config", "--quiet", "--python", sys.executable]
    ran = bounded(
        [*command, "--out-dir", str(made), str(root)],
        env=uv_environment_here(settings),
        seconds=_BUILD_S,
        limit=_OUTPUT,
    )
    wheels = sorted(made.glob("envbuild-*.whl"))
    if ran.code or ran.fault or not wheels:
        lines = ran.err.decode("utf-8", "replace").strip().splitlines()
        raise HostError(
            f"envbuild's own wheel cannot be built: {ran.fault or (lines[-1] if lines else 'no reason is given')}",
            where=str(root),
            hint="check the network and the index in the settings",
        )
    return wheels[0]


def _packed(folder: Path) -> Path:
    """Return a wheel of this installation: the files of its RECORD, each with the hash that it has there.

    Raises:
        LockError: a file of it was changed.

    """
    installed = importlib.metadata.distribution("envbuild")
    info = f"envbuild-{installed.version}.dist-info"
    wheel = folder / f"envbuild-{installed.version}-py3-none-any.whl"
    record = []
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(installed.files or (), key=str):
            name = file.as_posix()
            ours = name.startswith(("envbuild/", f"{info}/"))
            if not ours or "__pycache__" in file.parts or (file.parent.name == info and file.name in _INSTALLERS):
                continue
            body = Path(str(file.locate())).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")
            if file.hash is None or file.hash.value != digest:
                raise LockError(f"{name} is not the file that was installed", hint="install envbuild again")
            record.append(f"{name},sha256={digest},{len(body)}")
            archive.writestr(zipfile.ZipInfo(name), body, zipfile.ZIP_DEFLATED)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "\n".join([*record, f"{info}/RECORD,,", ""]))
    return wheel
