"""PyTorch, from PyPI, from PyTorch's own index of a CUDA variant, or in NVIDIA's image."""

from typing import Any

from envbuild.components.base import Component, View
from envbuild.util.model import Model
from envbuild.util.patterns import pattern

_SETUPTOOLS = pattern(r"2\.[0-6]\.(?!.*\+cpu)")
"""Releases whose Triton imports setuptools where it compiles a kernel's launcher, and states no such requirement
(PyPI:triton==3.1.0:triton/runtime/build.py). torch asks for it on some versions of Python alone."""


class TorchFacts(Model):
    index: str
    """`pypi`, the URL of PyTorch's per-variant index, or `base` when it is in the base image."""
    archs: tuple[str, ...] = ()
    """SM numbers of the wheel's kernels; empty for a CPU build."""
    toolkit: str | None = None
    """CUDA toolkit update whose libraries the wheel installs, e.g. 12.6.2."""
    manylinux: str | None = None
    cxx_standard: int | None = None


WITH_TORCH = ("numpy", "torchaudio", "torchvision")
"""torch is compiled against NumPy, and the others against torch: they come from the same index as torch's variant."""


class Torch(Component):
    """PyTorch."""

    axis = "torch"
    place = 0
    label = "torch"
    facts = TorchFacts
    distributions = ("torch",)
    in_ngc = True

    def requirement(self, view: View) -> tuple[str, str | None]:
        """Return torch's requirement, and the index that holds it besides PyPI, if any."""
        release = view.release("torch")
        if release.facts.index != "pypi":
            return f"torch=={release.version}", release.facts.index
        # PyPI's files carry no local label: 2.11.0 is the cu130 build.
        from packaging.version import InvalidVersion, Version

        try:
            version = Version(release.version).public
        except InvalidVersion:
            version = release.version
        return f"torch=={version}", None

    def requirements(self, view: View) -> tuple[str, ...]:
        """Return what it imports and does not ask for; torch itself is installed in a separate step."""
        imports = _SETUPTOOLS.match(view.release("torch").version) and not self.is_provided(view)
        return ("setuptools",) if imports else ()

    def module(self, view: View) -> str:
        del view
        return "torch"

    def expected(self, view: View) -> dict[str, Any]:
        return {"distribution": "torch", "version": view.versions["torch"]}


component = Torch()
