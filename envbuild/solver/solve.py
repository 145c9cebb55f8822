"""Choosing one cell: complete, exactly optimal for the order that `order` states, deterministic, without I/O."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from envbuild.components import CHOICES
from envbuild.errors import NoCellError
from envbuild.matrix.cell import AUTO, NONE, Cell, Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release, Rule
from envbuild.matrix.text import spec_text
from envbuild.solver.asked import ReadRequest, read_request
from envbuild.solver.clauses import Clauses, bits, compile_matrix
from envbuild.solver.order import Score, best_values, month_of, score_of
from envbuild.solver.proof import EvidenceRef, rank_of
from envbuild.util.frozen import Frozen, field, replace

if TYPE_CHECKING:
    from envbuild.solver.sentences import ConflictStep

NOT_ASKED = "not requested (--AXIS auto adds a version that fits)"
"""Why an axis of use `asked` is left out."""
_NOTHING_FITS = "no release of it fits what was asked"


class Solution(Frozen):
    """The chosen cell, and what is known of the choice."""

    cell: Cell
    request: Request
    matrix_digest: str
    rules: tuple[Rule, ...]
    """The refusing rules that apply to the cell, all satisfied."""
    tested_with: tuple[Rule, ...]
    """The tested-with rules that the cell satisfies."""
    notes: tuple[Rule, ...]
    """What to know of the cell."""
    evidence: tuple[EvidenceRef, ...]
    """The evidence of the highest rank that speaks for the cell."""
    reasons: Mapping[AxisName, str]
    """Per axis in use, one line on why this version."""
    score: Score
    asked: ReadRequest
    values: Sequence[int]
    """The cell as `asked` numbers releases, one value an axis."""
    added: Mapping[AxisName, Release] = field(default_factory=dict)
    """Releases that the request named on open axes and no data file lists (an exact driver version)."""

    @cached_property
    def left_out(self) -> Mapping[AxisName, str]:
        """Axes that could be in a cell and are not, and why; worked out when first looked at, for it asks more questions."""
        return _left_out(self.asked, self.values)


def solve(matrix: Matrix, request: Request, evidence: Sequence[EvidenceRef] = ()) -> Solution:
    """Return the best cell for `request`, by the order that `order` states.

    Raises:
        UsageError: a pin names an unknown axis, or matches no release.
        NoCellError: no cell satisfies the request; its `conflict` explains why in numbered steps.

    """
    asked = read_request(matrix, request)
    domains = asked.compiled.domains(asked.pinned())
    values = best_values(asked, evidence, domains)
    if values is None:
        from envbuild.solver.conflict import explain_conflict

        conflict = explain_conflict(asked, evidence)
        raise NoCellError(
            conflict.text(),
            hint="`envbuild explain --nearest` with the same flags lists the closest cells",
            conflict=conflict,
        )
    return _solution(asked, evidence, values, domains)


def _solution(
    asked: ReadRequest, evidence: Sequence[EvidenceRef], values: Sequence[int], domains: Sequence[int]
) -> Solution:
    compiled = asked.compiled
    cell = compiled.cell(values)
    applied = _applied(compiled, values)
    tested = tuple(rule for rule in applied if rule.kind == "tested-with")
    score = score_of(asked, evidence, values)

    def of_rank(rank: int, *, in_part: bool) -> tuple[EvidenceRef, ...]:
        return tuple(ref for ref in evidence if rank and rank_of(asked, ref, values, in_part=in_part) == rank)

    proofs = of_rank(-score.evidence, in_part=False)
    in_part = () if proofs else of_rank(-score.evidence_in_part, in_part=True)
    return Solution(
        cell=cell,
        request=asked.request,
        matrix_digest=compiled.matrix.digest,
        rules=tuple(rule for rule in applied if rule.refuses),
        tested_with=tested,
        notes=tuple(rule for rule in applied if rule.kind == "note" and not cell.versions.keys() & set(rule.without)),
        evidence=proofs or in_part,
        reasons=_reasons(asked, values, domains, tested, proofs, in_part),
        score=score,
        asked=asked,
        values=values,
        added=asked.added,
    )


def _applied(compiled: Clauses, values: Sequence[int]) -> list[Rule]:
    rules = compiled.matrix.rules
    when: Sequence[tuple[Any, ...]] | None = vars(compiled.matrix).get("_when")
    # a request with a release that the matrix does not have moves the places of the others
    if when is None or compiled.values is not compile_matrix(compiled.matrix).values:
        return [rule for rule in rules if rule_applies(compiled, rule, values)]
    return [
        rule
        for rule, (component, *masks) in zip(rules, when, strict=True)
        if (component < 0 or values[component]) and all(mask >> values[axis] & 1 for axis, mask in masks)
    ]


def rule_applies(compiled: Clauses, rule: Rule, values: Sequence[int]) -> bool:
    """Return whether every axis of the rule's `when` (and an inert rule's component) is in use and matches."""
    if rule.component and not values[compiled.number[rule.component]]:
        return False
    return all(compiled.touched(axis := compiled.number[n], spec) >> values[axis] & 1 for n, spec in rule.when.items())


def _reasons(
    asked: ReadRequest,
    values: Sequence[int],
    domains: Sequence[int],
    tested: Sequence[Rule],
    proofs: Sequence[EvidenceRef],
    in_part: Sequence[EvidenceRef],
) -> dict[AxisName, str]:
    compiled = asked.compiled
    pins: dict[AxisName, list[Pin]] = {}
    for pin in asked.request.pins:
        pins.setdefault(pin.axis, []).append(pin)
    chosen = {name: compiled.values[i][values[i]] for i, name in enumerate(compiled.names)}
    result = {}
    for i, name in enumerate(compiled.names):
        release = chosen[name]
        if release is None:
            continue
        axis = compiled.axes[i]
        # what another flag implies has that flag and its value as its origin: --gpu gh200
        stated = (
            pin.origin if " " in pin.origin and pin.origin.startswith("-") else f"{pin.origin} {pin.spec}"
            for pin in pins.get(name, [])
        )
        words = " and ".join(stated)
        asked_for = f"asked for ({words}); " if words else ""
        together = [rule for rule in tested if name in rule.when and len(rule.when) > 1]
        fixers = [
            f"{other} {r.version}"
            for other, r in chosen.items()
            if r is not None and r.fixes.get(name) == release.version
        ]
        if fixers:
            reason = f"comes with {' and '.join(fixers)}"
        elif not domains[i] & (domains[i] - 1):
            reason = asked_for.removesuffix("; ") or "the only one that the rules allow"
            asked_for = ""
        elif any(name in proof.versions for proof in proofs):
            reason = f"ran with the rest ({proofs[0].id})"
        elif together and asked.request.prefer == "proven":
            others = sorted(
                {f"{n} {r.version}" for rule in together for n in rule.when if n != name and (r := chosen[n])}
            )
            reason = f"tested together with {', '.join(others)} ({together[0].id})"
        elif any(name in proof.versions for proof in in_part):
            reason = f"ran with the rest, but for what was asked for ({in_part[0].id})"
        elif asked.request.prefer == "proven" and (earlier := _tested_before(compiled, values, i, tested)):
            reason = earlier
        elif release.date is None and axis.dated:
            reason = "the best that the rules allow"
        elif axis.dated and asked.request.prefer == "proven":
            reason = _by_date(compiled, values, domains, i)
        elif axis.scheme == "name":
            reason = "the first listed that fits"
        else:
            reason = "the newest that fits"
        result[name] = asked_for + reason
    return result


def _tested_before(compiled: Clauses, values: Sequence[int], axis: int, tested: Sequence[Rule]) -> str | None:
    """Say which versions were tested together that the cell has later patches of, where a rule counts for these."""
    name = compiled.names[axis]
    for rule in compiled.matrix.rules:
        if rule.kind != "tested-with" or name not in rule.when or len(rule.when) < 2 or rule in tested:
            continue
        if all(mask >> values[number] & 1 for number, mask in compiled.tested_with(rule)):
            named = ", ".join(f"{n} {spec_text(rule.when[n])}" for n in sorted(rule.when))
            return f"tested together in earlier patches: {named} ({rule.id})"
    return None


def _by_date(compiled: Clauses, values: Sequence[int], domains: Sequence[int], axis: int) -> str:
    """Say why a newer release was not taken, where nothing but dates and rules speaks of it."""
    newer = [value for value in bits(domains[axis]) if value > values[axis]]
    if not newer:
        return "the newest that fits"
    rest = [
        month
        for i, other in enumerate(compiled.axes)
        if other.dated and i != axis and (month := month_of(compiled, i, values[i])) is not None
    ]

    def spread(value: int) -> int:
        months = [*rest, *([] if (month := month_of(compiled, axis, value)) is None else [month])]
        return max(months, default=0) - min(months, default=0)

    if all(spread(value) > spread(values[axis]) for value in newer):
        return "nearest in date to the rest"
    return "the newest that is close in date to the rest"


def _left_out(asked: ReadRequest, values: Sequence[int]) -> dict[AxisName, str]:
    compiled = asked.compiled
    excluded = {pin.axis: pin for pin in asked.request.pins if pin.spec == NONE}
    result = {}
    for i, axis in enumerate(compiled.axes):
        if values[i] or axis.use in {"derived", "host", "always"} or axis.name in CHOICES:
            continue  # without a choice of a component's parts nothing of it is left out
        if axis.name in excluded:
            origin = excluded[axis.name].origin
            of_lock = origin == "the lock"
            result[axis.name] = f"it is not in {origin}" if of_lock else f"asked not to be there ({origin} {NONE})"
        elif axis.use == "asked":
            result[axis.name] = NOT_ASKED
        else:
            result[axis.name] = _why_impossible(asked, values, i)
    return result


def _why_impossible(asked: ReadRequest, values: Sequence[int], axis: int) -> str:
    """Say in a sentence or two why a default axis could not be in the cell."""
    from envbuild.solver.conflict import explain_conflict
    from envbuild.solver.search import solvable

    compiled = asked.compiled
    name = compiled.names[axis]
    kept = tuple(
        Pin(axis=other.name, spec=AUTO, origin="(default)")
        for i, other in enumerate(compiled.axes)
        if other.use == "default" and values[i] and all(p.axis != other.name for p in asked.request.pins)
    )
    wanted = Pin(axis=name, spec=AUTO, origin="(default)")
    for extra in ((wanted,), (*kept, wanted)):
        request = replace(asked.request, pins=(*asked.request.pins, *extra))
        trial = read_request(compiled.matrix, request)
        if not solvable(*trial.of(request.pins)):
            return _gist(compiled, name, explain_conflict(trial, (), first_only=True).steps)
    # nothing keeps it out: what ranks before a component does, which is whether the driver starts the cell by itself
    why = " with this driver" if any(pin.axis == "driver" for pin in asked.request.pins) else ""
    return f"cells that have it rank lower{why}; --{name} {AUTO} gives one"


def _gist(compiled: Clauses, name: AxisName, steps: "Sequence[ConflictStep]") -> str:
    """Return the rule that keeps the newest releases of an axis out, and the conclusion.

    The last step of a conflict is about what the others left, often an image that was not requested.
    """
    rest = [step for step in steps if step.pin is None]
    if not rest:
        return _NOTHING_FITS
    axis = compiled.number[name]
    taken = compiled.real[axis] & ~sum(1 << value for value in compiled.guards.get(axis, ()))
    rules = {rule.id: rule for rule in compiled.matrix.rules}

    def concerns(step: "ConflictStep") -> int:
        rule = rules.get(step.rule)
        if rule is None or name not in step.axes:
            return 0
        return (compiled.mask(axis, rule.when.get(name, "any")) & taken).bit_length()

    def is_of(step: "ConflictStep") -> bool:
        rule = rules.get(step.rule)
        return rule is not None and name in rule.when

    main = max(rest, key=lambda step: (concerns(step), name in step.narrowed or step is rest[-1], is_of(step)))
    if not concerns(main):
        return rest[-1].text
    return " ".join(filter(None, (main.claim, rest[-1].conclusion)))
