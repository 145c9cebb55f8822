"""What a tree asks for, compared with what an image was locked with, package by package."""

import contextlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.markers import UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from envbuild.components import AXIS_OF_DISTRIBUTION
from envbuild.lock.model import Lock
from envbuild.matrix.cell import X86_64
from envbuild.stacks.model import Stack
from envbuild.util.below import OutsideError, read_below
from envbuild.util.frozen import Frozen
from envbuild.util.names import shown

_LIMIT = 2**20
"""Bytes of one file of requirements."""
_LONGEST = 1000
_DEEPEST = 5
"""Files of requirements that name one another."""
_OF_THE_BUILD = ("tools", "toolchain")
"""Sets of packages that no image has."""
_FILES = ("requirements.txt", "*/requirements.txt", "*/*/requirements.txt")


class Difference(Frozen):
    """A requirement of the tree that the image does not meet."""

    where: str
    """The file in the tree and, of a file of lines, the line."""
    asked: str
    package: str
    version: str | None
    """What the image has; None where it does not have the package."""

    def text(self) -> str:
        """Return it as one sentence."""
        has = f"the image has {self.package} {self.version}" if self.version else f"the image has no {self.package}"
        return f"{self.where} asks for {shown(self.asked, 200)}, {has}"

    def as_json(self) -> dict[str, str | None]:
        """Return it as JSON values."""
        return {"where": self.where, "asked": self.asked, "package": self.package, "version": self.version}


def versions_of(lock: Lock, stack: Stack) -> dict[str, str]:
    """Return the version of each distribution that an image of `lock` has; empty where the lock does not state one."""
    found = {name: lock.cell[axis] for name, axis in AXIS_OF_DISTRIBUTION.items() if axis in lock.cell}
    # a release of apex is a tag or a commit, and its distribution has another version
    found |= {axis: "" for axis in lock.components if axis not in found}
    found |= {build.name: build.version or "" for build in stack.builds}
    for python_set in lock.python:
        if python_set.name not in _OF_THE_BUILD:
            found |= {package.name: package.version for package in python_set.packages}
    return found


def differences(tree: Path, lock: Lock, stack: Stack) -> tuple[Difference, ...]:
    """Return the requirements of the tree that the image does not meet, in the order of its files.

    They are read from `[project]` of pyproject.toml, the files that setuptools takes its dependencies from, and each
    requirements.txt in the tree's root and in its packages. Extras are left out: nobody knows which of them is wanted.
    """
    versions, environment = versions_of(lock, stack), _environment(lock)
    found: dict[tuple[str, str], Difference] = {}
    for where, asked in _asked(tree):
        name = canonicalize_name(asked.name)
        with contextlib.suppress(UndefinedEnvironmentName):
            if asked.marker is not None and not asked.marker.evaluate(environment):
                continue
        version = versions.get(name)
        if version is None or not _meets(asked, version):
            difference = Difference(where=where, asked=str(asked), package=name, version=version)
            found.setdefault((name, str(asked.specifier)), difference)
    return tuple(found.values())


def _meets(asked: Requirement, version: str) -> bool:
    try:
        return not version or asked.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # a commit, which no specifier is about


def _environment(lock: Lock) -> dict[str, str]:
    """Return the values of markers in the image."""
    python = lock.cell["python"]
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": lock.cell.get("arch", X86_64),
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "extra": "",
    }


def _asked(tree: Path) -> Iterator[tuple[str, Requirement]]:
    project = _project(tree)
    for text in _strings(project, "project", "dependencies"):
        yield from _parsed("pyproject.toml", text)
    files = _strings(project, "tool", "setuptools", "dynamic", "dependencies", "file")
    for pattern in _FILES:
        for path in sorted(tree.glob(pattern)):
            below = path.relative_to(tree)
            if path.parent == tree or (path.parent / "__init__.py").is_file():
                files.append(str(below))
    seen: set[str] = set()
    for name in dict.fromkeys(files):
        yield from _of_file(tree, name, seen, _DEEPEST)


def _project(tree: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_below(tree, "pyproject.toml", limit=_LIMIT).decode("utf-8", "replace"))
    except (OSError, OutsideError, tomllib.TOMLDecodeError, RecursionError):
        return {}


def _strings(data: Any, *keys: str) -> list[str]:
    for key in keys:
        data = data.get(key) if isinstance(data, Mapping) else None
    data = [data] if isinstance(data, str) else data
    return [each for each in data if isinstance(each, str)] if isinstance(data, list) else []


def _of_file(tree: Path, name: str, seen: set[str], depth: int) -> Iterator[tuple[str, Requirement]]:
    if name in seen or not depth:
        return
    seen.add(name)
    try:
        text = read_below(tree, name, limit=_LIMIT).decode("utf-8", "replace")
    except (OSError, OutsideError):
        return
    for number, line in enumerate(text.replace("\\\n", " \n").splitlines(), 1):
        words = line.split(" #")[0].split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] in {"-r", "--requirement"} and len(words) == 2:
            folder = name.rpartition("/")[0]
            yield from _of_file(tree, f"{folder}/{words[1]}".lstrip("/"), seen, depth - 1)
        elif not words[0].startswith("-"):
            yield from _parsed(f"{name}:{number}", " ".join(words).split(" --")[0])


def _parsed(where: str, text: str) -> Iterator[tuple[str, Requirement]]:
    with contextlib.suppress(InvalidRequirement, RecursionError):
        if len(text) < _LONGEST:
            yield where, Requirement(text)
