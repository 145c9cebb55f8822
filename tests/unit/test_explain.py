import json

import pytest
from click.testing import CliRunner
from small_matrix import locked_together, request, requires, small_matrix, with_rules

from envbuild.cli.axes import request_from
from envbuild.cli.resolve import explain as explain_command
from envbuild.cli.resolve import resolve as resolve_command
from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.asked import read_request
from envbuild.solver.explain import explain
from envbuild.solver.solve import solve


@pytest.fixture
def matrix():
    return small_matrix()


def conflict_of(matrix, **pins):
    with pytest.raises(NoCellError) as caught:
        solve(matrix, request(**pins))
    return caught.value.conflict


def texts(conflict):
    return [step.text for step in conflict.steps]


def test_a_rule_between_two_pins(matrix):
    conflict = conflict_of(matrix, flash_attn="2.8", te="2.6", python="3.12")
    assert texts(conflict) == [
        "You asked for flash-attn 2.8 (--flash-attn), which is 2.8.3.",
        "You asked for te 2.6 (--te), which is 2.6.0.",
        "TE before 2.9 ignores flash-attention above 2.8.1. So no cell has both flash-attn 2.8 and te 2.6.",
    ]
    last = conflict.steps[-1]
    assert (last.rule, last.source) == ("fa-cap", "NVIDIA/TransformerEngine@v2.6:utils.py")
    assert set(last.axes) == {"te", "flash-attn"}


def test_a_chain_through_a_derived_axis(matrix):
    assert texts(conflict_of(matrix, torch="2.6", te="auto")) == [
        "You asked for torch 2.6 (--torch), which is 2.6.0+cu126.",
        "You asked for te, whichever release fits (--te).",
        "torch 2.6.0+cu126 comes with cudnn 9.1.",
        "TE 2 needs cuDNN 9.3. So no cell has both torch 2.6 and te.",
    ]


def test_releases_of_an_axis_that_all_need_something_else(matrix):
    assert texts(conflict_of(matrix, torch=">=2.9", cuda="12.6"))[-1] == (
        "torch 2.9.0+cu128 needs cuda 12.8. So no cell has both torch >=2.9 and cuda 12.6."
    )
    last = texts(conflict_of(matrix, torch=">=2.6,<2.8", cuda="12.8"))[-1]
    assert last.startswith("torch 2.6.0+cu126 and 2.7.1+cu126 need cuda 12.6. So no cell")


def test_two_origins_of_one_axis(matrix):
    pins = (*request(te="2.6").pins, *request(te="2.9", origin="stack mine").pins)
    with pytest.raises(NoCellError) as caught:
        solve(matrix, request().__class__(pins=pins))
    assert texts(caught.value.conflict) == [
        "You asked for te 2.6 (--te), which is 2.6.0.",
        "Stack mine asks for te 2.9, which is 2.9.0. So no cell has both te 2.6 and te 2.9.",
    ]


def test_an_axis_that_every_cell_has(matrix):
    assert texts(conflict_of(matrix, torch="none")) == [
        "You asked for a cell without torch (--torch). Every cell has one torch. So no cell has no torch."
    ]


def test_a_component_that_is_there_only_when_asked_for(matrix):
    ruled = with_rules(matrix, requires("needs-fa", when={"te": "2.9"}, with_=("flash-attn",), why="It must be there."))
    last = texts(conflict_of(ruled, te="2.9"))[-1]
    assert last == (
        "It must be there. So no cell has te 2.9. A cell has flash-attn only when requested: add --flash-attn auto."
    )


@pytest.mark.parametrize(
    ("more", "end"),
    [
        ({}, ": add --flash-attn auto."),
        ({"gpu": "v100"}, ", and no cell has it with gpu v100."),
        ({"gpu": "v100", "cuda": "12.6"}, ", and no cell has it with gpu v100."),
    ],
)
def test_what_is_advised_leads_to_a_cell(matrix, more, end):
    rules = [
        requires("needs-fa", when={"te": "2.9"}, with_=("flash-attn",), why="It must be there."),
        requires("fa-sm80", when={"gpu": "sm_70"}, needs={"flash-attn": "none"}, why="Not for sm_70."),
    ]
    last = texts(conflict_of(with_rules(matrix, *rules), te="2.9", **more))[-1]
    assert last.endswith(f"A cell has flash-attn only when requested{end}")


def test_two_that_need_a_third_are_advised_to_ask_for_it(matrix):
    rule = requires("both", when={"te": "2.9", "gpu": "sm_90"}, with_=("flash-attn",), why="It must be there.")
    last = texts(conflict_of(with_rules(matrix, rule), te="2.9", gpu="h100"))[-1]
    assert last == (
        "It must be there. So no cell has both te 2.9 and gpu h100. "
        "A cell has flash-attn only when requested: add --flash-attn auto."
    )


def test_what_keeps_an_axis_out_is_named_in_whole():
    asked = {"os": "ubuntu24.04", "fa3-kernels": "training", "apex": "23.08", "base": "ngc-26.04"}
    pins = tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in asked.items())
    with pytest.raises(NoCellError) as caught:
        solve(load_matrix(), Request(pins=pins))
    assert texts(caught.value.conflict)[-1].endswith("and no cell has it with apex 23.08 and base ngc-26.04.")


def test_a_release_that_is_taken_by_name_alone_is_no_older_one():
    asked = read_request(
        load_matrix(), Request(pins=(Pin(axis="cuda", spec="13.0", origin="--cuda"),), prefer="newest")
    )
    choices = {choice.axis: choice for choice in explain(solve(load_matrix(), asked.request), asked=asked)}
    assert choices["apex"].newest.why.startswith("used only when requested by name")


def test_similar_releases_are_those_that_a_cell_has():
    with pytest.raises(UsageError) as caught:
        solve(load_matrix(), Request(pins=(Pin(axis="cuda", spec="99", origin="--cuda"),)))
    named = caught.value.hint.removeprefix("similar: ").partition(";")[0].split(", ")
    for version in named:
        assert solve(load_matrix(), Request(pins=(Pin(axis="cuda", spec=version, origin="--cuda"),)))


def test_the_shortest_of_several_conflicts_is_shown(matrix):
    conflict = conflict_of(matrix, torch="2.6", te="2.6", gpu="v100", cuda="12.6")
    assert texts(conflict)[-1] == "TE 2.6 left sm_70 behind. So no cell has both te 2.6 and gpu v100."
    assert len(conflict.steps) == 3


def test_where_only_a_search_over_cases_refuses(matrix):
    # each python has its own te, each te its own base, and the base is pinned to neither
    ruled = with_rules(
        matrix,
        requires("a", when={"python": "3.12", "gpu": "sm_90"}, needs={"base": "full"}),
        requires("b", when={"python": "3.12", "gpu": "sm_120"}, needs={"base": "full"}),
        requires("c", when={"base": "full", "gpu": "sm_90"}, needs={"apex": "25.05"}),
        requires("d", when={"base": "full", "gpu": "sm_120"}, needs={"apex": "25.05"}),
    )
    conflict = conflict_of(ruled, python="3.12", gpu="!sm_70", apex="25.08")
    assert {step.rule for step in conflict.steps} == {"asked", "a", "b", "c", "d"}
    assert texts(conflict)[-1].endswith("So no cell has python 3.12, gpu !sm_70 and apex 25.08.")


def test_numbered_text_with_rules_and_sources(matrix):
    with pytest.raises(NoCellError) as caught:
        solve(matrix, request(flash_attn="2.8", te="2.6"))
    lines = str(caught.value).splitlines()
    assert lines[0] == "no cell satisfies the request"
    assert lines[1].startswith("  1. You asked for flash-attn 2.8")
    assert lines[4] == "     (rule fa-cap, NVIDIA/TransformerEngine@v2.6:utils.py)"
    assert "--nearest" in lines[-1]


def test_json_of_a_conflict(matrix):
    answer = conflict_of(matrix, flash_attn="2.8", te="2.6").as_json()
    assert set(answer) == {"error", "steps", "nearest", "matrix"}
    assert answer["error"] == "conflict"
    assert all(set(step) == {"rule", "axes", "text", "source"} for step in answer["steps"])
    assert all({"cell", "changed"} <= set(near) for near in answer["nearest"])


def test_nearest_changes_the_cheapest_pin(matrix):
    # either is a minor version and one release away: then the solver's own order decides
    nearest = conflict_of(matrix, flash_attn="2.8", te="2.6", gpu="h100").nearest
    assert [dict(near.changed) for near in nearest] == [
        {"te": ("2.6", "2.9.0")},
        {"flash-attn": ("2.8", "2.7.4")},
    ]
    # a GPU is dearer than a version
    first = conflict_of(matrix, gpu="v100", te="2.6").nearest[0]
    assert dict(first.changed) == {"te": ("2.6", "2.5.0")}
    # leaving a component out is dearer than another version of it
    first = conflict_of(matrix, cuda="cpu", te="2.6").nearest[0]
    assert list(first.changed) == ["cuda"]


def test_nearest_changes_the_fewest_pins_before_the_cheapest(matrix):
    ruled = with_rules(matrix, requires("volta-apex", when={"gpu": "sm_70"}, needs={"apex": "25.05"}))
    nearest = conflict_of(ruled, gpu="v100", te="2.6", apex="25.08").nearest
    assert [set(near.changed) for near in nearest] == [{"gpu"}, {"te", "apex"}]


def choices(matrix, **pins):
    wanted = request(**pins)
    solution = solve(matrix, wanted)
    return {c.axis: c for c in explain(solution, asked=read_request(matrix, wanted))}


def test_explain_names_the_step_that_decided(matrix):
    found = choices(matrix, te="2.6")
    assert found["te"].why == "asked for (--te 2.6)"
    assert found["te"].next_best is None
    assert found["te"].newest.why == "another version was requested"
    assert found["torch"].why == "nearest in date to the rest"
    assert found["torch"].next_best.version == "2.8.0+cu126"
    assert found["cudnn"].why == "comes with torch 2.8.0+cu128"
    assert found["apex"].next_best.why == "release dates: its cell's releases are 3 months apart instead of 0"
    assert found["python"].next_best.why == "equal otherwise, but listed as less preferred"
    locked = with_rules(matrix, locked_together("lock", torch="2.7.1", te="2.6"))
    torch = choices(locked, te="2.6")["torch"]
    assert torch.why == "tested together with te 2.6.0 (lock)"
    assert torch.next_best.why == "tested together: 0 pairs of components instead of 1"


def test_explain_says_why_not_the_newest(matrix):
    newest = choices(matrix, cuda="12.6")["torch"].newest
    assert newest.version == "2.9.0+cu128"
    assert newest.why == (
        "impossible: torch 2.9.0+cu128 needs cuda 12.8. So no cell has both cuda 12.6 and torch 2.9.0+cu128."
    )


# --- the commands, on the shipped matrix ---


def test_resolve_prints_the_answer_alone():
    done = CliRunner().invoke(resolve_command, ["--cuda", "12.6", "--te", "2.6", "--driver", "560.35.05", "--json"])
    answer = json.loads(done.stdout)
    assert answer.pop("arch") == "x86_64"
    assert set(answer) == {
        "cell",
        "id",
        "driver_verdict",
        "rules",
        "evidence",
        "standing",
        "left_out",
        "matrix",
        "notes",
    }
    assert {"status", "text", "date", "claim"} <= set(answer["standing"])
    assert answer["driver_verdict"] == "full"
    assert answer["left_out"]["megatron"] == "not requested (--AXIS auto adds a version that fits)"
    assert answer["cell"]["torch"] == "2.8.0+cu126"
    assert answer["matrix"] == load_matrix().digest
    assert answer["id"].startswith("cu126-py312-torch2.8.0-te2.6.0-apex25.08-sm90-")


def test_resolve_for_people():
    done = CliRunner().invoke(resolve_command, ["--cuda", "12.6", "--te", "2.6"])
    for words in ("asked for (--cuda 12.6)", "comes with torch 2.8.0+cu126", "left out", "--driver auto"):
        assert words in done.stdout


def test_explain_lists_choices():
    done = CliRunner().invoke(explain_command, ["--cuda", "12.6", "--te", "2.6", "--json"])
    answer = json.loads(done.stdout)
    torch = next(choice for choice in answer["choices"] if choice["axis"] == "torch")
    assert torch["newest"]["why"].startswith("impossible: ")
    assert all(choice["source"] for choice in answer["choices"])


def test_explain_nearest_is_in_the_error():
    done = CliRunner().invoke(explain_command, ["--te", "2.6", "--flash-attn-hopper", "af314d40", "--nearest"])
    assert isinstance(done.exception, NoCellError)
    assert "one of the nearest cells:" in str(done.exception)
    assert "(asked: af314d40)" in str(done.exception)


def test_a_lock_pins_every_axis_and_lets_none_in():
    cell = {"cuda": "12.6", "torch": "2.8.0+cu126", "te": "2.6.0"}
    pins = {pin.axis: pin.spec for pin in request_from({}, lock=cell).pins}
    assert pins["te"] == "2.6.0"
    assert pins["apex"] == "none"
    both = request_from({"axis_te": "2.7", "prefer": "newest"}, lock=cell)
    assert [pin.spec for pin in both.pins if pin.axis == "te"] == ["2.6.0", "2.7"]
    assert both.prefer == "newest"


def test_a_geforce_card_gets_no_cuda_compat():
    """One architecture, two answers: cuda-compat is for data-center GPUs."""
    asked = ["--cuda", "12.6", "--driver", "470.82.01", "--gpu"]
    done = CliRunner().invoke(resolve_command, [*asked, "a40", "--json"])
    assert json.loads(done.stdout)["driver_verdict"] == "needs-compat"
    refused = CliRunner().invoke(resolve_command, [*asked, "rtx3090"])
    assert isinstance(refused.exception, NoCellError)
    assert "You asked for board geforce (--gpu rtx3090)." in str(refused.exception)
    same = CliRunner().invoke(resolve_command, ["--cuda", "12.6", "--gpu", "rtx3090", "--json"])
    plain = CliRunner().invoke(resolve_command, ["--cuda", "12.6", "--gpu", "sm_86", "--json"])
    assert json.loads(same.stdout)["id"] == json.loads(plain.stdout)["id"]


def test_an_empty_value_is_not_whatever_fits():
    """`--te "$TE"` with TE unset is a mistake, not a wish for any release."""
    refused = CliRunner().invoke(resolve_command, ["--te", " "])
    assert isinstance(refused.exception, UsageError)
    assert "--te" in str(refused.exception)


@pytest.mark.parametrize("cuda", ["13.1", "11.1"])
def test_a_release_that_would_do_if_it_were_named_is_named(cuda):
    steps = texts(conflict_of(load_matrix(), cuda=cuda))
    named = next(step for step in steps if "used only when requested by name (--base ngc-" in step)
    assert named.startswith("base ngc-")
    assert steps[-1].endswith(f"So no cell has cuda {cuda}.")
