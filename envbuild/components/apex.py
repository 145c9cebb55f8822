"""NVIDIA's apex, from git alone: PyPI's `apex` is another project."""

from typing import Literal

from envbuild.components.base import (
    Component,
    HostSources,
    Sources,
    Tree,
    Upstream,
    View,
    Wheel,
    commit_of,
    dotted,
    sms_of,
)
from envbuild.util.model import Model

_URL = "https://github.com/NVIDIA/apex.git"
# --cpp_ext and --cuda_ext of apex at every pinned commit; a build that silently produced none of them is the known trap.
_EXTENSIONS = (
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


class ApexFacts(Model):
    build: Literal["global-option", "config-settings", "environment"]
    """How the C++ and CUDA extensions are asked for."""
    fused_rope: bool = True
    """Whether apex.transformer (fused RoPE) is in the tree."""


class Apex(Component):
    """apex."""

    axis = "apex"
    place = 20
    switches = ("APEX_",)
    label = "apex"
    facts = ApexFacts
    in_ngc = True
    needs_commit = True
    runtime = ("packaging",)
    # apex.contrib is not built, and setup.py states a C++ standard for an extension of it alone
    host_sources = HostSources(
        folders=("csrc",),
        includes=("csrc",),
        flags_in=(),
        defines=("-DVERSION_GE_1_1", "-DVERSION_GE_1_3", "-DVERSION_GE_1_5"),  # torch's version, in older setup.py
    )
    # torch.nn._functions.rnn and .thnn, which it imports, were gone before torch 1.13
    unimportable = ("apex.RNN",)
    upstream = Upstream(repository=_URL)
    extensions = {"apex": _EXTENSIONS}

    def module(self, view: View) -> str:
        del view
        return "apex"

    def sources(self, view: View) -> Sources:
        # its submodules serve apex.contrib alone, which --cpp_ext and --cuda_ext do not build
        return Sources(trees=(Tree(name="apex", url=_URL, commit=commit_of(view, "apex"), submodules=()),))

    def wheel(self, view: View) -> Wheel:
        facts = view.release("apex").facts
        archs = {"TORCH_CUDA_ARCH_LIST": dotted(sms_of(view))}
        by_environment = facts.build == "environment"
        return Wheel(
            axis="apex",
            distribution="apex",
            module="apex",
            extensions=_EXTENSIONS + (("fused_rotary_positional_embedding",) if facts.fused_rope else ()),
            job_gib=3.0,
            environment={**archs, "APEX_CPP_EXT": "1", "APEX_CUDA_EXT": "1"} if by_environment else archs,
            config_settings=() if by_environment else ("--build-option=--cpp_ext", "--build-option=--cuda_ext"),
        )


component = Apex()
