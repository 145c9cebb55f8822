"""Times, sizes and amounts as people write them."""

import re

from envbuild.engine.details import Amount
from envbuild.errors import UsageError
from envbuild.util.text import count_of

_UNITS = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def seconds_of(age: str, option: str) -> float:
    """Return an age as people write it, such as `30d`, in seconds.

    Raises:
        UsageError: `option` got something else.

    """
    found = re.fullmatch(r"([0-9]{1,5})([hdw])", age.strip())
    if found is None:
        raise UsageError(f"{age[:40]!r} is no age", where=option, hint="write hours, days or weeks: 12h, 30d, 4w")
    return int(found[1]) * _UNITS[found[2]]


def about(seconds: float) -> str:
    """Return an estimate in words: `about 5 min left`."""
    if seconds < 60:
        return f"about {max(5, round(seconds / 5) * 5)} s left"
    if seconds < 5400:
        return f"about {round(seconds / 60)} min left"
    return f"about {seconds / 3600:.1f} h left"


def duration(seconds: float) -> str:
    """Return a time as people write it: `8 s`, `3:05`, `1:02:03`."""
    whole = round(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def size_text(count: int) -> str:
    """Return a number of bytes as people write it: `812 MB`, `1.2 GB`."""
    for unit, one in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= one:
            return f"{count / one:.1f} {unit}" if count < 10 * one else f"{count / one:.0f} {unit}"
    return f"{count} B"


def amount_text(amount: Amount) -> str:
    """Return how far something is: `23/58`, `12 of 62 tests`, `812 MB of 2.1 GB`."""
    if amount.unit == "steps":
        return f"[{amount.done}/{amount.total}]"
    if amount.unit == "tests":
        return f"{amount.done} of {count_of(amount.total, 'test')}"
    return size_text(amount.done) + (f" of {size_text(amount.total)}" if amount.total else "")
