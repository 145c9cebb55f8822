"""A way from one cell to another, axis by axis, on which every stop is a cell.

Only two versions of an axis matter here, so a clause of the matrix becomes one over few yes-or-no questions: "has this axis
moved?". A set of axes that has moved is an integer, one bit for each axis in which the two cells differ.
"""

import itertools
from collections.abc import Sequence

from envbuild.components import CHOICES
from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import NONE, Cell, Pin
from envbuild.matrix.fleet import GPU
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release
from envbuild.solver.clauses import Clauses, bits, compile_matrix
from envbuild.solver.masks import union_of
from envbuild.util.frozen import Frozen

_WHOLE = 12
"""Axes that move together at most for every part of them to be tried."""
_TRIED = 50_000
"""Sets that are tried for one step at most; then all that is left moves together."""


class Stop(Frozen):
    """A cell on the way."""

    cell: Cell
    moved: tuple[AxisName, ...]
    """The axes that have the second cell's version here and had the first one's at the stop before."""


def path_between(matrix: Matrix, first: Cell, second: Cell) -> tuple[Stop, ...]:
    """Return a way from one cell to another: each axis moves once, and with as few others as this way allows.

    Axes move together where the matrix allows no cell in between: torch and the cuDNN that comes with it, for one. So do a
    component that only one of the two has and a choice of how it is compiled: in between would be one with everything in it.
    No other stop can be added between two of the way.

    Raises:
        UsageError: the two are one cell, or for different fleets.
        NoCellError: the matrix does not accept one of them.

    """
    compiled = compile_matrix(matrix, _fleets(matrix, first, second)).unguarded
    one, other = _values(compiled, first), _values(compiled, second)
    moving = [axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if not moving:
        raise UsageError("the two are one cell: no axis differs", hint="`envbuild compare` compares two runs of it")
    rules = _rules(compiled, one, other, moving) + _together(compiled, one, other, moving)
    implied = _implied(rules, len(moving))
    whole = (1 << len(moving)) - 1
    moved, stops = 0, [Stop(cell=first, moved=())]
    while moved != whole:
        step = _next(rules, implied, moved, whole)
        moved |= step
        values = list(one)
        for place in bits(moved):
            values[moving[place]] = other[moving[place]]
        names = tuple(compiled.names[moving[place]] for place in bits(step))
        stops.append(Stop(cell=compiled.cell(values), moved=names))
    return tuple(stops)


def pins_of(matrix: Matrix, cell: Cell) -> tuple[Pin, ...]:
    """Return the pins that leave this cell alone: its versions, and `none` for the axes that it could have and has not."""
    return tuple(
        Pin(axis=name, spec=cell.versions.get(name, NONE), origin=f"--{name}")
        for name, axis in matrix.axes.items()
        if name in cell.versions or axis.use in {"default", "asked"}
    )


def _fleets(matrix: Matrix, *cells: Cell) -> dict[AxisName, Release]:
    """Return the release of the fleet that cells are for, which no data file lists; none where no cell is for a fleet.

    Raises:
        UsageError: they are for different fleets.

    """
    gpus = {cell.versions.get(GPU, "") for cell in cells}
    fleets = sorted(gpu for gpu in gpus if matrix.has(GPU, gpu) and not matrix.lists(GPU, gpu))
    if len(fleets) > 1:
        raise UsageError(
            f"the two are for different fleets: {' and '.join(fleets)}", hint="write the same gpu=… in both"
        )
    return {GPU: matrix.release(GPU, fleets[0])} if fleets else {}


def _values(compiled: Clauses, cell: Cell) -> list[int]:
    """Return the place of the cell's version on each axis; 0 where it has none.

    Raises:
        NoCellError: the matrix has no such version, or does not accept the cell.

    """
    values = []
    for name, position in zip(compiled.names, compiled.position, strict=True):
        version = cell.versions.get(name)
        if version is not None and version not in position:
            raise NoCellError(
                f"the matrix has no {name} {version}", hint=f"`envbuild matrix {name}` lists its versions"
            )
        values.append(0 if version is None else position[version])
    for axis, value in zip(compiled.axes, values, strict=True):
        if axis.use == "always" and not value:
            raise NoCellError(f"the cell has no {axis.name}")
    for clause in compiled.clauses:
        if not any(mask >> values[axis] & 1 for axis, mask in clause.literals):
            names = " and ".join(
                f"{compiled.names[axis]} {cell.versions.get(compiled.names[axis], NONE)}" for axis, _ in clause.literals
            )
            raise NoCellError(
                f"the matrix does not accept this cell any more: {names} do not go together",
                hint="`envbuild explain` with these versions says why",
            )
    return values


def _rules(
    compiled: Clauses, one: Sequence[int], other: Sequence[int], moving: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return the clauses that some mix of the two cells breaks: one of the first set has moved, or one of the second has not."""
    place = {axis: number for number, axis in enumerate(moving)}
    found: dict[tuple[int, int], None] = {}
    for clause in compiled.clauses:
        moved = stayed = 0
        for axis, mask in clause.literals:
            before, after = mask >> one[axis] & 1, mask >> other[axis] & 1
            if before and after:
                break
            moved |= after << place.get(axis, 0)
            stayed |= before << place.get(axis, 0)
        else:
            found[moved, stayed] = None
    return tuple(found)


def _together(
    compiled: Clauses, one: Sequence[int], other: Sequence[int], moving: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Return rules, as `_rules` does, by which a component that one end has not moves with the choice of how it is compiled."""
    place = {compiled.names[axis]: number for number, axis in enumerate(moving)}
    found = []
    for choice, component in CHOICES.items():
        if choice in place and component in place:
            axis = moving[place[component]]
            if not (one[axis] and other[axis]):
                pair = 1 << place[choice], 1 << place[component]
                found += [pair, pair[::-1]]
    return tuple(found)


def _holds(rules: Sequence[tuple[int, int]], moved: int) -> bool:
    return all(moved & if_moved or ~moved & if_stayed for if_moved, if_stayed in rules)


def _implied(rules: Sequence[tuple[int, int]], count: int) -> list[int]:
    """Return for each axis the axes that have to have moved when it has, itself among them."""
    after = [1 << number for number in range(count)]
    for moved, stayed in rules:
        if moved.bit_count() == 1 and stayed.bit_count() == 1:
            after[stayed.bit_length() - 1] |= moved
    for _ in range(count):
        after = [union_of(after[each] for each in bits(mask)) for mask in after]
    return after


def _next(rules: Sequence[tuple[int, int]], implied: Sequence[int], moved: int, whole: int) -> int:
    """Return a smallest set of axes that can move next."""
    rest = list(bits(whole & ~moved))
    tried = 0
    for size in range(1, len(rest) + 1):
        found = []
        for chosen in itertools.combinations(rest, size):
            step = union_of(implied[axis] for axis in chosen) & ~moved
            if _holds(rules, moved | step):
                found.append(step)
            tried += 1
            if tried > _TRIED:
                return min(found, key=int.bit_count, default=whole & ~moved)
        if found:
            return _smallest(rules, moved, min(found, key=int.bit_count))
    return whole & ~moved


def _smallest(rules: Sequence[tuple[int, int]], moved: int, step: int) -> int:
    """Return the smallest part of a step that can move by itself."""
    axes = list(bits(step))
    if len(axes) > _WHOLE:
        return step
    for size in range(1, len(axes)):
        for chosen in itertools.combinations(axes, size):
            part = sum(1 << axis for axis in chosen)
            if _holds(rules, moved | part):
                return part
    return step
