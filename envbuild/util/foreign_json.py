"""JSON that came from outside: parsed within bounds of size and depth, and of the shape that its reader asks for."""

import json
from typing import Any

from envbuild.util.names import shown

DEPTH = 64
"""How deep lists and objects may lie in each other: far more than anything that we read needs."""


def parse_json(body: bytes | str, *, limit: int, measured: bool = False) -> Any:
    """Return the value of a JSON text of at most `limit` bytes or characters.

    Args:
        body: the text.
        limit: how long it may be.
        measured: whether it holds what tests measured and printed: NaN and the infinities come as texts (`"Infinity"`), and
            half a surrogate pair as its escape.

    Raises:
        ValueError: it is longer, nested deeper than 64 levels, or no JSON, or has a name twice in one object; NaN,
            Infinity and half a surrogate pair are no JSON.

    """
    if len(body) > limit:
        raise ValueError(f"more than {limit:,} bytes of JSON")
    try:
        text = body.decode("utf-8") if isinstance(body, bytes) else body
        value = json.loads(text, parse_constant=str if measured else _refuse, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"JSON nested deeper than {DEPTH} levels") from None
    except UnicodeDecodeError:
        raise ValueError("JSON that is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error.msg} at character {error.pos}") from None
    _check(value, whole_texts=not measured)
    return _escaped(value) if measured else value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:  # readers differ in which of the two they take
            raise ValueError(f"JSON with two meanings: it holds {shown(name, 40)!r} twice in one object")
        found[name] = value
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"no JSON: it holds {word}")


def _check(value: Any, *, whole_texts: bool) -> None:
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.keys()
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif whole_texts and isinstance(each, str) and not each.isascii():
                try:
                    each.encode("utf-8")
                except UnicodeEncodeError:
                    raise ValueError(f"a text that no encoding has: {shown(each, 40)}") from None
        level, depth = below, depth + 1
        if below and depth > DEPTH:
            raise ValueError(f"JSON nested deeper than {DEPTH} levels")


def encodable(text: str) -> str:
    """Return a text that UTF-8 can hold: half of a surrogate pair is written as its escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _escaped(value: Any) -> Any:
    """Return a value of at most 64 levels with each half of a surrogate pair in its texts written as its escape."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, list):
        return [_escaped(each) for each in value]
    if isinstance(value, dict):
        return {_escaped(key): _escaped(each) for key, each in value.items()}
    return value
