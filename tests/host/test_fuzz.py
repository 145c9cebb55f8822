"""A bounded share of the fuzzing, and that the harness finds what it is to find. `make fuzz` runs at length."""

import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from envbuild.errors import DataError  # noqa: E402
from tests.fuzz import drive  # noqa: E402
from tests.fuzz.targets import TARGETS, Target, forget  # noqa: E402

FOUND = ROOT / "tests" / "fuzz" / "found"


@pytest.fixture(autouse=True, scope="module")
def _folder():
    yield
    forget()


# About a second of each: the same inputs on every machine.
RUNS = {
    "specs": 3000,
    "lock": 200,
    "pylock": 200,
    "stack": 150,
    "manifest": 300,
    "patches": 3000,
    "index": 2000,
    "registry": 3000,
    "gitmodules": 3000,
    "hostfile": 1000,
    "settings": 300,
    "record": 500,
    "binary": 400,
    "recipes": 150,
    "catalogue": 500,
    "documents": 300,
}


@pytest.mark.parametrize("name", list(TARGETS))
def test_a_share_of_the_fuzzing_fails_nowhere(name):
    runs = RUNS[name]
    result = drive.execute(TARGETS[name], seed=20261123, first=0, runs=runs, until=float("inf"), minimise=False)
    assert [f"{f.name}: {f.text}" for f in result.failures.values()] == []
    assert result.executions == runs


@pytest.mark.parametrize("name", list(TARGETS))
def test_a_seed_of_each_kind_is_accepted(name):
    """Mutations of a seed that its reader refuses at the first line would leave all behind it untried."""
    taken = {}
    for kind, _, body in TARGETS[name].seeds():
        taken[kind] = taken.get(kind, False) or TARGETS[name](kind.encode() + b"\n" + body)
    assert [kind for kind, accepted in taken.items() if not accepted and kind != "nope"] == []


@pytest.mark.parametrize("path", sorted(FOUND.glob("*.input")), ids=lambda path: path.stem)
def test_an_input_that_failed_once_fails_no_more(path):
    drive.replay(path)


def test_inputs_depend_on_seed_target_and_number_alone():
    target = TARGETS["lock"]
    first = [drive.input_of(target, target.inputs, 1, number) for number in range(200)]
    assert [drive.input_of(target, target.inputs, 1, number) for number in reversed(range(200))] == first[::-1]
    other = [drive.input_of(target, target.inputs, 2, number) for number in range(200)]
    seeds = len(target.inputs)
    assert other[:seeds] == first[:seeds]
    assert sum(a != b for a, b in zip(first[seeds:], other[seeds:], strict=True)) > 150


def planted(read, name="planted"):
    return Target(name=name, read=read, seeds=lambda: [("x", "json", b'{"a": [1, 2, "three"], "b": {"c": null}}')])


def fails_at_nul(kind, body):
    if b"\0" in body:
        raise KeyError("x")
    raise DataError("x")


def hangs_at_nul(kind, body):
    while b"\0" in body:
        pass


def dies_at_nul(kind, body):
    if b"\0" in body:
        import os

        os.abort()


def grows_at_nul(kind, body):
    if b"\0" in body:
        bytearray(700 << 20).count(b"x")


def sleeps_at_nul(kind, body):
    if b"\0" in body:
        time.sleep(600)


@pytest.mark.parametrize(
    ("read", "kind"),
    [(fails_at_nul, "KeyError"), (hangs_at_nul, "hang"), (dies_at_nul, "crash"), (grows_at_nul, "growth")],
)
def test_a_planted_fault_is_found_counted_and_kept_small(read, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "SLOWEST_S", 0.2 if kind == "hang" else 20)
    runs = 40 if kind in {"hang", "growth"} else 150  # some of them hold a NUL
    [result] = drive.fuzz([planted(read)], runs=runs, seconds=60, seed=1, jobs=1)
    [failure] = result.failures.values()
    assert failure.kind == kind
    assert result.executions >= 1
    assert b"\0" in failure.data
    if kind == "KeyError":
        assert failure.data == b"x\n\0"
        assert result.executions == 150
        assert failure.count > 1
    [kept] = drive.keep([result], tmp_path)
    assert kept.read_bytes() == failure.data
    assert drive.table([result]).splitlines()[1].split()[4] == "1"  # name, executions, accepted and its %


def test_a_reader_that_waits_for_ever_is_killed():
    target = planted(sleeps_at_nul)
    target = Target(name="planted", read=target.read, seeds=target.seeds, wall=2.0)
    [result] = drive.fuzz([target], runs=150, seconds=60, seed=1, jobs=1)
    [failure] = result.failures.values()
    assert failure.kind == "hang"
    assert b"\0" in failure.data


def test_what_is_run_does_not_depend_on_the_number_of_processes():
    every = [TARGETS["hostfile"], TARGETS["patches"]]
    one, two = (drive.fuzz(every, runs=600, seconds=120, seed=3, jobs=jobs) for jobs in (1, 2))
    assert [(r.target, r.executions, r.accepted) for r in one] == [(r.target, r.executions, r.accepted) for r in two]
    assert sum(r.executions for r in one) == 600
