"""conda's commands and its environment.yml."""

import itertools
import re
from collections.abc import Sequence

from envbuild.errors import DataError
from envbuild.recipes import pip
from envbuild.recipes.model import Recipe
from envbuild.recipes.reader import Reader
from envbuild.recipes.syntax import Word

_LABEL = re.compile(r"\bnvidia/label/cuda-(\d+\.\d+(?:\.\d+)?)")
"""A channel of NVIDIA's that holds one release of the toolkit."""
_TOOLKIT = re.compile(r"(cuda|cuda-toolkit|cuda-nvcc|cudatoolkit-dev)(?:[=<>\[ ].*)?")
_PINNED = re.compile(
    r"(python|pytorch-cuda|pytorch|torchvision|cudatoolkit|cuda-version|cuda|cuda-toolkit|cuda-nvcc)\s*={1,2}\s*(\d+(?:\.\d+)*)(?:\.?\*)?(?:=.*)?"
)
_LONGEST = 300
_DEEPEST = 500
"""Opening brackets that an environment.yml may have: a parser takes the square of their depth."""
_TAKES_VALUE = {"-n", "--name", "-p", "--prefix", "-c", "--channel", "-f", "--file"}


def _named(words: Sequence[Word]) -> str:
    """Return the environment that a call names, or ""."""
    options = {str(option): str(value) for option, value in itertools.pairwise(words)}
    return next((options[word] for word in ("-n", "--name", "-p", "--prefix") if word in options), "")


def run_within(words: Sequence[Word]) -> tuple[str, list[Word]] | None:
    """Return the environment and the command of `conda run`, None for another call."""
    if words[1:2] != ["run"]:
        return None
    place = 2
    while place < len(words) and words[place].startswith("-"):
        place += 2 if words[place] in _TAKES_VALUE else 1
    return _named(words), list(words[place:])


def read_command(reader: Reader, words: Sequence[Word]) -> None:
    """Read a call of conda, mamba or micromamba, other than `run`."""
    recipe = reader.recipe
    named = _named(words)
    does = words[2:3] if words[1:2] == ["env"] else words[1:2]
    if does == ["create"]:
        recipe.environment = named
    elif words[1:2] in (["activate"], ["deactivate"]):
        recipe.environment = "".join(word for word in words[2:3] if word != "base")
    if does in (["install"], ["create"], ["update"]):
        environment = recipe.environment
        recipe.environment = named or environment
        given = [word for last, word in itertools.pairwise(words) if last not in _TAKES_VALUE]
        labels = dict.fromkeys(
            (label[1], word.line) for word in words if "::" not in word and (label := _LABEL.search(word))
        )
        has_toolkit = _install(recipe, [word for word in given if len(word) < _LONGEST], list(labels))
        if has_toolkit:
            reader.stage.toolkit = True
        recipe.environment = environment


def _install(recipe: Recipe, words: Sequence[Word], labels: Sequence[tuple[str, int]]) -> bool:
    """State what conda is given; return whether it installs a toolkit."""
    toolkit = False
    releases = {release for release, _ in labels}
    names = [re.split(r"[=<> \[]", word.rpartition("::")[2])[0] for word in words]
    # what conda's torch was built for; next to pytorch-cuda or pip's torch it is a library like others
    torch = "pytorch" in names and "pytorch-cuda" not in names
    for word in words:
        package = word.rpartition("::")[2]
        if _TOOLKIT.fullmatch(package):
            toolkit = True
            own = _LABEL.match(word) if "::" in word else None
            of = [(own[1], word.line)] if own else list(labels) if "::" not in word and len(releases) == 1 else []
            if of and re.search(r"\d", package) is None:
                recipe.state("nvcc", of[0][0], of[0][1], installed=True, toolkit=True)
        if found := _PINNED.fullmatch(package):
            _state(recipe, found[1], found[2], word.line, torch=torch)
    return toolkit


def _state(recipe: Recipe, name: str, version: str, line: int, *, torch: bool) -> None:
    if name == "python":
        recipe.state("python", ".".join(version.split(".")[:2]), line, installed=True, toolkit=True)
    elif name == "pytorch":
        recipe.state("torch", version, line, installed=True)
    elif name == "torchvision":
        pip.state_companion(recipe, name, version, line)
    elif name in {"pytorch-cuda", "cudatoolkit", "cuda-version"}:
        if torch or name == "pytorch-cuda":
            recipe.state("cuda", ".".join(version.split(".")[:2]), line, installed=True)
    elif "." in version:
        recipe.state("nvcc", version, line, installed=True, toolkit=True)


def _scalars(text: str, where: str) -> tuple[dict[str, list[Word]], bool]:
    """Return the scalars of `dependencies`, of conda and of pip, and whether there is such a list."""
    import yaml

    if text.count("[") + text.count("{") > _DEEPEST:
        raise DataError("the recipe has too many brackets for an environment of conda", where=where)
    found: dict[str, list[Word]] = {"conda": [], "pip": []}
    path: list[tuple[str, str | None]] = []  # the collections around, and the key that a mapping stands at
    listed = False
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            keys = [key for kind, key in path if kind == "map"]
            if isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
                listed = listed or (keys == ["dependencies"] and isinstance(event, yaml.SequenceStartEvent))
                path.append(("map" if isinstance(event, yaml.MappingStartEvent) else "list", None))
            elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
                path.pop()
                if path and path[-1][0] == "map" and path[-1][1] is not None:
                    path[-1] = ("map", None)
            elif isinstance(event, yaml.ScalarEvent):
                if path and path[-1] == ("map", None):
                    path[-1] = ("map", event.value)
                    continue
                if path and path[-1][0] == "map":
                    path[-1] = ("map", None)
                elif path and path[-1][0] == "list" and keys in (["dependencies"], ["dependencies", "pip"]):
                    word = Word(event.value, event.start_mark.line + 1 if event.start_mark else 1)
                    found["pip" if keys[-1] == "pip" else "conda"].append(word)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise DataError("the recipe is not YAML", where=f"{where}, line {line}") from error
    return found, listed


def is_environment(text: str, where: str) -> bool:
    """Return whether a YAML text is an environment of conda."""
    try:
        return _scalars(text, where)[1]
    except DataError:
        return re.search(r"(?m)^dependencies:", text) is not None


def read_environment(recipe: Recipe, text: str, where: str) -> None:
    """Read an environment.yml.

    Raises:
        DataError: it is no YAML.

    """
    found, _ = _scalars(text, where)
    recipe.effort.spend(sum(map(len, found.values())))
    _install(recipe, [word for word in found["conda"] if len(word) < _LONGEST], [])
    given = [words for word in found["pip"] if (words := [Word(part, word.line) for part in word.split()])]
    used = [index for words in given if words[0].startswith("-") for index in pip.indexes(words)]
    for words in given:
        joined = words if words[0].startswith("-") else [Word(" ".join(words), words[0].line)]
        pip.read(recipe, joined, used)
