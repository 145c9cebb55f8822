"""What of a job's environment reaches a container of pyxis: the lines as bash runs them, with an `srun` that exports the
names of --export, as Slurm does, and a container that gets all of that, as pyxis does."""

import os
import subprocess
from pathlib import Path

import pytest
from recorded import BARE
from test_cluster_formats import LOCK, render

from envbuild.run.container import Container
from envbuild.run.launch import Job, Node, plan_launch
from envbuild.run.launch.slurm import srun_environment
from envbuild.settings import Settings

SRUN = """\
names=ALL
for word; do case $word in --export=*) names=${word#*=} ;; esac; done
while [ "${1#-}" != "$1" ]; do shift; done
case ,$names, in
*,ALL,*) names=$(compgen -e) ;;
*) names="${names//,/ } $(compgen -e | grep ^SLURM_)" ;;
esac
own=()
for name in $names; do if [ -n "${!name+set}" ]; then own+=("$name=${!name}"); fi; done
env -0 -i "${own[@]}" > "${0%/*}/task"
exec env -i "${own[@]}" SLURM_NODEID=0 SLURMD_NODENAME=node1 "$@"
"""
PROGRAMS = {
    "srun": SRUN,
    "scontrol": "echo node1",
    "nvidia-smi": "echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'",
    "torchrun": 'env -0 > "${0%/*}/container"',
}
JOB = {
    "HOME": "/home/me", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "node1",
    "LD_PRELOAD_OF_MINE": "x", "PYTHONPATH": "/home/me/lib", "CONDA_PREFIX": "/home/me/conda", "TMPDIR": "/local/7",
    "XDG_RUNTIME_DIR": "/run/user/1", "XDG_CACHE_HOME": "/home/me/.cache", "ENROOT_ROOTFS_WRITABLE": "y",
    "MELLANOX_VISIBLE_DEVICES": "all", "TOKEN": "s3cret",
}  # fmt: skip
OF_THE_JOB = {"LD_PRELOAD_OF_MINE", "PYTHONPATH", "CONDA_PREFIX", "TMPDIR", "TOKEN"}


@pytest.fixture
def job(tmp_path, monkeypatch) -> dict[str, str]:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in ({"PATH": f"{tmp_path}:/usr/bin:/bin"} | JOB).items():
        monkeypatch.setenv(name, value)
    return dict(os.environ)


def seen(path: Path) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in path.read_text().split("\0") if pair)


def require_what_enroot_reads_and_no_more(folder: Path) -> dict[str, str]:
    """Check what a node got, and return what the container got."""
    task, container = seen(folder / "task"), seen(folder / "container")
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "ENROOT_ROOTFS_WRITABLE", "MELLANOX_VISIBLE_DEVICES"):
        assert task[name] == JOB[name]
    # its login shell would read /etc/profile, where Debian has its own PATH
    assert task["ENROOT_LOGIN_SHELL"] == "no"
    assert not OF_THE_JOB & (task.keys() | container.keys())
    assert not [name for name in container if name.startswith("XDG_")]
    return container


def test_a_batch_script_hands_a_container_what_the_other_runtimes_do(tmp_path, job):
    script = tmp_path / "job"
    script.write_text(render("--cuda", "cpu", "--unlocked", "--format", "sbatch", "--runtime", "pyxis"))
    line = ["bash", str(script), "train.py"]
    subprocess.run(line, env=job | {"NCCL_DEBUG": "INFO"}, check=True, cwd=tmp_path)
    assert require_what_enroot_reads_and_no_more(tmp_path)["NCCL_DEBUG"] == "INFO"
    subprocess.run(line, env=job | {"ENVBUILD_PASS": "TOKEN XDG_CACHE_HOME"}, check=True, cwd=tmp_path)
    container = seen(tmp_path / "container")
    assert (container["TOKEN"], container["XDG_CACHE_HOME"]) == ("s3cret", "/home/me/.cache")
    assert "PYTHONPATH" not in container


def test_a_launch_hands_a_container_its_own_variables_alone(tmp_path, job, monkeypatch):
    container = Container(image="/shared/te.sqsh", environment=("A=1", "XDG_DATA_HOME=/data"))
    asked = Job(nodes=(Node(name="node1", slots=0),), launcher="srun", container=container, script=("t.py",), name="j")
    monkeypatch.setenv("NVIDIA_A,ALL", "a name that the list of srun reads as two")
    (step,) = plan_launch(asked, BARE.facts(), Settings(cache_dir=Path("/nowhere")))[0].steps
    subprocess.run(step.command, env=srun_environment(asked, lambda: job), check=True, cwd=tmp_path)
    found = seen(tmp_path / "container")
    assert (found["A"], found.pop("XDG_DATA_HOME")) == ("1", "/data")
    (tmp_path / "container").write_text("\0".join(f"{name}={value}" for name, value in found.items()))
    require_what_enroot_reads_and_no_more(tmp_path)


@pytest.mark.parametrize("runtime", ["apptainer", "docker"])
def test_the_other_runtimes_choose_on_the_node(runtime):
    text = render(*LOCK, "--format", "sbatch", "--runtime", runtime)
    assert 'exec "${steps[@]}" --export=ALL bash' in text


def test_no_entrypoint_runs_whatever_the_cluster_has_set():
    assert " --no-container-entrypoint " in render(*LOCK, "--format", "sbatch", "--runtime", "pyxis")
    nodes = (Node(name="node1", slots=0),)
    asked = Job(nodes=nodes, launcher="srun", container=Container(image="/s/te.sqsh"), script=("t.py",), name="j")
    (step,) = plan_launch(asked, BARE.facts(), Settings(cache_dir=Path("/nowhere")))[0].steps
    assert "--no-container-entrypoint" in step.command
