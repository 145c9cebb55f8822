"""`launch --launcher srun`: what each node starts, as bash runs it there, with programs of Slurm, NVIDIA and the runtimes that
run or write down what they are given."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from recorded import BARE, H200

from envbuild.errors import UsageError
from envbuild.run.container import Container, Mount
from envbuild.run.launch import Job, Node, plan_launch, run_launch
from envbuild.run.launch.slurm import srun_environment
from envbuild.settings import Settings

SETTINGS = Settings(cache_dir=Path("/nowhere"))
NODES = (Node(name="node2", slots=0), Node(name="node1", slots=0))
TASK = """\
# as Slurm: the number of an allocation counts where a step has none, and nodes come in the order of their names
tasks=${SLURM_NTASKS:-2} beats=no
while [ "${1#-}" != "$1" ]; do
    case $1 in
    --ntasks=*) tasks=${1#*=} ;;
    --overlap) beats=yes ;;
    esac
    shift
done
[ $beats = no ] || { echo "$tasks" >> "$LOG.beats"; exit; }
while [ -n "${SLURM_JOB_ID:-}" ] && [ ! -s "$LOG.beats" ]; do sleep 0.05; done
code=0
for ((id = 0; id < tasks; id++)); do
    SLURM_NODEID=$id SLURMD_NODENAME=node$((id + 1)) "$@" || code=$?
done
exit $code
"""
WRITES = """\
PATH=$TOOLS
{ printf '%s ' "${0##*/}" "$@" | tr '\\n' ' '; echo; env | grep -E '^(APPTAINERENV_|TOKEN=|ENVBUILD_)'; } >> "$LOG"
"""
# the engine: a container of `img` has the variables that --env names, and nothing else of the client
RUNS = """\
PATH=$TOOLS:$PATH
for word in "$@"; do printf '%s\\n' "$word" >> "$LOG.words"; done
env > "$LOG.client"
own=()
while [ "$1" != img ]; do
    if [ "$1" = --env ]; then
        case $2 in
        *=*) own+=("$2") ;;
        *) own+=("$2=${!2}") ;;
        esac
    fi
    shift
done
inside=${!#}
cd "$IN_IMAGE" || exit
exec env -i PATH="$IN_IMAGE:$TOOLS" LOG="$LOG" "${own[@]}" bash -c "$inside"
"""
TOOLS = ("bash", "cat", "env", "grep", "id", "mkdir", "mktemp", "rm", "sh", "sleep", "tr", "uname")
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

    def launch(
        machine=BARE,
        *,
        nvidia: str | None = TWO_GPUS,
        runtimes=("docker", "apptainer"),
        nodes=NODES,
        docker=WRITES,
        settings=SETTINGS,
        **asked,
    ):
        texts = {"srun": TASK} | dict.fromkeys(runtimes, WRITES) | ({"docker": docker} if "docker" in runtimes else {})
        if "docker" in texts:  # its folders of CDI are asked for
            texts["docker"] = f'case " $* " in *" info "*) echo "${{CDI:-}}"; exit ;; esac\n{texts["docker"]}'
        if nvidia is not None:
            texts["nvidia-smi"] = nvidia
        for name, text in texts.items():
            (programs / name).write_text(f"#!/bin/bash\n{text}\n")
            (programs / name).chmod(0o755)
        container = Container(**{"image": "img"} | asked)
        job = Job(nodes=nodes, launcher="srun", container=container, script=("train.py", "--lr", "0.1"), name="job")
        code = run_launch(job, machine.facts(), settings)
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


def test_a_node_without_the_hook_gives_gpus_by_cdi_where_its_docker_looks(cluster, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "c d i"
    folder.mkdir()
    monkeypatch.setenv("CDI", str(folder))
    _, log = cluster()
    assert "--gpus" in lines(log, "docker")[-1]
    (folder / "nvidia.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    _, log = cluster()
    line = lines(log, "docker")[-1]
    assert line[line.index("--device") + 1] == "nvidia.com/gpu=all"
    monkeypatch.setenv("CDI", "")  # CDI is off there: a specification in its usual folder is of no use
    _, log = cluster()
    assert "--gpus" in lines(log, "docker")[-1]


def test_a_node_gives_gpus_by_cdi_where_the_setting_asks(cluster, sandbox, monkeypatch) -> None:
    by_cdi = SETTINGS.model_copy(update={"gpu_access": "cdi"})
    for image, program in (("img", "docker"), (sandbox, "apptainer")):
        code, log = cluster(image=image, settings=by_cdi)
        assert code == 0
        ran = lines(log, program)
        assert [("nvidia.com/gpu=all" in line, "--gpus" in line, "--nv" in line) for line in ran] == [
            (True, False, False)
        ] * 2
    monkeypatch.setenv("SLURM_JOB_GPUS", "3,5")
    _, log = cluster(settings=by_cdi)
    assert "--device nvidia.com/gpu=3 --device nvidia.com/gpu=5 --env" in log
    _, log = cluster(gpus="none", settings=by_cdi)
    assert "nvidia.com" not in lines(log, "docker")[-1]


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


@pytest.mark.parametrize("given", ["1", "16"])
def test_one_task_for_each_host_whatever_the_allocation_has(cluster, monkeypatch, tmp_path, given) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NTASKS", given)
    code, log = cluster(BARE)
    assert (code, len(lines(log, "docker"))) == (0, 2)
    assert (tmp_path / "log.beats").read_text() == "2\n"


def test_numbers_that_a_node_does_not_have(cluster, capfd) -> None:
    code, log = cluster(BARE, gpus="0,2")
    assert (code, log) == (8, "")
    assert "node1: there is no GPU 2: this node has 2 for this job" in capfd.readouterr().err
    assert cluster(BARE, gpus="0,1")[0] == 0


def test_numbers_are_those_of_the_job_and_not_of_the_node(cluster, sandbox, monkeypatch) -> None:
    """A container of Docker is outside of the job's cgroup: GPU 0 of the node may be another job's."""
    monkeypatch.setenv("SLURM_STEP_GPUS", "6,7")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")  # a cluster that confines no devices
    code, log = cluster(BARE, gpus="1")
    assert code == 0
    assert [line[line.index("--gpus") + 1] for line in lines(log, "docker")] == ["device=7"] * 2
    code, log = cluster(BARE, gpus="1", image=sandbox)
    assert code == 0
    assert log.count("APPTAINERENV_CUDA_VISIBLE_DEVICES=7\n") == 2


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
    for image, sign in (("img", "ENVBUILD_JOB_TOKEN="), (sandbox, "APPTAINERENV_TOKEN=")):
        code, log = cluster(BARE, image=image, environment=("TOKEN", "PATH=/job/bin"))
        assert code == 0  # a PATH of the job is none of the node's
        assert sign + value in log.splitlines()
        assert value not in " ".join(word for line in lines(log, "docker") for word in line)


ODD = {
    "image": "other", "name": "x", "asked": "none", "mine": "7", "rank": "9", "program": "/bin/false", "line": "a\nb'c\"$HOME",
    "UID": "1234", "SHELLOPTS": "noexec", "HOME": "/job/home", "DOCKER_HOST": "tcp://job:1", "BASH_ENV": "/job/env",
    "LD_PRELOAD": "/job/none.so", "NVIDIA_DRIVER_CAPABILITIES": "all", "ENV": "/job/env", "PYTHONPATH": "/job",
}  # fmt: skip


@pytest.fixture
def in_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that the image has: a torchrun that writes its environment down."""
    folder = tmp_path / "in-image"
    folder.mkdir()
    (folder / "torchrun").write_text('#!/bin/sh\nexec env -0 > "$LOG.inside"\n')
    (folder / "torchrun").chmod(0o755)
    monkeypatch.setenv("IN_IMAGE", str(folder))
    return folder


def read_environment(path: Path) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in path.read_text().split("\0") if pair)


def test_the_jobs_variables_are_the_containers_and_nobody_elses(cluster, in_image, tmp_path) -> None:
    given = tuple(f"{name}={value}" for name, value in ODD.items())
    code, _ = cluster(BARE, docker=RUNS, nodes=NODES[1:], environment=given)
    assert code == 0
    seen = read_environment(tmp_path / "log.inside")
    assert {name: seen.get(name) for name in ODD} == ODD
    client = (tmp_path / "log.client").read_text().splitlines()
    plain = {"NVIDIA_DRIVER_CAPABILITIES"}  # the runtime reads this one
    assert not [name for name in ODD.keys() - plain if f"{name}={ODD[name]}" in client]
    words = (tmp_path / "log.words").read_text().splitlines()
    assert words[words.index("--name") + 1] == "job-0"
    assert words[words.index("--gpus") + 1] == "all"
    assert "img" in words


def test_a_squashfs_runs_by_pyxis(tmp_path: Path) -> None:
    mounts = (Mount(source=Path("/data"), target="/d", read_only=True), Mount(source=Path("/w"), target="/w"))
    container = Container(
        image="/shared/te.sqsh", mounts=mounts, environment=("A=1", "PATH=/nowhere", "UID=7"), workdir="/w"
    )
    job = Job(nodes=NODES, launcher="srun", container=container, script=("train.py",), name="job")
    (step,) = plan_launch(job, BARE.facts(), SETTINGS)[0].steps
    assert {
        "--container-image=/shared/te.sqsh", "--container-mounts=/data:/d:ro,/w:/w", "--container-workdir=/w",
        "--no-container-mount-home",
    } <= set(step.command)  # fmt: skip
    # a value of several lines would be several variables of enroot's; these names reach the container without it
    assert not [word for word in step.command if word.startswith("--container-env")]
    (exported,) = [word for word in step.command if word.startswith("--export=")]
    assert "ENROOT_LOGIN_SHELL" in exported.split(",")
    text, words = step.command[-10], step.command[-8:]
    (tmp_path / "torchrun").write_text(
        '#!/bin/sh\nprintf \'%s\\n\' "$@" "core=$(ulimit -S -c)" "A=$A" "uid=$(printenv UID)"\n'
    )
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{TWO_GPUS}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    given = srun_environment(job, dict)
    assert given == {
        "ENVBUILD_JOB_A": "1",
        "ENVBUILD_JOB_PATH": "/nowhere",
        "ENVBUILD_JOB_UID": "7",
        "ENROOT_LOGIN_SHELL": "no",  # Debian's /etc/profile would have its own PATH
    }  # srun finds its own
    environment = given | {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "node1", "SLURM_NODEID": "0"}
    for shell in ("sh", "bash"):  # an image's sh can be bash
        mine = environment | {"ENVBUILD_JOB_PATH": environment["PATH"]}
        ran = subprocess.run([shell, "-c", text, "sh", *words], env=mine, capture_output=True, text=True, check=True)
        out = ran.stdout.splitlines()
        assert out[:4] == ["--nnodes=2", "--nproc-per-node=2", "--node-rank=1", "--master-addr=node2"]
        assert out[-3:] == ["core=0", "A=1", "uid=7"]


@pytest.mark.parametrize(
    ("asked", "seen", "ranks"), [("1", "1", 1), ("0,1", "0,1", 2), ("auto", "", 2), ("all", "", 2)]
)
def test_the_gpus_that_are_named_train_under_pyxis(
    cluster, monkeypatch, tmp_path, in_image, asked, seen, ranks
) -> None:
    monkeypatch.setenv("PATH", f"{in_image}:{os.environ['PATH']}")
    assert cluster(BARE, image="/shared/te.sqsh", gpus=asked, nodes=NODES[:1])[0] == 0
    inside = read_environment(tmp_path / "log.inside")
    assert (inside.get("CUDA_VISIBLE_DEVICES", ""), inside["ENVBUILD_SLOTS"]) == (seen, str(ranks))
    # the job's own word is the last
    assert cluster(BARE, image="/shared/te.sqsh", gpus=asked, environment=("CUDA_VISIBLE_DEVICES=0",))[0] == 0
    assert read_environment(tmp_path / "log.inside")["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("image", ["img", "/shared/te.sqsh"])
@pytest.mark.parametrize("gpus", ["8x", "", "0,", "1 2", "\N{ARABIC-INDIC DIGIT ONE}", "1\n", "9" * 5000])
def test_what_names_no_gpus_is_refused_before_anything_starts(gpus: str, image: str) -> None:
    job = Job(
        nodes=NODES, launcher="srun", container=Container(image=image, gpus=gpus), script=("train.py",), name="job"
    )
    with pytest.raises(UsageError, match="names no GPUs"):
        plan_launch(job, BARE.facts(), SETTINGS)


def test_what_pyxis_and_apptainer_cannot_do(tmp_path: Path, sandbox: str) -> None:
    (tmp_path / "a:b").mkdir()
    mount = Mount(source=tmp_path / "a:b", target="/d")
    for asked, says in (
        (Container(image="/shared/te.sqsh", mounts=(mount,)), "no path with one of"),
        (Container(image="/shared/te.sqsh", network="none"), "network"),
        (Container(image="/shared/te.sqsh", infiniband="off"), "adapters"),
        (Container(image=sandbox, network="none"), "network"),
    ):
        job = Job(nodes=NODES, launcher="srun", container=asked, script=("train.py",), name="job")
        with pytest.raises(UsageError, match=says):
            plan_launch(job, BARE.facts(), SETTINGS)


def test_podman_starts_no_image_of_the_engine_and_stands_in_no_other_way(sandbox: str) -> None:
    settings = Settings(cache_dir=Path("/nowhere"), engine="podman")
    for image in ("img", sandbox, "/shared/te.sqsh"):
        job = Job(nodes=NODES, launcher="srun", container=Container(image=image), script=("train.py",), name="job")
        if image == "img":
            with pytest.raises(UsageError, match="starts no containers of podman"):
                plan_launch(job, BARE.facts(), settings)
        else:
            assert plan_launch(job, BARE.facts(), settings)[0].steps


LAUNCHES = """\
import signal, sys
from pathlib import Path
from recorded import BARE
from envbuild.run.container import Container
from envbuild.run.launch import Job, Node, run_launch
from envbuild.settings import Settings
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
job = Job(nodes=(Node(name="node1", slots=0),), launcher="srun", container=Container(image="img"), script=("t.py",), name="job")
run_launch(job, BARE.facts(), Settings(cache_dir=Path("/nowhere")))
"""
# srun ends its step in an orderly way when it is asked, and that takes a moment
STEPS = """\
trap 'sleep 0.2; echo $$ >> "$LOG.ended"; exit 143' TERM
echo $$ >> "$LOG"
while :; do sleep 0.1; done
"""


def running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds) -> bool:
    end = time.monotonic() + 20
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return held


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_step_outlives_a_launch_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    log, ended = tmp_path / "log", tmp_path / "log.ended"
    log.touch()
    ended.touch()
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{STEPS}")
    (tmp_path / "srun").chmod(0o755)
    tests = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join([str(tests.parent), *(path for path in sys.path if path)])
    environment = os.environ | {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "LOG": str(log), "SLURM_JOB_ID": "1", "PYTHONPATH": paths,
    }  # fmt: skip
    launch = subprocess.Popen([sys.executable, "-c", LAUNCHES], env=environment)
    steps: list[str] = []
    try:
        assert until(lambda: len(log.read_text().splitlines()) == 2)  # the job's step, and the one that listens
        steps = log.read_text().splitlines()
        launch.send_signal(how)
        launch.wait(20)
        assert until(lambda: not any(map(running, steps)))
        assert sorted(ended.read_text().splitlines()) == sorted(steps)  # asked, and not killed
    finally:
        launch.kill()
        launch.wait()
        for step in filter(running, steps):
            os.kill(int(step), signal.SIGKILL)
