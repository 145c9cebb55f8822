"""The programs that start containers: the Docker engine, and NVIDIA's toolkit that gives them the GPUs."""

import csv
import os
import re
from collections.abc import Iterator

from envbuild.host.model import Cdi, Engine, Podman, Toolkit
from envbuild.host.parse import json_object, line_of, match_of, number_of, output_of
from envbuild.host.probe import Probe
from envbuild.settings import Settings

_DEVICE = r"all|\d+(?::\d+)?|(?:GPU|MIG)-[0-9a-fA-F-]+"
"""A device of NVIDIA's specifications: all GPUs, a number, a part of one, an id."""
_FOLDERS = ("/etc/cdi", "/var/run/cdi")
"""Where CDI's own library looks (its pkg/cdi/spec-dirs.go), and each runtime that sets nothing else."""


def engine_of(probe: Probe, settings: Settings, *, builder: bool = True) -> Engine:
    """Return the engine that the settings name, or why there is none; `builder` asks for its BuildKit, too."""
    docker = settings.docker_command
    ran = probe.run(*docker, "info", "--format", "{{json .}}")
    if ran is None:
        # No such command, or an engine that hangs: only the first has no version.
        client = match_of(r"version ([\w.+~-]+)", output_of(probe, docker[0], "--version"))
        return Engine(client=client, problem="no-answer" if client else "no-client")
    info = json_object(ran.out)
    client_info = info.get("ClientInfo") or {}
    plugins = {p.get("Name"): p.get("Version") for p in client_info.get("Plugins") or ()}
    client = client_info.get("Version")
    if not info.get("ServerVersion"):
        output = ran.err + " ".join(info.get("ServerErrors") or ())
        denied = "permission denied" in output.lower()
        return Engine(
            client=client, buildx=plugins.get("buildx"), problem="permission-denied" if denied else "no-answer"
        )
    inspect = (*docker, "buildx", "inspect", *([settings.builder] if settings.builder else []))
    return Engine(
        client=client,
        version=info["ServerVersion"],
        containerd_image_store=any("containerd.snapshotter" in str(row[-1]) for row in info.get("DriverStatus") or ()),
        buildx=plugins.get("buildx"),
        buildkit=match_of(r"BuildKit version:\s*(\S+)", output_of(probe, *inspect) or "") if builder else None,
        rootless=any("name=rootless" in option for option in info.get("SecurityOptions") or ()),
        lifts_limits=_lifts_limits(probe),
        root=info.get("DockerRootDir"),
        runtimes=tuple(sorted(info.get("Runtimes") or ())),
        cdi_folders=tuple(info.get("CDISpecDirs") or ()),
    )


def _lifts_limits(probe: Probe) -> bool | None:
    """Whether dockerd may raise a hard limit: it has CAP_SYS_RESOURCE, or none to raise. None when it is not seen from here."""
    pid = number_of(line_of(probe.read("/run/docker.pid") or probe.read("/var/run/docker.pid")))
    status, limits = (probe.read(f"/proc/{pid}/{name}") or "" for name in ("status", "limits"))
    capabilities = match_of(r"CapEff:\s*([0-9a-f]+)", status)
    if pid is None or capabilities is None:
        return None
    return bool(int(capabilities, 16) >> 24 & 1) or match_of(r"Max locked memory\s+\S+\s+(\S+)", limits) == "unlimited"


def podman_of(probe: Probe) -> Podman | None:
    """Return the podman of this user, or None where there is none or it does not answer."""
    info = json_object(output_of(probe, "podman", "info", "--format", "json"))
    version = (info.get("version") or {}).get("Version")
    if not isinstance(version, str):
        return None
    rootless = bool(((info.get("host") or {}).get("security") or {}).get("rootless"))
    capabilities = match_of(r"CapEff:\s*([0-9a-f]+)", probe.read("/proc/self/status") or "")
    lifts = not rootless and bool(int(capabilities or "0", 16) >> 24 & 1)  # CAP_SYS_RESOURCE; podman is our own child
    unlimited = match_of(r"Max locked memory\s+\S+\s+(\S+)", probe.read("/proc/self/limits")) == "unlimited"
    cdi = _cdi_in(probe, _podmans_folders(probe))
    return Podman(version=version, rootless=rootless, lifts_limits=lifts or unlimited, cdi=cdi)


def _podmans_folders(probe: Probe) -> tuple[str, ...]:
    """Return where podman looks for CDI specifications.

    podman before 5.5 looks in CDI's own two folders. From then on it has a flag, whose default its help states: what all of
    its containers.conf files set as `cdi_spec_dirs`, or its own (`/etc/cdi` alone in 5.5; cmd/podman/root.go).
    """
    flag = match_of(r"(?m)^\s+--cdi-spec-dir\b(.*)$", output_of(probe, "podman", "--help"))
    if flag is None:
        return _FOLDERS
    stated = match_of(r"\(default \[(.*)\]\)$", flag)
    try:
        return tuple(next(csv.reader([stated]))) if stated else ()
    except (csv.Error, StopIteration):
        return _FOLDERS


def apptainer_cdi(probe: Probe) -> Cdi:
    """Return what Apptainer reads of CDI: it has no setting for its folders, and no run here gives it `--cdi-dirs`."""
    return _cdi_in(probe, _FOLDERS)


def toolkit_of(probe: Probe, engine: Engine) -> Toolkit:
    """Return what of NVIDIA's container toolkit is installed, and what the engine knows of it."""
    configured = any(
        "nvidia" in (json_object(probe.read(path)).get("runtimes") or {})
        for path in ("/etc/docker/daemon.json", os.path.expanduser("~/.config/docker/daemon.json"))  # noqa: PTH111
    )
    cdi = _cdi_in(probe, engine.cdi_folders or _FOLDERS)
    return Toolkit(
        version=match_of(r"version (\S+)", output_of(probe, "nvidia-ctk", "--version")),
        runtime="active" if "nvidia" in engine.runtimes else "configured" if configured else "absent",
        hook=bool({"nvidia-container-runtime-hook", "nvidia-container-toolkit"} & set(probe.entries("/usr/bin"))),
        cdi_devices=cdi.devices,
        cdi_driver=cdi.driver,
        cdi_hooks=cdi.hooks,
        nvidia_docker2="nvidia-docker" in probe.entries("/usr/bin"),
    )


def _cdi_in(probe: Probe, folders: tuple[str, ...]) -> Cdi:
    """Return what a runtime that looks in `folders` reads of CDI."""
    specifications = tuple(_specifications(probe, folders))
    drivers = {found for text in specifications for found in re.findall(r"libcuda\.so\.(\d{3,}\.[\d.]*\d)", text)}
    return Cdi(
        folders=folders,
        devices=tuple(sorted({f"nvidia.com/gpu={name}" for text in specifications for name in _devices(text)})),
        driver=drivers.pop() if len(drivers) == 1 else None,
        hooks=any("createContainer" in text or "createRuntime" in text for text in specifications),
    )


def _specifications(probe: Probe, folders: tuple[str, ...]) -> Iterator[str]:
    """Yield the text of each CDI specification of NVIDIA's GPUs."""
    for folder in folders:
        for name in probe.entries(folder):
            text = (probe.read(f"{folder}/{name}") or "") if name.endswith((".yaml", ".json")) else ""
            if re.search(r'"?\bkind"?:\s*["\']?nvidia\.com/gpu["\']?\s*(,|\}|$)', text, re.MULTILINE):
                yield text


def _devices(text: str) -> Iterator[str]:
    """Yield the names of a specification's devices."""
    listed = json_object(text).get("devices")
    if isinstance(listed, list):  # nvidia-ctk writes JSON as one line
        names = (str(each.get("name", "")) for each in listed if isinstance(each, dict))
        yield from (name for name in names if re.fullmatch(_DEVICE, name))
        return
    # The specification's YAML puts a device's name next to its containerEdits; other names are of env, mounts and hooks, which
    # are paths and never `all`, a number or a UUID.
    yield from re.findall(rf'"?\bname"?:\s*["\']?({_DEVICE})["\']?\s*,?\s*$', text, re.MULTILINE)
