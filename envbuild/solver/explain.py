"""Why each version of a cell was chosen: what the best cell without it would lose, and why not the newest."""

from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.matrix.cell import Pin
from envbuild.matrix.model import AxisName
from envbuild.solver.asked import ReadRequest, read_request
from envbuild.solver.conflict import explain_conflict
from envbuild.solver.order import Score, best_values, score_of
from envbuild.solver.proof import RANKS, EvidenceRef
from envbuild.solver.solve import Solution
from envbuild.util.frozen import replace
from envbuild.util.text import count_of


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another release of an axis, and why it was not chosen."""

    version: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One axis of a cell: the version, why, and what else there was."""

    axis: AxisName
    version: str
    why: str
    source: str
    next_best: Alternative | None
    """What the best cell with another release of this axis has, and at which step of the order it loses."""
    newest: Alternative | None
    """The most preferred release, where it was not chosen and is not the next best."""


def explain(solution: Solution, evidence: Sequence[EvidenceRef] = (), *, asked: ReadRequest) -> tuple[Choice, ...]:
    """Return the choices of `solution`, in the matrix' order of axes.

    Args:
        solution: what `solve` returned.
        evidence: what it was given.
        asked: its request, read (`read_request`).

    """
    compiled = asked.compiled
    values = [
        compiled.position[i][solution.cell.versions[name]] if name in solution.cell.versions else 0
        for i, name in enumerate(compiled.names)
    ]
    result = []
    for i, name in enumerate(compiled.names):
        release = compiled.values[i][values[i]]
        if release is None:
            continue
        next_best = newest = None
        if compiled.axes[i].use != "derived" and name not in solution.added:
            next_best = _next_best(asked, evidence, solution, i, values[i])
            newest = _newest(asked, evidence, solution, i)
            newest = None if newest and next_best and newest.version == next_best.version else newest
        result.append(
            Choice(
                axis=name,
                version=release.version,
                why=solution.reasons[name],
                source=release.source,
                next_best=next_best,
                newest=newest,
            )
        )
    return tuple(result)


def _next_best(
    asked: ReadRequest, evidence: Sequence[EvidenceRef], solution: Solution, axis: int, chosen: int
) -> Alternative | None:
    compiled = asked.compiled
    domains = compiled.domains(asked.pinned())
    domains[axis] &= compiled.real[axis] & ~(1 << chosen)
    values = best_values(asked, evidence, domains)
    if values is None:
        return None
    release = compiled.values[axis][values[axis]]
    assert release is not None  # noqa: S101
    score = score_of(asked, evidence, values)
    why = difference(solution.score, score, asked, release.version)
    return Alternative(version=release.version, why=why, source=release.source)


def _newest(
    asked: ReadRequest,
    evidence: Sequence[EvidenceRef],
    solution: Solution,
    axis: int,
) -> Alternative | None:
    compiled = asked.compiled
    name = compiled.names[axis]
    last = len(compiled.values[axis]) - 1
    release = compiled.values[axis][last]
    if release is None or release.version == solution.cell.versions[name]:
        return None
    pinned = [pin for pin, number, mask in asked.masks if number == axis and not mask >> last & 1]
    if pinned:
        return Alternative(version=release.version, why="another version was requested", source=pinned[0].origin)
    if last in compiled.guards.get(axis, ()):
        why = f"used only when requested by name (--{name} {release.version})"
        return Alternative(version=release.version, why=why, source=release.source)
    pins = (*asked.request.pins, Pin(axis=name, spec=release.version, origin=f"--{name}"))
    trial = read_request(compiled.matrix, replace(asked.request, pins=pins))
    values = best_values(trial, evidence, trial.compiled.domains(trial.pinned()))
    if values is None:
        reasons = [step for step in explain_conflict(trial).steps if step.pin is None]
        return Alternative(
            version=release.version,
            why="impossible: " + (" ".join(step.text for step in reasons) or "it contradicts the request"),
            source="; ".join(dict.fromkeys(step.source for step in reasons if step.source)),
        )
    why = difference(solution.score, score_of(asked, evidence, values), asked, release.version)
    return Alternative(version=release.version, why=why, source=release.source)


def difference(chosen: Score, other: Score, asked: ReadRequest, version: str) -> str:
    """Say at which step of the stated order `other`, the best cell with `version`, loses to `chosen`."""
    steps = [
        (chosen.compat, other.compat, "its cell needs the package cuda-compat under this driver"),
        (
            chosen.defaults_out,
            other.defaults_out,
            f"with it {count_of(other.defaults_out - chosen.defaults_out, 'more default component')} would be missing in the cell",
        ),
    ]
    if asked.request.prefer == "proven":
        steps += [
            (
                chosen.evidence,
                other.evidence,
                f"evidence: {RANKS[-other.evidence]} instead of {RANKS[-chosen.evidence]}",
            ),
            (
                chosen.untested_pairs,
                other.untested_pairs,
                f"tested together: {count_of(-other.untested_pairs, 'pair')} of components instead of {-chosen.untested_pairs}",
            ),
            (
                chosen.evidence_in_part,
                other.evidence_in_part,
                f"evidence in part: {RANKS[-other.evidence_in_part]} instead of {RANKS[-chosen.evidence_in_part]}",
            ),
            (
                chosen.spread,
                other.spread,
                f"release dates: its cell's releases are {count_of(other.spread, 'month')} apart instead of {chosen.spread}",
            ),
            (chosen.untagged, other.untagged, "its cell has a commit without a tag"),
        ]
    steps += [
        (
            chosen.age,
            other.age,
            f"age: its cell is {count_of(other.age - chosen.age, 'day')} older, summed over the components",
        ),
        (
            chosen.untested_undated_pairs,
            other.untested_undated_pairs,
            f"{version} was not tested together with the rest by any rule",
        ),
    ]
    for ours, theirs, text in steps:
        if ours != theirs:
            return text
    return "equal otherwise, but listed as less preferred"
