"""`envbuild bisect` as it is called: what names a cell, its answer and exit codes, and going on after a kill.

The images are the one thing that is not real here: what would be built is taken down, and a function judges it.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.cli import bisect as command
from envbuild.cli import main
from envbuild.cli.bisect_ends import cell_of
from envbuild.errors import HostError, SmokeError
from envbuild.evidence.report import SmokeReport
from envbuild.matrix.load import load_matrix
from envbuild.paths import data_dir
from envbuild.settings import Settings
from envbuild.verify import command as running
from envbuild.verify.collected import Collected
from envbuild.verify.start import start_here

GOOD, BAD = "cuda=cpu python=3.10 torch=2.11.0", "cuda=cpu python=3.12 torch=2.13.0 mpi=mpich"


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in a new cache, with images that are only their cells and a test that looks at versions."""
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "_made", lambda _matrix, cell, _asked: json.dumps(dict(cell.versions)))

    class Run:
        made: list[dict[str, str]] = []
        gpus: Any = None
        fails: Any = staticmethod(lambda versions: versions["torch"] == "2.13.0+cpu")
        code = 1

        def test(self, image: str, *_: object, gpus: str, **__: object) -> tuple[int, str]:
            versions = json.loads(image)
            self.gpus = gpus
            self.made.append(versions)
            return (self.code if self.fails(versions) else 0), "last \x1b[31mline"

        def __call__(self, *words: str) -> tuple[int, str, str]:
            self.made = []
            with pytest.raises(SystemExit) as ended:
                main(["bisect", *words])
            out, err = capsys.readouterr()
            return int(ended.value.code or 0), out, err

    run = Run()
    monkeypatch.setattr(running, "run_test", run.test)
    return run


def test_the_axis_is_named_and_the_verdicts_are_kept(bisect: Any) -> None:
    code, out, _ = bisect(GOOD, BAD, "--json", "--", "true")
    answer = json.loads(out)
    assert code == 0
    assert answer["found"]["axes"] == [{"axis": "torch", "good": "2.11.0+cpu", "bad": "2.13.0+cpu"}]
    assert answer["found"]["runs"] == len(bisect.made) <= 4
    assert answer["stops"][0]["verdict"] == "good"
    assert {each["axis"] for stop in answer["stops"] for each in stop["moved"]} >= {"python", "mpi"}
    # once more: every verdict is kept, and nothing runs
    code, out, err = bisect(GOOD, BAD, "--", "true")
    assert (code, bisect.made) == (0, [])
    assert "the test turns bad with torch 2.11.0+cpu -> 2.13.0+cpu" in out
    assert "kept from an earlier run" in err
    assert "\x1b" not in out + err
    # another test is another search, and --restart forgets
    assert bisect(GOOD, BAD, "--", "false")[0] == 0
    assert bisect.made
    assert bisect(GOOD, BAD, "--restart", "--", "true")[0] == 0
    assert (bool(bisect.made), bisect.gpus) == (True, "auto")  # a machine without a GPU runs it, too
    # as do other GPUs
    assert bisect(GOOD, BAD, "--gpus", "1", "--", "true")[0] == 0
    assert (bool(bisect.made), bisect.gpus) == (True, "1")


def test_ends_that_do_not_differ_in_the_test(bisect: Any) -> None:
    bisect.fails = lambda _: True
    code, _, err = bisect(GOOD, BAD, "--", "true")
    assert (code, "GOOD fails the test: exit code 1: last" in err) == (7, True)
    bisect.fails = lambda _: False
    code, _, err = bisect(GOOD, BAD, "--restart", "--", "true")
    assert (code, "BAD passes the test" in err) == (7, True)


def test_a_test_that_cannot_judge_stops_the_search_and_is_asked_again(bisect: Any) -> None:
    bisect.code = 125
    code, _, err = bisect(GOOD, BAD, "--", "true")
    assert (code, "cannot judge" in err) == (7, True)
    bisect.code = 1
    code, _, _ = bisect(GOOD, BAD, "--", "true")
    assert code == 0
    assert not any(versions["python"] == "3.10" and "mpi" not in versions for versions in bisect.made)  # that is GOOD


@pytest.mark.parametrize("code", [130, 137, 143])
def test_a_test_that_was_killed_is_no_verdict_and_runs_again(bisect: Any, code: int) -> None:
    bisect.code = code
    ended, _, err = bisect(GOOD, BAD, "--", "true")
    assert (ended, f"stopped from outside (exit code {code})" in err) == (8, True)
    bisect.code = 1
    assert bisect(GOOD, BAD, "--", "true")[0] == 0


STARTS_NOT = [
    "Error response from daemon: failed to create task for container: mkdir /mnt/x: read-only file system",
    "Error: OCI runtime error: crun: cannot find cgroup",
    "Error: unable to start container 1234: no such image",
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
    "error during connect: Get http://x/v1.51/containers/json: EOF",
]


@pytest.mark.parametrize("line", STARTS_NOT)
def test_an_engine_that_starts_no_container_is_no_verdict(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PATH": os.environ["PATH"], "LINE": line}

    def started(text: str) -> Any:
        return start_here(["sh", "-c", text], environment)

    def run(text: str) -> tuple[int, str]:
        monkeypatch.setattr(running, "start_guest", lambda *_, **__: started(text))
        return running.run_test("img", ["x"], Settings(cache_dir=tmp_path), timeout_s=20)

    monkeypatch.setattr(
        "envbuild.engine.guest.look_up", lambda *_: SimpleNamespace(id="sha256:" + "1" * 64, platform="")
    )
    with pytest.raises(HostError):
        run('printf "%s\\n" "$LINE"; echo "failed to start containers: x"; exit 1')
    # a test that says so in the middle of a line, or passes, is judged
    assert run('echo "the log has: $LINE"; exit 3')[0] == 3
    assert run('echo "Error: unable to load the checkpoint"; exit 1')[0] == 1
    assert run('printf "%s\\n" "$LINE"')[0] == 0
    # the report of `smoke TAG -- CMD`
    report = running.CommandReport(
        command=("x",),
        where={"kind": "image", "reference": "img"},
        code=1,
        verdict="failed",
        reason="exit code 1",
        ranks=(),
        unread=(),
        tail=(line,),
        seconds=1.0,
        log="x",
    )
    with pytest.raises(HostError):
        report.raise_for_verdict()
    # and the bench
    suite = Collected(lambda _: None)
    suite.line(line + "\n")
    assert suite.judge(1, 60)[0] == "host"


def test_an_image_for_another_processor_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = SimpleNamespace(id="sha256:" + "1" * 64, platform="linux/s390x", reference="img")
    monkeypatch.setattr("envbuild.run.apptainer.ApptainerRuntime.look_up", lambda *_: foreign)
    monkeypatch.setattr(running, "start_guest", lambda *_, **__: pytest.fail("it was started"))
    with pytest.raises(HostError, match="s390x"):
        running.run_test("/x.sif", ["true"], Settings(cache_dir=tmp_path), timeout_s=20)


@pytest.mark.parametrize(("verdict", "error"), [("hung", SmokeError), ("host", HostError), ("failed", None)])
def test_a_bench_that_hangs_stops_the_search(
    verdict: Any, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = SmokeReport(
        target={"kind": "image", "reference": "img"},
        cell_id="x",
        cell={},
        lock_digest=None,
        level="bench",
        device="cpu",
        nproc=1,
        verdict=verdict,
        reason="why",
        suite="",
        seed=None,
        machine={},
        launchers=(),
        tests=(),
        seconds=1.0,
        log="x",
    )
    monkeypatch.setattr("envbuild.verify.target.look", lambda *_: SimpleNamespace(expected={}))
    seen: list[Any] = []
    monkeypatch.setattr("envbuild.verify.smoke.run_smoke", lambda request, *_, **__: seen.append(request) or report)
    asked: Any = SimpleNamespace(baseline=None, timeout_s=60.0, gpus="0")
    test = command._bench_test(Settings(cache_dir=tmp_path), asked, tmp_path)
    if error is None:
        assert test("img") == (False, "why")
        assert [(request.gpus, request.keyword) for request in seen] == [("0", "bench")]
        return
    with pytest.raises(error, match="why"):
        test("img")


def test_the_bench_of_good_is_kept_as_a_run_of_the_bench_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that nobody takes it for a run of the whole suite."""
    report = SimpleNamespace(verdict="passed")
    kept: list[Any] = []
    monkeypatch.setattr("envbuild.verify.target.look", lambda *_: SimpleNamespace(expected={}))
    monkeypatch.setattr("envbuild.verify.smoke.run_smoke", lambda *_, **__: report)
    monkeypatch.setattr("envbuild.evidence.recording.from_report", lambda *_, **more: SimpleNamespace(**more))
    monkeypatch.setattr("envbuild.evidence.baseline.check_baseline", lambda *_: None)
    monkeypatch.setattr("envbuild.evidence.records.record_evidence", lambda record, _: kept.append(record))
    asked: Any = SimpleNamespace(baseline=None, timeout_s=60.0, gpus="all")
    assert command._bench_test(Settings(cache_dir=tmp_path), asked, tmp_path)("img") == (True, "")
    assert [record.keyword for record in kept] == ["bench"]


def test_a_dry_run_builds_nothing(bisect: Any) -> None:
    code, out, _ = bisect(GOOD, BAD, "--dry-run", "--json")
    answer = json.loads(out)
    assert (code, bisect.made, answer["found"]) == (0, [], None)
    assert all(stop["verdict"] is None for stop in answer["stops"])
    _, out, _ = bisect(GOOD, BAD, "--dry-run")
    listed = [line.split()[0] for line in out.splitlines()[2:]]
    assert listed == [stop["cell"] for stop in answer["stops"]]  # in whole, each on its line


@pytest.mark.parametrize(
    ("words", "exit_code", "says"),
    [
        (("nope", BAD), 2, "'nope' is no lock, no stack and no id"),
        (("\x1b[2J", BAD), 2, "\\x1b[2J"),
        (("x" * 300, BAD), 2, "is no lock, no stack and no id"),
        (("te=" + "9" * 300, BAD), 2, ""),
        (("te=", BAD), 2, "'te=' is no axis with a version"),
        (("what=1", BAD), 2, "'what=1' is no axis"),
        ((GOOD + " python=3.12", BAD), 2, "python is named twice"),
        ((GOOD, GOOD), 2, "the two are one cell"),
        ((GOOD, BAD, "--"), 2, "no test follows"),
        ((GOOD, BAD, "--env", "A=1"), 2, "none follows"),
        ((GOOD, BAD, "--gpus", "x"), 2, "names no GPUs"),
        ((GOOD, BAD, "--baseline", "x", "--", "true"), 2, "a baseline is of the bench"),
        (("cuda=cpu te=2.6", BAD), 3, ""),
    ],
)
def test_what_cannot_be_asked(bisect: Any, words: tuple[str, ...], exit_code: int, says: str) -> None:
    code, _, err = bisect(*words)
    assert (code, says in err) == (exit_code, True), err
    assert "Traceback" not in err


def test_a_cell_by_its_lock_its_id_a_stack_and_a_record(bisect: Any) -> None:
    matrix = load_matrix()
    settings = command_settings()
    folder = next(iter(sorted((data_dir("matrices") / "locks").glob("*/lock.json")))).parent
    by_lock = cell_of(str(folder), "GOOD", matrix, settings)
    assert cell_of(str(folder / "lock.json"), "GOOD", matrix, settings) == by_lock
    assert cell_of(by_lock.id, "GOOD", matrix, settings).id == by_lock.id
    by_stack = cell_of("llama3-70b", "GOOD", matrix, settings)
    assert by_stack == cell_of("stack=llama3-70b", "GOOD", matrix, settings)


def command_settings() -> Any:
    from envbuild.settings import load_settings

    return load_settings()
