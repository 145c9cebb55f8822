"""Podman as a runtime: images of the user's podman, in its containers, with root or without."""

from envbuild.engine.podman import PodmanClient, own_limits
from envbuild.host import HostFacts
from envbuild.host.gpu_access import Choice
from envbuild.run.container import (
    Access,
    Container,
    common_flags,
    device_flags,
    gpus_and_access,
    infiniband_flags,
    wants_infiniband,
)
from envbuild.run.docker import DockerRuntime


def podman_gpus(host: HostFacts, gpus: Access, choice: Choice = "auto") -> tuple[list[str], str | None]:
    """Return podman's flags for the GPUs, and a message for the user; see `gpus_and_access`.

    Raises:
        UsageError: `gpus` names none.
        HostError: GPUs were asked for, and there are none or no CDI specification.

    """
    wanted, _, message = gpus_and_access(host, "podman", gpus, choice)
    if wanted is None:
        return [], message
    # SELinux would keep the container from the devices; elsewhere this changes nothing
    return [*device_flags(wanted), "--security-opt", "label=disable"], message


def podman_flags(host: HostFacts, container: Container, choice: Choice = "auto") -> tuple[list[str], list[str]]:
    """Return the flags of `podman run` (all that comes before the image), and notes for the user.

    Raises:
        UsageError: `container.gpus` names none.
        HostError: the container asks for something that is missing on this machine.

    """
    gpus, note = podman_gpus(host, container.gpus, choice)
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
        return podman_flags(host, container, self.settings.gpu_access)
