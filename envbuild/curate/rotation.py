"""Which part of the cells is verified on which day, and which of them were verified already.

Each pair of releases belongs to one share of the list by its name alone. So it stays in its share while the matrix, the
evidence, the flags or the seed change, and any N days in a row, a share a day, cover every pair that some cell holds on all
of them. The seed decides in which cells: after N days comes another one.
"""

import datetime as dt
import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from envbuild.errors import UsageError
from envbuild.evidence.records import Evidence
from envbuild.evidence.report import Device
from envbuild.evidence.standing import evidence_for
from envbuild.util.names import shown

MOST_SHARES = 400
"""One a day for more than a year; GitHub runs at most 256 jobs of one matrix, and a share has fewer than the whole."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One of `of` shares of what is to be verified."""

    number: int
    """From 1 to `of`."""
    of: int
    seed: int = 0
    """Which cells are taken for what belongs to the share."""

    def has(self, *name: str) -> bool:
        """Whether what these words name belongs to this share."""
        return ordering(0, *name) % self.of == self.number - 1


def ordering(seed: int, *name: str) -> int:
    """Return where a seed puts what these words name: a number of 64 bits, the same on every machine."""
    text = "\0".join((str(seed), *name))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def read_share(text: str, *, seed: int | None, day: dt.date) -> Share:
    """Return the share that `--shard` names: `3/10`, or `today/10` for the one of the day.

    Args:
        text: what was given.
        seed: of the order; for `today` the number of the round by default, else 0.
        day: which day `today` is.

    Raises:
        UsageError: it names none.

    """
    number, _, count = text.strip().partition("/")
    of = int(count) if count.isascii() and count.isdecimal() and len(count) < 5 else 0
    if 1 <= of <= MOST_SHARES:
        if number == "today":
            turn, place = divmod(day.toordinal(), of)
            return Share(number=place + 1, of=of, seed=turn if seed is None else seed)
        at = int(number) if number.isascii() and number.isdecimal() and len(number) < 5 else 0
        if 1 <= at <= of:
            return Share(number=at, of=of, seed=seed or 0)
    raise UsageError(
        f"{shown(text, 40)!r} is no share",
        where="--shard",
        hint=f"write K/N, such as 3/10, or today/10 for the share of the day; at most {MOST_SHARES} shares",
    )


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The cells that recorded runs verified, as a day sees them."""

    records: tuple[Evidence, ...]
    """One per cell: the run that its standing rests on."""

    def cell(self, cell_id: str, lock_digest: str | None = None) -> bool:
        """Whether a cell was verified; with `lock_digest`, whether that lock of it was."""
        return any(r.cell_id == cell_id and lock_digest in {None, r.lock_digest} for r in self.records)


def verified_by(
    records: Iterable[Evidence],
    *,
    since: dt.datetime | None,
    suite: Callable[[Collection[str], str, dt.datetime], str],
    device: Device | None = None,
) -> Verified:
    """Return the cells whose last runs of the whole suite passed.

    Args:
        records: every record.
        since: a record from before then is stale; None where none is.
        suite: what gives the suite's hash for the axes of a cell, and the level and the date of a run; a record of another suite is
            stale.
        device: count only runs on this.

    """
    fresh: dict[str, list[Evidence]] = {}
    for record in records:
        # A run of some tests alone, or of less than a training step, verifies nothing. A failed one counts all the same.
        part = record.passed and (bool(record.keyword) or not record.to_step)
        if not part and (since is None or record.date >= since) and device in {None, record.device}:
            fresh.setdefault(record.cell_id, []).append(record)
    found = []
    for cell_id, own in fresh.items():
        # By lock: what the newest lock's image failed in is not made good by an older lock's.
        for lock in {record.lock_digest for record in own}:
            standing = evidence_for([r for r in own if r.lock_digest == lock], cell_id=cell_id, suite=suite)
            if standing.status == "verified" and standing.record is not None:
                found.append(standing.record)
    return Verified(records=tuple(sorted(found, key=lambda record: record.id)))
