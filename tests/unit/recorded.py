"""Machines as recordings of what their commands and files say. The H200's outputs are a real one's, cut to what is read."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from envbuild.host import HostFacts, ProbeResult, facts
from envbuild.settings import Settings

SMI_NEW = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
SMI_OLD = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
SMI_ALL = ("nvidia-smi", "-q")
SMI_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
INFO = ("docker", "info", "--format", "{{json .}}")
CACHE = Path("/home/me/.cache/envbuild")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A probe that answers from memory."""

    commands: dict[tuple[str, ...], ProbeResult | str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def run(self, *command: str) -> ProbeResult | None:
        answer = self.commands.get(command)
        if answer is None and command[:2] == ("df", "-PTk"):
            answer = self.commands.get(("df", command[2]))
        return ProbeResult(code=0, out=answer) if isinstance(answer, str) else answer

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def entries(self, path: str) -> tuple[str, ...]:
        return self.folders.get(path, ())

    def but(self, **changes: dict) -> "Recording":
        return replace(self, **{name: getattr(self, name) | change for name, change in changes.items()})

    def facts(self, **settings: str) -> HostFacts:
        return facts(Settings(cache_dir=CACHE, **settings), probe=self, every=True)


def df(kind: str, free_gib: int) -> str:
    return (
        "Filesystem     Type 1024-blocks     Used Available Capacity Mounted on\n"
        f"/dev/vda       {kind} 264212084 16882552  {free_gib * 1024 * 1024}      21% /\n"
    )


def docker_info(**changes: object) -> str:
    return json.dumps(
        {
            "ServerVersion": "28.5.2",
            "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
            "DockerRootDir": "/var/lib/docker",
            "SecurityOptions": ["name=seccomp,profile=builtin"],
            "Runtimes": {"runc": {"path": "runc"}, "io.containerd.runc.v2": {}},
            "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
            "ClientInfo": {"Version": "28.5.2", "Plugins": [{"Name": "buildx", "Version": "0.29.1"}]},
        }
        | changes
    )


BARE = Recording(
    commands={
        ("uname", "-m"): "x86_64\n",
        ("getconf", "GNU_LIBC_VERSION"): "glibc 2.39\n",
        ("nproc",): "16\n",
        ("df", str(CACHE)): ProbeResult(code=1, out=df("ext4", 64), err=f"df: {CACHE}: No such file or directory\n"),
    },
    files={
        "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\nVERSION_CODENAME=noble\n',
        "/proc/meminfo": "MemTotal:       131981020 kB\nMemFree:        130721844 kB\n",
        "/proc/sys/kernel/osrelease": "6.8.0-60-generic\n",
        "/proc/self/mounts": "proc /proc proc rw,relatime 0 0\n/dev/vda / ext4 rw,relatime,discard 0 0\n",
    },
)
"""Ubuntu, no engine, no GPU."""

ENGINE = BARE.but(
    commands={
        INFO: docker_info(),
        ("docker", "buildx", "inspect"): "Name: default\nNodes:\nName:   default\nBuildKit version: v0.25.1\n",
        ("df", "/var/lib/docker"): df("ext4", 200),
    }
)
"""The same with Docker 28."""

DRIVER_FILE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (builder@)  \n"
    "GCC version:  gcc version 12.3.0\n"
)
DRIVER_FILE_CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Sep 30 01:06:17 UTC 2020\nGCC version: x\n"
)


def _brands(name: str, brand: str, count: int) -> str:
    return "==============NVSMI LOG==============\nAttached GPUs                  : 1\n" + count * (
        f"GPU 00000000:00:06.0\n    Product Name                   : {name}\n    Product Brand                  : {brand}\n"
    )


H200 = ENGINE.but(
    commands={
        SMI_NEW: 8 * "NVIDIA H200, 143771, 9.0\n",
        SMI_ALL: _brands("NVIDIA H200", "NVIDIA", 8),
        INFO: docker_info(Runtimes={"runc": {}, "nvidia": {"path": "nvidia-container-runtime"}}),
        (
            "nvidia-ctk",
            "--version",
        ): "NVIDIA Container Toolkit CLI version 1.17.8\ncommit: f202b80a9b9d0db00d9b1d73c0128c8962c55f4d\n",
    },
    files={
        "/proc/driver/nvidia/version": DRIVER_FILE.format("580.159.04"),
        "/sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "/sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "/sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "/run/docker.pid": "11596",
        "/proc/11596/status": "Name:\tdockerd\nCapEff:\t000001ffffffffff\n",
        "/proc/11596/limits": "Max locked memory         8388608              8388608              bytes     \n",
    },
    folders={
        "/usr/bin": ("nvidia-container-runtime-hook", "nvidia-ctk", "nvidia-smi"),
        "/sys/class/infiniband": ("mlx5_0",),
        "/dev/infiniband": ("rdma_cm", "umad0", "uverbs0"),
    },
)
"""Eight H200 with a 580 driver, the container toolkit and InfiniBand."""

OLD_A100 = ENGINE.but(
    commands={
        # R450 knows no compute_cap, and refuses the whole query on standard output.
        SMI_NEW: ProbeResult(code=2, out='Field "compute_cap" is not a valid field to query.\n\n'),
        SMI_OLD: "A100-SXM4-40GB, 40537\n",
        SMI_ALL: _brands("A100-SXM4-40GB", "Tesla", 1),
    },
    files={"/proc/driver/nvidia/version": DRIVER_FILE_CLOSED.format("450.80.02")},
    folders={"/usr/bin": ("nvidia-docker", "nvidia-smi")},
)
"""An A100 with a driver of 2020 and the retired nvidia-docker2."""

GEFORCE = ENGINE.but(
    commands={
        SMI_NEW: "NVIDIA GeForce RTX 4090, 24564, 8.9\n",
        SMI_ALL: _brands("NVIDIA GeForce RTX 4090", "GeForce", 1),
        ("nvidia-ctk", "--version"): "NVIDIA Container Toolkit CLI version 1.17.8\n",
    },
    files={
        "/proc/driver/nvidia/version": DRIVER_FILE.format("550.54.15"),
        "/etc/cdi/nvidia.yaml": (
            "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n"
            '  name: "0"\n- containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n  name: all\n'
            "containerEdits:\n  env:\n  - NVIDIA_VISIBLE_DEVICES=void\n  hooks:\n  - hookName: createContainer\n"
        ),
    },
    folders={"/etc/cdi": ("nvidia.yaml", "other.yaml")},
)
"""A consumer card that containers get by CDI."""

ROOTLESS = H200.but(
    commands={
        INFO: docker_info(
            SecurityOptions=["name=seccomp,profile=builtin", "name=rootless", "name=cgroupns"],
            DockerRootDir="/home/me/.local/share/docker",
        ),
        ("df", "/home/me/.local/share/docker"): df("ext4", 30),
    },
    folders={"/usr/bin": ("nvidia-ctk",)},
)
"""A rootless engine that does not know the toolkit."""

NFS_HOME = H200.but(
    commands={("df", str(CACHE)): df("nfs4", 900)},
    files={"/proc/self/mounts": "filer:/home /home nfs4 rw,vers=4.2 0 0\nmds@tcp:/s /scratch\\040one lustre rw 0 0\n"},
)
"""A cluster node with its home on NFS."""
