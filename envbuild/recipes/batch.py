"""Checking several recipes: files, the recipes of a folder, standard input."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from envbuild.errors import DataError, UsageError
from envbuild.matrix.load import Matrix
from envbuild.recipes.catalog import findings_catalog
from envbuild.recipes.check import check_recipe
from envbuild.recipes.findings import Report
from envbuild.recipes.held import is_known
from envbuild.recipes.model import Kind, Statement
from envbuild.recipes.read import KINDS, is_recipe, read_recipe
from envbuild.util.names import shown

MOST_FILES = 5000
"""Recipes of one folder that are checked."""

_LEFT_OUT = {".git", ".hg", ".tox", ".venv", "venv", "node_modules", "__pycache__", "site-packages"}


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A recipe that was checked."""

    name: str
    kind: str
    """In words: a Dockerfile."""
    key: Kind
    report: Report
    without_cell: frozenset[Statement]
    """Those of `report.unknown` that the matrix lists, but has in no cell."""

    def as_json(self, matrix: Matrix) -> dict[str, Any]:
        """Return the object that `--json` prints for one recipe."""
        report = self.report
        return {
            "file": self.name,
            "kind": self.key,
            "findings": [finding.as_json() for finding in report.findings],
            "statements": [{"line": s.line, "axis": s.axis, "spec": s.spec} for s in report.statements],
            "unknown": [{"line": s.line, "axis": s.axis, "spec": s.spec} for s in report.unknown],
            "not_understood": [{"line": line, "text": text} for line, text in report.not_understood],
            "matrix": matrix.digest,
        }


def check_ignored(matrix: Matrix, ignored: Sequence[str]) -> None:
    """Raise UsageError for a rule that does not exist."""
    known = {rule.id for rule in matrix.rules} | set(findings_catalog())
    for rule in ignored:
        if rule not in known:
            raise UsageError(
                f"there is no rule {shown(rule)!r}",
                where="--ignore",
                hint="a finding shows its rule after its file and line",
            )


def check_all(
    matrix: Matrix,
    places: Sequence[Path],
    *,
    kind: Kind | None = None,
    ignored: Sequence[str] = (),
    unread: list[DataError],
) -> list[Checked]:
    """Check every recipe of `places`.

    Args:
        matrix: what they are checked against.
        places: files, folders, and `-` for standard input.
        kind: what the files are; by default their names and first lines say so.
        ignored: the rules whose findings are left out.
        unread: what could not be read is added here, so that one bad file does not hide what the others hold: a recipe
            that cannot be read or is of no kind that is known, a folder without a recipe.

    """
    done = []
    for place in places:
        try:
            found = [place] if str(place) == "-" or not place.is_dir() else list(_recipes(place))
            if not found:
                raise DataError("the folder holds no recipe", where=str(place), hint="name the files")  # noqa: TRY301
        except DataError as error:
            unread.append(error)
            continue
        for path in found:
            try:
                done.append(_check(matrix, path, kind, ignored))
            except DataError as error:
                unread.append(error)
    return done


def _check(matrix: Matrix, path: Path, kind: Kind | None, ignored: Sequence[str]) -> Checked:
    recipe = read_recipe(matrix, path, kind)
    try:
        report = check_recipe(matrix, recipe)
    except DataError as error:
        raise DataError(error.what, where=error.where or str(path), hint=error.hint) from error
    return Checked(
        name=shown(str(path), 1000),
        kind=KINDS[recipe.kind],
        key=recipe.kind,
        report=replace(report, findings=tuple(f for f in report.findings if f.rule not in ignored)),
        without_cell=frozenset(s for s in report.unknown if is_known(matrix, s)),
    )


def _recipes(folder: Path) -> Iterator[Path]:
    """Yield the files below `folder` whose names are those of recipes, without following links."""
    count = 0
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        for name in sorted(files):
            path = Path(place) / name
            if path.is_symlink() or not path.is_file() or not is_recipe(path):
                continue
            count += 1
            if count > MOST_FILES:
                raise DataError(f"the folder holds more than {MOST_FILES} recipes", where=str(folder))
            yield path
