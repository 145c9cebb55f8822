"""The facts of a machine: how they are written down, and how they are read back."""

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from envbuild.errors import DataError
from envbuild.util.bounded import DATA_LIMIT, read_file
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Gpu(_Model):
    """One GPU as the driver reports it."""

    name: str
    sm: str | None = None
    """Compute capability without its dot, `90`; None where the driver is too old to report it."""
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


class Cdi(_Model):
    """The CDI specifications of NVIDIA's GPUs that one runtime reads."""

    folders: tuple[str, ...] = ()
    """Where it looks for them."""
    devices: tuple[str, ...] = ()
    """Their devices, such as `nvidia.com/gpu=all`."""
    driver: str | None = None
    """The driver that they are for, by the names of its libraries; None where they name none, or several."""
    hooks: bool = False
    """Whether one asks the runtime to run hooks, which link the driver's libraries."""


class Podman(_Model):
    """The podman of this user."""

    version: str
    rootless: bool = False
    lifts_limits: bool = False
    """Whether it can give a container limits above this user's own, unlimited locked memory among them."""
    cdi: Cdi | None = None
    """What it reads of CDI; None in facts of an earlier release, which looked where Docker looks."""


class Toolkit(_Model):
    """NVIDIA's container toolkit, which gives containers the GPUs."""

    version: str | None = None
    """Of nvidia-ctk; None when the toolkit is not installed."""
    runtime: Literal["active", "configured", "absent"] = "absent"
    """Whether the engine knows the `nvidia` runtime; `configured` is in daemon.json and waits for a restart."""
    hook: bool = False
    """Whether the hook that `--gpus` calls is installed."""
    cdi_devices: tuple[str, ...] = ()
    """Devices of the CDI specifications that Docker reads, such as `nvidia.com/gpu=all`."""
    cdi_driver: str | None = None
    """The driver that the CDI specification is for, by the names of its libraries; None where it names none, or several."""
    cdi_hooks: bool = False
    """Whether a CDI specification asks the runtime to run hooks, which link the driver's libraries."""
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
    """What nvidia-smi printed when it failed although a driver is loaded."""
    gpus: tuple[Gpu, ...] = ()
    engine: Engine = Engine(problem="no-client")
    toolkit: Toolkit = Toolkit()
    apptainer: str | None = None
    apptainer_cdi: Cdi | None = None
    """What Apptainer reads of CDI; None without one, and in facts of an earlier release, which looked where Docker looks."""
    podman: Podman | None = None
    user_namespaces: bool | None = None
    """Whether a user without root may make user namespaces, which Apptainer and podman need; None where it could not be read."""
    cache: Disk | None = None
    engine_disk: Disk | None = None
    network_mounts: tuple[NetworkMount, ...] = ()
    infiniband: tuple[Nic, ...] = ()
    infiniband_devices: bool = False
    """Whether /dev/infiniband holds an adapter's device, to be given to a container."""


def read_facts(path: Path) -> HostFacts:
    """Read facts that were collected elsewhere: `envbuild doctor --json` of that host, or its `host` object alone.

    Raises:
        DataError: the file is not that.

    """
    try:
        raw = _on_one_line(parse_json(read_file(path), limit=DATA_LIMIT))
        if isinstance(raw, dict) and isinstance(raw.get("host"), dict):
            raw = raw["host"]
        return HostFacts.model_validate(raw)
    except OSError as error:
        problem = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = shown(f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}")
    except ValueError as error:
        problem = str(error)
    raise DataError(
        f"these are not host facts: {problem}",
        where=str(path),
        hint="collect them with `envbuild doctor --json > facts.json` on that host",
    )


def _on_one_line(value: Any) -> Any:
    """Return foreign facts with each control character of their texts written as its escape."""
    if isinstance(value, str):
        return value if value.isprintable() else shown(value, len(value))
    if isinstance(value, list):
        return [_on_one_line(each) for each in value]
    if isinstance(value, dict):
        return {_on_one_line(key): _on_one_line(each) for key, each in value.items()}
    return value
