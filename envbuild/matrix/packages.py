"""Python distributions: the bounds that a cell adds to its lock, and impostors."""

from collections.abc import Mapping

from envbuild.matrix.cell import Cell
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Cap, Impostor, Release, Spec
from envbuild.matrix.spec import matches


def caps_for(matrix: Matrix, cell: Cell) -> tuple[Cap, ...]:
    """Return the caps whose every axis `cell` has and matches, in the order of the data file."""
    return tuple(cap for cap in matrix.packages.cap if all_hold(matrix, cell.versions, cap.when))


def all_hold(matrix: Matrix, versions: Mapping[AxisName, str], specs: Mapping[AxisName, Spec]) -> bool:
    """Return whether `versions` has every axis of `specs` and matches it."""

    def holds(axis: AxisName, spec: Spec) -> bool:
        version = versions.get(axis)
        if version is None:
            return False
        # A value that a release fixes, or an exact version asked of an open axis, need not be listed.
        known = matrix.has(axis, version)
        release = matrix.release(axis, version) if known else Release(version=version, source="run:as in the cell")
        return matches(matrix.axes[axis], spec, release)

    return all(holds(axis, spec) for axis, spec in specs.items())


def impostors(matrix: Matrix) -> dict[str, Impostor]:
    """Return the distributions of PyPI that must never be installed, by name."""
    return {impostor.distribution: impostor for impostor in matrix.packages.impostor}
