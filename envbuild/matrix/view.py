"""A cell as its components see it."""

from collections.abc import Mapping
from types import MappingProxyType

from envbuild.matrix.cell import Cell
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release
from envbuild.util.frozen import Frozen


class CellView(Frozen):
    """What `envbuild.components.base.View` asks for, of a cell and the matrix that it was chosen from."""

    matrix: Matrix
    cell: Cell
    sources: Mapping[AxisName, str] = MappingProxyType({})
    repository: bool = False

    @property
    def versions(self) -> Mapping[AxisName, str]:
        """The cell's release on each axis."""
        return self.cell.versions

    @property
    def commits(self) -> Mapping[AxisName, str]:
        """Full commits of the axes whose releases are commits."""
        return self.cell.commits

    def release(self, axis: AxisName) -> Release:
        """Return the cell's release on `axis`; KeyError when the cell or the matrix has none."""
        return self.matrix.release(axis, self.cell.versions[axis])
