"""Mutations of real inputs: bytes, tokens, and the values of JSON and TOML. All choices come from one random generator."""

import copy
import json
import math
import random
import re
from typing import Any

import tomli

LONGEST = 200_000
"""Bytes of an input at most; the bounds on size themselves are tested elsewhere."""

ODD_TEXTS = (
    "",
    " ",
    "\x00",
    "\x1b]0;x\x07\x1b[2J",
    "\r\n",
    "\u2028",
    "\u202e",
    "\ud800",
    "\ufeff",
    "é" * 300,
    "../../x",
    "/etc/passwd",
    "--upload-pack=x",
    "-",
    "$(x)",
    "`x`",
    "${x}",
    "'",
    '"',
    "\\",
    "x\nRUN y",
    "envbuild_end",
    "https://u:p@h/x",
    "https://[::1",
    "https://h:99999/x",
    "file:///x",
    "http://" + "a" * 300,
    "1" * 5000,
    "1." * 2000,
    "1e999",
    "9" * 400,
    "(" * 1500,
    "[" * 1500,
    "{" * 1500,
    "a;" * 1500,
    "x" * 70_000,
    "nan",
    "none",
    "auto",
    "any",
    "*",
    "!" * 50,
    ">=1," * 300,
    "||" * 300,
    "==1.*",
    "===x",
    "~=1",
    "1!1.0a1.post1.dev1+x.y",
    "sha256:" + "0" * 64,
    "0" * 64,
    "0" * 40,
)
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**400,
    -(10**30),
    0.0,
    -0.5,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"x": {"x": {}}},
)
ODD_BYTES = (
    b"\x00",
    b"\xff\xfe",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x1b[2J",
    b"\r",
    b"\n" * 500,
    b" " * 5000,
    b"\t",
    b"{" * 2000,
    b"[" * 2000,
    b"(" * 2000,
    b"}" * 50,
    b'"',
    b"'",
    b"\\",
    b"=",
    b":",
    b",",
    b"#",
    b"$",
    b"0" * 5000,
    b"-",
    b"1" * 5000,
    b"\x0b\x0c\x1c\x1d\x85",
)
_TOKEN = re.compile(rb"[A-Za-z_][A-Za-z0-9_.-]*|[0-9]+|\s+|.", re.DOTALL)


def mutated(generator: random.Random, form: str, seed: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """Return `seed` after some mutations.

    Args:
        generator: decides everything.
        form: `json`, `toml` or `text`.
        seed: a real input.
        others: more of them, to take parts from.
        words: what this reader looks for.

    """
    data = seed
    if form in {"json", "toml"} and generator.random() < 0.6:
        data = _structured(generator, form, data)
        if generator.random() < 0.7:
            return data[:LONGEST]
    for _ in range(generator.choice((1, 1, 1, 2, 3, 6))):
        data = generator.choice(_TEXTUAL)(generator, data, others, words)
    return data[:LONGEST]


# -- bytes and tokens -------------------------------------------------------------------------------------------------


def _span(generator: random.Random, data: bytes) -> tuple[int, int]:
    start = generator.randrange(len(data) + 1)
    return start, min(len(data), start + int(generator.expovariate(1 / 12)) + 1)


def _flip(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    if not data:
        return b"\x00"
    at = generator.randrange(len(data))
    return data[:at] + bytes([generator.randrange(256)]) + data[at + 1 :]


def _delete(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    start, end = _span(generator, data)
    return data[:start] + data[end:]


def _repeat(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    start, end = _span(generator, data)
    return data[:end] + data[start:end] * generator.choice((1, 2, 10, 300)) + data[end:]


def _insert(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    at = generator.randrange(len(data) + 1)
    odd = generator.choice(ODD_BYTES) if generator.random() < 0.5 else _bytes(generator.choice(ODD_TEXTS))
    return data[:at] + odd + data[at:]


def _word(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    if not words:
        return _insert(generator, data, others, words)
    start, end = _span(generator, data)
    return data[:start] + generator.choice(words) + data[end if generator.random() < 0.5 else start :]


def _splice(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    other = generator.choice(others)
    start = generator.randrange(len(other) + 1)
    part = other[start : start + generator.choice((5, 50, 500, 5000))]
    at, end = _span(generator, data)
    return data[:at] + part + data[end if generator.random() < 0.5 else at :]


def _cut(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    return data[: generator.randrange(len(data) + 1)]


def _token(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """Replace, double, remove or exchange tokens."""
    start = max(0, generator.randrange(len(data) + 1) - 200)
    window = data[start : start + 400]
    tokens = _TOKEN.findall(window)
    if len(tokens) < 2:
        return _insert(generator, data, others, words)
    at, other = generator.randrange(len(tokens)), generator.randrange(len(tokens))
    kind = generator.randrange(5)
    if kind == 0:
        tokens[at], tokens[other] = tokens[other], tokens[at]
    elif kind == 1:
        tokens[at] = b""
    elif kind == 2:
        tokens[at] = tokens[at] * generator.choice((2, 40))
    elif kind == 3:
        tokens[at] = generator.choice(words) if words else tokens[other]
    else:
        tokens[at] = _bytes(generator.choice(ODD_TEXTS))
    return data[:start] + b"".join(tokens) + data[start + 400 :]


def _line(generator: random.Random, data: bytes, others: list[bytes], words: tuple[bytes, ...]) -> bytes:
    """Move, double, remove or join lines; a section may come again."""
    lines = data.split(b"\n")
    at, other = generator.randrange(len(lines)), generator.randrange(len(lines))
    kind = generator.randrange(5)
    if kind == 0:
        lines.insert(other, lines[at])
    elif kind == 1:
        del lines[at]
    elif kind == 2:
        lines[at:at] = lines[at : at + generator.randrange(1, 8)] * generator.choice((1, 3, 100))
    elif kind == 3:
        lines[at] = lines[at] + b" " + lines[other]
    else:
        lines[at] = b""
    return b"\n".join(lines)


_TEXTUAL = (_flip, _delete, _repeat, _insert, _word, _word, _splice, _cut, _token, _token, _line, _line)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# -- values -----------------------------------------------------------------------------------------------------------


def _structured(generator: random.Random, form: str, data: bytes) -> bytes:
    try:
        tree = json.loads(data) if form == "json" else tomli.loads(data.decode())
    except (ValueError, RecursionError):
        return data
    for _ in range(generator.choice((1, 1, 1, 2, 4))):
        tree = _changed(generator, tree)
    try:
        if form == "json":
            # a depth that Python could not write itself
            text = json.dumps(tree, ensure_ascii=generator.random() < 0.5)
            return _deepened(generator, _bytes(text))
        return _deepened(generator, _bytes(to_toml(tree)))
    except (ValueError, RecursionError):
        return data


def _deepened(generator: random.Random, data: bytes) -> bytes:
    if generator.random() > 0.03:
        return data
    number = data.find(b'"', generator.randrange(len(data) + 1))
    depth = generator.choice((50, 400, 990, 3000, 30_000))
    left, right = generator.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"{a=", b"}")))
    return data[:number] + left * depth + b"1" + right * depth + data[number:]


def _places(tree: Any, found: list[tuple[Any, Any]]) -> None:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in items:
        found.append((tree, key))
        _places(item, found)


def _odd(generator: random.Random) -> Any:
    return copy.deepcopy(generator.choice(ODD_VALUES))


def _changed(generator: random.Random, tree: Any) -> Any:
    places: list[tuple[Any, Any]] = []
    _places(tree, places)
    if not places or generator.random() < 0.01:
        return _odd(generator)
    parent, key = generator.choice(places)
    kind = generator.randrange(10)
    value = parent[key]
    if kind <= 1:
        parent[key] = _odd(generator)
    elif kind <= 3:
        parent[key] = generator.choice(ODD_TEXTS)
    elif kind == 4:
        del parent[key]
    elif kind == 5:
        other, place = generator.choice(places)
        # The other may be gone by an earlier change; a copy, so that no tree holds itself.
        there = place in other if isinstance(other, dict) else place < len(other)
        parent[key] = copy.deepcopy(other[place]) if there else None
    elif kind == 6 and isinstance(value, list) and value:
        # an input that is cut later must not cost extra memory
        most = max(1, LONGEST // max(1, len(json.dumps(value, default=str))))
        parent[key] = (value * min(most, generator.choice((2, 50, 3000 // len(value) + 1))))[:3000]
    elif kind == 7 and isinstance(parent, dict):
        parent[generator.choice([*ODD_TEXTS[:20], "x", str(key) + "x"])] = parent.pop(key)
    elif kind == 8 and isinstance(value, str):
        at = generator.randrange(len(value) + 1)
        parent[key] = value[:at] + generator.choice(ODD_TEXTS) + value[at + generator.randrange(3) :]
    elif kind == 9:
        parent[key] = generator.choice(([value], {"x": value}, str(value), [value, value]))
    else:
        parent[key] = _odd(generator)
    return tree


def to_toml(tree: Any) -> str:
    """Return a TOML document of `tree`, each of its keys in a line; what TOML cannot hold becomes a text."""
    if not isinstance(tree, dict):
        return f"value = {_value(tree)}\n"
    return "".join(f"{_text(str(key))} = {_value(item)}\n" for key, item in tree.items())


def _value(item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, float) and not math.isfinite(item):
        return "nan" if math.isnan(item) else f"{item}"
    if isinstance(item, int | float):
        return repr(item)
    if isinstance(item, list):
        return "[" + ", ".join(map(_value, item)) + "]"
    if isinstance(item, dict):
        return "{" + ", ".join(f"{_text(str(key))} = {_value(each)}" for key, each in item.items()) + "}"
    if item is None:
        return '""'
    if hasattr(item, "isoformat"):
        return str(item.isoformat())
    return _text(str(item))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
