"""How a runtime gives containers the GPUs: by a CDI specification, or in the runtime's own way. This is the one place that decides."""

import re
import shlex
from dataclasses import dataclass
from typing import Literal

from envbuild.host.model import Cdi, HostFacts

Runtime = Literal["docker", "podman", "apptainer"]
Choice = Literal["auto", "cdi", "native"]
"""The setting `gpu_access`: CDI where it serves and else the runtime's own way, CDI alone, or the runtime's own way alone."""

_DESCRIBE = "sudo nvidia-ctk cdi generate --output={}/nvidia.yaml"
DESCRIBE = _DESCRIBE.format("/etc/cdi")
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


def cdi_of(host: HostFacts, runtime: Runtime) -> Cdi:
    """Return what a runtime reads of CDI."""
    own = host.podman.cdi if runtime == "podman" and host.podman else None
    own = host.apptainer_cdi if runtime == "apptainer" else own
    found = host.toolkit
    return own or Cdi(
        folders=host.engine.cdi_folders, devices=found.cdi_devices, driver=found.cdi_driver, hooks=found.cdi_hooks
    )


def _describe(cdi: Cdi) -> str:
    """Return the command that makes the specification where the runtime looks."""
    folder = cdi.folders[0] if cdi.folders and "/etc/cdi" not in cdi.folders else "/etc/cdi"
    return _DESCRIBE.format(shlex.quote(folder))


def _own_way(host: HostFacts, runtime: Runtime) -> Literal["gpus", "runtime", "nv", "none"]:
    if runtime == "apptainer":
        return "nv"
    if runtime == "podman":  # it takes Docker's `--gpus`, and does nothing with it before 5
        return "none"
    if host.toolkit.hook:
        return "gpus"
    return "runtime" if host.toolkit.runtime == "active" else "none"


def _fault(host: HostFacts, runtime: Runtime, devices: tuple[str, ...]) -> _Fault | None:
    cdi = cdi_of(host, runtime)
    if runtime == "apptainer" and not _takes_devices(host.apptainer or ""):
        return _Fault(what=f"Apptainer {host.apptainer or '(none)'} takes no CDI devices, which came with 1.5")
    if missing := [device for device in devices if device not in cdi.devices]:
        elsewhere = cdi.folders and "/etc/cdi" not in cdi.folders
        where = f" in {' or '.join(cdi.folders)}, where {runtime} looks" if elsewhere else ""
        return _Fault(what=f"there is no CDI specification of {', '.join(missing)}{where}", fix=(_describe(cdi),))
    if runtime == "docker" and not host.engine.cdi_folders:
        return _Fault(
            what="there is a CDI specification, but this engine does not read it",
            fix=('add {"features": {"cdi": true}} to /etc/docker/daemon.json', "sudo systemctl restart docker"),
        )
    if cdi.driver and host.driver and cdi.driver != host.driver:
        return _Fault(
            what=f"the CDI specification is for driver {cdi.driver}, and {host.driver} is loaded",
            fix=(_describe(cdi),),
            final=False,
        )
    if runtime == "apptainer" and cdi.hooks:
        # https://github.com/apptainer/apptainer/pull/3738
        return _Fault(
            what="the CDI specification has hooks, which Apptainer does not run: the container would have no libcuda.so.1",
            final=False,
        )
    return None


def _takes_devices(version: str) -> bool:
    found = re.match(r"(\d{1,4})\.(\d{1,4})", version)
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_WITH_DEVICE
