"""The matrix as clauses over small finite domains.

Every axis has one value: "not in use" (bit 0 of a mask) or one of its releases, in ascending order of preference. Every
release's relations and every refusing rule become clauses, each a disjunction of "this axis has its value in this
set". Sets are integers used as bit masks, so thousands of clauses propagate in milliseconds.
"""

import datetime as dt
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Literal

from envbuild.components import COMPONENTS
from envbuild.matrix.cell import Cell
from envbuild.matrix.fleet import GPU
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Axis, AxisName, Release, Rule, Spec
from envbuild.matrix.spec import matches, version_key
from envbuild.solver.masks import AxisMasks
from envbuild.solver.season import with_later_patches
from envbuild.util.frozen import Frozen, replace

UNUSED = 1
"""The mask of the value "not in use"."""


class Cause(Frozen):
    """Where a clause comes from: a rule, what releases state of other axes, or how derived axes work."""

    kind: Literal["rule", "needs", "with", "without", "fixes", "derived", "asked"]
    axis: AxisName = ""
    """The axis whose releases state it (for `derived`: the derived axis; for `asked`: of releases taken only when named)."""
    releases: tuple[Release, ...] = ()
    target: AxisName = ""
    spec: Spec = ""
    rule: Rule | None = None


class Clause:
    """At least one of the axes has its value in its mask."""

    __slots__ = ("_cause", "literals")

    def __init__(self, literals: Sequence[tuple[int, int]], cause: "Cause | Callable[[], Cause]") -> None:
        self.literals = literals
        self._cause = cause

    @property
    def cause(self) -> "Cause":
        """Where it comes from; of a compiled form that was kept, found out when it is asked for."""
        if not isinstance(self._cause, Cause):
            self._cause = self._cause()
        return self._cause


def bits(mask: int) -> Iterator[int]:
    """Yield the positions of the set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class TestedTogether(Frozen):
    """A tested-with rule, compiled: the releases that it names on each axis of its `when`."""

    literals: Sequence[tuple[int, int]]


class Clauses(Frozen):
    """A matrix compiled for solving; build one with `compile_matrix`."""

    matrix: Matrix
    names: tuple[AxisName, ...]
    number: Mapping[AxisName, int]
    axes: tuple[Axis, ...]
    values: tuple[tuple[Release | None, ...], ...]
    """Per axis: None (not in use), then its releases, best last."""
    position: tuple[Mapping[str, int], ...]
    """Per axis: version -> index in `values`."""
    full: tuple[int, ...]
    real: tuple[int, ...]
    clauses: tuple[Clause, ...]
    tested: tuple[TestedTogether, ...]
    guards: Mapping[int, Mapping[int, int]]
    """Per axis: a release that is taken only when a pin names it -> the clause that keeps it out."""
    _masks: tuple[AxisMasks, ...]

    def mask(self, axis: int, spec: Spec) -> int:
        """Return the releases of `axis` that `spec` matches; a fleet where it matches each of its GPUs."""
        return self._masks[axis].mask(spec)

    def touched(self, axis: int, spec: Spec) -> int:
        """Return the releases of `axis` that a rule about `spec` applies to; a fleet where it is about one of its GPUs."""
        return self._masks[axis].touched(spec)

    def tested_with(self, rule: Rule) -> Iterator[tuple[int, int]]:
        """Yield per axis of a tested-with rule the releases that it counts for: those that it names, and later patches of them."""
        exact = any(name in COMPONENTS and COMPONENTS[name].tested_by_release for name in rule.when)
        for name, spec in rule.when.items():
            axis = self.number[name]
            mask = self.mask(axis, spec)
            yield axis, mask if exact or not self.axes[axis].dated else with_later_patches(self.values[axis], mask)

    def pinned(self, axis: int, text: str) -> int:
        """Return the releases of `axis` that a pin of `text` leaves: those of that name, else those that it matches.

        A name is no prefix: apex 25.09 is the tag, not a commit after it, and 3.0.0 is not its betas.
        """
        return self._masks[axis].named(text) or self._masks[axis].mask(text)

    def named(self, axis: int, text: str) -> int:
        """Return the guarded releases of `axis` that a pin of `text` names: by version, alias, commit or a glob."""
        release_names = self.guards.get(axis)
        if not release_names or re.match(r"[<>=!~]", text) or text in {"any", "auto", "none"}:
            return 0
        mask = 0
        for value in release_names:
            release = self.values[axis][value]
            if release is not None and (
                text in (release.version, *release.aliases)
                or (release.commit is not None and len(text) >= 7 and release.commit.startswith(text))
                # a range or a prefix includes a release without naming it; a glob on names is meant
                or (self.axes[axis].scheme == "name" and matches(self.axes[axis], text, release))
            ):
                mask |= 1 << value
        return mask

    def without_guards(self, named: Mapping[int, int]) -> "Clauses":
        """Return the same clauses, less those that keep out what `named` (axis -> releases) names."""
        lifted = [
            number for axis, mask in named.items() for value, number in self.guards[axis].items() if mask >> value & 1
        ]
        if not lifted:
            return self
        clauses = list(self.clauses)
        for number in lifted:
            axis = clauses[number].literals[0][0]
            clauses[number] = Clause(((axis, self.full[axis]),), clauses[number].cause)  # always true
        return replace(self, clauses=tuple(clauses))

    @cached_property
    def unguarded(self) -> "Clauses":
        """The same clauses, less those that keep out what is not named."""
        return self.without_guards({axis: sum(1 << value for value in held) for axis, held in self.guards.items()})

    def cell(self, values: Sequence[int]) -> Cell:
        """Return the cell of `values`, one index per axis."""
        chosen = {
            name: release
            for name, releases, value in zip(self.names, self.values, values, strict=True)
            if (release := releases[value]) is not None
        }
        return Cell(
            versions={name: r.version for name, r in chosen.items()},
            commits={name: r.commit for name, r in chosen.items() if r.commit},
        )

    def domains(self, pinned: Mapping[int, int]) -> list[int]:
        """Return what each axis may be under `pinned` (axis -> mask) and the axes' own `use`, before any clause."""
        result = []
        for i, axis in enumerate(self.axes):
            if axis.use == "always":
                mask = self.real[i]
            elif axis.use in {"asked", "host"} and i not in pinned:
                mask = UNUSED
            else:
                mask = self.full[i]
            result.append(mask & pinned.get(i, mask))
        return result


def _ordered(axis: Axis, releases: Sequence[Release]) -> list[Release]:
    if axis.dated:
        return sorted(releases, key=lambda r: r.date or dt.date.min)
    if axis.open:
        from packaging.version import Version

        return sorted(releases, key=lambda r: version_key(r.version) or Version("0"))
    return list(releases) if axis.scheme == "pep440" else list(reversed(releases))


def _implied(matrix: Matrix) -> dict[AxisName, list[Release]]:
    """Releases of derived axes that a `fixes` names and the axis does not list; they carry the fixer's source."""
    found: dict[AxisName, dict[str, Release]] = {}
    for releases in matrix.releases.values():
        for release in releases:
            for name, version in release.fixes.items():
                if not matrix.has(name, version):
                    found.setdefault(name, {}).setdefault(version, Release(version=version, source=release.source))
    return {name: list(versions.values()) for name, versions in found.items()}


class _Compiler:
    def __init__(self, matrix: Matrix, extra: Mapping[AxisName, Release], kept: Clauses | None) -> None:
        self.names = tuple(matrix.axes)
        self.number = {name: i for i, name in enumerate(self.names)}
        self.axes = tuple(matrix.axes.values())
        implied = _implied(matrix)
        self.values: tuple[tuple[Release | None, ...], ...] = tuple(
            (
                None,
                *_ordered(
                    axis,
                    [
                        *matrix.releases.get(name, ()),
                        *implied.get(name, ()),
                        *([extra[name]] if name in extra else []),
                    ],
                ),
            )
            for name, axis in matrix.axes.items()
        )
        self.position = tuple({r.version: i for i, r in enumerate(vs) if r is not None} for vs in self.values)
        self.full = tuple((1 << len(vs)) - 1 for vs in self.values)
        self.real = tuple(full & ~UNUSED for full in self.full)
        # the axes that have nothing extra keep their masks, which are most of the work
        self.masks = tuple(
            kept._masks[i]  # noqa: SLF001
            if kept is not None and name not in extra
            else AxisMasks(axis, self.values[i])
            for i, (name, axis) in enumerate(matrix.axes.items())
        )

    def mask(self, name: AxisName, spec: Spec) -> int:
        return self.masks[self.number[name]].mask(spec)

    def touched(self, name: AxisName, spec: Spec) -> int:
        return self.masks[self.number[name]].touched(spec)

    def needed(self, name: AxisName, spec: Spec, by: Iterable[AxisName]) -> int:
        """Return what `spec`, which releases of the axes `by` need, leaves of an axis: what it matches, or no release.

        One GPU of a fleet is enough for a component that the others go without.
        """
        some = name == GPU and any(axis in COMPONENTS and COMPONENTS[axis].sms for axis in by)
        return (self.touched(name, spec) if some else self.mask(name, spec)) | UNUSED

    def releases(self) -> Iterator[Clause]:
        """Relations that releases state; releases of one axis that state the same share a clause."""
        groups: dict[tuple[str, int, int, int, Spec], int] = {}
        fixers: dict[int, dict[int, int]] = {}
        for a, values in enumerate(self.values):
            for i, release in enumerate(values):
                if release is None:
                    continue
                bit = 1 << i
                relations: list[tuple[str, int, int, Spec]] = [
                    ("needs", self.number[name], self.needed(name, spec, (self.names[a],)), spec)
                    for name, spec in release.needs.items()
                ]
                relations += [("with", b, self.real[b], "") for b in map(self.number.__getitem__, release.with_)]
                relations += [("without", self.number[name], UNUSED, "") for name in release.without]
                for name, version in release.fixes.items():
                    b = self.number[name]
                    relations.append(("fixes", b, 1 << self.position[b][version], version))
                    fixers.setdefault(b, {})[a] = fixers.setdefault(b, {}).get(a, 0) | bit
                for kind, b, mask, spec in relations:
                    key = (kind, a, b, mask, spec)
                    groups[key] = groups.get(key, 0) | bit
        for (kind, a, b, mask, spec), who in groups.items():
            clause = self._clause(
                [(a, self.full[a] & ~who), (b, mask)],
                Cause(
                    kind=kind,  # type: ignore[arg-type]
                    axis=self.names[a],
                    releases=tuple(r for i in bits(who) if (r := self.values[a][i]) is not None),
                    target=self.names[b],
                    spec=spec,
                ),
            )
            if clause:
                yield clause
        for d, axis in enumerate(self.axes):
            if axis.use == "derived":
                # in use only where something fixes it
                literals = [(d, UNUSED), *fixers.get(d, {}).items()]
                clause = self._clause(literals, Cause(kind="derived", axis=axis.name))
                if clause:
                    yield clause

    def rule(self, rule: Rule) -> Iterator[Clause]:
        body = [(self.number[n], self.full[self.number[n]] & ~self.touched(n, spec)) for n, spec in rule.when.items()]
        if rule.component and rule.component not in rule.when:
            body.append((self.number[rule.component], UNUSED))
        cause = Cause(kind="rule", rule=rule)
        heads: list[list[tuple[int, int]]] = [[self._needs(n, spec, rule)] for n, spec in rule.needs.items()]
        # one whole alternative must hold: distribute "or" over "and"; alternatives are few and short
        if rule.any_of:
            heads += [
                [self._needs(n, spec, rule) for n, spec in choice]
                for choice in itertools.product(*(alternative.items() for alternative in rule.any_of))
            ]
        heads += [[(self.number[n], self.real[self.number[n]])] for n in rule.with_]
        heads += [[(self.number[n], UNUSED)] for n in rule.without]
        heads += list(self._same(rule.same))
        for head in heads:
            clause = self._clause([*body, *head], cause)
            if clause:
                yield clause

    def _needs(self, name: AxisName, spec: Spec, rule: Rule) -> tuple[int, int]:
        return self.number[name], self.needed(name, spec, rule.when)

    def _same(self, names: Sequence[AxisName]) -> Iterator[list[tuple[int, int]]]:
        groups: dict[AxisName, dict[object, int]] = {}
        for name in names:
            groups[name] = {}
            for i, release in enumerate(self.values[self.number[name]]):
                if release is not None:
                    key = major_minor(release.version)
                    groups[name][key] = groups[name].get(key, 0) | 1 << i
        for first, second in itertools.combinations(names, 2):
            a, b = self.number[first], self.number[second]
            for key, mask in groups[first].items():
                yield [(a, self.full[a] & ~mask), (b, UNUSED | groups[second].get(key, 0))]
            # values that only the second has need no separate clause: the first's clauses already exclude them

    def _clause(self, literals: Iterable[tuple[int, int]], cause: Cause) -> Clause | None:
        merged: dict[int, int] = {}
        for a, mask in literals:
            merged[a] = merged.get(a, 0) | mask
        if any(mask == self.full[a] for a, mask in merged.items()):
            return None  # always true
        return Clause(tuple((a, mask) for a, mask in merged.items() if mask), cause)


def major_minor(version: str) -> object:
    """Return what two versions share when their major.minor agree; a name such as `cpu` stands for itself."""
    parsed = version_key(version)
    return version if parsed is None else (parsed.major, parsed.minor)


def compile_matrix(matrix: Matrix, extra: Mapping[AxisName, Release] | None = None) -> Clauses:
    """Compile `matrix` once; `extra` gives unlisted releases of open axes (an exact driver version) for one request.

    Without `extra` the result is kept on the matrix, which is immutable.
    """
    kept: Clauses | None = vars(matrix).get("_clauses")
    if kept is None:
        from envbuild.solver.compiled import kept_clauses

        kept = kept_clauses(matrix, compile_from_data)
        vars(matrix)["_clauses"] = kept
    return _compile(matrix, extra, kept) if extra else kept


def compile_from_data(matrix: Matrix) -> Clauses:
    """Compile `matrix` from its releases and rules, whatever is kept of it."""
    return _compile(matrix, {}, None)


def _compile(matrix: Matrix, extra: Mapping[AxisName, Release], kept: Clauses | None) -> Clauses:
    compiler = _Compiler(matrix, extra, kept)
    clauses = [*compiler.releases()]
    guards: dict[int, dict[int, int]] = {}
    for axis, values in enumerate(compiler.values):
        for value, release in enumerate(values):
            if release is not None and release.asked:
                guards.setdefault(axis, {})[value] = len(clauses)
                cause = Cause(kind="asked", axis=compiler.names[axis], releases=(release,))
                clauses.append(Clause(((axis, compiler.full[axis] & ~(1 << value)),), cause))
    for rule in matrix.rules:
        if rule.refuses:
            clauses += compiler.rule(rule)
    made = Clauses(
        matrix=matrix,
        names=compiler.names,
        number=compiler.number,
        axes=compiler.axes,
        values=compiler.values,
        position=compiler.position,
        full=compiler.full,
        real=compiler.real,
        clauses=tuple(clauses),
        tested=(),
        guards=guards,
        _masks=compiler.masks,
    )
    tested = []
    for rule in matrix.rules:
        if rule.kind == "tested-with":
            literals = tuple(made.tested_with(rule))
            if all(mask for _, mask in literals):
                tested.append(TestedTogether(literals=literals))
    return replace(made, tested=tuple(tested))
