"""Proof by GPU: on which board a combination ran, and whether in an image or in an environment on a host."""

from collections.abc import Mapping, Sequence

from envbuild.evidence.place import place_of
from envbuild.evidence.records import Evidence
from envbuild.evidence.standing import Suite, standing_for, summary
from envbuild.matrix.cell import NONE

IMAGE, ENVIRONMENT = "image", "environment on a host"
_CPU = "CPU"


def board_of(record: Evidence) -> str:
    """Return the board that the run used, without its maker's name; `CPU` where it used none."""
    if not record.gpus or record.device == "cpu":
        return _CPU
    return " and ".join(sorted({gpu.name.removeprefix("NVIDIA ") for gpu in record.gpus}))


def ran_in(record: Evidence) -> str:
    """Return what ran: an image, or a host's environment."""
    return IMAGE if record.image is not None else ENVIRONMENT


def proof_by_gpu(records: Sequence[Evidence], suite: Suite | None = None) -> tuple[Mapping[str, str], ...]:
    """Return what the records say of each cell on each board, in an image and in an environment apart.

    Args:
        records: every record; those of a host where something was missing prove nothing and are left out.
        suite: as for `evidence_for`; a proof of another suite is stale.

    Returns:
        Rows of `board`, `gpu` (its architecture or `none`), `by`, `cuda`, `torch` and `te` (of the cell), and of the record
        that counts `cell`, `status`, `where`, `ranks`, `date`, `why` and `record`; by board (CPU last), images first, newest
        first.

    """
    groups: dict[tuple[str, str, str], list[Evidence]] = {}
    for record in records:
        groups.setdefault((board_of(record), ran_in(record), record.cell_id), []).append(record)
    rows: list[dict[str, str]] = []
    for (board, by, cell_id), some in groups.items():
        versions = {axis: version for axis, version in some[-1].cell.items() if isinstance(version, str)}
        standing = standing_for(some, versions, suite=suite)
        found = standing.record
        if found is None:
            continue
        rows.append(
            {
                **{axis: str(found.cell.get(axis) or NONE) for axis in ("cuda", "torch", "te")},
                **{
                    key: value
                    for key, value in summary(standing, cell_id, versions).items()
                    if key in {"cell", "where", "date", "why", "record"}
                },
                "board": board,
                "gpu": place_of(found)["gpu"],
                "by": by,
                "status": standing.status,
                "ranks": str(found.ranks),
            }
        )
    rows.sort(key=lambda row: row["date"], reverse=True)
    return tuple(sorted(rows, key=lambda row: (row["board"] == _CPU, row["board"], row["by"] != IMAGE)))
