"""flash-attention 2, compiled from PyPI's sdist."""

from envbuild.components.base import Component, HostSources, Sdist, Sources, Upstream, View, Wheel, sms_of
from envbuild.util.model import Model


class FlashAttnFacts(Model):
    pypi: str | None = None
    cxx_standard: int | None = None


class FlashAttention(Component):
    """flash-attention 2."""

    axis = "flash-attn"
    place = 30
    switches = ("FLASH_ATTENTION_", "FLASH_ATTN_")
    label = "fa"
    facts = FlashAttnFacts
    distributions = ("flash-attn",)
    host_sources = HostSources(
        folders=("csrc/flash_attn",), includes=("csrc/flash_attn", "csrc/flash_attn/src", "csrc/cutlass/include")
    )
    upstream = Upstream(
        distribution="flash-attn",
        facts=("pypi",),
        to_fill_in=("facts.cxx_standard (setup.py)", "whether TE's cap takes it in"),
    )
    extensions = {"flash-attn": ("flash_attn_2_cuda",)}

    def sources(self, view: View) -> Sources:
        release = view.release("flash-attn")
        version = release.facts.pypi or release.version
        return Sources(sdists=(Sdist(name="flash-attn", distribution="flash-attn", version=version),))

    def wheel(self, view: View) -> Wheel:
        # 2.8's setup.py knows 80, 90, 100 and 120; 8.6 and 8.9 run sm_80's code.
        sms = tuple(dict.fromkeys(sm[:-1] + "0" for sm in sms_of(view)))
        return Wheel(
            axis="flash-attn",
            distribution="flash-attn",
            module="flash_attn",
            extensions=("flash_attn_2_cuda",),
            job_gib=4.3,
            environment={
                "FLASH_ATTENTION_FORCE_BUILD": "TRUE",
                "FLASH_ATTN_CUDA_ARCHS": ";".join(sms),
                "NVCC_THREADS": "1",
            },
            tools=("packaging", "wheel", "psutil"),
            # up to 2.8.2 setup.py writes no PTX, which a fleet's newest GPU stands for
            only_sms=sms if len(sms) > 1 else (),
            templates=True,
        )


component = FlashAttention()
