import json
import os
from pathlib import Path
from typing import Any

import pytest
from recorded import BARE, ENGINE, GEFORCE, H200, INFO, NFS_HOME, OLD_A100, ROOTLESS, Recording, df, docker_info

from envbuild.cli import main
from envbuild.doctor.diagnosis import AREAS, MISSING, Area, diagnose
from envbuild.doctor.reach import Reach, cuda_reach, gpu_release, stack_reach
from envbuild.evidence.refs import evidence_refs
from envbuild.host import Gpu
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.solve import solve


def areas(machine: Recording) -> dict[str, Area]:
    return {area.name: area for area in diagnose(machine.facts())}


def fixes(area: Area) -> str:
    return "\n".join(fix for finding in area.findings for fix in finding.fix)


def cells(machine: Recording) -> dict[str, Reach]:
    return {reach.name: reach for reach in cuda_reach(load_matrix(), machine.facts())}


def test_a_training_node_has_everything_that_training_needs() -> None:
    found = areas(H200)
    others = {"apptainer", "podman"}  # what runs images in place of Docker
    assert tuple(found) == AREAS
    assert {name: area.status for name, area in found.items() if name not in others} == dict.fromkeys(
        [name for name in AREAS if name not in others], "ok"
    )
    assert found["gpu"].findings[0].what == "8 x NVIDIA H200, sm_90, 140.4 GiB, driver 580.159.04"


def test_no_engine_names_the_script_on_debian_and_the_manual_elsewhere() -> None:
    engine = areas(BARE)["engine"]
    assert engine.status == MISSING
    assert fixes(engine) == "scripts/install-engine"
    rocky = BARE.but(files={"/etc/os-release": 'PRETTY_NAME="Rocky Linux 9"\nID="rocky"\n'})
    assert "docs.docker.com" in fixes(areas(rocky)["engine"])


def test_a_builder_that_cannot_set_the_times_of_files() -> None:
    for version, good in (("v0.12.5", False), ("v0.13.0", True), ("v0.25.1", True), ("unknown", True)):
        inspected = {("docker", "buildx", "inspect"): f"Name: default\nNodes:\nBuildKit version: {version}\n"}
        engine = areas(ENGINE.but(commands=inspected))["engine"]
        assert (engine.status == "ok") is good
        assert ("older than 0.13" in " ".join(finding.what for finding in engine.findings)) is not good


@pytest.mark.parametrize("version", ["0.15.0", "v0.29.1+ds1", "v1.0.0", "", "unknown", None])
def test_a_buildx_that_builds_or_does_not_say(version: str | None) -> None:
    info = docker_info(ClientInfo={"Version": "28.5.2", "Plugins": [{"Name": "buildx", "Version": version}]})
    found = areas(ENGINE.but(commands={INFO: info}))["engine"].findings
    assert not [finding for finding in found if "older than" in finding.what]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ServerVersion": "26.1.5"}, "older than 28"),
        ({"DriverStatus": [["Backing Filesystem", "extfs"]]}, "containerd image store"),
        ({"ClientInfo": {"Version": "28.5.2", "Plugins": None}}, "no buildx"),
        (
            {"ClientInfo": {"Plugins": [{"Name": "buildx", "Version": "v0.13.1-desktop.1"}]}},
            "buildx v0.13.1-desktop.1 is older",
        ),
        ({"ClientInfo": {"Plugins": [{"Name": "buildx", "Version": "0.14.1"}]}}, "buildx 0.14.1 is older than 0.15"),
    ],
)
def test_an_engine_that_cannot_build(changes: dict, says: str) -> None:
    engine = areas(ENGINE.but(commands={INFO: docker_info(**changes)}))["engine"]
    assert engine.status == MISSING
    assert says in " ".join(finding.what for finding in engine.findings)
    assert fixes(engine)


def test_the_toolkit_is_fixed_with_the_current_commands() -> None:
    old = areas(OLD_A100)["toolkit"]
    assert old.status == MISSING
    assert "sudo nvidia-ctk runtime configure --runtime=docker" in fixes(old)
    assert "remove nvidia-docker2" in fixes(old)
    installed = OLD_A100.but(
        commands={("nvidia-ctk", "--version"): "NVIDIA Container Toolkit CLI version 1.17.8\n"},
        folders={"/usr/bin": ()},
    )
    assert "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml" in fixes(areas(installed)["toolkit"])
    assert "install -y" not in fixes(areas(installed)["toolkit"])
    waiting = installed.but(files={"/etc/docker/daemon.json": '{"runtimes": {"nvidia": {}}}'})
    assert fixes(areas(waiting)["toolkit"]) == "sudo systemctl restart docker"


def test_rootless_configures_the_users_own_engine() -> None:
    found = areas(ROOTLESS)
    assert found["engine"].status == "warn"
    assert "$HOME/.config/docker/daemon.json" in fixes(found["toolkit"])
    assert "no-cgroups" in fixes(found["toolkit"])
    assert found["disk"].status == "warn"


def test_disks_and_memory() -> None:
    assert "ENVBUILD_CACHE_DIR" in fixes(areas(NFS_HOME)["disk"])
    assert areas(ENGINE.but(commands={("df", "/var/lib/docker"): df("ext4", 9)}))["disk"].status == MISSING
    assert areas(ENGINE.but(commands={("df", "/var/lib/docker"): df("nfs4", 900)}))["disk"].status == MISSING
    assert areas(BARE.but(files={"/proc/meminfo": "MemTotal: 3000000 kB\n"}))["memory"].status == MISSING
    assert areas(BARE.but(files={"/proc/meminfo": "MemTotal: 6000000 kB\n"}))["memory"].status == "warn"


def test_driver_verdicts_of_a_new_driver() -> None:
    found = cells(H200)
    assert found["cpu"].runs
    assert (found["CUDA 12.6"].verdict, found["CUDA 13.0"].verdict) == ("full", "full")
    assert found["CUDA 13.2"].verdict == "minor-version"
    assert found["CUDA 12.6"].gpu == "sm_90"
    assert found["CUDA 12.6"].runs
    assert found["CUDA 12.6"].cell.startswith("cu126-")
    # sm_90 came with CUDA 11.8.
    assert found["CUDA 11.7"].cell is None
    assert not found["CUDA 11.7"].runs
    assert "sm_90" in found["CUDA 11.7"].why
    assert found["CUDA 11.7"].source


def test_driver_verdicts_of_an_old_driver_whose_gpu_is_known_by_name_only() -> None:
    found = cells(OLD_A100)
    assert found["CUDA 12.6"].gpu == "sm_80"
    assert found["CUDA 12.6"].verdict == "refused"
    assert not found["CUDA 12.6"].runs
    assert found["CUDA 11.8"].verdict == "minor-version"
    assert found["CUDA 11.8"].runs


def test_a_consumer_card_gets_no_forward_compatibility() -> None:
    data_center = GEFORCE.but(
        commands={
            (
                "nvidia-smi",
                "--query-gpu=name,memory.total,compute_cap",
                "--format=csv,noheader,nounits",
            ): "NVIDIA L40S, 46068, 8.9\n",
            ("nvidia-smi", "-q"): "    Product Brand                  : NVIDIA\n",
        }
    )
    assert cells(data_center)["CUDA 13.0"].verdict == "needs-compat"
    assert cells(GEFORCE)["CUDA 13.0"].verdict == "refused"
    assert cells(GEFORCE)["CUDA 12.4"].verdict == "full"


def test_without_a_gpu_cells_build_here_and_run_elsewhere() -> None:
    found = cells(BARE)
    assert found["cpu"].runs
    assert found["CUDA 13.0"].cell
    assert not found["CUDA 13.0"].runs
    assert found["CUDA 13.0"].verdict is None


def test_two_kinds_of_gpu_are_judged_each() -> None:
    query = ("nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits")
    mixed = H200.but(
        commands={query: "Tesla V100-SXM2-32GB, 32768, 7.0\nNVIDIA H200, 143771, 9.0\nNVIDIA H200, 143771, 9.0\n"}
    )
    found = [(reach.gpu, reach.runs) for reach in cuda_reach(load_matrix(), mixed.facts()) if reach.name == "CUDA 13.0"]
    assert found == [("sm_70", False), ("sm_90", True)]


@pytest.mark.parametrize(
    ("gpu", "release"),
    [
        (Gpu(name="NVIDIA H200", sm="90"), "sm_90"),
        (Gpu(name="Tesla T4"), "sm_75"),
        (Gpu(name="NVIDIA L40S"), "sm_89"),
        (Gpu(name="A100-SXM4-40GB"), "sm_80"),
        (Gpu(name="Something New", sm="999"), None),
        (Gpu(name="Something New"), None),
    ],
)
def test_gpus_are_found_on_the_axis(gpu: Gpu, release: str | None) -> None:
    found = gpu_release(load_matrix(), gpu)
    assert (found.version if found else None) == release


def test_a_stack_out_of_reach_says_so() -> None:
    stack = {"old": {"base": "ngc-20.12"}}
    (reach,) = stack_reach(load_matrix(), H200.facts(), stack)
    assert (reach.name, reach.gpu, reach.runs, reach.cell) == ("old", "sm_90", False, None)
    assert "sm_90" in reach.why
    (reach,) = stack_reach(load_matrix(), OLD_A100.facts(), stack)
    assert reach.runs


class Doctor:
    """The command, judging a recorded machine."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file = folder / "facts.json"
        self.capsys = capsys

    def __call__(self, machine: Recording, *flags: str) -> tuple[int, str, str]:
        self.file.write_text(machine.facts().model_dump_json())
        with pytest.raises(SystemExit) as left:
            main(["doctor", "--remote-facts", str(self.file), *flags])
        return left.value.code, *self.capsys.readouterr()


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    return Doctor(tmp_path, capsys)


def test_the_report_and_its_json(doctor: Doctor) -> None:
    code, out, _ = doctor(H200)
    assert code == 0
    assert "8 x NVIDIA H200" in out
    assert "CUDA 12.6       full           cu126-" in out
    code, out, _ = doctor(H200, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["host"]["driver"] == "580.159.04"
    assert answer["areas"]["gpu"]["status"] == "ok"
    assert {row["name"]: row["driver_verdict"] for row in answer["cells"]}["CUDA 13.2"] == "minor-version"
    assert answer["matrix"].startswith("sha256:")


@pytest.mark.parametrize("machine", [H200, BARE], ids=["h200", "bare"])
def test_each_stack_is_judged_as_resolve_does(doctor: Doctor, machine: Recording, capsys: Any) -> None:
    answer = json.loads(doctor(machine, "--json")[1])
    gpu = ["--gpu", "h200"] if machine.facts().gpus else []
    for row in answer["stacks"]:
        with pytest.raises(SystemExit) as left:
            main(["resolve", "--stack", row["name"], *gpu, "--json"])
        solved = json.loads(capsys.readouterr().out)
        assert (row["name"], row["cell"]) == (row["name"], None if left.value.code else solved["id"])


def test_facts_of_somebody_else_are_read_within_bounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep, pipe = tmp_path / "deep.json", tmp_path / "pipe"
    deep.write_text("[" * 200_000)
    os.mkfifo(pipe)
    for path, says in ((deep, "nested deeper"), (pipe, "no regular file"), (Path("/dev/zero"), "no regular file")):
        with pytest.raises(SystemExit) as left:
            main(["doctor", "--remote-facts", str(path)])
        assert (left.value.code, says in capsys.readouterr().err) == (2, True)


def test_a_name_in_facts_makes_no_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"gpus": [{"name": "a\nok    engine  forged", "sm": "90"}]}))
    with pytest.raises(SystemExit):
        main(["doctor", "--remote-facts", str(path)])
    assert not any(line.startswith("ok    engine") for line in capsys.readouterr().out.splitlines())


def test_a_podman_that_is_set_must_be_there() -> None:
    podman = {area.name: area for area in diagnose(BARE.facts(), podman=True)}["podman"]
    assert (podman.status, {a.name: a for a in diagnose(BARE.facts())}["podman"].status) == (MISSING, "absent")


def test_what_is_missing_is_no_failure_unless_required(doctor: Doctor) -> None:
    assert doctor(H200, "--require", "engine,gpu,toolkit,infiniband")[0] == 0
    code, _, err = doctor(BARE, "--require", "engine,gpu")
    assert code == 8
    assert "there is no container engine; no NVIDIA driver is loaded" in err
    assert "scripts/install-engine" in err


def test_an_unknown_area_is_named(doctor: Doctor) -> None:
    code, _, err = doctor(BARE, "--require", "engin")
    assert code == 2
    assert "there is no area 'engin'" in err
    assert "engine, gpu, toolkit" in err


def test_this_machine_with_its_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("envbuild.host.collect.LocalProbe", lambda: ENGINE)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ENVBUILD_INDEX_URL", "https://me:s3cret@index.example/simple")
    with pytest.raises(SystemExit) as left:
        main(["doctor", "--json"])
    out, err = capsys.readouterr()
    assert left.value.code == 0
    assert json.loads(out)["settings"]["index_url"] == {
        "value": "https://***@index.example/simple",
        "origin": "ENVBUILD_INDEX_URL",
    }
    assert "s3cret" not in out + err
    assert json.loads(out)["host"]["cache"] is None


def test_the_cells_named_are_those_that_image_would_build() -> None:
    """Evidence decides there too."""
    evidence = evidence_refs()
    matrix = load_matrix()
    wanted = solve(matrix, Request(pins=(Pin(axis="cuda", spec="13.0", origin="--cuda"),)), evidence).cell
    (found,) = [r for r in cuda_reach(matrix, ENGINE.facts(), evidence) if r.name == "CUDA 13.0"]
    assert found.cell == wanted.id
    (plain,) = [r for r in cuda_reach(matrix, ENGINE.facts()) if r.name == "CUDA 13.0"]
    assert plain.cell != wanted.id


def test_a_stack_for_another_board_does_not_run_here() -> None:
    """A stack that names a data-center GPU, on a machine with a workstation board."""
    query = next(command for command in H200.commands if "--query-gpu" in str(command))
    workstation = H200.but(commands={query: "NVIDIA RTX 6000 Ada Generation, 49140, 8.9\n"})
    (reach,) = stack_reach(load_matrix(), workstation.facts(), {"a stack": {"gpu": "l40s"}})
    assert not reach.runs
    assert "l40s is no workstation board" in reach.why
