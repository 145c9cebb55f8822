"""DeepSpeed, from PyPI's sdist."""

from envbuild.components.base import Component, HostSources, Sdist, Sources, Upstream, View, Wheel


class DeepSpeed(Component):
    """DeepSpeed."""

    axis = "deepspeed"
    place = 60
    switches = ("DS_",)
    label = "ds"
    distributions = ("deepspeed",)
    # op_builder imports distutils, which Python has up to 3.11 and Debian's own Python not at all; setuptools has it
    runtime = ("setuptools",)
    # the two ops that a training run compiles by default: the fused optimisers of GPU and CPU
    host_sources = HostSources(
        folders=("csrc/adam", "csrc/utils"),
        includes=("csrc/includes", "csrc/adam"),
        flags_in=("op_builder/builder.py",),
        cxx_flags="cxx_args",
    )
    # it derives a class from torch.nn.module, which no torch has; torch.nn.Module is meant
    unimportable = ("deepspeed.model_implementations.transformers.ds_base",)
    upstream = Upstream(
        distribution="deepspeed", to_fill_in=("whether its requirements changed (requirements/requirements.txt)",)
    )

    def sources(self, view: View) -> Sources:
        version = view.release("deepspeed").version
        return Sources(sdists=(Sdist(name="deepspeed", distribution="deepspeed", version=version),))

    def wheel(self, view: View) -> Wheel:
        del view
        # Without DS_BUILD_OPS the ops are compiled when they are first used, which is DeepSpeed's own default.
        return Wheel(
            axis="deepspeed",
            distribution="deepspeed",
            module="deepspeed",
            nvcc=False,
            job_gib=1.0,
            environment={"DS_BUILD_OPS": "0"},
            tools=("packaging", "wheel", "psutil", "py-cpuinfo"),
        )


component = DeepSpeed()
