"""What makes one cell better than another.

The order, each step deciding only among the cells that the steps before leave equal:

0. with a driver given, a cell that it starts comes before one that needs the cuda-compat package;
1. as many `default` axes in use as possible;
2. proof of the highest rank (`proof.RANKS`): run on this GPU, run elsewhere, tried without a GPU, run in part; within
   each, an image that ran before an environment on a host;
3. tested together: the number of pairs of axes, at least one of them dated, that a satisfied tested-with rule names
   together (pairs, so that ten rules that say the same count once); it counts for later patches of what it names, too;
4. proof in part: the same of records without some software that the request settled;
5. release dates: the smallest number of months between the oldest and the newest release on the dated axes, where every
   patch of a minor release is of the month of its last one (`season`);
6. tags: the fewest releases that are a commit without a tag;
7. newest: the smallest sum over the dated axes of days by which a newer release of that axis exists, so that within a
   minor release the last patch is taken;
8. tested together, for the pairs without a dated axis (an OS and its own Python);
9. axis by axis, the dated ones first: the newest release, or the first listed of names.

`prefer="newest"` leaves out steps 2 to 6. An axis that is not in use counts as its oldest release in 7 and as the least
preferred in 9, so the order is total and the answer is one cell.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from envbuild.matrix.driver import needs_compat
from envbuild.solver.asked import ReadRequest
from envbuild.solver.clauses import UNUSED, Clauses, bits
from envbuild.solver.compiled import days_of
from envbuild.solver.proof import EvidenceRef, Masks, add_evidence, rank_of, ranked
from envbuild.solver.propagation import propagate
from envbuild.solver.search import Goal, best
from envbuild.solver.season import months_of, untagged_of
from envbuild.util.frozen import Frozen

if TYPE_CHECKING:
    from envbuild.solver.program import Program

_NEWEST = (
    "what the driver starts by itself, then as many default components as possible, then{} the newest, then an OS' own "
    "Python, then the order of the lists"
)
ORDER_IN_WORDS = {
    "newest": _NEWEST.format(""),
    "proven": _NEWEST.format(
        " what ran on this GPU, then what ran elsewhere, then what ran on a CPU (of each, an image before an environment "
        "on a bare host), then versions tested together, then what ran without a component that was asked for, then the "
        "smallest spread of release dates in months, then tags before commits between them, then"
    ),
}
"""The stated order in one line, by what the request prefers."""


class Score(Frozen):
    """A cell's place in the stated order; smaller is better, compared field by field."""

    compat: int
    defaults_out: int
    evidence: int
    untested_pairs: int
    evidence_in_part: int
    spread: int
    untagged: int
    age: int
    untested_undated_pairs: int
    preference: tuple[int, ...]


def _pair_axes(compiled: Clauses) -> list[bool]:
    # what follows from another axis or from the host was not chosen to be tested together
    return [axis.use not in {"derived", "host"} for axis in compiled.axes]


def _pairs(axes: Iterable[int], counted: Sequence[bool]) -> Iterator[tuple[int, int]]:
    return itertools.combinations(sorted(a for a in axes if counted[a]), 2)


def _dates(compiled: Clauses, axis: int) -> Sequence[int]:
    return days_of(compiled.matrix, compiled.names[axis], compiled.values[axis])


def _months(compiled: Clauses, axis: int) -> Sequence[int | None]:
    return months_of(compiled.matrix, compiled.names[axis], compiled.values[axis])


def month_of(compiled: Clauses, axis: int, value: int) -> int | None:
    """Return the month of a value, counted from year 0, or None for one without a date."""
    return _months(compiled, axis)[value]


def _untagged(compiled: Clauses, axis: int) -> Sequence[bool]:
    return untagged_of(compiled.matrix, compiled.names[axis], compiled.values[axis])


def _compat_masks(compiled: Clauses, drivers: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield the pairs of a driver, of those in a mask, and the CUDA releases that it starts with cuda-compat alone."""
    driver, cuda = compiled.number.get("driver"), compiled.number.get("cuda")
    if driver is None or cuda is None:
        return
    for value in bits(drivers & compiled.real[driver]):
        release = compiled.values[driver][value]
        mask = sum(
            1 << place
            for place, toolkit in enumerate(compiled.values[cuda])
            if toolkit is not None and release is not None and needs_compat(toolkit, release.version)
        )
        if mask:
            yield (driver, 1 << value), (cuda, mask)


def preference_order(compiled: Clauses) -> list[int]:
    """Return the axes in the order in which the last step compares them."""
    return sorted(
        (i for i, axis in enumerate(compiled.axes) if axis.use != "derived"), key=lambda i: not compiled.axes[i].dated
    )


Ranks = list[tuple[int, Masks]]


def _proofs(asked: ReadRequest, evidence: Sequence[EvidenceRef]) -> tuple[Ranks, Ranks]:
    """Return `ranked` of whole records, and of those in part; nothing for these where they give the same ranks."""
    whole, in_part = ranked(asked, evidence), ranked(asked, evidence, in_part=True)
    return whole, [] if in_part == whole else in_part


def score_of(asked: ReadRequest, evidence: Sequence[EvidenceRef], values: Sequence[int]) -> Score:
    """Return the place of a cell (value index per axis) in the stated order."""
    compiled = asked.compiled
    counted = _pair_axes(compiled)
    tested: set[tuple[int, int]] = set()
    for together in compiled.tested:
        if all(mask >> values[axis] & 1 for axis, mask in together.literals):
            tested.update(_pairs((axis for axis, _ in together.literals), counted))
    dated = [i for i, axis in enumerate(compiled.axes) if axis.dated]
    months = [month for i in dated if (month := _months(compiled, i)[values[i]]) is not None]
    given = 1 << values[driver] if (driver := compiled.number.get("driver")) is not None else 0
    dated_pairs = sum(compiled.axes[a].dated or compiled.axes[b].dated for a, b in tested)
    return Score(
        compat=sum(mask >> values[cuda] & 1 for _, (cuda, mask) in _compat_masks(compiled, given)),
        defaults_out=sum(axis.use == "default" and not values[i] for i, axis in enumerate(compiled.axes)),
        evidence=-max((rank_of(asked, ref, values) for ref in evidence), default=0),
        untested_pairs=-dated_pairs,
        evidence_in_part=-max((rank_of(asked, ref, values, in_part=True) for ref in evidence), default=0),
        spread=max(months) - min(months) if months else 0,
        untagged=sum(_untagged(compiled, i)[values[i]] for i in dated),
        age=sum(max(ds) - ds[values[i]] for i in dated if (ds := _dates(compiled, i))),
        untested_undated_pairs=-(len(tested) - dated_pairs),
        preference=tuple(len(compiled.values[i]) - 1 - values[i] for i in preference_order(compiled)),
    )


def add_order(program: "Program", asked: ReadRequest, evidence: Sequence[EvidenceRef]) -> None:
    """Add the stated order to `program` as minimisation, priorities 102 downwards."""
    compiled, domains = program.compiled, program.domains
    prefer = asked.request.prefer
    _add_compat(program)
    program.minimize(
        101,
        [
            (-program.order[i][1], 1)
            for i, axis in enumerate(compiled.axes)
            if axis.use == "default" and i in program.order and domains[i] & UNUSED
        ],
    )
    if prefer != "newest":
        whole, in_part = _proofs(asked, evidence)
        add_evidence(program, whole, 100)
        add_evidence(program, in_part, 98)
        _add_season(program)
        untagged = []
        for i, axis in enumerate(compiled.axes):
            if axis.dated:
                untagged += program.cost(i, _untagged(compiled, i))
        program.minimize(96, untagged)
    _add_pairs(program, dated=prefer != "newest")
    ages = []
    for i, axis in enumerate(compiled.axes):
        if axis.dated:
            ages += program.cost(i, [-day for day in _dates(compiled, i)])
    program.minimize(95, ages)
    for step, i in enumerate(preference_order(compiled)):
        program.minimize(90 - step, program.cost(i, range(0, -len(compiled.values[i]), -1)))


def _add_pairs(program: "Program", *, dated: bool) -> None:
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
    steps: dict[int, list[tuple[int, int]]] = {99: [], 94: []}
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
        steps[99 if with_date else 94].append((-pair_atom, 1))
    for priority, literals in steps.items():
        program.minimize(priority, literals)


def _add_compat(program: "Program") -> None:
    """Count a cell that needs the cuda-compat package, whatever else it has."""
    driver = program.compiled.number.get("driver")
    atoms = []
    for pair in _compat_masks(program.compiled, 0 if driver is None else program.domains[driver]):
        parts = [program.inside(axis, mask) for axis, mask in pair]
        if all(part is not None for part in parts):
            atoms.append(program.both([part for part in parts if part]))
    program.minimize(102, [(atom, 1) for atom in atoms])


def _add_season(program: "Program") -> None:
    """Minimise the months between the oldest and the newest release: a sum over the gaps that lie between them."""
    compiled, backend = program.compiled, program.backend
    fixed: set[int] = set()
    causes: dict[int, list[list[int]]] = {}  # month -> what says that some release is of it
    for i, axis in enumerate(compiled.axes):
        if not axis.dated:
            continue
        months = _months(compiled, i)
        masks: dict[int, int] = {}
        for value in bits(program.domains[i]):
            if (month := months[value]) is not None:
                masks[month] = masks.get(month, 0) | 1 << value
        for month, mask in masks.items():
            inside = program.inside(i, mask)
            if inside:
                causes.setdefault(month, []).append(inside)
            elif inside is not None:
                fixed.add(month)
    months = sorted({*causes, *fixed})
    if len(months) < 2:
        return
    below, above = (_chain(program, months, causes, fixed, downwards=way) for way in (False, True))
    literals = []
    for n, (month, after) in enumerate(itertools.pairwise(months)):
        atom = backend.add_atom()
        backend.add_rule([atom], [below[n], above[n + 1]])
        literals.append((atom, after - month))
    program.minimize(97, literals)


def _chain(
    program: "Program",
    months: Sequence[int],
    causes: Mapping[int, Sequence[Sequence[int]]],
    fixed: set[int],
    *,
    downwards: bool,
) -> list[int]:
    """Return per month an atom "some release is of this month or earlier" (or "or later", with `downwards`)."""
    atoms = [program.backend.add_atom() for _ in months]
    for n, month in enumerate(months):
        if month in fixed:
            program.backend.add_rule([atoms[n]], [])
        neighbour = n + 1 if downwards else n - 1
        if 0 <= neighbour < len(months):
            program.backend.add_rule([atoms[n]], [atoms[neighbour]])
        for inside in causes.get(month, ()):
            program.backend.add_rule([atoms[n]], list(inside))
    return atoms


def best_values(asked: ReadRequest, evidence: Sequence[EvidenceRef], domains: list[int]) -> list[int] | None:
    """Return the best cell within `domains` (value index per axis), or None when there is none."""
    if any(not domain for domain in domains) or propagate(asked.compiled, domains) is not None:
        return None
    return best(asked.compiled, goal_of(asked, evidence, domains), domains) or by_clingo(asked, evidence, domains)


def by_clingo(asked: ReadRequest, evidence: Sequence[EvidenceRef], domains: list[int]) -> list[int] | None:
    """Return the best cell within propagated `domains`, or None when there is none; complete, whatever it takes."""
    from envbuild.solver.program import Program

    with Program(asked.compiled, domains) as program:
        program.all_clauses()
        add_order(program, asked, evidence)
    return program.solve()


def goal_of(asked: ReadRequest, evidence: Sequence[EvidenceRef], domains: Sequence[int]) -> Goal:
    """Return what `search` compares cells by: the same steps as `add_order`."""
    compiled = asked.compiled
    proven = asked.request.prefer != "newest"
    counted = _pair_axes(compiled)
    dated = [i for i, axis in enumerate(compiled.axes) if axis.dated]
    driver = compiled.number.get("driver")
    whole, in_part = _proofs(asked, evidence) if proven else ([], [])
    tested = []
    for together in compiled.tested:
        pairs = set(_pairs((axis for axis, _ in together.literals), counted))
        with_date = {(a, b) for a, b in pairs if compiled.axes[a].dated or compiled.axes[b].dated}
        tested.append((together.literals, (frozenset(with_date if proven else ()), frozenset(pairs - with_date))))
    return Goal(
        compat=tuple(_compat_masks(compiled, 0 if driver is None else domains[driver])),
        proofs=tuple(whole),
        in_part=tuple(in_part),
        tested=tuple(tested),
        months=tuple((i, _months(compiled, i)) for i in dated) if proven else (),
        untagged=tuple((i, _untagged(compiled, i)) for i in dated) if proven else (),
        ages=tuple((i, [max(days) - day for day in days]) for i in dated if (days := _dates(compiled, i))),
        preference=tuple(preference_order(compiled)),
    )
