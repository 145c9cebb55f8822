"""Transformer Engine: PyPI's core wheel and the sdist of its torch extension, or all of it from git."""

from typing import Literal

from envbuild.components.base import (
    Component,
    HostSources,
    Sdist,
    Sources,
    Tree,
    Upstream,
    View,
    Wheel,
    commit_of,
    sms_of,
)
from envbuild.errors import UsageError
from envbuild.util.model import Model

_URL = "https://github.com/NVIDIA/TransformerEngine.git"


class TeFacts(Model):
    core: dict[str, str] = {}
    """CUDA major -> core wheel distribution, e.g. {"12": "transformer-engine-cu12"}."""
    pypi: str | None = None
    """The version on PyPI (2.6.0.post1 for 2.6)."""
    finds_cu13: bool = True
    """Whether it finds CUDA 13's NVRTC and cuRAND where PyPI's packages put them (nvidia/cu13), without CUDA_HOME."""
    fa3_distribution: str | None = None
    fa3_module: str | None = None


class TransformerEngine(Component):
    """Transformer Engine."""

    axis = "te"
    place = 10
    switches = ("NVTE_",)
    label = "te"
    facts = TeFacts
    distributions = ("transformer-engine", "transformer-engine-torch")
    variants = ("transformer-engine-cu",)
    in_ngc = True
    host_sources = HostSources(
        folders=("csrc",),
        includes=("common_headers", "common_headers/common", "common_headers/common/include", "csrc"),
        flags_in=("setup.py", "build_tools/pytorch.py"),
    )
    upstream = Upstream(distribution="transformer-engine", repository=_URL, chosen=False)
    extensions = {"transformer-engine-torch": ("transformer_engine_torch",)}

    def module(self, view: View) -> str:
        return "transformer_engine" if self.is_provided(view) else "transformer_engine.pytorch"

    def source_of(self, view: View) -> Literal["pypi", "git"]:
        """Return `pypi` or `git`: what PyPI does not have comes from git, unless it was to be PyPI.

        Raises:
            UsageError: PyPI was asked for, and does not have it.

        """
        asked = view.sources.get("te")
        v = view.versions
        if "te" not in v or self.is_provided(view) or asked == "git":
            return "git" if asked == "git" else "pypi"
        if v["cuda"].split(".")[0] in view.release("te").facts.core:
            return "pypi"
        if asked == "pypi":
            raise UsageError(
                f"PyPI has no Transformer Engine {v['te']} for CUDA {v['cuda']}",
                where="te=pypi",
                hint="leave --source out: this release then comes from git",
            )
        return "git"

    def sources(self, view: View) -> Sources:
        if self.source_of(view) == "git":
            return Sources(trees=(Tree(name="te", url=_URL, commit=commit_of(view, "te")),))
        return Sources(sdists=(Sdist(name="te", distribution="transformer-engine-torch", version=self._on_pypi(view)),))

    def requirements(self, view: View) -> tuple[str, ...]:
        if self.source_of(view) == "git":
            return ()
        version = self._on_pypi(view)
        core = view.release("te").facts.core[view.versions["cuda"].split(".")[0]]
        return f"transformer-engine=={version}", f"{core}=={version}"

    def _on_pypi(self, view: View) -> str:
        release = view.release("te")
        return release.facts.pypi or release.version

    def wheel(self, view: View) -> Wheel:
        sms = sms_of(view)
        env = {"NVTE_FRAMEWORK": "pytorch", "NVTE_PYTORCH_FORCE_BUILD": "TRUE"}
        if self.source_of(view) == "pypi":
            # The sdist of the torch extension holds C++ alone; the kernels are in the core wheel.
            return Wheel(
                axis="te",
                distribution="transformer-engine-torch",
                module="transformer_engine.pytorch",
                extensions=("transformer_engine_torch",),
                nvcc=False,
                job_gib=2.4,
                environment=env,
            )
        if "nvcc" not in view.versions:
            raise UsageError(
                f"Transformer Engine {view.versions['te']} from git compiles its kernels, and this cell has no nvcc",
                where="te=git",
                hint="leave the source out, which takes PyPI's core wheel, or name a base that holds a toolkit "
                f"(--base 'nvidia-cuda-{view.versions['cuda']}*')",
            )
        return Wheel(
            axis="te",
            distribution="transformer-engine",
            module="transformer_engine.pytorch",
            extensions=("transformer_engine_torch",),
            job_gib=4.1,
            # Without the third, a build inside another git clone names that clone's commit in the wheel's version.
            environment={
                **env,
                "NVTE_CUDA_ARCHS": ";".join(sms),
                "NVTE_RELEASE_BUILD": "0",
                "NVTE_NO_LOCAL_VERSION": "1",
            },
            tools=("packaging", "wheel", "cmake", "pybind11"),
        )

    def environment(self, view: View, *, site: str, devel: bool) -> dict[str, str]:
        if self.is_provided(view):
            return {}
        # TE compiles some kernels at run time and looks for CUDA's headers here first.
        cuda13 = view.versions["cuda"].startswith("13")
        found = {"NVTE_CUDA_INCLUDE_DIR": f"{site}/nvidia/{'cu13' if cuda13 else 'cuda_runtime'}/include"}
        if cuda13 and not devel and not view.release("te").facts.finds_cu13:
            found["CUDA_HOME"] = f"{site}/nvidia/cu13"
        return found


component = TransformerEngine()
