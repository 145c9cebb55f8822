"""The four words in the tables of `envbuild matrix AXIS` and `envbuild matrix cells`, and in their JSON."""

import json

import pytest
from asking import stdout_of

from envbuild.evidence.refs import committed_evidence

RAN = {"torch": "2.11.0+cu130", "te": "2.12.0"}


def rows(words: str) -> list[dict]:
    answer = json.loads(stdout_of(f"matrix {words} --json"))
    return answer.get("cells") or answer["releases"]


def claims(words: str) -> set[str]:
    return {row["standing"]["claim"] for row in rows(words)}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("te 2.12", {"run-on-this-gpu"}),
        ("te 2.9", {"tried"}),
        ("te ngc", {"stated"}),
        ("cuda 13.0", {"run-on-this-gpu"}),
        ("cuda cpu", {"tried"}),
        ("gpu sm_90", {"run-on-this-gpu"}),
        ("gpu sm_100", {"stated"}),  # that software ran on another GPU is no word on this one
        ("arch aarch64", {"stated"}),
        ("toolchain pypi-13.0.2", {"run-on-this-gpu"}),
        ("cells torch te --torch 2.11.0+cu130 --te 2.12", {"run-on-this-gpu"}),
        ("cells torch te --torch 2.11.0+cu130 --te 2.12 --gpu h100", {"run-on-this-gpu"}),
        ("cells torch te --torch 2.11.0+cu130 --te 2.12 --gpu b200", {"run-elsewhere"}),
        ("cells torch te --torch 2.11.0+cu130 --te 2.12 --gpu h100,b200", {"run-elsewhere"}),
        ("cells torch te --torch 2.11.0+cu130 --te 2.12 --gpu gh200", {"run-elsewhere"}),
        ("cells torch te --torch 2.11.0+cu130 --te 2.12 --python 3.13", {"run-elsewhere"}),
        ("cells torch te --torch 2.8 --te 2.8", {"tried"}),
    ],
)
def test_the_word_of_a_row(words, found) -> None:
    assert claims(words) == found


def test_a_row_says_what_resolve_says() -> None:
    """Of the newest combinations with a torch that ran, each row has the word of the cell, or a better one of another cell."""
    order = ["stated", "tried", "run-elsewhere", "run-on-this-gpu"]
    for row in rows("cells cuda torch te --torch 2.11.0+cu130 --gpu h100")[-6:]:
        pins = " ".join(f"--{axis} {row[axis]}" for axis in ("cuda", "torch", "te"))
        cell = json.loads(stdout_of(f"resolve {pins} --gpu h100 --json"))["standing"]["claim"]
        assert order.index(row["standing"]["claim"]) >= order.index(cell)
        assert (row["te"] == RAN["te"]) == (cell == "run-on-this-gpu")


def test_a_row_names_the_gpu_and_the_record() -> None:
    (row,) = rows("te 2.12")
    assert row["standing"]["gpus"] == ["sm_90"]
    assert row["standing"]["text"] == "run on this GPU (sm_90)"
    assert row["standing"]["record"] in {record.id for record in committed_evidence()}


def test_the_tables_have_the_word() -> None:
    head, line, *_ = stdout_of("matrix te 2.12").splitlines()
    assert head.split()[:3] == ["version", "date", "proof"]
    assert "run on this GPU (sm_90)" in line
    assert stdout_of("matrix cells te --te 2.12").splitlines()[:2] == [
        "te      proof",
        "2.12.0  run on this GPU (sm_90)",
    ]


def test_a_row_names_the_build_that_its_trials_read() -> None:
    read = {row["torch"]: row["standing"] for row in rows("cells torch te --cuda 12.9 --te 2.12 --torch 2.8")}
    assert read["2.8.0+cu129"]["tried_with"] == ["torch 2.8.0+cu128"]
    assert read["2.8.0+cu129"]["text"] == "tried without a GPU (with torch 2.8.0+cu128)"
    (same,) = rows("cells torch te --cuda 12.8 --te 2.8 --torch 2.8")
    assert (same["standing"]["text"], same["standing"]["tried_with"]) == ("tried without a GPU", [])


def test_an_axis_that_no_run_speaks_of_has_no_word() -> None:
    assert {row["standing"] for row in rows("driver 580")} == {None}
    assert "proof" not in stdout_of("matrix driver 580").splitlines()[0]


def test_a_run_of_some_tests_alone_gives_no_word() -> None:
    """The flash-attn of a run with `-k` was tried with torch, and no more."""
    (row,) = rows("flash-attn ==2.8.3")
    assert row["standing"]["claim"] == "tried"
