"""What follows from clauses by unit propagation alone."""

from collections import deque
from collections.abc import Sequence

from envbuild.solver.clauses import Clauses


def propagate(
    compiled: Clauses,
    domains: list[int],
    only: Sequence[int] | None = None,
    fired: list[tuple[int, int, int]] | None = None,
) -> int | None:
    """Narrow `domains` in place to what unit propagation leaves.

    Args:
        compiled: the matrix.
        domains: per axis, the values still possible; every one non-empty.
        only: the clauses to use; all by default.
        fired: receives (clause, axis, mask before) for every clause that narrowed an axis, in order.

    Returns:
        None, or the number of a clause that no value left can satisfy.

    """
    clauses = compiled.clauses
    order = range(len(clauses)) if only is None else only
    pending = deque(range(len(order)))
    queued = bytearray(b"\1" * len(order))
    # per axis: the places in `order` looked at since it was last narrowed, for they alone have to be looked at again;
    # going through every clause of the axis each time would grow with the square of the matrix
    seen: list[list[int]] = [[] for _ in domains]
    while pending:
        place = pending.popleft()
        queued[place] = False
        number = order[place]
        literals = clauses[number].literals
        unit, unit_mask = -1, 0
        for axis, mask in literals:
            left = domains[axis]
            both = left & mask
            if both == left:
                break  # satisfied, for good (compared, for `left & ~mask` would copy a long number several times)
            if both:
                if unit >= 0:  # two axes can still satisfy it
                    for other, _ in literals:
                        seen[other].append(place)
                    break
                unit, unit_mask = axis, both
        else:
            if unit < 0:
                return number
            if fired is not None:
                fired.append((number, unit, domains[unit]))
            domains[unit] = unit_mask
            again, seen[unit] = sorted(seen[unit]), []
            for other in again:
                if not queued[other]:
                    queued[other] = True
                    pending.append(other)
    return None
