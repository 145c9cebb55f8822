"""One quoting function for each format that a value of a lock, a stack or a setting is written into.

Each returns text that its format reads as exactly the given value, or refuses the value with a `ValueError`.
"""

import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

from envbuild.util.names import is_one_line, shown
from envbuild.util.patterns import pattern

_WORD = pattern(r"[A-Za-z0-9_./:@+=,~%#!*\[\]?&;()-]*", re.ASCII)
_GLOB = pattern(r"[A-Za-z0-9_.+*?\[\]/-]+", re.ASCII)
_PLAIN = pattern(r"[A-Za-z0-9_./:@+=~%#-]*", re.ASCII)
_YAML_WORD = pattern(r"[A-Za-z][A-Za-z0-9_./-]*", re.ASCII)
_YAML_MEANS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
_PRINTED = pattern("[\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]*")


def _one_line(value: str, what: str) -> str:
    if not is_one_line(value.replace("\t", " ")):
        raise ValueError(f"{shown(value, 80)!r} holds a line break or a control character, which {what} cannot have")
    return value


def plain(value: str) -> str:
    """Return a value that no format here would read as anything else: letters, digits and `_./:@+=~%#-`.

    No comma among them, which would add an option to `--mount`.
    """
    if not _PLAIN.fullmatch(value):
        raise ValueError(f"{shown(value, 80)!r} holds a character that must be quoted")
    return value


def comment(value: str) -> str:
    """Return a value for a comment, which ends with its line: a character that is not printed becomes its escape."""
    return shown(value, 2000)


def shell(value: str) -> str:
    """Return a value as one word of a POSIX shell, in one line."""
    return shlex.quote(_one_line(value, "a word of a script"))


def shell_double(value: str) -> str:
    """Return a value for a place between double quotes of a POSIX shell, in one line."""
    return re.sub(r'([\\"$`])', r"\\\1", _one_line(value, "a word of a script"))


def shell_glob(value: str) -> str:
    """Return a path in which a shell expands `*`, `?` and `[…]` and nothing else."""
    if not _GLOB.fullmatch(value) or value.startswith("-"):
        raise ValueError(f"{shown(value, 80)!r} is not a path with *, ? and [ ] alone")
    return value


def sed_pattern(value: str) -> str:
    """Return a regular expression for `s#…#…#` of sed between single quotes."""
    if "#" in value or "'" in value or not is_one_line(value):
        raise ValueError(f"{shown(value, 80)!r} cannot be a pattern of sed")
    return value


def dockerfile_env(value: str) -> str:
    """Return a value for ENV and LABEL, so that nothing in it is expanded or split."""
    escaped = _one_line(value, "ENV and LABEL").replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def dockerfile_word(value: str) -> str:
    """Return a value for FROM, ADD and the flags of RUN, which know no quotes: an address, an image, a path.

    Raises:
        ValueError: it holds white space, a quote, a `$` or anything else that such a line reads as more than a value.

    """
    if not _WORD.fullmatch(value) or value.startswith("-"):
        raise ValueError(f"{shown(value, 80)!r} cannot be an argument of an instruction in a Dockerfile")
    return value


def heredoc(text: str, end: str) -> str:
    """Return text for a here-document that the line `end` ends.

    Raises:
        ValueError: the text holds that line itself, or a NUL.

    """
    if re.search(rf"^\s*{re.escape(end)}\s*$", text, re.MULTILINE) or "\0" in text or "\r" in text:
        raise ValueError(f"the text holds the line {end!r}, which would end it, or a character that no script can have")
    return text


def apt_conf(value: str) -> str:
    """Return a value for apt.conf, in its quotes; there is no way to write a quote within them.

    Raises:
        ValueError: it holds a quote, a backslash or a line break.

    """
    if '"' in value or "\\" in value:
        raise ValueError(f"{shown(value, 80)!r} holds a quote or a backslash, which apt.conf cannot have")
    return f'"{_one_line(value, "apt.conf")}"'


def apt_source(value: str) -> str:
    """Return a value for a line of sources.list: an address, a suite, a component.

    Raises:
        ValueError: it holds white space, a bracket, a `#` or a control character.

    """
    if not value or re.search(r"[\s\[\]#]", value) or not is_one_line(value):
        raise ValueError(f"{shown(value, 80)!r} cannot be a word of sources.list")
    return value


def csv_fields(**fields: str) -> str:
    """Return `name=value,…` as buildx reads an output or a secret: a list of CSV fields.

    Raises:
        ValueError: a value holds a line break or a control character.

    """
    texts = [_one_line(f"{name}={value}", "a list of fields") for name, value in fields.items()]
    return ",".join('"' + text.replace('"', '""') + '"' if re.search(r'[",]', text) else text for text in texts)


def bake(value: str) -> str:
    """Return a value for a string of a bake file, in which `${…}` and `%{…}` would be evaluated."""
    return value.replace("${", "$${").replace("%{", "%%{")


def kubernetes(value: str) -> str:
    """Return a value for `command`, `args` and `env`, in which Kubernetes replaces `$(NAME)` and reads `$$` as `$`."""
    return re.sub(r"\$(?=[$(])", "$$", value)


def devcontainer(value: str) -> str:
    """Return a value for devcontainer.json, whose readers replace `${…}`; there is no way to write one.

    Raises:
        ValueError: it holds such a thing, or a line break.

    """
    if "${" in value:
        raise ValueError(f"{shown(value, 80)!r} holds ${{, which devcontainer.json cannot have")
    return _one_line(value, "devcontainer.json")


def yaml(value: str) -> str:
    """Return a value as a string of YAML 1.1 and 1.2: never a number, a boolean, a key or a comment.

    Raises:
        ValueError: it holds half of a surrogate pair, which is no text.

    """
    if _YAML_WORD.fullmatch(value) and value.lower() not in _YAML_MEANS:
        return value
    if re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{shown(value, 80)!r} is no text")
    # JSON's form, but a character beyond the first 65536 as it is: YAML's `\\u` knows no pairs
    text = json.dumps(value, ensure_ascii=False)
    return (
        text if _PRINTED.fullmatch(text) else "".join(c if _PRINTED.fullmatch(c) else f"\\u{ord(c):04x}" for c in text)
    )


def yaml_lines(value: Any, indent: int = 0) -> Iterator[str]:
    """Yield the lines of a value in YAML: dicts, lists, whole numbers, booleans and strings; what is empty is left out.

    A string of several plain lines becomes a block, in which nothing is read as more than text.
    """
    space = " " * indent
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _yaml_item(f"{space}{yaml(key)}:", each, indent)
    else:
        for each in value:
            if isinstance(each, dict):
                first, *rest = yaml_lines(each, indent + 2)
                yield f"{space}- {first[indent + 2 :]}"
                yield from rest
            else:
                yield from _yaml_item(f"{space}-", each, indent)


def _yaml_item(head: str, value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, dict | list):
        if value:
            yield head
            yield from yaml_lines(value, indent + 2)
        elif isinstance(value, dict):
            yield f"{head} {{}}"
    elif isinstance(value, bool):
        yield f"{head} {str(value).lower()}"
    elif isinstance(value, int):
        yield f"{head} {value}"
    elif _is_block(value):
        yield f"{head} |"
        yield from (f"{' ' * (indent + 2)}{line}" if line else "" for line in value[:-1].split("\n"))
    else:
        yield f"{head} {yaml(value)}"


def _is_block(value: str) -> bool:
    """Whether a string can be a literal block: printed lines, the first with a letter at its start, one line break at the end."""
    lines = value.split("\n")
    return (
        len(lines) > 2
        and not lines[-1]
        and bool(lines[-2].strip())
        and bool(lines[0])
        and lines[0][0] not in " \t"
        and all(_PRINTED.fullmatch(line) and line == line.rstrip() for line in lines)
    )
