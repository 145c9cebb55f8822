"""A TOML of axes, or of a stack."""

import re
from pathlib import Path
from typing import Any

import tomli

from envbuild.errors import DataError
from envbuild.matrix.load import Matrix
from envbuild.recipes import pip
from envbuild.recipes.model import Recipe
from envbuild.recipes.reader import Reader
from envbuild.recipes.syntax import Word
from envbuild.util.names import shown


def load(text: str, where: str) -> dict[str, Any]:
    """Return a TOML text as a table.

    Raises:
        DataError: it is no TOML.

    """
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
        raise DataError(f"the recipe is not TOML: {shown(str(error))}", where=where) from error


def read(matrix: Matrix, recipe: Recipe, path: Path, text: str) -> None:
    """Read a TOML of axes or a stack.

    Raises:
        DataError: it is no TOML, or holds what is no axis.

    """
    data = load(text, str(path))
    next_to = ("environment", "python") if isinstance(data.get("python"), list) else ("environment",)
    if "stated" in data and "repository" in data:
        from envbuild.stacks.load import load_stack

        name, table = "stated", dict[str, object](load_stack(str(path)).axes)
    elif "axes" in data:
        name, table = "axes", data["axes"]
    else:
        name, table = "", {key: value for key, value in data.items() if key not in next_to}
    for key, content in ((name, table), ("environment", data.get("environment", {}))):
        if not isinstance(content, dict):
            raise DataError(
                f"{key} is not a table", where=str(path), hint=f"write [{key}], then one name and text per line"
            )
    lines = Lines(recipe.lines)
    for axis, spec in table.items():
        if axis in matrix.axes and not isinstance(spec, str):
            raise DataError(
                f"the version of {axis} is not in quotes",
                where=str(path),
                hint=f'write {axis} = "…", with the version between the quotes',
            )
        if axis not in matrix.axes or not isinstance(spec, str):
            raise DataError(
                f"{shown(axis)} is not an axis",
                where=str(path),
                hint="axes: " + ", ".join(sorted(matrix.axes)),
            )
        recipe.state(axis, spec, lines.of(name, axis))
    reader = Reader(matrix, recipe)
    for variable, value in data.get("environment", {}).items():
        reader.set_variable(variable, str(value), lines.of("environment", variable))
    first = lines.of("", "python")
    for wanted in data["python"] if "python" in next_to else ():
        word = str(wanted)
        line = lines.quoted(word, first)
        pip.read(recipe, [Word(part, line) for part in ([word] if ";" in word or "@" in word else word.split())], [])


class Lines:
    """Where the keys and the texts of a TOML stand, found in one pass."""

    def __init__(self, lines: list[str]) -> None:
        self._keys: dict[tuple[str, str], int] = {}
        self._texts: dict[str, list[int]] = {}
        inside = ""
        for number, text in enumerate(lines, 1):
            if header := re.match(r"\s*\[+\s*([^\[\]]+?)\s*\]+\s*(?:#.*)?$", text[:300]):
                inside = header[1].replace('"', "")
                continue
            key = re.match(r"""\s*["']?([\w.-]+)["']?\s*(?:\.\s*["']?([\w.-]+)["']?\s*)?=""", text[:300])
            if key:
                self._add(inside, key[1], number)
                if not inside and "." in key[1]:
                    table, _, name = key[1].partition(".")
                    self._add(table, name, number)
                elif not inside and key[2]:
                    self._add(key[1], key[2], number)
                if re.search(r"=\s*\{", text[:300]):
                    for inner in re.findall(r"""[{,\s]["']?([\w-]+)["']?\s*=""", text[:10_000]):
                        self._add(f"{inside}.{key[1]}".strip("."), inner, number)
            for quoted in re.findall(r"\"([^\"]{1,1000})\"|'([^']{1,1000})'", text[:10_000]):
                self._texts.setdefault(quoted[0] or quoted[1], []).append(number)

    def _add(self, table: str, key: str, number: int) -> None:
        self._keys.setdefault((table, key), number)

    def of(self, table: str, key: str) -> int:
        """Return the line of `key` in `table`; 1 where it is not found."""
        return self._keys.get((table, key), 1)

    def quoted(self, text: str, first: int = 1) -> int:
        """Return the line of `text` in quotes, from line `first` on; `first` where it is not found."""
        return next((n for n in self._texts.get(text, ()) if n >= first), first)
