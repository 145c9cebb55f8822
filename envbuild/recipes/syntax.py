"""Syntax trees of shell scripts and Dockerfiles, by tree-sitter, within bounds of time, size and depth.

tree-sitter's parsers are linear for what people write, but not for everything: 200,000 opening braces take them minutes.
Hence a deadline, and no recursion over a tree deeper than `DEEPEST`.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from envbuild.errors import DataError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

Language = Literal["bash", "dockerfile"]

PATIENCE = 1.0
"""Seconds for all the parsing of one recipe."""

DEEPEST = 150
"""Levels of a tree that are read; deeper ones are not understood."""

MOST_NODES = 150_000
"""Nodes of all the trees of one recipe that are looked at. The longest public recipe has a tenth of them."""

CPU_SECONDS = 1.2
"""Processor time that the reading of one recipe may take. Public recipes take a tenth of a second at most."""

_SHOWN = 4000
"""Bytes of a node whose text is looked at where only its beginning matters."""

# `<<EOF`, `<<-'EOF'`; not `<<<text`
_HERE_DOCUMENT = re.compile(rb"(?<!<)<<(?!<)-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1")


class Word(str):
    """A word of a command, without its quotes and with the variables put in; it knows its line."""

    __slots__ = ("line",)
    line: int

    def __new__(cls, text: str, line: int) -> "Word":  # noqa: PYI034 - Self cannot be given an attribute by mypy
        word = super().__new__(cls, text)
        word.line = line
        return word


def line_of(text: str, otherwise: int) -> int:
    """Return the line of a word, or `otherwise` for text that is a part of one."""
    return text.line if isinstance(text, Word) else otherwise


@dataclass
class Effort:
    """What has been spent on one recipe."""

    seconds: float = 0.0
    nodes: int = 0
    begun: float = field(default_factory=time.process_time)
    not_understood: dict[int, str] = field(default_factory=dict)
    """What no reader made sense of, by line."""

    def skip(self, line: int, text: str) -> None:
        """Keep that `text`, on `line`, was not understood."""
        self.not_understood.setdefault(line, " ".join(text.split())[:80])

    def spend(self, nodes: int) -> None:
        """Count nodes. Raises DataError over `MOST_NODES` or `CPU_SECONDS`."""
        self.nodes += nodes
        if self.nodes > MOST_NODES or time.process_time() - self.begun > CPU_SECONDS:
            raise DataError("the recipe has too many commands to read", hint="check its parts one by one")


@cache
def _parser(language: Language) -> "Parser":
    from tree_sitter import Language as Grammar
    from tree_sitter import Parser

    if language == "bash":
        from tree_sitter_bash import language as grammar
    else:
        from tree_sitter_containerfile import language as grammar
    return Parser(Grammar(grammar()))


def parse(language: Language, source: bytes, effort: Effort) -> "Node":
    """Return the root of the syntax tree of `source`.

    Raises:
        DataError: it took too long.

    """
    # the Dockerfile grammar takes `<<<` for a here-document
    source = _closed(source if language == "bash" else source.replace(b"<<<", b"   "))
    begun = time.monotonic()
    ends = begun + PATIENCE - effort.seconds

    def is_late(*_: object) -> bool:
        return time.monotonic() > ends

    parser = _parser(language)
    try:
        # a node's text is read by the same function: large pieces would be copied for every word
        tree = parser.parse(lambda at, _: source[at : at + 512], progress_callback=is_late)
    except ValueError:  # stopped by the callback
        parser.reset()
        raise DataError(
            "the recipe takes too long to read", hint="look for brackets or quotes that are never closed"
        ) from None
    finally:
        effort.seconds += time.monotonic() - begun
    return tree.root_node


def _closed(source: bytes) -> bytes:
    """Return `source` without the `<<` of here-documents that never end: they would swallow all that follows."""
    if b"<<" not in source:
        return source
    last = {line.strip(): number for number, line in enumerate(source.split(b"\n"))}
    number, place, parts = 0, 0, list[bytes]()
    for here in _HERE_DOCUMENT.finditer(source):
        number += source.count(b"\n", place, here.start())
        parts.append(source[place : here.start()])
        place = here.start()
        if last.get(here[2], -1) <= number:
            parts.append(b"  ")
            place += 2
    return b"".join((*parts, source[place:]))


def text_of(node: "Node") -> str:
    """Return the source text of a node."""
    return node.text.decode(errors="replace") if node.text is not None else ""


def head_of(node: "Node") -> str:
    """Return the source text of a node, or its type where that text is long."""
    return text_of(node) if node.end_byte - node.start_byte < _SHOWN else node.type


def children(node: "Node", effort: Effort) -> list["Node"]:
    """Return the children of a node, counted."""
    found = node.children
    effort.spend(len(found) + 1)
    return found


def errors(root: "Node", effort: Effort) -> Iterator["Node"]:
    """Yield the nodes that no rule of the grammar fits, outermost first."""
    waiting = [root] if root.has_error else []
    while waiting:
        node = waiting.pop()
        if node.is_error or node.is_missing:
            yield node
        else:
            waiting += [child for child in children(node, effort) if child.has_error]


_ASKS = re.compile(r"(?:\[|test|grep|command|which|type|hash)[ \t]")


def asks(node: "Node") -> bool:
    """Return whether a command that `&&` follows only asks something: what follows may be done or not."""
    return node.type == "test_command" or (node.type == "command" and _ASKS.match(text_of(node)) is not None)
