"""`launch --launcher srun`: what each node starts, as bash runs it there, with programs of Slurm, NVIDIA and the runtimes that
run or write down what they are given."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from recorded import BARE, H200

from envbuild.errors import UsageError
from envbuild.run.container import Container, Mount
from envbuild.run.launch import Job, Node, plan_launch, run_launch
from envbuild.settings import Settings

SETTINGS = Settings(cache_dir=Path("/nowhere"))
NODES = (Node(name="node2", slots=0), Node(name="node1", slots=0))
TASK = """\
while [ "${1#-}" != "$1" ]; do shift; done
# as Slurm: the nodes in the order of their names
code=0
for id in 0 1; do
    SLURM_NODEID=$id SLURMD_NODENAME=node$((id + 1)) "$@" || code=$?
done
exit $code
"""
WRITES = """\
PATH=$TOOLS
{ printf '%s ' "${0##*/}" "$@" | tr '\\n' ' '; echo; env | grep -E '^(APPTAINERENV_|TOKEN=|ENVBUILD_)'; } >> "$LOG"
"""
TOOLS = ("bash", "cat", "env", "grep", "id", "mkdir", "mktemp", "rm", "sh", "tr", "uname")
TWO_GPUS = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)'"
NO_GPU = "echo 'No devices were found'; exit 6"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Give a function that launches from a login node onto nodes with these programs; it returns the code and what ran."""
    programs = tmp_path / "programs"
    programs.mkdir()
    log = tmp_path / "log"
    log.touch()
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(str(shutil.which(tool)))
    monkeypatch.setenv("PATH", f"{programs}:{tools}")
    monkeypatch.setenv("TOOLS", str(tools))
    monkeypatch.setenv("LOG", str(log))
    for name in [name for name in os.environ if name.startswith(("SLURM", "CUDA_VISIBLE"))]:
        monkeypatch.delenv(name)

    def launch(machine=BARE, *, nvidia: str | None = TWO_GPUS, runtimes=("docker", "apptainer"), nodes=NODES, **asked):
        texts = {"srun": TASK} | dict.fromkeys(runtimes, WRITES)
        if nvidia is not None:
            texts["nvidia-smi"] = nvidia
        for name, text in texts.items():
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
        container = Container(**{"image": "img"} | asked)
        job = Job(nodes=nodes, launcher="srun", container=container, script=("train.py", "--lr", "0.1"), name="job")
        code = run_launch(job, machine.facts(), SETTINGS)
        return code, log.read_text()

    return launch


@pytest.fixture
def sandbox(tmp_path: Path) -> str:
    (tmp_path / "image" / ".singularity.d").mkdir(parents=True)
    return str(tmp_path / "image")


def lines(log: str, program: str) -> list[list[str]]:
    return [shlex.split(line.replace('"', "")) for line in log.splitlines() if line.startswith(f"{program} ")]


def test_a_login_node_without_a_gpu_takes_none_away_from_the_nodes(cluster) -> None:
    code, log = cluster(BARE)
    assert code == 0
    ran = lines(log, "docker")
    assert len(ran) == 2
    for line in ran:
        assert line[line.index("--gpus") + 1] == "all"
    assert log.count("ENVBUILD_SLOTS=2\n") == 2  # and each counts its own


def test_the_same_with_apptainer(cluster, sandbox) -> None:
    code, log = cluster(BARE, image=sandbox)
    assert code == 0
    assert [("--nv" in line, sandbox in line) for line in lines(log, "apptainer")] == [(True, True)] * 2


@pytest.mark.parametrize("machine", [BARE, H200])
@pytest.mark.parametrize("nvidia", [NO_GPU, None])
def test_a_node_without_a_gpu_starts_nothing_and_is_named(cluster, capfd, machine, nvidia, sandbox) -> None:
    for image in ("img", sandbox):
        code, log = cluster(machine, nvidia=nvidia, image=image)
        assert (code, log) == (8, "")
        err = capfd.readouterr().err
        assert "envbuild: node1: no GPU answers here" in err
        assert "--gpus none" in err


def test_without_gpus_where_that_is_asked_for(cluster) -> None:
    code, log = cluster(H200, nvidia=TWO_GPUS, gpus="none")
    assert code == 0
    for line in lines(log, "docker"):
        assert "--gpus" not in line
        assert "NVIDIA_VISIBLE_DEVICES=void" in line
    assert log.count("ENVBUILD_SLOTS=1\n") == 2


def test_the_gpus_that_slurm_gave_and_no_others(cluster, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_GPUS", "1")
    _, log = cluster(BARE)
    assert [line[line.index("--gpus") + 1] for line in lines(log, "docker")] == ["device=1"] * 2
    assert log.count("ENVBUILD_SLOTS=1\n") == 2


def test_numbers_that_a_node_does_not_have(cluster, capfd) -> None:
    code, log = cluster(BARE, gpus="0,2")
    assert (code, log) == (8, "")
    assert "node1: there is no GPU 2: this node has 2" in capfd.readouterr().err
    assert cluster(BARE, gpus="0,1")[0] == 0


def test_ranks_follow_the_hostfile_and_not_slurms_order(cluster) -> None:
    _, log = cluster(BARE)
    names = [line[line.index("--name") + 1] for line in lines(log, "docker")]
    assert names == ["job-1", "job-0"]  # node1 starts first and is the second of the hostfile
    inner = lines(log, "docker")[0]
    assert "--master-addr=node2" in inner
    assert "--nnodes=2" in inner


def test_a_node_without_the_runtime_is_named(cluster, sandbox, capfd) -> None:
    for image, program in (("img", "docker"), (sandbox, "apptainer")):
        assert cluster(BARE, image=image, runtimes=())[0] == 8
        assert f"node1: there is no {program}" in capfd.readouterr().err


def test_values_reach_the_container_by_no_command_line(cluster, sandbox, monkeypatch) -> None:
    value = "a b'c\"$HOME"
    monkeypatch.setenv("TOKEN", value)
    for image, sign in (("img", "TOKEN="), (sandbox, "APPTAINERENV_TOKEN=")):
        code, log = cluster(BARE, image=image, environment=("TOKEN", "PATH=/job/bin"))
        assert code == 0  # a PATH of the job is none of the node's
        assert sign + value in log.splitlines()
        assert value not in " ".join(word for line in lines(log, "docker") for word in line)


def test_a_squashfs_runs_by_pyxis(tmp_path: Path) -> None:
    mounts = (Mount(source=Path("/data"), target="/d", read_only=True), Mount(source=Path("/w"), target="/w"))
    container = Container(image="/shared/te.sqsh", mounts=mounts, environment=("A=1",), workdir="/w")
    job = Job(nodes=NODES, launcher="srun", container=container, script=("train.py",), name="job")
    (step,) = plan_launch(job, BARE.facts(), SETTINGS)[0].steps
    assert {
        "--container-image=/shared/te.sqsh", "--container-mounts=/data:/d:ro,/w:/w", "--container-workdir=/w",
        "--container-env=A", "--no-container-mount-home",
    } <= set(step.command)  # fmt: skip
    text, words = step.command[-9], step.command[-7:]
    (tmp_path / "torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{TWO_GPUS}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "node1", "SLURM_NODEID": "0"}
    ran = subprocess.run(["sh", "-c", text, "sh", *words], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[:4] == ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=node2"]


def test_what_pyxis_and_apptainer_cannot_do(tmp_path: Path, sandbox: str) -> None:
    (tmp_path / "a:b").mkdir()
    mount = Mount(source=tmp_path / "a:b", target="/d")
    for asked, says in (
        (Container(image="/shared/te.sqsh", mounts=(mount,)), "colon"),
        (Container(image=sandbox, network="none"), "network"),
    ):
        job = Job(nodes=NODES, launcher="srun", container=asked, script=("train.py",), name="job")
        with pytest.raises(UsageError, match=says):
            plan_launch(job, BARE.facts(), SETTINGS)
