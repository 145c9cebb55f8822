"""What is known of each pair of releases in a chosen cell: tried, stated by a rule or a release, or neither."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from envbuild.components import CHOICES, COMPONENTS
from envbuild.evidence.refs import committed_trials
from envbuild.evidence.trials import Ledger, Verdict
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Rule

Known = Literal["tried", "stated", "neither"]

_WITH: tuple[AxisName, ...] = ("torch", "te")
"""What the other components are compiled against, or imported next to."""


@dataclass(frozen=True, kw_only=True)
class PairStanding:
    """One pair of a cell."""

    versions: Mapping[AxisName, str]
    """Both by axis, the component first."""
    known: Known
    verdict: Verdict | None = None
    """The worst of its trials."""
    text: str
    source: str = ""
    """The rule or the trials."""
    read: Mapping[AxisName, str] = field(default_factory=dict)
    """What its trials read that is another release or build than the cell's."""

    def __str__(self) -> str:
        (one, first), (other, second) = self.versions.items()
        return f"{one} {first} with {other} {second}: {self.text}"

    def as_json(self) -> dict[str, object]:
        """Return it as `--json` prints it."""
        return {
            "pair": dict(self.versions),
            "known": self.known,
            "verdict": self.verdict,
            "text": self.text,
            "source": self.source,
            "tried_with": dict(self.read),
        }


def torch_on_index(matrix: Matrix, version: str) -> str:
    """Return the release that PyPI's torch of this version is: `2.12.1+cu130` for `2.12.1`; the version where none is."""
    builds = (r for r in matrix.releases["torch"] if r.version.partition("+")[0] == version)
    return next((r.version for r in builds if r.facts.index == "pypi"), version)


def trials_of(matrix: Matrix) -> Ledger:
    """Return the trials of this installation, which know the builds of torch that they read. Read once.

    Raises:
        DataError: a record was edited.

    """
    return committed_trials().with_builds(partial(torch_on_index, matrix))


def pairs_in(versions: Mapping[AxisName, str]) -> Iterator[dict[AxisName, str]]:
    """Yield each pair of a cell that trials speak of: a component and torch, or a component and Transformer Engine."""
    for other in _WITH:
        for axis, component in COMPONENTS.items():
            if axis in CHOICES:
                continue
            if axis in versions and other in versions and component.place > COMPONENTS[other].place:
                yield {axis: versions[axis], other: versions[other]}


def standing_of_pairs(
    matrix: Matrix, versions: Mapping[AxisName, str], rules: Sequence[Rule], ledger: Ledger
) -> tuple[PairStanding, ...]:
    """Return what is known of each pair of a cell.

    Args:
        matrix: the releases.
        versions: the cell's.
        rules: those that apply to it.
        ledger: the trials.

    """
    return tuple(_standing(matrix, pair, rules, ledger) for pair in pairs_in(versions))


def _standing(matrix: Matrix, pair: Mapping[AxisName, str], rules: Sequence[Rule], ledger: Ledger) -> PairStanding:
    tried = ledger.of(pair)
    if tried is not None:
        source = ", ".join(f"trial:{trial.id}" for trial in tried.trials)
        return PairStanding(
            versions=pair,
            known="tried",
            verdict=tried.verdict,
            text=tried.describe(),
            source=source,
            read=tried.read,
        )
    for rule in rules:
        named = {*rule.when, *rule.needs, *rule.with_, *rule.same, *(a for alt in rule.any_of for a in alt)}
        if pair.keys() <= named:
            return PairStanding(versions=pair, known="stated", text=f"stated by rule {rule.id}", source=rule.source)
    for axis, version in pair.items():
        if matrix.has(axis, version):
            release = matrix.release(axis, version)
            if release.needs.keys() & (pair.keys() - {axis}):
                text = f"stated by {axis} {version}"
                return PairStanding(versions=pair, known="stated", text=text, source=release.source)
    return PairStanding(versions=pair, known="neither", text="neither tried nor stated: no rule speaks of the two")
