"""The machine under the engine: memory, driver and GPUs, disks, RDMA adapters."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from envbuild.host.model import Disk, Gpu, Nic
from envbuild.host.parse import line_of, match_of, number_of, output_of
from envbuild.host.probe import LocalProbe, Probe

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


def memory_of(probe: Probe) -> float | None:
    """Return the memory in GiB: what is installed, or the limit of this control group where that is less."""
    total = number_of(match_of(r"MemTotal:\s+(\d+) kB", probe.read("/proc/meminfo")))
    sizes = [total * 1024] if total else []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = number_of(line_of(probe.read(path)))
        if limit:
            sizes.append(limit)
    return round(min(sizes) / GIB, 1) if sizes else None


def gpus_of(probe: Probe) -> tuple[tuple[Gpu, ...], str | None]:
    """Return the GPUs, and the message of nvidia-smi where it failed."""
    brands = re.findall(r"^\s*Product Brand\s*:\s*(.+?)\s*$", output_of(probe, "nvidia-smi", "-q") or "", re.MULTILINE)
    # Drivers before R510 know no compute_cap and refuse the whole query.
    failed: str | None = None
    for query in ("name,memory.total,compute_cap", "name,memory.total"):
        ran = probe.run("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
        if ran is not None and ran.code == 0:
            rows = [line for line in ran.out.splitlines() if line]
            if all(line.count(",") >= query.count(",") for line in rows):
                return tuple(_gpu_rows(rows, query.count(","), brands)), None
        failed = (line_of(ran.err) or line_of(ran.out)) if ran else None
    return (), failed


def _gpu_rows(rows: Sequence[str], commas: int, brands: list[str]) -> Iterator[Gpu]:
    for number, line in enumerate(rows):
        name, memory, *capability = (field.strip() for field in line.rsplit(",", commas))
        mib = number_of(memory)
        yield Gpu(
            name=name,
            sm=capability[0].replace(".", "") if capability and re.match(r"^\d+\.\d$", capability[0]) else None,
            memory_gib=round(mib / 1024, 1) if mib else None,
            brand=brands[number] if number < len(brands) else None,
        )


def disk_of(probe: Probe, path: str) -> Disk | None:
    """Return the file system that holds `path`, or would hold it; None when df gives no answer."""
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
                network=is_network(kind),
            )
    return None


def is_network(filesystem: str) -> bool:
    """Return whether other machines share file systems of this kind, by its name in /proc/self/mounts."""
    return filesystem in _NETWORK_FILESYSTEMS or filesystem in {
        "fuse.sshfs",
        "fuse.glusterfs",
        "fuse.ceph",
        "fuse.s3fs",
        "fuse.juicefs",
    }


def mounts_of(probe: Probe) -> list[tuple[str, str]]:
    """Return where file systems are mounted, each with its kind."""
    rows = (line.split() for line in (probe.read("/proc/self/mounts") or "").splitlines())
    # \040 is a space in a mount point's name.
    return [(row[1].replace("\\040", " "), row[2]) for row in rows if len(row) >= 3]


def nics_of(probe: Probe) -> Iterator[Nic]:
    """Yield the RDMA devices, each as its first port is."""
    for name in probe.entries("/sys/class/infiniband"):
        port = f"/sys/class/infiniband/{name}/ports/1"
        yield Nic(
            name=name,
            link_layer=line_of(probe.read(f"{port}/link_layer")) or "unknown",
            active="ACTIVE" in (probe.read(f"{port}/state") or ""),
            rate=line_of(probe.read(f"{port}/rate")),
        )
