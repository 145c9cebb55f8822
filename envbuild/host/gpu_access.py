"""How a runtime gives containers the GPUs: by a CDI specification, or in the runtime's own way. This is the one place that decides."""

import re
from dataclasses import dataclass
from typing import Literal

from envbuild.host.model import HostFacts

Runtime = Literal["docker", "podman", "apptainer"]
Choice = Literal["auto", "cdi", "native"]
"""The setting `gpu_access`: CDI where it serves and else the runtime's own way, CDI alone, or the runtime's own way alone."""

DESCRIBE = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
ALL = ("nvidia.com/gpu=all",)
_FIRST_WITH_DEVICE = (1, 5)
"""Apptainer's `--device` came with 1.5 (its release notes), for `run`, `exec` and `shell`, not for instances."""


@dataclass(frozen=True, kw_only=True)
class GpuAccess:
    """How a runtime gives a container the GPUs."""

    how: Literal["cdi", "gpus", "runtime", "nv", "none"]
    """A CDI device; Docker's `--gpus`; Docker's runtime `nvidia`; Apptainer's `--nv`; not at all."""
    problem: str = ""
    """Why it is not CDI, or what CDI leaves open."""
    fix: tuple[str, ...] = ()
    """Commands, or sentences where no command does it."""


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """What is between a runtime and the CDI specification."""

    what: str
    fix: tuple[str, ...] = ()
    final: bool = True
    """Whether CDI cannot be had at all; otherwise who asks for it gets it."""


def gpu_access(host: HostFacts, runtime: Runtime, choice: Choice = "auto", devices: tuple[str, ...] = ALL) -> GpuAccess:
    """Return how `runtime` gives a container these GPUs. Whether the machine has any is not asked.

    Args:
        host: the machine.
        runtime: what runs the container.
        choice: what the setting `gpu_access` says.
        devices: the CDI devices that the container wants.

    """
    own = _own_way(host, runtime)
    if choice == "native" and runtime != "podman":
        return GpuAccess(how=own)
    fault = _fault(host, runtime, devices)
    if choice == "native":
        return GpuAccess(
            how="none", problem="podman gives GPUs by CDI alone", fix=("unset gpu_access, or write auto or cdi",)
        )
    if fault is None:
        return GpuAccess(how="cdi")
    if choice == "cdi":
        return GpuAccess(how="none" if fault.final else "cdi", problem=fault.what, fix=fault.fix)
    return GpuAccess(how=own, problem=fault.what, fix=fault.fix)


def _own_way(host: HostFacts, runtime: Runtime) -> Literal["gpus", "runtime", "nv", "none"]:
    if runtime == "apptainer":
        return "nv"
    if runtime == "podman":  # it takes Docker's `--gpus`, and does nothing with it before 5
        return "none"
    if host.toolkit.hook:
        return "gpus"
    return "runtime" if host.toolkit.runtime == "active" else "none"


def _fault(host: HostFacts, runtime: Runtime, devices: tuple[str, ...]) -> _Fault | None:
    toolkit = host.toolkit
    if runtime == "apptainer" and not _takes_devices(host.apptainer or ""):
        return _Fault(what=f"Apptainer {host.apptainer or '(none)'} takes no CDI devices, which came with 1.5")
    if missing := [device for device in devices if device not in toolkit.cdi_devices]:
        return _Fault(what=f"there is no CDI specification of {', '.join(missing)}", fix=(DESCRIBE,))
    if runtime == "docker" and not host.engine.cdi_folders:
        return _Fault(
            what="there is a CDI specification, but this engine does not read it",
            fix=('add {"features": {"cdi": true}} to /etc/docker/daemon.json', "sudo systemctl restart docker"),
        )
    if toolkit.cdi_driver and host.driver and toolkit.cdi_driver != host.driver:
        return _Fault(
            what=f"the CDI specification is for driver {toolkit.cdi_driver}, and {host.driver} is loaded",
            fix=(DESCRIBE,),
            final=False,
        )
    if runtime == "apptainer" and toolkit.cdi_hooks:
        # https://github.com/apptainer/apptainer/pull/3738
        return _Fault(
            what="the CDI specification has hooks, which Apptainer does not run: the container would have no libcuda.so.1",
            final=False,
        )
    return None


def _takes_devices(version: str) -> bool:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", version)
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_WITH_DEVICE
