"""A minimal conflict as numbered sentences: replayed by propagation, so that each step says what it leaves."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from envbuild.matrix.cell import NONE, Pin
from envbuild.matrix.model import AxisName, Release, Rule
from envbuild.matrix.text import spec_text
from envbuild.solver.asked import ReadRequest, is_open_pin
from envbuild.solver.clauses import UNUSED, Cause, Clauses, bits
from envbuild.solver.search import solvable


@dataclass(frozen=True, kw_only=True)
class ConflictStep:
    """One numbered sentence of a conflict."""

    rule: str
    """`asked` for a pin, a rule's id, or `release` / `derived` for what releases state themselves."""
    axes: tuple[AxisName, ...]
    text: str
    source: str
    pin: Pin | None = None
    claim: str = ""
    """What the rule says, without what it leaves of this request."""
    narrowed: tuple[AxisName, ...] = ()
    """The axes that it leaves less of."""
    conclusion: str = ""
    """The end of the last step: what no cell has."""


def steps_of(
    asked: ReadRequest, pins: Sequence[Pin], possible: Sequence[int], clauses: Sequence[int]
) -> tuple[ConflictStep, ...]:
    """Return the numbered steps from `pins` to the contradiction that `clauses` (numbers) lead to in `possible`."""
    compiled, domains = asked.of(pins)[0], list(possible)
    steps = [
        ConflictStep(rule="asked", axes=(pin.axis,), text=_asked_text(compiled, pin, mask), source=pin.origin, pin=pin)
        for pin, _, mask in asked.masks
        if pin in pins
    ]
    shown_steps: list[ConflictStep] = []
    left = list(clauses)
    last: object = None
    while left:
        ready = [n for n in left if _firing(compiled, domains, n) is not None]
        if not ready:
            break
        number = min(ready, key=lambda n: _step_order(compiled, domains, n, last))
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
        if axis is not None and cause.rule is not None:
            axis = _fire_rest(compiled, domains, cause.rule, axis)
            left = [n for n in left if not _holds(compiled, domains, n)]
        last = subject
        touched = [i for i, (old, new) in enumerate(zip(before, domains, strict=True)) if old != new]
        shown_steps.append(_step(compiled, batch, before, domains, touched, failed=axis is None))
        if axis is None:
            left = []
    # where propagation gets no further, these exclude one another only case by case
    steps += [*shown_steps, *(_step(compiled, [number], domains, domains, [], failed=False) for number in left)]
    steps[-1] = _concluded(steps[-1], compiled, asked, pins)
    return tuple(steps)


def _subject(cause: Cause) -> object:
    if cause.rule is None:
        return (cause.kind, cause.axis, cause.target)
    # rules of one topic between the same axes say the same of different releases
    return (cause.rule.topic, tuple(cause.rule.when), tuple(cause.rule.needs))


def _step_order(compiled: Clauses, domains: Sequence[int], number: int, last: object) -> tuple[bool, bool, int]:
    cause = compiled.clauses[number].cause
    axis = _firing(compiled, domains, number)
    left = (
        0 if axis is None or axis < 0 else (domains[axis] & dict(compiled.clauses[number].literals)[axis]).bit_count()
    )
    # stay with one subject, so that what several releases state alike is one step; then say what settles most
    return cause.kind == "asked", _subject(cause) != last, left


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


def _fire_rest(compiled: Clauses, domains: list[int], rule: Rule, axis: int) -> int | None:
    """Narrow by what else a rule says at this point, so that a step names all that the rule leaves; None when that is nothing."""
    rest = [n for n, clause in enumerate(compiled.clauses) if clause.cause.rule is rule]
    while (ready := next((n for n in rest if _firing(compiled, domains, n) is not None), None)) is not None:
        fired = _fire(compiled, domains, ready)
        if fired is None:
            return None
        axis = fired
    return axis


def _holds(compiled: Clauses, domains: Sequence[int], number: int) -> bool:
    """Return whether nothing that is left can break a clause."""
    return any(not domains[axis] & ~mask for axis, mask in compiled.clauses[number].literals)


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
    if len(releases) > 3:
        return f"{releases[0].version} to {releases[-1].version} ({len(releases)} releases)"
    return _listed([r.version for r in releases])


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _some(sources: Sequence[str]) -> str:
    more = len(sources) - 3
    return "; ".join([*sources[:3], *([f"and {more} more"] if more > 0 else [])])


def _releases_in(compiled: Clauses, axis: int, mask: int) -> list[Release]:
    found = [r for i in bits(mask) if (r := compiled.values[axis][i]) is not None]
    return found if compiled.axes[axis].scheme == "pep440" else found[::-1]


def _step(
    compiled: Clauses,
    batch: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    touched: Sequence[int],
    *,
    failed: bool,
) -> ConflictStep:
    causes = [compiled.clauses[n].cause for n in batch]
    narrowed = tuple(compiled.names[axis] for axis in touched)
    spoken = (compiled.names[a] for n in batch for a, _ in compiled.clauses[n].literals)
    axes = tuple(dict.fromkeys((*spoken, *narrowed)))
    first = causes[0]
    if first.rule is not None:
        rules = {cause.rule.id: cause.rule for cause in causes if cause.rule}
        text, rule, source = first.rule.why, first.rule.id, first.rule.source
        also = [each for name, each in rules.items() if name != rule]
        if len(also) == 1:
            text = f"{_sentence(compiled, text)} {_sentence(compiled, f'{also[0].why} (rule {also[0].id})')}"
            source = "; ".join(dict.fromkeys((source, also[0].source)))
        elif also:
            text = f"{_sentence(compiled, text)} Likewise rules {_listed([each.id for each in also])}."
    elif first.kind == "derived":
        givers = [n for n in axes if n != first.axis]
        others = [name for name in givers if name not in narrowed]
        if givers and len(others) < len(givers):  # what is left of a giver includes it
            that = f", and no {' or '.join(others)} that is left does" if others else ""
        else:
            that = ", and nothing that is left does"
        text = (
            f"{first.axis} is there only when something else includes it ({', '.join(givers)}){that}."
            if givers
            else f"Nothing includes {first.axis}."
        )
        rule, source = "derived", ""
    elif first.kind == "asked":
        releases = [r for cause in causes for r in cause.releases]
        text = f"{first.axis} {_versions(releases)} {'is' if len(releases) == 1 else 'are'} used only when requested by name"
        text += f" (--{first.axis} {releases[0].version}{'' if len(releases) == 1 else ' names the first'})."
        if len(releases) == 1:
            rule, source = "release", releases[0].note or releases[0].source
        else:
            rule, source = "release", _some(list(dict.fromkeys(r.source for r in releases)))
    else:
        own = compiled.number[first.axis]
        if first.kind in {"needs", "fixes"} and (own in touched or (len(batch) > 1 and not touched)):
            left = [] if failed else _releases_in(compiled, own, after[own])
            text, source = _filtered_text(compiled, causes, before, left)
            touched = [axis for axis in touched if axis != own or after[axis] == UNUSED]
        else:
            text, source = _release_text(compiled, causes, before)
        rule = "release"
    # a step that ends with nothing left says so once, not what was left on the way
    consequences = [] if failed else [_left(compiled, axis, before[axis], after[axis], shown=text) for axis in touched]
    claim = _sentence(compiled, text)
    return ConflictStep(
        rule=rule,
        axes=axes,
        text=" ".join([claim, *filter(None, consequences)]),
        source=source,
        claim=claim,
        narrowed=narrowed,
    )


def _sentence(compiled: Clauses, text: str) -> str:
    """Return `text` with a full stop, and a capital unless it begins with an axis' name."""
    text = text.strip()
    if re.split(r"\W", text, maxsplit=1)[0] not in compiled.number and re.match(r"[a-z]+\b(?![_./])", text):
        text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def _release_text(compiled: Clauses, causes: Sequence[Cause], before: Sequence[int]) -> tuple[str, str]:
    """Say what releases state of another axis, for those that are still possible; with their sources."""
    axis = compiled.number[causes[0].axis]
    parts, sources = [], []
    for cause in causes:
        alive = [r for r in cause.releases if before[axis] >> compiled.position[axis][r.version] & 1]
        alive = alive or [*cause.releases]
        many = len(alive) > 1
        verb = {
            "needs": f"need{'' if many else 's'} {cause.target} {spec_text(cause.spec)}",
            "with": f"need{'' if many else 's'} {cause.target} with {'them' if many else 'it'}",
            "without": f"cannot be in a cell with {cause.target}",
            "fixes": f"come{'' if many else 's'} with {cause.target} {spec_text(cause.spec)}",
        }[cause.kind]
        parts.append(f"{cause.axis} {_versions(alive)} {verb}")
        sources += [r.source for r in alive]
    changes = "; ".join(parts if len(parts) < 4 else [*parts[:2], "and others likewise something else"])
    return f"{changes}.", "; ".join(list(dict.fromkeys(sources))[:3])


def _filtered_text(
    compiled: Clauses, causes: Sequence[Cause], before: Sequence[int], left: Sequence[Release]
) -> tuple[str, str]:
    """Say which releases of an axis another axis leaves, with examples of those that it does not; with sources."""
    first = causes[0]
    target = compiled.number[first.target]
    examples, source = _release_text(compiled, causes, before)
    partners = _releases_in(compiled, target, before[target])
    partner = f"{first.target} {_versions(partners)}" if partners else f"a cell without {first.target}"
    only = f"but {_versions(left)} " if left else "that is left "
    return f"No {first.axis} {only}goes with {partner}: {examples}", source


def _left(compiled: Clauses, axis: int, before: int, after: int, *, shown: str) -> str:
    name = compiled.names[axis]
    if after == UNUSED:
        return f"So there is no {name} in such a cell."
    if before & UNUSED and before & ~UNUSED == after:
        return f"So {name} must be there."
    releases = _releases_in(compiled, axis, after)
    if not releases or f"{name} {_versions(releases)}" in shown:
        return ""
    return f"That leaves {name} {_runs(compiled, axis, after)}."


def _runs(compiled: Clauses, axis: int, mask: int) -> str:
    """Name releases; many of them by the ranges that they fill, so that no range has a release that is not left."""
    releases = _releases_in(compiled, axis, mask)
    if len(releases) <= 3:
        return _versions(releases)
    kept = {release.version for release in releases}
    every = _releases_in(compiled, axis, compiled.real[axis])
    runs = [list(run) for is_left, run in groupby(every, lambda release: release.version in kept) if is_left]
    if len(runs) > 3:
        return f"{releases[0].version} to {releases[-1].version}, with gaps ({len(releases)} releases)"
    named = [run[0].version if len(run) == 1 else f"{run[0].version} to {run[-1].version}" for run in runs]
    return f"{_listed(named)} ({len(releases)} releases)"


def _what(pin: Pin) -> str:
    if pin.spec == NONE:
        return f"no {pin.axis}"
    return pin.axis if is_open_pin(pin) else f"{pin.axis} {pin.spec}"


def _concluded(step: ConflictStep, compiled: Clauses, asked: ReadRequest, pins: Sequence[Pin]) -> ConflictStep:
    things = [_what(pin) for pin, _, _ in asked.masks if pin in pins]
    if not things:
        end = "So the matrix has no cell at all."
    else:
        several = f"{'both ' if len(things) == 2 else ''}{', '.join(things[:-1])} and "
        end = f"So no cell has {several if len(things) > 1 else ''}{things[-1]}.{_advice(step, asked, pins)}"
    if step.pin is not None and len(things) == 1:
        axis = compiled.matrix.axes[step.pin.axis]
        end = f"Every cell has one {axis.name}. {end}" if axis.use == "always" else end
    return replace(step, text=f"{step.text} {end}", conclusion=end)


def _advice(step: ConflictStep, asked: ReadRequest, pins: Sequence[Pin]) -> str:
    """Return how to ask for an axis of the last step that the request leaves out, or what of the request keeps it out."""
    axes = asked.compiled.matrix.axes
    missing = sorted(
        name
        for name in step.axes
        if axes[name].use in {"asked", "host"}
        and not any(pin.axis == name and (pin in pins or pin.spec != NONE) for pin, _, _ in asked.masks)
    )

    left_out = {i for i, axis in enumerate(asked.compiled.axes) if axis.use == "asked"} - asked.pinned().keys()

    def has_cell(name: AxisName, pins: Sequence[Pin], *, alone: bool = True) -> bool:
        compiled, domains = asked.of(pins)
        for axis in () if alone else left_out:
            domains[axis] = compiled.full[axis]
        domains[compiled.number[name]] = compiled.real[compiled.number[name]]
        return solvable(compiled, domains)

    every = [pin for pin, _, _ in asked.masks]
    for name in missing:
        if has_cell(name, every):
            return f" A cell has {name} only when requested: add --{name} auto."
    if not missing or len(pins) > 1 or has_cell(missing[0], every, alone=False):
        return ""
    against = every
    for pin in every:
        rest = [other for other in against if other is not pin]
        against = against if has_cell(missing[0], rest, alone=False) else rest
    what = " and ".join(map(_what, against)) or "what the matrix allows"
    return f" A cell has {missing[0]} only when requested, and no cell has it with {what}."
