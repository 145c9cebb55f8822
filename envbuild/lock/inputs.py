"""What a cell is made of, by name: requirements, sources, images, OS packages. Pure; `make` puts a hash on each."""

from collections.abc import Collection
from typing import Literal

from envbuild.components import AXIS_OF_DISTRIBUTION, components_in
from envbuild.components.base import Sdist, Tree, Wheel
from envbuild.components.te import component as te
from envbuild.components.torch import WITH_TORCH
from envbuild.components.torch import component as torch
from envbuild.errors import DataError, UsageError
from envbuild.lock.model import BaseImage, FileSource
from envbuild.matrix.cell import X86_64, Cell
from envbuild.matrix.driver import Compat, carries_compat, compat_of
from envbuild.matrix.load import Matrix
from envbuild.matrix.packages import impostors
from envbuild.matrix.view import CellView
from envbuild.recipes.catalog import findings_catalog
from envbuild.stacks.model import Stack
from envbuild.stacks.parts import wheels_of
from envbuild.util.frozen import Frozen, replace

Flavor = Literal["runtime", "devel"]
TeSource = Literal["pypi", "git"]

# Triton compiles its launchers on the first kernel: a C compiler, libc's and Python's headers.
_RUNTIME_PACKAGES = ("ca-certificates", "gcc", "libc6-dev")
_BUILDER_PACKAGES = ("ccache", "g++", "git", "make")
# What torch's cpp_extension needs to compile kernels in a running image, besides nvcc.
_DEVEL_PACKAGES = ("g++", "make")

# setuptools 82 removed pkg_resources, which apex's and TE's setup.py still import.
SETUPTOOLS = "setuptools<82"
JUPYTERLAB = "jupyterlab"
"""What a stack's `jupyter = true` asks for, where its `python` does not say which version."""


class PythonGroup(Frozen):
    """Requirements that are installed in one step; `index` is used in addition to PyPI."""

    name: Literal["torch", "tools", "toolchain", "env"]
    requirements: tuple[str, ...]
    index: str | None = None


class Inputs(Frozen):
    """Everything that a lock must pin."""

    cell: Cell
    flavor: Flavor
    te_source: TeSource
    stack: Stack | None
    components: tuple[Wheel, ...]
    images: tuple[BaseImage, ...]
    root_suite: str | None
    os_runtime: tuple[str, ...]
    os_builder: tuple[str, ...]
    python: tuple[PythonGroup, ...]
    trees: tuple[Tree, ...]
    sdists: tuple[Sdist, ...]
    files: tuple[FileSource, ...] = ()
    """Files whose hash the data states."""
    provided: tuple[str, ...] = ()
    """Distributions that come with the base image: nothing that requires them may install another."""
    compat: Compat | None = None
    """NVIDIA's package for a driver that is older than the cell's CUDA needs; None where the image goes without it."""


def pypi_toolchain(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """Return the requirements that make a CUDA toolkit from PyPI's packages, or () when the base has one."""
    if cell.versions.get("toolchain", "base") == "base":
        return ()
    if "nvcc" not in cell.versions:  # CUDA 12: headers for g++-only builds, no compiler driver
        minor = cell.versions["cuda"]
        return tuple(
            f"{name}-cu12=={minor}.*"
            for name in ("nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc", "nvidia-cuda-cccl")
        )
    version = matrix.release("nvcc", cell.versions["nvcc"]).facts.pypi
    # `profiler` holds cuda_profiler_api.h, which apex includes after eleven minutes of compiling.
    return (f"cuda-toolkit[cccl,crt,cudart,nvcc,nvrtc,nvtx,nvvm,profiler]=={version}",)


def inputs_of(
    matrix: Matrix,
    cell: Cell,
    *,
    stack: Stack | None = None,
    flavor: Flavor = "runtime",
    te_source: TeSource | None = None,
    compat: bool | None = None,
) -> Inputs:
    """Return what `cell` is made of.

    Args:
        matrix: the data that the cell was chosen from.
        cell: the cell.
        stack: a training repository that goes into the image.
        flavor: `devel` keeps the toolchain in the image.
        te_source: Transformer Engine from PyPI's core wheel and torch sdist, or from git; by default from PyPI, and a
            release that PyPI does not have from git.
        compat: whether the image carries cuda-compat; by default where the cell's `driver` needs it.

    Raises:
        UsageError: PyPI does not have the release that is to come from there; a stack's or flavor's wish cannot be met.

    """
    if compat is None:
        compat = carries_compat(matrix, cell)
    cell = cell.of_image
    v = cell.versions
    base = matrix.release("base", v["base"]).facts
    mpi = matrix.release("mpi", v["mpi"]).facts if "mpi" in v else None
    view = CellView(
        matrix=matrix,
        cell=cell,
        sources={te.axis: te_source} if te_source else {},
        repository=stack is not None,
    )
    present = components_in(view)
    provided = tuple(component.axis for component in present if component.is_provided(view))
    used = tuple(component for component in present if component.axis not in provided)
    compiled = {c.axis: replace(wheel, version=v[c.axis]) for c in used if (wheel := c.wheel(view)) is not None}
    components = tuple(compiled.values())
    if stack is not None:
        _check_stack(matrix, stack)
        _check_in_cell(cell, stack, provided)
        components += wheels_of(stack, mpi.prefix if mpi else None)
    own_python = _own_python(matrix, cell)
    toolchain = pypi_toolchain(matrix, cell)
    if flavor == "devel" and toolchain:
        raise UsageError(
            "an image with a CUDA compiler needs a base that contains one",
            where="--flavor devel",
            hint='choose such a base: --base "nvidia-cuda-*"',
        )

    sources = {component.axis: component.sources(view) for component in used}
    env = [line for component in used for line in component.requirements(view)]
    trees = [tree for each in sources.values() for tree in each.trees]
    sdists = [sdist for each in sources.values() for sdist in each.sdists]
    # what is compiled by itself comes before Python, and what a wheel's build takes after it
    files = [
        [
            FileSource.trusted(name=file.name, url=file.url, sha256=file.sha256)
            for axis, each in sources.items()
            for file in each.files
            if (axis in compiled) == of_wheels
        ]
        for of_wheels in (False, True)
    ]
    if stack is not None:
        repository = stack.repository
        trees.append(Tree(name=repository.name, url=repository.url, commit=repository.commit, submodules=()))
        for build in stack.builds:
            if build.url and build.commit:
                trees.append(Tree(name=build.name, url=build.url, commit=build.commit))
            elif build.version:
                sdists.append(Sdist(name=build.name, distribution=build.name, version=build.version))
        env += [line for line in stack.python if _name(line) not in WITH_TORCH]
        if stack.jupyter and JUPYTERLAB not in map(_name, stack.python):
            env.append(JUPYTERLAB)
    if flavor == "devel":
        env.append("ninja")

    # torch's set comes first and the rest has to agree with it, so a stack's numpy is decided there.
    with_torch = tuple(line for line in (stack.python if stack else ()) if _name(line) in WITH_TORCH)
    if "numpy" not in {_name(line) for line in with_torch}:
        with_torch = ("numpy", *with_torch)
    if torch.axis in provided:
        groups = [PythonGroup(name="torch", requirements=())]
    else:
        requirement, index = torch.requirement(view)
        groups = [PythonGroup(name="torch", requirements=(requirement, *with_torch), index=index)]
    tools = sorted({tool for c in components for tool in c.tools})
    if components:
        groups.append(PythonGroup(name="tools", requirements=(*tools, "ninja", SETUPTOOLS)))
    if toolchain and components:
        groups.append(PythonGroup(name="toolchain", requirements=toolchain))
    groups.append(PythonGroup(name="env", requirements=tuple(env)))

    images = []
    if base.builder is not None:
        final = base.builder if flavor == "devel" else base.runtime or base.builder
        digests = base.digests if cell.arch == X86_64 else {}
        images = [
            BaseImage.trusted(stage="base", reference=final, digest=digests.get(final)),
            BaseImage.trusted(stage="devel", reference=base.builder, digest=digests.get(base.builder)),
        ]
    runtime = {*_RUNTIME_PACKAGES, *(stack.system if stack else ())}
    if own_python and base.kind != "ngc":
        runtime |= {f"python{v['python']}", f"python{v['python']}-dev"}
    if flavor == "devel":
        runtime |= set(_DEVEL_PACKAGES)
    if mpi and mpi.package:
        runtime |= {mpi.package, *mpi.also.get(v["os"], ())}
    compiled_mpi = mpi is not None and mpi.url is not None
    works = stack is not None and bool(stack.patches or any(s.compiles for s in stack.steps))
    return Inputs(
        cell=cell,
        flavor=flavor,
        te_source=te.source_of(view),
        stack=stack,
        components=components,
        images=tuple(images),
        root_suite=matrix.release("os", v["os"]).facts.suite if base.kind == "root" else None,
        os_runtime=tuple(sorted(runtime)),
        os_builder=tuple(sorted({*_BUILDER_PACKAGES, *(mpi.needs_packages if mpi else ())}))
        if components or works or compiled_mpi
        else (),
        python=tuple(groups),
        trees=tuple(trees),
        sdists=tuple(sdists),
        files=(
            *files[0],
            *(() if own_python or base.kind == "ngc" else (_managed_python(matrix, cell),)),
            *files[1],
        ),
        # an NGC image's torch is compiled for its numpy
        provided=("numpy", "torch") if torch.axis in provided else (),
        compat=compat_of(matrix, cell) if compat else None,
    )


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    return canonicalize_name(Requirement(requirement).name)


def _managed_python(matrix: Matrix, cell: Cell) -> FileSource:
    """Return uv's managed build of the cell's Python, for an OS that does not have that version itself."""
    facts = matrix.release("python", cell.versions["python"]).facts
    if cell.arch != X86_64:
        other = facts.aarch64
        assert other is not None, "test_arch holds the data to it"  # noqa: S101
        return FileSource.trusted(name="python", url=other.managed, sha256=other.sha256)
    assert facts.managed is not None, "rules python-source-* refuse the others"  # noqa: S101
    assert facts.sha256 is not None  # noqa: S101
    return FileSource.trusted(name="python", url=facts.managed, sha256=facts.sha256)


def _check_stack(matrix: Matrix, stack: Stack) -> None:
    """Raise DataError where the stack contradicts the matrix."""
    where, never = f"stack {stack.name}", impostors(matrix)
    for build in stack.builds:
        if build.name in matrix.axes:
            raise DataError(
                f"the build {build.name} is an axis of the matrix",
                where=where,
                hint=f"pin it under [stated]: {build.name}",
            )
        if build.version is not None and build.name in never:
            raise DataError(
                f"the build {build.name} would be PyPI's: {never[build.name].why}",
                where=where,
                hint=f"name the `url` and `commit` of {never[build.name].instead}",
            )
        if build.name in AXIS_OF_DISTRIBUTION or build.name in WITH_TORCH:
            raise DataError(
                f"the build {build.name} is decided with the cell",
                where=where,
                hint="pin the axis under [stated], or name the version under `python`",
            )
    for source in (stack.repository.name, *(build.name for build in stack.builds)):
        if source in matrix.axes or source in {"uv", "debs"} or source.startswith("flash-attn-hopper-"):
            raise DataError(
                f"{source!r} is the name of another source of the build", where=where, hint="give it another name"
            )
    for line in stack.python:
        name = _name(line)
        if name in never:
            raise DataError(
                f"the stack asks for PyPI's {name}: {never[name].why}",
                where=f"{where}: python",
                hint=f"pin it under [stated] where it is an axis, or build it under [[builds]], from {never[name].instead}",
            )
        if name in AXIS_OF_DISTRIBUTION:
            raise DataError(
                f"the requirement {line!r} is the axis {AXIS_OF_DISTRIBUTION[name]} of the matrix",
                where=f"{where}: python",
                hint=f"pin it under [stated]: {AXIS_OF_DISTRIBUTION[name]}",
            )
    rules = {rule.id for rule in matrix.rules} | set(findings_catalog())
    import difflib

    for correction in stack.corrections:
        if correction.rule not in rules:
            raise DataError(
                f"the correction of {correction.item} names the rule {correction.rule!r}, which does not exist",
                where=where,
                hint="`envbuild matrix list` and docs/reference/check.md list the rules",
            )
        axis = matrix.axes.get(correction.item)
        if axis is not None and axis.use != "derived" and correction.item not in stack.stated:
            raise DataError(
                f"a correction is of {correction.item}, of which [stated] says nothing, so it would change nothing",
                where=where,
                hint=f"state what the makers say of it: {correction.item} = {correction.stated!r}",
            )
        meant = difflib.get_close_matches(correction.item, matrix.axes, n=1, cutoff=0.8)
        if meant and correction.item not in matrix.axes:
            raise DataError(
                f"a correction is of {correction.item!r}, which is not an axis",
                where=where,
                hint=f"is {meant[0]} meant?",
            )


def _check_in_cell(cell: Cell, stack: Stack, provided: Collection[str]) -> None:
    """Raise DataError where the stack asks for what this cell does not have, or what is `provided` by its base."""
    where = f"stack {stack.name}"
    for build in stack.builds:
        if build.mpi and "mpi" not in cell.versions:
            raise DataError(
                f"the build {build.name} is compiled against the cell's MPI, and the cell has none",
                where=where,
                hint="state one under [stated]: mpi",
            )
    for line in stack.python:
        if torch.axis in provided and _name(line) in WITH_TORCH:
            raise DataError(
                f"the requirement {line!r} is decided by {cell.versions['base']}, whose torch is compiled for its own",
                where=f"{where}: python",
                hint="leave it out",
            )


def _own_python(matrix: Matrix, cell: Cell) -> bool:
    """Return whether the OS has the cell's Python itself."""
    own: str | None = matrix.release("os", cell.versions["os"]).facts.python
    return own == cell.versions["python"]
