"""What a stack's file states, as types."""

import re
from collections import Counter
from typing import Annotated, Literal, Self

from envbuild.matrix.model import AxisName, Source
from envbuild.util.model import AfterValidator, Field, Model, model_validator
from envbuild.util.names import GIT_HTTPS, shown

_NAME = r"^[a-z0-9][a-z0-9-]*$"
_COMMIT = r"^[0-9a-f]{40}$"
_REF = r"^[A-Za-z0-9_][A-Za-z0-9_./+-]*$"
_LONGEST = 1000
"""Characters of a requirement or a version at most."""
_MODULE = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
# What an image has there itself would be mixed with the repository, or replaced by it.
_TAKEN = ("/opt/venv", "/opt/envbuild", "/opt/toolchain", "/opt/tools", "/opt/openmpi", "/usr/local/cuda")
_OF_THE_OS = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys")
# Folders of the OS that may hold another's.
_SHARED = ("home", "media", "mnt", "opt", "root", "srv", "tmp", "usr", "var")
Text = Annotated[str, Field(min_length=1)]
OsName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
"""A package as Debian names them (Policy 5.6.1)."""
Variables = dict[
    Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]
]
Constraint = Annotated[str, Field(pattern=r"\S"), AfterValidator(str.strip)]


def _check_requirement(value: str) -> str:
    if len(value) > _LONGEST:
        raise ValueError(f"{shown(value, 60)!r} is too long for a requirement")
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        Requirement(value)
    except InvalidRequirement as error:
        raise ValueError(f"{value!r} is not a requirement such as `numpy<2`: {error}") from None
    except RecursionError:  # of a marker with hundreds of parentheses
        raise ValueError(f"{shown(value, 60)!r} is nested too deeply for a requirement") from None
    return value


def _check_url(value: str) -> str:
    if not value.endswith(".git"):
        raise ValueError(f"{value!r} does not end in .git, by which a Dockerfile's ADD knows a repository from a page")
    return value


def _check_version(value: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        Version(value[:_LONGEST])
    except InvalidVersion:
        raise ValueError(f"{shown(value, 60)!r} is not a version such as 1.2.3") from None
    if len(value) > _LONGEST:
        raise ValueError(f"{shown(value, 60)!r} is too long for a version")
    return value


# A login in it would be written into locks and images: git has its own configuration for that.
Url = Annotated[str, Field(pattern=GIT_HTTPS), AfterValidator(_check_url)]


class Repository(Model):
    """The training repository, checked out into the image at `path`."""

    name: str = Field(pattern=_NAME)
    url: Url
    commit: str = Field(pattern=_COMMIT)
    ref: str | None = Field(default=None, pattern=_REF)
    """The tag or branch that the commit was read from."""
    subdirectory: str = Field(default="", pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.+/-]*)?$")
    """The part of the repository that goes into the image; patches see the whole."""
    path: str = Field(pattern=r"^(/[A-Za-z0-9_.-]+)+$")
    """Where training runs from, in the image."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        for key in ("subdirectory", "path"):
            if {".", ".."} & {*getattr(self, key).split("/")}:
                raise ValueError(f"{key} {getattr(self, key)!r} leads out of its folder")
        top, *below = self.path[1:].split("/")
        of_the_os = top in _OF_THE_OS or (top in _SHARED and not below) or (top == "usr" and len(below) == 1)
        if of_the_os or f"{self.path}/".startswith(tuple(f"{each}/" for each in _TAKEN)):
            raise ValueError(f"path {self.path!r} is a folder of the image; /workspace/{self.name} is free")
        return self


class Alternative(Model):
    """Another pin of the same stack: `--stack NAME@ALTERNATIVE`."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    why: Text
    source: Source
    commit: str | None = Field(default=None, pattern=_COMMIT)
    ref: str | None = Field(default=None, pattern=_REF)
    patches: tuple[str, ...] | None = None
    """The patches of this pin, where they differ."""
    axes: dict[AxisName, Constraint] = {}
    """Axes that this pin states otherwise."""

    @model_validator(mode="after")
    def _states(self) -> Self:
        if self.ref is not None and self.commit is None:
            raise ValueError(f"pin {self.name}: `ref` goes with the `commit` that was read from it")
        if "flavor" in self.axes:
            raise ValueError(f"pin {self.name}: the flavor is the stack's, not a pin's")
        if self.patches is not None and len(set(self.patches)) < len(self.patches):
            raise ValueError(f"pin {self.name} names a patch twice")
        return self


class Build(Model):
    """A distribution that is built from source: its index holds no wheel, or it comes from git.

    It is installed without what it asks for; `python` of the stack states that.
    """

    name: str = Field(pattern=_NAME)
    version: Annotated[str, AfterValidator(_check_version)] | None = None
    """The source distribution of this version on the package index."""
    url: Url | None = None
    commit: str | None = Field(default=None, pattern=_COMMIT)
    source: Source
    module: str = Field(pattern=_MODULE)
    """A module that must import once it is installed."""
    extensions: tuple[Annotated[str, Field(pattern=_MODULE)], ...] = ()
    """Extension modules that the wheel must hold."""
    tools: tuple[Annotated[str, AfterValidator(_check_requirement)], ...] = ()
    """Build requirements besides setuptools and wheel."""
    environment: Variables = {}
    nvcc: bool = False
    mpi: bool = False
    """Whether it is compiled against the cell's MPI."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        git = self.url is not None and self.commit is not None
        if git == (self.version is not None) or (self.url is None) != (self.commit is None):
            raise ValueError(f"build {self.name}: give either `version` or both `url` and `commit`")
        if "PATH" in self.environment:
            raise ValueError(f"build {self.name}: PATH is made by envbuild, so that the compilers are found")
        return self


class Step(Model):
    """A command that runs in the build once the Python environment is complete, in the repository's folder."""

    name: str = Field(pattern=_NAME)
    run: str | None = Field(default=None, min_length=1)
    check: str | None = Field(default=None, min_length=1)
    """A command in the finished image whose failure fails the build: what the step was for."""
    compiles: bool = False
    """Whether `run` needs the builder's compilers; the image then gets only the files of `keep`."""
    keep: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+*?\[\]/-]*$")], ...] = ()
    """With `compiles`: the files, relative to the repository (a shell's globs), that go into the image."""

    @model_validator(mode="after")
    def _shape(self) -> Self:
        if self.run is None and self.check is None:
            raise ValueError(f"step {self.name} does not run or check anything")
        if "envbuild_end" in f"{self.run}\n{self.check}".split():
            raise ValueError(f"step {self.name}: `envbuild_end` is the word that ends a script in the Dockerfile")
        if self.compiles and (self.run is None or not self.keep):
            raise ValueError(f"step {self.name} compiles, so it needs `run`, and `keep` for the files that it makes")
        if outside := [files for files in self.keep if re.search(r"(?:^|/)\.(?:\.(?:/|$)|[^/]*[*?\[])", files)]:
            raise ValueError(f"step {self.name}: `keep` names {outside[0]}, which leads out of the repository")
        if self.keep and not self.compiles:
            raise ValueError(f"step {self.name}: `keep` goes with `compiles = true`")
        return self


class Correction(Model):
    """A departure from what the stack's makers stated, and the rule that asks for it."""

    item: Text
    """What was stated: an axis, or something else, such as a launcher's flag."""
    stated: Text
    instead: Text
    rule: Text
    why: Text
    source: Source


class Launcher(Model):
    """How training starts."""

    name: Literal["torchrun", "mpirun", "mpiexec", "deepspeed", "srun", "torch.distributed.launch"]
    command: Text
    """The command line as users type it in a container; {hostfile}, {nproc} and {nodes} stand for theirs."""
    note: str | None = None

    @model_validator(mode="after")
    def _placeholders(self) -> Self:
        odd = set(re.findall(r"(?<!\$)\{(\w+)\}", self.command)) - {"hostfile", "nproc", "nodes"}
        if odd:
            raise ValueError(f"launcher {self.name}: {{{min(odd)}}} is none of {{hostfile}}, {{nproc}}, {{nodes}}")
        return self


class Use(Model):
    """Something that the stack's users do in the image, as a command."""

    name: str = Field(pattern=_NAME)
    run: Text
    gpu: bool = False
    note: str | None = None


class Stack(Model):
    """One training environment as people really run it."""

    name: str = Field(pattern=_NAME)
    """What `--stack` names."""
    title: Text
    """A line for lists."""
    about: Text
    """What it trains, in some sentences."""
    source: Source
    """Where its makers describe it."""
    repository: Repository
    also: tuple[Alternative, ...] = ()
    stated: dict[AxisName, Constraint]
    """What the makers stated of each axis, as a user would write it on the command line; `none` leaves an axis out."""
    corrections: tuple[Correction, ...] = ()
    flavor: Literal["runtime", "devel"] = "runtime"
    """`devel` keeps nvcc in the image."""
    system: tuple[OsName, ...] = ()
    """OS packages of the image."""
    python: tuple[Annotated[str, AfterValidator(_check_requirement)], ...] = ()
    """Requirements besides the cell's own components."""
    jupyter: bool = False
    """Whether the image has JupyterLab; its version is locked with the other packages."""
    builds: tuple[Build, ...] = ()
    tools: tuple[str, ...] = ()
    """Programs of dockerfiles/tools that the image gets in /usr/local/bin."""
    environment: Variables = {}
    """Environment of the image; `{site}` is the environment's site-packages."""
    patches: tuple[str, ...] = ()
    """Patches of its repository, by name."""
    steps: tuple[Step, ...] = ()
    launchers: tuple[Launcher, ...] = ()
    uses: tuple[Use, ...] = ()
    proof: tuple[Use, ...] = ()
    """How the image shows that it is right: commands run inside it once it is built, none of which may fail."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV"):
            if name in self.environment:
                raise ValueError(
                    f"environment: {name} is made by envbuild, so that the image's Python and MPI come first; set it in a launcher's command"
                )
        for names, what in (
            ([s.name for s in self.steps], "steps"),
            ([b.name for b in self.builds], "builds"),
            ([a.name for a in self.also], "pins"),
            ([u.name for u in self.uses], "uses"),
            ([u.name for u in self.proof], "proofs"),
            ([c.item for c in self.corrections], "corrections"),
            ([self.repository.name, *(b.name for b in self.builds)], "sources"),
            ([str(launcher.name) for launcher in self.launchers], "launchers"),
            (list(self.patches), "patches"),
        ):
            twice = sorted(name for name, count in Counter(names).items() if count > 1)
            if twice:
                raise ValueError(f"two {what} are {'of' if what == 'corrections' else 'called'} {twice[0]!r}")
        if "flavor" in self.stated:
            raise ValueError("stated.flavor: the flavor is a separate key, next to `stated`")
        for correction in self.corrections:
            stated = self.stated.get(correction.item)
            if stated is not None and stated != correction.stated:
                raise ValueError(
                    f"the correction of {correction.item} says that the makers stated {correction.stated!r}, "
                    f"and `stated` says {stated!r}"
                )
        return self

    @property
    def axes(self) -> dict[AxisName, str]:
        """The pins of the cell: what was stated, with the corrections, and the flavor, which some rules judge by."""
        corrected = {c.item: c.instead for c in self.corrections if c.item in self.stated}
        return {**self.stated, **corrected, "flavor": self.flavor}
