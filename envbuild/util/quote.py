"""One quoting function for each format that a value of a lock, a stack or a setting is written into.

Each returns text that its format reads as exactly the given value, or refuses the value with a `ValueError`.
"""

import re
import shlex

from envbuild.util.names import is_one_line, shown
from envbuild.util.patterns import pattern

_WORD = pattern(r"[A-Za-z0-9_./:@+=,~%#!*\[\]?&;()-]*", re.ASCII)
_GLOB = pattern(r"[A-Za-z0-9_.+*?\[\]/-]+", re.ASCII)
_PLAIN = pattern(r"[A-Za-z0-9_./:@+=~%#-]*", re.ASCII)


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
