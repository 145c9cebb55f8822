"""Which pairs of releases are tried, and which of them some cell holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from envbuild.components import COMPONENTS
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.subject import TORCH, newest_patches, plain
from envbuild.errors import UsageError
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import check_spec, matches, public_version
from envbuild.solver.enumerate import enumerate_cells


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A component's release and one that it is used with."""

    component: AxisName
    version: str
    other: AxisName
    with_: str
    pythons: tuple[str, ...]
    """Those with which some cell holds the pair; none when no cell does."""

    @property
    def versions(self) -> dict[AxisName, str]:
        """Both by axis, the component first."""
        return {self.component: self.version, self.other: self.with_}

    def __str__(self) -> str:
        return f"{self.component} {self.version} with {self.other} {self.with_}"


ALL = "all"
"""Stands for every component."""


def every_axes(matrix: Matrix, texts: Sequence[str]) -> list[tuple[tuple[AxisName, str | None], ...]]:
    """Read two `AXIS` or `AXIS=SPEC`, of which the first may be `all`: each component that has a distribution or sources.

    Raises:
        UsageError: as `read_axes`.

    """
    if texts[0] != ALL:
        return [read_axes(matrix, texts)]
    other = texts[1].partition("=")[0]
    place = COMPONENTS[other].place if other in COMPONENTS else 0
    fit = sorted((c.place, axis) for axis, c in COMPONENTS.items() if c.place > place)
    named = [axis for _, axis in fit if COMPONENTS[axis].distributions or COMPONENTS[axis].host_sources]
    return [read_axes(matrix, (axis, texts[1])) for axis in named] or [read_axes(matrix, texts)]


def read_axes(matrix: Matrix, texts: Sequence[str]) -> tuple[tuple[AxisName, str | None], ...]:
    """Read `AXIS` or `AXIS=SPEC`, the component first.

    Raises:
        UsageError: there are not two, or one is no component.

    """
    found = []
    for text in texts:
        axis, _, spec = text.partition("=")
        if axis not in COMPONENTS:
            raise UsageError(
                f"{axis!r} is not a component", where="envbuild matrix try", hint="one of: " + ", ".join(COMPONENTS)
            )
        if spec:
            check_spec(matrix.axes[axis], spec, text)
        found.append((axis, spec or None))
    if len(found) != 2 or found[0][0] == found[1][0] or found[0][0] == TORCH:
        raise UsageError(
            "a pair is a component and what it is used with",
            where="envbuild matrix try",
            hint='such as `envbuild matrix try te torch` or `envbuild matrix try te=2.17 "torch=>=2.9"`',
        )
    return tuple(found)


def pairs_of(
    files: Files, matrix: Matrix, axes: Sequence[tuple[AxisName, str | None]], *, every: bool
) -> Iterator[Pair]:
    """Yield the pairs of two axes, the newest component first.

    Of torch, one release stands for a minor: the last patch that the index has.

    Args:
        files: the index.
        matrix: the releases.
        axes: a component and what it is used with, each with a constraint or None.
        every: whether pairs that no cell holds are tried, too.

    """
    (component, _), (other, _) = axes
    held: dict[tuple[str, str], set[str]] = {}
    for each in enumerate_cells(matrix, (component, other, "python")):
        key = (plain(each[component]), _stand_in(other, each[other]))
        held.setdefault(key, set()).add(each["python"])
    order = [release.version for release in matrix.releases["python"]]
    for version in reversed(_versions(files, matrix, *axes[0])):
        for with_ in reversed(_versions(files, matrix, *axes[1])):
            pythons = held.get((version, _stand_in(other, with_)), set())
            if pythons or every:
                ordered = tuple(sorted(pythons, key=order.index))
                yield Pair(component=component, version=version, other=other, with_=with_, pythons=ordered)


def _stand_in(axis: AxisName, version: str) -> str:
    public = public_version(version)
    if axis == TORCH and public is not None and not public.is_prerelease:
        return ".".join(map(str, public.release[:2]))
    return plain(version)


def _versions(files: Files, matrix: Matrix, axis: AxisName, spec: str | None) -> list[str]:
    releases = [r for r in matrix.releases[axis] if spec is None or matches(matrix.axes[axis], spec, r)]
    wanted = [r for r in releases if "ngc" not in str(r.needs.get("base", ""))]
    if axis != TORCH:
        return list(dict.fromkeys(plain(release.version) for release in wanted))
    minors = {_stand_in(axis, release.version) for release in wanted}
    return [patch for patch in newest_patches(files, matrix, axis) if _stand_in(axis, patch) in minors]
