"""Find what is wrong in a recipe: its statements against the matrix, and what is wrong whatever the versions."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from packaging.markers import Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from envbuild.errors import DataError
from envbuild.matrix.load import Matrix
from envbuild.matrix.packages import impostors
from envbuild.matrix.spec import matches
from envbuild.recipes import rules
from envbuild.recipes.catalog import findings_catalog, variables
from envbuild.recipes.contradictions import contradictions, other_cudas, unlisted_twice
from envbuild.recipes.findings import RecipeFinding, Report, finding_of
from envbuild.recipes.held import (
    DIFFERENT,
    Held,
    StatementKey,
    as_released,
    for_axes,
    for_recipes,
    is_known,
    joined,
    of_source,
    pin_of,
)
from envbuild.recipes.model import Recipe, Stage, Statement

_PYTHONS = tuple(f"3.{minor}" for minor in range(6, 21))
"""What a marker is asked for where a recipe names a range, or nothing."""


def check_recipe(matrix: Matrix, recipe: Recipe) -> Report:
    """Return every finding in `recipe`."""
    matrix = for_axes(matrix) if recipe.kind == "toml" else for_recipes(matrix)
    pythons = tuple(dict.fromkeys(s.spec for s in recipe.statements if s.axis == "python" and not s.marker))
    understood = {s: as_released(matrix, s, pythons) for s in recipe.statements}
    asked = {StatementKey(read): read for read in understood.values()}
    if len(asked) > DIFFERENT:
        raise DataError(
            f"the recipe states more than {DIFFERENT} different versions", hint="check its parts one by one"
        )
    listed = {key for key, read in asked.items() if is_known(matrix, read)}
    unlisted = [read for read in understood.values() if StatementKey(read) not in listed and read.installed]
    lines = joined(recipe, [read for read in understood.values() if StatementKey(read) in listed])
    known = list(lines)
    effort: dict[str, int] = {}
    plain, built = Held(matrix, lines, effort), Held(of_source(matrix), lines, effort)
    # a gcc that a script installs is a second one; the axis is about the OS's own
    argued = [s for s in known if not s.plain and (s.axis != "gcc" or recipe.kind == "toml")]
    in_no_cell = {s for s in argued if not plain.fits([pin_of(s)])}
    argued_set = set(argued) - in_no_cell
    together: dict[RecipeFinding, None] = {}
    has_download = "/.flashattn/nvidia" in recipe.text  # what FA3's setup.py would download
    for whole in _views(recipe, [*known, *unlisted]):
        view = [s for s in whole if s in lines]
        together |= dict.fromkeys(unlisted_twice(whole, [s for s in whole if s not in lines]))
        # PyPI's core wheels say nothing of a build from source
        held = built if any(s.axis == "te" and s.source for s in view) else plain
        refused = list(contradictions(held, recipe, [s for s in view if s in argued_set]))
        refused += other_cudas([s for s in view if s not in argued_set], view)
        if recipe.kind != "toml":
            stated = {line for finding in refused for line in finding.lines}
            refused += [f for f in rules.toolkits(matrix, recipe, view, in_no_cell) if not stated >= {*f.lines}]
        together |= dict.fromkeys([*refused, *rules.drivers(plain, recipe, view, refused)])
        together |= dict.fromkeys(rules.unplaced(matrix, recipe, view) if recipe.kind != "toml" else ())
        together |= dict.fromkeys(rules.compilers(matrix, recipe, view) if recipe.kind != "toml" else ())
        together |= dict.fromkeys(rules.fetches(matrix, view) if recipe.kind != "toml" and not has_download else ())
    found = [
        *together,
        *_by_itself(matrix, recipe),
        *_by_variable(matrix, recipe, known),
    ]
    found.sort(key=lambda finding: (finding.line, finding.rule))
    return Report(
        not_understood=tuple(sorted(recipe.effort.not_understood.items())),
        findings=tuple(found),
        statements=tuple(recipe.statements),
        unknown=tuple(
            s
            for s, read in understood.items()
            if StatementKey(read) not in listed
            or (read in in_no_cell and s.axis != "driver")  # of which drivers speaks
        ),
    )


def _views(recipe: Recipe, statements: Sequence[Statement]) -> Iterator[list[Statement]]:
    """Yield the statements that hold together: those of a stage and what it is built on, under one marker."""
    bases = [stage.base for stage in recipe.stages]
    markers = {s.marker for s in statements if s.marker and _may_hold(s.marker, statements)}
    lasts: list[Stage | None] = [stage for stage in recipe.stages if stage not in bases]
    for last in lasts or [None]:
        stages = [*(last.chain() if last else ()), None]
        for marker in sorted(markers) or [""]:
            yield [s for s in statements if recipe.stage(s.line) in stages and s.marker in {"", marker}]


def _may_hold(marker: str, statements: Sequence[Statement]) -> bool:
    """Return whether `marker` holds on an x86_64 Linux with a Python that the recipe states or admits."""
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
    stated = [s.spec for s in statements if s.axis == "python" and not s.marker]
    pythons = [each for each in _PYTHONS if not stated or any(_admits(spec, each) for spec in stated)]
    try:
        return any(
            Marker(marker).evaluate(linux | {"python_version": each, "python_full_version": f"{each}.0"})
            for each in pythons
        )
    except (UndefinedComparison, UndefinedEnvironmentName):
        return False


def _admits(spec: str, python: str) -> bool:
    """Return whether a Python, major.minor, is one that `spec` speaks of; one that is not understood admits all."""
    if re.fullmatch(r"\d+\.\d+(?:\.\d+)*", spec):
        return python == ".".join(spec.split(".")[:2])
    try:
        wanted = SpecifierSet(spec)
    except InvalidSpecifier:
        return True
    return any(f"{python}.{patch}" in wanted for patch in (0, 99))


def _by_itself(matrix: Matrix, recipe: Recipe) -> Iterator[RecipeFinding]:
    catalog = findings_catalog()
    for noted in recipe.noted:
        kind = catalog[noted.rule]
        yield finding_of(kind.id, noted.line, f"{noted.what}: {kind.why}" if noted.what else kind.why)
    known = impostors(matrix)
    for name, line in recipe.packages:
        if name in known:
            impostor = known[name]
            yield RecipeFinding(
                line=line,
                lines=(line,),
                rule="recipe-impostor",
                why=impostor.why,
                source=impostor.source,
                todo=f"install {impostor.instead} at a commit",
            )


def _by_variable(matrix: Matrix, recipe: Recipe, known: Sequence[Statement]) -> Iterator[RecipeFinding]:
    catalog = variables()
    for name, _, line in recipe.variables:
        variable = catalog.get(name)
        if variable is None:
            continue
        stage = recipe.stage(line)
        if variable.read_by is None:
            todo = f"set {variable.instead}" if variable.instead else None
            yield finding_of("recipe-unread-variable", line, f"nothing reads {name}", source=variable.source, todo=todo)
        elif variable.toolkit and stage and stage.toolkit is False:
            yield finding_of(
                "recipe-toolkit-variable", line, f"{name}: {findings_catalog()['recipe-toolkit-variable'].why}"
            )
        for axis, spec in variable.only_with.items():
            stated = [s for s in known if s.axis == axis and _in_one_image(stage, recipe.stage(s.line))]
            if stated and not any(_may_be(matrix, s, spec) for s in stated):
                yield finding_of(
                    "recipe-unread-variable",
                    line,
                    f"{axis} {stated[0].spec} (line {stated[0].line}) does not read {name}: it is read by {variable.read_by}",
                    source=variable.source,
                )


def _in_one_image(one: Stage | None, other: Stage | None) -> bool:
    return one is None or other is None or one in other.chain() or other in one.chain()


def _may_be(matrix: Matrix, statement: Statement, spec: Any) -> bool:
    axis = matrix.axes[statement.axis]
    if matrix.has(statement.axis, statement.spec):  # a tag, not the beginning of other versions
        return matches(axis, spec, matrix.release(statement.axis, statement.spec))
    return any(
        matches(axis, statement.spec, release) and matches(axis, spec, release)
        for release in matrix.releases[statement.axis]
    )
