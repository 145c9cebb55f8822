"""What makes one cell better than another.

The order, each step deciding only among the cells that the steps before leave equal:

0. as many `default` axes in use as possible;
1. proof of the highest rank (`proof.RANKS`) for the axes that the request left open: run on this GPU, run elsewhere, tried
   without a GPU, run in part;
2. tested together: the number of pairs of axes, at least one of them dated, that a satisfied tested-with rule names
   together (pairs, so that ten rules that say the same count once);
3. season: the smallest number of days between the oldest and the newest release on the dated axes;
4. newest: the smallest sum over the dated axes of days by which a newer release of that axis exists;
5. tested together, for the pairs without a dated axis (an OS and its own Python);
6. axis by axis, the dated ones first: the newest release, or the first listed of names.

`prefer="newest"` leaves out steps 1 to 3. An axis that is not in use counts as its oldest release in 4 and as the least
preferred in 6, so the order is total and the answer is one cell.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbuild.solver.asked import Asked
from envbuild.solver.clauses import UNUSED, Clauses, propagate
from envbuild.solver.program import Program
from envbuild.solver.proof import EvidenceRef, add_evidence, rank_of

_NEWEST = (
    "as many default components as possible, then{} the newest, then an OS' own Python, then the order of the lists"
)
ORDER_IN_WORDS = {
    "newest": _NEWEST.format(""),
    "proven": _NEWEST.format(
        " what ran on this GPU, then what ran elsewhere, then what ran on a CPU, then versions tested together, then the "
        "smallest spread of release dates, then"
    ),
}
"""The stated order in one line, by what the request prefers."""


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
    tested: set[tuple[int, int]] = set()
    for together in compiled.tested:
        if all(mask >> values[axis] & 1 for axis, mask in together.literals):
            tested.update(_pairs((axis for axis, _ in together.literals), counted))
    dated = [i for i, axis in enumerate(compiled.axes) if axis.dated]
    days = [r.date.toordinal() for i in dated if (r := compiled.values[i][values[i]]) is not None and r.date]
    dated_pairs = sum(compiled.axes[a].dated or compiled.axes[b].dated for a, b in tested)
    return Score(
        defaults_out=sum(axis.use == "default" and not values[i] for i, axis in enumerate(compiled.axes)),
        evidence=-max((rank_of(asked, ref, values) for ref in evidence), default=0),
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
        add_evidence(program, asked, evidence, 99)
        _add_spread(program)
    _add_pairs(program, dated=prefer != "newest")
    ages = []
    for i, axis in enumerate(compiled.axes):
        if axis.dated:
            ages += program.cost(i, [-day for day in _dates(compiled, i)])
    program.minimize(96, ages)
    for step, i in enumerate(preference_order(compiled)):
        program.minimize(90 - step, program.cost(i, range(0, -len(compiled.values[i]), -1)))


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
