"""`envbuild image --matrix`: many cells, one after the other, and a table of what became of each."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from envbuild.cli.axes import keyword, request_from
from envbuild.cli.image import Asked, Given, make_one
from envbuild.cli.image_report import unreached_lines
from envbuild.cli.output import doing, emit, note
from envbuild.curate.coverage import Verification
from envbuild.errors import EnvbuildError, HostError, UsageError
from envbuild.util.names import shown
from envbuild.util.text import count_of


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one cell."""

    cell: Verification
    seconds: float = 0.0
    report: dict[str, Any] | None = None
    """The answer of `envbuild image` for it, where there is an image."""
    failure: EnvbuildError | None = None
    begun: bool = True

    @property
    def outcome(self) -> str:
        """`built`, `pulled` or `found`; `failed` or `not begun`."""
        if not self.begun:
            return "not begun"
        return "failed" if self.failure else str(self.report["origin"] if self.report else "failed")

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "id": self.cell.cell.id,
            "args": self.cell.args,
            "stack": self.cell.stack,
            "outcome": self.outcome,
            "seconds": round(self.seconds, 1),
            "exit_code": self.failure.exit_code if self.failure else (0 if self.report else None),
            "error": self.failure.as_json() if self.failure else None,
            "image": self.report,
        }


def make_many(
    options: Asked, given: Given, patterns: Sequence[str], skip: Sequence[str], *, dry_run: bool, as_json: bool
) -> None:
    """Make the image of every cell that a pattern names, and print what became of each.

    Raises:
        UsageError: an option names one image, or a pattern no cell.
        NoCellError: no cell fits.
        EnvbuildError: a cell failed; its exit code is that of the first one that did.

    """
    _refuse_single(options, given)
    doing("choosing cells")
    chosen, skipped = _cells(given, patterns, skip)
    if dry_run:
        rows = [Row(cell=cell, begun=False) for cell, _ in chosen]
        _emit(rows, skipped, 0.0, as_json=as_json)
        return
    started = time.monotonic()
    rows = []
    try:
        for number, (cell, versions) in enumerate(chosen, 1):
            note(f"[{number}/{len(chosen)}] {cell.cell.id}")
            one = replace(given, flags=given.flags | {keyword(axis): spec for axis, spec in versions.items()})
            rows.append(_row(cell, options, one, notices=number == 1))
    except KeyboardInterrupt:
        rows += [Row(cell=cell, begun=False) for cell, _ in chosen[len(rows) :]]
        _emit(rows, skipped, time.monotonic() - started, as_json=as_json)
        raise
    _emit(rows, skipped, time.monotonic() - started, as_json=as_json)
    failed = [row for row in rows if row.failure]
    if failed and (first := failed[0].failure) is not None:
        raise CellsFailedError(first, failed=len(failed), of=len(rows), cell=failed[0].cell.cell.id)


class CellsFailedError(EnvbuildError):
    """Cells of a matrix failed."""

    def __init__(self, first: EnvbuildError, *, failed: int, of: int, cell: str) -> None:
        super().__init__(
            f"{failed} of {count_of(of, 'cell')} failed; the first one: {first.what}",
            where=first.where or cell,
            hint=first.hint,
        )
        self.exit_code = first.exit_code  # type: ignore[misc]  # that of the first one


def _refuse_single(options: Asked, given: Given) -> None:
    single = {
        "--tag": options.tag,
        "--digest": options.digest,
        "--output": options.output,
        "--build-context": options.substitutes,
        "--lock": given.lock_file,
    }
    for flag, value in single.items():
        if value:
            raise UsageError(f"{flag} names one image, and --matrix many", where=flag, hint=f"leave {flag} out")


def _cells(
    given: Given, patterns: Sequence[str], skip: Sequence[str]
) -> tuple[list[tuple[Verification, dict[str, str]]], list[Verification]]:
    from envbuild.curate.matching import cells_matching
    from envbuild.evidence.refs import evidence_refs
    from envbuild.matrix.load import load_matrix

    return cells_matching(
        load_matrix(),
        request_from(given.flags),
        patterns,
        skip=skip,
        stack=given.flags.get("stack"),
        evidence=evidence_refs(),
    )


def _row(cell: Verification, options: Asked, given: Given, *, notices: bool) -> Row:
    """Make one image; whatever goes wrong with it is a row of the table."""
    started = time.monotonic()
    report, failure = None, None
    try:
        report, failure = make_one(options, given, notices=notices)
    except EnvbuildError as error:
        failure = error
    except OSError as error:
        failure = HostError(error.strerror or str(error), where=str(error.filename) if error.filename else None)
    except Exception as error:  # noqa: BLE001 - a night of builds must not end with one cell
        from envbuild.cli.program import internal_error

        failure = internal_error(error)
    if failure is not None:
        note(f"{cell.cell.id} failed: {failure.what.partition(chr(10))[0]}")
    return Row(cell=cell, seconds=time.monotonic() - started, report=report, failure=failure)


def _emit(rows: list[Row], skipped: list[Verification], seconds: float, *, as_json: bool) -> None:
    outcomes = ("built", "pulled", "found", "failed", "not begun")
    answer = {
        "cells": [row.as_json() for row in rows],
        "skipped": [cell.cell.id for cell in skipped],
        "counts": {name: sum(row.outcome == name for row in rows) for name in outcomes},
        "seconds": round(seconds, 1),
    }
    emit(answer, as_json=as_json, human=lambda: _table(rows, skipped, answer["counts"], seconds))


def _table(rows: list[Row], skipped: list[Verification], counts: Any, seconds: float) -> str:
    from envbuild.cli.quantities import duration
    from envbuild.cli.show import table

    lines: list[tuple[str, ...]] = [("cell", "outcome", "time", "image or error")]
    for row in rows:
        if row.failure is not None:
            last = f"exit code {row.failure.exit_code}: {shown(row.failure.what.partition(chr(10))[0], 100)}"
        else:
            last = row.report["digest"][:19] if row.report else row.cell.args
        lines.append((row.cell.cell.id, row.outcome, duration(row.seconds) if row.begun else "", last))
    lines += [(cell.cell.id, "skipped", "", "") for cell in skipped]
    summed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    more = [f"{len(skipped)} skipped"] if skipped else []
    unreached: dict[str, str] = {}
    for row in rows:
        unreached |= row.report["unreached"] if row.report else {}
    last = "; ".join([f"{summed} in {duration(seconds)}", *more])
    return "\n".join([table(lines, indent=""), "", last, *unreached_lines(unreached)])
