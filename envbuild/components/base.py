"""What a component is: one part of an environment that comes from one upstream, on one axis of the matrix.

A component says where its source is, what it needs, how its wheel is compiled and what the image then holds. It sees the
cell through a `View` and asks nothing else: no network, no clock, no process.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from envbuild.errors import UsageError
from envbuild.util.frozen import Frozen
from envbuild.util.model import Model, NoFacts

Environment = Mapping[str, str]
_NONE: Mapping[str, str] = MappingProxyType({})
_NONE_INSTEAD: Mapping[str, tuple[str, str]] = MappingProxyType({})

BUILD_WHEEL = "build-wheel"
FOR_ONE_SM = "build-for-sm"
"""The recipe of wheels that name one of `only_sms`; a plan without such a wheel does not hold it."""
FOR_SMS = "build-for-sms"
"""The same, of those that name several: code for each, and PTX for the newest."""
TEMPLATES = "build-templates"
"""The recipe through which the others run for wheels with `templates`."""
DOWNLOADED = "/tmp/envbuild-downloads"  # noqa: S108
"""Where a build finds what it would have downloaded; recipe/build-wheel unpacks it there."""


class ReleaseView(Protocol):
    """What a component reads of a release."""

    @property
    def version(self) -> str:
        """The release, as the matrix spells it."""

    @property
    def commit(self) -> str | None:
        """The upstream's commit, where the matrix states one."""

    @property
    def facts(self) -> Any:
        """An instance of the component's `facts` model."""


class View(Protocol):
    """What a component sees: the cell, and what the matrix states of its releases."""

    @property
    def versions(self) -> Mapping[str, str]:
        """The cell's release on each axis."""

    @property
    def commits(self) -> Mapping[str, str]:
        """Full commits of the axes whose releases are commits."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Where a component's source was asked to come from (`pypi`, `git`), by axis."""

    @property
    def repository(self) -> bool:
        """Whether a stack puts a whole training repository into the image."""

    def release(self, axis: str) -> ReleaseView:
        """Return the cell's release on `axis`."""


class Tree(Frozen):
    """A source tree by commit.

    Attributes:
        name: its name in stages (`src-apex`).
        url: the git repository.
        commit: 40 hex digits.
        submodules: paths of the submodules that the build reads; every one when None.

    """

    name: str
    url: str
    commit: str
    submodules: tuple[str, ...] | None = None


class Sdist(Frozen):
    """A source distribution on the package index."""

    name: str
    distribution: str
    version: str


class Download(Frozen):
    """A file by address and hash, as the matrix states it. `sha256` is None where its publisher states none."""

    name: str
    url: str
    sha256: str | None


class Sources(Frozen):
    """Where a component comes from."""

    trees: tuple[Tree, ...] = ()
    sdists: tuple[Sdist, ...] = ()
    files: tuple[Download, ...] = ()


class Wheel(Frozen):
    """How one wheel is compiled.

    Attributes:
        axis: the matrix axis that it stands for, and its name in stages (`build-apex`).
        distribution: the distribution that it installs.
        module: a module that must import once it is installed.
        extensions: extension modules that it must contain; a build without one of them fails.
        folder: where setup.py lies in the source.
        nvcc: whether it needs a CUDA compiler, and not only g++ and headers.
        job_gib: peak memory of one compile job, GiB; measured (docs/design/building.md).
        environment: build environment.
        config_settings: PEP 517 settings for the backend.
        tools: build requirements besides torch.
        version: the release, or the commit's first digits.
        alone: installed without its dependencies, which the stack that contains it states itself.
        mpi: whether it is compiled against the cell's MPI.
        only_sms: the SM numbers to compile for, where setup.py has a fixed list of architectures or reads no variable
            that would name them.
        templates: whether a .cu file of it may hold nothing but templates. nvcc then names the file's internals after its
            own process, unless the recipe gives it another name to take.
        downloads: what its setup.py would fetch during the build: the source's name, and the folder below DOWNLOADED
            where the build finds it unpacked.

    """

    axis: str
    distribution: str
    module: str
    extensions: tuple[str, ...] = ()
    folder: str = "."
    nvcc: bool = True
    job_gib: float
    environment: Environment = _NONE
    config_settings: tuple[str, ...] = ()
    tools: tuple[str, ...] = ("packaging", "wheel")
    version: str = ""
    alone: bool = False
    mpi: bool = False
    only_sms: tuple[str, ...] = ()
    templates: bool = False
    downloads: Mapping[str, str] = _NONE

    @property
    def recipe(self) -> str:
        """The script that compiles it for its GPUs."""
        return (BUILD_WHEEL, FOR_ONE_SM, FOR_SMS)[min(len(self.only_sms), 2)]

    @property
    def scripts(self) -> tuple[str, ...]:
        """The scripts that compile it, each of which runs the next one; the last one runs build-wheel, where it is another."""
        return (TEMPLATES, self.recipe) if self.templates else (self.recipe,)

    @property
    def recipes(self) -> tuple[str, ...]:
        """The scripts that it needs besides build-wheel."""
        return tuple(name for name in self.scripts if name != BUILD_WHEEL)


class HostSources(Frozen):
    """The C++ of a component that an ordinary compiler reads, for trials without a build.

    Attributes:
        folders: where it lies below the source; every C++ file there counts.
        includes: folders that its build adds to the search for headers.
        flags_in: the files in which its build states compiler flags.
        cxx_flags: the function there that gives the flags of C++ files, where .cu files get another standard.
        defines: macros that its build defines with every release of torch that the matrix has, as `-DNAME`.
        instead: a file -> the releases of torch with which its build takes it, and the file that it takes it for. Of the
            two, a build compiles one.

    """

    folders: tuple[str, ...]
    includes: tuple[str, ...]
    flags_in: tuple[str, ...] = ("setup.py",)
    cxx_flags: str | None = None
    defines: tuple[str, ...] = ()
    instead: Mapping[str, tuple[str, str]] = _NONE_INSTEAD


class Upstream(Frozen):
    """Where new releases appear, for `matrix update` and `matrix check --online`.

    Attributes:
        distribution: the distribution on PyPI whose releases are this axis'.
        repository: the git repository whose tags name commits.
        chosen: whether a release older than the oldest listed one, or between two, is left out.
        facts: the facts of a new release that are its version.
        to_fill_in: what a person adds to each new release.

    """

    distribution: str | None = None
    repository: str | None = None
    chosen: bool = True
    facts: tuple[str, ...] = ()
    to_fill_in: tuple[str, ...] = ()


class Component:
    """One component. A subclass states what differs; `envbuild.components` finds the one instance in each module."""

    axis: ClassVar[str]
    """Its axis in the matrix, and its flag."""
    place: ClassVar[int]
    """Its place wherever components come in order: the cell's id, the flags, the build (cheap compiles first, so that a
    broken toolchain shows early), the comparison of evidence."""
    label: ClassVar[str] = ""
    """What stands before its version in a cell's id; no part of the id when empty."""
    facts: ClassVar[type[Model]] = NoFacts
    """What a release of it states."""
    distributions: ClassVar[tuple[str, ...]] = ()
    """The distributions on PyPI whose version the cell decides with this axis."""
    in_ngc: ClassVar[bool] = False
    """Whether NVIDIA's PyTorch images hold it, so that it is neither installed nor compiled there."""
    ran: ClassVar[bool] = True
    """Whether it is software that evidence of a run speaks of."""
    chooses: ClassVar[str] = ""
    """The component of whose compile it is a choice, where it is no software itself: a cell without it is complete."""
    tested_by_release: ClassVar[bool] = False
    """Whether each release states the very versions that it was tested with, so that no patch of these is as good."""
    needs_commit: ClassVar[bool] = False
    """Whether every release but those in an image has a commit, since it comes from git alone."""
    runtime: ClassVar[tuple[str, ...]] = ()
    """What its compiled wheel imports and does not ask for: requirements of the environment."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Beginnings of distributions' names whose version follows from its own, one per CUDA version."""
    upstream: ClassVar[Upstream] = Upstream()
    extensions: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """By the name of a distribution: extension modules without which it is not what it is used for, in every release."""
    switches: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the environment variables that its setup.py reads, by which its compile is another one."""
    sms: ClassVar[tuple[str, ...]] = ()
    """The SM numbers of the GPUs that it is for, where the other GPUs of a mixed fleet do without it; empty where each GPU of
    a cell must be served."""
    host_sources: ClassVar[HostSources | None] = None
    """The C++ of its source distribution."""
    unimportable: ClassVar[tuple[str, ...]] = ()
    """Modules and packages of it that import with no torch of the matrix, those of NVIDIA's images aside, and that no other
    module of it imports. A trial of names sees to the latter, and leaves them out."""

    def module(self, view: View) -> str | None:
        """Return a module that imports where the component is installed."""
        del view
        return None

    def is_provided(self, view: View) -> bool:
        """Return whether the base image holds it already."""
        return self.in_ngc and view.release("base").facts.kind == "ngc"

    def sources(self, view: View) -> Sources:
        """Return what the build takes from outside for it, Python packages aside."""
        del view
        return Sources()

    def requirements(self, view: View) -> tuple[str, ...]:
        """Return the distributions that come from an index for it, as requirements."""
        del view
        return ()

    def wheel(self, view: View) -> Wheel | None:
        """Return how its wheel is compiled, or None when nothing is compiled for it."""
        del view
        return None

    def environment(self, view: View, *, site: str, devel: bool) -> Environment:
        """Return the variables that it needs in the image.

        Args:
            view: the cell.
            site: the image's site-packages.
            devel: whether the image keeps a CUDA toolkit.

        """
        del view, site, devel
        return _NONE

    def placed(self, view: View) -> Mapping[str, str]:
        """Return the modules that it installs elsewhere than where they are imported: name -> file below site-packages."""
        del view
        return _NONE

    def expected(self, view: View) -> Mapping[str, Any] | None:
        """Return what audit and smoke tests hold an image against beyond its wheel, or None when there is no more."""
        del view
        return None


def sms_of(view: View) -> tuple[str, ...]:
    """Return the SM numbers of the cell's GPUs, ascending, e.g. `90`, or `80` and `90` of a mixed fleet.

    Raises:
        UsageError: the cell has no GPU.

    """
    if "gpu" not in view.versions:
        raise UsageError(
            "CUDA code is compiled for one GPU architecture, and this cell has none",
            where="--gpu none",
            hint="name the GPU, such as --gpu h100, or leave the flag out",
        )
    sms: tuple[str, ...] = view.release("gpu").facts.sms
    return sms


def dotted(sms: Sequence[str]) -> str:
    """Return SM numbers as a TORCH_CUDA_ARCH_LIST: 9.0, or 8.0;9.0;10.0+PTX of several, the newest for later GPUs, too."""
    names = ";".join(f"{sm[:-1]}.{sm[-1]}" for sm in sms)
    return f"{names}+PTX" if len(sms) > 1 else names


def commit_of(view: View, axis: str) -> str:
    """Return the commit of what is built from git.

    Raises:
        UsageError: the matrix knows the release from its package index alone.

    """
    commit = view.commits.get(axis) or view.release(axis).commit
    if commit is None:
        raise UsageError(
            f"the matrix has no commit of {axis} {view.versions[axis]}, so it cannot be built from git",
            where=f"--source {axis}=git",
            hint=f"leave --source out, which takes the package index' files, or choose a release that `envbuild matrix {axis}` lists with a commit",
        )
    return commit
