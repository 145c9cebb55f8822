"""A lock: a cell with every input by hash, as `lock.json` and its `pylock.<name>.toml` files state it.

People send each other locks, and a foreign image carries one. So every value is checked here, when it is loaded: nothing
of it can name a file outside a folder, an option of a program, or a line of a script.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal, Self

from envbuild.components import AXIS_OF_DISTRIBUTION
from envbuild.matrix.cell import DEBIAN_ARCH, Cell
from envbuild.util.model import AfterValidator, Field, Model, model_validator
from envbuild.util.names import (
    ArchivePath,
    Commit,
    Digest,
    FileName,
    FileUrl,
    ImageReference,
    Line,
    OsPackageName,
    OsVersion,
    SafeName,
    Sha256,
    SourceUrl,
    StackName,
    TreePath,
    Version,
)

LOCK_VERSION: Literal[1] = 1
COMPAT = "cuda-compat"
"""The file of a lock whose image carries NVIDIA's package for older drivers, whatever its base."""
# 2100-01-01: a later date is no SOURCE_DATE_EPOCH.
_LAST_EPOCH = 4_102_444_800
_MANY = 10_000


def _check_requirement(value: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        parsed = Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"{value[:80]!r} is not a requirement such as numpy<2: {error}") from None
    if parsed.url is not None:
        raise ValueError(f"{value[:80]!r} names an address; a lock takes packages from an index")
    return value


AxisKey = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,63}$")]
PackageName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,126}[a-z0-9])?$")]
"""A distribution, its name normalised (PEP 503)."""
RequirementLine = Annotated[Line, AfterValidator(_check_requirement)]
Epoch = Annotated[int, Field(ge=0, le=_LAST_EPOCH, strict=True)]


class OsPackage(Model):
    """One OS package at a version, by the hash of its .deb."""

    name: OsPackageName
    version: OsVersion
    arch: Literal["amd64", "arm64", "all"] = "amd64"
    sha256: Sha256
    filename: ArchivePath
    """Path below the archive's root, e.g. pool/main/g/gcc-12/gcc-12_12.2.0-14_amd64.deb."""


class Submodule(Model):
    """A link of a source tree to a commit of another repository."""

    path: TreePath
    url: SourceUrl | Literal[""]
    """Empty for one that the build does not read and whose address is unknown."""
    commit: Commit
    tree: Commit | None = None
    """git tree id of its checkout; None while it is unknown."""
    used: bool = True
    """Whether the build reads it. One that it does not is a link that the tree's id covers, and is not fetched."""


class GitSource(Model):
    """A source tree: the commit says which, the tree id says what."""

    name: SafeName
    url: SourceUrl
    commit: Commit
    tree: Commit | None = None
    """git tree id of the checkout without submodules; None while it is unknown."""
    submodules: tuple[Submodule, ...] = Field(default=(), max_length=1000)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _once("submodule", (s.path for s in self.submodules))
        for submodule in self.submodules:
            if submodule.used and not submodule.url:
                raise ValueError(f"the submodule {submodule.path} is used by the build and has no address")
        return self


class FileSource(Model):
    """A file by URL and hash: an sdist, uv's own wheel, a Python build."""

    name: SafeName
    url: FileUrl
    sha256: Sha256 | None = None


class BaseImage(Model):
    """An image that a stage starts from."""

    stage: Literal["base", "devel"]
    reference: ImageReference
    digest: Digest | None = None


class Root(Model):
    """A Debian root that envbuild bootstraps itself, from exactly these packages."""

    suite: SafeName
    epoch: Epoch = 0
    """No file in the root is newer; the suite's own release date, so that locks of other days share the root."""
    packages: tuple[OsPackage, ...] = Field(default=(), max_length=_MANY)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _once("OS package", (f"{p.name}:{p.arch}" for p in self.packages))
        return self


class PythonPackage(Model):
    """One distribution of the environment, as a pylock names it."""

    name: PackageName
    version: Version
    hashes: tuple[Sha256, ...] = Field(min_length=1, max_length=1000)
    """sha256 of each file that may satisfy it on this platform."""


class PythonSet(Model):
    """One group of distributions that is installed in one step; the files are in `pylock.<name>.toml`."""

    name: Literal["torch", "env", "tools", "toolchain"]
    requirements: tuple[RequirementLine, ...] = Field(max_length=_MANY)
    packages: tuple[PythonPackage, ...] = Field(default=(), max_length=_MANY)
    index: FileUrl | None = None
    """An index besides PyPI that the set needs (PyTorch's own, for a variant)."""
    local_wheels: tuple[FileName, ...] = Field(default=(), max_length=_MANY)
    """Wheels that come from a find-links folder; the build takes them from the `wheels` context."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _once(f"package of the set {self.name}", (p.name for p in self.packages))
        return self


class OsSet(Model):
    """OS packages that one stage adds, exactly."""

    name: Literal["runtime", "builder"]
    wanted: tuple[OsPackageName, ...] = Field(max_length=_MANY)
    packages: tuple[OsPackage, ...] = Field(default=(), max_length=_MANY)
    renewed: tuple[OsPackage, ...] = Field(default=(), exclude_if=lambda renewed: not renewed, max_length=_MANY)
    """What a base image that others made may hold, and must then hold at these versions for `packages` to fit."""


def _once(what: str, names: Iterable[str]) -> None:
    """Raise ValueError when one of `names` comes twice."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"the lock names the {what} {twice[0]!r} twice")


def _fits(package: PythonPackage, release: str) -> bool:
    """Return whether the package is of the release: a variant's index adds a local label, an upstream a post-release."""
    version, stated = package.version.partition("+")[0], release.partition("+")[0]
    return version == stated or version.startswith(f"{stated}.post") or not stated[0].isdigit()


def os_packages(root: Root | None, sets: Iterable[OsSet]) -> tuple[OsPackage, ...]:
    """Return every OS package that a lock pins, once."""
    every = [p for s in sets for p in (*s.packages, *s.renewed)] + list(root.packages if root else ())
    return tuple(dict.fromkeys(every))


Kind = Literal["image", "os", "python", "sdist", "file", "tree"]


class Missing(Model):
    """An input whose hash could not be fetched yet, and the host that holds it."""

    what: Line
    host: Line
    why: Line = ""
    component: Line = ""
    """The component whose source tree it is, when it is one."""
    kind: Kind | None = Field(default=None, exclude_if=lambda kind: kind is None)
    """What it is; None in a lock of an earlier release."""
    stages: tuple[SafeName, ...] = Field(default=(), exclude_if=lambda stages: not stages)
    """The stages of the Dockerfile that take it from outside; where all of them are replaced, nothing is missing."""


# The axes that every cell has: a plan reads them without asking.
_ALWAYS = ("abi", "base", "cuda", "glibc", "os", "python", "torch")


class Lock(Model):
    """Everything that an image is made of. Two images of one lock are equal, byte for byte."""

    version: Literal[1] = LOCK_VERSION
    """Version of this format."""
    cell: dict[AxisKey, Version] = Field(max_length=64)
    """The version of each axis."""
    commits: dict[AxisKey, Commit] = Field(default={}, max_length=64)
    """The commit of each axis whose version is one."""
    matrix: Digest
    """Digest of the matrix that the cell was chosen from."""
    flavor: Literal["runtime", "devel"] = "runtime"
    """`devel` keeps nvcc in the image."""
    stack: StackName | None = None
    """The stack's name, `NAME@PIN` for another pin of it."""
    stack_digest: Sha256 | None = None
    """Hash over what the stack puts into the image: its patches, steps and environment are in no other field."""
    te_source: Literal["pypi", "git"] = "pypi"
    """Where the source of Transformer Engine comes from."""
    components: tuple[SafeName, ...] = Field(default=(), max_length=1000)
    """What the build compiles from source, in order: te, apex, flash-attn, flash-attn-hopper."""
    epoch: Epoch
    """SOURCE_DATE_EPOCH, seconds since 1970-01-01 UTC."""
    uv: FileSource
    """The wheel of the uv that installs."""
    images: tuple[BaseImage, ...] = Field(default=(), max_length=2)
    root: Root | None = None
    os: tuple[OsSet, ...] = Field(default=(), max_length=2)
    python: tuple[PythonSet, ...] = Field(default=(), max_length=4)
    sources: tuple[GitSource, ...] = Field(default=(), max_length=1000)
    files: tuple[FileSource, ...] = Field(default=(), max_length=1000)
    missing: tuple[Missing, ...] = Field(default=(), max_length=_MANY)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _once("image", (i.stage for i in self.images))
        _once("set of OS packages", (s.name for s in self.os))
        _once("set of Python packages", (s.name for s in self.python))
        _once("source", [*(s.name for s in self.sources), *(f.name for f in self.files)])
        _once("component", self.components)
        if absent := [axis for axis in _ALWAYS if axis not in self.cell]:
            raise ValueError(f"the cell has no {absent[0]}")
        if (self.root is None) == (not self.images):
            raise ValueError("a lock has either a root or base images")
        if (self.stack is None) != (self.stack_digest is None):
            raise ValueError("`stack` and `stack_digest` go together")
        self._check_fit()
        return self

    def _check_fit(self) -> None:
        """Raise ValueError where the packages or sources are not those of the cell."""
        arch = self.as_cell.arch
        if arch not in DEBIAN_ARCH:
            raise ValueError(f"the cell has the architecture {arch}, which no envbuild builds for")
        for held in os_packages(self.root, self.os):
            if held.arch not in {"all", DEBIAN_ARCH[arch]}:
                raise ValueError(f"the cell is for {arch}, the lock pins {held.name} of {held.arch}")
        for python_set in self.python:
            for package in python_set.packages:
                axis = AXIS_OF_DISTRIBUTION.get(package.name)
                if axis in self.cell and not _fits(package, self.cell[axis]):
                    raise ValueError(
                        f"the cell has {axis} {self.cell[axis]}, the set {python_set.name} pins {package.name} {package.version}"
                    )
        for axis, commit in self.commits.items():
            if axis not in self.cell:
                raise ValueError(f"`commits` names {axis}, which the cell does not have")
            source = self.source(axis)
            if isinstance(source, GitSource) and source.commit != commit:
                raise ValueError(f"`commits` has {axis} at {commit}, `sources` has it at {source.commit}")

    @property
    def as_cell(self) -> Cell:
        """The cell that this lock pins."""
        return Cell(versions=self.cell, commits=self.commits)

    @property
    def asked_sources(self) -> dict[str, str]:
        """Where the sources of components with a choice come from, by axis."""
        return {"te": self.te_source}

    @property
    def pins(self) -> dict[str, str]:
        """Version of every axis that a request is held to by this lock: the cell's, and the flavor stated with it."""
        return {**self.cell, "flavor": self.flavor}

    @property
    def complete(self) -> bool:
        """Whether every input is pinned by hash. It follows from the content; what `missing` states can only add to it."""
        return not self.missing and not self.unpinned

    @property
    def unpinned(self) -> tuple[Missing, ...]:
        """The inputs that have no hash in this lock, whatever `missing` says of them."""
        return tuple(self._unpinned())

    def _unpinned(self) -> Iterator[Missing]:
        bases = tuple(image.stage for image in self.images) or ("base",)

        def no_hash(kind: Kind, what: str, *stages: str) -> Missing:
            return Missing(what=what, host="unknown", why="the lock has no hash of it", kind=kind, stages=stages)

        for image in self.images:
            if image.digest is None:
                yield no_hash("image", f"digest of {image.reference} ({image.stage})", image.stage)
        if self.root is not None and not self.root.packages:
            yield no_hash("os", f"OS packages of the root {self.root.suite}", "base")
        for os_set in self.os:
            if os_set.wanted and not os_set.packages:
                yield no_hash("os", f"OS packages: {', '.join(os_set.wanted)}"[:1000], *bases)
        for python_set in self.python:
            if python_set.requirements and not python_set.packages:
                within = {"torch": ("torch",), "tools": ("builder",), "toolchain": ("builder",)}.get(
                    python_set.name, ()
                )
                yield no_hash(
                    "python", f"{python_set.name} packages: {', '.join(python_set.requirements)}"[:1000], *within
                )
        for file in (self.uv, *self.files):
            if file.sha256 is None:
                yield no_hash("file", f"hash of {file.url.rsplit('/', 1)[-1]}", f"src-{file.name}")
        for source in self.sources:
            if source.tree is None or any(s.used and s.tree is None for s in source.submodules):
                yield no_hash("tree", f"source tree of {source.name} at {source.commit}", f"src-{source.name}")

    @property
    def digest(self) -> str:
        """`sha256:…` over the lock's content."""
        return "sha256:" + hashlib.sha256(self.canonical().encode()).hexdigest()

    def canonical(self) -> str:
        """The lock as one line of JSON with sorted keys."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def still_missing(self, replaced: Collection[str] = ()) -> tuple[Missing, ...]:
        """Return what has no hash and is needed all the same where the stages `replaced` come from elsewhere."""
        made_on = {"runtime": "base", "builder": "devel"}
        given = {*replaced, *(made_on[stage] for stage in replaced if stage in made_on)}
        # A statement without stages is about all stages that others do not name.
        stated = {m.stages for m in self.missing}
        unstated = () if () in stated else tuple(m for m in self.unpinned if m.stages not in stated)
        return tuple(m for m in (*self.missing, *unstated) if not m.stages or not given.issuperset(m.stages))

    def python_set(self, name: str) -> PythonSet | None:
        """Return the set `name`, or None when this cell has none."""
        return next((s for s in self.python if s.name == name), None)

    def os_set(self, name: str) -> OsSet:
        """Return the OS packages that the stage `name` adds."""
        found = next((s for s in self.os if s.name == name), None)
        return found or OsSet.model_validate({"name": name, "wanted": ()})

    def source(self, name: str) -> GitSource | FileSource | None:
        """Return the source `name`, or None."""
        every: tuple[Any, ...] = (*self.sources, *self.files)
        return next((s for s in every if s.name == name), None)
