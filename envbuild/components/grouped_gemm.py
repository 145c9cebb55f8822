"""grouped_gemm for mixtures of experts, compiled from the sdist of nv-grouped-gemm: PyPI's `grouped-gemm` is another fork."""

from envbuild.components.base import Component, HostSources, Sdist, Sources, Upstream, View, Wheel, dotted, sms_of


class GroupedGemm(Component):
    """grouped_gemm."""

    axis = "grouped-gemm"
    place = 72
    switches = ("GROUPED_GEMM_",)
    label = "ggemm"
    distributions = ("nv-grouped-gemm",)
    host_sources = HostSources(folders=("csrc",), includes=("csrc", "third_party/cutlass/include"))
    upstream = Upstream(
        distribution="nv-grouped-gemm",
        to_fill_in=("whether its sdist holds third_party/cutlass", "the C++ standard that setup.py gives nvcc"),
    )
    extensions = {"grouped-gemm": ("grouped_gemm_backend",)}

    def sources(self, view: View) -> Sources:
        version = view.release(self.axis).version
        return Sources(sdists=(Sdist(name=self.axis, distribution="nv-grouped-gemm", version=version),))

    def wheel(self, view: View) -> Wheel:
        return Wheel(
            axis=self.axis,
            distribution="nv-grouped-gemm",
            module="grouped_gemm",
            extensions=("grouped_gemm_backend",),
            job_gib=3.2,
            # Without an architecture list setup.py asks the GPU of the machine that compiles, which need not have one.
            environment={"GROUPED_GEMM_FORCE_BUILD": "TRUE", "TORCH_CUDA_ARCH_LIST": dotted(sms_of(view))},
        )


component = GroupedGemm()
