"""Variables of a shell or a Dockerfile: what `$NAME`, `${NAME:-default}` and the like become."""

import re
from collections.abc import Mapping
from fnmatch import translate

_LONGEST_VALUE = 1 << 14
"""Characters that a text may have once variables are put in. Where it has more, they stay as they are written."""

REFERENCE = re.compile(r"\$(?:\{(?P<name>[A-Za-z_]\w*)(?P<rest>[^{}]*)\}|(?P<bare>[A-Za-z_]\w*))")
_PLAIN_PATTERN = re.compile(r"[\w.+:/*?-]*")


def _cut(value: str, operation: str) -> str | None:
    """Return what `${NAME…}` makes of a value, or None where that is not known."""
    if not operation:
        return value
    if match := re.fullmatch(r":?-(.*)", operation, re.DOTALL):
        return value or match[1]
    if match := re.fullmatch(r":?\+(.*)", operation, re.DOTALL):
        return match[1] if value else ""
    if match := re.fullmatch(r"(//?)([^/*?\[\]\\]+)(?:/([^/]*))?", operation):
        return value.replace(match[2], match[3] or "", -1 if match[1] == "//" else 1)
    if (match := re.fullmatch(r"(%%?|##?)(.+)", operation)) and _PLAIN_PATTERN.fullmatch(match[2]) and len(value) < 200:
        fits = re.compile(translate(match[2]))
        whole = range(len(value) + 1)
        if match[1].startswith("%"):
            ends = [n for n in whole if fits.fullmatch(value[n:])]
            return value[: (min if match[1] == "%%" else max)(ends)] if ends else value
        starts = [n for n in whole if fits.fullmatch(value[:n])]
        return value[(max if match[1] == "##" else min)(starts) :] if starts else value
    if match := re.fullmatch(r":(\d{1,4})(?::(\d{1,4}))?", operation):
        first = int(match[1])
        return value[first : first + int(match[2])] if match[2] else value[first:]
    return None


def expanded(text: str, values: Mapping[str, str]) -> str:
    """Return `text` with the variables that `values` has put in, or their defaults; any other stays as it is written."""
    if "$" not in text:
        return text
    left = _LONGEST_VALUE

    def put_in(match: re.Match[str]) -> str:
        nonlocal left
        value, operation = values.get(match["name"] or match["bare"]), match["rest"] or ""
        if value is None:
            default = re.fullmatch(r":?-(.*)", operation, re.DOTALL)
            result = default[1] if default else None
        else:
            result = _cut(value, operation)
        left -= len(result or "")
        return match[0] if result is None or left < 0 else result

    return REFERENCE.sub(put_in, text)
