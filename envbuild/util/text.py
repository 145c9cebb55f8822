"""Text before it is printed: control characters are escaped, and secrets are masked.

It imports little, since every command prints.
"""

import re
from collections.abc import Mapping
from typing import Any

from envbuild.util.patterns import pattern

MASK = "***"

# All control characters but tab and line feed, and those that change the direction of writing.
_CONTROL = pattern("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# A colour, and "erase to the end of the line", which gcc prints next to it.
_COLOUR = pattern(r"\x1b\[[0-9;]*[mK]")
# The login of a URL. A pattern that began with the scheme would look at each letter of a long word again and again.
_LOGIN = pattern(r"://([^/\s]+)@")
# In a query, in a header, and in a command line: NAME=VALUE, `Authorization: Bearer VALUE`.
_ASSIGNED = pattern(r"(token|password|passwd|secret|signature)=(?!\s)[^\s&;,\"'<>]+", re.IGNORECASE)
_HEADER = pattern(r"(authorization[\"']?[ ]?[:=][ ]?[\"']?)(?:(basic|bearer|token)[ ]+)?[^\s,\"']+", re.IGNORECASE)
_BEARER = pattern(r"\b(bearer[ ])[A-Za-z0-9+/=._~-]{16,}", re.IGNORECASE)
_SECRET_KEYS = frozenset(
    {"authorization", "proxy-authorization", "token", "access_token", "password", "identitytoken", "secret", "auth"}
)


def printable(text: str) -> str:
    r"""Return `text` with every control character but line feed and tab as its escape, such as `\x1b`."""
    if text.replace("\n", "").isprintable():  # the usual case: nothing of them, and 0.8 ms to compile the pattern
        return text
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def plain(text: str) -> str:
    """Return `text` without its colours. Other escapes stay: they are no part of a message."""
    return _COLOUR.sub("", text) if "\x1b" in text else text


def _hide_login(found: re.Match[str]) -> str:
    # ssh://user@host names an account and holds no secret; a token may stand in the user's place everywhere else.
    before = found.string[max(0, found.start() - 8) : found.start()].lower()
    if ":" not in found[1] and re.search(r"(?:^|[^a-z0-9+.-])ssh$", before):
        return found[0]
    return f"://{MASK}@"


def redact(text: str) -> str:
    """Return `text` with logins in URLs, and the values of tokens and of Authorization headers, as `***`."""
    if "://" in text:
        text = _LOGIN.sub(_hide_login, text)
    if "=" in text or ":" in text or " " in text:
        text = _ASSIGNED.sub(rf"\1={MASK}", text)
        text = _HEADER.sub(lambda found: found[1] + (f"{found[2]} " if found[2] else "") + MASK, text)
        text = _BEARER.sub(rf"\1{MASK}", text)
    return text


def outgoing(value: Any) -> Any:
    """Return a JSON value with `redact` applied to each of its strings; all else in it stays as it is."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            (redact(key) if isinstance(key, str) else key): MASK
            if item and isinstance(item, str) and isinstance(key, str) and key.lower() in _SECRET_KEYS
            else outgoing(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [outgoing(item) for item in value]
    return value


def for_people(text: str) -> str:
    """Return `text` as people may see it on a terminal: `redact` and `printable`."""
    return printable(redact(text))


def count_of(number: int, one: str, many: str = "") -> str:
    """Return a count and what is counted: `1 input`, `2 inputs`.

    Args:
        number: how many.
        one: what one of them is called.
        many: what several are called; by default `one` and an s.

    """
    return f"{number} {one if number == 1 else many or f'{one}s'}"
