"""`envbuild ci`: which cells are worth verifying."""

import itertools
import json
import shlex

import pytest

from envbuild.cli import main
from envbuild.curate.coverage import AXES, cells_to_verify
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.enumerate import enumerate_cells
from envbuild.stacks.load import load_stack, stack_names


@pytest.fixture
def run(capsys):
    def call(*args):
        with pytest.raises(SystemExit) as caught:
            main(["ci", *args])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


def minor(version):
    public = version.partition("+")[0].split(".")
    return ".".join(public[:2])


def pairs(versions):
    used = [(axis, minor(versions[axis])) for axis in AXES if axis in versions]
    return {(*one, *other) for one, other in itertools.combinations(used, 2)}


def test_the_whole_list_covers_every_pair_that_some_cell_has():
    matrix = load_matrix()
    within = Request(pins=(Pin(axis="cuda", spec=">=13", origin="--cuda"),))
    found = cells_to_verify(matrix, {}, within)
    every = set().union(*(pairs(c) for c in enumerate_cells(matrix, AXES, within.pins)))
    held = set().union(*(pairs(v.cell.versions) for v in found.cells))
    assert every
    assert every <= held
    assert found.pairs == found.covered == len(every)
    # far fewer than all combinations
    assert len(found.cells) < sum(1 for _ in enumerate_cells(matrix, AXES, within.pins))


def test_stacks_and_documented_cells_come_first(run):
    code, out, err = run("--json", "--limit", "8")
    assert code == 0
    include = json.loads(out)["include"]
    assert [entry["stack"] for entry in include[:5]] == list(stack_names())
    assert [entry["args"] for entry in include[5:]] == [
        "--cuda 13.0 --te 2.12",
        "--cuda cpu",
        "--cuda 12.6 --te 2.6 --gpu h100 --flash-attn-hopper auto",
    ]
    assert "8 cells contain" in err


def test_the_answer_is_what_a_workflow_takes_and_the_same_every_time(run):
    first = run("--json", "--cuda", "13.0", "--limit", "6")
    assert first == run("--json", "--cuda", "13.0", "--limit", "6")
    answer = json.loads(first[1])
    assert set(answer) == {"include"}
    assert all(set(entry) == {"id", "args", "stack"} for entry in answer["include"])
    assert all(entry["id"].startswith("cu130-") for entry in answer["include"])
    # a longer list begins with the shorter one
    longer = json.loads(run("--json", "--cuda", "13.0", "--limit", "9")[1])["include"]
    assert longer[:6] == answer["include"]


def test_the_flags_of_an_entry_resolve_to_its_cell(run, capsys):
    include = json.loads(run("--json", "--cuda", "12.8", "--limit", "3")[1])["include"]
    for entry in include:
        with pytest.raises(SystemExit):
            main(["resolve", *shlex.split(entry["args"]), "--json"])
        assert json.loads(capsys.readouterr().out)["id"] == entry["id"]


def test_a_stack_that_leaves_an_axis_out(run):
    code, out, _ = run("--stack", "llm-jp", "--json")
    assert code == 0
    include = json.loads(out)["include"]
    assert {entry["stack"] for entry in include} == {"llm-jp"}
    assert include[0]["args"] == "--stack llm-jp"
    assert "te" not in load_stack("llm-jp").axes or load_stack("llm-jp").axes["te"] == "none"


def test_a_version_that_does_not_exist(run):
    code, _, err = run("--cuda", "99")
    assert code == 2
    assert "no release of cuda matches '99'" in err
