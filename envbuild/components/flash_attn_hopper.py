"""flash-attention 3 for Hopper, from the `hopper` folder of flash-attention's git repository."""

from collections.abc import Mapping

from envbuild.components.base import (
    DOWNLOADED,
    Component,
    Download,
    HostSources,
    Sources,
    Tree,
    View,
    Wheel,
    commit_of,
)
from envbuild.components.fa3_kernels import KernelFacts
from envbuild.components.fa3_kernels import component as _choice
from envbuild.util.model import Field, Model

KERNELS = _choice.axis
_URL = "https://github.com/Dao-AILab/flash-attention.git"


class Archive(Model):
    url: str
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """None where its publisher states none: no lock of it is complete."""


class OwnToolchain(Model):
    """What a setup.py downloads in the middle of a build, to compile with it instead of the toolkit that is there."""

    archives: dict[str, Archive]
    """By the folder of its download cache that setup.py looks for each in."""
    unless: str
    """The CUDA version (`12.8`) whose own toolkit it takes; those of CUDA 13 it takes too, where it knows them."""

    def replaces(self, cuda: str) -> bool:
        """Return whether it compiles with what it downloads where the toolkit is of `cuda` (major.minor)."""
        # the releases that do so on CUDA 13, too, do not build with it at all (rule fa3-cuda-13)
        return cuda != self.unless and not cuda.startswith("13.")


class Fa3Facts(Model):
    distribution: str
    module: str
    place: str | None = None
    """Where flash_attn_interface.py must be copied for TE to import it, relative to site-packages."""
    toolchain: OwnToolchain | None = None
    """nvcc and ptxas that its setup.py would fetch during the build; locked, and given to it."""


def _kernels(view: View) -> KernelFacts | None:
    """Return which kernels are compiled, or None where all are."""
    facts: KernelFacts | None = view.release(KERNELS).facts if KERNELS in view.versions else None
    return facts


class FlashAttentionHopper(Component):
    """flash-attention 3."""

    axis = "flash-attn-hopper"
    place = 40
    switches = ("FLASH_ATTENTION_", "FAHOPPER_")
    label = "fa3-"
    facts = Fa3Facts
    needs_commit = True
    runtime = ("einops", "packaging")
    # Transformer Engine takes it on compute capability 9.0 alone, and FlashAttention 2 or cuDNN elsewhere
    sms = ("90",)
    # its setup.py asks for torch 2.9.0.dev20250830
    host_sources = HostSources(
        folders=(".",),
        includes=(".", "../csrc/cutlass/include"),
        instead={"flash_api_stable.cpp": (">=2.9", "flash_api.cpp")},
    )

    def _archives(self, view: View) -> Mapping[str, Archive]:
        """Return what setup.py would download, by the folder of its cache: nvcc and ptxas, unless it takes the cell's own."""
        toolchain: OwnToolchain | None = view.release(self.axis).facts.toolchain
        return toolchain.archives if toolchain is not None and toolchain.replaces(view.versions["cuda"]) else {}

    def sources(self, view: View) -> Sources:
        # flash-attention's other submodule is AMD's
        tree = Tree(name=self.axis, url=_URL, commit=commit_of(view, self.axis), submodules=("csrc/cutlass",))
        files = (
            Download(name=f"{self.axis}-{folder}", url=archive.url, sha256=archive.sha256)
            for folder, archive in self._archives(view).items()
        )
        return Sources(trees=(tree,), files=tuple(files))

    def wheel(self, view: View) -> Wheel:
        facts = view.release(self.axis).facts
        prefix = "FAHOPPER" if facts.distribution == "flashattn-hopper" else "FLASH_ATTENTION"
        env = {f"{prefix}_FORCE_BUILD": "TRUE", "NVCC_THREADS": "1"}
        if prefix == "FLASH_ATTENTION":
            # Its cells are Hopper's (rule fa3-sm90a), and 60 of the 130 files that 27f501d compiles are for Ampere. Older
            # trees have none.
            env["FLASH_ATTENTION_DISABLE_SM80"] = "TRUE"
        kernels = _kernels(view)
        if kernels is not None:
            env |= {f"{prefix}_DISABLE_{name}": "TRUE" for name in kernels.without}
        archives = self._archives(view)
        if archives:
            env["FLASH_ATTENTION_HOME"] = DOWNLOADED
        return Wheel(
            axis=self.axis,
            distribution=facts.distribution.replace("_", "-"),
            module=facts.module,
            folder="hopper",
            job_gib=7.0,
            environment=env,
            tools=("packaging", "wheel", "psutil", "einops"),
            templates=True,
            downloads={f"{self.axis}-{folder}": f".flashattn/nvidia/{folder}" for folder in archives},
        )

    def placed(self, view: View) -> dict[str, str]:
        # The file hands over the module itself. A copy would register FA3's operators a second time, and its backward
        # then fails.
        place: str | None = view.release(self.axis).facts.place
        return {"flash_attn_interface": place} if place else {}

    def expected(self, view: View) -> dict[str, object]:
        kernels = _kernels(view)
        if kernels is None:
            return {"head_dims": [64, 128]}
        return {"head_dims": list(kernels.head_dims), "fp8": "FP8" not in kernels.without}


component = FlashAttentionHopper()
