"""What the records of a cell prove of it: the one that counts, and whether it is stale; the same for the page."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from envbuild.evidence.place import differences, place_of, proof_of, replaced_of
from envbuild.evidence.records import Evidence
from envbuild.matrix.cell import NONE
from envbuild.matrix.model import AxisName
from envbuild.solver.proof import Proof
from envbuild.util.frozen import Frozen

Suite = str | Callable[[Collection[str], str, datetime], str]
"""The hash of the smoke suite, or what gives it for the axes of a cell, and the level and the date of a run."""

Status = Literal["verified", "failed", "stale", "never"]
_BEST_FIRST = ("verified", "stale", "failed", "never")


class Standing(Frozen):
    """What the records say of one cell or lock."""

    status: Status
    record: Evidence | None = None
    """The record that the status rests on."""
    why_stale: str = ""


def evidence_for(
    records: Iterable[Evidence], *, cell_id: str, suite: Suite | None = None, lock_digest: str | None = None
) -> Standing:
    """Return what the records say of a cell.

    Runs on GPUs count before runs on a CPU, which prove less; stale ones count where there is no other. A run that failed
    stands until a later one passes that ran the same tests or more, as far and on as many ranks. Of those that passed since, the one
    on the most ranks is shown; a run of some tests alone (`-k`) or of a level below `step` only where there is no whole one.

    Args:
        records: as `load_evidence` returns them.
        cell_id: the cell.
        suite: hash of the suite as it is now, or what gives it for a cell; a record of another suite is stale.
        lock_digest: the cell's lock as it is now; a record of another lock is stale.

    """
    mine = [record for record in records if record.cell_id == cell_id]
    # A host where something is missing proves nothing about the cell.
    useful = [record for record in mine if record.verdict not in {"host", "interrupted"}]
    if not useful:
        return Standing(status="never")
    ranked = sorted(useful, key=lambda record: (record.device == "cuda", record.date), reverse=True)
    stale: tuple[Evidence, str] | None = None
    passed: list[Evidence] = []
    since: list[Evidence] = []  # whole runs that passed after the last whole one that failed
    fixed = False
    for record in ranked:
        if passed and passed[0].device != record.device:
            break
        why = _staleness(record, suite, lock_digest)
        if why:
            stale = stale or (record, why)
        elif record.passed:
            passed.append(record)
            if record.to_step and not record.keyword and not fixed:
                since.append(record)
        elif any(later.takes_back(record) for later in passed):
            fixed = fixed or not record.keyword
        else:
            return Standing(status="failed", record=record)
    if passed:
        # What the lock makes; of it the image itself, before its environment on a host; then the most ranks.
        best = (
            max(since, key=lambda record: (not replaced_of(record), record.image is not None, record.ranks))
            if since
            else passed[0]
        )
        return Standing(status="verified", record=best)
    if stale is None:
        return Standing(status="never")
    return Standing(status="stale", record=stale[0], why_stale=stale[1])


def standing_for(
    own: Sequence[Evidence],
    versions: Mapping[AxisName, str],
    *,
    suite: Suite | None = None,
    lock_digest: str | None = None,
) -> Standing:
    """Return what the records of one cell say of `versions`: those that count for it, and only where none does, the others.

    Args:
        own: records of one cell.
        versions: the cell that it is about, axis -> version; that one, or another with its software.
        suite: as for `evidence_for`.
        lock_digest: likewise.

    """
    standing = Standing(status="never")
    for some in ([record for record in own if not differences(record, versions)], own):
        if some and standing.status == "never":
            standing = evidence_for(some, cell_id=some[0].cell_id, suite=suite, lock_digest=lock_digest)
    return standing


def _staleness(record: Evidence, suite: Suite | None, lock_digest: str | None) -> str:
    now = suite(record.cell, record.level, record.date) if callable(suite) else suite
    if now is not None and record.suite != now:
        return "the smoke suite has changed since"
    if lock_digest is not None and record.lock_digest != lock_digest:
        return "the lock has changed since"
    return ""


def summary(standing: Standing, cell_id: str, versions: Mapping[AxisName, str]) -> dict[str, str]:
    """Return a standing as JSON values.

    Args:
        standing: what the records of a cell say.
        cell_id: that cell.
        versions: the cell that it is about, axis -> version.

    Returns:
        `status`, `claim` (a word of `Proof`) and `cell`; of the record it rests on, `where`, `gpu`, `image` (its digest, or
        nothing where an environment on a host ran), `date`, `why` and `record`. `why` is what keeps it from more: staleness, what failed, what of the run was not as in `versions`,
        and that another release made the image.

    """
    record = standing.record
    if record is None:
        return {"status": standing.status, "claim": Proof.STATED.value, "cell": cell_id}
    found = differences(record, versions)
    reason = record.reason.partition("\n")[0]
    level = "" if record.to_step else f"level {record.level} alone"
    why = [standing.why_stale, *((level, *found.values()) if record.passed else (reason,))]
    why += [f"envbuild {record.other_release} made the image"] if record.other_release else []
    return {
        # What is called stale is a proof; a failed run stays one when it is stale.
        "status": "failed" if not record.passed else "never" if found else standing.status,
        "claim": (proof_of(record, versions) if record.passed else Proof.STATED).value,
        "cell": cell_id,
        "where": record.where,
        "gpu": place_of(record)["gpu"],
        "image": record.image or "",
        "date": record.date.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "why": "; ".join(each for each in why if each),
        "record": record.id,
    }


_CLAIMS_BEST_FIRST = (Proof.HERE, Proof.ELSEWHERE, Proof.TRIED, Proof.STATED)


def summaries(
    records: Collection[Evidence],
    pins: Mapping[AxisName, str],
    versions: Mapping[AxisName, str],
    suite: Suite | None = None,
) -> list[dict[str, str]]:
    """Return the summaries of the cells with these pins, the best first; nothing when none was ever run.

    Args:
        records: every record.
        pins: what a cell must have to be one of them, axis -> version.
        versions: the cell that they are about, axis -> version.
        suite: as for `evidence_for`.

    """
    mine = [r for r in records if all((r.cell.get(axis) or NONE) == version for axis, version in pins.items())]
    known = []
    for cell_id in sorted({record.cell_id for record in mine}):
        standing = standing_for([r for r in mine if r.cell_id == cell_id], versions, suite=suite)
        if standing.record is not None:
            known.append(summary(standing, cell_id, versions))
    return sorted(
        known,
        key=lambda each: (
            _CLAIMS_BEST_FIRST.index(Proof(each["claim"])),
            _BEST_FIRST.index(each["status"]),
            not each.get("image"),
            each["cell"],
        ),
    )
