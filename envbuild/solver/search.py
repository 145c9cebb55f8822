"""The best cell by splitting domains, best bound first: no clingo, for the requests that few splits decide.

A node is what each axis may still be. Its bound says, field by field of the stated order, the best that any cell in it
could have; field by field no cell is better, so neither is any by the order. The node of the best bound is split in two
on what the first undecided field depends on. One that has a single value on every axis, and no clause against it, is a
cell, and nothing left can be better than the first such one. Where it takes too many splits, `best` leaves it to clingo.

Whether there is a cell at all takes less: `solvable` settles one axis after the other.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from envbuild.solver.clauses import UNUSED, Clauses, bits
from envbuild.solver.propagation import propagate
from envbuild.util.frozen import Frozen

if TYPE_CHECKING:
    from envbuild.solver.proof import Masks

MOST_SPLITS = 150
"""Beyond these, clingo with its import is quicker."""

MOST_GUESSES = 60
"""Values that `solvable` tries before it asks clingo."""

Bound = tuple[int | tuple[int, ...], ...]
Pairs = frozenset[tuple[int, int]]
Split = tuple[int, int]
"""An axis, and the values of the half that is the better one."""


class Goal(Frozen):
    """What the order compares, over one request; `order` makes it."""

    compat: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
    """Pairs of a driver and the CUDA releases that it starts with cuda-compat alone."""
    proofs: tuple[tuple[int, "Masks"], ...]
    """Ranks, and what a cell must have to be of that rank, the best first."""
    in_part: tuple[tuple[int, "Masks"], ...]
    """The same of records that may be without what the request settled; empty where they give the same ranks."""
    tested: tuple[tuple[Sequence[tuple[int, int]], tuple[Pairs, Pairs]], ...]
    """The literals of each tested-with rule, and the pairs that it covers: with a dated axis, without one."""
    months: tuple[tuple[int, Sequence[int | None]], ...]
    """Each dated axis with its values' months; no axis where the season does not count."""
    untagged: tuple[tuple[int, Sequence[bool]], ...]
    ages: tuple[tuple[int, Sequence[int]], ...]
    """Each dated axis with the days by which each value is older than the newest."""
    preference: tuple[int, ...]


def best(compiled: Clauses, goal: Goal, domains: Sequence[int]) -> list[int] | None:
    """Return the best cell within propagated `domains`, one index per axis; None where the search does not decide it.

    Some cell may lie within `domains` or none: of none, nothing is decided either.
    """
    only = _unsettled(compiled, domains)
    count = itertools.count()  # equal bounds: the older node first
    heap: list[tuple[Bound, int, list[int]]] = [(_bound(compiled, goal, domains), next(count), list(domains))]
    for _ in range(MOST_SPLITS):
        if not heap:
            return None
        _, _, node = heapq.heappop(heap)
        split = _split(compiled, goal, node)
        if split is None:
            if any(domain & (domain - 1) for domain in node):
                return None  # an axis that nothing compares
            return [domain.bit_length() - 1 for domain in node]
        axis, better = split
        for half in (better, node[axis] & ~better):
            child = list(node)
            child[axis] = half
            if half and propagate(compiled, child, only) is None:
                heapq.heappush(heap, (_bound(compiled, goal, child), next(count), child))
    return None


def solvable(compiled: Clauses, domains: list[int]) -> bool:
    """Return whether any cell lies within `domains` (narrowed in place)."""
    if not all(domains) or propagate(compiled, domains) is not None:
        return False
    if _some_cell(compiled, domains):
        return True
    from envbuild.solver.program import any_cell

    return any_cell(compiled, domains) is not None


def _some_cell(compiled: Clauses, domains: Sequence[int]) -> bool:
    """Return whether settling one axis after the other comes to a cell within propagated `domains`; False proves nothing."""
    only = _unsettled(compiled, domains)
    left = list(domains)
    for _ in range(MOST_GUESSES):
        axis = next((i for i, domain in enumerate(left) if domain & (domain - 1)), None)
        if axis is None:
            return True  # one value on every axis, and no clause against it
        # not in use, which hardly any clause is against; else the newest
        value = left[axis] & UNUSED or 1 << (left[axis].bit_length() - 1)
        settled = list(left)
        settled[axis] = value
        if propagate(compiled, settled, only) is None:
            left = settled
            continue
        left[axis] &= ~value
        if propagate(compiled, left, only) is not None:
            return False
    return False


def _unsettled(compiled: Clauses, domains: Sequence[int]) -> list[int]:
    """Return the numbers of the clauses that some cell within `domains` may break."""
    found = []
    for n, clause in enumerate(compiled.clauses):
        for axis, mask in clause.literals:
            domain = domains[axis]
            if domain & mask == domain:
                break
        else:
            found.append(n)
    return found


# The next two run 4000 times for a plain request: written out, without a generator each time, they take 1 ms less.
def _possible(domains: Sequence[int], literals: Sequence[tuple[int, int]]) -> bool:
    for axis, mask in literals:  # noqa: SIM110
        if not domains[axis] & mask:
            return False
    return True


def _open(domains: Sequence[int], literals: Sequence[tuple[int, int]]) -> Split | None:
    """Return how to decide whether all of `literals` hold; None where they do."""
    for axis, mask in literals:
        if domains[axis] & ~mask:
            return axis, domains[axis] & mask
    return None


def _forced_months(goal: Goal, domains: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (axis, earliest, latest month) of each axis that must be of a month."""
    for axis, months in goal.months:
        found = [months[value] for value in bits(domains[axis])]
        known = [month for month in found if month is not None]
        if known and len(known) == len(found):
            yield axis, min(known), max(known)


def _bound(compiled: Clauses, goal: Goal, domains: Sequence[int]) -> Bound:
    dated: set[tuple[int, int]] = set()
    undated: set[tuple[int, int]] = set()
    for literals, (with_date, without) in goal.tested:
        if _possible(domains, literals):
            dated |= with_date
            undated |= without
    ends = list(_forced_months(goal, domains))
    spread = max((first for _, first, _ in ends), default=0) - min((last for _, _, last in ends), default=0)
    return (
        sum(all(domains[axis] & ~mask == 0 for axis, mask in pair) for pair in goal.compat),
        sum(domains[i] == UNUSED for i, axis in enumerate(compiled.axes) if axis.use == "default"),
        -_rank(goal.proofs, domains),
        -len(dated),
        -_rank(goal.in_part, domains),
        max(spread, 0),
        sum(all(values[value] for value in bits(domains[axis])) for axis, values in goal.untagged),
        sum(min(values[value] for value in bits(domains[axis])) for axis, values in goal.ages),
        -len(undated),
        tuple(-domains[axis].bit_length() for axis in goal.preference),
    )


def _split(compiled: Clauses, goal: Goal, domains: Sequence[int]) -> Split | None:
    """Return what to decide next for the first field of the order that is not decided; None where all are."""
    for pair in goal.compat:
        if _possible(domains, pair) and (split := _open(domains, pair)):
            return split[0], domains[split[0]] & ~split[1]
    for i, axis in enumerate(compiled.axes):
        if axis.use == "default" and domains[i] & UNUSED and domains[i] != UNUSED:
            return i, domains[i] & ~UNUSED
    if split := _by_proof(goal.proofs, domains):
        return split
    for place in (0, 1):
        if place == 1 and (split := _by_proof(goal.in_part, domains) or _by_date(goal, domains)):
            return split
        sure: set[tuple[int, int]] = set()
        for literals, pairs in goal.tested:
            if _open(domains, literals) is None:
                sure |= pairs[place]
        for literals, pairs in goal.tested:
            if not pairs[place] <= sure and _possible(domains, literals) and (split := _open(domains, literals)):
                return split
    for i in goal.preference:
        if domains[i] & (domains[i] - 1):
            return i, 1 << (domains[i].bit_length() - 1)
    return None


def _rank(proofs: Sequence[tuple[int, "Masks"]], domains: Sequence[int]) -> int:
    """Return the highest rank that a cell within `domains` can have."""
    return next((rank for rank, masks in proofs if _possible(domains, masks)), 0)


def _by_proof(proofs: Sequence[tuple[int, "Masks"]], domains: Sequence[int]) -> Split | None:
    """Return how to decide the highest rank that is possible; None where it is decided."""
    for _, masks in proofs:
        if _possible(domains, masks):
            return _open(domains, masks)
    return None


def _by_date(goal: Goal, domains: Sequence[int]) -> Split | None:
    """Return how to decide the season, then the tags, then the ages."""
    spans = []
    for axis, months in goal.months:
        masks: dict[int | None, int] = {}
        for value in bits(domains[axis]):
            masks[months[value]] = masks.get(months[value], 0) | 1 << value
        if len(masks) > 1:
            spans.append((axis, masks))
    if spans:
        # the axis of the fewest months; of it the month that is nearest to those that are decided
        axis, masks = min(spans, key=lambda span: len(span[1]))
        ends = list(_forced_months(goal, domains))
        low, high = max((e[1] for e in ends), default=0), min((e[2] for e in ends), default=0)

        def far(month: int | None) -> tuple[int, int]:
            return (-1, 0) if month is None else (max(low - month, month - high, 0), -month)

        return axis, masks[min(masks, key=far)]
    for axis, untagged in goal.untagged:
        tagged = sum(1 << value for value in bits(domains[axis]) if not untagged[value])
        if tagged and tagged != domains[axis]:
            return axis, tagged
    for axis, ages in goal.ages:
        youngest = min(ages[value] for value in bits(domains[axis]))
        mask = sum(1 << value for value in bits(domains[axis]) if ages[value] == youngest)
        if mask != domains[axis]:
            return axis, mask
    return None
