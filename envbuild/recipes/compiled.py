"""Whether a recipe compiles something against the torch that it installs: nvcc's version matters to nothing else in it."""

import re

from envbuild.recipes.model import ARCHITECTURES, Recipe

# Packages whose installation, or whose first use, starts nvcc and compares its version with torch's (torch's
# `_check_cuda_version`, DeepSpeed's `assert_no_cuda_mismatch`): PyPI has no wheel of them with kernels, or compiles them as
# they run. From pytorch/pytorch@v2.8.0:torch/utils/cpp_extension.py and each project's setup.py.
_PACKAGES = frozenset(
    [
        "apex",
        "causal-conv1d",
        "deepspeed",
        "diff-gaussian-rasterization",
        "exllamav2",
        "fast-hadamard-transform",
        "flash-attn",
        "fused-dense-lib",
        "grouped-gemm",
        "gsplat",
        "mamba-ssm",
        "megablocks",
        "minkowskiengine",
        "mmcv-full",
        "natten",
        "nvdiffrast",
        "pytorch3d",
        "sageattention",
        "simple-knn",
        "stk",
        "tinycudann",
        "torch-cluster",
        "torch-scatter",
        "torch-sparse",
        "transformer-engine",
        "transformer-engine-torch",
    ]
)
# What only a build of extensions takes, and the commands of one.
_VARIABLES = re.compile(
    r"TORCH_CUDA_ARCH_LIST|NVTE_CUDA_ARCHS|CMAKE_CUDA_ARCHITECTURES|FORCE_CUDA|BUILD_CUDA_EXT|DS_BUILD_\w+|MAX_JOBS"
)
_COMMANDS = re.compile(
    r"--no-build-isolation|\bsetup\w*\.py\b.{0,200}\b(?:install|develop|build|build_ext|bdist_wheel)\b"
    r"|\bpython3? -m build\b|\b(?:pip3?|uv) wheel\b|\bTORCH_CUDA_ARCH_LIST=|\bDS_BUILD_\w+=|\bMAX_JOBS=|\bFORCE_CUDA="
    r"|\bnvcc -"
)
_PIP_INSTALL, _NO_BINARY = re.compile(r"\bpip3? install\b"), re.compile(r"--no-binary\b")
_INSTALL = re.compile(r"\binstall\b")
# One of them in an install command, whatever its index; not a wheel by its file name, which is compiled already.
_INSTALLED = re.compile(
    r"[\s\"'](?:" + "|".join(sorted(n.replace("-", "[-_.]") for n in _PACKAGES)) + r")(?=$|[\s\"'\[=<>~!@;,])",
    re.IGNORECASE,
)


def compiles(recipe: Recipe) -> bool:
    """Return whether a line of `recipe` is known to compile against torch.

    What an image is used for later is not in its recipe, and `pip install .` of a tree that is not here may be anything:
    neither counts.
    """
    return (
        any(s.source or s.of == ARCHITECTURES for s in recipe.statements)
        or any(name in _PACKAGES for name, _ in recipe.packages)
        or any(_VARIABLES.fullmatch(name) for name, _, _ in recipe.variables)
        or any(_is_compile(text) for _, text in recipe.commands)
    )


def _is_compile(command: str) -> bool:
    if command.startswith(("echo ", "printf ")) or re.search(r"\buninstall\b", command):
        return False
    return (
        _COMMANDS.search(command) is not None
        or any(_follows(_PIP_INSTALL, _NO_BINARY, part) for part in re.split(r"[\n;&|]", command))
        or any(_follows(_INSTALL, _INSTALLED, line) for line in command.split("\n"))
    )


def _follows(first: re.Pattern[str], second: re.Pattern[str], text: str) -> bool:
    """Return whether `second` is found after `first`, in time that grows with the text alone."""
    found = first.search(text)
    return found is not None and second.search(text, found.end()) is not None
