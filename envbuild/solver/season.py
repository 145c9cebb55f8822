"""When a release came out, in months, as the order of preference compares them.

Days would be measured against dates that no one chose: a tag of apex stands for a month. And a fix that came out a
month later would make a cell worse, so that the patches of one minor release share a month.
"""

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release
from envbuild.matrix.spec import version_key

if TYPE_CHECKING:
    from packaging.version import Version

_FIRST_DAY = 10_000_000
"""A post-release of eight digits is a day (25.09.post20251222): a commit without a tag."""


def _is_untagged(release: Release | None) -> bool:
    version = version_key(release.version) if release is not None else None
    return version is not None and (version.post or 0) >= _FIRST_DAY


def _line(release: Release) -> object:
    """Return what the patches of one minor release share; a pre-release, a post-release or a name stands for itself."""
    version = version_key(release.version)
    if version is None or version.is_prerelease or version.is_postrelease:
        return release.version
    return version.epoch, version.major, version.minor


def _month(date: dt.date) -> int:
    return date.year * 12 + date.month


def months_of(matrix: Matrix, axis: AxisName, values: Sequence[Release | None]) -> Sequence[int | None]:
    """Return the month of each value: that of the last patch of its minor, so that no patch is nearer than another.

    None stands for "not in use" and for a release without a date. Kept on the matrix, which is immutable.
    """
    kept: dict[tuple[AxisName, int], tuple[int | None, ...]] = vars(matrix).setdefault("_months", {})
    key = (axis, len(values))  # an open axis has one value more where a request names its own
    if key not in kept:
        last: dict[object, int] = {}
        for release in matrix.releases.get(axis, ()):
            if release.date is not None:
                line, month = _line(release), _month(release.date)
                last[line] = max(month, last.get(line, month))
        kept[key] = tuple(last[_line(r)] if r is not None and r.date is not None else None for r in values)
    return kept[key]


def with_later_patches(values: Sequence[Release | None], mask: int) -> int:
    """Return `mask` with the later patches of each release in it, of the same build: 2.9.1+cu128 of 2.9.0+cu128.

    What was tested with a release counts for the fixes of it that came later.
    """
    known = [
        (value, (_line(release), version.local or ""), version)
        for value, release in enumerate(values)
        if release is not None and (version := version_key(release.version)) is not None
    ]
    first: dict[tuple[object, str], Version] = {}
    for value, build, version in known:
        if mask >> value & 1:
            first[build] = min(version, first.get(build, version))
    for value, build, version in known:
        if build in first and first[build] < version:
            mask |= 1 << value
    return mask


def untagged_of(matrix: Matrix, axis: AxisName, values: Sequence[Release | None]) -> Sequence[bool]:
    """Return for each value whether it is a commit between two tags, named by its day. Kept on the matrix."""
    kept: dict[tuple[AxisName, int], tuple[bool, ...]] = vars(matrix).setdefault("_untagged", {})
    key = (axis, len(values))
    if key not in kept:
        kept[key] = tuple(map(_is_untagged, values))
    return kept[key]
