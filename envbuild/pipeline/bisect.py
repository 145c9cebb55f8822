"""The step of a way between two cells that turns a test from passed to failed; every verdict is kept as it comes."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from envbuild.errors import SmokeError
from envbuild.matrix.cell import Cell
from envbuild.solver.between import Stop
from envbuild.util.below import OutsideError, read_file
from envbuild.util.foreign_json import parse_json

_LOG_LIMIT = 1 << 22
_WORDS: Mapping[bool, Literal["good", "bad"]] = {True: "good", False: "bad"}

Judge = Callable[[Stop, str], tuple[bool, str]]
"""Takes a stop and its place on the way; makes its image, tests it, and returns whether it is good, and a line on why."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the test came to at one stop."""

    place: int
    good: bool
    why: str
    kept: bool
    """Whether it is from the log of an earlier run."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The step that makes the difference."""

    stops: Sequence[Stop]
    first_bad: int
    """Place of the first bad stop; the one before it is good."""
    verdicts: tuple[Verdict, ...]
    """In the order in which they came."""

    @property
    def moved(self) -> tuple[str, ...]:
        """The axes of that step; several where they can only move together."""
        return self.stops[self.first_bad].moved

    @property
    def already(self) -> tuple[str, ...]:
        """The axes that had the bad cell's version before it: the fault may need them, too."""
        return tuple(axis for stop in self.stops[1 : self.first_bad] for axis in stop.moved)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        before, after = self.stops[self.first_bad - 1].cell, self.stops[self.first_bad].cell
        return {
            "axes": [
                {"axis": axis, "good": before.versions.get(axis), "bad": after.versions.get(axis)}
                for axis in self.moved
            ],
            "already_moved": list(self.already),
            "last_good": before.id,
            "first_bad": after.id,
            "runs": sum(not each.kept for each in self.verdicts),
        }


def most_runs(differing: int) -> int:
    """Return how often the test runs at most for two cells that differ in so many axes."""
    return math.ceil(math.log2(differing)) + 2


def key_of(cell: Cell) -> str:
    """Return a hash over all that a cell states, the flavor among it, which is no part of its id."""
    body = json.dumps([sorted(cell.versions.items()), sorted(cell.commits.items())])
    return hashlib.sha256(body.encode()).hexdigest()


class Log:
    """The verdicts of one search, a line of JSON each; a line that a kill cut off is passed over, and its test runs again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept: dict[str, tuple[bool, str]] = {}
        try:
            lines = read_file(path, limit=_LOG_LIMIT).splitlines()
        except (FileNotFoundError, OutsideError):
            lines = []
        for line in lines:
            try:
                match parse_json(line, limit=_LOG_LIMIT):
                    case {"cell": str(cell), "verdict": "good" | "bad" as verdict, "why": str(why)}:
                        self.kept[cell] = (verdict == "good", why)
            except ValueError:
                continue

    def add(self, cell: str, *, good: bool, why: str) -> None:
        """Keep a verdict; it is on the disk when this returns."""
        self.kept[cell] = (good, why)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            # behind a line that was cut off, this one would be lost with it
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            cut = size and file.read(1) != b"\n"
            line = json.dumps({"cell": cell, "verdict": _WORDS[good], "why": why})
            file.write((b"\n" if cut else b"") + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def bisect(
    stops: Sequence[Stop],
    judge: Judge,
    log: Log,
    note: Callable[[str], None] = lambda _: None,
    kept_under: Callable[[Cell], str] = key_of,
) -> Found:
    """Find the step of a way that turns good to bad, in at most `most_runs` runs of the test.

    A way is halved as if good turned to bad once. Where it turns back and forth, the answer is one of the steps that turn it
    to bad.

    Args:
        stops: the way; the first stop is to be good and the last one bad.
        judge: makes the image of a stop and tests it.
        log: verdicts of earlier runs of the same search; new ones are added.
        note: takes a line about each verdict.
        kept_under: returns what a verdict is kept under in the log, for a cell.

    Raises:
        SmokeError: the first stop is bad, or the last one good.
        EnvbuildError: a stop could not be made or judged; a later run goes on there.

    """
    verdicts: list[Verdict] = []

    def is_good(place: int) -> bool:
        stop = stops[place]
        key = kept_under(stop.cell)
        kept = log.kept.get(key)
        if kept is None:
            good, why = judge(stop, f"cell {place} of {len(stops) - 1}")
            log.add(key, good=good, why=why)
        else:
            good, why = kept
        verdicts.append(Verdict(place=place, good=good, why=why, kept=kept is not None))
        more = f": {why}" if why else ""
        note(f"{_WORDS[good]}{' (kept from an earlier run)' if kept else ''}: {stop.cell.id}{more}")
        return good

    if not is_good(0):
        raise SmokeError(
            f"GOOD fails the test: {verdicts[-1].why}",
            where=stops[0].cell.id,
            hint="name a cell that passes it; --restart forgets what earlier runs found",
        )
    if is_good(len(stops) - 1):
        raise SmokeError(
            "BAD passes the test",
            where=stops[-1].cell.id,
            hint="what differs is no axis of the cell: packages of a lock, the machine, or the test's own noise",
        )
    low, high = 0, len(stops) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return Found(stops=stops, first_bad=high, verdicts=tuple(verdicts))
