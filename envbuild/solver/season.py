"""When a release came out, in months, as the order of preference compares them.

Days would be measured against dates that no one chose: a tag of apex stands for a month, and a fix that came out a week
later would make a cell worse.
"""

import datetime as dt
from collections.abc import Sequence

from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release
from envbuild.matrix.spec import version_key

_FIRST_DAY = 10_000_000
"""A post-release of eight digits is a day (25.09.post20251222): a commit that nobody tagged."""


def is_untagged(release: Release | None) -> bool:
    """Return whether a release is a commit between two tags, named by its day."""
    version = version_key(release.version) if release is not None else None
    return version is not None and (version.post or 0) >= _FIRST_DAY


def _line(release: Release) -> object:
    """Return what the patches of one minor release share; a pre-release, a commit or a name stands for itself."""
    version = version_key(release.version)
    if version is None or version.is_prerelease or is_untagged(release):
        return release.version
    return version.epoch, version.major, version.minor


def _month(date: dt.date) -> int:
    return date.year * 12 + date.month


def months_of(matrix: Matrix, axis: AxisName, values: Sequence[Release | None]) -> Sequence[int | None]:
    """Return the month of each value: that of the first release of its minor, so that a patch is as old as what it mends.

    None stands for "not in use" and for a release without a date. Kept on the matrix, which is immutable.
    """
    kept: dict[AxisName, tuple[int | None, ...]] = vars(matrix).setdefault("_months", {})
    if axis not in kept:
        first: dict[object, int] = {}
        for release in matrix.releases.get(axis, ()):
            if release.date is not None:
                line, month = _line(release), _month(release.date)
                first[line] = min(month, first.get(line, month))
        kept[axis] = tuple(first[_line(r)] if r is not None and r.date is not None else None for r in values)
    return kept[axis]
