"""Podman as a runtime: images of the user's podman, in its containers, with root or without."""

from envbuild.engine.podman import PodmanClient, own_limits
from envbuild.errors import HostError
from envbuild.host import HostFacts
from envbuild.run.container import Access, Container, common_flags, infiniband_flags, wanted_gpus, wants_infiniband
from envbuild.run.docker import DockerRuntime

_DESCRIBE = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
_ALL = "nvidia.com/gpu=all"


def podman_gpus(host: HostFacts, gpus: Access) -> tuple[list[str], str | None]:
    """Return podman's flags for the GPUs, and a message for the user where `auto` gives none although there are some.

    Podman gives GPUs by the toolkit's CDI description alone; it takes Docker's `--gpus` and does nothing with it before 5.

    Raises:
        UsageError: `gpus` names none.
        HostError: GPUs were asked for, and there are none or no CDI description.

    """
    wanted = wanted_gpus(host, gpus)
    if wanted is None:
        return [], None
    devices = [f"nvidia.com/gpu={number}" for number in wanted.split(",")]
    if missing := [device for device in devices if device not in host.toolkit.cdi_devices]:
        if gpus == "auto":
            return [], f"the container runs without the {len(host.gpus)} GPUs of this machine: fix it with {_DESCRIBE}"
        raise HostError(
            f"podman finds no CDI description of {', '.join(missing)}", where=f"--gpus {gpus}", hint=_DESCRIBE
        )
    # SELinux would keep the container from the devices; elsewhere this changes nothing
    return [*(word for device in devices for word in ("--device", device)), "--security-opt", "label=disable"], None


def podman_flags(host: HostFacts, container: Container) -> tuple[list[str], list[str]]:
    """Return the flags of `podman run` (all that comes before the image), and notes for the user.

    Raises:
        UsageError: `container.gpus` names none.
        HostError: the container asks for something that is missing on this machine.

    """
    gpus, note = podman_gpus(host, container.gpus)
    notes = [note] if note else []
    flags = [*gpus, "--ipc", "host", "--ulimit", "stack=67108864"]
    if host.podman is not None and host.podman.lifts_limits:
        flags += ["--ulimit", "memlock=-1"]
    else:
        flags += own_limits()
        if wants_infiniband(host, container.infiniband):
            notes.append("podman may not lift the limit on locked memory: RDMA can fail to register memory (ulimit -l)")
    flags += ["--network", container.network, *infiniband_flags(host, container.infiniband)]
    return [*flags, *common_flags(container)], notes


class PodmanRuntime(DockerRuntime):
    """The user's podman, whose command line is Docker's."""

    def describe(self) -> str:
        """Return its name and version."""
        return f"podman {PodmanClient(self.settings).version()}"

    def flags(self, host: HostFacts, container: Container) -> tuple[list[str], list[str]]:
        """Return the flags for a container, and notes; see `podman_flags`."""
        return podman_flags(host, container)
