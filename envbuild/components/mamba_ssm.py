"""mamba-ssm, compiled from PyPI's sdist; the fused paths of its layers take causal-conv1d, which is a component too."""

from envbuild.components.base import Component, HostSources, Sdist, Sources, Upstream, View, Wheel, sms_of


class MambaSsm(Component):
    """mamba-ssm."""

    axis = "mamba-ssm"
    place = 74
    switches = ("MAMBA_",)
    label = "mamba"
    distributions = ("mamba-ssm",)
    host_sources = HostSources(folders=("csrc/selective_scan",), includes=("csrc/selective_scan",))
    upstream = Upstream(
        distribution="mamba-ssm",
        to_fill_in=(
            "whether its sdist holds csrc",
            "CUDA versions and architectures of setup.py's list",
            "the C++ standard of setup.py, and the triton that it requires",
        ),
    )
    extensions = {"mamba-ssm": ("selective_scan_cuda",)}

    def sources(self, view: View) -> Sources:
        version = view.release(self.axis).version
        return Sources(sdists=(Sdist(name=self.axis, distribution="mamba-ssm", version=version),))

    def wheel(self, view: View) -> Wheel:
        return Wheel(
            axis=self.axis,
            distribution="mamba-ssm",
            module="mamba_ssm",
            extensions=("selective_scan_cuda",),
            job_gib=1.5,
            environment={"MAMBA_FORCE_BUILD": "TRUE"},
            only_sms=sms_of(view),
            templates=True,
        )


component = MambaSsm()
