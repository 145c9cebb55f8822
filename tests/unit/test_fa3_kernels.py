"""The choice of flash-attention 3's kernels: what it leaves out, what of the image it changes, and what its runs prove."""

import re
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from cell_inputs import changed, complete, inputs_for, plan_for
from test_claims import CPU, VERSIONS, claim, record, refs_of, solved

from envbuild.components import COMPONENTS
from envbuild.curate.reach import Reach
from envbuild.errors import DataError, NoCellError, UsageError
from envbuild.evidence.claims import claim_of
from envbuild.evidence.listed import allowed_by
from envbuild.evidence.records import REPLACED
from envbuild.lock.find import check_fits
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.plan.plan import plan_of
from envbuild.solver.asked import read_request
from envbuild.solver.proof import RANKS
from envbuild.solver.solve import solve

FA3 = {"cuda": "13.0", "te": "2.12", "gpu": "h100", "flash_attn_hopper": "3.0.0"}
KEPT = ("DISABLE_BACKWARD", "DISABLE_HDIMDIFF64", "DISABLE_PACKGQA", "DISABLE_LOCAL", "DISABLE_VARLEN", "DISABLE_FP8")
"""What no choice leaves out: training itself, its speed, and the one call that no check of flash-attention stops."""


def wheel(**more):
    made = plan_of(load_matrix(), complete(inputs_for(**FA3, **more)))
    return next(each for each in made.components if each.axis == "flash-attn-hopper")


def left_out(environment):
    return {name for name in environment if "_DISABLE_" in name}


def test_all_kernels_are_compiled_where_none_are_chosen():
    assert left_out(wheel().environment) == {"FLASH_ATTENTION_DISABLE_SM80"}


@pytest.mark.parametrize("release", load_matrix().releases["fa3-kernels"], ids=lambda release: release.version)
def test_a_choice_is_given_to_setup_py_and_keeps_what_training_needs(release):
    environment = wheel(fa3_kernels=release.version).environment
    chosen = {f"FLASH_ATTENTION_DISABLE_{name}" for name in release.facts.without}
    assert left_out(environment) == chosen | {"FLASH_ATTENTION_DISABLE_SM80"}
    assert all(environment[name] == "TRUE" for name in chosen)
    assert not [name for name in chosen if name.endswith(KEPT)]
    dims = {int(dim) for dim in re.findall(r"HDIM(\d+)", " ".join(release.facts.without))}
    assert set(release.facts.head_dims) == {64, 96, 128, 192, 256} - dims


def test_a_choice_makes_another_cell_and_another_wheel_and_changes_no_other_part():
    all_of_them, few = plan_for(**FA3), plan_for(**FA3, fa3_kernels="training-64-128")
    assert all_of_them.cell.id != few.cell.id
    moved = changed(all_of_them, few)
    assert "wheel-flash-attn-hopper" in moved
    assert not moved & {"base", "runtime", "torch", "wheel-te", "wheel-apex"}


@pytest.mark.parametrize(
    ("choice", "dims"), [(None, [64, 128]), ("training", [64, 96, 128, 192, 256]), ("training-64-128", [64, 128])]
)
def test_the_smoke_tests_read_what_there_is(choice, dims):
    axes = {"fa3-kernels": choice} if choice else {}
    view = inputs_for(**FA3, **axes)
    expected = COMPONENTS["flash-attn-hopper"].expected(_View(view.cell))
    assert expected["head_dims"] == dims
    assert expected.get("fp8", True)


class _View:
    def __init__(self, cell):
        self.versions = cell.versions

    def release(self, axis):
        return load_matrix().release(axis, self.versions[axis])


@pytest.mark.parametrize(
    ("axes", "rule"),
    [
        ({"flash_attn_hopper": "none"}, "fa3-kernels-are-of-fa3"),
        ({"flash_attn_hopper": "3.0.0b1.post20241207", "te": "2.0", "cuda": "12.6"}, "fa3-kernels-2025"),
    ],
)
def test_a_choice_of_nothing_is_refused(axes, rule):
    with pytest.raises(NoCellError, match=rule):
        inputs_for(**{**FA3, **axes}, fa3_kernels="training")


def test_a_lock_of_another_choice_is_refused_and_only_what_differs_is_shown():
    lock = complete(inputs_for(**FA3)).lock
    with pytest.raises(DataError, match=r"another cell: fa3-kernels all, not training"):
        check_fits(lock, inputs_for(**FA3, fa3_kernels="training"), "--lock x")


@pytest.mark.parametrize("word", ["all", "ALL", "none"])
def test_all_of_them_is_no_choice(word):
    assert inputs_for(**FA3, fa3_kernels=word).cell == inputs_for(**FA3).cell


def test_the_error_of_an_unknown_choice_says_how_to_ask_for_all_of_them():
    with pytest.raises(UsageError) as found:
        inputs_for(**FA3, fa3_kernels="serving")
    assert "or with `all`, nothing of flash-attn-hopper is left out" in (found.value.hint or "")


@pytest.mark.parametrize("choice", [{}, {"fa3-kernels": "all"}])
def test_a_cell_without_a_choice_is_complete(choice):
    pins = tuple(
        Pin(axis=axis.replace("_", "-"), spec=spec, origin=f"--{axis}") for axis, spec in {**FA3, **choice}.items()
    )
    left = solve(load_matrix(), Request(pins=pins)).left_out
    assert "flash-attn" in left
    assert "fa3-kernels" not in left


FEW = {"flash-attn-hopper": "3.0.0", "fa3-kernels": "training-64-128"}
ALL = {"flash-attn-hopper": "3.0.0"}


@pytest.mark.parametrize(
    ("ran", "asked", "proof", "words"),
    [
        (FEW, FEW, "HERE", None),
        (ALL, ALL, "HERE", None),
        (FEW, ALL, "ELSEWHERE", "fa3-kernels training-64-128 (here all)"),
        (ALL, FEW, "ELSEWHERE", "fa3-kernels all (here training-64-128)"),
        (FEW, {}, "HERE", None),  # nothing is chosen of what the cell does not have
        ({}, FEW, "STATED", None),  # and nothing of what the run did not have
        ({}, {}, "HERE", None),
    ],
)
def test_a_run_with_few_kernels_is_no_proof_of_all(ran, asked, proof, words):
    cell = {**VERSIONS, **ran}
    found = claim(record(cell=cell, cell_id=Cell(versions=cell).id), **asked)
    assert found.proof.name == proof
    assert found.differences.get("fa3-kernels") == words
    assert ("fa3-kernels" in found.text) == (words is not None)


@pytest.mark.parametrize(
    ("ran", "asked", "here"),
    [
        (FEW, FEW, True),
        (FEW, ALL, False),
        (ALL, FEW, False),
        (FEW, {}, True),  # nothing is chosen of what the cell does not have
        (ALL, {}, True),
        ({}, {}, True),
    ],
)
def test_a_cell_does_not_rank_by_a_run_with_other_kernels(monkeypatch, ran, asked, here):
    kept = refs_of(monkeypatch, record(cell={**VERSIONS, **ran}))
    rank = solved(kept, gpu="h200", python="3.12", os="ubuntu24.04", **asked).score.evidence
    assert (rank == -RANKS.index("run on this GPU (in an image)")) == here


def test_a_run_without_flash_attention_3_is_as_good_for_the_rest_of_the_cell_whatever_was_chosen(monkeypatch):
    kept = refs_of(monkeypatch, record(cell=VERSIONS))
    where = {**{axis: VERSIONS[axis] for axis in ("torch", "te", "apex")}, "gpu": "h200", "python": "3.12"}
    where["os"] = "ubuntu24.04"
    assert (
        solved(kept, **where, **FEW).score.evidence_in_part == solved(kept, **where, **ALL).score.evidence_in_part != 0
    )


def runs_of(cell, *changes):
    """Return records of a cell, each a day after the one before."""
    return [
        record(cell=cell, cell_id=Cell(versions=cell).id, date=datetime(2026, 11, 20 + day, tzinfo=UTC), **change)
        for day, change in enumerate(changes)
    ]


PROVES_NOTHING = {"built_with": {"src-flash-attn-hopper": REPLACED}, "id": "sha256:0a"}
FAILED = {"verdict": "failed", "reason": "boom"}


@pytest.mark.parametrize(
    ("own", "others", "word"),
    [
        ([PROVES_NOTHING], [{}], "run elsewhere"),
        ([PROVES_NOTHING | FAILED], [{}], "failed on sm_90"),
        ([PROVES_NOTHING], [{}, FAILED], "failed on sm_90"),  # a failure warns wherever it was
        ([FAILED, PROVES_NOTHING], [{}], "failed on sm_90"),  # what was replaced takes no failure back
        ([{**FAILED, **PROVES_NOTHING}, PROVES_NOTHING], [{}], "run elsewhere"),
        ([CPU], [{}], "run elsewhere"),
        ([{}], [{}], "run on this GPU"),
        ([PROVES_NOTHING], [], "stated only; run in part"),
    ],
)
def test_a_run_of_another_cell_counts_where_the_own_ones_prove_less(own, others, word):
    cell = {**VERSIONS, **ALL}
    kept = [*runs_of(cell, *own), *runs_of({**VERSIONS, **FEW}, *({"id": "sha256:0b", **each} for each in others))]
    found = claim_of(Cell(versions=cell), [SimpleNamespace(id="sha256:0b")], kept)
    assert found.text.startswith(word)


@pytest.mark.parametrize(("flags", "allowed"), [({}, "none"), ({"fa3-kernels": "training"}, "training")])
def test_a_list_of_cells_speaks_of_those_that_resolve_would_choose(flags, allowed):
    pins = tuple(Pin(axis=axis, spec=spec, origin="-") for axis, spec in {**ALL, **flags}.items())
    assert allowed_by(read_request(load_matrix(), Request(pins=pins)))["fa3-kernels"] == (allowed,)


def test_a_choice_that_needs_another_axis_is_in_a_cell():
    """`matrix check --notes` asks of every release whether a cell has it, with every axis that may be requested."""
    reach = Reach(load_matrix())
    number = reach.compiled.number["fa3-kernels"]
    assert all(reach.any_cell({number: reach.compiled.mask(number, each)}) for each in ("training", "training-64-128"))
    rules = {rule.id: rule for rule in load_matrix().rules}
    assert reach.applies(rules["fa3-kernels-2025"])
