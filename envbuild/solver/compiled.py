"""Clauses in the form that is kept between runs (`util.compiled`): masks as numbers, and what the order looks up.

Only a matrix that `load_matrix` read has a kept form, by the key of its files. Reasons are not in it: who explains a
conflict compiles the matrix again.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from envbuild.matrix.load import Matrix, kept_key
from envbuild.matrix.model import Release
from envbuild.solver.masks import AxisMasks
from envbuild.solver.season import months_of, untagged_of
from envbuild.util import compiled

if TYPE_CHECKING:
    from envbuild.solver.clauses import Cause, Clauses


def kept_clauses(matrix: Matrix, compile_from_data: "Callable[[Matrix], Clauses]") -> "Clauses":
    """Return the clauses of a matrix, from what is kept of it where something is."""
    key = kept_key(matrix)
    kept = compiled.read("clauses", key) if key else None
    if kept is not None:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return _from_plain(matrix, json.loads(kept[0]), compile_from_data)
    found = compile_from_data(matrix)
    if key:
        compiled.keep("clauses", key, [_plain(found)])
    return found


def _prefixes(version: str) -> list[str]:
    """Return what people write for a version: 2, 2.6, 2.6.0."""
    parts = version.partition("+")[0].split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _plain(found: "Clauses") -> dict[str, Any]:
    matrix = found.matrix
    for i, axis in enumerate(found.axes):
        if axis.scheme == "pep440":
            for release in found.values[i]:
                for text in _prefixes(release.version) if release is not None else ():
                    found.mask(i, text)
    when = [
        [found.number[rule.component] if rule.component else -1]
        + [[found.number[name], found.mask(found.number[name], spec)] for name, spec in rule.when.items()]
        for rule in matrix.rules
    ]
    dated = [(i, axis) for i, axis in enumerate(found.axes) if axis.dated]
    masks = [each.known for each in found._masks]  # noqa: SLF001 - the two are one
    return {
        "values": [[r.version for r in values if r is not None] for values in found.values],
        "implied": {
            axis.name: {
                r.version: r.source for r in found.values[i] if r is not None and not matrix.has(axis.name, r.version)
            }
            for i, axis in enumerate(found.axes)
        },
        "clauses": [clause.literals for clause in found.clauses],
        "tested": [together.literals for together in found.tested],
        "guards": [[axis, list(held.items())] for axis, held in found.guards.items()],
        "named": [named for named, _ in masks],
        "texts": [texts for _, texts in masks],
        "when": when,
        "months": {axis.name: months_of(matrix, axis.name, found.values[i]) for i, axis in dated},
        "untagged": {axis.name: untagged_of(matrix, axis.name, found.values[i]) for i, axis in dated},
        "days": {axis.name: days_of(matrix, axis.name, found.values[i]) for i, axis in dated},
    }


def days_of(matrix: Matrix, axis: str, values: tuple[Release | None, ...]) -> list[int]:
    """Return each value's date as a day number; an undated release, or none, is as old as the axis' oldest."""
    kept: dict[tuple[str, int], list[int]] = vars(matrix).setdefault("_days", {})
    key = (axis, len(values))
    if key not in kept:
        known = [r.date.toordinal() for r in values if r is not None and r.date is not None]
        oldest = min(known, default=0)
        kept[key] = [r.date.toordinal() if r is not None and r.date is not None else oldest for r in values]
    return kept[key]


def _from_plain(matrix: Matrix, kept: Mapping[str, Any], compile_from_data: "Callable[[Matrix], Clauses]") -> "Clauses":
    from envbuild.solver.clauses import Clause, Clauses, TestedTogether

    names = tuple(matrix.axes)
    implied = kept["implied"]
    values = tuple(
        (
            None,
            *(
                Release.trusted(version=version, source=implied[name][version])
                if version in implied[name]
                else matrix.release(name, version)
                for version in versions
            ),
        )
        for name, versions in zip(names, kept["values"], strict=True)
    )
    full = tuple((1 << len(each)) - 1 for each in values)
    axes = tuple(matrix.axes.values())

    def cause(number: int) -> "Cause":
        found: Clauses | None = vars(matrix).get("_compiled_from_data")
        if found is None:
            found = vars(matrix)["_compiled_from_data"] = compile_from_data(matrix)
        return found.clauses[number].cause

    for what in ("months", "untagged", "days"):
        lists = kept[what]
        vars(matrix)[f"_{what}"] = {(name, len(of)): of for name, of in lists.items()}
    vars(matrix)["_when"] = kept["when"]
    return Clauses(
        matrix=matrix,
        names=names,
        number={name: i for i, name in enumerate(names)},
        axes=axes,
        values=values,
        position=tuple({version: i for i, version in enumerate(versions, 1)} for versions in kept["values"]),
        full=full,
        real=tuple(each & ~1 for each in full),
        clauses=tuple(Clause(literals, partial(cause, n)) for n, literals in enumerate(kept["clauses"])),
        tested=tuple(TestedTogether(literals=literals) for literals in kept["tested"]),
        guards={axis: dict(held) for axis, held in kept["guards"]},
        _masks=tuple(map(AxisMasks, axes, values, zip(kept["named"], kept["texts"], strict=True))),
    )
