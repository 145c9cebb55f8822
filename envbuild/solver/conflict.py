"""Why no cell fits: minimal sets of pins and of clauses, shown as numbered steps.

A conflict is minimal twice over: without any one of its pins a cell exists, and without any one of its clauses the
derivation falls apart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from envbuild.matrix.cell import NONE, Pin
from envbuild.solver.asked import ReadRequest
from envbuild.solver.clauses import Clauses
from envbuild.solver.nearest import Near, nearest
from envbuild.solver.program import Program, any_cell
from envbuild.solver.proof import EvidenceRef
from envbuild.solver.propagation import propagate
from envbuild.solver.search import solvable
from envbuild.solver.sentences import ConflictStep, steps_of


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A minimal explanation of why a request has no cell."""

    steps: tuple[ConflictStep, ...]
    asked: ReadRequest
    evidence: tuple[EvidenceRef, ...] = ()

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins in conflict; dropping any one of them leaves a cell for the others, with or without the axis dropped."""
        return tuple(step.pin for step in self.steps if step.pin is not None)

    @cached_property
    def nearest(self) -> tuple[Near, ...]:
        """The three nearest cells, worked out when first looked at."""
        return nearest(self.asked.compiled.matrix, self.asked.request, evidence=self.evidence)

    def text(self) -> str:
        """Return the steps as numbered lines, each with its rule and source."""
        lines = ["no cell satisfies the request"]
        for number, step in enumerate(self.steps, 1):
            lines.append(f"  {number}. {step.text}")
            if step.pin is None and step.source:
                label = "" if step.rule in {"release", "derived"} else f"rule {step.rule}, "
                lines.append(f"     ({label}{step.source})")
        return "\n".join(lines)

    def nearest_text(self) -> str:
        """Return the nearest cells, one a line, with what each changes."""
        lines = []
        for near in self.nearest:
            changes = [
                f"without {axis} (asked: {old})" if new == NONE else f"{axis} {new} (asked: {old})"
                for axis, (old, new) in near.changed.items()
            ]
            lines.append(f"{' and '.join(changes)}\n      {near.cell.id}")
        return "one of the nearest cells:\n    " + "\n    ".join(lines) if lines else "the matrix has no cell at all"

    def as_json(self) -> dict[str, object]:
        """Return what `--json` prints on exit code 3."""
        return {
            "error": "conflict",
            "steps": [{"rule": s.rule, "axes": list(s.axes), "text": s.text, "source": s.source} for s in self.steps],
            "nearest": [
                {
                    "cell": dict(near.cell.versions),
                    "id": near.cell.id,
                    "changed": {axis: {"asked": old, "instead": new} for axis, (old, new) in near.changed.items()},
                }
                for near in self.nearest
            ],
            "matrix": self.asked.compiled.matrix.digest,
        }


def explain_conflict(asked: ReadRequest, evidence: Sequence[EvidenceRef] = (), *, first_only: bool = False) -> Conflict:
    """Return the shortest of the minimal explanations found for a request that has no cell.

    Args:
        asked: the request, read; it must have no cell.
        evidence: only used to rank the nearest cells.
        first_only: take the first minimal explanation, where only its gist is wanted.

    """
    pins = [pin for pin, _, _ in asked.masks]
    known: dict[tuple[Pin, ...], bool] = {}
    found: dict[tuple[Pin, ...], tuple[ConflictStep, ...]] = {}
    for order in (pins[::-1],) if first_only else (pins[::-1], pins):
        core = _minimal_pins(asked, pins, order, known)
        if core not in found:
            compiled, domains = _left_of(asked, core)
            domains = _possible(asked, core, compiled, domains)
            cores = _clause_cores(compiled, domains, tries=1 if first_only else 3)
            found[core] = min((steps_of(asked, core, domains, clauses) for clauses in cores), key=len)
    best = min(found.values(), key=len)
    return Conflict(steps=best, asked=asked, evidence=tuple(evidence))


def _minimal_pins(
    asked: ReadRequest, pins: Sequence[Pin], order: Sequence[Pin], known: dict[tuple[Pin, ...], bool]
) -> tuple[Pin, ...]:
    """Drop pins in `order` while what is left still has no cell; `known` keeps which pins have one.

    More than one pass, because dropping a pin is not always a relief: without it an axis of use `host` is not in use.
    """
    kept = tuple(pins)
    changed = True
    while changed:
        changed = False
        for pin in order:
            rest = tuple(other for other in kept if other is not pin)
            if len(rest) == len(kept):
                continue
            if rest not in known:
                known[rest] = solvable(*_left_of(asked, rest))
            if not known[rest]:
                kept, changed = rest, True
    return kept


def _left_of(asked: ReadRequest, pins: Sequence[Pin]) -> tuple[Clauses, list[int]]:
    """Return the clauses and domains of a request with only `pins`, where an axis that a dropped pin names may be in use.

    Otherwise one of use `asked` would not be, and the explanation to somebody who did request it would be that a cell has
    it only when requested.
    """
    compiled, domains = asked.of(pins)
    for axis in _dropped(asked, pins):
        domains[axis] = compiled.full[axis]
    return compiled, domains


def _dropped(asked: ReadRequest, pins: Sequence[Pin]) -> list[int]:
    """Return the axes of use `asked` that a pin of the request names, and none of `pins`."""
    kept = {pin.axis for pin in pins}
    axes = asked.compiled.axes
    return [axis for pin, axis, _ in asked.masks if pin.axis not in kept and axes[axis].use == "asked"]


def _possible(asked: ReadRequest, pins: Sequence[Pin], compiled: Clauses, domains: list[int]) -> list[int]:
    """Leave out of `domains` what no cell has whatever is asked, so that no step need speak of it.

    Except where nothing of a pin would remain: then that is the thing to report. So are the releases that are taken only
    when they are named, where one of them would do: each that would, for a step names what is left.
    """
    anything = compiled.domains({axis: compiled.full[axis] for axis in (*asked.pinned(pins), *_dropped(asked, pins))})
    if (by_name := any_cell(compiled.unguarded, [*domains])) is not None:
        compiled = compiled.without_guards(
            {
                axis: _that_would_do(compiled.unguarded, domains, axis, held)
                for axis, held in compiled.guards.items()
                if by_name[axis] in held
            }
        )
    if propagate(compiled, anything) is not None:
        return domains
    possible = [domain & mask for domain, mask in zip(domains, anything, strict=True)]
    return possible if all(possible) else domains


def _that_would_do(compiled: Clauses, domains: Sequence[int], axis: int, among: Iterable[int]) -> int:
    """Return those of some releases of an axis, as a mask, that a cell within `domains` has."""
    left = [*domains]
    if propagate(compiled, left) is not None:
        return 0
    found = 0
    for value in among:
        if left[axis] >> value & 1:
            trial = [*left]
            trial[axis] = 1 << value
            if any_cell(compiled, trial) is not None:
                found |= 1 << value
    return found


_LONG = 24
"""Clauses of a core beyond which another order is not worth its time: a whole axis was ruled out release by release."""


def _clause_cores(compiled: Clauses, asked: Sequence[int], *, tries: int) -> list[list[int]]:
    """Return minimal sets of clauses that refuse the domains `asked`, from different orders of propagation."""
    if not all(asked):
        return [[]]
    everything = range(len(compiled.clauses))
    rules_first = sorted(everything, key=lambda n: compiled.clauses[n].cause.kind != "rule")
    result: list[list[int]] = []
    for order in (everything, everything[::-1], rules_first)[:tries]:
        core = _propagation_core(compiled, asked, order)
        if not core:
            # propagation alone finds nothing, in whichever order
            return [_search_core(compiled, asked)]
        if core not in result:
            result.append(core)
        if len(core) > _LONG:
            break
    return result


def _propagation_core(compiled: Clauses, asked: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return clauses that lead propagation to a contradiction, none of them to spare; nothing when it finds none."""
    domains = list(asked)
    fired: list[tuple[int, int, int]] = []
    failed = propagate(compiled, domains, order, fired)
    if failed is None:
        return []
    # backwards: which removed values the contradiction rests on, and which clauses removed those
    missing = dict.fromkeys(range(len(asked)), 0)
    for axis, mask in compiled.clauses[failed].literals:
        missing[axis] |= mask
    core = [failed]
    for number, axis, before in reversed(fired):
        literals = dict(compiled.clauses[number].literals)
        if before & ~literals.pop(axis) & missing[axis]:
            core.append(number)
            for other, mask in literals.items():
                missing[other] |= mask
    core = list(dict.fromkeys(core))
    for number in list(core):
        rest = [other for other in core if other != number]
        if propagate(compiled, list(asked), rest) is not None:
            core = rest
    return core


def _search_core(compiled: Clauses, asked: Sequence[int]) -> list[int]:
    """Return a minimal unsatisfiable core of clauses, by the solver: where only a search over cases refuses."""
    core = _core_of(compiled, asked, range(len(compiled.clauses)))
    # a smaller program for the many small questions that follow
    program, selectors = _selectable(compiled, asked, core)
    left = list(selectors)
    for selector in list(left):
        if selector in left:
            left = program.core([other for other in left if other != selector]) or left
    return [selectors[selector] for selector in left]


def _core_of(compiled: Clauses, asked: Sequence[int], numbers: Sequence[int]) -> list[int]:
    program, selectors = _selectable(compiled, asked, numbers)
    core = program.core(list(selectors))
    assert core is not None  # noqa: S101  # asked only for domains that have no cell
    return [selectors[selector] for selector in core]


def _selectable(compiled: Clauses, asked: Sequence[int], numbers: Sequence[int]) -> tuple[Program, dict[int, int]]:
    """Return a program in which each clause of `numbers` holds when its selector does."""
    selectors: dict[int, int] = {}
    with Program(compiled, asked) as program:
        for number in numbers:
            literals = compiled.clauses[number].literals
            if all(asked[axis] & ~mask for axis, mask in literals):
                selector = program.backend.add_atom()
                program.backend.add_rule([selector], [], choice=True)
                program.forbid(literals, selector)
                selectors[selector] = number
    return program, selectors
