"""Choosing one cell: complete, exactly optimal for a stated order, deterministic, without I/O.

The order, each step deciding only among the cells that the steps before leave equal:

0. as many `default` axes in use as possible;
1. evidence of the highest level for the axes that the request left open;
2. tested together: the number of pairs of axes, at least one of them dated, that a satisfied tested-with rule names
   together (pairs, so that ten rules that say the same count once);
3. season: the smallest number of days between the oldest and the newest release on the dated axes;
4. newest: the smallest sum over the dated axes of days by which a newer release of that axis exists;
5. tested together, for the pairs without a dated axis (an OS and its own Python);
6. axis by axis, the dated ones first: the newest release, or the first listed of names.

`prefer="newest"` leaves out steps 1 to 3. An axis that is not in use counts as its oldest release in 4 and as the least
preferred in 6, so the order is total and the answer is one cell.
"""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import clingo

from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import AUTO, NONE, Cell, Pin, Request
from envbuild.matrix.clauses import UNUSED, Clauses, bits, compile_matrix, propagate
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release, Rule
from envbuild.matrix.spec import check_spec, matches, version_key

SOFTWARE = ("cuda", "torch", "te", "apex", "flash-attn", "flash-attn-hopper", "megatron", "deepspeed")
"""The axes that evidence speaks of."""
LEVELS = ("built", "cpu", "gpu")
"""What evidence can show, the weakest first."""
ANY = "any"
"""A synonym of `auto` in a pin."""

NOT_ASKED = "only when asked for (--AXIS auto takes what fits)"
"""Why an axis of use `asked` is left out."""

Level = Literal["gpu", "cpu", "built"]


@dataclass(frozen=True, kw_only=True)
class EvidenceRef:
    """One recorded proof: how far it went, and the versions that it ran.

    It speaks for a cell when every software axis that it names and the cell uses has the version it names, and it names
    every software axis that the cell uses and the request left open.
    """

    id: str
    level: Level
    versions: Mapping[AxisName, str]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A cell's place in the stated order; smaller is better, compared field by field."""

    defaults_out: int
    evidence: int
    untested_pairs: int
    spread: int
    age: int
    untested_undated_pairs: int
    preference: tuple[int, ...]

    def vector(self, prefer: str) -> tuple[int, ...]:
        """Return what `prefer` compares, in order."""
        proven = () if prefer == "newest" else (self.evidence, self.untested_pairs, self.spread)
        return (self.defaults_out, *proven, self.age, self.untested_undated_pairs, *self.preference)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The chosen cell, and what can be said of the choice."""

    cell: Cell
    request: Request
    matrix_digest: str
    rules: tuple[Rule, ...]
    """The refusing rules that apply to the cell, all satisfied."""
    tested_with: tuple[Rule, ...]
    """The tested-with rules that the cell satisfies."""
    evidence: tuple[EvidenceRef, ...]
    """The evidence of the highest level that speaks for the cell."""
    reasons: Mapping[AxisName, str]
    """Per axis in use, one line on why this version."""
    left_out: Mapping[AxisName, str]
    """Axes that could be in a cell and are not, and why."""
    score: Score
    added: Mapping[AxisName, Release] = field(default_factory=dict)
    """Releases that the request named on open axes and no data file lists (an exact driver version)."""


def is_open_pin(pin: Pin) -> bool:
    """Return whether `pin` asks for its axis without saying which release."""
    return pin.spec in {AUTO, ANY}


def _near(word: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=4, cutoff=0.4)
    return ", ".join(close or list(choices)[-6:])


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request read against the matrix."""

    compiled: Clauses
    """The matrix, with what the pins name let in."""
    request: Request
    masks: tuple[tuple[Pin, int, int], ...]
    """Each pin with its axis number and the values it leaves."""
    added: Mapping[AxisName, Release]
    guarded: Clauses
    """The matrix with every release kept out that is taken only when a pin names it."""

    def pinned(self, pins: Sequence[Pin] | None = None) -> dict[int, int]:
        """Return axis -> values that `pins` (all by default) leave together."""
        result: dict[int, int] = {}
        for pin, axis, mask in self.masks:
            if pins is None or pin in pins:
                result[axis] = result.get(axis, mask) & mask
        return result

    def of(self, pins: Sequence[Pin]) -> tuple[Clauses, list[int]]:
        """Return the clauses and domains of a request with only `pins`, some of this one's."""
        return _with_named(self.guarded, pins), self.guarded.domains(self.pinned(pins))


def _with_named(guarded: Clauses, pins: Iterable[Pin]) -> Clauses:
    named: dict[int, int] = {}
    for pin in pins:
        axis = guarded.number[pin.axis]
        if mask := guarded.named(axis, pin.spec):
            named[axis] = named.get(axis, 0) | mask
    return guarded.without_guards(named)


def _is_listed(matrix: Matrix, pin: Pin) -> bool:
    """Return whether an open axis lists what is asked: the very release, or a branch (`535`) of which it lists some."""
    return matrix.has(pin.axis, pin.spec) or (
        "." not in pin.spec and any(matches(matrix.axes[pin.axis], pin.spec, r) for r in matrix.releases[pin.axis])
    )


def read_request(matrix: Matrix, request: Request) -> Asked:
    """Read every pin.

    Raises:
        UsageError: a pin names an axis that does not exist, or matches no release of it.

    """
    added: dict[AxisName, Release] = {}
    for pin in request.pins:
        axis = matrix.axes.get(pin.axis)
        if axis is None:
            raise UsageError(
                f"there is no axis {pin.axis!r}",
                where=pin.origin,
                hint=f"near it: {_near(pin.axis, list(matrix.axes))}; `envbuild matrix list` lists the axes",
            )
        if axis.open and version_key(pin.spec) and not _is_listed(matrix, pin):
            added[pin.axis] = Release(version=pin.spec, source=f"run:asked as {pin.origin}")
    compiled = compile_matrix(matrix, added)
    masks = []
    for pin in dict.fromkeys(request.pins):
        number = compiled.number[pin.axis]
        if pin.spec == NONE:
            mask = UNUSED
        elif is_open_pin(pin):
            mask = compiled.real[number]
        else:
            mask = compiled.mask(number, pin.spec)
            if not mask:
                check_spec(compiled.axes[number], pin.spec)
            if pin.axis in added and pin.spec == added[pin.axis].version:
                mask = 1 << compiled.position[number][pin.spec]  # exactly the host's driver, not a listed 560.28.3.x
            if not mask:
                names = [n for r in matrix.releases[pin.axis] for n in (r.version, *r.aliases)]
                raise UsageError(
                    f"no release of {pin.axis} matches {pin.spec!r}",
                    where=pin.origin,
                    hint=f"near it: {_near(pin.spec, names)}; `envbuild matrix {pin.axis}` lists them all",
                )
        masks.append((pin, number, mask))
    return Asked(
        compiled=_with_named(compiled, request.pins),
        request=request,
        masks=tuple(masks),
        added=added,
        guarded=compiled,
    )


def runs(chosen: int, domain: int) -> Iterator[tuple[int, int]]:
    """Yield `chosen` (a subset of `domain`) as maximal runs [first, end) of positions within `domain`."""
    others = domain & ~chosen
    while chosen:
        low = chosen & -chosen
        above = others & ~(low - 1)
        first = (domain & (low - 1)).bit_count()
        if not above:
            yield first, domain.bit_count()
            return
        high = above & -above
        yield first, (domain & (high - 1)).bit_count()
        chosen &= ~(high - 1)


class Program:
    """A clingo program over what propagation left open.

    An axis with n possible values has n-1 order atoms, "the value is at place p or later", so a run of releases is two
    literals, and preferences, dates and ages are sums over the same atoms: the program grows linearly with the data.
    """

    def __init__(self, compiled: Clauses, domains: Sequence[int], *, options: Sequence[str] = ()) -> None:
        self.compiled = compiled
        self.domains = domains
        self.control = clingo.Control(["--seed=1", "--configuration=tweety", *options])
        self.places: dict[int, list[int]] = {}
        """Axis -> value index at each place, for the axes that are still open."""
        self.order: dict[int, list[int]] = {}
        """Axis -> order atom of each place; place 0 has none."""
        self._members: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Self:
        self.backend = self.control.backend()
        self.backend.__enter__()  # type: ignore[no-untyped-call]
        for axis, domain in enumerate(self.domains):
            if domain & (domain - 1):
                self.places[axis] = list(bits(domain))
                atoms = [self.backend.add_atom() for _ in self.places[axis][1:]]
                self.order[axis] = [0, *atoms]
                self.backend.add_rule(atoms, [], choice=True)
                for lower, upper in itertools.pairwise(atoms):
                    self.backend.add_rule([], [upper, -lower])
        return self

    def __exit__(self, *exception: object) -> None:
        self.backend.__exit__(*exception)  # type: ignore[no-untyped-call]

    def _run(self, axis: int, first: int, end: int) -> list[int]:
        order = self.order[axis]
        return [*([order[first]] if first else []), *([-order[end]] if end < len(order) else [])]

    def inside(self, axis: int, mask: int) -> list[int] | None:
        """Return a conjunction of literals that says "`axis` has its value in `mask`"; None when it cannot."""
        domain = self.domains[axis]
        chosen = mask & domain
        if not chosen:
            return None
        if chosen == domain:
            return []
        found = list(itertools.islice(runs(chosen, domain), 2))
        if len(found) == 1:
            return self._run(axis, *found[0])
        member = self._members.get((axis, chosen))
        if member is None:
            member = self._members[axis, chosen] = self.backend.add_atom()
            for first, end in runs(chosen, domain):
                self.backend.add_rule([member], self._run(axis, first, end))
        return [member]

    def forbid(self, literals: Sequence[tuple[int, int]], *assumed: int) -> None:
        """Refuse that every axis of the clause `literals` is outside its mask."""
        body = list(assumed)
        for axis, mask in literals:
            part = self.inside(axis, ~mask)
            if part is None:
                return  # this literal holds in every remaining cell
            body += part
        self.backend.add_rule([], body)

    def all_clauses(self) -> None:
        """Add every clause of the matrix that propagation has not settled."""
        domains = self.domains
        for clause in self.compiled.clauses:
            if all(domains[axis] & ~mask for axis, mask in clause.literals):
                self.forbid(clause.literals)

    def both(self, parts: Sequence[Sequence[int]]) -> int:
        """Return an atom that holds when every literal of `parts` does."""
        atom = int(self.backend.add_atom())
        self.backend.add_rule([atom], list(itertools.chain.from_iterable(parts)))
        return atom

    def minimize(self, priority: int, literals: list[tuple[int, int]]) -> None:
        """Add a step of the order; a larger `priority` is decided first."""
        if literals:
            self.backend.add_minimize(priority, literals)

    def cost(self, axis: int, per_value: Sequence[int]) -> list[tuple[int, int]]:
        """Return literals whose weights sum to the cost of `axis`' value, less a constant."""
        literals = []
        if axis in self.order:
            steps = itertools.pairwise(per_value[value] for value in self.places[axis])
            for (before, after), atom in zip(steps, self.order[axis][1:], strict=True):
                if after != before:
                    literals.append((atom, after - before) if after > before else (-atom, before - after))
        return literals

    def solve(self, assumptions: Sequence[int] = ()) -> list[int] | None:
        """Return the value index of every axis in the (optimal) answer, or None."""
        answer: list[int] | None = None
        with self.control.solve(yield_=True, assumptions=assumptions) as handle:
            for model in handle:
                answer = self.read(model)
        return answer

    def read(self, model: clingo.Model) -> list[int]:
        """Return the value index of every axis in `model`."""
        values = [domain.bit_length() - 1 for domain in self.domains]
        for axis, places in self.places.items():
            order = self.order[axis]
            low, high = 0, len(places) - 1
            while low < high:  # the order atoms are true up to the value's place
                middle = (low + high + 1) // 2
                if model.is_true(order[middle]):
                    low = middle
                else:
                    high = middle - 1
            values[axis] = places[low]
        return values


def _evidence_masks(asked: Asked, ref: EvidenceRef) -> list[tuple[int, int]] | None:
    """Return axis -> values for which `ref` speaks for a cell, or None when it speaks for none."""
    compiled = asked.compiled
    if not any(name in ref.versions for name in SOFTWARE):
        return None
    settled = {pin.axis for pin in asked.request.pins if not is_open_pin(pin)}
    result = []
    for name in SOFTWARE:
        axis = compiled.number.get(name)
        if axis is None:
            continue
        if name in ref.versions:
            place = compiled.position[axis].get(ref.versions[name])
            result.append((axis, UNUSED if place is None else UNUSED | 1 << place))
        elif name not in settled:
            result.append((axis, UNUSED))
    return result


def _pair_axes(compiled: Clauses) -> list[bool]:
    # what follows from another axis or from the host was not chosen to be tested together
    return [axis.use not in {"derived", "host"} for axis in compiled.axes]


def _pairs(axes: Iterable[int], counted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    return itertools.combinations(sorted(a for a in axes if counted[a]), 2)


def _dates(compiled: Clauses, axis: int) -> list[int]:
    """Return each value's date as a day number; an undated release, or none, is as old as the axis' oldest."""
    known = [r.date.toordinal() for r in compiled.values[axis] if r is not None and r.date is not None]
    oldest = min(known, default=0)
    return [r.date.toordinal() if r is not None and r.date is not None else oldest for r in compiled.values[axis]]


def preference_order(compiled: Clauses) -> list[int]:
    """Return the axes in the order in which the last step compares them."""
    return sorted(
        (i for i, axis in enumerate(compiled.axes) if axis.use != "derived"), key=lambda i: not compiled.axes[i].dated
    )


def score_of(asked: Asked, evidence: Sequence[EvidenceRef], values: Sequence[int]) -> Score:
    """Return the place of a cell (value index per axis) in the stated order."""
    compiled = asked.compiled
    counted = _pair_axes(compiled)
    level = 0
    for ref in evidence:
        masks = _evidence_masks(asked, ref)
        if masks is not None and all(mask >> values[axis] & 1 for axis, mask in masks):
            level = max(level, LEVELS.index(ref.level) + 1)
    tested: set[tuple[int, int]] = set()
    for together in compiled.tested:
        if all(mask >> values[axis] & 1 for axis, mask in together.literals):
            tested.update(_pairs((axis for axis, _ in together.literals), counted))
    dated = [i for i, axis in enumerate(compiled.axes) if axis.dated]
    days = [r.date.toordinal() for i in dated if (r := compiled.values[i][values[i]]) is not None and r.date]
    dated_pairs = sum(compiled.axes[a].dated or compiled.axes[b].dated for a, b in tested)
    return Score(
        defaults_out=sum(axis.use == "default" and not values[i] for i, axis in enumerate(compiled.axes)),
        evidence=-level,
        untested_pairs=-dated_pairs,
        spread=max(days) - min(days) if days else 0,
        age=sum(max(ds) - ds[values[i]] for i in dated if (ds := _dates(compiled, i))),
        untested_undated_pairs=-(len(tested) - dated_pairs),
        preference=tuple(len(compiled.values[i]) - 1 - values[i] for i in preference_order(compiled)),
    )


def add_order(program: Program, asked: Asked, evidence: Sequence[EvidenceRef]) -> None:
    """Add the stated order to `program` as minimisation, priorities 100 downwards."""
    compiled, domains = program.compiled, program.domains
    prefer = asked.request.prefer
    program.minimize(
        100,
        [
            (-program.order[i][1], 1)
            for i, axis in enumerate(compiled.axes)
            if axis.use == "default" and i in program.order and domains[i] & UNUSED
        ],
    )
    if prefer != "newest":
        _add_evidence(program, asked, evidence)
        _add_spread(program)
    _add_pairs(program, dated=prefer != "newest")
    ages = []
    for i, axis in enumerate(compiled.axes):
        if axis.dated:
            ages += program.cost(i, [-day for day in _dates(compiled, i)])
    program.minimize(96, ages)
    for step, i in enumerate(preference_order(compiled)):
        program.minimize(90 - step, program.cost(i, range(0, -len(compiled.values[i]), -1)))


def _add_evidence(program: Program, asked: Asked, evidence: Sequence[EvidenceRef]) -> None:
    shown: dict[str, list[int]] = {}
    always: set[str] = set()
    for ref in evidence:
        masks = _evidence_masks(asked, ref)
        if masks is None:
            continue
        parts = [program.inside(axis, mask) for axis, mask in masks]
        if all(part is not None for part in parts):
            body = [part for part in parts if part]
            if body:
                shown.setdefault(ref.level, []).append(program.both(body))
            else:
                always.add(ref.level)
    above: int | None = None
    literals = []
    for level in reversed(LEVELS):
        if level in always:
            break
        if level in shown or above is not None:
            atom = program.backend.add_atom()
            for cause in [*shown.get(level, []), *([above] if above is not None else [])]:
                program.backend.add_rule([atom], [cause])
            literals.append((-atom, 1))
            above = atom
    program.minimize(99, literals)


def _add_pairs(program: Program, *, dated: bool) -> None:
    compiled = program.compiled
    counted = _pair_axes(compiled)
    causes: dict[tuple[int, int], list[int | None]] = {}
    for together in compiled.tested:
        parts = [program.inside(axis, mask) for axis, mask in together.literals]
        if any(part is None for part in parts):
            continue
        body = [part for part in parts if part]
        atom = program.both(body) if body else None  # None: the rule holds in every remaining cell
        for pair in _pairs((axis for axis, _ in together.literals), counted):
            causes.setdefault(pair, []).append(atom)
    steps: dict[int, list[tuple[int, int]]] = {98: [], 95: []}
    for (a, b), atoms in causes.items():
        known = [atom for atom in atoms if atom is not None]
        if len(known) < len(atoms):
            continue  # covered whatever is chosen
        with_date = compiled.axes[a].dated or compiled.axes[b].dated
        if with_date and not dated:
            continue
        pair_atom = program.backend.add_atom()
        for known_atom in known:
            program.backend.add_rule([pair_atom], [known_atom])
        steps[98 if with_date else 95].append((-pair_atom, 1))
    for priority, literals in steps.items():
        program.minimize(priority, literals)


def _add_spread(program: Program) -> None:
    """Minimise the days between the oldest and the newest release: a sum over the gaps that lie between them."""
    compiled, backend = program.compiled, program.backend
    fixed: set[int] = set()
    begin: dict[int, int] = {}  # axis -> first place that has a date; "not in use" and undated ones come before
    last: dict[int, list[tuple[int, int]]] = {}  # day -> (axis, last place with that day or an earlier one)
    first: dict[int, list[tuple[int, int]]] = {}
    for i, axis in enumerate(compiled.axes):
        if not axis.dated:
            continue
        releases = compiled.values[i]
        if i not in program.order:
            release = releases[program.domains[i].bit_length() - 1]
            if release is not None and release.date:
                fixed.add(release.date.toordinal())
            continue
        seen: set[int] = set()
        for place, value in enumerate(program.places[i]):
            release = releases[value]
            if release is None or release.date is None:
                continue
            day = release.date.toordinal()
            begin.setdefault(i, place)
            if day not in seen:
                seen.add(day)
                first.setdefault(day, []).append((i, place))
            if last.get(day) and last[day][-1][0] == i:
                last[day][-1] = (i, place)
            else:
                last.setdefault(day, []).append((i, place))
    days = sorted({*first, *fixed})
    if len(days) < 2:
        return
    below = _chain(program, days, last, begin, fixed, downwards=False)
    above = _chain(program, days, first, begin, fixed, downwards=True)
    literals = []
    for n, (day, after) in enumerate(itertools.pairwise(days)):
        atom = backend.add_atom()
        backend.add_rule([atom], [below[n], above[n + 1]])
        literals.append((atom, after - day))
    program.minimize(97, literals)


def _chain(
    program: Program,
    days: Sequence[int],
    marks: Mapping[int, Sequence[tuple[int, int]]],
    begin: Mapping[int, int],
    fixed: set[int],
    *,
    downwards: bool,
) -> list[int]:
    """Return per day an atom "some release is of this day or earlier" (or "or later", with `downwards`)."""
    atoms = [program.backend.add_atom() for _ in days]
    for n, day in enumerate(days):
        if day in fixed:
            program.backend.add_rule([atoms[n]], [])
        neighbour = n + 1 if downwards else n - 1
        if 0 <= neighbour < len(days):
            program.backend.add_rule([atoms[n]], [atoms[neighbour]])
        for axis, place in marks.get(day, ()):
            order = program.order[axis]
            end = len(order) if downwards else place + 1
            start = place if downwards else begin[axis]
            body = [*([order[start]] if start else []), *([-order[end]] if end < len(order) else [])]
            program.backend.add_rule([atoms[n]], body)
    return atoms


def best_values(asked: Asked, evidence: Sequence[EvidenceRef], domains: list[int]) -> list[int] | None:
    """Return the best cell within `domains` (value index per axis), or None when there is none."""
    if any(not domain for domain in domains) or propagate(asked.compiled, domains) is not None:
        return None
    with Program(asked.compiled, domains) as program:
        program.all_clauses()
        add_order(program, asked, evidence)
    return program.solve()


def solvable(compiled: Clauses, domains: list[int]) -> bool:
    """Return whether any cell lies within `domains` (narrowed in place)."""
    if any(not domain for domain in domains) or propagate(compiled, domains) is not None:
        return False
    with Program(compiled, domains) as program:
        if not program.order:
            return True
        program.all_clauses()
    return program.solve() is not None


def solve(matrix: Matrix, request: Request, evidence: Sequence[EvidenceRef] = ()) -> Solution:
    """Return the best cell for `request`, by the order that this module states.

    Raises:
        UsageError: a pin names an unknown axis, or matches no release.
        NoCellError: no cell satisfies the request; its `conflict` tells why in numbered steps.

    """
    asked = read_request(matrix, request)
    domains = asked.compiled.domains(asked.pinned())
    values = best_values(asked, evidence, domains)
    if values is None:
        from envbuild.matrix.conflict import explain_conflict

        conflict = explain_conflict(asked, evidence)
        raise NoCellError(
            conflict.text(),
            hint="`envbuild explain --nearest` with the same flags lists the closest cells",
            conflict=conflict,
        )
    return _solution(asked, evidence, values, domains)


def to_cell(compiled: Clauses, values: Sequence[int]) -> Cell:
    """Return the cell of `values` (value index per axis)."""
    chosen = {
        name: release
        for name, releases, value in zip(compiled.names, compiled.values, values, strict=True)
        if (release := releases[value]) is not None
    }
    return Cell(
        versions={name: r.version for name, r in chosen.items()},
        commits={name: r.commit for name, r in chosen.items() if r.commit},
    )


def _solution(asked: Asked, evidence: Sequence[EvidenceRef], values: Sequence[int], domains: Sequence[int]) -> Solution:
    compiled = asked.compiled
    cell = to_cell(compiled, values)
    applied = [rule for rule in asked.compiled.matrix.rules if rule_applies(compiled, rule, values)]
    tested = tuple(rule for rule in applied if rule.kind == "tested-with")
    score = score_of(asked, evidence, values)
    proofs = tuple(
        ref
        for ref in evidence
        if LEVELS.index(ref.level) + 1 == -score.evidence
        and (masks := _evidence_masks(asked, ref)) is not None
        and all(mask >> values[axis] & 1 for axis, mask in masks)
    )
    return Solution(
        cell=cell,
        request=asked.request,
        matrix_digest=compiled.matrix.digest,
        rules=tuple(rule for rule in applied if rule.kind != "tested-with"),
        tested_with=tested,
        evidence=proofs,
        reasons=_reasons(asked, values, domains, tested, proofs),
        left_out=_left_out(asked, values),
        score=score,
        added=asked.added,
    )


def rule_applies(compiled: Clauses, rule: Rule, values: Sequence[int]) -> bool:
    """Return whether every axis of the rule's `when` (and an inert rule's component) is in use and matches."""
    if rule.component and not values[compiled.number[rule.component]]:
        return False
    return all(compiled.mask(axis := compiled.number[n], spec) >> values[axis] & 1 for n, spec in rule.when.items())


def _reasons(
    asked: Asked,
    values: Sequence[int],
    domains: Sequence[int],
    tested: Sequence[Rule],
    proofs: Sequence[EvidenceRef],
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
        words = " and ".join(f"{pin.origin} {pin.spec}" for pin in pins.get(name, []))
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
            reason = f"proven on {proofs[0].level} by {proofs[0].id}"
        elif together and asked.request.prefer == "proven":
            others = sorted(
                {f"{n} {r.version}" for rule in together for n in rule.when if n != name and (r := chosen[n])}
            )
            reason = f"tested together with {', '.join(others)} ({together[0].id})"
        elif axis.dated and asked.request.prefer == "proven":
            reason = "nearest in date to the rest" if axis.dated else ""
        elif axis.scheme == "name":
            reason = "the first listed that fits"
        else:
            reason = "the newest that fits"
        result[name] = asked_for + reason
    return result


def _left_out(asked: Asked, values: Sequence[int]) -> dict[AxisName, str]:
    compiled = asked.compiled
    excluded = {pin.axis: pin for pin in asked.request.pins if pin.spec == NONE}
    result = {}
    for i, axis in enumerate(compiled.axes):
        if values[i] or axis.use in {"derived", "host", "always"}:
            continue
        if axis.name in excluded:
            result[axis.name] = f"asked not to be there ({excluded[axis.name].origin} {NONE})"
        elif axis.use == "asked":
            result[axis.name] = NOT_ASKED
        else:
            result[axis.name] = _why_impossible(asked, values, i)
    return result


def _why_impossible(asked: Asked, values: Sequence[int], axis: int) -> str:
    """Say in a sentence or two why a default axis could not be in the cell."""
    from envbuild.matrix.conflict import explain_conflict

    compiled = asked.compiled
    name = compiled.names[axis]
    kept = tuple(
        Pin(axis=other.name, spec=AUTO, origin="(default)")
        for i, other in enumerate(compiled.axes)
        if other.use == "default" and values[i] and all(p.axis != other.name for p in asked.request.pins)
    )
    wanted = Pin(axis=name, spec=AUTO, origin="(default)")
    for extra in ((wanted,), (*kept, wanted)):
        request = Request(pins=(*asked.request.pins, *extra), prefer=asked.request.prefer)
        trial = read_request(compiled.matrix, request)
        if not solvable(*trial.of(request.pins)):
            conflict = explain_conflict(trial, (), first_only=True)
            told = [step.text for step in conflict.steps if step.pin is None]
            return told[-1] if told else "no release of it fits what was asked"
    return "no release of it fits what was asked"
