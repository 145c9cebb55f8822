"""What this machine is: driver, GPUs, engine, container toolkit, disks, network.

Every fact is optional and every probe has a time limit: a machine that lacks something is described, never an error.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from envbuild.errors import DataError
from envbuild.settings import Settings, load_settings

PROBE_SECONDS = 15
"""Time limit of one command. nvidia-smi takes seconds per GPU when no persistence daemon keeps the driver loaded."""

GIB = 1 << 30

_NETWORK_FILESYSTEMS = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "fhgfs",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "wekafs",
    ]
)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str = ""


class Probe(Protocol):
    """How facts are collected: the machine itself, or a recording of one."""

    def run(self, *command: str) -> Ran | None:
        """Return what the command did; None when there is no such command or it ran out of time."""

    def read(self, path: str) -> str | None:
        """Return a small file's text, or None."""

    def entries(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a folder; none when there is no such folder."""


class LocalProbe:
    """The machine that this process runs on."""

    def run(self, *command: str) -> Ran | None:
        """Run the command with the time limit, in the C locale."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except (OSError, ValueError):
            return None
        try:
            out, err = process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            # Killed with its children and hardly waited for: what hangs on a dead file server ends when that answers.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            return None
        return Ran(code=process.returncode, out=out, err=err)

    def read(self, path: str) -> str | None:
        """Read the file as UTF-8."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def entries(self, path: str) -> tuple[str, ...]:
        """List the folder."""
        try:
            return tuple(sorted(os.listdir(path)))  # noqa: PTH208 - names, not paths
        except OSError:
            return ()


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(_Model):
    """One GPU as the driver reports it."""

    name: str
    sm: str | None = None
    """Compute capability without its dot, `90`; None where the driver is too old to tell."""
    memory_gib: float | None = None
    brand: str | None = None
    """The driver's product brand, such as `Tesla`, `GeForce` or `NVIDIA RTX`; NVIDIA_REQUIRE_CUDA matches on it."""

    @property
    def geforce(self) -> bool:
        """Whether it is a consumer card, to which cuda-compat's forward compatibility does not apply."""
        return (
            "geforce" in (self.brand or "").lower() or re.search(r"geforce|titan", self.name, re.IGNORECASE) is not None
        )


class Engine(_Model):
    """The Docker engine and its client."""

    client: str | None = None
    version: str | None = None
    """The server's version; None when it does not answer."""
    problem: Literal["no-client", "permission-denied", "no-answer"] | None = None
    containerd_image_store: bool = False
    buildx: str | None = None
    buildkit: str | None = None
    rootless: bool = False
    lifts_limits: bool | None = None
    """Whether it can give a container unlimited locked memory; an engine inside a container often cannot."""
    root: str | None = None
    """The engine's data folder."""
    runtimes: tuple[str, ...] = ()
    cdi_folders: tuple[str, ...] = ()
    """Where the engine looks for CDI device descriptions; none when CDI is off."""


class Toolkit(_Model):
    """NVIDIA's container toolkit, which gives containers the GPUs."""

    version: str | None = None
    """Of nvidia-ctk; None when the toolkit is not installed."""
    runtime: Literal["active", "configured", "absent"] = "absent"
    """Whether the engine knows the `nvidia` runtime; `configured` is in daemon.json and waits for a restart."""
    hook: bool = False
    """Whether the hook that `--gpus` calls is installed."""
    cdi_devices: tuple[str, ...] = ()
    """Devices of the CDI descriptions, such as `nvidia.com/gpu=all`."""
    nvidia_docker2: bool = False
    """Whether the retired nvidia-docker2 package is there."""


class Disk(_Model):
    """The file system that holds a folder."""

    path: str
    free_gib: float
    size_gib: float
    filesystem: str
    network: bool


class NetworkMount(_Model):
    """A file system that other machines share."""

    path: str
    filesystem: str


class Nic(_Model):
    """An RDMA device."""

    name: str
    link_layer: str
    """`InfiniBand` or `Ethernet` (RoCE)."""
    active: bool
    rate: str | None = None


class HostFacts(_Model):
    """Everything envbuild wants to know of a machine. A round trip through JSON changes nothing."""

    os: str | None = None
    os_id: str | None = None
    kernel: str | None = None
    arch: str | None = None
    glibc: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    """Installed, or the limit of this control group where that is less."""
    driver: str | None = None
    driver_problem: str | None = None
    """What nvidia-smi said when it failed although a driver is loaded."""
    gpus: tuple[Gpu, ...] = ()
    engine: Engine = Engine(problem="no-client")
    toolkit: Toolkit = Toolkit()
    apptainer: str | None = None
    cache: Disk | None = None
    engine_disk: Disk | None = None
    network_mounts: tuple[NetworkMount, ...] = ()
    infiniband: tuple[Nic, ...] = ()
    infiniband_devices: bool = False
    """Whether /dev/infiniband holds an adapter's device, to be given to a container."""

    @property
    def gpu_access(self) -> Literal["gpus", "runtime", "cdi", "none"]:
        """How a container gets the GPUs: by `--gpus`, by the `nvidia` runtime, by a CDI device, or not at all."""
        if self.toolkit.hook:
            return "gpus"
        if self.toolkit.runtime == "active":
            return "runtime"
        return "cdi" if self.engine.cdi_folders and "nvidia.com/gpu=all" in self.toolkit.cdi_devices else "none"


def read_facts(path: Path) -> HostFacts:
    """Read facts that were collected elsewhere: `envbuild doctor --json` of that host, or its `host` object alone.

    Raises:
        DataError: the file is not that.

    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(raw, dict) and isinstance(raw.get("host"), dict):
            raw = raw["host"]
        return HostFacts.model_validate(raw)
    except OSError as error:
        problem = error.strerror or str(error)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        problem = str(error)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
    raise DataError(
        f"these are no host facts: {problem}",
        where=str(path),
        hint="collect them with `envbuild doctor --json > facts.json` on that host",
    )


def driver_version(probe: Probe | None = None) -> str | None:
    """Return the version of the loaded NVIDIA driver, such as `570.172.08`; None when none is loaded."""
    probe = probe or LocalProbe()
    text = probe.read("/proc/driver/nvidia/version") or ""
    found = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    if found:
        return found.group(1)
    # Windows' driver under WSL 2 has no /proc entry.
    ran = probe.run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = re.match(r"\s*(\d{3,}\.\d+(?:\.\d+)?)\s*$", ran.out.partition("\n")[0]) if ran and ran.code == 0 else None
    return found.group(1) if found else None


def facts(settings: Settings | None = None, *, probe: Probe | None = None) -> HostFacts:
    """Describe this machine. Raises nothing of its own, whatever is missing.

    Args:
        settings: for the cache folder and the engine's address; this user's own by default.
        probe: what to ask; the machine itself by default.

    """
    probe = probe or LocalProbe()
    settings = settings or load_settings()
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', probe.read("/etc/os-release") or "", re.MULTILINE))
    engine = _engine(probe, settings)
    driver = driver_version(probe)
    gpus, gpu_problem = _gpus(probe)
    mounts = _mounts(probe)
    return HostFacts(
        os=release.get("PRETTY_NAME"),
        os_id=release.get("ID"),
        kernel=_line(probe.read("/proc/sys/kernel/osrelease")),
        arch=_output(probe, "uname", "-m"),
        glibc=_match(r"glibc (\S+)", _output(probe, "getconf", "GNU_LIBC_VERSION")),
        cores=_number(_output(probe, "nproc")),
        memory_gib=_memory(probe),
        driver=driver,
        driver_problem=gpu_problem if driver else None,
        gpus=gpus,
        engine=engine,
        toolkit=_toolkit(probe, engine),
        apptainer=_match(
            r"version (\S+)", _output(probe, "apptainer", "--version") or _output(probe, "singularity", "--version")
        ),
        cache=_disk(probe, str(settings.cache_dir)),
        engine_disk=_disk(probe, engine.root) if engine.root and settings.engine_is_here else None,
        network_mounts=tuple(NetworkMount(path=path, filesystem=kind) for path, kind in mounts if _is_network(kind)),
        infiniband=tuple(_nics(probe)),
        # rdma_cm is there without any adapter; verbs need a uverbs device.
        infiniband_devices=any(name.startswith("uverbs") for name in probe.entries("/dev/infiniband")),
    )


def _output(probe: Probe, *command: str) -> str | None:
    ran = probe.run(*command)
    return ran.out.strip() if ran and ran.code == 0 and ran.out.strip() else None


def _line(text: str | None) -> str | None:
    return text.strip() or None if text else None


def _match(pattern: str, text: str | None) -> str | None:
    found = re.search(pattern, text or "")
    return found.group(1) if found else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _memory(probe: Probe) -> float | None:
    total = _number(_match(r"MemTotal:\s+(\d+) kB", probe.read("/proc/meminfo")))
    sizes = [total * 1024] if total else []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _number(_line(probe.read(path)))
        if limit:
            sizes.append(limit)
    return round(min(sizes) / GIB, 1) if sizes else None


def _gpus(probe: Probe) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs, and what nvidia-smi said if it failed."""
    brands = re.findall(r"^\s*Product Brand\s*:\s*(.+?)\s*$", _output(probe, "nvidia-smi", "-q") or "", re.MULTILINE)
    # Drivers before R510 know no compute_cap and refuse the whole query.
    failed: str | None = None
    for query in ("name,memory.total,compute_cap", "name,memory.total"):
        ran = probe.run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
        if ran is not None and ran.code == 0:
            return tuple(_gpu_rows(ran.out, query.count(","), brands)), None
        failed = (_line(ran.err) or _line(ran.out)) if ran else None
    return (), failed


def _gpu_rows(table: str, commas: int, brands: list[str]) -> Iterator[Gpu]:
    for number, line in enumerate(filter(None, table.splitlines())):
        name, memory, *capability = (field.strip() for field in line.rsplit(",", commas))
        mib = _number(memory)
        yield Gpu(
            name=name,
            sm=capability[0].replace(".", "") if capability and re.match(r"^\d+\.\d$", capability[0]) else None,
            memory_gib=round(mib / 1024, 1) if mib else None,
            brand=brands[number] if number < len(brands) else None,
        )


def _engine(probe: Probe, settings: Settings) -> Engine:
    docker = settings.engine_command
    ran = probe.run(*docker, "info", "--format", "{{json .}}")
    if ran is None:
        # No such command, or an engine that hangs: only the first lacks a version.
        client = _match(r"version ([\w.+~-]+)", _output(probe, docker[0], "--version"))
        return Engine(client=client, problem="no-answer" if client else "no-client")
    info = _json_object(ran.out)
    client_info = info.get("ClientInfo") or {}
    plugins = {p.get("Name"): p.get("Version") for p in client_info.get("Plugins") or ()}
    client = client_info.get("Version")
    if not info.get("ServerVersion"):
        said = ran.err + " ".join(info.get("ServerErrors") or ())
        denied = "permission denied" in said.lower()
        return Engine(
            client=client, buildx=plugins.get("buildx"), problem="permission-denied" if denied else "no-answer"
        )
    builder = _output(probe, *docker, "buildx", "inspect", *([settings.builder] if settings.builder else [])) or ""
    return Engine(
        client=client,
        version=info["ServerVersion"],
        containerd_image_store=any("containerd.snapshotter" in str(row[-1]) for row in info.get("DriverStatus") or ()),
        buildx=plugins.get("buildx"),
        buildkit=_match(r"BuildKit version:\s*(\S+)", builder),
        rootless=any("name=rootless" in option for option in info.get("SecurityOptions") or ()),
        lifts_limits=_lifts_limits(probe),
        root=info.get("DockerRootDir"),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        cdi_folders=tuple(info.get("CDISpecDirs") or ()),
    )


def _lifts_limits(probe: Probe) -> bool | None:
    """Whether dockerd may raise a hard limit: it has CAP_SYS_RESOURCE, or none to raise. None when it is not seen from here."""
    pid = _number(_line(probe.read("/run/docker.pid") or probe.read("/var/run/docker.pid")))
    status, limits = (probe.read(f"/proc/{pid}/{name}") or "" for name in ("status", "limits"))
    capabilities = _match(r"CapEff:\s*([0-9a-f]+)", status)
    if pid is None or capabilities is None:
        return None
    return bool(int(capabilities, 16) >> 24 & 1) or _match(r"Max locked memory\s+\S+\s+(\S+)", limits) == "unlimited"


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "")
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _toolkit(probe: Probe, engine: Engine) -> Toolkit:
    configured = any(
        "nvidia" in (_json_object(probe.read(path)).get("runtimes") or {})
        for path in ("/etc/docker/daemon.json", os.path.expanduser("~/.config/docker/daemon.json"))  # noqa: PTH111
    )
    return Toolkit(
        version=_match(r"version (\S+)", _output(probe, "nvidia-ctk", "--version")),
        runtime="active" if "nvidia" in engine.runtimes else "configured" if configured else "absent",
        hook=bool({"nvidia-container-runtime-hook", "nvidia-container-toolkit"} & set(probe.entries("/usr/bin"))),
        cdi_devices=tuple(sorted(_cdi_devices(probe, engine))),
        nvidia_docker2="nvidia-docker" in probe.entries("/usr/bin"),
    )


def _cdi_devices(probe: Probe, engine: Engine) -> set[str]:
    found: set[str] = set()
    for folder in engine.cdi_folders or ("/etc/cdi", "/var/run/cdi"):
        for name in probe.entries(folder):
            text = (probe.read(f"{folder}/{name}") or "") if name.endswith((".yaml", ".json")) else ""
            # The specification's YAML and JSON both put a device's name beside its containerEdits; other names are of env,
            # mounts and hooks, which are paths and never `all`, a number or a UUID.
            if re.search(r'"?kind"?:\s*"?nvidia\.com/gpu\b', text):
                devices = re.findall(
                    r'"?\bname"?:\s*"?(all|\d+(?::\d+)?|(?:GPU|MIG)-[0-9a-fA-F-]+)"?\s*,?\s*$', text, re.MULTILINE
                )
                found |= {f"nvidia.com/gpu={device}" for device in devices}
    return found


def _disk(probe: Probe, path: str) -> Disk | None:
    # df prints a line for each of these that exists, the nearest first; a command, because statvfs would wait for a dead
    # file server without end.
    candidates = [path, *(str(parent) for parent in Path(path).parents)]
    ran = probe.run("df", "-PTk", *candidates)
    for line in ran.out.splitlines()[1:2] if ran else ():
        found = re.match(r"^.*?\s(\S+)\s+(\d+)\s+(\d+)\s+(-?\d+)\s+\S+%?\s+(/.*)$", line)
        if found:
            kind, size, _, free, _ = found.groups()
            return Disk(
                path=path,
                free_gib=round(int(free) * 1024 / GIB, 1),
                size_gib=round(int(size) * 1024 / GIB, 1),
                filesystem=kind,
                network=_is_network(kind),
            )
    return None


def _is_network(filesystem: str) -> bool:
    return filesystem in _NETWORK_FILESYSTEMS or filesystem in {
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.ceph",
        "fuse.s3fs",
        "fuse.juicefs",
    }


def _mounts(probe: Probe) -> list[tuple[str, str]]:
    rows = (line.split() for line in (probe.read("/proc/self/mounts") or "").splitlines())
    # \040 is a space in a mount point's name.
    return [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) >= 3]


def _nics(probe: Probe) -> Iterator[Nic]:
    for name in probe.entries("/sys/class/infiniband"):
        port = f"/sys/class/infiniband/{name}/ports/1"
        yield Nic(
            name=name,
            link_layer=_line(probe.read(f"{port}/link_layer")) or "unknown",
            active="ACTIVE" in (probe.read(f"{port}/state") or ""),
            rate=_line(probe.read(f"{port}/rate")),
        )
