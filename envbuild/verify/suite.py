"""The smoke suite of this installation: its hash, and the pytest that is mounted with it."""

import contextlib
import hashlib
import re
import sys
from collections.abc import Collection, Iterable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.errors import HostError
from envbuild.evidence.report import Level
from envbuild.paths import data_dir
from envbuild.util.frozen import Frozen
from envbuild.util.names import shown

if TYPE_CHECKING:
    from envbuild.settings import Settings

# What pytest needs goes behind the environment's own packages on sys.path, so that those are the ones tested.
_FRONT = ("pytest", "_pytest", "pluggy", "iniconfig", "py.py")
_LEVELS = tuple(level.value for level in Level)
_LEVEL = re.compile(rb'^LEVEL = "([a-z]+)"$', re.MULTILINE)
_COMPONENT = re.compile(rb'^COMPONENT = "([a-z0-9-]+)"$', re.MULTILINE)
_SINCE = re.compile(rb'^SINCE = "(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"$', re.MULTILINE)


class _File(Frozen):
    """One file of the suite."""

    name: str
    digest: bytes
    component: str | None
    """Whose component it tests, where it states one."""
    level: str | None
    """The level that it belongs to, where it states one."""
    since: datetime | None
    """When it came, in UTC, where it states that."""

    def counts(self, axes: Collection[str] | None, level: str | None, date: datetime | None) -> bool:
        """Whether it could change what a run to `level` of a cell with these axes checked; None is every level, axis or date."""
        if date is not None and self.since is not None and date < self.since:
            return False
        if self.level in _LEVELS and level in _LEVELS and _LEVELS.index(level) < _LEVELS.index(self.level):
            return False
        return axes is None or self.component is None or self.component in axes


def _files(folder: Path) -> tuple[_File, ...]:
    """Return the files of a suite that can change what it checks, by name."""
    names = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.suffix in {".py", ".txt"} and path.is_file()
    }
    found = []
    for name in sorted(names):
        body = names[name].read_bytes()
        component, level, since = (each.search(body) for each in (_COMPONENT, _LEVEL, _SINCE))
        found.append(
            _File(
                name=name,
                digest=hashlib.sha256(body).digest(),
                component=component[1].decode() if component else None,
                level=level[1].decode() if level else None,
                since=datetime.fromisoformat(since[1].decode()) if since else None,
            )
        )
    return tuple(found)


@cache
def _installed() -> tuple[_File, ...]:
    """Return the files of this installation's suite, read once."""
    return _files(data_dir("smoke_tests"))


def _hash(files: Iterable[_File], axes: Collection[str] | None, level: str | None, date: datetime | None) -> str:
    sha = hashlib.sha256()
    for file in files:
        if file.counts(axes, level, date):
            sha.update(file.name.encode() + b"\0" + file.digest)
    return "sha256:" + sha.hexdigest()


def suite_hash(
    folder: Path | None = None,
    *,
    axes: Collection[str] | None = None,
    level: str | None = None,
    date: datetime | None = None,
) -> str:
    """Return the hash over every file that can change what the suite checks.

    Args:
        folder: the suite; this installation's by default.
        axes: what the cell has. A file that says whose component it tests (`COMPONENT = "mamba-ssm"`) counts only where
            the cell has that, so that a new component leaves the proof of other cells valid. Every file by default.
        level: how far the run went. A file of one level (`LEVEL = "train"`) counts only for runs that reach it, so that a
            new level leaves the proof of shorter runs valid. Every file by default.
        date: when the run was. A file that came later
            (`SINCE = "2026-11-25T22:40:00Z"`) does not count, so that a new test leaves the proof of older runs valid:
            they claim nothing of it. Every file by default.

    """
    return _hash(_files(folder or data_dir("smoke_tests")), axes, level, date)


def suite_of(axes: Collection[str], level: str, date: datetime | None = None) -> str:
    """Return the hash of this installation's suite for a run of `date` to `level` of a cell with these axes."""
    return _hash(_installed(), axes, level, date)


def entry_of(level: str) -> str:
    """Return the name of the suite's file that runs the tests to `level`."""
    return "train.py" if level == Level.TRAIN else "run.py"


def pytest_pins(python: tuple[int, int]) -> Path:
    """Return the list of the pytest that is mounted for an interpreter of this version: a line each, by hash."""
    return data_dir("smoke_tests") / ("pytest-py310.txt" if python >= (3, 10) else "pytest-py38.txt")


def pinned_pytest(python: tuple[int, int], settings: "Settings") -> Path:
    """Return the folder of the pytest that is mounted for an interpreter of this version; fetched once, hash-checked.

    Raises:
        HostError: it is not in the cache and cannot be fetched.

    """
    # here: `resolve` asks this module for a hash, and needs no processes
    from envbuild.lock.python import uv_environment_here, uv_executable
    from envbuild.util.processes import bounded
    from envbuild.util.scratch import scratch

    pins = pytest_pins(python)
    # The interpreter's version decides only between markers and wheels, and all of these wheels are pure Python.
    folder = settings.cache_dir / "pytest" / hashlib.sha256(pins.read_bytes()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    links = [flag for link in settings.find_links for flag in ("--find-links", link)]
    with scratch("suite", folder.parent) as own:
        flat = own / "flat"
        command = [uv_executable(), "pip", "install", "--quiet", "--no-config", "--target", str(flat), "--no-deps"]
        command += ["--python", sys.executable, "--python-version", "3.10" if pins.name.endswith("310.txt") else "3.8"]
        command += ["--require-hashes", "--only-binary", ":all:", *links, "--requirement", str(pins)]
        env = uv_environment_here(settings)
        # folders alone first: a host without a network may have them all
        for alone in (["--offline"], []) if links else ([],):
            ran = bounded([*command, *alone], env=env, seconds=600.0, limit=1 << 20)
            if not ran.code and not ran.fault:
                break
        if ran.code or ran.fault:
            output = ran.err.decode("utf-8", "replace").strip().splitlines()
            why = f"uv {ran.fault}" if ran.fault else output[-1] if output else "uv gave no reason"
            raise HostError(
                f"the suite's pytest cannot be fetched: {shown(why)}",
                where=str(pins),
                hint="give `index_url` or `find_links` in the settings an index that this host reaches",
            )
        new = own / "new"
        for part in sorted(flat.iterdir()):
            if part.name == "bin" or part.suffix == ".dist-info":
                continue
            place = new / ("front" if part.name in _FRONT else "back")
            place.mkdir(parents=True, exist_ok=True)
            part.rename(place / part.name)
        with contextlib.suppress(OSError):  # another run may have been quicker
            new.rename(folder)
    return folder
