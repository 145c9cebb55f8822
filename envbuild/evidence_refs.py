"""The committed evidence as the solver ranks by it: how far each proof went, and the versions that it ran."""

from functools import cache
from typing import TYPE_CHECKING

from envbuild.matrix.order import SOFTWARE, EvidenceRef
from envbuild.paths import data_dir

if TYPE_CHECKING:
    from envbuild.verify.evidence import Evidence


@cache
def committed_evidence() -> tuple["Evidence", ...]:
    """Return the records of this installation, read once.

    Raises:
        DataError: a record was edited.

    """
    from envbuild.verify.evidence import load_evidence

    return load_evidence(data_dir("matrices") / "evidence")


@cache
def evidence_refs() -> tuple[EvidenceRef, ...]:
    """Return what the records that passed prove; a run of some tests alone (`-k`) proves no cell.

    A record of an older suite or lock still ranks: those versions ran together. `resolve` and `matrix` say that it is stale.

    Raises:
        DataError: a record was edited.

    """
    found = []
    for record in committed_evidence():
        if not record.passed or record.keyword:
            continue
        versions = {axis: str(record.cell[axis]) for axis in SOFTWARE if record.cell.get(axis)}
        if record.device == "cuda":
            level = EvidenceRef(id=record.id, level="gpu", versions=versions)
        elif record.level == "import":
            level = EvidenceRef(id=record.id, level="built", versions=versions)
        else:
            level = EvidenceRef(id=record.id, level="cpu", versions=versions)
        found.append(level)
    return tuple(found)
