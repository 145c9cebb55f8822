"""A lock: a cell with every input by hash, as `lock.toml` and its `pylock.<name>.toml` files state it."""

import hashlib
import json
from collections.abc import Collection, Iterable
from typing import Any, Literal

from pydantic import Field

from envbuild.matrix.cell import Cell
from envbuild.matrix.model import Model

LOCK_VERSION = 1
Sha256 = str


class OsPackage(Model):
    """One OS package at a version, by the hash of its .deb."""

    name: str
    version: str
    arch: str = "amd64"
    sha256: Sha256 = Field(pattern=r"^[0-9a-f]{64}$")
    filename: str
    """Path below the archive's root, e.g. pool/main/g/gcc-12/gcc-12_12.2.0-14_amd64.deb."""


class Submodule(Model):
    path: str
    url: str
    commit: str
    tree: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """git tree id of its checkout; None while nobody has seen it."""
    used: bool = True
    """Whether the build reads it. One that it does not is a link that the tree's id covers, and is not fetched."""


class GitSource(Model):
    """A source tree: the commit says which, the tree id says what."""

    name: str
    url: str
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    tree: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """git tree id of the checkout without submodules; None while nobody has seen it."""
    submodules: tuple[Submodule, ...] = ()


class FileSource(Model):
    """A file by URL and hash: an sdist, uv's own wheel, a Python build."""

    name: str
    url: str
    sha256: Sha256 | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")


class BaseImage(Model):
    """An image that a stage starts from."""

    stage: Literal["base", "devel"]
    reference: str
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")


class Root(Model):
    """A Debian root that envbuild bootstraps itself, from exactly these packages."""

    suite: str
    epoch: int = 0
    """No file in the root is newer; the suite's own release date, so that locks of other days share the root."""
    packages: tuple[OsPackage, ...] = ()


class PythonPackage(Model):
    """One distribution of the environment, as a pylock names it."""

    name: str
    version: str
    hashes: tuple[Sha256, ...]
    """sha256 of each file that may satisfy it on this platform."""


class PythonSet(Model):
    """One group of distributions that is installed in one step; the files are in `pylock.<name>.toml`."""

    name: str
    requirements: tuple[str, ...]
    packages: tuple[PythonPackage, ...] = ()
    index: str | None = None
    """An index beside PyPI that the set needs (PyTorch's own, for a variant)."""
    local_wheels: tuple[str, ...] = ()
    """Wheels that come from a find-links folder; the build takes them from the `wheels` context."""


class OsSet(Model):
    """OS packages that one stage adds, exactly."""

    name: Literal["runtime", "builder"]
    wanted: tuple[str, ...]
    packages: tuple[OsPackage, ...] = ()
    renewed: tuple[OsPackage, ...] = Field(default=(), exclude_if=lambda renewed: not renewed)
    """What a base image that others made may hold, and must then hold at these versions for `packages` to fit."""


def os_packages(root: Root | None, sets: Iterable[OsSet]) -> tuple[OsPackage, ...]:
    """Return every OS package that a lock pins, once."""
    every = [p for s in sets for p in (*s.packages, *s.renewed)] + list(root.packages if root else ())
    return tuple(dict.fromkeys(every))


class Missing(Model):
    """An input whose hash nobody could fetch yet, and the host that holds it."""

    what: str
    host: str
    why: str = ""
    component: str = ""
    """The component whose source tree it is, when it is one."""
    stages: tuple[str, ...] = Field(default=(), exclude_if=lambda stages: not stages)
    """The stages of the Dockerfile that take it from outside; where all of them are replaced, nothing lacks."""


class Lock(Model):
    """Everything that an image is made of. Two images of one lock are equal, byte for byte."""

    version: int = LOCK_VERSION
    cell: dict[str, str]
    commits: dict[str, str] = {}
    matrix: str
    flavor: Literal["runtime", "devel"] = "runtime"
    stack: str | None = None
    stack_digest: Sha256 | None = None
    """Hash over what the stack puts into the image: its patches, steps and environment are in no other field."""
    te_source: Literal["pypi", "git"] = "pypi"
    components: tuple[str, ...] = ()
    """What the build compiles from source, in order: te, apex, flash-attn, flash-attn-hopper."""
    epoch: int
    """SOURCE_DATE_EPOCH, seconds since 1970-01-01 UTC."""
    uv: FileSource
    images: tuple[BaseImage, ...] = ()
    root: Root | None = None
    os: tuple[OsSet, ...] = ()
    python: tuple[PythonSet, ...] = ()
    sources: tuple[GitSource, ...] = ()
    files: tuple[FileSource, ...] = ()
    missing: tuple[Missing, ...] = ()

    @property
    def as_cell(self) -> Cell:
        """The cell that this lock pins."""
        return Cell(versions=self.cell, commits=self.commits)

    @property
    def pins(self) -> dict[str, str]:
        """Version of every axis that a request is held to by this lock: the cell's, and the flavor stated beside it."""
        return {**self.cell, "flavor": self.flavor}

    @property
    def complete(self) -> bool:
        """Whether every input is pinned by hash."""
        return not self.missing

    @property
    def digest(self) -> str:
        """`sha256:…` over the lock's content."""
        return "sha256:" + hashlib.sha256(self.canonical().encode()).hexdigest()

    def canonical(self) -> str:
        """The lock as one line of JSON with sorted keys."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def lacking(self, replaced: Collection[str] = ()) -> tuple[Missing, ...]:
        """Return what has no hash and is needed all the same where the stages `replaced` come from elsewhere."""
        made_on = {"runtime": "base", "builder": "devel"}
        given = {*replaced, *(made_on[stage] for stage in replaced if stage in made_on)}
        return tuple(m for m in self.missing if not m.stages or not given.issuperset(m.stages))

    def python_set(self, name: str) -> PythonSet | None:
        """Return the set `name`, or None when this cell has none."""
        return next((s for s in self.python if s.name == name), None)

    def os_set(self, name: str) -> OsSet:
        """Return the OS packages that the stage `name` adds."""
        return next((s for s in self.os if s.name == name), OsSet.model_validate({"name": name, "wanted": ()}))

    def source(self, name: str) -> GitSource | FileSource | None:
        """Return the source `name`, or None."""
        every: tuple[Any, ...] = (*self.sources, *self.files)
        return next((s for s in every if s.name == name), None)
