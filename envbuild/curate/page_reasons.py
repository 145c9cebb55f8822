"""Why combinations of the page have no cell, each distinct reason once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.solver.asked import ReadRequest, read_request
from envbuild.solver.conflict import explain_conflict
from envbuild.solver.search import solvable

# Pairs of pins that may never go together, the most general first: what is shown for CUDA 13 and TE 2.8 is true of every torch.
_MAIN_PAIRS = (
    ("cuda", "te"),
    ("cuda", "gpu"),
    ("te", "gpu"),
    ("torch", "python"),
    ("te", "python"),
    ("torch", "te"),
    ("torch", "gpu"),
    ("cuda", "python"),
)


@dataclass
class Reasons:
    """Why requests have no cell, each distinct reason once.

    Two pins that never go together say more than a longer derivation, and explain every combination that holds them: some
    hundred conflicts stand for several thousand combinations.
    """

    matrix: Matrix
    steps: list[tuple[Mapping[str, str], ...]] = field(default_factory=list)
    known: dict[frozenset[tuple[AxisName, str]], int | None] = field(default_factory=dict)

    def of(self, pins: Mapping[AxisName, str]) -> int:
        """Return the number of the reason why `pins` have no cell: the first of one step that two of them give, else the shortest."""
        found = []
        for one, other in _MAIN_PAIRS:
            if one in pins and other in pins:
                number = self._reason(((one, pins[one]), (other, pins[other])))
                if number is not None:
                    if len(self.steps[number]) == 1:
                        return number
                    found.append(number)
        if found:
            return min(found, key=lambda number: len(self.steps[number]))
        whole = self._reason(tuple(sorted(pins.items())))
        assert whole is not None  # noqa: S101  # asked only for what has no cell
        return whole

    def _reason(self, items: Sequence[tuple[AxisName, str]]) -> int | None:
        key = frozenset(items)
        if key not in self.known:
            asked = read_request(self.matrix, Request(pins=pins_of(dict(items))))
            self.known[key] = None if solvable(*asked.of(asked.request.pins)) else self._explained(asked)
        return self.known[key]

    def _explained(self, asked: ReadRequest) -> int:
        conflict = explain_conflict(asked, first_only=True)
        steps = tuple(
            {"text": step.text, "rule": step.rule, "source": step.source} for step in conflict.steps if step.pin is None
        )
        if steps not in self.steps:
            self.steps.append(steps)
        return self.steps.index(steps)


def pins_of(versions: Mapping[AxisName, str]) -> tuple[Pin, ...]:
    return tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in versions.items())
