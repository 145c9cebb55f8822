"""Which pairs of releases are tried, and which of them some cell holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from envbuild.components import CHOICES, COMPONENTS
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.subject import TORCH, newest_patches, plain
from envbuild.errors import UsageError
from envbuild.evidence.trials import History
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import check_spec, matches, public_version
from envbuild.solver.enumerate import enumerate_cells
from envbuild.util.names import shown


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
        UsageError: there are not two, one is no component, or it has no such release.

    """
    known = [axis for axis in COMPONENTS if axis not in CHOICES]
    found = []
    for text in texts:
        axis, _, spec = text.partition("=")
        if axis not in known:
            raise UsageError(
                f"{axis!r} is not a component", where="envbuild matrix try", hint="one of: " + ", ".join(known)
            )
        if spec:
            check_spec(matrix.axes[axis], spec, text)
            if not any(matches(matrix.axes[axis], spec, release) for release in matrix.releases[axis]):
                raise UsageError(
                    f"no release of {axis} matches {shown(spec, 80)!r}",
                    where="envbuild matrix try",
                    hint=f"`envbuild matrix {axis}` lists them all",
                )
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
    held = _held(matrix, component, other)
    order = [release.version for release in matrix.releases["python"]]
    for version in reversed(_versions(files, matrix, *axes[0])):
        for with_ in reversed(_versions(files, matrix, *axes[1])):
            pythons = held.get((version, _stand_in(other, with_)), set())
            if pythons or every:
                ordered = tuple(sorted(pythons, key=order.index))
                yield Pair(component=component, version=version, other=other, with_=with_, pythons=ordered)


def _held(matrix: Matrix, component: AxisName, other: AxisName) -> dict[tuple[str, str], set[str]]:
    """Return the Pythons of each pair of releases that some cell holds; of torch, a minor release stands for its patches."""
    held: dict[tuple[str, str], set[str]] = {}
    for each in enumerate_cells(matrix, (component, other, "python")):
        key = (plain(each[component]), _stand_in(other, each[other]))
        held.setdefault(key, set()).add(each["python"])
    return held


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much of the pairs of two axes is tried."""

    component: AxisName
    other: AxisName
    held: int
    """Pairs that some cell holds, those of NVIDIA's images aside."""
    tried: int
    """Of these, in one kind at least."""
    failed: int
    """Of these, those of which a trial failed, or failed with a Python that a cell has."""


def shares(matrix: Matrix, history: History) -> Iterator[Share]:
    """Yield, for each component and torch, and for Megatron and Transformer Engine, how much is tried.

    The other components ask Transformer Engine for nothing.
    """
    place = COMPONENTS[TORCH].place
    axes = [(axis, TORCH) for axis, c in sorted(COMPONENTS.items(), key=lambda each: each[1].place) if c.place > place]
    for component, other in [*axes, ("megatron", "te")]:
        if not COMPONENTS[component].distributions and not COMPONENTS[component].host_sources:
            continue  # an MPI: neither Python nor C++ of it meets torch's
        named = {axis: set(_plain_releases(matrix, axis)) for axis in (component, other)}
        held = {
            pair: pythons
            for pair, pythons in _held(matrix, component, other).items()
            if pair[0] in named[component] and pair[1] in named[other]
        }
        without = _failed_pythons(history, component, other)
        tried = {pair: found for pair in held if (found := history.of({component: pair[0], other: pair[1]}))}
        failed = sum(each.verdict == "failed" or bool(held[p] & without.get(p, set())) for p, each in tried.items())
        yield Share(component=component, other=other, held=len(held), tried=len(tried), failed=failed)


def _failed_pythons(history: History, component: AxisName, other: AxisName) -> dict[tuple[str, str], set[str]]:
    """Return per pair, as `_held` names it, the Pythons with which a trial failed."""
    found: dict[tuple[str, str], set[str]] = {}
    for trial in history.trials():
        if tuple(trial.pair) == (component, other):
            key = (trial.pair[component], _stand_in(other, trial.pair[other]))
            failed = {python for python, verdict in trial.pythons.items() if verdict == "failed"}
            found.setdefault(key, set()).update(failed)
    return found


def _plain_releases(matrix: Matrix, axis: AxisName) -> list[str]:
    releases = [r.version for r in matrix.releases[axis] if "ngc" not in str(r.needs.get("base", ""))]
    return list(dict.fromkeys(_stand_in(axis, version) for version in releases))


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
