"""The words of a shell script: what a node of its syntax tree stands for, with the values that its variables have there."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from envbuild.recipes.syntax import Effort, Word, children, text_of
from envbuild.recipes.values import expanded

if TYPE_CHECKING:
    from tree_sitter import Node

WORDS = {"word", "string", "raw_string", "concatenation", "simple_expansion", "expansion", "number", "ansi_c_string"} | {
    *("command_substitution", "process_substitution", "arithmetic_expansion", "brace_expression", "extglob_pattern", "regex"),
    *("translated_string", "test_operator"),
}  # fmt: skip
"""The kinds of nodes that are words of a command."""
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r'\\(["\\$`\n])')


def words_of(node: "Node", line: int, values: Mapping[str, str], effort: Effort) -> Iterator[Word]:
    """Yield the words that a node stands for: an expansion without quotes may be several or none."""
    text = word_of(node, values, effort)
    if node.type in {"simple_expansion", "expansion"} and " " in text.strip() and "${" not in text:
        yield from (Word(part, line) for part in text.split())
    else:
        yield Word(text, line)


def word_of(node: "Node", values: Mapping[str, str], effort: Effort) -> str:
    """Return the text that a node stands for, without its quotes and with the values of its variables."""
    kind, text = node.type, text_of(node)
    if kind == "raw_string":
        return text[1:-1]
    if kind == "concatenation":
        return "".join(word_of(child, values, effort) for child in children(node, effort))
    if kind == "string":
        return _put_in(text[1:-1], _ESCAPED_IN_QUOTES, values)
    if kind in {"ansi_c_string", "translated_string"}:
        return text.strip("$'\"")
    if kind in {"word", "simple_expansion", "expansion", "extglob_pattern"}:
        return _put_in(text, _ESCAPED, values)
    return text


def _put_in(text: str, escaped: re.Pattern[str], values: Mapping[str, str]) -> str:
    if "\\" not in text:
        return expanded(text, values)
    pieces, place = list[str](), 0
    for match in escaped.finditer(text):
        pieces += [expanded(text[place : match.start()], values), match[1].strip("\n")]
        place = match.end()
    return "".join((*pieces, expanded(text[place:], values)))
