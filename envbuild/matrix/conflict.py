"""Why no cell fits, as numbered steps; and the nearest cells that do.

A conflict is minimal twice over: without any one of its pins a cell exists, and without any one of its rules the
derivation falls apart. Its steps are replayed by propagation, so each says what it leaves.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from envbuild.matrix.cell import NONE, Cell, Pin, Request
from envbuild.matrix.clauses import UNUSED, Cause, Clauses, bits, propagate
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release, Spec
from envbuild.matrix.solve import (
    Asked,
    EvidenceRef,
    Program,
    add_order,
    is_open_pin,
    read_request,
    solvable,
    to_cell,
)
from envbuild.matrix.spec import version_key


@dataclass(frozen=True, kw_only=True)
class Step:
    """One numbered sentence of a conflict."""

    rule: str
    """`asked` for a pin, a rule's id, or `release` / `derived` for what releases state themselves."""
    axes: tuple[AxisName, ...]
    text: str
    source: str
    pin: Pin | None = None


@dataclass(frozen=True, kw_only=True)
class Near:
    """A cell close to the request."""

    cell: Cell
    changed: Mapping[AxisName, tuple[str, str]]
    """Axis -> what was asked, and what this cell has instead (`none` for an axis that it leaves out)."""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A minimal explanation of why a request has no cell."""

    steps: tuple[Step, ...]
    asked: Asked
    evidence: tuple[EvidenceRef, ...] = ()

    @property
    def pins(self) -> tuple[Pin, ...]:
        """The pins in conflict; dropping any one of them leaves a cell for the others."""
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


def explain_conflict(asked: Asked, evidence: Sequence[EvidenceRef] = (), *, first_only: bool = False) -> Conflict:
    """Return the shortest of the minimal explanations found for a request that has no cell.

    Args:
        asked: the request, read; it must have no cell.
        evidence: only used to rank the nearest cells.
        first_only: take the first minimal explanation, where only its gist is wanted.

    """
    pins = [pin for pin, _, _ in asked.masks]
    found: dict[tuple[Pin, ...], tuple[Step, ...]] = {}
    for order in (pins[::-1],) if first_only else (pins[::-1], pins):
        core = _minimal_pins(asked, pins, order)
        if core not in found:
            found[core] = min(
                (
                    _steps(asked, core, clauses)
                    for clauses in _clause_cores(*asked.of(core), tries=1 if first_only else 3)
                ),
                key=len,
            )
    best = min(found.values(), key=len)
    return Conflict(steps=best, asked=asked, evidence=tuple(evidence))


def _minimal_pins(asked: Asked, pins: Sequence[Pin], order: Sequence[Pin]) -> tuple[Pin, ...]:
    """Drop pins in `order` while what is left still has no cell.

    More than one pass, because dropping a pin is not always a relief: without it an axis of use `asked` is not in use.
    """
    kept = list(pins)
    changed = True
    while changed:
        changed = False
        for pin in order:
            rest = [other for other in kept if other is not pin]
            if len(rest) < len(kept) and not solvable(*asked.of(rest)):
                kept, changed = rest, True
    return tuple(kept)


def _refuted(compiled: Clauses, asked: Sequence[int], only: Sequence[int]) -> bool:
    """Return whether no cell satisfies the clauses `only`."""
    domains = list(asked)
    if any(not domain for domain in domains) or propagate(compiled, domains, only) is not None:
        return True
    with Program(compiled, domains) as program:
        for number in only:
            literals = compiled.clauses[number].literals
            if all(domains[axis] & ~mask for axis, mask in literals):
                program.forbid(literals)
    return program.solve() is None


def _clause_cores(compiled: Clauses, asked: Sequence[int], *, tries: int) -> list[list[int]]:
    """Return minimal sets of clauses that refuse `pinned`, from different orders of propagation."""
    if not all(asked):
        return [[]]
    everything = range(len(compiled.clauses))
    rules_first = sorted(everything, key=lambda n: compiled.clauses[n].cause.kind != "rule")
    result = []
    for order in (everything, everything[::-1], rules_first)[:tries]:
        candidates = _propagation_core(compiled, asked, order) or _search_core(compiled, asked)
        kept = list(candidates)
        for number in candidates:
            rest = [other for other in kept if other != number]
            if _refuted(compiled, asked, rest):
                kept = rest
        if kept not in result:
            result.append(kept)
    return result


def _propagation_core(compiled: Clauses, asked: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the clauses that led propagation to a contradiction, or nothing when it finds none."""
    domains = list(asked)
    fired: list[tuple[int, int, int]] = []
    failed = propagate(compiled, domains, order, fired)
    if failed is None:
        return []
    needed = {axis for axis, _ in compiled.clauses[failed].literals}
    core = [failed]
    for number, axis, _ in reversed(fired):
        if axis in needed:
            core.append(number)
            needed.update(a for a, _ in compiled.clauses[number].literals)
    return list(dict.fromkeys(core))


def _search_core(compiled: Clauses, asked: Sequence[int]) -> list[int]:
    """Return the clauses of the solver's unsatisfiable core, with those that propagation used before it."""
    domains = list(asked)
    fired: list[tuple[int, int, int]] = []
    propagate(compiled, domains, None, fired)
    selectors: dict[int, int] = {}
    with Program(compiled, domains) as program:
        for number, clause in enumerate(compiled.clauses):
            if all(domains[axis] & ~mask for axis, mask in clause.literals):
                selector = program.backend.add_atom()
                program.backend.add_rule([selector], [], choice=True)
                program.forbid(clause.literals, selector)
                selectors[selector] = number
    with program.control.solve(yield_=True, assumptions=list(selectors)) as handle:
        core = [] if handle.get().satisfiable else handle.core()
    return list(dict.fromkeys([*(selectors[s] for s in core if s in selectors), *(n for n, _, _ in reversed(fired))]))


# --- the sentences ---------------------------------------------------------------------------------------------------


def _steps(asked: Asked, pins: Sequence[Pin], clauses: Sequence[int]) -> tuple[Step, ...]:
    compiled, domains = asked.of(pins)
    steps = [
        Step(rule="asked", axes=(pin.axis,), text=_asked_text(compiled, pin, mask), source=pin.origin, pin=pin)
        for pin, _, mask in asked.masks
        if pin in pins
    ]
    told: list[Step] = []
    left = list(clauses)
    last: object = None
    while left:
        ready = [n for n in left if _firing(compiled, domains, n) is not None]
        if not ready:
            break
        # stay with one subject, so that what several releases state alike is one step
        number = min(ready, key=lambda n: _subject(compiled.clauses[n].cause) != last)
        left.remove(number)
        cause = compiled.clauses[number].cause
        subject = _subject(cause)
        batch = [number]
        before = list(domains)
        axis = _fire(compiled, domains, number)
        while axis is not None and subject is not None:
            more = next(
                (
                    n
                    for n in left
                    if _subject(compiled.clauses[n].cause) == subject and _firing(compiled, domains, n) is not None
                ),
                None,
            )
            if more is None:
                break
            left.remove(more)
            batch.append(more)
            axis = _fire(compiled, domains, more)
        last = subject
        touched = [i for i, (old, new) in enumerate(zip(before, domains, strict=True)) if old != new]
        told.append(_told(compiled, batch, before, domains, touched))
        if axis is None:
            left = []
    # where propagation gets no further, these exclude one another only case by case
    steps += [*told, *(_told(compiled, [number], domains, domains, []) for number in left)]
    steps[-1] = _concluded(steps[-1], compiled, asked, pins)
    return tuple(steps)


def _subject(cause: Cause) -> object:
    return (cause.rule.id,) if cause.rule else (cause.kind, cause.axis, cause.target)


def _firing(compiled: Clauses, domains: Sequence[int], number: int) -> int | None:
    """Return the axis that the clause would narrow, -1 when it fails, None when it says nothing yet."""
    unit = -1
    for axis, mask in compiled.clauses[number].literals:
        if domains[axis] & mask:
            if unit >= 0 or not domains[axis] & ~mask:
                return None
            unit = axis
    return unit


def _fire(compiled: Clauses, domains: list[int], number: int) -> int | None:
    """Narrow by one clause that is ready; None when it leaves nothing."""
    axis = _firing(compiled, domains, number)
    if axis is None or axis < 0:
        return None
    domains[axis] &= dict(compiled.clauses[number].literals)[axis]
    return axis


def _asked_text(compiled: Clauses, pin: Pin, mask: int) -> str:
    who = "You asked" if pin.origin.startswith("-") else f"{pin.origin[:1].upper()}{pin.origin[1:]} asks"
    flag = f" ({pin.origin})" if pin.origin.startswith("-") else ""
    if pin.spec == NONE:
        return f"{who} for a cell without {pin.axis}{flag}."
    if is_open_pin(pin):
        return f"{who} for {pin.axis}, whichever release fits{flag}."
    number = compiled.number[pin.axis]
    which = ""
    if mask.bit_count() == 1:
        release = compiled.values[number][mask.bit_length() - 1]
        if release is not None and release.version != pin.spec:
            which = f", which is {release.version}"
    return f"{who} for {pin.axis} {pin.spec}{flag}{which}."


def _versions(releases: Sequence[Release]) -> str:
    names = [r.version for r in releases]
    if len(names) > 3:
        return f"{names[0]} to {names[-1]} ({len(names)} releases)"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _spec_text(spec: Spec) -> str:
    return spec if isinstance(spec, str) else " or ".join(spec)


def _releases_in(compiled: Clauses, axis: int, mask: int) -> list[Release]:
    found = [r for i in bits(mask) if (r := compiled.values[axis][i]) is not None]
    return found if compiled.axes[axis].scheme == "pep440" else found[::-1]


def _told(
    compiled: Clauses, batch: Sequence[int], before: Sequence[int], after: Sequence[int], touched: Sequence[int]
) -> Step:
    causes = [compiled.clauses[n].cause for n in batch]
    axes = tuple(dict.fromkeys(compiled.names[a] for n in batch for a, _ in compiled.clauses[n].literals))
    first = causes[0]
    if first.rule is not None:
        text, rule, source = first.rule.why, first.rule.id, first.rule.source
    elif first.kind == "derived":
        givers = [n for n in axes if n != first.axis]
        text = (
            f"{first.axis} is there only when something brings it ({', '.join(givers)}), and nothing that is left does."
            if givers
            else f"Nothing brings {first.axis}."
        )
        rule, source = "derived", ""
    elif first.kind == "asked":
        releases = [r for cause in causes for r in cause.releases]
        text = f"{first.axis} {_versions(releases)} {'is' if len(releases) == 1 else 'are'} taken only when asked for by name"
        text += f" (--{first.axis} {releases[0].version})." if len(releases) == 1 else "."
        rule, source = "release", "; ".join(dict.fromkeys(r.note or r.source for r in releases))
    else:
        text, source = _release_text(compiled, causes, before)
        rule = "release"
    consequences = [_left(compiled, axis, before[axis], after[axis]) for axis in touched]
    return Step(
        rule=rule, axes=axes, text=" ".join([_sentence(compiled, text), *filter(None, consequences)]), source=source
    )


def _sentence(compiled: Clauses, text: str) -> str:
    """Return `text` with a full stop, and a capital unless it begins with an axis' name."""
    text = text.strip()
    if re.split(r"\W", text, maxsplit=1)[0] not in compiled.number and re.match(r"[a-z]+\b(?![_./])", text):
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _release_text(compiled: Clauses, causes: Sequence[Cause], before: Sequence[int]) -> tuple[str, str]:
    """Say what releases state of another axis, for those that are still possible."""
    axis = compiled.number[causes[0].axis]
    parts, sources = [], []
    for cause in causes:
        # a clause may fire towards its own axis: then its releases are what goes
        alive = [r for r in cause.releases if before[axis] >> compiled.position[axis][r.version] & 1] or [
            *cause.releases
        ]
        many = len(alive) > 1
        verb = {
            "needs": f"need{'' if many else 's'} {cause.target} {_spec_text(cause.spec)}",
            "with": f"need{'' if many else 's'} {cause.target} beside {'them' if many else 'it'}",
            "without": f"cannot be in a cell with {cause.target}",
            "fixes": f"come{'' if many else 's'} with {cause.target} {_spec_text(cause.spec)}",
        }[cause.kind]
        parts.append(f"{cause.axis} {_versions(alive)} {verb}")
        sources += [r.source for r in alive]
    told = "; ".join(parts if len(parts) < 4 else [*parts[:2], "and others likewise something else"])
    return f"{told}.", "; ".join(list(dict.fromkeys(sources))[:3])


def _left(compiled: Clauses, axis: int, before: int, after: int) -> str:
    name = compiled.names[axis]
    if after == UNUSED:
        return f"So there is no {name} in such a cell."
    if before & UNUSED and before & ~UNUSED == after:
        return f"So {name} must be there."
    releases = _releases_in(compiled, axis, after)
    if not releases:
        return ""
    return f"That leaves {name} {_versions(releases)}."


def _what(pin: Pin) -> str:
    if pin.spec == NONE:
        return f"no {pin.axis}"
    return pin.axis if is_open_pin(pin) else f"{pin.axis} {pin.spec}"


def _concluded(step: Step, compiled: Clauses, asked: Asked, pins: Sequence[Pin]) -> Step:
    things = [_what(pin) for pin, _, _ in asked.masks if pin in pins]
    if not things:
        end = "So the matrix has no cell at all."
    elif len(things) == 1:
        missing = sorted(
            name
            for name in step.axes
            if compiled.matrix.axes[name].use in {"asked", "host"} and name not in {pin.axis for pin in pins}
        )
        end = f"So no cell has {things[0]}."
        if missing:
            end += f" A cell has {missing[0]} only when asked for: add --{missing[0]} auto."
    else:
        both = "both " if len(things) == 2 else ""
        end = f"So no cell has {both}{', '.join(things[:-1])} and {things[-1]}."
    if step.pin is not None and len(things) == 1:
        axis = compiled.matrix.axes[step.pin.axis]
        end = f"Every cell has one {axis.name}. {end}" if axis.use == "always" else end
    return Step(rule=step.rule, axes=step.axes, text=f"{step.text} {end}", source=step.source, pin=step.pin)


# --- the nearest cells -----------------------------------------------------------------------------------------------

PATCH, MINOR, OTHER, PRESENCE, HOST = 1, 2, 3, 4, 5
"""What changing one pin costs: its patch level, its minor version, another version of a component, leaving it out or
taking it in, and the GPU, the OS, the base or the driver, which are not the user's to change lightly."""
_HARD = ("gpu", "os", "base", "driver")


def _change_costs(compiled: Clauses, axis: int, mask: int) -> list[int]:
    """Return the cost of each value of `axis` when `mask` was asked."""
    wanted = [compiled.values[axis][i] for i in bits(mask)]
    keys = [k for r in wanted if r is not None and (k := version_key(r.version)) is not None]
    minors = {(k.epoch, k.major, k.minor) for k in keys}
    majors = {(k.epoch, k.major) for k in keys}
    costs = []
    for i, release in enumerate(compiled.values[axis]):
        key = version_key(release.version) if release is not None else None
        if mask >> i & 1:
            costs.append(0)
        elif compiled.names[axis] in _HARD:
            costs.append(HOST)
        elif release is None or mask == UNUSED:
            costs.append(PRESENCE)
        elif key is None:
            costs.append(OTHER)
        elif (key.epoch, key.major, key.minor) in minors:
            costs.append(PATCH)
        else:
            costs.append(MINOR if (key.epoch, key.major) in majors else OTHER)
    return costs


def _distances(compiled: Clauses, axis: int, mask: int) -> list[int]:
    """Return how many releases away from `mask` each value lies."""
    count = len(compiled.values[axis])
    if not mask & ~UNUSED:
        return [0] + [1] * (count - 1)
    result = [count] * count
    for places in (range(1, count), range(count - 1, 0, -1)):
        last = count
        for i in places:
            last = 0 if mask >> i & 1 else last + 1
            result[i] = min(result[i], last)
    return result


def nearest(matrix: Matrix, request: Request, n: int = 3, *, evidence: Sequence[EvidenceRef] = ()) -> tuple[Near, ...]:
    """Return up to `n` cells that change the fewest, cheapest pins of `request`, each changing other axes.

    The order: fewest axes changed, then the sum of their costs (patch level 1, minor version 2, another version 3,
    leaving a component out or in 4, GPU, OS, base and driver 5), then the fewest releases away, then the solver's own order.

    Raises:
        UsageError: as `solve` does.

    """
    asked = read_request(matrix, request)
    compiled = asked.compiled
    pinned = asked.pinned()
    # a pinned axis may take any value; `domains` would else hold back an asked axis
    domains = compiled.domains({axis: compiled.full[axis] for axis in pinned})
    if propagate(compiled, domains) is not None:
        return ()
    changed: dict[int, int] = {}
    with Program(compiled, domains) as program:
        program.all_clauses()
        costs, distances = [], []
        impossible: list[int] = []
        for axis, mask in pinned.items():
            atom = changed[axis] = program.backend.add_atom()
            body = program.inside(axis, ~mask)
            if body is not None:
                program.backend.add_rule([atom], body)
                impossible += [] if body else [axis]
            costs += program.cost(axis, _change_costs(compiled, axis, mask))
            distances += program.cost(axis, _distances(compiled, axis, mask))
        program.minimize(120, [(atom, 1) for atom in changed.values()])
        program.minimize(119, costs)
        program.minimize(118, distances)
        add_order(program, asked, evidence)
    result: list[Near] = []
    while len(result) < n:
        values = program.solve()
        if values is None:
            break
        moved = [axis for axis, mask in pinned.items() if not mask >> values[axis] & 1]
        result.append(
            Near(
                cell=to_cell(compiled, values),
                changed={compiled.names[axis]: _change(asked, axis, values[axis]) for axis in moved},
            )
        )
        if not moved:
            break
        with program.control.backend() as backend:
            backend.add_rule([], [changed[axis] for axis in moved])
    return tuple(result)


def _change(asked: Asked, axis: int, value: int) -> tuple[str, str]:
    release = asked.compiled.values[axis][value]
    wanted = " and ".join(pin.spec for pin, number, _ in asked.masks if number == axis)
    return wanted, release.version if release is not None else NONE
