"""The smoke runner: verdicts from what the suite says, JUnit, the suite's hash, the watched launch of ranks."""

import datetime as dt
import importlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock, patch
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner

from envbuild.cli.smoke import smoke as smoke_command
from envbuild.errors import HostError, SmokeError, UsageError
from envbuild.evidence import records as evidence
from envbuild.evidence import redact
from envbuild.evidence.recording import from_report
from envbuild.evidence.report import Level, Outcome, SmokeReport
from envbuild.verify import follow as following
from envbuild.verify import smoke, target
from envbuild.verify.collected import Collected
from envbuild.verify.events import MARK, read_event
from envbuild.verify.expectation import default_device, read_expected
from envbuild.verify.follow import follow
from envbuild.verify.junit import write_junit
from envbuild.verify.start import Call, Started, on_host
from envbuild.verify.suite import entry_of, suite_hash, suite_of
from envbuild.verify.target import HostTarget, ImageTarget, Seen, look

SUITE = Path(__file__).parents[2] / "smoke_tests"


def collected_of(*events: dict) -> Collected:
    collected = Collected(lambda _: None)
    for event in events:
        collected.line(MARK + json.dumps(event) + "\n")
    return collected


def ended(name: str, outcome: str = "passed", reason: str = "") -> dict:
    return {"event": "test", "id": name, "level": "step", "outcome": outcome, "seconds": 1.0, "reason": reason}


START = {"event": "collected", "total": 2, "machine": {"gpus": []}, "seed": 3, "nproc": 2, "launchers": ["env"]}
END = {"event": "end", "code": 0}


def test_all_passed() -> None:
    assert collected_of(START, ended("a"), ended("b", "skipped", "no GPU"), END).judge(0, 60) == ("passed", "")


def test_a_failure_is_named_with_its_cause() -> None:
    collected = collected_of(START, ended("a", "failed", "amp_C is missing\nlong tail"), ended("b", "failed", "x"), END)
    assert collected.judge(1, 60) == ("failed", "a: amp_C is missing (and 1 more)")


def test_out_of_memory_is_the_hosts_verdict() -> None:
    reason = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"
    verdict, text = collected_of(START, ended("a", "failed", reason), END).judge(1, 60)
    assert verdict == "host"
    assert text.startswith("out of memory in a: ")
    # Together with a failure of another kind it is a failure.
    both = collected_of(START, ended("a", "failed", reason), ended("b", "failed", "wrong"), END)
    assert both.judge(1, 60)[0] == "failed"


@pytest.mark.parametrize("kind", ["no-gpu", "too-few-gpus", "driver-too-old"])
def test_what_the_suite_says_of_the_host(kind: str) -> None:
    collected = collected_of(
        {"event": "verdict", "kind": kind, "what": "driver 470 is too old", "machine": {"gpus": []}}
    )
    assert collected.judge(3, 60) == ("host", "driver 470 is too old")


def test_a_broken_torch_is_the_images_fault() -> None:
    collected = collected_of({"event": "verdict", "kind": "torch-broken", "what": "torch does not import: x"})
    assert collected.judge(1, 60) == ("failed", "torch does not import: x")


def test_a_cpu_build_of_torch_is_the_environments_fault_where_the_cell_is_for_cuda() -> None:
    event = MARK + json.dumps({"event": "verdict", "kind": "no-cuda-build", "what": "torch 2.11.0 is a CPU build"})
    for for_cuda, verdict in [(True, "failed"), (False, "host")]:
        collected = Collected(lambda _: None, for_cuda=for_cuda)
        collected.line(event)
        assert collected.judge(3, 60) == (verdict, "torch 2.11.0 is a CPU build")


def test_a_run_that_skips_everything_does_not_pass() -> None:
    collected = collected_of(START, ended("a", "skipped", "no GPU"), ended("b", "skipped", "no GPU"), END)
    assert collected.judge(0, 60) == ("failed", "no test ran: all 2 were skipped")


def test_a_suite_that_dies_after_its_last_test_has_run() -> None:
    verdict, text = collected_of(START, ended("a"), END).judge(-11, 60)
    assert (verdict, text) == (
        "failed",
        "the suite died after a with exit code -11 (segmentation fault): no output",
    )


def test_a_suite_that_reported_its_end_is_judged_by_it() -> None:
    collected = collected_of(START, ended("a"), END)
    collected.timed_out = True
    assert collected.judge(None, 60) == ("passed", "")


def test_a_timeout_names_the_test() -> None:
    collected = collected_of(START, {"event": "begin", "id": "test_x", "level": "step"})
    collected.timed_out = True
    assert collected.judge(None, 90) == ("hung", "test_x did not end within 90 s")


@pytest.mark.parametrize(
    ("code", "verdict", "word"),
    [(139, "failed", "segmentation fault"), (137, "host", "memory"), (-9, "host", "memory"), (5, "failed", "code 5")],
)
def test_a_suite_that_dies(code: int, verdict: str, word: str) -> None:
    found, text = collected_of(START, {"event": "begin", "id": "test_x", "level": "step"}).judge(code, 60)
    assert found == verdict
    assert "in test_x" in text
    assert word in text


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0", "driver is too old"),
        ('could not select device driver "" with capabilities: [[gpu]]', "cannot see"),
        ("write /x: no space left on device", "disk is full"),
    ],
)
def test_what_the_engine_says(line: str, word: str) -> None:
    collected = Collected(lambda _: None)
    collected.line(line + "\n")
    verdict, text = collected.judge(125, 60)
    assert verdict == "host"
    assert word in text


def test_a_run_that_collects_nothing_does_not_pass() -> None:
    assert collected_of(START, END).judge(5, 60)[0] == "failed"


def test_lines_that_are_not_events_are_harmless() -> None:
    seen: list = []
    collected = Collected(seen.append)
    for line in ("@smoke {", "noise", "@smoke " + json.dumps(START), '@smoke {"event": "later"}'):
        collected.line(line + "\n")
    assert [event["event"] for event in seen] == ["collected"]


def _report(verdict: str, tests: tuple[Outcome, ...] = (), reason: str = "why") -> SmokeReport:
    return SmokeReport(
        target={"kind": "image", "reference": "img:1", "digest": None},
        cell_id="cell",
        cell={},
        lock_digest=None,
        level="step",
        device="cpu",
        nproc=2,
        verdict=verdict,
        reason=reason,
        suite="sha256:0",
        seed=1,
        machine={},
        launchers=[],
        tests=tests,
        seconds=1.0,
        log="log",
    )


@pytest.mark.parametrize(
    ("verdict", "error", "code"), [("failed", SmokeError, 7), ("hung", SmokeError, 7), ("host", HostError, 8)]
)
def test_verdicts_raise_with_their_exit_code(verdict: str, error: type, code: int) -> None:
    with pytest.raises(error, match="why") as caught:
        _report(verdict).raise_for_verdict()
    assert caught.value.exit_code == code


def test_a_pass_raises_nothing() -> None:
    _report("passed").raise_for_verdict()
    with pytest.raises(KeyboardInterrupt):
        _report("interrupted").raise_for_verdict()


def test_junit(tmp_path: Path) -> None:
    tests = (
        Outcome(id="a", level="step", outcome="passed", seconds=1.0, figures={"f": {"value": 2}}),
        Outcome(id="b", level="step", outcome="failed", seconds=1.0, reason="bad \x1b[31mred\x00\nline two"),
        Outcome(id="c", level="step", outcome="skipped", seconds=0.0, reason="no GPU"),
    )
    write_junit(_report("hung", tests), tmp_path / "deep" / "j.xml")
    root = ET.parse(tmp_path / "deep" / "j.xml").getroot()
    assert (root.get("tests"), root.get("failures"), root.get("skipped"), root.get("errors")) == ("3", "1", "1", "1")
    assert root.find("testcase[@name='b']/failure").get("message") == "bad [31mred"
    assert root.find("testcase[@name='a']/properties/property").get("value") == '{"value": 2}'
    assert root.find("testcase[@name='run']/error").get("message") == "why"


@pytest.mark.parametrize("verdict", ["failed", "interrupted", "passed"])
def test_junit_says_what_no_test_says(tmp_path: Path, verdict: str) -> None:
    write_junit(_report(verdict, (Outcome(id="a", level="step", outcome="passed", seconds=1.0),)), tmp_path / "j")
    root = ET.parse(tmp_path / "j").getroot()
    assert root.get("errors") == str(int(verdict != "passed"))
    assert [error.get("message") for error in root.findall("testcase[@name='run']/error")] == ["why"] * (
        verdict != "passed"
    )


@pytest.mark.parametrize(
    ("cuda", "level", "device"),
    [("13.0", Level.KERNELS, "cuda"), ("13.0", Level.IMPORT, "cpu"), ("cpu", Level.DISTRIBUTED, "cpu")],
)
def test_the_cell_decides_where_to_run(cuda: str, level: Level, device: str) -> None:
    assert default_device({"cell": {"cuda": cuda}}, level) == device


def test_read_expected(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    with pytest.raises(UsageError, match="cannot be read"):
        read_expected(path)
    path.write_text('{"cell": {}}')
    with pytest.raises(UsageError, match="not a list of what must be installed"):
        read_expected(path)
    whole = {"cell": {}, "packages": {}, "components": {}, "lock_digest": None}
    path.write_text(json.dumps(whole))
    assert read_expected(path) == whole
    for key, value in (("cell", None), ("packages", []), ("adopted", ["torch"]), ("lock_digest", 5)):
        path.write_text(json.dumps(whole | {key: value}))
        with pytest.raises(UsageError, match=f"its {key} is no "):
            read_expected(path)


def test_a_components_own_test_counts_where_the_cell_has_it(tmp_path: Path) -> None:
    (tmp_path / "test_all.py").write_text("x = 1\n")
    before = suite_hash(tmp_path, axes=())
    (tmp_path / "test_kernels_new.py").write_text('COMPONENT = "new"\n')
    assert suite_hash(tmp_path, axes=("te",)) == before
    assert suite_hash(tmp_path, axes=("te", "new")) not in {before, suite_hash(tmp_path / "nowhere")}
    assert suite_hash(tmp_path) == suite_hash(tmp_path, axes=("new",))


def test_a_file_of_one_level_counts_for_runs_that_reach_it(tmp_path: Path) -> None:
    (tmp_path / "test_all.py").write_text("x = 1\n")
    before = suite_hash(tmp_path, level="bench")
    (tmp_path / "test_train.py").write_text('LEVEL = "train"\n')
    assert {suite_hash(tmp_path, level=level) for level in ("import", "step", "bench")} == {before}
    whole = suite_hash(tmp_path)
    assert whole != before
    assert suite_hash(tmp_path, level="train") == whole
    assert suite_hash(tmp_path, level="unheard of") == whole


def test_a_file_that_came_later_leaves_older_runs_valid(tmp_path: Path) -> None:
    (tmp_path / "test_all.py").write_text("x = 1\n")
    before = suite_hash(tmp_path)
    (tmp_path / "test_new.py").write_text('SINCE = "2026-11-25T22:40:00Z"\n')
    moments = [dt.datetime(2026, 11, 25, 22, 40, second, tzinfo=dt.UTC) for second in (0, 1)]
    assert suite_hash(tmp_path, date=moments[0] - dt.timedelta(seconds=1)) == before
    assert {suite_hash(tmp_path, date=moment) for moment in moments} == {suite_hash(tmp_path)} != {before}
    (tmp_path / "test_all.py").write_text("x = 2\n")  # what was there then still counts
    assert suite_hash(tmp_path, date=moments[0] - dt.timedelta(days=1)) != before


def test_no_file_of_the_suite_comes_in_the_future() -> None:
    """A record of this very moment would be stale at once."""
    stated = [
        found
        for path in SUITE.rglob("*.py")
        for found in re.findall(r'^SINCE = "(.*)"$', path.read_text(), re.MULTILINE)
    ]
    assert stated
    assert all(dt.datetime.fromisoformat(each) < dt.datetime.now(dt.UTC) for each in stated)


def test_every_file_of_the_level_train_says_so() -> None:
    """Otherwise it would make the records of shorter runs stale; and run.py must not know of that level."""
    files = {path for path in SUITE.rglob("*.py") if "train" in path.name}
    assert {path.relative_to(SUITE).as_posix() for path in files} == {"test_train.py", "train.py", "workers/train.py"}
    for path in files:
        assert re.search(r'^LEVEL = "train"$', path.read_text(), re.MULTILINE), path
    assert suite_of((), "bench") != suite_of((), "train")


def test_the_level_train_runs_by_its_own_file(tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE / entry_of("train")), "--help"]
    assert "train" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [entry_of(level.value) for level in Level] == [*["run.py"] * 5, "train.py"]
    call = Call(
        pytest=tmp_path, expectation=tmp_path / "e.json", arguments=["--help"], environment={}, entry=entry_of("train")
    )
    started = on_host(Path(sys.executable), call)
    try:
        assert "import,kernels,step,distributed,bench,train" in started.process.communicate(timeout=60)[0]
    finally:
        started.remove()


def _bench(tokens: float, gpu: str = "NVIDIA H200") -> SmokeReport:
    figures = {"TE BF16, tokens per second": {"value": tokens}}
    test = Outcome(id="test_bench.py::x", level="bench", outcome="passed", seconds=1.0, figures=figures)
    machine = {"gpus": [{"name": gpu, "sm": "90", "memory_gib": 139.8}], "driver": "580.1", "python": "3.12.3"}
    return replace(_report("passed", (test,), reason=""), level="bench", device="cuda", machine=machine)


def test_a_run_below_its_baseline_fails_and_names_what_changed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(redact, "_addresses", lambda _: set())
    monkeypatch.setattr(target, "look", lambda *_: Seen(stated={"kind": "host"}, python=(3, 11)))
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    before = evidence.record_evidence(from_report(_bench(100_000)), tmp_path / "before")
    _shell_environment(tmp_path)
    words = ["--host", "--python", sys.executable, "--expected", str(tmp_path / "envbuild" / "expected.json")]
    words += ["--baseline", str(before), "--record", str(tmp_path / "kept")]

    def ran(report: SmokeReport, *more: str):
        monkeypatch.setattr(smoke, "run_smoke", lambda *_, **__: report)
        return CliRunner().invoke(smoke_command, [*words, *more])

    fine = ran(_bench(95_100), "--level", "bench", "--json")
    assert fine.exit_code == 0, fine.output
    assert json.loads(fine.stdout)["baseline"]["rates"] == [
        {"name": "TE BF16", "baseline": 100_000.0, "now": 95_100.0, "part": 0.951}
    ]
    newer = _bench(94_000)
    newer = replace(newer, machine={**newer.machine, "driver": "590.1"})
    slow = ran(newer, "--level", "bench")
    assert isinstance(slow.exception, SmokeError)
    assert "TE BF16 has 94,000 tokens per second, 94.0% of the baseline's 100,000" in str(slow.exception)
    assert "changed since: driver" in str(slow.exception)
    assert "changed: driver: 580.1 -> 590.1" in slow.stdout
    records = {record.verdict: record.reason for record in evidence.load_evidence(tmp_path / "kept")}
    assert records["failed"].startswith("slow: TE BF16 has")  # what is slow is no proof that the cell works
    # a test of the suite failed, too: what it measured is compared all the same
    (test,) = newer.tests
    fallen = replace(newer, tests=(replace(test, outcome="failed", reason="it fell back"),))
    fallen = replace(fallen, verdict="failed", reason="x: it fell back")
    fell = ran(fallen, "--level", "bench")
    assert isinstance(fell.exception, SmokeError)
    assert "x: it fell back; slow: TE BF16 has 94,000 tokens per second" in str(fell.exception)
    assert "changed: driver: 580.1 -> 590.1" in fell.stdout
    # and where it measured nothing its failure is what counts
    nothing = replace(fallen, tests=(replace(fallen.tests[0], figures={}),))
    assert "x: it fell back" in str(ran(nothing, "--level", "bench").exception)
    other = ran(_bench(100_000, "NVIDIA H100"), "--level", "bench")
    assert isinstance(other.exception, UsageError)
    assert "verdict: passed" in other.stdout
    assert len(evidence.load_evidence(tmp_path / "kept")) == 5
    assert "the baseline is of NVIDIA H200, this run was on NVIDIA H100" in str(other.exception)
    assert isinstance(ran(_bench(100_000), "--level", "step").exception, UsageError)


def test_the_suite_hash_sees_every_change(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("2")
    first = suite_hash(tmp_path)
    (tmp_path / "notes.md").write_text("x")
    assert suite_hash(tmp_path) == first
    (tmp_path / "sub" / "b.py").write_text("3")
    second = suite_hash(tmp_path)
    (tmp_path / "sub" / "b.py").rename(tmp_path / "b.py")
    assert len({first, second, suite_hash(tmp_path)}) == 3


def test_the_suite_and_the_runner_agree_on_the_hash() -> None:
    script = f"import sys; sys.path.insert(0, {str(SUITE)!r}); import run; print(run.suite_hash())"
    out = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip() == suite_hash(SUITE)


def test_the_suite_parses_on_python_38_and_never_imports_envbuild() -> None:
    import ast

    files = [path for path in SUITE.rglob("*.py") if "__pycache__" not in path.parts]
    assert len(files) > 15
    for path in files:
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "envbuild" for name in names), path


def test_a_hostfile_that_names_no_host_is_refused_first(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=many\n")
    here = HostTarget(python=Path("/nowhere/python"))
    with pytest.raises(UsageError, match="names no host and slots"):
        smoke.run_smoke(smoke.SmokeRequest(target=here, expected={}, level=Level.BENCH, nodes=hosts), object())


@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_every_count_of_ranks_fits_on_the_hosts(launch, count, slots) -> None:
    counts = importlib.import_module("smokelib.counts")
    hosts = [{"host": f"node{i}", "slots": slots + i % 2} for i in range(count)]
    most = sum(h["slots"] for h in hosts)
    for world in (*counts.worlds(most), *(t * p * d for t, p, d in counts.layouts(most, 8))):
        assert sum(h["slots"] for h in launch.spread(hosts, world)) == world


def test_more_ranks_than_slots_are_refused_first(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=2\n")
    here = HostTarget(python=Path("/nowhere/python"))
    with pytest.raises(HostError, match="8 ranks were asked for, the hosts have 4 slots"):
        smoke.run_smoke(smoke.SmokeRequest(target=here, expected={}, level=Level.STEP, nodes=hosts, nproc=8), object())


def test_nodes_with_an_image_is_refused(tmp_path: Path) -> None:
    image = ImageTarget(reference="x")
    with pytest.raises(UsageError, match="bare hosts"):
        smoke.run_smoke(smoke.SmokeRequest(target=image, expected={}, level=Level.STEP, nodes=tmp_path / "h"), object())


def test_follow_stops_a_run_that_never_ends() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print('alive', flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    log, collected = io.StringIO(), collected_of(START)
    started = Started(process=process, remove=lambda: (process.kill(), process.wait()))
    began = time.monotonic()
    assert follow(started, collected, log, 0.5) is None
    assert time.monotonic() - began < 10
    assert collected.timed_out
    assert process.poll() is not None
    assert "alive" in log.getvalue()


# --- the suite's own launcher -------------------------------------------------------------------


@pytest.fixture(scope="module")
def launch() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SUITE))
    try:
        yield importlib.import_module("smokelib.launch")
    finally:
        sys.path.remove(str(SUITE))


WORKER = """
import atexit, os, signal, subprocess, sys, time
from smokelib import rank as ranks
def body(rank):
    rank.at("first")
    what = rank.args.get(str(rank.rank))
    if what == "raise":
        raise ValueError("broken weights")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if what == "abort":
        atexit.register(os.abort)
    if what == "stall":
        time.sleep(600)
    rank.at("second")
    if what == "wait":
        time.sleep(600)
    rank.result(rank=rank.rank, world=rank.world)
ranks.main(body)
"""


@pytest.fixture
def ranks(launch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start ranks of WORKER; afterwards nothing that carried its mark may be alive."""
    workers = tmp_path / "workers"
    workers.mkdir()
    (workers / "w.py").write_text(WORKER)
    (tmp_path / "smokelib").symlink_to(SUITE / "smokelib")
    monkeypatch.setattr(launch, "HERE", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    marks: list[str] = []
    kill = launch.kill_all
    monkeypatch.setattr(launch, "kill_all", lambda run: (marks.append(run), kill(run)))

    def start(count: int, stall: float = 60, **what: str):
        return launch.run_ranks("w", count, launcher="env", args=what, timeout=60, stall=stall)

    yield start
    assert marks
    assert [launch.processes_of(mark) for mark in marks] == [[]] * len(marks)


def test_ranks_report_in_order(ranks) -> None:
    assert ranks(3) == [{"rank": number, "world": 3} for number in range(3)]


def test_a_rank_that_raises_is_named(launch, ranks) -> None:
    with pytest.raises(launch.RanksFailed, match=r"rank 1 failed: ValueError: broken weights \(w\.py:\d+ in body\)"):
        ranks(2, **{"1": "raise"})


def test_a_rank_whose_process_ends_badly_after_its_work_is_reported(launch, ranks) -> None:
    message = (
        r"ended with \[0, -6\] \(every rank had done its work; what failed is its end: Fatal Python error: Aborted\)"
    )
    with pytest.raises(launch.RanksFailed, match=message):
        ranks(2, **{"1": "abort"})


def test_a_rank_that_is_killed_is_named_and_the_rest_ended(launch, ranks) -> None:
    with pytest.raises(launch.RanksFailed, match=r"rank 1 failed: died at 'first' without a word \(killed by signal 9"):
        ranks(2, **{"0": "wait", "1": "die"})


def test_a_hang_names_the_rank_that_never_came(launch, ranks) -> None:
    with pytest.raises(
        launch.RanksFailed, match=r"rank 1 stopped at 'first'; rank 0 waits at 'second'; rank 1 is in .*w\.py"
    ):
        ranks(2, stall=1.5, **{"0": "wait", "1": "stall"})


def test_a_process_that_a_rank_left_is_ended(ranks) -> None:
    assert ranks(1, **{"0": "leave"}) == [{"rank": 0, "world": 1}]


def test_hostfile(launch, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two nodes\nnode1 slots=8\n\nnode2:8 # second\nnode3\n")
    assert launch.read_hostfile(str(path)) == [
        {"host": "node1", "slots": 8},
        {"host": "node2", "slots": 8},
        {"host": "node3", "slots": 1},
    ]
    path.write_text("\n")
    with pytest.raises(launch.RanksFailed, match="names no host"):
        launch.read_hostfile(str(path))


TWO_HOSTS = [{"host": "node1", "slots": 2}, {"host": "node2", "slots": 2}]
ENV = {"SMOKE_ARGS": "{}", "PATH": "/bin", "PYTHONPATH": "/suite", "SECRET_TOKEN": "x"}


def test_nodes_are_started_over_ssh(launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOKE_RSH", "ssh -p 2222")
    environment = ENV | {"PYTHONPYCACHEPREFIX": "/tmp/of/this/host"}
    commands = launch._commands("torchrun", "w", 4, 1234, environment, TWO_HOSTS, str(tmp_path))
    assert "PYTHONPYCACHEPREFIX" not in commands[1]["argv"][4]
    assert [command["argv"][:4] for command in commands] == [["ssh", "-p", "2222", f"node{i}"] for i in (1, 2)]
    assert "--node_rank 1 --master_addr node1 --master_port 1234" in commands[1]["argv"][4]
    assert "PYTHONPATH=/suite" in commands[1]["argv"][4]
    assert "SECRET_TOKEN" not in commands[0]["argv"][4]


@pytest.mark.parametrize(
    ("version", "hostfile", "lines"),
    [
        ("mpirun (Open MPI) 4.1.4", "--hostfile", "node1 slots=2\nnode2 slots=2\n"),
        ("HYDRA build details", "-f", "node1:2\nnode2:2\n"),
    ],
)
def test_mpirun_gets_its_hosts_and_what_travels(launch, tmp_path: Path, monkeypatch, version, hostfile, lines) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (command,) = launch._commands("mpirun", "w", 4, 1234, ENV, TWO_HOSTS, str(tmp_path))
    argv = command["argv"]
    assert Path(argv[argv.index(hostfile) + 1]).read_text() == lines
    travels = {argv[i + 1] for i, word in enumerate(argv) if word == "-x"}
    assert travels == ({"SMOKE_ARGS", "PATH", "PYTHONPATH"} if hostfile == "--hostfile" else set())


@pytest.mark.parametrize(
    ("slots", "world", "shares"),
    [
        ((8, 8), 2, [1, 1]),
        ((8, 8), 16, [8, 8]),
        ((8, 8), 1, [1]),
        ((4, 2), 6, [4, 2]),
        ((4, 2), 5, [4, 1]),
        ((4, 2), 7, None),
        ((4, 2), 4, [2, 2]),
        ((4, 2), 3, [3]),
        ((1, 4, 4), 8, [4, 4]),
        ((2, 2), 5, None),
    ],
)
def test_ranks_are_spread_over_as_many_hosts_as_share_them_evenly_or_fill_them_in_turn(
    launch, slots, world, shares
) -> None:
    hosts = [{"host": f"node{i}", "slots": n} for i, n in enumerate(slots)]
    if shares is None:
        with pytest.raises(launch.RanksFailed, match=f"{world} ranks do not fit on node0 slots="):
            launch.spread(hosts, world)
    else:
        assert [h["slots"] for h in launch.spread(hosts, world)] == shares


@pytest.mark.parametrize("nproc", [*range(1, 17), 20, 24, 32])
def test_every_count_of_ranks_has_a_batch_that_it_can_share(launch, nproc) -> None:
    counts = importlib.import_module("smokelib.counts")
    worlds, layouts = counts.worlds(nproc), counts.layouts(nproc, 8)
    assert worlds == sorted(set(worlds))
    assert nproc == 1 or worlds[-1] == nproc
    assert all(counts.batch_of(nproc, 8) % world == 0 for world in worlds)
    assert counts.batch_of(nproc, 8) == 8 or nproc > 8 or nproc in {3, 5, 6, 7}
    assert all(2 <= tp * pp * dp <= nproc and 8 % dp == 0 for tp, pp, dp in layouts)
    assert nproc not in {8, 16} or (2, 2, nproc // 4) in layouts
    assert nproc < 16 or max(tp * pp * dp for tp, pp, dp in layouts) == (16 if nproc < 32 else 32)


def test_the_last_pipeline_stage_that_hangs_is_the_one_named(launch, tmp_path: Path) -> None:
    """The worker reports as many points a step on every stage."""
    text = (Path(launch.HERE) / "workers" / "megatron_gpt.py").read_text()
    loop = text[text.index("for step in range(first, args") : text.index('if args.get("save") and')]
    with_loss, _, without = loop.rpartition("        else:")
    assert with_loss.count("rank.at(") - 1 == without.count("rank.at(") == 1
    watch = launch._Watch(2)
    watch.last = {0: {"at": "step 2", "sequence": 8}, 1: {"at": "step 1: all-reduce of the loss", "sequence": 7}}
    message = launch._hang_message(watch, 2, 30.0, str(tmp_path))
    assert message.startswith("no progress for 30 s: rank 1 stopped at 'step 1: all-reduce of the loss'; rank 0 waits")


def test_a_launcher_that_does_not_end_is_reported_as_such(launch, tmp_path: Path) -> None:
    watch = launch._Watch(2)
    watch.done = {0, 1}
    message = launch._hang_message(watch, 2, 30.0, str(tmp_path))
    assert message == "every rank had done its work; their launcher did not end within 30 s"


@pytest.mark.parametrize("local", [True, False])
def test_a_hang_signals_this_hosts_ranks_alone(launch, tmp_path: Path, monkeypatch, local) -> None:
    signalled: list[int] = []
    real = os.kill

    def kill(pid: int, number: int) -> None:
        signalled.append(pid) if number == signal.SIGUSR1 else real(pid, number)

    monkeypatch.setattr(launch.os, "kill", kill)
    watch = launch._Watch(1)
    watch.last = {0: {"at": "step 1", "sequence": 3, "pid": os.getpid()}}
    watch.moved -= 100
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(launch.RanksFailed, match="rank 0 stopped at 'step 1'"):
                launch._follow(watch, [process], 1, 300.0, 60.0, str(tmp_path), local=local)
        finally:
            process.kill()
    assert signalled == ([os.getpid()] if local else [])


@pytest.mark.parametrize(
    ("capability", "head_dim", "te", "cudnn", "there"),
    [
        ((9, 0), 128, (2, 12, 0), 91900, True),
        ((9, 0), 128, (1, 13, 0), 90201, True),
        ((9, 0), 128, (1, 13, 0), 90100, False),
        ((9, 0), 128, (1, 8, 0), 90700, False),
        ((9, 0), 128, (2, 12, 0), 91000, False),
        ((9, 0), 64, (2, 12, 0), 91900, False),
        ((10, 0), 64, (2, 0), 90700, True),
        ((10, 3), 128, (2, 12, 0), 91900, True),
        ((10, 0), 128, (1, 13, 0), 90700, False),
        ((12, 0), 128, (2, 12, 0), 91900, False),
        ((8, 9), 128, (2, 12, 0), 91900, False),
        ((9, 0), 128, (2, 12, 0), None, False),
    ],
)
def test_where_te_must_have_fp8_attention(launch, capability, head_dim, te, cudnn, there) -> None:
    must = importlib.import_module("smokelib.te").must_have_fp8_attention
    assert must(capability, head_dim, te, cudnn) is there


def test_versions(launch) -> None:
    same = importlib.import_module("smokelib.installed").same_version
    assert same("2.11.0", "2.11.0+cu130")
    assert same("2.11.0+cu130", "2.11.0+cu130")
    assert not same("2.11.0+cu126", "2.11.0+cu130")
    assert not same("2.11.1", "2.11.0")


@pytest.mark.parametrize("found", ["2.6.0rc1", "2.6.0.dev3", "2.6.0a2", "2.6.0.dev3+g1", "2.6.1", "2.5.0.post1"])
def test_what_is_no_release_is_not_of_one(launch, found) -> None:
    of_release = importlib.import_module("smokelib.installed").of_release
    assert not of_release(found, "2.6.0")
    assert all(of_release(good, "2.6.0") for good in ("2.6", "2.6.0", "2.6.0.post1", "2.6.0+cu126"))


def test_the_mounted_pytest_is_not_part_of_the_environment(launch, tmp_path: Path, monkeypatch) -> None:
    installed = importlib.import_module("smokelib.installed")
    folder = tmp_path / "mounted" / "back" / "ghost-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: ghost\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    assert installed.version_of("ghost") == "1.0"
    monkeypatch.setenv(installed.ENV_MOUNTED, str(tmp_path / "mounted"))
    assert installed.version_of("ghost") is None


def test_fa3_is_looked_up_as_te_does(launch, tmp_path: Path, monkeypatch) -> None:
    """TE's own source says which distribution it asks for, and which module it then imports."""
    te = importlib.import_module("smokelib.te")
    folder = tmp_path / "attention"
    folder.mkdir()
    (folder / "backends.py").write_text(
        "try:\n    v = PkgVersion(get_pkg_version('flash-attn-3'))\nexcept E:\n    pass\nelse:\n"
        "    from flash_attn_3.flash_attn_interface import flash_attn_func as flash_attn_func_v3\n"
    )
    monkeypatch.setattr(te, "_sources", lambda: [str(folder / "backends.py")])
    assert te.flash_attention_3_lookup() == {
        "distribution": "flash-attn-3",
        "module": "flash_attn_3.flash_attn_interface",
    }
    monkeypatch.setattr(te, "_sources", list)
    assert te.flash_attention_3_lookup() is None


def test_nothing_of_the_launch_survives_a_killed_parent(launch, tmp_path: Path) -> None:
    """SIGKILL to whoever launched the ranks takes the ranks along."""
    workers = tmp_path / "workers"
    workers.mkdir()
    (workers / "w.py").write_text(WORKER)
    (tmp_path / "smokelib").symlink_to(SUITE / "smokelib")
    script = f"from smokelib import launch; launch.HERE = {str(tmp_path)!r}\n"
    script += "launch.run_ranks('w', 2, launcher='env', args={'0': 'wait', '1': 'wait'}, timeout=60)"
    env = {**os.environ, "PYTHONPATH": str(SUITE), "PYTHONDONTWRITEBYTECODE": "1", "KILLED_PARENT_TEST": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=env)
    needle = f"KILLED_PARENT_TEST={tmp_path}".encode()

    def alive() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in {parent.pid, os.getpid()}:
                try:
                    if needle in (entry / "environ").read_bytes().split(b"\0") and launch._alive(int(entry.name)):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    deadline = time.monotonic() + 20
    while len(alive()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the ranks have set their parent-death signal
    assert len(alive()) == 2
    parent.kill()
    parent.wait()
    while alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive() == []


def test_releases(launch) -> None:
    of = importlib.import_module("smokelib.installed").of_release
    assert of("2.6.0.post1", "2.6.0")
    assert of("2.6.0.post1", "2.6")
    assert of("0.16.1", "0.16.1")
    assert not of("2.1", "2.10")
    assert not of("2.12.1", "2.12.0")


def test_what_the_lock_lists(launch) -> None:
    expectation = importlib.import_module("smokelib.expectation").Expectation(
        {
            "cell": {"cuda": "12.6", "megatron": "0.12.3", "mpi": "openmpi-5.0.5", "deepspeed": "none"},
            "packages": {"sgd_sai": "1.0.3"},
            "components": {
                "stack": {"path": "/workspace/megatron-lm", "patches": ["sgd"]},
                "apex": {"extensions": ["amp_C"]},
            },
        }
    )
    assert all(expectation.lists(name) for name in ("apex", "megatron", "mpi", "sgd-sai"))
    assert not any(expectation.lists(name) for name in ("te", "deepspeed", "flash-attn"))
    assert expectation.component("megatron")["patches"] == ["sgd"]
    assert expectation.paths == ["/workspace/megatron-lm"]
    assert expectation.is_cuda


def test_follow_keeps_what_an_interrupted_run_saw() -> None:
    begun = json.dumps({"event": "begin", "id": "test_step.py::test_a", "level": "step"})
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time; print({MARK + begun!r}, flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
    )

    def interrupt(event: dict) -> None:
        if event["event"] == "begin":
            raise KeyboardInterrupt

    collected = collected_of(START)
    collected.progress = interrupt
    started = Started(process=process, remove=lambda: (process.kill(), process.wait()))
    assert follow(started, collected, io.StringIO(), 60) is None
    assert process.poll() is not None
    assert collected.judge(None, 60) == ("interrupted", "interrupted in test_step.py::test_a")


def _ends(tmp_path: Path, script: str) -> Started:
    """Start a suite of one shell script as the runner starts its own."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    call = Call(pytest=tmp_path, expectation=tmp_path / "expected.json", arguments=[], environment={})
    return on_host(python, call)


def test_what_an_environment_sets_for_its_own_tests_does_not_reach_the_suite(tmp_path: Path, monkeypatch) -> None:
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONOPTIMIZE"):
        monkeypatch.setenv(name, "1")
    listed = _ends(tmp_path, "env").process.communicate(timeout=10)[0]
    assert "PYTHONDONTWRITEBYTECODE=1" in listed
    assert not re.search(r"(?m)^(PYTEST_ADDOPTS|PYTEST_PLUGINS|PYTHONOPTIMIZE)=", listed)


def _passes_soon(started: Started) -> None:
    """Follow a suite whose only test passed: it is judged so, long before its limit."""
    collected = collected_of(START, ended("a"))
    began = time.monotonic()
    code = follow(started, collected, io.StringIO(), 60)
    assert time.monotonic() - began < 10
    assert collected.judge(code, 60) == ("passed", "")


def test_follow_waits_for_no_pipe_that_somebody_else_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_LAST_WORDS_S", 0.3)
    started = _ends(tmp_path, f"echo '{MARK}{json.dumps(END)}'; sleep 600 & echo $! >{tmp_path}/left; exit 0")
    _passes_soon(started)
    left = Path("/proc") / (tmp_path / "left").read_text().strip() / "stat"
    deadline = time.monotonic() + 5
    while left.exists() and ") Z " not in left.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left.exists() or ") Z " in left.read_text()


def test_a_suite_that_needs_long_to_exit_has_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_EXIT_S", 0.3)
    started = _ends(tmp_path, f"echo '{MARK}{json.dumps(END)}'; exec sleep 600")
    _passes_soon(started)
    assert started.process.poll() is not None


def test_a_python_that_does_not_run_is_named_by_its_path(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(SmokeError, match="its Python does not run: broken") as caught:
        look(HostTarget(python=python), object())
    assert caught.value.where == f"this host, {python}"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("exec yes", "its Python printed more than 16,777,216 bytes"),
        ("trap '' TERM INT; sleep 60", "its Python did not end within 1 s"),
        ("echo garbage", "the output of its Python cannot be read: no answer"),
        ("echo '{}'", "cannot be read: not its version"),
        ("printf '{\"a\":'; head -c 1000000 /dev/zero | tr '\\0' '['", "nested deeper than 64 levels"),
        (
            """echo '{"python":[3,11],"executable":"x","expected":{"cell":[],"packages":{},"components":{}}}'""",
            "its cell is no table",
        ),
        ("printf '\\033[2J\\007bad' >&2; exit 1", r"does not run: \\x1b\[2J\\x07bad"),
    ],
)
def test_a_hostile_python_is_one_clear_message(tmp_path: Path, monkeypatch, script: str, says: str) -> None:
    monkeypatch.setattr(target, "_LOOK_S", 1.0 if "sleep" in script else 60.0)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(SmokeError, match=says):
        look(HostTarget(python=python), object())


@pytest.mark.parametrize(
    "line",
    [
        "[" * 1_000_000,
        json.dumps({"event": "begin"}),
        json.dumps({"event": "test", "id": "a"}),
        json.dumps(ended("a") | {"seconds": "1"}),
        json.dumps(ended("a") | {"tables": [{"title": "x"}]}),
        json.dumps(ended("a") | {"id": ["a"]}),
        json.dumps({"event": "verdict", "kind": "no-gpu"}),
        json.dumps(START | {"machine": []}),
        json.dumps({"event": ["end"]}),
        json.dumps(END | {"code": "0"}),
        json.dumps(START | {"machine": {"gpus": [{}]}}),
        json.dumps(START | {"machine": {"gpus": [{"name": "x", "sm": "90", "memory_gib": [1]}]}}),
        json.dumps(START | {"machine": {"driver": 5}}),
        '{"event": "test", "id": "a", "level": "step", "outcome": "passed", "seconds": NaN}',
        "[]",
        "3",
    ],
)
def test_events_of_another_shape_are_none(line: str) -> None:
    assert read_event(MARK + line) is None


def test_what_is_not_finite_or_no_text_is_kept() -> None:
    """A kernel that computes NaN had its test dropped, and with it the reason."""
    figures = {"error": {"value": math.inf, "bound": 0.01}}
    event = read_event(MARK + json.dumps(ended("a", "failed", "half \ud800") | {"figures": figures}))
    assert event is not None
    assert event["figures"] == {"error": {"value": "Infinity", "bound": 0.01}}
    assert event["reason"] == "half \\ud800"
    found = collected_of(START, event, END)
    assert found.judge(1, 60.0) == ("failed", "a: half \\ud800")


def test_a_run_whose_events_cannot_be_read_does_not_pass() -> None:
    found = collected_of(START, ended("a"))
    found.line(MARK + "{\n")
    found.line(MARK + json.dumps(END) + "\n")
    assert found.judge(0, 60.0) == ("failed", "1 event of the suite cannot be read after a")


@pytest.mark.parametrize(("code", "verdict"), [(255, "host"), (1, "failed")])
def test_what_apptainer_says_where_it_starts_nothing(code: int, verdict: str) -> None:
    found = collected_of()
    found.line("FATAL:   container creation failed: mount hook function failure\n")
    got, reason = found.judge(code, 60.0)
    assert got == verdict
    assert "container creation failed" in reason
    found = collected_of(START)  # a program of the suite can say it, too
    found.line("FATAL:   container creation failed\n")
    assert found.judge(255, 60.0)[0] == "failed"


def test_control_characters_of_the_suite_are_escaped() -> None:
    event = read_event(MARK + json.dumps(ended("\x1b]0;x\x07a", "failed", "one\ntwo\x1b[31m\r\tred")))
    assert event is not None
    assert event["id"] == r"\x1b]0;x\x07a"
    assert event["reason"] == "one\ntwo\\x1b[31m    red"


def test_a_suite_that_prints_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "_LOG_LIMIT", 3_000_000)
    for script in ("exec yes", "exec cat /dev/zero"):
        started, collected, log = _ends(tmp_path, script), collected_of(START), io.StringIO()
        began = time.monotonic()
        assert follow(started, collected, log, 60) is None
        assert time.monotonic() - began < 30
        assert started.process.poll() is not None
        assert len(log.getvalue()) <= 3_000_000
        assert collected.judge(None, 60) == (
            "failed",
            "it printed more than 3,000,000 characters before its first test",
        )


# --- the command ------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run `envbuild smoke` with a suite that passes at once; returns what the runner was given."""
    given: dict = {}

    def run_smoke(request, *_, **__):
        given["request"] = request
        return _report("passed", (Outcome(id="a", level="step", outcome="passed", seconds=1.0),), reason="")

    monkeypatch.setattr(target, "look", lambda *_: Seen(stated={"kind": "host"}, python=(3, 11)))
    monkeypatch.setattr(smoke, "run_smoke", run_smoke)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)

    def call(*words: str) -> smoke.SmokeRequest | None:
        CliRunner().invoke(smoke_command, ["--host", *words], catch_exceptions=False)
        return given.get("request")

    call.given = given  # type: ignore[attr-defined]
    return call


def _shell_environment(prefix: Path) -> Path:
    """Lay out what the shell rendering leaves and return the environment's Python."""
    python = prefix / "venv" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    (prefix / "envbuild").mkdir()
    expected = {"cell": {"cuda": "cpu"}, "packages": {}, "components": {}, "cell_id": "here"}
    (prefix / "envbuild" / "expected.json").write_text(json.dumps(expected))
    return python


@pytest.mark.parametrize("option", ["--record", "--junit"])
def test_what_could_not_be_written_is_refused_before_the_run(command, tmp_path: Path, option) -> None:
    python = _shell_environment(tmp_path)
    words = ["--python", str(python), "--expected", str(tmp_path / "envbuild" / "expected.json")]
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="nothing can be written to"):
        command(*words, option, str(tmp_path / "file" / "x" / "y"))
    assert not command.given


def test_an_active_environment_of_the_shell_rendering_has_its_expectation(command, tmp_path, monkeypatch) -> None:
    python = _shell_environment(tmp_path / "one")
    other = _shell_environment(tmp_path / "two")
    with pytest.raises(UsageError, match="--host needs --expected FILE"):
        command()
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "one" / "venv"))
    monkeypatch.setenv("PATH", f"{python.parent}:{os.environ['PATH']}")
    assert command().expected["cell_id"] == "here"
    assert command("--python", str(python)).target.python == python
    with pytest.raises(UsageError, match="--host needs --expected FILE"):  # it says nothing of another environment
        command("--python", str(other))
    (tmp_path / "one" / "envbuild" / "expected.json").unlink()
    with pytest.raises(UsageError, match="--host needs --expected FILE"):
        command()


def test_comments_of_a_hostfile_are_no_nodes(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redact, "_addresses", lambda _: set())
    python = _shell_environment(tmp_path)
    expected = str(tmp_path / "envbuild" / "expected.json")
    hosts = tmp_path / "hosts"
    hosts.write_text("# the rack\nnode1 slots=8\n\nnode2 slots=8 # the second\n")
    command("--python", str(python), "--expected", expected, "--nodes", str(hosts), "--record", str(tmp_path / "kept"))
    assert [kept.nodes for kept in evidence.load_evidence(tmp_path / "kept")] == [2]


FUSED = {
    "attention": "fused",
    "fused": [],
    "reported": {"kind": "fused", "detail": "1"},
    "optimizer_class": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
}


@pytest.mark.parametrize(
    ("layers", "logged", "message"),
    [
        ("te", {}, None),
        ("te", {"reported": None}, None),  # a TE before 1.7
        ("local", {"attention": "unfused", "reported": None}, None),  # Megatron's own attention is
        (
            "te",
            {
                "attention": "unfused",
                "reported": {"kind": "unfused", "detail": None},
                "fused": ["void softmax_forward"],
            },
            "Megatron's TE layers ran unfused attention on rank 1: softmax_forward",
        ),
        ("te", {"reported": {"kind": "unfused", "detail": None}}, "the profiler saw fused"),
        ("local", {"optimizer_class": "torch.optim.adamw.AdamW"}, "rank 1: Megatron took torch.optim.adamw.AdamW"),
    ],
)
def test_a_fallback_inside_megatron_is_no_pass(launch, monkeypatch, layers, logged, message) -> None:
    with patch.dict(sys.modules, {"torch": MagicMock()}):  # imported by the suite, and not needed here
        step, expectation = importlib.import_module("test_step"), importlib.import_module("smokelib.expectation")
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"):
        monkeypatch.delenv(name, raising=False)
    expected = expectation.Expectation({"components": {"te": {}}, "packages": {}})
    results = [FUSED, FUSED | logged]
    if message is None:
        step.took_fused_paths(results, layers, expected)
        return
    with pytest.raises(AssertionError, match=re.escape(message)):
        step.took_fused_paths(results, layers, expected)
