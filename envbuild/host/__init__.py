"""What this machine is: driver, GPUs, engine, container toolkit, disks, network.

Every fact is optional and every probe has a time limit: a machine where something is missing is described, never an error.
"""

from envbuild.host.collect import facts
from envbuild.host.hardware import driver_version
from envbuild.host.model import Disk, Engine, Gpu, HostFacts, NetworkMount, Nic, Toolkit, read_facts
from envbuild.host.probe import LocalProbe, Probe, ProbeResult

__all__ = [
    "Disk",
    "Engine",
    "Gpu",
    "HostFacts",
    "LocalProbe",
    "NetworkMount",
    "Nic",
    "Probe",
    "ProbeResult",
    "Toolkit",
    "driver_version",
    "facts",
    "read_facts",
]
