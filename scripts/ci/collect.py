#!/usr/bin/env python3
"""Take the records and locks that a run's cells left, and commit them to a new branch for a pull request.

    scripts/ci/collect.py --results FOLDER --cells cells.json --branch evidence/2026-11-23-1 --body body.md

FOLDER has a folder per cell, as scripts/ci/cell.py makes it, or is that of the only cell. Nothing in it is trusted: it comes from machines that ran
what others wrote. A record must load, with the hash that its name states, be new, and be of a cell that this run chose;
a lock likewise. Whatever else is there is left where it is. The branch starts at HEAD; nothing is pushed.

Writes the outputs `branch` (empty where there is nothing to commit) and `records`, and the text of the pull request to
--body. Exits with 4 where something was refused; the rest is committed all the same.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from branches import check_branch, commit
from workflow import ROOT, cell_text, code, output, summary, table

from envbuild.errors import EnvbuildError
from envbuild.evidence.records import Evidence, read_evidence
from envbuild.lock.files import read_lock
from envbuild.util.below import OutsideError, read_below
from envbuild.util.names import SafeName, checked

RECORD = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}\.json")
LOCK_FILE = re.compile(r"lock\.json|pylock\.[a-z]{1,20}\.toml")
RECORD_LIMIT = 8 << 20
LOCK_LIMIT = 32 << 20
MOST_ENTRIES = 300


class RefusedError(Exception):
    """Something in a result is not as scripts/ci/cell.py writes it."""


def names_in(folder: Path) -> list[str]:
    """Return the names of a folder that is no link; none where there is no such folder."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = sorted(entry.name for entry in entries)
    if len(found) > MOST_ENTRIES:
        raise RefusedError(f"{folder.name} has more than {MOST_ENTRIES} entries")
    return found


def record_of(result: Path, name: str, chosen: set[str], scratch: Path) -> tuple[Evidence, bytes]:
    """Return a record and its bytes.

    Raises:
        RefusedError: it is none, it was edited, or it is not of this run.

    """
    if not RECORD.fullmatch(name):
        raise RefusedError("its name is not that of a record")
    try:
        body = read_below(result / "evidence", name, limit=RECORD_LIMIT)
    except (OutsideError, OSError) as error:
        raise RefusedError(str(error)) from None
    copy = scratch / name
    copy.write_bytes(body)
    try:
        evidence = read_evidence(copy)
    except EnvbuildError as error:
        raise RefusedError(error.what) from None
    finally:
        copy.unlink()
    if evidence.cell_id not in chosen:
        raise RefusedError("it is of a cell that this run did not choose")
    now = datetime.now(UTC)
    if not now - timedelta(days=3) <= evidence.date <= now + timedelta(hours=1):
        raise RefusedError("its date is not in the time of this run")
    if evidence.target.get("kind") != "image" or evidence.adopted or evidence.keyword:
        raise RefusedError("it is not of a whole run in an image that was built from a lock")
    return evidence, body


def lock_of(result: Path, name: str, chosen: set[str], scratch: Path) -> dict[str, bytes]:
    """Return the files of a lock.

    Raises:
        RefusedError: it does not load, or it is not of this run.

    """
    try:
        checked(SafeName, name)
        source = result / "locks" / name
        if not names_in(source) or not all(LOCK_FILE.fullmatch(each) for each in names_in(source)):
            raise RefusedError("it has other files than a lock has")
        files = {each: read_below(source, each, limit=LOCK_LIMIT) for each in names_in(source)}
    except (ValueError, OSError) as error:
        raise RefusedError(str(error)) from None
    copy = scratch / name
    copy.mkdir()
    for each, body in files.items():
        (copy / each).write_bytes(body)
    try:
        lock = read_lock(copy).lock
    except EnvbuildError as error:
        raise RefusedError(error.what) from None
    finally:
        for each in files:
            (copy / each).unlink()
        copy.rmdir()
    if not lock.complete or lock.as_cell.id not in chosen or not name.startswith(lock.as_cell.id):
        raise RefusedError("it is not complete, or of a cell that this run did not choose")
    return files


@dataclass(kw_only=True)
class Taken:
    """What was taken over from the results of the cells, and what was refused."""

    matrices: Path
    chosen: set[str]
    """Ids of the cells of this run."""
    scratch: Path
    added: list[Path] = field(default_factory=list)
    records: list[Evidence] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def take(self, result: Path) -> None:
        """Take over the records and locks of one cell."""
        for kind, take in (("evidence", self._record), ("locks", self._lock)):
            try:
                for name in names_in(result / kind):
                    try:
                        take(result, name)
                    except RefusedError as error:
                        self._refuse(result, f"{kind} {code(name)}", error)
            except RefusedError as error:
                self._refuse(result, kind, error)

    def _refuse(self, result: Path, what: str, error: RefusedError) -> None:
        self.refused.append(f"{code(result.name)}: {what}: {cell_text(error)}")

    def _record(self, result: Path, name: str) -> None:
        evidence, body = record_of(result, name, self.chosen, self.scratch)
        place = self.matrices / "evidence" / name
        if place.exists():
            raise RefusedError("there is a record of this name")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(body)
        self.added.append(place)
        self.records.append(evidence)

    def _lock(self, result: Path, name: str) -> None:
        files = lock_of(result, name, self.chosen, self.scratch)
        place = self.matrices / "locks" / name
        if place in self.added:
            return  # two cells of a run may have made a lock of the same inputs; the first is as good
        if place.exists():
            if {each: read_below(place, each, limit=LOCK_LIMIT) for each in names_in(place)} != files:
                raise RefusedError("another lock of these inputs is committed: remove it if it no longer builds")
            return
        place.mkdir(parents=True)
        for each, body in files.items():
            (place / each).write_bytes(body)
        self.added.append(place)


def results_in(folder: Path) -> Iterator[Path]:
    """Yield the folder of each cell; a link is none. Where one cell left a result alone, it may be the folder itself.

    So does actions/download-artifact: it makes a folder per artifact, but none where just one fits the pattern.
    """
    if {"result.json", "log.txt"} & set(names_in(folder)):
        yield folder
        return
    for name in names_in(folder):
        if not (folder / name).is_symlink() and (folder / name).is_dir():
            yield folder / name


def outcome_of(result: Path) -> list[str]:
    """Return one line of the table of all cells."""
    try:
        found: Any = json.loads(read_below(result, "result.json", limit=RECORD_LIMIT))
        error = (found["error"] or {}).get("what", "")
        row = [code(found["id"]), cell_text(found["stack"]), cell_text(found["ended"])]
        return [*row, f"{float(found['seconds']) / 60:.0f} min", cell_text(error, 200)]
    except (OutsideError, OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return [code(result.name), "", "no result", "", "its job left no result.json that can be read"]


def main() -> int:
    """Collect, commit, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="folder with a folder per cell")
    parser.add_argument("--cells", required=True, help="what choose.py chose: JSON, or a file of it")
    parser.add_argument("--branch", required=True, help="branch to make")
    parser.add_argument("--body", type=Path, required=True, help="file for the text of the pull request")
    parser.add_argument("--repository", type=Path, default=ROOT, help="the working tree [this one]")
    given = parser.parse_args()
    check_branch(given.branch)
    text = given.cells if given.cells.lstrip().startswith("{") else Path(given.cells).read_text(encoding="utf-8")
    chosen_cells = json.loads(text)["include"]
    chosen = {cell["id"] for cell in chosen_cells}
    scratch = given.body.absolute().parent / f".collect-{os.getpid()}"
    scratch.mkdir()
    taken = Taken(matrices=given.repository / "matrices", chosen=chosen, scratch=scratch)
    rows = []
    try:
        for result in results_in(given.results):
            rows.append(outcome_of(result))
            taken.take(result)
    finally:
        scratch.rmdir()
    without = len(chosen_cells) - len(rows)
    rows += [["", "", "no result", "", f"{without} jobs ended before they left one"]] if without > 0 else []
    added, records, refused = taken.added, taken.records, taken.refused
    passed = sum(record.passed for record in records)
    locks = len(added) - len(records)
    subject = f"Evidence of {len(records)} runs ({passed} passed), {locks} new locks"
    outcomes = table(["cell", "stack", "ended", "took", "error"], rows) if rows else "No cell left a result."
    lines = [subject, "", outcomes, "", *(f"- refused: {line}" for line in refused)]
    if added:
        commit(given.repository, given.branch, added, subject)
    given.body.write_text("\n".join(lines) + "\n", encoding="utf-8")
    summary("## All cells\n\n" + "\n".join(lines) + "\n")
    output("branch", given.branch if added else "")
    output("title", subject)
    output("records", str(len(records)))
    for line in refused:
        print(f"refused: {line}", file=sys.stderr)
    return 4 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
