"""One test for every launcher and every runtime: two nodes train, resume, and one of them dies.

What it takes: an engine and a CPU image of a cell in it (`envbuild image --cuda cpu`); the rest is built here. Each case prints
a line of the table in docs/results/launchers.md. A batch script of `render --format sbatch` runs there, too. CONFORMANCE_IMAGE names the CPU image, CONFORMANCE_TRAINING and
CONFORMANCE_NODE images that are kept for further runs.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import HERE, NAMES, PATH, REPOSITORY, Nodes, node_image, running, sh, training_image

from envbuild.engine import apptainer
from envbuild.matrix.cell import CELL_LABEL
from envbuild.run.launch.beats import SILENT_SECONDS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LAUNCHERS = ("torchrun", "mpirun", "deepspeed", "srun")
RUNTIMES = ("docker", "apptainer", "sif")
SHORT = (("torchrun", "docker"), ("srun", "apptainer"))
"""What `make test` runs; `make test-full` runs all."""
WORLD = 4
STEPS = 3


@pytest.fixture(scope="module")
def base() -> str:
    """The CPU image that is in the engine."""
    if shutil.which("docker") is None or sh("docker", "info", check=False).returncode:
        pytest.fail("no Docker engine answers: run scripts/install-engine")
    listed = sh("docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "envbuild").stdout.split()
    found = os.environ.get("CONFORMANCE_IMAGE") or next(
        (name for name in listed if name.startswith("envbuild:cpu-")), None
    )
    if found is None:
        pytest.skip("no CPU image is in the engine: envbuild image --cuda cpu, or name one in CONFORMANCE_IMAGE")
    return found


def own_or_built(variable: str, tag: str, build) -> Iterator[str]:
    """Yield an image that a variable names, for repeated runs; or one that is built, and removed at the end."""
    if kept := os.environ.get(variable):
        yield kept
        return
    yield build(tag)
    sh("docker", "image", "rm", "--force", tag, check=False)


@pytest.fixture(scope="module")
def image(base, tmp_path_factory) -> Iterator[str]:
    """The image that trains."""
    folder = tmp_path_factory.mktemp("training")
    yield from own_or_built(
        "CONFORMANCE_TRAINING", f"envbuild-test-training:{os.getpid()}", lambda tag: training_image(folder, tag, base)
    )


@pytest.fixture(scope="module")
def node(base, tmp_path_factory) -> Iterator[str]:
    """The image of a node."""
    folder = tmp_path_factory.mktemp("node")
    yield from own_or_built(
        "CONFORMANCE_NODE", f"envbuild-test-node:{os.getpid()}", lambda tag: node_image(folder, tag)
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """A folder that all nodes see at one path."""
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o777)
    for above in folder.parents:
        if above == Path("/tmp") or above.owner() != "root":
            break
        above.chmod(above.stat().st_mode | 0o011)
    return folder


@pytest.fixture
def nodes(node, shared) -> Iterator[Nodes]:
    yield from running(Nodes(image=node, prefix=f"envbuild-test-{os.getpid()}", shared=shared))


@pytest.fixture(scope="module")
def sandbox(image, node, shared) -> Path:
    """The same image as Apptainer runs it, made by a user on a node."""
    place = shared / "sandbox"
    sh("docker", "save", "--output", shared / "image.tar", image)
    (shared / "image.tar").chmod(0o644)
    code = f"from pathlib import Path; from envbuild.engine.unpacked import write; write(Path('{shared}/image.tar'), Path('{place}'))"
    sh(
        "docker", "run", "--rm", "--privileged", "--user", "trainer", "--env", "HOME=/home/trainer", "--env", f"PYTHONPATH={PATH}",
        "--volume", f"{shared}:{shared}", "--volume", f"{REPOSITORY}:/opt/envbuild:ro", "--entrypoint", "python3", node, "-B", "-c", code,
    )  # fmt: skip
    (shared / "image.tar").unlink()
    return place


@pytest.fixture(scope="module")
def sif(sandbox, node, shared) -> Path:
    """The same as one file, which Apptainer mounts by FUSE; made by a user on a node."""
    place = shared / "image.sif"
    sh(
        "docker", "run", "--rm", "--privileged", "--user", "trainer", "--env", "HOME=/home/trainer", "--volume", f"{shared}:{shared}",
        "--entrypoint", "apptainer", node, "build", place, sandbox,
    )  # fmt: skip
    return place


FIXTURES = {"docker": "image", "apptainer": "sandbox", "sif": "sif"}


def weights(steps: int, world: int = WORLD) -> list[float]:
    """Return what training comes to, by a sum."""
    total = [0.0] * 64
    for step in range(steps):
        for i in range(64):
            total[i] -= sum(i + rank * 64 + step for rank in range(world)) / 4
    return total


class Job:
    """A launch whose notes are read as they come."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append((time.monotonic(), line.rstrip()))

    def says(self) -> str:
        return "\n".join(line for _, line in self.lines[-40:])

    def end(self, seconds: float) -> int:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"it did not end in {seconds} s:\n{self.says()}")
        self._reader.join(5)
        return code


def rows(folder: Path, steps: int, seconds: float, job: Job) -> list[dict]:
    """Wait for the lines of all ranks, and return them by rank."""
    end = time.monotonic() + seconds
    places = [folder / f"{steps}-{rank}.json" for rank in range(WORLD)]
    while not all(place.exists() and place.read_text().endswith("}") for place in places):
        if time.monotonic() > end or job.process.poll() not in {None, 0}:
            pytest.fail(f"ranks did not answer:\n{job.says()}")
        time.sleep(0.1)
    return [json.loads(place.read_text()) for place in places]


@pytest.mark.parametrize(
    ("launcher", "runtime"),
    [
        pytest.param(launcher, runtime, marks=() if (launcher, runtime) in SHORT else pytest.mark.full)
        for runtime in RUNTIMES
        for launcher in LAUNCHERS
    ],
)
def test_two_nodes_train_resume_and_lose_one(launcher, runtime, nodes, shared, request, capsys) -> None:
    subject = str(request.getfixturevalue(FIXTURES[runtime]))
    folder = shared / f"{launcher}-{runtime}"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "train.py").write_text((HERE / "train.py").read_text())
    (folder / "hosts").write_text("".join(f"{name} slots={WORLD // 2}\n" for name in NAMES))

    def launch(steps: int) -> Job:
        words = (
            subject, "--hostfile", f"{folder}/hosts", "--launcher", launcher, "--gpus", "none", "--env", "OMP_NUM_THREADS=1",
            "--env", "GLOO_SOCKET_IFNAME=eth0", "--mount", f"{folder}:{folder}", "--", f"{folder}/train.py", str(folder), str(steps),
        )  # fmt: skip
        return Job(nodes.launch(*words, slurm=launcher == "srun"))

    def right(row: dict, rank: int) -> bool:
        return (
            (row["rank"], row["local"], row["world"], row["exact"]) == (rank, rank % 2, WORLD, True)
            and nodes.namespaces[row["node"]] == NAMES[rank // 2]
        )  # fmt: skip

    began = time.monotonic()
    job = launch(STEPS)
    assert job.end(120) == 0, job.says()
    for rank, row in enumerate(rows(folder, STEPS, 1, job)):
        assert right(row, rank), row
        assert (row["resumed"], row["weights"]) == (0, weights(STEPS))
    trained = time.monotonic() - began
    assert gone(nodes, folder, 10) == []

    job = launch(0)  # from the checkpoint, on and on
    for rank, row in enumerate(rows(folder, 0, 90, job)):
        assert right(row, rank), row
        assert (row["resumed"], row["step"], row["weights"]) == (STEPS, STEPS + 1, weights(STEPS + 1))
    time.sleep(2 * SILENT_SECONDS / 3)  # some beats, on a busy machine

    died = time.monotonic()
    nodes.cut("node2")
    named = None
    while named is None and time.monotonic() < died + 30:
        named = next(
            (at - died for at, line in list(job.lines) if at > died and "node2 has not answered" in line), None
        )
        time.sleep(0.05)
    assert named is not None, job.says()
    assert named < 10, job.says()

    # a person ends it; by itself it would end after a minute
    pid = (shared / "pid").read_text().strip()
    nodes.on(
        "node1",
        f"kill -INT {pid}" if launcher != "srun" else f"kill -INT $(pgrep -P {pid})",
        user="trainer",
        check=False,
    )
    job.end(60)
    assert gone(nodes, folder, 15) == []
    with capsys.disabled():
        print(f"\n| {launcher} | {runtime} | passed | {trained:.0f} s | {named:.1f} s |")


def gone(nodes: Nodes, folder: Path, seconds: float) -> list[str]:
    """Return what still runs of a job after some seconds."""
    end = time.monotonic() + seconds
    while (left := nodes.left(str(folder))) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def rendered(folder: Path, runtime: str, *words: str) -> None:
    """Write a batch script of `render` and the training job into a folder that the nodes see."""
    script = sh(
        sys.executable, "-m", "envbuild", "render", *words, "--format", "sbatch", "--runtime", runtime, "--nodes", "2"
    ).stdout
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "job.sbatch").write_text(script)
    (folder / "train.py").write_text((HERE / "train.py").read_text())


def submitted(
    nodes: Nodes, folder: Path, variables: str, *words: str, options: str = "--output=printed"
) -> tuple[int, str]:
    """Submit the script as a user and wait; return its exit code, and what sbatch and the job printed."""
    line = f"cd {folder} && {variables} sbatch --quiet --wait {options} job.sbatch {' '.join(words)}"
    code = nodes.on("node1", f"{line} >refused 2>&1; echo $?", user="trainer")
    outputs = [folder / name for name in ("refused", "printed")]
    return int(code.splitlines()[-1]), "".join(path.read_text() for path in outputs if path.exists())


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("docker", marks=pytest.mark.full), "apptainer", pytest.param("sif", marks=pytest.mark.full)],
)
def test_a_batch_script_trains_and_resumes_on_two_nodes(runtime, base, nodes, shared, request, tmp_path) -> None:
    """The script checks on each node that the image holds its lock: the one that the image carries."""
    image = request.getfixturevalue(FIXTURES[runtime])
    held = sh("docker", "create", base).stdout.strip()
    sh("docker", "cp", f"{held}:/opt/envbuild", tmp_path / "lock")  # next to it what else the image says of itself
    sh("docker", "rm", held)
    folder = shared / f"sbatch-{runtime}"
    rendered(folder, runtime if runtime == "docker" else "apptainer", "--lock", str(tmp_path / "lock"))
    variables = f"ENVBUILD_IMAGE={image} GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1"

    code, printed = submitted(nodes, folder, variables)
    assert code == 0, printed
    assert "envbuild: 2 ranks summed by gloo" in printed

    for steps, resumed in ((STEPS, 0), (2 * STEPS, STEPS)):
        code, printed = submitted(nodes, folder, variables, "train.py", str(folder), str(steps))
        assert code == 0, printed
        for rank in range(2):
            row = json.loads((folder / f"{steps}-{rank}.json").read_text())
            assert (row["rank"], row["local"], row["world"], row["exact"]) == (rank, 0, 2, True)
            assert (row["resumed"], row["weights"]) == (resumed, weights(steps, 2))
    assert gone(nodes, folder, 10) == []

    # what fails on one node ends the job on both
    began = time.monotonic()
    code, printed = submitted(nodes, folder, variables, "sh", "-c", "'[ $SLURM_NODEID = 0 ] || exit 9; sleep 300'")
    assert code != 0, printed
    assert "node2" in printed
    assert time.monotonic() - began < 60
    assert gone(nodes, folder, 10) == []


def test_a_batch_script_for_gpus_starts_nothing_where_there_is_none(sandbox, nodes, shared) -> None:
    """This Slurm knows of no GPU, and the nodes have none."""
    folder = shared / "sbatch-gpus"
    rendered(folder, "apptainer", "--cuda", "13.0", "--te", "2.12", "--gpu", "h100", "--unlocked")
    without = "--gpus-per-node=0 --output=printed"
    image = f"ENVBUILD_IMAGE={sandbox}"
    code, printed = submitted(nodes, folder, image, "train.py", str(folder), "1")
    assert code == 1, printed
    assert "Invalid generic resource" in printed
    code, printed = submitted(nodes, folder, image, "train.py", str(folder), "1", options=without)
    assert code == 8, printed
    assert "Slurm gave this job no GPU" in printed
    code, printed = submitted(nodes, folder, f"{image} ENVBUILD_GPUS=1", "train.py", str(folder), "1", options=without)
    assert code != 0, printed  # srun has that of the node which it ended
    assert re.search(r"envbuild: node[12]: .*GPU", printed), printed
    assert not list(folder.glob("*.json"))
    assert gone(nodes, folder, 10) == []


def test_bisect_runs_images_of_a_folder_where_there_is_no_engine(sandbox, node, shared) -> None:
    """Two sandboxes that state the ends of a search; one of them has a file that the test finds."""
    ends, folder = ("cuda=cpu", "cuda=cpu mpi=mpich"), shared / "images"

    def bisect(*words: str) -> "subprocess.CompletedProcess[str]":
        return sh(
            "docker", "run", "--rm", "--privileged", "--user", "trainer", "--env", "HOME=/home/trainer", "--env", f"PYTHONPATH={PATH}",
            "--volume", f"{shared}:{shared}", "--volume", f"{REPOSITORY}:/opt/envbuild:ro", "--entrypoint", "python3", node,
            "-B", "-m", "envbuild", "bisect", *ends, "--images", folder, "--json", *words, check=False,
        )  # fmt: skip

    folder.mkdir()
    stops = json.loads(bisect("--dry-run").stdout)["stops"]
    for name, stop in zip(("good", "bad"), stops, strict=True):
        sh("cp", "--archive", "--link", sandbox, folder / name)
        stated = json.loads(apptainer.labels_of_sandbox(folder / name)[apptainer.LABEL])
        stated["config"]["config"]["Labels"][CELL_LABEL] = stop["cell"]
        apptainer.add_label(folder / name, json.dumps(stated))
    (folder / "bad" / "opt" / "found").touch()
    done = bisect("--", "sh", "-c", "test ! -e /opt/found")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["found"]["axes"] == [{"axis": "mpi", "good": None, "bad": "mpich"}]
    assert [(Path(stop["image"]).name, stop["verdict"]) for stop in answer["stops"]] == [
        ("good", "good"),
        ("bad", "bad"),
    ]
    shutil.rmtree(folder / "bad")
    done = bisect("--", "true")
    assert (done.returncode, f"the image of {stops[1]['cell']} is missing" in done.stderr) == (8, True), done.stderr
