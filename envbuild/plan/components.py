"""The components that a build compiles itself: how each is built, what it needs, what one compile job costs.

Facts of each recipe come from the upstream at the pinned version; memory per job was measured (docs/building.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from envbuild.errors import UsageError
from envbuild.matrix.cell import Cell
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Archive
from envbuild.stacks import Stack

Environment = Mapping[str, str]
DOWNLOADED = "/tmp/envbuild-downloads"  # noqa: S108
"""Where a build finds what it would have downloaded; recipe/build-wheel unpacks it there."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One compiled component.

    Attributes:
        axis: the matrix axis that it stands for, and its name in stages (`build-apex`).
        distribution: the distribution that its wheel installs.
        module: a module that must import once it is installed.
        extensions: extension modules that the wheel must hold; a build that lacks one fails.
        folder: where its setup.py lies in the source.
        nvcc: whether it needs a CUDA compiler, and not only g++ and headers.
        job_gib: peak memory of one compile job, GiB.
        environment: build environment, from the SM numbers and the cell.
        config_settings: PEP 517 settings for the backend.
        tools: build requirements beside torch.
        version: the release, or the commit's first digits.
        alone: installed without what it asks for, which the stack that brings it states itself.
        mpi: whether it is compiled against the cell's MPI.
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
    environment: Environment = field(default_factory=lambda: MappingProxyType({}))
    config_settings: tuple[str, ...] = ()
    tools: tuple[str, ...] = ("packaging", "wheel")
    version: str = ""
    alone: bool = False
    mpi: bool = False
    downloads: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def sm_of(matrix: Matrix, cell: Cell) -> str:
    """Return the SM number that the cell's GPU needs, e.g. `90`.

    Raises:
        UsageError: the cell has no GPU.

    """
    if "gpu" not in cell.versions:
        raise UsageError(
            "what is compiled for CUDA is compiled for one GPU architecture, and this cell has none",
            where="--gpu none",
            hint="name the GPU, such as --gpu h100, or leave the flag out",
        )
    sm: str = matrix.release("gpu", cell.versions["gpu"]).facts.sm
    return sm


def _dotted(sm: str) -> str:
    return f"{sm[:-1]}.{sm[-1]}"


def _te(matrix: Matrix, cell: Cell, source: Literal["pypi", "git"]) -> Component:
    sm = sm_of(matrix, cell)
    env = {"NVTE_FRAMEWORK": "pytorch", "NVTE_PYTORCH_FORCE_BUILD": "TRUE"}
    if source == "pypi":
        # The sdist of the torch extension holds C++ alone; the kernels are in the core wheel.
        return Component(
            axis="te",
            distribution="transformer-engine-torch",
            module="transformer_engine.pytorch",
            extensions=("transformer_engine_torch",),
            nvcc=False,
            job_gib=2.4,
            environment=env,
        )
    return Component(
        axis="te",
        distribution="transformer-engine",
        module="transformer_engine.pytorch",
        extensions=("transformer_engine_torch",),
        job_gib=4.1,
        # Without the third, a build below somebody's own git clone names that clone's commit in the wheel's version.
        environment={**env, "NVTE_CUDA_ARCHS": sm, "NVTE_RELEASE_BUILD": "0", "NVTE_NO_LOCAL_VERSION": "1"},
        tools=("packaging", "wheel", "cmake", "pybind11"),
    )


# --cpp_ext and --cuda_ext of apex at every pinned commit; a build that silently produced none of them is the known trap.
_APEX_EXTENSIONS = (
    "apex_C",
    "amp_C",
    "syncbn",
    "fused_layer_norm_cuda",
    "mlp_cuda",
    "fused_dense_cuda",
    "scaled_masked_softmax_cuda",
    "scaled_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
    "generic_scaled_masked_softmax_cuda",
    "fused_weight_gradient_mlp_cuda",
)


def _apex(matrix: Matrix, cell: Cell, _: str) -> Component:
    release = matrix.release("apex", cell.versions["apex"])
    archs = {"TORCH_CUDA_ARCH_LIST": _dotted(sm_of(matrix, cell))}
    rope = ("fused_rotary_positional_embedding",) if release.facts.fused_rope else ()
    form = release.facts.build
    if form == "environment":
        return Component(
            axis="apex",
            distribution="apex",
            module="apex",
            extensions=_APEX_EXTENSIONS + rope,
            job_gib=3.0,
            environment={**archs, "APEX_CPP_EXT": "1", "APEX_CUDA_EXT": "1"},
        )
    return Component(
        axis="apex",
        distribution="apex",
        module="apex",
        extensions=_APEX_EXTENSIONS + rope,
        job_gib=3.0,
        environment=archs,
        config_settings=("--build-option=--cpp_ext", "--build-option=--cuda_ext"),
    )


def _flash_attn(matrix: Matrix, cell: Cell, _: str) -> Component:
    return Component(
        axis="flash-attn",
        distribution="flash-attn",
        module="flash_attn",
        extensions=("flash_attn_2_cuda",),
        job_gib=4.3,
        # 2.8's setup.py knows 80, 90, 100 and 120; 8.6 and 8.9 run sm_80's code.
        environment={
            "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
            "FLASH_ATTN_CUDA_ARCHS": sm_of(matrix, cell)[:-1] + "0",
            "NVCC_THREADS": "1",
        },
        tools=("packaging", "wheel", "psutil"),
    )


def _fa3(matrix: Matrix, cell: Cell, _: str) -> Component:
    facts = matrix.release("flash-attn-hopper", cell.versions["flash-attn-hopper"]).facts
    prefix = "FAHOPPER" if facts.distribution == "flashattn-hopper" else "FLASH_ATTENTION"
    env = {f"{prefix}_FORCE_BUILD": "TRUE", "NVCC_THREADS": "1"}
    if prefix == "FLASH_ATTENTION":
        # Its cells are Hopper's (rule fa3-sm90a), and 60 of the 130 files that 27f501d compiles are for Ampere. Older trees have none.
        env["FLASH_ATTENTION_DISABLE_SM80"] = "TRUE"
    archives = fa3_archives(matrix, cell)
    if archives:
        env["FLASH_ATTENTION_HOME"] = DOWNLOADED
    return Component(
        axis="flash-attn-hopper",
        distribution=facts.distribution.replace("_", "-"),
        module=facts.module,
        folder="hopper",
        job_gib=7.0,
        environment=env,
        tools=("packaging", "wheel", "psutil", "einops"),
        downloads={f"flash-attn-hopper-{folder}": f".flashattn/nvidia/{folder}" for folder in archives},
    )


def fa3_archives(matrix: Matrix, cell: Cell) -> Mapping[str, Archive]:
    """Return what FA3's setup.py would download, by the folder of its cache: nvcc and ptxas, unless it takes the cell's own."""
    if "flash-attn-hopper" not in cell.versions:
        return {}
    toolchain = matrix.release("flash-attn-hopper", cell.versions["flash-attn-hopper"]).facts.toolchain
    return toolchain.archives if toolchain is not None and toolchain.replaces(cell.versions["cuda"]) else {}


def _deepspeed(matrix: Matrix, cell: Cell, _: str) -> Component:
    del matrix, cell
    # Without DS_BUILD_OPS the ops are compiled when they are first used, which is DeepSpeed's own default.
    return Component(
        axis="deepspeed",
        distribution="deepspeed",
        module="deepspeed",
        nvcc=False,
        job_gib=1.0,
        environment={"DS_BUILD_OPS": "0"},
        tools=("packaging", "wheel", "psutil", "py-cpuinfo"),
    )


_MAKERS: Mapping[str, Callable[[Matrix, Cell, Literal["pypi", "git"]], Component]] = MappingProxyType(
    {"te": _te, "apex": _apex, "flash-attn": _flash_attn, "flash-attn-hopper": _fa3, "deepspeed": _deepspeed}
)


def components_of(matrix: Matrix, cell: Cell, te_source: Literal["pypi", "git"] = "pypi") -> tuple[Component, ...]:
    """Return what the build of `cell` compiles, cheapest first, so that a broken toolchain shows early.

    A component that the base image brings (NGC) is not compiled.
    """
    brought = brought_by_base(matrix, cell)
    return tuple(
        replace(make(matrix, cell, te_source), version=cell.versions[axis])
        for axis, make in _MAKERS.items()
        if axis in cell.versions and axis not in brought
    )


def brought_by_base(matrix: Matrix, cell: Cell) -> tuple[str, ...]:
    """Return the axes whose release comes with the base image: nothing is installed or compiled for them."""
    ngc = matrix.release("base", cell.versions["base"]).facts.kind == "ngc"
    return tuple(axis for axis in ("torch", "te", "apex") if ngc and axis in cell.versions)


def stack_components(stack: Stack, mpi_prefix: str | None) -> tuple[Component, ...]:
    """Return the distributions that a stack builds from source."""
    return tuple(
        Component(
            axis=build.name,
            distribution=build.name,
            module=build.module,
            extensions=build.extensions,
            nvcc=build.nvcc,
            job_gib=2.0,
            environment=build.environment
            | ({"MPICC": f"{mpi_prefix}/bin/mpicc" if mpi_prefix else "mpicc"} if build.mpi else {}),
            tools=("packaging", "wheel", *build.tools),
            version=build.version or str(build.commit)[:12],
            alone=True,
            mpi=build.mpi,
        )
        for build in stack.builds
    )
