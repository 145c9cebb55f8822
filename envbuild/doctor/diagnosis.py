"""What a machine has for building and training, what is missing, and the commands that fix it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from envbuild.host import HostFacts
from envbuild.host.build_tools import BUILDKIT, BUILDX, older
from envbuild.host.gpu_access import DESCRIBE, Choice, cdi_of, gpu_access
from envbuild.matrix.cell import DEBIAN_ARCH, Cell

ENGINE_MAJOR = 28
"""The engine that the builds are made with: `type=oci` exports with rewritten timestamps from the containerd image store."""

DISK_NEEDED_GIB = 15
"""A CUDA cell is 6 GB unpacked and 3 GB compressed, in addition to its builder's 5 GB and one archive of the result."""
DISK_CPU_GIB = 6
"""A CPU cell is 1.8 GB in the engine's store; what its stages leave in the build cache is some 4 GB."""
DISK_WARN_GIB = 36
"""Two cells, their archives and the compiler cache."""
MEMORY_NEEDED_GIB = 4
"""One compile job of Transformer Engine takes 2.4 GB and one of apex 3.0 GB (measured), in addition to the engine itself."""
MEMORY_WARN_GIB = 8


def disk_for(cell: Cell) -> int:
    """Return the GiB that the engine's disk needs while the image of a cell is built with nothing kept."""
    return DISK_CPU_GIB if cell.versions["cuda"] == "cpu" else DISK_NEEDED_GIB


Status = Literal["ok", "warn", "absent", "lack"]  # plain-words: allow lack - a value in the JSON answer
"""`absent` is something that only some work needs: not a defect, but missing for who requires it."""
MISSING: Final = "lack"  # plain-words: allow lack - a value in the JSON answer
"""What building or training needs is missing or too small."""


_WORST_FIRST: tuple[Status, ...] = (MISSING, "absent", "warn")


@dataclass(frozen=True, kw_only=True)
class MachineFinding:
    """One thing that is well, could be better, or is missing."""

    status: Status
    what: str
    fix: tuple[str, ...] = ()
    """Commands, or sentences where no command does it, in order."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """A subject that `--require` can name, with its findings."""

    name: str
    findings: tuple[MachineFinding, ...]

    @property
    def status(self) -> Status:
        """The worst of its findings."""
        found = {finding.status for finding in self.findings}
        return next((status for status in _WORST_FIRST if status in found), "ok")

    @property
    def satisfied(self) -> bool:
        """Whether work that needs this area can go on."""
        return self.status in {"ok", "warn"}


def _ok(what: str) -> MachineFinding:
    return MachineFinding(status="ok", what=what)


def _warn(what: str, *fix: str) -> MachineFinding:
    return MachineFinding(status="warn", what=what, fix=fix)


def _missing(what: str, *fix: str) -> MachineFinding:
    return MachineFinding(status=MISSING, what=what, fix=fix)


def _absent(what: str, *fix: str) -> MachineFinding:
    return MachineFinding(status="absent", what=what, fix=fix)


def _system(host: HostFacts) -> Iterator[MachineFinding]:
    name = f"{host.os or 'an unknown system'}, kernel {host.kernel or 'unknown'}, glibc {host.glibc or 'unknown'}"
    if host.arch not in {None, *DEBIAN_ARCH}:
        yield _missing(f"{name}: the processor is {host.arch}, and the matrix has only x86_64 and aarch64")
    elif host.arch == "aarch64":
        yield _warn(
            f"{name}, {host.cores or '?'} cores: an aarch64 processor, whose cells were locked and not yet built or run",
            "envbuild resolve --arch aarch64   # lists what has no files for it",
        )
    else:
        yield _ok(f"{name}, {host.cores or '?'} cores")


def _engine(host: HostFacts) -> Iterator[MachineFinding]:
    engine = host.engine
    if engine.problem == "no-client":
        if host.os_id in {"debian", "ubuntu"}:
            yield _missing("there is no container engine", "scripts/install-engine")
        else:
            yield _missing(
                "there is no container engine",
                f"install Docker {ENGINE_MAJOR} or later: https://docs.docker.com/engine/install/",
            )
        return
    if engine.problem == "permission-denied":
        yield _missing(
            "this user may not use the engine",
            'sudo usermod -aG docker "$USER"',
            "log out and in again, or: newgrp docker",
        )
        return
    if engine.version is None:
        yield _missing(
            "there is a docker command, but no engine answers it",
            "sudo systemctl start docker",
            "without systemd: scripts/install-engine",
        )
        return
    yield _ok(
        f"Docker {engine.version}, BuildKit {engine.buildkit or 'unknown'}{', rootless' if engine.rootless else ''}"
    )
    major = engine.version.partition(".")[0]
    if major.isdigit() and int(major) < ENGINE_MAJOR:
        yield _missing(
            f"Docker {engine.version} is older than {ENGINE_MAJOR}, the first that images are built with to one digest",
            "scripts/install-engine installs it on Debian and Ubuntu after the old one is removed",
        )
    if not engine.containerd_image_store:
        yield _missing(
            "the engine runs without the containerd image store",
            'add {"features": {"containerd-snapshotter": true}} to /etc/docker/daemon.json (images of the old store are hidden until it is off again)',
            "sudo systemctl restart docker",
        )
    if engine.buildx is None:
        yield _missing(
            "docker has no buildx",
            "sudo apt-get install docker-buildx   # docker-buildx-plugin from Docker's own repository",
        )
    elif older(engine.buildx, BUILDX):
        yield _missing(
            f"buildx {engine.buildx} is older than {BUILDX}: its progress cannot be read, so nothing is built with it",
            f"install buildx {BUILDX} or later: https://github.com/docker/buildx#installing",
        )
    if older(engine.buildkit, BUILDKIT):
        yield _missing(
            f"the builder's BuildKit {engine.buildkit} is older than {BUILDKIT}, the first that sets the times of files",
            f"take a builder with BuildKit {BUILDKIT} or later: docker buildx ls",
        )
    if engine.rootless:
        yield _warn(
            "the engine is rootless: locked memory and RDMA devices are bound by this user's own limits",
            "for several hosts over InfiniBand use a system engine, or raise memlock in /etc/security/limits.conf",
        )


def _gpu(host: HostFacts) -> Iterator[MachineFinding]:
    if host.driver is None and not host.gpus:
        yield _absent(
            "no NVIDIA driver is loaded: images build here, with their CPU checks, and run elsewhere",
            "on a machine with a GPU: https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
        )
        return
    if not host.gpus:
        fixes = (
            ("sudo reboot   # the driver was upgraded, and the old module is still loaded",)
            if "mismatch" in (host.driver_problem or "")
            else ("nvidia-smi   # shows what is wrong", "dmesg | grep -i nvrm")
        )
        reason = f": {host.driver_problem}" if host.driver_problem else " and nvidia-smi is missing"
        yield _missing(f"driver {host.driver} is loaded, but no GPU can be listed{reason}", *fixes)
        return
    kinds: dict[tuple[str, str | None, float | None], int] = {}
    for gpu in host.gpus:
        kinds[gpu.name, gpu.sm, gpu.memory_gib] = kinds.get((gpu.name, gpu.sm, gpu.memory_gib), 0) + 1
    for (name, sm, memory), count in kinds.items():
        yield _ok(f"{count} x {name}, {f'sm_{sm}' if sm else 'SM unknown'}, {memory or '?'} GiB, driver {host.driver}")
    if len(kinds) > 1:
        yield _warn("the GPUs differ: a job over all of them needs kernels for each, and runs at the slowest's pace")
    if any(gpu.geforce for gpu in host.gpus):
        yield _warn(
            "GeForce cards cannot use cuda-compat: the driver itself must be new enough for the CUDA of the image",
            "upgrade the driver where the table of cells says refused",
        )


_INSTALL_TOOLKIT = (
    "add NVIDIA's repository: https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",
    "sudo apt-get install -y nvidia-container-toolkit",
)
_RESTART = "sudo systemctl restart docker"


_HOW = {
    "gpus": "--gpus all",
    "runtime": "the nvidia runtime",
    "cdi": "the CDI device nvidia.com/gpu=all",
    "nv": "--nv",
}


def _toolkit(host: HostFacts, choice: Choice) -> Iterator[MachineFinding]:
    toolkit = host.toolkit
    if host.engine.rootless:
        configure: tuple[str, ...] = (
            'nvidia-ctk runtime configure --runtime=docker --config="$HOME/.config/docker/daemon.json"',
            "sudo nvidia-ctk config --set nvidia-container-cli.no-cgroups --in-place",
            "systemctl --user restart docker",
        )
    else:
        configure = ("sudo nvidia-ctk runtime configure --runtime=docker", _RESTART)
    access = gpu_access(host, "docker", choice)
    if access.how != "none":
        yield _ok(
            f"NVIDIA container toolkit {toolkit.version or '(version unknown)'}: "
            f"Docker's containers get the GPUs by {_HOW[access.how]}"
        )
        if access.problem and toolkit.cdi_devices:
            yield _warn(access.problem, *access.fix)
    elif host.driver is None and not host.gpus:
        yield _absent("no NVIDIA container toolkit; not needed without a GPU", *_INSTALL_TOOLKIT, *configure)
    elif toolkit.version is None:
        yield _missing(
            "the NVIDIA container toolkit is missing: containers cannot see the GPUs", *_INSTALL_TOOLKIT, *configure
        )
    elif toolkit.runtime == "configured":
        yield _missing("the engine was not restarted since the NVIDIA runtime was configured", configure[-1])
    elif choice == "cdi" or (choice == "auto" and toolkit.cdi_devices):
        yield _missing(access.problem, *access.fix)
    else:
        yield _missing(
            f"NVIDIA container toolkit {toolkit.version} is installed, but the engine does not know it",
            *configure,
            "or unset gpu_access: by CDI" if choice == "native" else f"or by CDI: {DESCRIBE}",
        )
    if toolkit.nvidia_docker2:
        yield _warn(
            "nvidia-docker2 is retired: nvidia-container-toolkit replaces it",
            "sudo apt-get install -y nvidia-container-toolkit && sudo apt-get remove nvidia-docker2",
        )


def _disk(host: HostFacts) -> Iterator[MachineFinding]:
    disk = host.engine_disk
    if disk is not None:
        text = f"{disk.free_gib:.0f} GiB free at {disk.path} ({disk.filesystem})"
        if disk.network:
            yield _missing(
                f"{text}: the engine cannot keep its layers on a network file system",
                'set "data-root" in /etc/docker/daemon.json to a local disk',
                _RESTART,
            )
        elif disk.free_gib < DISK_NEEDED_GIB:
            yield _missing(
                f"{text}: a CUDA image takes {DISK_NEEDED_GIB} GiB while it is built",
                "docker buildx prune",
                "docker image prune",
            )
        elif disk.free_gib < DISK_WARN_GIB:
            yield _warn(
                f"{text}: enough for one CUDA image; {DISK_WARN_GIB} GiB hold two and the compiler cache",
                "docker buildx prune",
            )
        else:
            yield _ok(text)
    cache = host.cache
    if cache is None:
        yield _warn("the cache folder's disk does not answer", "set cache_dir to a folder on a local disk")
    elif cache.network:
        yield _warn(
            f"the cache {cache.path} is on {cache.filesystem}: slow with many small files, and locks may not hold",
            "export ENVBUILD_CACHE_DIR=/local/disk/envbuild   # or cache_dir in the settings file",
        )
    else:
        yield _ok(f"{cache.free_gib:.0f} GiB free at {cache.path} ({cache.filesystem})")


def _memory(host: HostFacts) -> Iterator[MachineFinding]:
    if host.memory_gib is None:
        yield _warn("how much memory there is could not be read")
    elif host.memory_gib < MEMORY_NEEDED_GIB:
        yield _missing(
            f"{host.memory_gib} GiB of memory: one compile job takes 3 GiB",
            f"build on a machine with {MEMORY_WARN_GIB} GiB or more",
        )
    elif host.memory_gib < MEMORY_WARN_GIB:
        yield _warn(
            f"{host.memory_gib} GiB of memory: one compile job at a time, and none of flash-attention (4.3 GiB each)"
        )
    else:
        yield _ok(f"{host.memory_gib} GiB of memory")


def _network(host: HostFacts) -> Iterator[MachineFinding]:
    for nic in host.infiniband:
        yield _ok(
            f"{nic.name}: {nic.link_layer}, {nic.rate or 'rate unknown'}, {'active' if nic.active else 'not active'}"
        )
    if host.infiniband and not host.infiniband_devices:
        yield _missing(
            "there are RDMA devices, but no /dev/infiniband to give to a container", "sudo modprobe ib_uverbs rdma_ucm"
        )
    if not host.infiniband:
        yield _absent("no RDMA device: several hosts talk over TCP")
    for mount in host.network_mounts:
        yield _ok(f"{mount.path} is on {mount.filesystem}")


def _apptainer(host: HostFacts, choice: Choice) -> Iterator[MachineFinding]:
    if host.apptainer:
        access = gpu_access(host, "apptainer", choice)
        gpus = f", with the GPUs by {_HOW[access.how]}" if host.gpus and access.how != "none" else ""
        yield _ok(
            f"Apptainer {host.apptainer}: runs OCI archives and layouts, .sif files and sandboxes{gpus}; builds no images"
        )
        if host.gpus and access.problem and (choice == "cdi" or cdi_of(host, "apptainer").devices):
            yield _warn(f"{'' if access.how != 'nv' else 'by --nv and not by CDI: '}{access.problem}", *access.fix)
        if host.user_namespaces is False:
            yield _warn(
                "user namespaces are off: Apptainer runs as root, or with its setuid helper",
                "sudo sysctl -w user.max_user_namespaces=15000   # or install apptainer-suid",
            )
    else:
        yield _absent(
            "no Apptainer; it is needed only without Docker", "https://apptainer.org/docs/admin/main/installation.html"
        )


def _podman(host: HostFacts, choice: Choice, *, is_set: bool) -> Iterator[MachineFinding]:
    install = "sudo apt-get install podman   # or dnf"
    if host.podman is None:
        if is_set:
            yield _missing(
                "no podman, and the setting `engine` names it", install, "or unset the setting: ENVBUILD_ENGINE"
            )
        else:
            yield _absent("no podman; it is needed only in place of Docker", install)
        return
    kind = "rootless" if host.podman.rootless else "as root"
    yield _ok(
        f"podman {host.podman.version}, {kind}: runs, tests and pulls images with ENVBUILD_ENGINE=podman; builds none"
    )
    access = gpu_access(host, "podman", choice)
    if host.gpus and access.how == "none":
        yield _warn(f"podman cannot give containers the GPUs: {access.problem}", *access.fix)
    elif host.gpus:
        yield _ok(f"podman's containers get the GPUs by {_HOW[access.how]}")


_AREAS: dict[str, Callable[[HostFacts, Choice], Iterator[MachineFinding]]] = {
    "system": lambda host, _: _system(host),
    "engine": lambda host, _: _engine(host),
    "gpu": lambda host, _: _gpu(host),
    "toolkit": _toolkit,
    "disk": lambda host, _: _disk(host),
    "memory": lambda host, _: _memory(host),
    "infiniband": lambda host, _: _network(host),
    "apptainer": _apptainer,
}

AREAS = (*_AREAS, "podman")
"""The names that `--require` takes."""


def diagnose(host: HostFacts, choice: Choice = "auto", *, podman: bool = False) -> tuple[Area, ...]:
    """Judge every area of a machine, from the processor to the network.

    Args:
        host: the machine.
        choice: the setting `gpu_access` of who runs containers there.
        podman: whether the setting `engine` has podman run them, so that a missing one is a defect.

    """
    judges = _AREAS | {"podman": lambda host, choice: _podman(host, choice, is_set=podman)}
    return tuple(Area(name=name, findings=tuple(judge(host, choice))) for name, judge in judges.items())
