"""Check statements against the matrix: each question once, and only as many as a check can wait for."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Self

from envbuild.errors import DataError, UsageError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, BaseFacts, Release, Rule
from envbuild.recipes.model import (
    ARCHITECTURES,
    Branch,
    Recipe,
    Statement,
    are_same,
    is_known_with,
    may_hold_with,
)
from envbuild.solver.asked import ReadRequest, read_request
from envbuild.solver.clauses import compile_matrix
from envbuild.solver.conflict import Conflict, explain_conflict
from envbuild.solver.search import solvable

DIFFERENT = 200
"""How many different versions a recipe may state. Real recipes state 20."""


_PLACES = 2000
"""In how many places (stages, arms of a choice) a recipe may state versions."""


_SOLVED = 400
"""How many sets of versions are checked against the matrix for one recipe: 2 ms each. Real recipes need 60."""


_PAIRED = 200_000
"""How many pairs of lines are compared by the choices that they stand in."""


_OF_CPU_BUILDS = {"cpu-without-nvcc"}
"""What a CPU build of torch has no use for; a machine or an image that has it is no contradiction."""


def _without(matrix: Matrix, dropped: Callable[[Rule], bool]) -> Matrix:
    return replace(matrix, rules=tuple(rule for rule in matrix.rules if not dropped(rule)))


# Kept, for the next recipe: what is compiled of a matrix is kept on it.
@lru_cache(maxsize=2)
def for_axes(matrix: Matrix) -> Matrix:
    """Return the matrix that a TOML of axes is checked against; it asks for one of envbuild's own cells."""
    return _without(matrix, lambda rule: rule.id in _OF_CPU_BUILDS)


@lru_cache(maxsize=2)
def of_source(matrix: Matrix) -> Matrix:
    """Return the matrix that a Transformer Engine compiled by the recipe is checked against."""
    return _without(matrix, lambda rule: rule.topic == "te-cuda-major")


@lru_cache(maxsize=2)
def for_recipes(matrix: Matrix) -> Matrix:
    """Return the matrix that a Dockerfile, a script or a requirements file is checked against.

    It may start from any image, which may hold any nvcc, and may put its own Transformer Engine and apex in the place of an
    NGC image's.
    """
    matrix = _without(matrix, lambda rule: rule.id in _OF_CPU_BUILDS or rule.topic == "needs-nvcc")
    image = Release(version="another-image", source="https://hub.docker.com/", facts=BaseFacts(kind="root"))
    rules = [_replaceable(rule) if rule.topic == "ngc-fixed" else rule for rule in matrix.rules]
    return replace(matrix, rules=tuple(rules), releases={**matrix.releases, "base": (*matrix.releases["base"], image)})


def _replaceable(rule: Rule) -> Rule:
    """Return an NGC image's rule without the components that a recipe may build again in it."""
    own = {"te", "apex"}
    return rule.model_copy(
        update={
            "needs": {axis: spec for axis, spec in rule.needs.items() if axis not in own},
            "without": tuple(axis for axis in rule.without if axis not in own),
        }
    )


class StatementKey(tuple[object, ...]):
    """What makes two statements the same, wherever they stand."""

    __slots__ = ()

    def __new__(cls, s: Statement) -> Self:
        return super().__new__(cls, (s.axis, s.spec, s.path, s.of == ARCHITECTURES))


def joined(recipe: Recipe, statements: Iterable[Statement]) -> dict[Statement, tuple[int, ...]]:
    """Return the first of each group of statements that differ in their lines alone, and all its lines."""
    groups: dict[tuple[object, ...], list[Statement]] = {}
    for s in statements:
        stage = recipe.stage(s.line)
        groups.setdefault((replace(s, line=0), id(stage)), []).append(s)
    if len(groups) > _PLACES:
        raise DataError(f"the recipe states versions in more than {_PLACES} places", hint="check its parts one by one")
    return {each[0]: tuple(s.line for s in each) for each in groups.values()}


def as_released(matrix: Matrix, statement: Statement, pythons: tuple[str, ...] = ()) -> Statement:
    """Return the statement with its release spelled as the matrix has it; the newest is one for one of `pythons`."""
    if statement.newest:
        spec = _newest(matrix, statement.axis, pythons)
    else:
        spec = _spelled(matrix, statement.axis).get(statement.spec)
    return replace(statement, spec=spec) if spec else statement


@lru_cache(maxsize=64)
def _newest(matrix: Matrix, axis: AxisName, pythons: tuple[str, ...]) -> str | None:
    """Return what pip or git would install today, as far as the matrix knows: pip takes one that the Python runs."""
    listed = [r for r in matrix.releases.get(axis, ()) if r.date and (axis != "torch" or r.facts.index == "pypi")]
    listed.sort(key=lambda r: (r.date, r.version), reverse=True)
    held = Held(matrix, {}, {})
    stated = [Pin(axis="python", spec=spec, origin="python") for spec in pythons[:4]]
    known = [pin for pin in stated if _is_listed(matrix, pin)]
    for release in listed[:40]:
        pin = Pin(axis=axis, spec=release.version, origin=axis)
        if not known or any(held.fits([pin, python]) for python in known):
            return release.version
    return None


@lru_cache(maxsize=64)
def _spelled(matrix: Matrix, axis: AxisName) -> dict[str, str]:
    """Return the releases that have another version on PyPI than in the matrix, by that."""
    named = ((getattr(r.facts, "pypi", None), r.version) for r in reversed(matrix.releases.get(axis, ())))
    return {pypi: version for pypi, version in named if pypi and pypi != version}


def pin_of(statement: Statement) -> Pin:
    # an extension's nvcc has to be torch's CUDA, so what is stated of one is asked of the other
    axis = "cuda" if statement.axis == "nvcc" else statement.axis
    minor = re.fullmatch(r"(\d+\.\d+)(?:\.\d+)*", statement.spec) if statement.axis == "nvcc" else None
    return Pin(axis=axis, spec=minor[1] if minor else statement.spec, origin=statement.axis)


_CUDA_RECIPE = Pin(axis="cuda", spec=">=1", origin="(a recipe for GPUs)")
"""Leaves the CPU builds of torch out, which no recipe means that does not say so."""


def is_known(matrix: Matrix, statement: Statement) -> bool:
    """Return whether the matrix lists a release that the statement may be of."""
    return _is_listed(matrix, pin_of(statement))


def _is_listed(matrix: Matrix, pin: Pin) -> bool:
    try:
        read_request(matrix, Request(pins=(pin,)))
    except UsageError:
        return False
    return True


def is_cpu(stated: Statement | Pin) -> bool:
    return (stated.axis == "cuda" and stated.spec in {"cpu", "none"}) or stated.spec.endswith("+cpu")


def names_a_guarded_release(matrix: Matrix, pin: Pin) -> bool:
    compiled = compile_matrix(matrix)
    return bool(compiled.named(compiled.number[pin.axis], pin.spec))


def _asked(matrix: Matrix, pins: Sequence[Pin]) -> ReadRequest:
    cpu = any(map(is_cpu, pins))
    # a pin of nvcc is checked against the axis cuda; with a CPU build an nvcc contradicts nothing
    own = [pin for pin in pins if not (cpu and pin.origin == "nvcc")]
    # a recipe may clone Megatron-LM, or have pip compile it
    return read_request(matrix, Request(pins=(*own, *(() if cpu else (_CUDA_RECIPE,))), repository=True))


@lru_cache(maxsize=1024)
def _fits(matrix: Matrix, pins: tuple[Pin, ...]) -> bool:
    """Return whether some cell has all of `pins`; kept, for the recipes of a folder state much the same."""
    asked = _asked(matrix, pins)
    return solvable(*asked.of([pin for pin, _, _ in asked.masks]))


class Held:
    """A matrix and what has been checked against it: the same question is asked once, and their number has a bound."""

    def __init__(self, matrix: Matrix, lines: Mapping[Statement, tuple[int, ...]], effort: dict[str, int]) -> None:
        self.matrix = matrix
        self.lines = lines
        """Every line on which a statement stands."""
        self._effort = effort
        self._fits: dict[frozenset[Pin], bool] = {}
        self._conflicts: dict[frozenset[Pin], Conflict] = {}

    def _spend(self, what: str, limit: int) -> None:
        self._effort[what] = self._effort.get(what, 0) + 1
        if self._effort[what] > limit:
            raise DataError(
                "the recipe states too many different versions to compare", hint="check its parts one by one"
            )

    def lines_of(self, statements: Iterable[Statement]) -> tuple[int, ...]:
        """Return every line on which one of `statements` stands."""
        return tuple(line for s in statements for line in self.lines[s])

    def fits(self, pins: Sequence[Pin]) -> bool:
        """Return whether some cell has all of `pins`."""
        key = frozenset(pins)
        if key not in self._fits:
            self._spend("solved", _SOLVED)
            self._fits[key] = _fits(self.matrix, tuple(pins))
        return self._fits[key]

    def conflict(self, pins: Sequence[Pin]) -> Conflict:
        """Return why no cell has all of `pins`."""
        key = frozenset(pins)
        if key not in self._conflicts:
            self._spend("solved", _SOLVED)
            self._conflicts[key] = explain_conflict(_asked(self.matrix, pins), first_only=True)
        return self._conflicts[key]

    def compatible(
        self, some: Sequence[Statement], others: Sequence[Statement], *, known: bool = False
    ) -> list[list[Statement]]:
        """Return those of `some` and of `others` that may hold together with one of the other, or nothing where none do.

        `some` and `others` are of one axis each. `known` asks for those that are known to hold together.
        """
        kept: tuple[dict[Statement, None], dict[Statement, None]] = ({}, {})
        branches = [dict.fromkeys(s.branch for s in each) for each in (some, others)]
        meeting: tuple[set[Branch], set[Branch]] = (set(), set())
        same = are_same(some[0], others[0])
        for one, other in itertools.product(*branches):
            self._spend("paired", _PAIRED)
            if is_known_with(one, other, same=same) if known else may_hold_with(one, other):
                meeting[0].add(one)
                meeting[1].add(other)
        for each, met, into in zip((some, others), meeting, kept, strict=True):
            into.update(dict.fromkeys(s for s in each if s.branch in met))
        return [list(kept[0]), list(kept[1])] if kept[0] and kept[1] else []
