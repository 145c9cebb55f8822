"""The smoke suite for real: on a CPU torch of this host, with every injected fault, and in containers that hang."""

import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from root_support import debian_tar

from envbuild.errors import EnvbuildError, SmokeError, UsageError
from envbuild.evidence.curves import compare, curves_of
from envbuild.evidence.recording import from_report
from envbuild.evidence.records import load_evidence
from envbuild.evidence.report import Level
from envbuild.evidence.standing import evidence_for
from envbuild.paths import data_dir
from envbuild.settings import Settings, load_settings
from envbuild.verify.junit import write_junit
from envbuild.verify.smoke import SmokeRequest, run_smoke
from envbuild.verify.suite import pinned_pytest, suite_of
from envbuild.verify.target import HostTarget, ImageTarget

TORCH = "2.13.0"
SLOW = f"envbuild-test-slow:{os.getpid()}"
OURS = f"org.example.slow={os.getpid()}"  # a label of that image, and so of its containers


@pytest.fixture(scope="session")
def cpu_python() -> Path:
    """An environment with torch's CPU build and megatron-core, made once and kept in the cache."""
    settings = load_settings()
    folder = settings.cache_dir / "tests" / f"torch-{TORCH}-cpu-py{sys.version_info[0]}{sys.version_info[1]}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker's session may make it, too
        _make(folder, settings)
    return python


def _make(folder: Path, settings: Settings) -> None:
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        index = [f"--extra-index-url={settings.torch_index}/cpu"]
        links = [f"--find-links={link}" for link in settings.find_links]
        pip = [python, "-m", "pip", "install", "--quiet", "--retries", "1", "--timeout", "30"]
        subprocess.run([*pip, *index, *links, f"torch=={TORCH}+cpu", "numpy<2.5", "packaging"], check=True)
        subprocess.run([*pip, *links, "--no-deps", "megatron-core==0.16.1", "sgd-sai==1.0.3"], check=True)
        (folder / "ready").touch()


def expected(**changes) -> dict:
    return {
        "cell_id": "cpu-test",
        "lock_digest": "sha256:1",
        "flavor": "runtime",
        "cell": {"cuda": "cpu", "torch": TORCH},
        "packages": {"torch": f"{TORCH}+cpu", "sgd-sai": "1.0.3", "megatron-core": "0.16.1"},
        "components": {"torch": {"version": TORCH}},
    } | changes


def run(python: Path, level: Level, want: dict | None = None, **options):
    target = HostTarget(python=python)
    options = {"timeout_s": 600, "device": "cpu"} | options
    return run_smoke(SmokeRequest(target=target, expected=want or expected(), level=level, **options), load_settings())


@pytest.mark.parametrize("keyword", ["te and", "no_test_has_this_name"])
def test_a_keyword_that_names_no_test_says_nothing_of_the_environment(cpu_python: Path, keyword) -> None:
    with pytest.raises(UsageError, match="no test has such a name"):
        run(cpu_python, Level.IMPORT, keyword=keyword)


def test_the_suite_passes_on_two_cpu_ranks(cpu_python: Path, tmp_path: Path) -> None:
    """Import to distributed, by the command: events, JUnit, the evidence and what it then says."""
    (tmp_path / "expected.json").write_text(json.dumps(expected()))
    command = [sys.executable, "-m", "envbuild", "smoke", "--host", "--python", cpu_python, "--json"]
    command += ["--expected", tmp_path / "expected.json", "--junit", tmp_path / "j.xml", "--record", tmp_path / "ev"]
    command += ["--seed", "4711"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    answer = json.loads(done.stdout)
    passed = {test["id"] for test in answer["tests"] if test["outcome"] == "passed"}
    for name in (
        "test_import.py::test_import_packages_equal_lock",
        "test_kernels_optim.py::test_kernels_sgd_sai",
        "test_step.py::test_step_plain_torch",
        "test_step.py::test_step_megatron[local]",
        "test_distributed.py::test_distributed_ddp[torchrun]",
        "test_distributed.py::test_distributed_ddp[env]",
        "test_distributed.py::test_distributed_ddp_resume",
        "test_distributed.py::test_distributed_megatron[local]",
    ):
        assert name in passed
    assert answer["counts"]["failed"] == 0
    assert answer["seed"] == 4711
    assert {"env", "torchrun"} <= set(answer["launchers"])
    assert "<testsuite" in (tmp_path / "j.xml").read_text()
    records = load_evidence(tmp_path / "ev")
    standing = evidence_for(records, cell_id="cpu-test", suite=suite_of((), "distributed"), lock_digest="sha256:1")
    assert standing.status == "verified"
    assert standing.record is not None
    assert standing.record.where == "CPU"
    assert standing.record.architecture == platform.machine()


def test_a_training_run_is_the_same_to_the_bit_and_other_data_leave_the_band(cpu_python: Path) -> None:
    """The level train three times: two runs are equal; one that reads other data is named, with its step."""

    def curve(**environment: str):
        keyword = "test_train_curve and float32 and not ranks"
        report = run(cpu_python, Level.TRAIN, keyword=keyword, environment=environment)
        assert report.verdict == "passed", report.reason
        return curves_of(from_report(report, keyword=keyword), "run")[0]["float32"]

    first = curve()
    assert compare("float32", first, curve()).verdict == "equal"
    other = compare("float32", first, curve(SMOKE_FAULT="other-data:0"))
    assert (other.verdict, other.parted.step) == ("outside-band", 0)
    assert other.outside.difference > other.outside.band


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("other-data:1", "rank 1 was given other data"),
        ("die:1", "rank 1 failed: died at 'step 0' without a word"),
        ("stall:1", "rank 1 stopped at 'step 0'; rank 0 waits at"),
    ],
)
def test_a_faulty_rank_is_named(cpu_python: Path, fault: str, message: str) -> None:
    report = run(
        cpu_python,
        Level.DISTRIBUTED,
        keyword="test_distributed_ddp and env",
        environment={"SMOKE_FAULT": fault, "SMOKE_STALL": "8"},
    )
    assert report.verdict == "failed"
    assert message in report.reason


ABORTS = """
import atexit, os, sys

if "RANK" in os.environ and any("/workers/" in word for word in sys.orig_argv):
    atexit.register(os.abort)
"""


def test_how_torch_takes_itself_down_is_no_finding(cpu_python: Path, tmp_path: Path) -> None:
    """gloo's threads may abort a process that is ending; what a rank did before has been reported."""
    (tmp_path / "sitecustomize.py").write_text(ABORTS)
    chosen = {"keyword": "test_distributed_ddp and not mpirun", "environment": {"PYTHONPATH": str(tmp_path)}}
    report = run(cpu_python, Level.DISTRIBUTED, **chosen)
    assert report.verdict == "passed", report.reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packages": {"torch": "2.12.0"}}, f"torch is {TORCH}+cpu, the lock says 2.12.0"),
        ({"packages": {"wandb": "0.20.0"}}, "not installed: wandb"),
        ({"components": {"torch": {"version": "2.12.0"}}}, f"torch is {TORCH}+cpu, the cell says 2.12.0"),
        ({"cell": {"cuda": "13.0", "torch": TORCH}}, "is a CPU build, the cell says CUDA 13.0"),
        ({"components": {"apex": {"extensions": ["amp_C"]}}}, "apex: the distribution apex is not installed"),
        (
            {"components": {"flash-attn-hopper": {"distribution": "flash_attn_3"}}},
            "the distribution flash-attn-3 is not installed",
        ),
    ],
)
def test_what_is_not_as_the_lock_says(cpu_python: Path, change: dict, message: str) -> None:
    report = run(cpu_python, Level.IMPORT, expected(**change))
    assert report.verdict == "failed"
    assert any(message in test.reason for test in report.tests if test.outcome == "failed"), report.reason


def _package(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def test_an_apex_without_its_extensions(cpu_python: Path, tmp_path: Path) -> None:
    """What `pip install` of apex gives when the flags were lost: a package that imports."""
    folders = ("apex", "apex/optimizers", "apex/normalization")
    _package(tmp_path, "apex", "0.1", {f"{folder}/__init__.py": "" for folder in folders})
    want = expected(components={"apex": {"distribution": "apex", "extensions": ["amp_C", "fused_layer_norm_cuda"]}})
    report = run(cpu_python, Level.IMPORT, want, environment={"PYTHONPATH": str(tmp_path)})
    failed = [test for test in report.tests if test.outcome == "failed"]
    assert [test.id for test in failed] == ["test_import.py::test_import_apex_extensions"]
    assert failed[0].reason.startswith("apex was built without its CUDA extensions: none of amp_C")


_TE = {
    "transformer_engine/__init__.py": "",
    "transformer_engine/pytorch/__init__.py": "",
    "transformer_engine_torch.py": "",
    "transformer_engine/pytorch/attention/__init__.py": "",
    "transformer_engine/pytorch/attention/dot_product_attention/__init__.py": "",
    "transformer_engine/pytorch/attention/dot_product_attention/utils.py": (
        "class FlashAttentionUtils:\n    version_required = '2.1.1'\n    max_version = '2.8.3'\n"
    ),
    "transformer_engine/pytorch/attention/dot_product_attention/backends.py": (
        "def look():\n    get_pkg_version('flash-attn-3')\n"
        "    from flash_attn_3.flash_attn_interface import flash_attn_func as flash_attn_func_v3\n"
    ),
}


@pytest.mark.parametrize(
    ("version", "fails"), [("2.8.3", False), ("2.8.3.post1", True), ("2.9.0", True), ("2.1.0", True)]
)
def test_a_flash_attn_that_te_ignores(cpu_python: Path, tmp_path: Path, version: str, fails: bool) -> None:
    """Its metadata is enough: the cap is the installed TE's own."""
    _package(tmp_path, "transformer-engine-torch", "2.12.0", _TE)
    _package(tmp_path, "flash-attn", version, {})
    want = expected(components={"te": {"version": "2.12.0"}})
    report = run(cpu_python, Level.IMPORT, want, environment={"PYTHONPATH": str(tmp_path)}, keyword="te_cap")
    assert (report.verdict == "failed") == fails, report.reason
    if fails:
        side = "below 2.1.1, the oldest" if version == "2.1.0" else "above 2.8.3, the newest"
        assert f"flash-attn {version} is {side} that Transformer Engine 2.12.0 accepts" in report.reason


def test_an_fa3_where_te_does_not_look(cpu_python: Path, tmp_path: Path) -> None:
    _package(tmp_path, "transformer-engine-torch", "2.12.0", _TE)
    _package(tmp_path, "flashattn-hopper", "3.0.0b1", {"flashattn_hopper/flash_attn_interface.py": ""})
    spec = {"distribution": "flashattn-hopper", "module": "flashattn_hopper.flash_attn_interface"}
    want = expected(components={"te": {}, "flash-attn-hopper": spec})
    report = run(cpu_python, Level.IMPORT, want, environment={"PYTHONPATH": str(tmp_path)}, keyword="te_looks")
    assert "looks for the distribution flash-attn-3, what is installed is flashattn-hopper" in report.reason


def test_no_gpu_is_the_hosts_verdict(cpu_python: Path, tmp_path: Path) -> None:
    report = run(cpu_python, Level.KERNELS, device="cuda", timeout_s=60)
    assert report.verdict == "host"
    assert "CPU build" in report.reason
    write_junit(report, tmp_path / "j.xml")
    assert "CPU build" in (tmp_path / "j.xml").read_text()
    with pytest.raises(EnvbuildError) as caught:
        report.raise_for_verdict()
    assert caught.value.exit_code == 8


# --- containers ---------------------------------------------------------------------------------


SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"


@pytest.fixture
def two_hosts(engine, cpu_python: Path, tmp_path: Path, epoch) -> Iterator[Path]:
    """Two containers that know each other by name, log in to each other by ssh, and see the same folders; their hostfile."""
    root = debian_tar("bookworm", tmp_path, "openssh-server", "openmpi-bin", "python3", epoch=epoch)
    tag, names = f"envbuild-test-nodes:{os.getpid()}", [f"node{i}-{os.getpid()}" for i in (1, 2)]
    subprocess.run(["docker", "import", root.path, tag], check=True, capture_output=True)
    root.path.unlink()
    shared = tmp_path / "shared"
    shared.mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", shared / "key"], check=True)
    (shared / "hosts").write_text("".join(f"{name} slots=2\n" for name in names))
    (shared / "login").write_text(
        "mkdir -p /run/sshd ~/.ssh && cp $1/key ~/.ssh/id_ed25519 && cp $1/key.pub ~/.ssh/authorized_keys\n"
        "chmod -R go= ~/.ssh && echo 'StrictHostKeyChecking no' >~/.ssh/config && exec /usr/sbin/sshd -D\n"
    )
    folders = [shared, data_dir("smoke_tests"), cpu_python.parents[1], pinned_pytest((3, 11), load_settings())]
    mounts = [f"--volume={folder}:{folder}" for folder in folders]
    network = f"envbuild-test-{os.getpid()}"
    subprocess.run(["docker", "network", "create", network], check=True, capture_output=True)
    for name in names:
        front = ["docker", "run", "--detach", "--rm", "--name", name, "--hostname", name, "--network", network]
        subprocess.run([*front, *mounts, tag, "sh", shared / "login", shared], check=True, capture_output=True)
    yield shared / "hosts"
    subprocess.run(["docker", "rm", "--force", *names], check=True, capture_output=True)
    subprocess.run(["docker", "network", "rm", network], check=True, capture_output=True)
    engine.image.remove(tag, force=True)


def test_two_hosts_train_as_one_rank_does(two_hosts: Path, cpu_python: Path) -> None:
    """The suite's own `--nodes`, by ssh and by mpirun: counts of ranks below all slots, too, and a checkpoint that both see."""
    (two_hosts.parent / "expected.json").write_text(json.dumps(expected()))
    # the container's own interpreter: what the environment's links to lies on this host alone
    site = subprocess.run([cpu_python, "-c", SITE], capture_output=True, text=True, check=True).stdout.strip()
    suite = ["python3", data_dir("smoke_tests") / "run.py", "--pytest", pinned_pytest((3, 11), load_settings())]
    suite += ["--expected", two_hosts.parent / "expected.json", "--nodes", two_hosts, "--device=cpu", "--only"]
    chosen = "ddp or allreduce"
    name = two_hosts.read_text().split()[0]
    ran = subprocess.run(
        ["docker", "exec", f"--env=PYTHONPATH={site}", name, *suite, "--level=distributed", "-k", chosen],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    events = [json.loads(line.partition(" ")[2]) for line in ran.stdout.splitlines() if line.startswith("@smoke ")]
    tests = {each["id"].partition("::")[2]: each for each in events if each["event"] == "test"}
    assert events[0]["nproc"] == 4
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_distributed_ddp[torchrun]": "passed",
        "test_distributed_ddp[mpirun]": "passed",
        "test_distributed_ddp[env]": "skipped",
        "test_distributed_ddp_resume": "passed",
        "test_distributed_allreduce_exact": "passed",
    }
    assert list(tests["test_distributed_allreduce_exact"]["figures"]) == ["2 ranks, 4 MiB", "4 ranks, 4 MiB"]
    assert tests["test_distributed_allreduce_exact"]["launchers"] == ["env", "torchrun", "mpirun"]


@pytest.fixture(scope="module")
def slow_image(engine, tmp_path_factory, epoch):
    """An image with a Python whose `torch` never finishes importing; and what runs of it is left."""
    folder = tmp_path_factory.mktemp("slow")
    root = debian_tar("bookworm", folder, "python3-minimal", "libpython3-stdlib", epoch=epoch)
    (folder / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    (folder / "expected.json").write_text(json.dumps(expected()))
    (folder / "Dockerfile").write_text(
        f"FROM scratch\nADD {root.path.name} /\nCOPY torch.py /usr/lib/python3/dist-packages/torch.py\n"
        f"COPY expected.json /opt/envbuild/expected.json\nLABEL {OURS}\n"
    )
    engine.buildx.build(str(folder), tags=SLOW, load=True, progress=False)
    (folder / "rootfs.tar").unlink()
    yield SLOW
    engine.image.remove(SLOW, force=True)


def _left() -> list[str]:
    # by its label: docker looks at the container's image for the filter `ancestor`, and fails where it has just gone
    filters = ("--filter=name=^envbuild-smoke-", f"--filter=label={OURS}")
    command = ["docker", "ps", "--all", *filters, "--format={{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_a_run_that_hangs_is_ended_with_its_container(engine, slow_image: str) -> None:
    target = ImageTarget(reference=slow_image)
    request = SmokeRequest(target=target, expected=expected(), level=Level.IMPORT, timeout_s=4)
    report = run_smoke(request, load_settings())
    assert report.verdict == "hung"
    assert report.reason == "the suite did not end within 4 s"
    assert report.target["digest"].startswith("sha256:")
    with pytest.raises(SmokeError):
        report.raise_for_verdict()
    assert not _left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_the_container_and_is_recorded(
    engine, slow_image: str, number: signal.Signals, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "envbuild", "smoke", slow_image, "--level", "import", "--record", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not _left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _left()
    process.send_signal(number)
    _, printed = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in printed
    assert not _left()
    (record,) = tmp_path.glob("*.json")
    assert json.loads(record.read_text())["verdict"] == "interrupted"


def test_an_image_that_is_not_there(engine) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "smoke", "envbuild-test:never-built", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 8
    assert "there is no image envbuild-test:never-built" in json.loads(done.stdout)["what"]
