"""What the records say of a cell: whether it was proven, where, when, and by how much of it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from envbuild.components import SOFTWARE
from envbuild.evidence.records import Evidence
from envbuild.matrix.cell import NONE, Cell
from envbuild.solver.order import EvidenceRef

Suite = str | Callable[[Collection[str]], str]
"""The hash of the smoke suite, or what gives it for the axes of a cell."""

Status = Literal["verified", "failed", "stale", "never"]
_BEST_FIRST = ("verified", "stale", "failed", "never")


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What the records say of one cell or lock."""

    status: Status
    record: Evidence | None = None
    """The record that the status rests on."""
    why_stale: str = ""

    def describe(self, now: datetime | None = None) -> str:
        """Return it in words: `verified on H200, driver 580, 3 days ago`, `never verified`."""
        if self.record is None:
            return "never verified"
        when = age(self.record.date, now or datetime.now(UTC))
        level = "" if self.record.to_step else f" ({self.record.level})"
        how = f"{f'verified{level}' if self.record.passed else 'failed'} on {self.record.where}, {when}"
        if self.status == "stale":
            return f"stale: {how}, but {self.why_stale}"
        if self.record.passed and self.record.caveat:
            how += f" ({self.record.caveat})"
        return how if self.record.passed else f"{how}: {self.record.reason.partition(chr(10))[0]}"


def age(then: datetime, now: datetime) -> str:
    """Return how long ago `then` was, in one unit."""
    seconds = max(0, int((now - then).total_seconds()))
    for unit, size in (("year", 31557600), ("month", 2629800), ("day", 86400), ("hour", 3600), ("minute", 60)):
        count = seconds // size
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def evidence_for(
    records: Iterable[Evidence], *, cell_id: str, suite: Suite | None = None, lock_digest: str | None = None
) -> Standing:
    """Return what the records say of a cell.

    Runs on GPUs count before runs on a CPU, which prove less; stale ones count where there is no other. A run that failed
    stands until a later one passes that ran the same tests or more, as far and on as many ranks. Of those that passed since, the one
    on the most ranks is told; a run of some tests alone (`-k`) or of a level below `step` only where there is no whole one.

    Args:
        records: as `load_evidence` returns them.
        cell_id: the cell.
        suite: hash of the suite as it is now, or what gives it for a cell; a record of another suite is stale.
        lock_digest: the cell's lock as it is now; a record of another lock is stale.

    """
    mine = [record for record in records if record.cell_id == cell_id]
    # A host that lacks something says nothing about the cell.
    telling = [record for record in mine if record.verdict not in {"host", "interrupted"}]
    if not telling:
        return Standing(status="never")
    ranked = sorted(telling, key=lambda record: (record.device == "cuda", record.date), reverse=True)
    stale: tuple[Evidence, str] | None = None
    passed: list[Evidence] = []
    since: list[Evidence] = []  # whole runs that passed after the last whole one that failed
    mended = False
    for record in ranked:
        if passed and passed[0].device != record.device:
            break
        why = _staleness(record, suite, lock_digest)
        if why:
            stale = stale or (record, why)
        elif record.passed:
            passed.append(record)
            if record.to_step and not record.keyword and not mended:
                since.append(record)
        elif any(later.takes_back(record) for later in passed):
            mended = mended or not record.keyword
        else:
            return Standing(status="failed", record=record)
    if passed:
        return Standing(status="verified", record=max(since, key=lambda record: record.ranks) if since else passed[0])
    if stale is None:
        return Standing(status="never")
    return Standing(status="stale", record=stale[0], why_stale=stale[1])


def _staleness(record: Evidence, suite: Suite | None, lock_digest: str | None) -> str:
    now = suite(record.cell) if callable(suite) else suite
    if now is not None and record.suite != now:
        return "the smoke suite has changed since"
    if lock_digest is not None and record.lock_digest != lock_digest:
        return "the lock has changed since"
    return ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What may be said of a cell from its own records, or else from those of another cell with its software."""

    status: Status
    text: str
    """The same in words."""
    record: Evidence | None = None
    """The record that the status rests on."""


def claim_of(
    cell: Cell,
    proven: Iterable[EvidenceRef],
    records: Collection[Evidence],
    *,
    suite: Suite | None = None,
    lock_digest: str | None = None,
) -> Claim:
    """Return what the records say of the cell, or else of another with its software.

    Args:
        cell: the cell.
        proven: the records that the solver found for its software.
        records: every record.
        suite: as for `evidence_for`.
        lock_digest: the cell's lock; a record of the cell with another one is stale.

    """
    standing = evidence_for(records, cell_id=cell.id, suite=suite, lock_digest=lock_digest)
    if standing.status != "never":
        return Claim(status=standing.status, text=standing.describe(), record=standing.record)
    ids = {ref.id for ref in proven}
    others = [record for record in records if record.id in ids]  # of cells that hold what was left open
    if not others:
        return Claim(status="never", text=standing.describe())

    def missing(record: Evidence) -> list[str]:
        return [axis for axis in SOFTWARE if axis in cell.versions and record.cell.get(axis) != cell.versions[axis]]

    record = min(others, key=lambda other: (len(missing(other)), other.device == "cpu", -other.date.timestamp()))
    there = evidence_for(records, cell_id=record.cell_id, suite=suite)
    text = f"{there.describe()}, in {record.cell_id}"
    if missing(record):
        return Claim(status="never", text=f"never verified; all but {', '.join(missing(record))}: {text}")
    return Claim(status=there.status, text=f"{text}, whose software is this cell's", record=there.record)


def summary(standing: Standing, cell_id: str) -> dict[str, str]:
    """Return a standing as JSON values: `status`, `cell` and, of the record it rests on, `where`, `date`, `why`, `record`."""
    record = standing.record
    if record is None:
        return {"status": standing.status, "cell": cell_id}
    reason = record.reason.partition("\n")[0]
    level = "" if record.to_step else f"level {record.level} alone"
    why = [standing.why_stale, *((level, record.caveat) if record.passed else (reason,))]
    return {
        # What is called stale is a proof; a failed run stays one when it is stale.
        "status": standing.status if record.passed else "failed",
        "cell": cell_id,
        "where": record.where,
        "date": record.date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "why": "; ".join(each for each in why if each),
        "record": record.id,
    }


def summaries(
    records: Collection[Evidence], versions: Mapping[str, str], suite: Suite | None = None
) -> list[dict[str, str]]:
    """Return the summaries of the cells with these versions, the best first; nothing when none was ever run."""
    ids = sorted(
        {r.cell_id for r in records if all((r.cell.get(axis) or NONE) == version for axis, version in versions.items())}
    )
    found = [(cell_id, evidence_for(records, cell_id=cell_id, suite=suite)) for cell_id in ids]
    known = [summary(standing, cell_id) for cell_id, standing in found if standing.record is not None]
    return sorted(known, key=lambda each: (_BEST_FIRST.index(each["status"]), each["where"] == "CPU", each["cell"]))
