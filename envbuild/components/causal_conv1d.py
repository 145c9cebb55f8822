"""causal-conv1d, compiled from PyPI's sdist: the short convolution in front of a Mamba layer."""

from envbuild.components.base import Component, HostSources, Sdist, Sources, Upstream, View, Wheel, sms_of


class CausalConv1d(Component):
    """causal-conv1d."""

    axis = "causal-conv1d"
    place = 70
    switches = ("CAUSAL_CONV1D_",)
    label = "conv1d-"
    distributions = ("causal-conv1d",)
    host_sources = HostSources(folders=("csrc",), includes=("csrc",))
    upstream = Upstream(
        distribution="causal-conv1d",
        to_fill_in=("whether its sdist holds csrc", "CUDA versions and architectures of setup.py's list"),
    )
    extensions = {"causal-conv1d": ("causal_conv1d_cuda",)}

    def sources(self, view: View) -> Sources:
        version = view.release(self.axis).version
        return Sources(sdists=(Sdist(name=self.axis, distribution="causal-conv1d", version=version),))

    def wheel(self, view: View) -> Wheel:
        return Wheel(
            axis=self.axis,
            distribution="causal-conv1d",
            module="causal_conv1d",
            extensions=("causal_conv1d_cuda",),
            job_gib=3.3,
            environment={"CAUSAL_CONV1D_FORCE_BUILD": "TRUE"},
            only_sms=sms_of(view),
            templates=True,
        )


component = CausalConv1d()
