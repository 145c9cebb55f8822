"""What a cell is made of, by name: requirements, sources, images, OS packages. Pure; `make` puts a hash on each."""

from dataclasses import dataclass
from typing import Literal

from envbuild.lock.model import BaseImage
from envbuild.matrix.cell import Cell
from envbuild.matrix.load import Matrix
from envbuild.matrix.spec import version_key
from envbuild.plan.components import Component, components_of
from envbuild.stacks import Repository, Stack

Flavor = Literal["runtime", "devel"]
TeSource = Literal["pypi", "git"]

_APEX_URL = "https://github.com/NVIDIA/apex.git"
_TE_URL = "https://github.com/NVIDIA/TransformerEngine.git"
_FLASH_ATTENTION_URL = "https://github.com/Dao-AILab/flash-attention.git"

# Triton compiles its launchers on the first kernel: a C compiler, libc's and Python's headers.
_RUNTIME_PACKAGES = ("ca-certificates", "gcc", "libc6-dev")
_BUILDER_PACKAGES = ("ccache", "g++", "git", "make")

# setuptools 82 removed pkg_resources, which apex's and TE's setup.py still import.
_SETUPTOOLS = "setuptools<82"


@dataclass(frozen=True, kw_only=True)
class PythonGroup:
    """Requirements that are installed in one step; `index` is beside PyPI."""

    name: Literal["torch", "tools", "toolchain", "env"]
    requirements: tuple[str, ...]
    index: str | None = None


@dataclass(frozen=True, kw_only=True)
class TreeInput:
    """A source tree by commit."""

    name: str
    url: str
    commit: str
    submodules: bool = True


@dataclass(frozen=True, kw_only=True)
class SdistInput:
    """A source distribution on the package index."""

    name: str
    distribution: str
    version: str


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that a lock must pin."""

    cell: Cell
    flavor: Flavor
    te_source: TeSource
    stack: Stack | None
    components: tuple[Component, ...]
    images: tuple[BaseImage, ...]
    root_suite: str | None
    os_runtime: tuple[str, ...]
    os_builder: tuple[str, ...]
    python: tuple[PythonGroup, ...]
    trees: tuple[TreeInput, ...]
    sdists: tuple[SdistInput, ...]

    def group(self, name: str) -> PythonGroup | None:
        """Return the Python group `name`, or None."""
        return next((g for g in self.python if g.name == name), None)


def torch_requirement(matrix: Matrix, cell: Cell) -> tuple[str, str | None]:
    """Return torch's requirement and the index that holds it beside PyPI, if any."""
    release = matrix.release("torch", cell.versions["torch"])
    if release.facts.index == "pypi":
        # PyPI's files carry no local label: 2.11.0 is the cu130 build.
        parsed = version_key(release.version)
        return f"torch=={parsed.public if parsed else release.version}", None
    return f"torch=={release.version}", release.facts.index


def pypi_toolchain(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """Return the requirements that make a CUDA toolkit from PyPI's packages, or () when the base brings one."""
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
    te_source: TeSource = "pypi",
) -> Inputs:
    """Return what `cell` is made of.

    Args:
        matrix: the data that the cell was chosen from.
        cell: the cell.
        stack: a training repository that goes into the image.
        flavor: `devel` keeps the toolchain in the image.
        te_source: Transformer Engine from PyPI's core wheel and torch sdist, or from git.

    """
    v = cell.versions
    base = matrix.release("base", v["base"]).facts
    components = components_of(matrix, cell, te_source)
    torch, index = torch_requirement(matrix, cell)
    own_python = _own_python(matrix, cell)

    env: list[str] = []
    trees: list[TreeInput] = []
    sdists: list[SdistInput] = []
    for component in components:
        release = matrix.release(component.axis, v[component.axis])
        if component.axis == "te" and te_source == "pypi":
            pypi = release.facts.pypi or release.version
            core = release.facts.core[v["cuda"].split(".")[0]]
            env += [f"transformer-engine=={pypi}", f"{core}=={pypi}"]
            sdists.append(SdistInput(name="te", distribution="transformer-engine-torch", version=pypi))
        elif component.axis == "flash-attn":
            sdists.append(
                SdistInput(name="flash-attn", distribution="flash-attn", version=release.facts.pypi or release.version)
            )
        else:
            url = {"te": _TE_URL, "apex": _APEX_URL, "flash-attn-hopper": _FLASH_ATTENTION_URL}[component.axis]
            trees.append(TreeInput(name=component.axis, url=url, commit=_commit(matrix, cell, component.axis)))
    if stack is not None:
        trees += [_tree(stack.repository)]
        env += stack.python
    elif "megatron" in v:
        release = matrix.release("megatron", v["megatron"])
        env.append(f"megatron-core=={release.facts.pypi or release.version}")
    if "deepspeed" in v:
        env.append(f"deepspeed=={v['deepspeed']}")

    groups = [PythonGroup(name="torch", requirements=(torch, "numpy"), index=index)]
    tools = sorted({tool for c in components for tool in c.tools})
    if components:
        groups.append(PythonGroup(name="tools", requirements=(*tools, "ninja", _SETUPTOOLS)))
    toolchain = pypi_toolchain(matrix, cell)
    if toolchain and components:
        groups.append(PythonGroup(name="toolchain", requirements=toolchain))
    groups.append(PythonGroup(name="env", requirements=tuple(env)))

    images = []
    if base.builder is not None:
        images = [
            BaseImage(
                stage="base",
                reference=base.runtime or base.builder,
                digest=base.digests.get(base.runtime or base.builder),
            ),
            BaseImage(stage="devel", reference=base.builder, digest=base.digests.get(base.builder)),
        ]
    python_packages = (f"python{v['python']}", f"python{v['python']}-dev") if own_python else ()
    mpi = matrix.release("mpi", v["mpi"]).facts.package if "mpi" in v else None
    return Inputs(
        cell=cell,
        flavor=flavor,
        te_source=te_source,
        stack=stack,
        components=components,
        images=tuple(images),
        root_suite=matrix.release("os", v["os"]).facts.suite if base.kind == "root" else None,
        os_runtime=tuple(
            sorted({*_RUNTIME_PACKAGES, *python_packages, *(stack.system if stack else ()), *((mpi,) if mpi else ())})
        ),
        os_builder=tuple(sorted(_BUILDER_PACKAGES))
        if components or (stack and any(s.compiles for s in stack.steps))
        else (),
        python=tuple(groups),
        trees=tuple(trees),
        sdists=tuple(sdists),
    )


def _own_python(matrix: Matrix, cell: Cell) -> bool:
    """Return whether the OS brings the cell's Python itself."""
    own: str | None = matrix.release("os", cell.versions["os"]).facts.python
    return own == cell.versions["python"]


def _commit(matrix: Matrix, cell: Cell, axis: str) -> str:
    commit = cell.commits.get(axis) or matrix.release(axis, cell.versions[axis]).commit
    assert commit is not None, f"{axis} {cell.versions[axis]} is built from git and has no commit"  # noqa: S101
    return commit


def _tree(repository: Repository) -> TreeInput:
    return TreeInput(name=repository.name, url=repository.url, commit=repository.commit, submodules=False)
