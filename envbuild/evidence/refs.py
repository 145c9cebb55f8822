"""The committed evidence as the solver ranks by it: how far each proof went, the versions that it ran, and on what."""

from functools import cache
from typing import TYPE_CHECKING

from envbuild.components import SOFTWARE
from envbuild.evidence.kept import records_of
from envbuild.evidence.place import altered_of, place_of, replaced_of
from envbuild.paths import data_dir
from envbuild.solver.proof import EvidenceRef, Level

if TYPE_CHECKING:
    from envbuild.evidence.records import Evidence
    from envbuild.evidence.trials import Ledger


@cache
def committed_evidence() -> tuple["Evidence", ...]:
    """Return the records of this installation, read once.

    Raises:
        DataError: a record was edited.

    """
    from envbuild.evidence.records import Evidence, load_evidence

    return records_of(data_dir("matrices") / "evidence", ".json", Evidence, load_evidence, ("tests",))


@cache
def evidence_refs() -> tuple[EvidenceRef, ...]:
    """Return what the records that passed prove, on which place (`place.PLACE`), and whether an image ran.

    Without a training step a run proves no more than that the cell could be built; a run of some tests alone (`-k`) proves
    nothing of a cell.

    A record does not name a component whose source was replaced: it speaks for the rest. One of an older suite or lock
    still ranks: those versions ran together. `resolve` and `matrix` say that it is stale.

    Raises:
        DataError: a record was edited.

    """
    found = []
    for record in committed_evidence():
        if not record.passed or record.keyword:
            continue
        without = replaced_of(record)
        versions = {axis: str(record.cell[axis]) for axis in SOFTWARE if record.cell.get(axis) and axis not in without}
        level: Level = "built" if not record.to_step else "gpu" if record.device == "cuda" else "cpu"
        found.append(
            EvidenceRef(
                id=record.id,
                level=level,
                versions=versions,
                place=place_of(record),
                altered=altered_of(record),
                image=record.image,
            )
        )
    return tuple(found)


@cache
def committed_trials() -> "Ledger":
    """Return the ledger of trials that `claim_of` and the page ask, by pair of releases.

    Raises:
        DataError: a record was edited.

    """
    from envbuild.evidence import trials

    return trials.committed_ledger()
