"""Python distributions: the bounds that a cell adds to its lock, and impostors."""

from envbuild.matrix.cell import Cell
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Cap, Impostor, Release
from envbuild.matrix.spec import matches


def caps_for(matrix: Matrix, cell: Cell) -> tuple[Cap, ...]:
    """Return the caps whose every axis `cell` has and matches, in the order of the data file."""

    def holds(axis: str, spec: str | tuple[str, ...]) -> bool:
        version = cell.versions.get(axis)
        if version is None:
            return False
        # A value that a release fixes, or an exact version asked of an open axis, need not be listed.
        known = matrix.has(axis, version)
        release = matrix.release(axis, version) if known else Release(version=version, source="run:as in the cell")
        return matches(matrix.axes[axis], spec, release)

    return tuple(cap for cap in matrix.packages.cap if all(holds(axis, spec) for axis, spec in cap.when.items()))


def impostors(matrix: Matrix) -> dict[str, Impostor]:
    """Return the distributions of PyPI that must never be installed, by name."""
    return {impostor.distribution: impostor for impostor in matrix.packages.impostor}
