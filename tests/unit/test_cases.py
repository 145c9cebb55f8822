"""Real combinations, good and bad, each with the thread or page that it comes from: tests/data/cases.toml."""

import fnmatch
from pathlib import Path

import pytest
import tomli
from pydantic import BaseModel, ConfigDict, TypeAdapter

from envbuild.errors import NoCellError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.matrix.model import Source
from envbuild.solver.solve import solve


class Case(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    source: Source
    ask: dict[str, str]
    repository: bool = False
    """Whether a stack asks."""
    cell: dict[str, str] = {}
    left_out: list[str] = []
    refused: str | None = None


_FILE = Path(__file__).parent.parent / "data" / "cases.toml"
CASES = TypeAdapter(list[Case]).validate_python(tomli.loads(_FILE.read_text("utf-8"))["case"])


def test_there_are_enough_of_both_kinds_and_none_twice():
    assert len(CASES) >= 60
    assert sum(case.refused is None for case in CASES) >= 25
    assert sum(case.refused is not None for case in CASES) >= 25
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({tuple(sorted(case.ask.items())) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case):
    matrix = load_matrix()
    request = Request(
        pins=tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in case.ask.items()),
        repository=case.repository,
    )
    if case.refused is None:
        versions = solve(matrix, request).cell.versions
        for axis, wanted in case.cell.items():
            assert fnmatch.fnmatchcase(versions[axis], wanted), f"{axis} is {versions[axis]}, not {wanted}"
        assert not set(case.left_out) & set(versions)
        return
    with pytest.raises(NoCellError) as caught:
        solve(matrix, request)
    steps = caught.value.conflict.steps
    topics = {rule.id: rule.topic for rule in matrix.rules}
    shown = {topics.get(step.rule, "needs") for step in steps if step.rule}
    assert any(fnmatch.fnmatchcase(topic, case.refused) for topic in shown), f"{shown}\n{caught.value}"
    # the conflict is about what was asked: every pin that it names is one of the case's
    assert {step.pin.axis for step in steps if step.pin} <= set(case.ask)
