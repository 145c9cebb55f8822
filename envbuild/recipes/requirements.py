"""Requirements files, by pip's own rules: comments, continued lines, options, markers.

The rules are those of pip's documentation (reference/requirements-file-format) and of its `req_file.py`; a requirement is
parsed by `packaging`, as pip does. The one package that carries pip's parser apart from pip has had no release since 2022.
"""

import re
from collections.abc import Iterator

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement

from envbuild.recipes import pip
from envbuild.recipes.model import Recipe
from envbuild.recipes.syntax import Word

_COMMENT = re.compile(r"(?:^|\s)#.*$")
_OPTION = re.compile(r"\s--?[A-Za-z]")
_LONGEST = 1000


def _joined(lines: list[str]) -> Iterator[list[tuple[int, str]]]:
    """Yield each line with those that a backslash carries it on over; a comment ends one."""
    parts = list[tuple[int, str]]()
    for number, line in enumerate(lines, 1):
        comment = _COMMENT.search(line) if "#" in line else None
        text = line[: comment.start()] if comment else line
        goes_on = not comment and text.endswith("\\")
        parts.append((number, text.rstrip("\\") if goes_on else text))
        if not goes_on:
            yield parts
            parts = []
    if parts:
        yield parts


def read(recipe: Recipe) -> None:
    """Read the lines of `recipe` as a requirements file."""
    logical = [[Word(word, line) for line, text in parts for word in text.split()] for parts in _joined(recipe.lines)]
    used = [index for words in logical if words and words[0].startswith("-") for index in pip.indexes(words)]
    recipe.effort.spend(sum(map(len, logical)))
    pinned: list[tuple[Requirement, int]] = []
    for words in logical:
        recipe.effort.spend(1)
        if not words:
            continue
        text = " ".join(words[:60])
        recipe.commands.append((words[0].line, text[:_LONGEST]))
        whole = _OPTION.split(text, maxsplit=1)[0].strip()  # hashes and options follow
        try:
            wanted = Requirement(whole) if len(whole) < _LONGEST else None
        except InvalidRequirement:
            wanted = None
        if wanted:
            pinned.append((wanted, words[0].line))
        elif words[0].startswith("-") or "git+" in text or re.match(r"[\w./-]*[/.]", words[0]) or "://" in text:
            place, marker = _marked(words)
            pip.read(recipe, place, used, marker=marker)
        else:
            recipe.effort.skip(words[0].line, text)
    free = pip.is_free(wanted for wanted, _ in pinned)
    for wanted, line in pinned:
        pip.state(recipe, wanted, line, used, own_index=_own(used), newest=free)


def _marked(words: list[Word]) -> tuple[list[Word], str]:
    """Return a line without the marker that stands behind a URL, and the marker: pip splits the two at `; `."""
    ends = next((n for n, word in enumerate(words) if word.endswith(";")), None)
    if ends is None or words[0].startswith("-"):
        return words, ""
    try:
        marker = str(Marker(" ".join(words[ends + 1 :][:60])))
    except InvalidMarker:
        return words, ""
    last = Word(words[ends].rstrip(";"), words[ends].line)
    return [*words[:ends], *([last] if last else [])], marker


def _own(used: list[str]) -> bool:
    return any(index and "download.pytorch.org" not in index and "pypi.org" not in index for index in used)


def is_one(text: str) -> bool:
    """Return whether every line of `text` is a requirement, an option of pip, or a comment."""
    found = [" ".join(part for _, part in parts).strip() for parts in _joined(text.split("\n", 2000)[:2000])]
    return any(found) and all(not line or _is_requirement(_OPTION.split(line, maxsplit=1)[0].strip()) for line in found)


def _is_requirement(text: str) -> bool:
    if re.match(r"(?:-[A-Za-z]\b|--[a-z-]+(?:[= ]|$)|git\+|https?://|\.{0,2}/\S+$)", text) or not text:
        return True
    try:
        Requirement(text[:_LONGEST])
    except InvalidRequirement:
        return False
    return True
