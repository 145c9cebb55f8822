"""The dependencies of a pyproject.toml: of the project, its extras, groups and build, and poetry's."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.recipes import axes, pip
from envbuild.recipes.model import Recipe

_LONGEST = 1000
_MOST = 5000
"""Requirements of one file that are read."""


def _table(data: Any, *names: str) -> dict[str, Any]:
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def _lists(data: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield the lists of requirements, each with the choice that it is."""
    project = _table(data, "project")
    named = [("", project.get("dependencies"))]
    named += [("extra " + name, wanted) for name, wanted in _table(project, "optional-dependencies").items()]
    named += [("group " + name, wanted) for name, wanted in _table(data, "dependency-groups").items()]
    named += [("build", _table(data, "build-system").get("requires"))]
    for name, wanted in named:
        if isinstance(wanted, list):
            yield name, [each for each in wanted if isinstance(each, str)]


def _of_poetry(data: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield poetry's dependencies as the table that they stand in, their name and a PEP 508 specifier."""
    poetry = _table(data, "tool", "poetry")
    for name, several in _table(poetry, "dependencies").items():
        for wanted in several if isinstance(several, list) else [several]:
            version, marker = (wanted.get("version"), _marker(wanted)) if isinstance(wanted, dict) else (wanted, "")
            if isinstance(version, str) and len(version) < _LONGEST and marker is not None:
                yield "tool.poetry.dependencies", name, f"{_specifier(version)}{marker}"


def _marker(wanted: dict[str, Any]) -> str | None:
    """Return the marker of one of poetry's dependencies, with its `;`; None where that is not understood."""
    if "python" in wanted or "platform" in wanted:
        return None
    markers = wanted.get("markers", "")
    return (f" ; {markers}" if markers else "") if isinstance(markers, str) else None


def _specifier(version: str) -> str:
    """Return poetry's way to write versions as PEP 440 has it."""
    parts = []
    for part in version.split(","):
        text = part.strip()
        if caret := re.fullmatch(r"\^(\d+)((?:\.\d+)*)", text):
            digits = [int(digit) for digit in f"{caret[1]}{caret[2]}".split(".") if len(digit) < 10]
            kept = next((n for n, digit in enumerate(digits) if digit), len(digits) - 1)
            upper = ".".join(map(str, [*digits[:kept], digits[kept] + 1])) if digits else ""
            parts.append(f">={text[1:]},<{upper}")
        elif re.fullmatch(r"\d+(\.\d+)*(\+\w+)?", text):
            parts.append(f"=={text}")
        elif text != "*":
            parts.append(text.replace("~", "~=", 1) if re.match(r"~\d", text) else text)
    return ",".join(parts)


def read(recipe: Recipe, path: Path, text: str) -> None:
    """Read a pyproject.toml.

    Raises:
        DataError: it is no TOML.

    """
    data = axes.load(text, str(path))
    lines = axes.Lines(recipe.lines)
    python = _table(data, "project").get("requires-python")
    if isinstance(python, str):
        recipe.state("python", python.replace(" ", ""), lines.of("project", "requires-python"))
    # uv takes these whatever the packages ask for
    override = _table(data, "tool", "uv").get("override-dependencies")
    overridden = {_name(each) for each in override if isinstance(each, str)} if isinstance(override, list) else set()
    count = 0
    for name, wanted in _lists(data):
        recipe.environment = "build" if name == "build" else ""
        # two extras need not be installed together, but each is with the project
        recipe.branch = (("extra", name),) if name not in {"", "build"} else ()
        for each in wanted:
            count += 1
            if name == "build" or not overridden & {_name(each)}:
                _one(recipe, each, lines.quoted(each), count)
    recipe.environment, recipe.branch = "", ()
    for each in override if isinstance(override, list) else ():
        # NVIDIA's libraries are overridden where others than torch's are wanted
        if isinstance(each, str) and not _name(each).startswith("nvidia-"):
            count += 1
            _one(recipe, each, lines.quoted(each), count)
    for table, name, spec in _of_poetry(data):
        line = lines.of(table, name)
        if name == "python":
            recipe.state("python", spec, line)
        else:
            count += 1
            _one(recipe, f"{name}{spec}", line, count)


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]{1,100}", requirement)
    return canonicalize_name(found[0]) if found else ""


def _one(recipe: Recipe, text: str, line: int, count: int) -> None:
    if len(text) > _LONGEST or count > _MOST:
        recipe.effort.skip(line, text)
        return
    recipe.effort.spend(1)
    recipe.commands.append((line, text))
    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        recipe.effort.skip(line, text)
        return
    name = canonicalize_name(wanted.name)
    if wanted.specifier or wanted.url:  # a project that leaves a version open leaves it to who installs it
        pip.state(recipe, wanted, line, [])
    else:
        recipe.packages.append((name, line))
