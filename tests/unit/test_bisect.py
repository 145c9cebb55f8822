"""Ways between two cells, and the step that turns a test: random pairs of cells with planted faults."""

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import itertools

from random_matrix import random_matrix, random_request
from small_matrix import best_cell, small_matrix

from envbuild.errors import NoCellError, SmokeError, UsageError
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.pipeline.bisect import Log, bisect, most_runs
from envbuild.solver.between import Stop, path_between, pins_of
from envbuild.solver.solve import solve


def cell_of(matrix, **pins):
    found = tuple(Pin(axis=a.replace("_", "-"), spec=s, origin=f"--{a}") for a, s in pins.items())
    return solve(matrix, Request(pins=found)).cell


def differing(first, second):
    return {a for a in (*first.versions, *second.versions) if first.versions.get(a) != second.versions.get(a)}


def best(matrix, request):
    """Return the best cell, or None also where the request names what is not there."""
    try:
        return best_cell(matrix, request)
    except UsageError:
        return None


def some_cell(matrix, generator):
    return next((cell for _ in range(20) if (cell := best(matrix, random_request(generator, matrix)))), None)


def random_pairs(seed, count):
    """Yield matrices with two of their cells."""
    generator = random.Random(seed)
    found = 0
    while found < count:
        matrix = random_matrix(generator)
        first, second = some_cell(matrix, generator), some_cell(matrix, generator)
        if first is None or second is None or not differing(first, second):
            continue
        if "driver" in first.versions or "driver" in second.versions:
            continue  # no part of an image
        found += 1
        yield matrix, first, second


def real_pairs(seed, count):
    """Yield the shipped matrix with two of its cells."""
    generator, matrix = random.Random(seed), load_matrix()
    found = 0
    while found < count:
        cells = []
        for _ in range(2):
            axes = generator.sample(["torch", "te", "apex", "python", "flash-attn", "cuda"], 2)
            pins = tuple(
                Pin(axis=axis, spec=generator.choice(matrix.releases[axis]).version, origin="--x") for axis in axes
            )
            cells.append(best(matrix, Request(pins=pins)))
        if all(cells) and differing(*cells):
            found += 1
            yield matrix, *cells


def check_way(matrix, first, second):
    stops = path_between(matrix, first, second)
    assert stops[0].cell.versions == first.versions
    assert stops[-1].cell == Cell(versions=stops[-1].cell.versions, commits=second.commits)
    assert stops[-1].cell.versions == second.versions
    moved = [axis for stop in stops for axis in stop.moved]
    assert sorted(moved) == sorted(differing(first, second))
    for before, after in itertools.pairwise(stops):
        assert differing(before.cell, after.cell) == set(after.moved)
        # the solver accepts it, and chooses just this cell
        assert solve(matrix, Request(pins=pins_of(matrix, after.cell))).cell == after.cell
    return stops


def search(tmp_path, stops, fails, runs=None):
    """Search with a test that fails where `fails` says so of a cell's versions."""

    def judge(stop, place):
        if runs is not None:
            runs.append(stop.cell.id)
        return not fails(stop.cell.versions), place

    return bisect(named(stops), judge, Log(tmp_path / f"{random.random()}.jsonl"))


def named(stops):
    """Return the stops with the axes that the id of a cell begins with, which random matrices do not have."""
    more = {"cuda": "cpu", "python": "3.12"}
    return [
        Stop(cell=Cell(versions={**more, **stop.cell.versions}, commits=stop.cell.commits), moved=stop.moved)
        for stop in stops
    ]


def test_a_component_moves_with_the_choice_of_its_kernels_and_the_way_has_no_cell_with_all_of_them():
    matrix = load_matrix()
    few = {"flash-attn-hopper": "3.0.0", "fa3-kernels": "training-64-128"}
    without = cell_of(matrix, cuda="13.0", te="2.12", gpu="h100", apex="none")
    chosen = best(matrix, pinned(without, apex="25.09.post20251222", **few))
    others = best(matrix, pinned(without, apex="none", **{**few, "fa3-kernels": "none"}))
    for ends in ((without, chosen), (chosen, without)):
        stops = check_way(matrix, *ends)
        assert {("flash-attn-hopper" in stop.cell.versions, "fa3-kernels" in stop.cell.versions) for stop in stops} == {
            (False, False),
            (True, True),
        }
    # with flash-attention 3 at both ends, the choice is an axis like any other
    assert ("fa3-kernels",) in [stop.moved for stop in check_way(matrix, chosen, others)]


def pinned(cell, **axes):
    versions = {axis: cell.versions[axis] for axis in ("cuda", "te", "gpu", "torch", "python", "os", "base")} | axes
    return Request(pins=tuple(Pin(axis=axis, spec=spec, origin="--x") for axis, spec in versions.items()))


@pytest.mark.parametrize("pairs", [random_pairs(20261123, 300), real_pairs(5, 12)], ids=["random", "shipped"])
def test_a_fault_in_one_axis_or_in_two_is_found(tmp_path, monkeypatch, pairs):
    monkeypatch.setattr("os.fsync", lambda _: None)  # of thousands of records, for no kill follows
    generator = random.Random(1)
    several = together = 0
    for matrix, first, second in pairs:
        stops = check_way(matrix, first, second)
        axes = sorted(differing(first, second))
        several += len(stops) > 3
        together += any(len(stop.moved) > 1 for stop in stops)
        for planted in ([generator.choice(axes)], generator.sample(axes, min(2, len(axes)))):
            runs = []

            def fails(versions, planted=planted, second=second):
                return all(versions.get(axis) == second.versions.get(axis) for axis in planted)

            found = search(tmp_path, stops, fails, runs)
            assert len(runs) == len(set(runs)) <= most_runs(len(axes))
            assert set(planted) & set(found.moved)
            # of a pair, the one that moved last is named; the other is among those that had moved
            assert set(planted) <= {*found.moved, *found.already}
            answer = found.as_json()
            assert answer["runs"] == len(runs)
            assert [each["axis"] for each in answer["axes"]] == list(found.moved)
    assert several > 3
    assert together > 3


def test_axes_that_cannot_part_move_together():
    matrix = small_matrix()
    first = cell_of(matrix, torch="2.7.1+cu126", te="2.6.0", python="3.11")
    second = cell_of(matrix, torch="2.8.0+cu128", te="2.9.0", python="3.12")
    stops = check_way(matrix, first, second)
    by_axis = {axis: set(stop.moved) for stop in stops for axis in stop.moved}
    # torch says which CUDA and which cuDNN it is of
    assert by_axis["torch"] == {"torch", "cuda", "cudnn"}
    assert by_axis["python"] == {"python"}
    assert by_axis["te"] == {"te"}


def test_an_axis_that_only_one_cell_has():
    matrix = small_matrix()
    first, second = cell_of(matrix, apex="none"), cell_of(matrix, apex="25.08")
    stops = check_way(matrix, first, second)
    assert stops[-1].cell.versions["apex"] == "25.08"


def test_cells_for_a_mixed_fleet():
    matrix = load_matrix()
    first, second = (cell_of(matrix, cuda="13.0", python=python, gpu="a100,h100") for python in ("3.11", "3.12"))
    assert first.versions["gpu"] == "sm_80+sm_90"
    assert {stop.cell.versions["gpu"] for stop in check_way(matrix, first, second)} == {"sm_80+sm_90"}
    # from one GPU to the fleet
    alone = cell_of(matrix, cuda="13.0", python="3.11", gpu="h100")
    assert "gpu" in {axis for stop in check_way(matrix, alone, second) for axis in stop.moved}
    with pytest.raises(UsageError, match=r"different fleets: sm_80\+sm_90 and sm_90\+sm_100"):
        path_between(matrix, first, cell_of(matrix, cuda="13.0", gpu="h100,b200"))
    with pytest.raises(NoCellError, match="no gpu sm_90"):
        path_between(matrix, first, Cell(versions={**first.versions, "gpu": "sm_90+sm_80"}))


def test_one_cell_twice_and_a_cell_that_the_matrix_refuses():
    matrix = small_matrix()
    cell = cell_of(matrix)
    with pytest.raises(UsageError, match="one cell"):
        path_between(matrix, cell, cell)
    for change, words in (({"te": "99"}, "no te 99"), ({"cudnn": "9.1"}, "do not go together")):
        with pytest.raises(NoCellError, match=words):
            path_between(matrix, cell, Cell(versions={**cell.versions, **change}))


def way():
    matrix = load_matrix()
    one = cell_of(matrix, cuda="cpu", python="3.10", torch="2.11.0+cpu")
    return path_between(matrix, one, cell_of(matrix, cuda="cpu", python="3.12"))


def test_the_ends_are_tested_first(tmp_path):
    with pytest.raises(SmokeError, match="GOOD fails the test"):
        search(tmp_path, way(), lambda _: True)
    with pytest.raises(SmokeError, match="BAD passes the test"):
        search(tmp_path, way(), lambda _: False)


def test_a_kill_loses_nothing_and_a_torn_line_runs_again(tmp_path):
    matrix, first, second = next(pair for pair in random_pairs(7, 2000) if len(path_between(*pair)) > 5)
    stops = named(path_between(matrix, first, second))
    bad = stops[3].moved[0]
    place, runs, limit = tmp_path / "log.jsonl", [], 0

    def judge(stop, where):
        if len(runs) >= limit:
            raise KeyboardInterrupt
        runs.append(stop.cell.id)
        return stop.cell.versions.get(bad) != second.versions.get(bad), where

    for limit in range(1, 10):  # noqa: B007 - judge reads it
        try:
            found = bisect(stops, judge, Log(place))
        except KeyboardInterrupt:
            continue
        break
    assert len(runs) == len(set(runs)) <= most_runs(len(differing(first, second)))
    assert bad in found.moved
    whole = place.read_bytes()
    place.write_bytes(whole[:-20])  # a kill in the middle of the last line
    limit = 99
    again = bisect(stops, judge, Log(place))
    assert again.moved == found.moved
    assert again.as_json()["runs"] == 1
    assert len(Log(place).kept) == len(set(runs))


def test_a_log_of_something_else_is_no_verdict(tmp_path):
    place = tmp_path / "log.jsonl"
    place.write_bytes(b'\xff\n[1]\n{"cell": 1}\n{"cell": "a", "verdict": "fine", "why": ""}\n')
    assert Log(place).kept == {}
