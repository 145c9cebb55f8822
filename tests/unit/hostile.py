"""Hostile values, and putting one in the place of each field of nested data."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

MARK = "pwned"
TEXTS = (
    f"x\nRUN touch /{MARK}",
    f"x\r\nRUN touch /{MARK}",
    f"x\nenvbuild_end\nRUN touch /{MARK}\nCOPY <<'envbuild_end' /x\n",
    f"x; touch /{MARK}",
    f"x' ; touch /{MARK} ; '",
    f'x" ; touch /{MARK} ; "',
    f"$(touch /{MARK})",
    f"`touch /{MARK}`",
    f"${{IFS}}{MARK}",
    f"x --mount=type=secret,id=env,target=/{MARK}",
    f"x,source=/{MARK},target=/etc",
    f"--upload-pack=touch /{MARK}",
    f"../../{MARK}",
    f"/etc/{MARK}",
    f"x/../../{MARK}",
    f"x\x00{MARK}",
    f"\x1b]0;{MARK}\x07",
    f"x\u2028RUN {MARK}",
    f"x\\\n{MARK}",
    f"# {MARK}",
    f"*{MARK}?",
    "",
    "x" * 100_000,
)
OTHERS: tuple[Any, ...] = (None, True, -1, 2**70, 1.5, float("nan"), [], ["x"], {}, {"x": "y"})

TABLES = ("cell", "commits", "environment", "stated")
"""Fields whose keys are not fixed."""


def leaves(data: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every field in `data`; of a list's entries, and of a table of texts, the first and the last."""
    if place:
        yield place
    if isinstance(data, dict):
        table = place and len(data) > 2 and all(isinstance(value, str) for value in data.values())
        for key in list(data)[:: len(data) - 1] if table and place[-1] in TABLES else data:
            yield from leaves(data[key], (*place, key))
    elif isinstance(data, list | tuple):
        for number in sorted({0, len(data) - 1} if data else ()):
            yield from leaves(data[number], (*place, number))


def put(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of `data` with `value` at `place`."""
    if not place:
        return value
    first, *rest = place
    if isinstance(data, dict):
        return data | {first: put(data[first], tuple(rest), value)}
    return [put(item, tuple(rest), value) if number == first else item for number, item in enumerate(data)]


def put_unchecked(data: Any, place: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a model with `value` at `place`, which no validator has seen."""
    if not place:
        return value
    first, *rest = place
    if isinstance(data, BaseModel):
        return data.model_copy(update={first: put_unchecked(getattr(data, first), tuple(rest), value)})
    if isinstance(data, dict):
        return data | {first: put_unchecked(data[first], tuple(rest), value)}
    return tuple(put_unchecked(item, tuple(rest), value) if n == first else item for n, item in enumerate(data))


def outside_of_documents(text: str) -> list[str]:
    """Return the lines of a Dockerfile or script that are part of no here-document."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if not inside:
            lines.append(line)
        if inside and line.strip() == "envbuild_end":
            inside = False
        elif "<<'envbuild_end'" in line:
            inside = True
    return lines
