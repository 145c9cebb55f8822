"""The nearest cells of a request that has none: the fewest, cheapest pins moved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envbuild.matrix.cell import ARCHITECTURE, NONE, Cell, Request
from envbuild.matrix.fleet import members_of
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import version_key
from envbuild.solver.asked import ReadRequest, read_request
from envbuild.solver.clauses import UNUSED, Clauses, bits
from envbuild.solver.order import add_order
from envbuild.solver.program import Program
from envbuild.solver.proof import EvidenceRef
from envbuild.solver.propagation import propagate


@dataclass(frozen=True, kw_only=True)
class Near:
    """A cell close to the request."""

    cell: Cell
    changed: Mapping[AxisName, tuple[str, str]]
    """Axis -> what was asked, and what this cell has instead (`none` for an axis that it leaves out)."""


PATCH, MINOR, OTHER, PRESENCE, HOST = 1, 2, 3, 4, 5
"""What changing one pin costs: its patch level, its minor version, another version of a component, leaving it out or
taking it in, and the GPU, the OS, the base or the driver, which are not the user's to change lightly."""

_HARD = ("gpu", "os", "base", "driver")
_FIXED = (ARCHITECTURE,)
"""What no other cell can change: the processor of the machines."""


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
    asked = [release for i in bits(mask) if (release := compiled.values[axis][i]) is not None]
    gpus = {member.version for release in asked for member in members_of(release)} - {each.version for each in asked}
    if gpus:  # a fleet: one of the GPUs in it is nearer than what stands next to it in the list
        near = [each is not None and each.version in gpus for each in compiled.values[axis]]
        return [0 if mask >> i & 1 else 1 if is_near else count for i, is_near in enumerate(near)]
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
    domains = compiled.domains(
        {axis: mask if compiled.names[axis] in _FIXED else compiled.full[axis] for axis, mask in pinned.items()}
    )
    if propagate(compiled, domains) is not None:
        return ()
    changed: dict[int, int] = {}
    with Program(compiled, domains) as program:
        program.all_clauses()
        costs, distances = [], []
        for axis, mask in pinned.items():
            atom = changed[axis] = program.backend.add_atom()
            body = program.inside(axis, ~mask)
            if body is not None:
                program.backend.add_rule([atom], body)
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
                cell=compiled.cell(values),
                changed={compiled.names[axis]: _change(asked, axis, values[axis]) for axis in moved},
            )
        )
        if not moved:
            break
        with program.control.backend() as backend:
            backend.add_rule([], [changed[axis] for axis in moved])
    return tuple(result)


def _change(asked: ReadRequest, axis: int, value: int) -> tuple[str, str]:
    release = asked.compiled.values[axis][value]
    wanted = " and ".join(pin.spec for pin, number, _ in asked.masks if number == axis)
    return wanted, release.version if release is not None else NONE
