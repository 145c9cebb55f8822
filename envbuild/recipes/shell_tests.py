"""What a test of a shell script, such as `[ "$CUDA" = 12.6 ]`, asks of its variables."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from envbuild.recipes.syntax import text_of

if TYPE_CHECKING:
    from tree_sitter import Node

_EQUALS = re.compile(
    r"""\[\[?[ \t]+"?\$\{?([A-Za-z_]\w*)\}?"?[ \t]+(!?)={1,2}[ \t]+["']?([\w.+:/-]+)["']?[ \t]+(?:\]\]?|&&|-a[ \t])"""
)
_LONGEST_TEST = 1000


def conditions_of(node: "Node") -> dict[str, str]:
    """Return the variables that a test finds equal to a literal, or not equal (`!`), all of which have to be."""
    length = node.end_byte - node.start_byte
    if node.type not in {"test_command", "command", "list"} or length > _LONGEST_TEST:
        return {}
    text = text_of(node)
    if "||" in text or "!" in text.replace("!=", "") or " -o " in text:
        return {}
    return {name: f"{differs}{value}" for name, differs, value in _EQUALS.findall(text)}


def is_understood(node: "Node") -> bool:
    """Return whether the variables that `conditions_of` finds in a test are all that it asks."""
    return bool(conditions_of(node)) and not _EQUALS.sub("", text_of(node)).strip("[] \t\n;&")


def differ(conditions: Mapping[str, str], values: Mapping[str, str]) -> bool:
    """Return whether a variable is known to have another value than it is tested for."""
    known = ((values.get(name), wanted) for name, wanted in conditions.items())
    return any(
        value is not None and "$" not in value and (value == wanted[1:] if wanted[0] == "!" else value != wanted)
        for value, wanted in known
    )
