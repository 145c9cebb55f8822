"""flash-attention 4, from PyPI: Python that compiles its kernels through CUTLASS' DSL when they are first called."""

from typing import Any

from envbuild.components.base import Component, Upstream, View
from envbuild.util.model import Model


class Fa4Facts(Model):
    cutlass_dsl: str | None = None
    """The version of nvidia-cutlass-dsl that Transformer Engine tests it with; its own metadata states a floor alone."""


class FlashAttention4(Component):
    """flash-attention 4."""

    axis = "flash-attn-4"
    place = 45
    label = "fa4-"
    facts = Fa4Facts
    distributions = ("flash-attn-4",)
    upstream = Upstream(
        distribution="flash-attn-4",
        to_fill_in=(
            "facts.cutlass_dsl, where TE's tests name it (qa/L3_pytorch_FA_versions_test/test.sh)",
            "the compute capabilities that forward and backward take (flash_attn/cute/interface.py)",
        ),
    )

    def module(self, view: View) -> str:
        del view
        return "flash_attn.cute"

    def requirements(self, view: View) -> tuple[str, ...]:
        release = view.release(self.axis)
        # The DSL carries CUDA 12's libraries, and CUDA 13's under this extra.
        extra = "[cu13]" if view.versions["cuda"].startswith("13.") else ""
        pinned: str | None = release.facts.cutlass_dsl
        dsl = (f"nvidia-cutlass-dsl{extra}=={pinned}",) if pinned else ()
        return (f"flash-attn-4{extra}=={release.version}", *dsl)

    def expected(self, view: View) -> dict[str, Any]:
        return {"distribution": "flash-attn-4", "version": view.versions[self.axis], "module": self.module(view)}


component = FlashAttention4()
