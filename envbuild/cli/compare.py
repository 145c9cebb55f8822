"""`envbuild compare`: two records of training runs, where their losses part, and what differs between them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.output import emit, json_option, marked, progress_options

if TYPE_CHECKING:
    from envbuild.evidence.records import Evidence

_SHOWN = 40
"""Differences of two locks that are listed as text; --json lists all."""
_WORDS = {
    "equal": "equal to the bit",
    "within-band": "different, within the band of the seeds",
    "outside-band": "further apart than the seeds",
}


@click.command
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--records",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Look for ids in this folder of records. [default: this installation's]",
)
@click.option(
    "--locks",
    "lock_folders",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    multiple=True,
    help="Look for the runs' locks in this folder, too: a lock, or a folder of locks. May be given several times.",
)
@click.option("--exact", is_flag=True, help="Fail at any difference, also at one within the band.")
@json_option
@progress_options
def compare(
    first: str, second: str, records: Path | None, lock_folders: tuple[Path, ...], exact: bool, as_json: bool
) -> None:
    """Compare the training curves of the records A and B.

    A and B are files of records, or ids of records or their first digits. Both come from
    `envbuild smoke --level train --record FOLDER`. The answer is the first step in which the losses differ, by how much,
    and how far apart the seeds of A are there; then what differs between the two runs and between their locks.

    Exits with 0 when the curves are equal or within the band of the seeds; with 7 when they are further apart, or with
    --exact at any difference; with 2 when a record cannot be read or has no curve that the other has.
    """
    from envbuild.errors import DataError, SmokeError
    from envbuild.evidence.curves import compare as compared
    from envbuild.evidence.curves import curves_of
    from envbuild.evidence.named import named_record, run_differences
    from envbuild.lock.compare import differing_locks
    from envbuild.paths import data_dir
    from envbuild.settings import load_settings

    folder = records or data_dir("matrices") / "evidence"
    found = [named_record(name, folder) for name in (first, second)]
    (one, one_without), (other, other_without) = (curves_of(record, str(path)) for record, path in found)
    runs = [record for record, _ in found]
    comparisons, skipped = [], {**one_without, **other_without}
    for variant in dict.fromkeys([*one, *other]):
        if variant in one and variant in other:
            try:
                comparisons.append(compared(variant, one[variant], other[variant]))
            except ValueError as error:
                skipped[variant] = str(error)
        elif variant not in skipped:
            skipped[variant] = f"only in {first if variant in one else second}"
    if not comparisons:
        raise DataError(
            "the two records have no curve that can be compared: "
            + "; ".join(f"{variant}: {why}" for variant, why in skipped.items()),
            where=f"{first}, {second}",
        )
    own = load_settings().cache_dir / "locks"
    digests = (runs[0].lock_digest, runs[1].lock_digest)
    locks, notes = differing_locks(digests, (*lock_folders, data_dir("matrices") / "locks", own))
    order = ("equal", "within-band", "outside-band")
    verdict = max((each.verdict for each in comparisons), key=order.index)
    answer = {
        "records": [_record(record) for record in runs],
        "verdict": verdict,
        "curves": [each.as_json() for each in comparisons],
        "not_compared": skipped,
        "runs_differ": [each.as_json() for each in run_differences(*runs)],
        "locks_differ": None if locks is None else [each.as_json() for each in locks],
        "locks_note": notes,
    }
    emit(answer, as_json=as_json, human=lambda: _table(answer))
    if verdict == "outside-band" or (exact and verdict != "equal"):
        worst = max(comparisons, key=lambda each: order.index(each.verdict))
        place = worst.outside or worst.parted or worst.norms_parted
        assert place is not None  # noqa: S101 - a curve that is not equal parts somewhere
        raise SmokeError(
            f"the curves are {_WORDS[verdict]}: {worst.variant}, step {place.step}, by {place.difference:.3g}"
            + (f" where the seeds are {place.band:.3g} apart" if place.band is not None else ""),
            where=f"{first}, {second}",
            hint="what differs between the runs and their locks is listed above",
        )


def _record(record: "Evidence") -> dict[str, Any]:
    return {
        "id": record.id,
        "date": f"{record.date:%Y-%m-%dT%H:%M:%SZ}",
        "cell": record.cell_id,
        "lock": record.lock_digest,
        "image": record.image,
        "machine": record.machine,
    }


def _table(answer: Mapping[str, Any]) -> str:
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    out = StringIO()
    console = Console(file=out, width=120, highlight=False, color_system=None)
    for letter, record in zip("AB", answer["records"], strict=True):
        lines = f"{letter}  {record['id'][:23]}  {record['cell']}, {record['machine']}, {record['date'][:10]}"
        console.print(lines, markup=False, soft_wrap=True)
    curves = Table(title="losses", title_justify="left")
    for name in ("curve", "parts at step", "by", "band there", "furthest at step", "by", "band there", "verdict"):
        curves.add_column(name, justify="left" if name in {"curve", "verdict"} else "right")
    for curve in answer["curves"]:
        cells = [
            text
            for key in ("parted", "largest")
            for place in [curve[key]]
            for text in (
                (str(place["step"]), f"{place['difference']:.3g}", f"{place['band']:.3g}") if place else ("-", "-", "-")
            )
        ]
        curves.add_row(marked(curve["curve"]), *cells, _WORDS[curve["verdict"]])
    console.print(curves)
    for curve in answer["curves"]:
        norms = curve["gradient_norms_parted"]
        if norms:
            text = f"{curve['curve']}: the gradient norms part at step {norms['step']}, by {norms['difference']:.3g}"
            console.print(text, markup=False)
    for variant, why in answer["not_compared"].items():
        console.print(f"not compared: {variant}: {why}", markup=False)
    _differences(console, "what differs between the runs", answer["runs_differ"])
    if answer["locks_differ"] is None or not answer["locks_differ"]:
        console.print(f"locks: {answer['locks_note'] or 'nothing that runs differs'}", markup=False)
    else:
        _differences(console, "what differs between the locks", answer["locks_differ"])
    console.print(f"verdict: {_WORDS[answer['verdict']]}", markup=False)
    return out.getvalue().rstrip()


def _differences(console: Any, title: str, rows: Sequence[Mapping[str, str]]) -> None:
    from rich.table import Table

    if not rows:
        console.print(f"{title}: nothing", markup=False)
        return
    table = Table(title=title, title_justify="left")
    for name in ("what", "A", "B"):
        table.add_column(name, overflow="fold")
    for row in rows[:_SHOWN]:
        table.add_row(*(marked(row[key] or "-") for key in ("what", "first", "second")))
    console.print(table)
    if len(rows) > _SHOWN:
        console.print(f"and {len(rows) - _SHOWN} more (--json lists all)", markup=False)
