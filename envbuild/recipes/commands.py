"""One command of a shell: what it installs, loads, clones or sets."""

import re
from collections.abc import Sequence

from envbuild.recipes import conda, git, habits, packages, pip
from envbuild.recipes.reader import Reader
from envbuild.recipes.syntax import Word

_TAKES_VALUE = {"-u", "-g", "-h", "-p", "-C", "-n", "-t", "-k", "-s"}
"""Options of sudo, env, nice, timeout whose value is a separate word."""
_BEFORE = {"sudo", "env", "time", "nice", "nohup", "exec", "command", "timeout", "eval", "retry", "yes"}
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def run(reader: Reader, words: list[Word], own: dict[str, str]) -> list[Word]:
    """Read a command.

    Args:
        reader: where the reading stands.
        words: the command and its arguments, with variables put in, without redirections.
        own: the variables that are set for it alone.

    Returns:
        Its words without `sudo` and the like.

    """
    reader.recipe.effort.spend(1)
    reader.recipe.commands.append((words[0].line, " ".join(words)))
    words = _bare(reader, words, own)
    if not words:
        return []
    for rule, number in habits.in_command(words, image=reader.recipe.kind == "dockerfile"):
        reader.recipe.note(rule, words[number].line, "")
    name = words[0].rpartition("/")[2]
    if name in {"echo", "printf"} or pip.read_command(reader, words, own):
        return words
    if re.fullmatch(r"python[\d.]*", name) and words[1:2] == ["setup.py"]:
        git.built(reader, reader.folder)
    elif name == "git":
        git.read(reader, words)
    elif name in {"cd", "pushd"}:
        reader.pushed += [reader.folder] if name == "pushd" and len(reader.pushed) < 100 else []
        _cd(reader, next((w for w in words[1:] if w == "-" or not w.startswith(("-", "+"))), "~"))
    elif name == "popd":
        git.enter(reader, reader.pushed.pop() if reader.pushed else reader.folder_at(".."))
    elif name in {"module", "ml"}:
        packages.module(reader, words)
    elif name in {"apt-get", "apt", "dnf", "microdnf", "yum"} and "install" in words:
        packages.of_os(reader, words)
    elif name in {"conda", "mamba", "micromamba"}:
        _conda(reader, words)
    elif name in {"virtualenv", "source", "."} or (name == "uv" and words[1:2] == ["venv"]):
        _environment(reader, words)
    elif name == "deactivate":
        reader.recipe.environment = ""
    elif words[:2] == ["pyenv", "install"]:
        for version in words[2:]:
            if found := re.fullmatch(r"(\d+\.\d+)(?:\.\d+)?", version):
                reader.recipe.state("python", found[1], version.line, toolkit=True)
    else:
        packages.installer(reader, words)
    return words


def _bare(reader: Reader, words: list[Word], own: dict[str, str]) -> list[Word]:
    """Return a command without what is set or called before it."""
    assigns = False
    while words:
        found = _ASSIGNMENT.fullmatch(words[0]) if assigns else None
        if found:
            own[found[1]] = reader.values[found[1]] = found[2]
            reader.set_variable(found[1], found[2], words[0].line)
            words = words[1:]
        elif words[0].rpartition("/")[2] in _BEFORE and len(words) > 1:
            called, words, assigns = words[0], words[1:], True
            while words and words[0].startswith("-") and words[0] != "--":
                words = words[2 if words[0] in _TAKES_VALUE else 1 :]
            if called == "timeout" and words:
                words = words[1:]
        elif words[0] == "set":
            return []
        else:
            break
    return words


def _conda(reader: Reader, words: list[Word]) -> None:
    within = conda.run_within(words)
    if within is None:
        conda.read_command(reader, words)
        return
    named, inner = within
    if inner:
        outside, reader.recipe.environment = reader.recipe.environment, named
        run(reader, inner, {})
        reader.recipe.environment = outside


def _cd(reader: Reader, place: str) -> None:
    git.enter(reader, reader.before if place == "-" else reader.folder_at(place))


def _environment(reader: Reader, words: Sequence[str]) -> None:
    """Take a virtual environment that is made or activated for the one that pip installs into."""
    plain = [word for word in words[1:] if not word.startswith("-") and word != "venv"]
    place = plain[-1] if plain else ""
    if words[0] in {"source", "."}:
        place, found = place.removesuffix("/bin/activate"), place.endswith("/bin/activate")
        if not found:
            return
        reader.recipe.environment = place
