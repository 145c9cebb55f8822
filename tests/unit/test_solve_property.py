"""Ten thousand random requests, each answer compared with the brute force of `naive`."""

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from naive import Naive
from random_matrix import random_evidence, random_matrix, random_request

from envbuild.components import COMPONENTS
from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import NONE, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver import search
from envbuild.solver.asked import read_request
from envbuild.solver.program import any_cell
from envbuild.solver.solve import solve

MATRICES, REQUESTS, CHUNKS = 250, 40, 10


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_answers_are_optimal_and_refusals_are_minimal(chunk):
    generator = random.Random(20261120 + chunk)
    checked = {"solved": 0, "refused": 0, "unmatched": 0}
    for _ in range(MATRICES // CHUNKS):
        matrix = random_matrix(generator)
        plain, hosted = Naive(matrix), None
        for _ in range(REQUESTS):
            request = random_request(generator, matrix)
            evidence = random_evidence(generator, matrix)
            naive = plain
            if any(p.axis == "driver" and p.spec == "1.5" for p in request.pins):
                hosted = hosted or Naive(matrix, host_driver=("driver", "1.5"))
                naive = hosted
            checked[check(matrix, naive, request, evidence, explain=generator.random() < 0.4)] += 1
    # the mix stays worth running
    assert checked["solved"] > 100
    assert checked["refused"] > 100


@pytest.mark.parametrize("chunk", range(6))
def test_parts_of_the_shipped_matrix(chunk):
    generator = random.Random(chunk)
    matrix = part_of(load_matrix(), generator)
    naive = Naive(matrix)
    assert naive.cells
    outcomes = [
        check(matrix, naive, real_request(generator, matrix), (), explain=generator.random() < 0.2) for _ in range(50)
    ]
    assert outcomes.count("solved") > 5
    assert outcomes.count("refused") > 2


@pytest.mark.parametrize("guesses", [search.MOST_GUESSES, 2])
def test_whether_there_is_a_cell_is_what_clingo_says(monkeypatch, guesses):
    """Settling one axis after the other proves a cell; where it comes to none, clingo is asked."""
    monkeypatch.setattr(search, "MOST_GUESSES", guesses)
    generator = random.Random(20261124)
    seen = {"settled": 0, "clingo alone": 0, "refused": 0}
    for _ in range(40):
        matrix = random_matrix(generator)
        for _ in range(20):
            try:
                asked = read_request(matrix, random_request(generator, matrix))
            except UsageError:
                continue
            compiled, domains = asked.of([pin for pin, _, _ in asked.masks])
            cell = any_cell(compiled, list(domains))
            narrowed = list(domains)
            assert search.solvable(compiled, narrowed) is (cell is not None), asked.request
            if cell is None:
                seen["refused"] += 1
            else:
                assert all(domain >> value & 1 for domain, value in zip(narrowed, cell, strict=True))
                seen["settled" if search._some_cell(compiled, narrowed) else "clingo alone"] += 1
    assert seen["refused"] > 100
    assert seen["settled"] > 50
    assert (seen["clingo alone"] > 50) is (guesses == 2)


def part_of(matrix, generator):
    """Keep the releases of a few real cells and some others, and every rule."""
    kept = {axis: set() for axis in matrix.axes}
    asked = generator.choice(["flash-attn", "flash-attn-hopper", "megatron", "deepspeed"])
    te = generator.choice(matrix.releases["te"]).version
    for pins in ((Pin(axis=asked, spec="auto", origin="--x"),), (Pin(axis="te", spec=te, origin="--te"),)):
        try:
            cell = solve(matrix, Request(pins=pins)).cell
        except NoCellError:
            continue
        for axis, version in cell.versions.items():
            kept[axis].add(version)
    for axis in ("torch", "te", "apex", "gpu", "python", asked):
        # test_arch has the GPUs of an Arm chip: what their name adds to a request is not in the reference
        choices = [r for r in matrix.releases[axis] if r.version not in {"sm_110", "sm_121"}]
        kept[axis].add(generator.choice(choices).version)
    return replace(
        matrix,
        releases={
            axis: releases
            if matrix.axes[axis].use == "derived"
            else tuple(r for r in releases if r.version in kept[axis])
            for axis, releases in matrix.releases.items()
        },
    )


def real_request(generator, matrix):
    axes = [axis for axis, releases in matrix.releases.items() if releases]
    pins = []
    for axis in generator.sample(axes, generator.randint(0, 4)):
        versions = [r.version for r in matrix.releases[axis]]
        pins.append(Pin(axis=axis, spec=generator.choice([*versions, *versions, "auto", "none"]), origin=f"--{axis}"))
    return Request(pins=tuple(pins), prefer="newest" if generator.random() < 0.2 else "proven")


def check(matrix, naive, request, evidence, *, explain):
    for pin in request.pins:
        if pin.spec not in {"auto", "none"} and not naive.versions(pin.axis, pin.spec):
            with pytest.raises(UsageError, match="no release"):
                solve(matrix, request, evidence)
            return "unmatched"
    answers = naive.answers(request.pins)
    try:
        solution = solve(matrix, request, evidence)
    except NoCellError as error:
        assert not answers, (request, answers[0])
        check_conflict(naive, request, error.conflict, nearest=explain)
        return "refused"
    cell = {axis: solution.cell.versions.get(axis) for axis in matrix.axes}
    assert cell in answers, (request, cell)
    scores = [naive.score(other, request.pins, evidence, request.prefer) for other in answers]
    best = min(scores)
    assert naive.score(cell, request.pins, evidence, request.prefer) == best, (request, cell)
    assert scores.count(best) == 1  # the order is total: nothing is left to chance
    assert compared(solution.score, request.prefer) == best
    assert {r.id for r in (*solution.rules, *solution.tested_with, *solution.notes)} == {
        r.id for r in matrix.rules if naive.applies(cell, r)
    }
    assert set(solution.reasons) == set(solution.cell.versions)
    choices = {axis for axis, component in COMPONENTS.items() if component.chooses}
    could = {name for name, axis in matrix.axes.items() if axis.use in {"asked", "default"}} - choices
    could |= {pin.axis for pin in request.pins if pin.spec == "none"} & choices
    assert set(solution.left_out) == could - set(solution.cell.versions)
    assert all(solution.left_out.values())
    return "solved"


def compared(score, prefer):
    """Return what `prefer` compares of a score, in order."""
    together = (score.evidence, score.untested_pairs, score.evidence_in_part, score.spread, score.untagged)
    proven = () if prefer == "newest" else together
    return (score.compat, score.defaults_out, *proven, score.age, score.untested_undated_pairs, *score.preference)


def check_conflict(naive, request, conflict, *, nearest):
    pins = conflict.pins
    assert set(pins) <= set(request.pins)
    assert not naive.answers(pins, free=optional(naive, request, pins))
    for dropped in pins:
        rest = [pin for pin in pins if pin is not dropped]
        assert naive.answers(rest, free=optional(naive, request, rest)), (pins, dropped)
    requested = [pin.axis for pin in request.pins if pin.spec != NONE]
    assert not [axis for axis in requested if f"add --{axis} auto" in conflict.text()]
    rules = {rule.id for rule in naive.matrix.rules}
    for step in conflict.steps:
        assert step.rule in {"asked", "release", "derived"} | rules
        assert step.text.endswith(".")
    if nearest:
        check_nearest(naive, request, conflict.nearest)


def optional(naive, request, kept):
    """Return the axes that a cell has only when requested, and that pins which were dropped do request."""
    dropped = {pin.axis for pin in request.pins} - {pin.axis for pin in kept}
    return {axis for axis in dropped if naive.matrix.axes[axis].use == "asked"}


def check_nearest(naive, request, nearest):
    free = {pin.axis for pin in request.pins}
    cells = naive.answers((), free=free, named=request.pins)
    if not cells:
        assert not nearest
        return

    def changed(cell):
        return {pin.axis for pin in request.pins if not naive.pin_holds(cell, pin)}

    assert nearest
    assert len(nearest[0].changed) == min(len(changed(cell)) for cell in cells)
    for near in nearest:
        cell = {axis: near.cell.versions.get(axis) for axis in naive.matrix.axes}
        assert cell in cells
        assert changed(cell) == set(near.changed)
        for axis, (_, instead) in near.changed.items():
            assert instead == near.cell.versions.get(axis, NONE)
    # each one is another way out
    sets = [set(near.changed) for near in nearest]
    assert all(not one <= other for i, one in enumerate(sets) for other in sets[i + 1 :])
