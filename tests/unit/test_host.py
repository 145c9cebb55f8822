import json
import sys
import time
from pathlib import Path

import pytest
from recorded import (
    BARE,
    CACHE,
    DRIVER_FILE,
    ENGINE,
    GEFORCE,
    H200,
    INFO,
    NFS_HOME,
    OLD_A100,
    ROOTLESS,
    SMI_DRIVER,
    SMI_NEW,
    SMI_OLD,
    Recording,
    docker_info,
)

from envbuild.errors import DataError
from envbuild.host import HostFacts, LocalProbe, ProbeResult, driver_version, facts, read_facts
from envbuild.host.gpu_access import gpu_access


def test_a_training_node() -> None:
    host = H200.facts()
    assert (host.os, host.glibc, host.arch, host.cores) == ("Ubuntu 24.04.3 LTS", "2.39", "x86_64", 16)
    assert host.memory_gib == 125.9
    assert host.driver == "580.159.04"
    assert len(host.gpus) == 8
    assert (host.gpus[0].name, host.gpus[0].sm, host.gpus[0].memory_gib) == ("NVIDIA H200", "90", 140.4)
    assert host.gpus[7].brand == "NVIDIA"
    assert not host.gpus[0].geforce
    assert (host.engine.version, host.engine.buildx, host.engine.buildkit) == ("28.5.2", "0.29.1", "v0.25.1")
    assert host.engine.containerd_image_store
    assert host.engine.lifts_limits
    assert (host.toolkit.version, host.toolkit.runtime, gpu_access(host, "docker").how) == ("1.17.8", "active", "gpus")
    assert host.infiniband[0].model_dump() == {
        "name": "mlx5_0",
        "link_layer": "InfiniBand",
        "active": True,
        "rate": "400 Gb/sec (4X NDR)",
    }
    assert host.infiniband_devices
    assert (host.cache.path, host.cache.free_gib, host.cache.network) == (str(CACHE), 64.0, False)
    assert host.engine_disk.free_gib == 200.0


def test_nothing_at_all_is_described_too() -> None:
    host = Recording().facts()
    assert host == HostFacts()
    assert gpu_access(host, "docker").how == "none"


@pytest.mark.parametrize("machine", [Recording(), BARE, ENGINE, H200, OLD_A100, GEFORCE, ROOTLESS, NFS_HOME])
def test_facts_survive_json(machine: Recording, tmp_path: Path) -> None:
    host = machine.facts()
    assert HostFacts.model_validate_json(host.model_dump_json()) == host
    file = tmp_path / "facts.json"
    file.write_text(host.model_dump_json())
    assert read_facts(file) == host
    file.write_text(json.dumps({"host": host.model_dump(mode="json"), "cells": []}))
    assert read_facts(file) == host


def test_an_old_driver_reports_names_without_capabilities() -> None:
    host = OLD_A100.facts()
    assert host.driver == "450.80.02"
    assert (host.gpus[0].name, host.gpus[0].sm, host.gpus[0].brand) == ("A100-SXM4-40GB", None, "Tesla")
    assert host.toolkit.nvidia_docker2
    assert gpu_access(host, "docker").how == "none"


def test_a_driver_without_a_proc_entry_is_asked_of_nvidia_smi() -> None:
    assert driver_version(BARE.but(commands={SMI_DRIVER: "560.94\n560.94\n"})) == "560.94"
    failed = ProbeResult(code=9, out="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    assert driver_version(BARE.but(commands={SMI_DRIVER: failed})) is None
    assert driver_version(BARE) is None


def test_a_driver_that_was_upgraded_under_its_module() -> None:
    smi = ProbeResult(
        code=18, out="Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 570.172\n"
    )
    machine = ENGINE.but(
        commands={SMI_NEW: smi, SMI_OLD: smi}, files={"/proc/driver/nvidia/version": DRIVER_FILE.format("560.35.05")}
    )
    host = machine.facts()
    assert (host.driver, host.gpus) == ("560.35.05", ())
    assert "version mismatch" in host.driver_problem


def test_cdi_devices_and_a_consumer_card() -> None:
    host = GEFORCE.facts()
    assert host.toolkit.cdi_devices == ("nvidia.com/gpu=0", "nvidia.com/gpu=all")
    assert gpu_access(host, "docker").how == "cdi"
    assert host.gpus[0].geforce
    no_cdi = GEFORCE.but(commands={INFO: docker_info(CDISpecDirs=None)}).facts()
    assert no_cdi.toolkit.cdi_devices
    assert gpu_access(no_cdi, "docker").how == "none"


def test_a_runtime_in_daemon_json_that_the_engine_has_not_read() -> None:
    machine = ENGINE.but(
        files={"/etc/docker/daemon.json": '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}'}
    )
    assert machine.facts().toolkit.runtime == "configured"
    assert ENGINE.but(files={"/etc/docker/daemon.json": "{ broken"}).facts().toolkit.runtime == "absent"


def test_an_engine_that_does_not_answer() -> None:
    down = docker_info(ServerVersion="", DriverStatus=None, Runtimes=None, SecurityOptions=None, CDISpecDirs=None)
    cannot = ProbeResult(code=1, out=down, err="Cannot connect to the Docker daemon at unix:///var/run/docker.sock.\n")
    engine = BARE.but(commands={INFO: cannot}).facts().engine
    assert (engine.problem, engine.client, engine.version) == ("no-answer", "28.5.2", None)
    denied = ProbeResult(
        code=1, out=down, err="permission denied while trying to connect to the Docker daemon socket\n"
    )
    assert BARE.but(commands={INFO: denied}).facts().engine.problem == "permission-denied"
    hangs = BARE.but(commands={("docker", "--version"): "Docker version 28.5.2, build x\n"})
    assert hangs.facts().engine.problem == "no-answer"
    assert BARE.facts().engine.problem == "no-client"


def test_rootless_and_remote_engines() -> None:
    host = ROOTLESS.facts()
    assert host.engine.rootless
    assert host.engine_disk.path == "/home/me/.local/share/docker"
    remote = Recording(commands={("docker", "--host", "ssh://me@builder", *INFO[1:]): docker_info()})
    found = remote.facts(engine_host="ssh://me@builder")
    assert found.engine.version == "28.5.2"
    assert found.engine_disk is None


def test_network_file_systems() -> None:
    host = NFS_HOME.facts()
    assert host.cache.network
    assert [(m.path, m.filesystem) for m in host.network_mounts] == [("/home", "nfs4"), ("/scratch one", "lustre")]


def test_a_control_group_limits_the_memory() -> None:
    assert BARE.but(files={"/sys/fs/cgroup/memory.max": str(8 << 30)}).facts().memory_gib == 8.0
    assert BARE.but(files={"/sys/fs/cgroup/memory.max": "max\n"}).facts().memory_gib == 125.9


def test_an_rdma_manager_without_an_adapter_is_no_device() -> None:
    assert not BARE.but(folders={"/dev/infiniband": ("rdma_cm",)}).facts().infiniband_devices


def test_an_engine_that_may_not_lift_limits() -> None:
    status = {"/proc/11596/status": "CapEff:\t000001fffeffffff\n"}
    assert H200.but(files=status).facts().engine.lifts_limits is False
    unlimited = {"/proc/11596/limits": "Max locked memory         unlimited            unlimited            bytes\n"}
    assert H200.but(files=status | unlimited).facts().engine.lifts_limits is True
    assert ENGINE.facts().engine.lifts_limits is None


@pytest.mark.parametrize("text", ["", "[]", '{"cells": 1, "nonsense": 2}', '{"gpus": [{"sm": "90"}]}', '{"driver": 5}'])
def test_a_file_that_holds_no_facts_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.json"
    file.write_text(text)
    with pytest.raises(DataError, match="not host facts") as caught:
        read_facts(file)
    assert caught.value.where == str(file)


def test_the_local_probe_is_bounded_and_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = LocalProbe()
    assert probe.run("no-such-command-anywhere") is None
    assert probe.run(sys.executable, "-c", "print('x'); raise SystemExit(3)") == ProbeResult(code=3, out="x\n")
    assert probe.read(str(tmp_path / "absent")) is None
    assert probe.entries(str(tmp_path / "absent")) == ()
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    assert probe.entries(str(tmp_path)) == ("a", "b")
    monkeypatch.setattr("envbuild.host.probe.PROBE_SECONDS", 0.2)
    start = time.monotonic()
    assert probe.run("sh", "-c", "sleep 20 & sleep 20") is None
    assert time.monotonic() - start < 5


def test_this_machine_can_be_described() -> None:
    assert facts().kernel
