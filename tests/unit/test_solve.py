import subprocess
import sys

import pytest
from small_matrix import locked_together, request, requires, small_matrix, with_rules

from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.driver import driver_verdict
from envbuild.matrix.load import load_matrix
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.explain import difference
from envbuild.solver.program import runs
from envbuild.solver.proof import EvidenceRef
from envbuild.solver.solve import NOT_ASKED, solve
from envbuild.util.frozen import replace


@pytest.fixture
def matrix():
    return small_matrix()


def versions(matrix, evidence=(), **pins):
    return dict(solve(matrix, request(**pins), evidence).cell.versions)


def test_season_decides_before_newness(matrix):
    cell = versions(matrix, te="2.6")
    assert cell["torch"] == "2.8.0+cu128"  # TE 2.6's own season, not 2.9.0
    assert cell["apex"] == "25.08"
    assert cell["python"] == "3.12"  # newest of an undated axis
    assert cell["gpu"] == "sm_90"  # first listed of names
    assert cell["base"] == "slim"
    assert cell["cudnn"] == "9.10"  # a derived value that the axis does not list


def test_newest_is_there_for_those_who_want_it(matrix):
    cell = versions(matrix, prefer="newest")
    assert (cell["torch"], cell["te"]) == ("2.9.0+cu128", "2.9.0")


def test_tested_together_decides_before_season(matrix):
    locked = with_rules(matrix, locked_together("lock", torch="2.7.1", te="2.6"))
    assert versions(locked, te="2.6")["torch"] == "2.7.1+cu126"
    # ten rules that say the same count once
    more = [locked_together(f"lock-{n}", torch="2.7.1", te="2.6") for n in range(9)]
    other = locked_together("other", torch="2.8.0", te="2.6", apex="25.08")
    assert versions(with_rules(matrix, *more, other), te="2.6")["torch"].startswith("2.8.0")


def test_pairs_of_undated_axes_decide_after_the_dated_ones(matrix):
    paired = with_rules(matrix, locked_together("own-python", base="full", python="3.11"))
    assert versions(paired, base="full")["python"] == "3.11"
    assert versions(paired)["torch"] == versions(matrix)["torch"]


def proof(level, **versions):
    return EvidenceRef(id=f"{level}-proof", level=level, versions={k.replace("_", "-"): v for k, v in versions.items()})


def test_evidence_decides_first_and_the_highest_level_wins(matrix):
    old = proof("cpu", cuda="12.6", torch="2.6.0+cu126", te="2.5.0", apex="25.05")
    gpu = proof("gpu", cuda="12.6", torch="2.7.1+cu126", te="2.5.0", apex="25.05")
    solution = solve(matrix, request(), [old, gpu])
    assert solution.cell.versions["torch"] == "2.7.1+cu126"
    assert solution.evidence == (gpu,)
    assert "gpu-proof" in solution.reasons["torch"]


def test_evidence_must_name_what_the_request_left_open(matrix):
    partial = proof("gpu", cuda="12.6", torch="2.7.1+cu126")  # says nothing of te and apex, which are in the cell
    assert not solve(matrix, request(), [partial]).evidence
    assert solve(matrix, request(te="2.5", apex="25.05", torch="2.7", cuda="12.6"), [partial]).evidence == (partial,)
    other = proof("gpu", cuda="12.6", torch="2.7.1+cu126", te="2.9.0", apex="25.05")
    assert not solve(matrix, request(te="2.5", apex="25.05", torch="2.7"), [other]).evidence


def test_a_run_without_what_was_asked_for_comes_after_what_was_tested_with_it(matrix):
    partial = proof("gpu", cuda="12.8", torch="2.8.0+cu128", apex="25.05")  # without te
    assert solve(matrix, request(te="2.5")).cell.versions["torch"] == "2.7.1+cu126"
    alone = solve(matrix, request(te="2.5"), [partial])
    assert alone.cell.versions["torch"] == "2.8.0+cu128"
    assert alone.evidence == (partial,)
    assert alone.reasons["torch"] == "ran with the rest, but for what was asked for (gpu-proof)"
    locked = with_rules(matrix, locked_together("lock", torch="2.7.1", te="2.5"))
    tested = solve(locked, request(te="2.5"), [partial])
    assert tested.cell.versions["torch"] == "2.7.1+cu126"
    assert not tested.evidence
    # a record with all of it comes before either
    whole = proof("gpu", cuda="12.8", torch="2.8.0+cu128", te="2.5.0", apex="25.05")
    assert solve(locked, request(te="2.5"), [partial, whole]).evidence == (whole,)


def test_each_step_of_the_order_has_words_where_it_decides(matrix):
    chosen = solve(matrix, request(te="2.5"))
    for step in vars(chosen.score).keys() - {"preference"}:
        other = replace(chosen.score, **{step: vars(chosen.score)[step] + 1})
        if step.startswith("evidence"):
            chosen_score, other = replace(chosen.score, **{step: -3}), chosen.score
        else:
            chosen_score = chosen.score
        assert "listed as less preferred" not in difference(chosen_score, other, chosen.asked, "1.0"), step


def test_what_cannot_be_is_left_out_with_the_reason(matrix):
    solution = solve(matrix, request(cuda="cpu"))
    assert "te" not in solution.cell.versions
    assert solution.left_out["te"].startswith("Transformer Engine needs CUDA.")
    assert solution.left_out["flash-attn"] == NOT_ASKED
    assert solve(matrix, request(te="none")).left_out["te"] == "asked not to be there (--te none)"
    assert "driver" not in solution.left_out


def test_an_open_axis_takes_any_exact_version(matrix):
    solution = solve(matrix, request(driver="561.17", cuda="12.6"))
    assert solution.cell.versions["driver"] == "561.17"
    with pytest.raises(NoCellError, match="driver-12 says so"):
        solve(matrix, request(driver="470.1", cuda="12.6"))
    assert solve(matrix, request(driver="570")).cell.versions["driver"] == "570.26"  # a branch that is listed


def test_releases_that_nobody_may_choose_by_accident(matrix):
    assert versions(matrix, apex="25.08")["apex"] == "25.08"  # a prefix includes the post release, and does not name it
    assert versions(matrix, apex="25.08.post1")["apex"] == "25.08.post1"
    assert versions(matrix, apex="ccccccc")["apex"] == "25.08.post1"
    assert versions(matrix, base="ngc-*")["torch"] == "2.7.1+cu126"
    with pytest.raises(NoCellError, match="used only when requested by name"):
        solve(matrix, request(apex=">=25.08.post1"))


def test_any_of_holds_by_one_whole_alternative(matrix):
    choice = requires("either", when={"python": "3.12"}, any_of=({"base": "full", "gpu": "sm_90"}, {"te": "2.5"}))
    ruled = with_rules(matrix, choice)
    assert versions(ruled, python="3.12", te="2.6")["base"] == "full"
    assert versions(ruled, python="3.12", base="slim")["te"] == "2.5.0"
    with pytest.raises(NoCellError):
        solve(ruled, request(python="3.12", base="slim", te="2.6"))


def test_same_compares_major_and_minor(matrix):
    ruled = with_rules(matrix, requires("same", same=("te", "cudnn")))
    with pytest.raises(NoCellError):
        solve(ruled, request(te="auto"))
    assert "te" not in versions(ruled)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"te": "9"}, ["no release of te", "'9'", "2.9.0", "envbuild matrix te"]),
        ({"gpu": "h1000"}, ["no release of gpu", "h100"]),
        ({"tee": "2"}, ["no axis 'tee'", "similar: te", "envbuild matrix list"]),
        ({"te": ">=2.6,<"}, ["is not a version and not a PEP 440 specifier", "(--te 2."]),
        ({"cuda": "latest"}, ["(--cuda 12.", '(--cuda ">=12.']),
        ({"gpu": "h100,,v100"}, ["an empty place between its commas", "such as a100,h100,b200"]),
    ],
)
def test_what_does_not_exist_is_a_usage_error_with_what_is_near(matrix, pins, words):
    with pytest.raises(UsageError) as caught:
        solve(matrix, request(**pins))
    for word in words:
        assert word in str(caught.value)


def test_an_empty_place_of_a_fleet_is_similar_to_no_gpu(matrix):
    with pytest.raises(UsageError) as caught:
        solve(matrix, request(gpu="h100,,v100"))
    assert "similar" not in str(caught.value)


@pytest.mark.parametrize(("axis", "written", "meant"), [("te", "2.6.*", "2.6"), ("cuda", "CPU", "cpu")])
def test_spellings_of_versions(matrix, axis, written, meant):
    found = solve(matrix, request(**{axis: written})).cell
    assert found == solve(matrix, request(**{axis: meant})).cell


def test_order_of_flags_changes_nothing(matrix):
    pins = [Pin(axis=a, spec=s, origin="--x") for a, s in [("te", "2.6"), ("gpu", "h100"), ("cuda", "12.6")]]
    cells = {solve(matrix, Request(pins=tuple(order))).cell.id for order in (pins, pins[::-1], pins[1:] + pins[:1])}
    assert len(cells) == 1


def test_another_process_gives_the_same_cell():
    program = (
        "from small_matrix import *; from envbuild.solver.solve import solve\n"
        "print(solve(small_matrix(), request(gpu='h100', flash_attn='auto')).cell.id)"
    )
    runs_ = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=__file__.rpartition("/")[0],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs_) == 1


@pytest.mark.parametrize(
    ("driver", "verdict", "words"),
    [
        ("560.35.03", "full", "12.6.2"),  # torch's wheel installs 12.6.2, so 12.6.3's floor does not count
        ("560.28.03", "minor-version", "560.35.03"),
        ("525.60.13", "minor-version", "525.60.13"),
        ("470.256.02", "needs-compat", "cuda-compat-12-6"),
        ("450.80.02", "refused", "470"),
    ],
)
def test_driver_verdicts(matrix, driver, verdict, words):
    cell = solve(matrix, request(cuda="12.6", te="2.6", gpu="h100")).cell
    found = driver_verdict(matrix, cell, driver)
    assert found.verdict == verdict
    assert words in found.why
    assert found.source == matrix.release("cuda", "12.6").source


def test_compat_is_for_data_center_gpus(matrix):
    cell = solve(matrix, request(cuda="12.6", gpu="rtx5090")).cell
    assert driver_verdict(matrix, cell, "470.256.02").verdict == "refused"
    assert (
        driver_verdict(matrix, solve(matrix, request(cuda="12.6", gpu="h100")).cell, "470.256.02").verdict
        == "needs-compat"
    )
    assert driver_verdict(matrix, cell) is None
    with pytest.raises(UsageError, match="not a driver version"):
        driver_verdict(matrix, cell, "new")


def test_enumeration_is_every_combination_once(matrix):
    found = [(c["cuda"], c["torch"], c["te"]) for c in enumerate_cells(matrix, ["cuda", "torch", "te"])]
    assert len(found) == len(set(found)) == 4 * 3  # torch 2.6 has too old a cuDNN, and a CPU build has no te
    assert len(list(enumerate_cells(matrix, ["te", "te"]))) == len({te for _, _, te in found})
    only = list(enumerate_cells(matrix, ["torch"], [Pin(axis="cuda", spec="cpu", origin="--cuda")]))
    assert only == [{"torch": "2.8.0+cpu"}]
    none = [Pin(axis="te", spec="none", origin="--te"), Pin(axis="torch", spec="2.6", origin="--torch")]
    assert list(enumerate_cells(matrix, ["torch", "te"], none)) == [{"torch": "2.6.0+cu126"}]
    with pytest.raises(UsageError):
        list(enumerate_cells(matrix, []))


def test_runs():
    assert list(runs(0b0110, 0b1111)) == [(1, 3)]
    assert list(runs(0b100100, 0b101101)) == [(1, 2), (3, 4)]
    assert list(runs(0b101000, 0b101001)) == [(1, 3)]  # places count within the domain
    assert list(runs(0, 0b11)) == []


HEADLINES = [
    (
        {"cuda": "12.6", "te": "2.6"},
        {"torch": "2.8.0+cu126", "apex": "25.08", "python": "3.12", "base": "nvidia-cuda-12.6.3-ubuntu24.04"},
    ),
    (
        {"cuda": "13.0", "te": "2.12"},
        {"torch": "2.11.0+cu130", "python": "3.11", "base": "debian12-root"},
    ),
]


@pytest.mark.parametrize(("pins", "expected"), HEADLINES)
def test_the_shipped_matrix_gives_the_season(pins, expected):
    cell = versions(load_matrix(), **pins)
    assert {axis: cell[axis] for axis in expected} == expected
