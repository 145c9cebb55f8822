"""The ledger of trials: added to and never changed, read strictly, and what it says of a cell's pairs."""

import datetime as dt
import json
import os
from functools import partial

import pytest
from pydantic import ValidationError
from small_matrix import requires, small_matrix, with_rules

from envbuild.curate.checks import check_matrix
from envbuild.errors import DataError, HostError
from envbuild.evidence.pairs import standing_of_pairs, torch_on_index
from envbuild.evidence.trials import (
    CudaCount,
    Ledger,
    Trial,
    add_trial,
    cuda_counted,
    load_trials,
    read_trials,
    trials_folder,
)
from envbuild.matrix.load import load_matrix

INPUTS = "ab" * 32


def trial(te="2.7.0", torch="2.9.1", **changes):
    fields = {
        "date": dt.date(2026, 11, 23),
        "kind": "names",
        "pair": {"te": te, "torch": torch},
        "verdict": "passed",
        "command": f"envbuild matrix try te={te} torch={torch} --kind names",
        "inputs": INPUTS,
    }
    return Trial.model_validate(fields | changes)


def failed(first="a.py:1: torch.gone", **changes):
    return trial(verdict="failed", first=first, **changes)


def test_what_is_added_reads_back_in_order(tmp_path):
    made = [
        add_trial(each, tmp_path)
        for each in (trial(), failed(pythons={"3.12": "failed"}, counts={"missing": 1}), trial(te="2.8.0"))
    ]
    assert load_trials(tmp_path) == tuple(made)
    assert len({each.id for each in made}) == 3
    assert (tmp_path / "te.jsonl").read_text().count("\n") == 3


def test_a_line_that_was_edited_does_not_load(tmp_path):
    add_trial(trial(), tmp_path)
    add_trial(failed(), tmp_path)
    path = tmp_path / "te.jsonl"
    path.write_text(path.read_text().replace('"failed"', '"undecided"'))
    with pytest.raises(DataError, match="edited") as caught:
        read_trials(path)
    assert caught.value.where == f"{path}:2"


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[" * 100_000,
        "[]",
        "{}",
        json.dumps(json.loads(trial().model_dump_json()) | {"more": 1}),
        json.dumps(json.loads(trial().model_dump_json()) | {"pair": {"te": "2.7.0"}}),
        json.dumps(json.loads(trial().model_dump_json()) | {"verdict": "failed"}),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "te.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match="does not load") as caught:
        load_trials(tmp_path)
    assert "te.jsonl:1" in caught.value.where


def test_the_last_trial_of_a_kind_counts_and_the_worst_verdict_is_the_pairs():
    ledger = Ledger([failed(), trial(), trial(kind="metadata")])
    tried = ledger.of({"te": "2.7.0", "torch": "2.9.1+cu128"})
    assert tried.verdict == "passed"
    assert tried.describe() == "tried: metadata, names passed"
    ledger = Ledger([trial(), failed(), trial(kind="metadata")])
    tried = ledger.of({"torch": "2.9.1", "te": "2.7.0"})
    assert tried.verdict == "failed"
    assert tried.describe() == "tried: names failed; metadata passed (a.py:1: torch.gone)"


def test_the_cu_files_of_the_last_trial_of_each_pair_are_counted():
    nvcc, clang = {"cuda_by_nvcc": 72}, {"cuda_by_clang": 70}
    of_sources = partial(trial, kind="sources")
    made = [
        of_sources(counts={"cuda_files": 72, **nvcc}),
        of_sources(torch="2.8.0", counts={"cuda_files": 72, **nvcc}),
        of_sources(torch="2.8.0", counts={"cuda_files": 72, **clang}),  # the last one counts
        of_sources(torch="2.7.0", counts={"cuda_files": 72}),  # not looked at
        of_sources(torch="2.6.0", counts={"cuda_files": 72}, verdict="failed", first="a.cpp: no"),
        of_sources(te="2.8.0", counts={"units": 3}),  # it has none
        trial(),
    ]
    assert cuda_counted(made) == {("te", "torch"): CudaCount(passed=3, all_cu_files_passed=1, cu_files=142)}


@pytest.mark.parametrize(
    ("versions", "known"),
    [
        ({"te": "2.7.0", "torch": "2.9.0+cu126"}, True),  # one patch of torch stands for its minor
        ({"te": "2.7.0", "torch": "2.10.0"}, False),
        ({"te": "2.7.1", "torch": "2.9.1"}, False),  # not so of a component
        ({"te": "2.7.0", "torch": "2.9.0a0+50eac811a6"}, False),  # an image's own build
        ({"te": "2.7.0", "megatron": "0.14.0"}, False),
    ],
)
def test_which_cells_a_trial_speaks_for(versions, known):
    assert (Ledger([trial()]).of(versions) is not None) == known


@pytest.mark.parametrize(
    ("torch", "text"),
    [
        ("2.9.1+cu128", "tried: names passed"),  # the build that PyPI has
        ("2.9.1+cu130", "tried with torch 2.9.1+cu128: names passed"),
        ("2.9.0+cu128", "tried with torch 2.9.1+cu128: names passed"),
    ],
)
def test_the_release_and_build_that_a_trial_read_is_named_where_a_cell_has_another(torch, text):
    ledger = Ledger([trial()])
    known = ledger.with_builds({"2.9.1": "2.9.1+cu128"}.__getitem__)
    assert known.of({"te": "2.7.0", "torch": torch}).describe() == text
    # where the build is not known, another release is named alone
    plain = ledger.of({"te": "2.7.0", "torch": torch})
    assert plain.read == ({"torch": "2.9.1"} if torch.startswith("2.9.0") else {})


def test_the_answer_of_a_pair_has_what_was_read():
    matrix, versions = load_matrix(), {"te": "2.16.1", "torch": "2.12.0+cu126"}
    ledger = Ledger([trial(te="2.16.1", torch="2.12.1").sealed()]).with_builds(partial(torch_on_index, matrix))
    (found,) = standing_of_pairs(matrix, versions, (), ledger)
    assert str(found) == "te 2.16.1 with torch 2.12.0+cu126: tried with torch 2.12.1+cu130: names passed"
    assert found.as_json()["tried_with"] == {"torch": "2.12.1+cu130"}


def test_each_pair_of_a_cell_is_tried_stated_or_neither():
    matrix = with_rules(small_matrix(), requires("apex-torch", when={"apex": "25.08"}, needs={"torch": ">=2.7"}))
    versions = {"torch": "2.8.0+cu126", "te": "2.6.0", "apex": "25.08", "python": "3.12"}
    found = standing_of_pairs(matrix, versions, matrix.rules, Ledger([failed(te="2.6.0", torch="2.8.0").sealed()]))
    known = {tuple(pair.versions): (pair.known, pair.verdict) for pair in found}
    assert known == {
        ("te", "torch"): ("tried", "failed"),
        ("apex", "torch"): ("stated", None),
        ("apex", "te"): ("neither", None),
    }
    assert str(found[0]) == "te 2.6.0 with torch 2.8.0+cu126: tried: names failed (a.py:1: torch.gone)"
    assert found[0].source.startswith("trial:")
    assert found[1].source == "https://example.org/page"


def test_a_rule_may_cite_a_trial_and_a_missing_one_is_an_error():
    source = "trial:0123456789abcdef"
    assert requires("x", when={"te": "any"}, needs={"torch": ">=2.7"}, source=source).source == source
    with pytest.raises(ValidationError, match="not of a known form"):
        requires("x", when={"te": "any"}, needs={"torch": ">=2.7"}, source="trial:short")
    matrix = with_rules(small_matrix(), requires("x", when={"te": "any"}, needs={"torch": ">=2.7"}, source=source))
    texts = [str(finding) for finding in check_matrix(matrix, online=False)]
    assert f"error: rule x: rests on {source}, which is not there" in texts


def test_the_trials_of_this_installation_load_and_have_ids_of_their_own():
    trials = load_trials(trials_folder())
    assert len(trials) > 1000
    assert len({trial.id for trial in trials}) == len(trials)
    held = Ledger(trials).of({"te": "2.17.0", "torch": "2.10.0+cu128"})
    assert "nccl_dev_cap.hpp" in held.describe()


def test_a_disk_that_fills_up_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    (first,) = [add_trial(trial(), tmp_path)]
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, body: real(handle, body[:100]))
    with pytest.raises(HostError, match="No space left on device"):
        add_trial(failed(), tmp_path)
    monkeypatch.undo()
    assert load_trials(tmp_path) == (first,)
    assert (*load_trials(tmp_path), add_trial(failed(), tmp_path)) == load_trials(tmp_path)
