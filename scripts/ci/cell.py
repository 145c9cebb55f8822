#!/usr/bin/env python3
"""Build, audit and prove one cell, once, and leave the same files whether that passes or fails.

    scripts/ci/cell.py --id ID --args '--cuda 13.0 --te 2.12' --out FOLDER

Runs `envbuild image` with these flags. FOLDER, which is new, then holds

    result.json   how it ended, why, how long it took, the last lines of the log
    answer.json   what `envbuild image --json` printed
    log.txt       everything that it printed on stderr
    logs/         the logs of the build and of the smoke tests
    evidence/     the record of the smoke tests, when they ran, passed or not
    locks/        the lock it was built from, where that is this machine's own, and others that this run made

Exits as `envbuild image` does, with 5 where the time ran out, and with 130 when it is interrupted.
"""

import argparse
import contextlib
import hashlib
import json
import re
import shutil
import signal
import sys
import time
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any

from workflow import ROOT, block, cell_text, code, no_commands, summary, table, words_of

from envbuild.settings import load_settings
from envbuild.util.processes import followed

LAST_LINES = 60
LOGS_LIMIT = 64 << 20
"""Bytes of the logs that are kept, the newest first."""
ANSWER_LIMIT = 8 << 20


def tag_of(flags: str) -> str:
    """Return the tag of a cell's image: jobs that share an engine do not take each other's."""
    return f"envbuild-cell:{hashlib.sha256(flags.encode()).hexdigest()[:16]}"


class OutOfTimeError(Exception):
    """The cell took longer than it may."""


class StoppedError(Exception):
    """The runner wants the job to end."""


def _alarm(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise StoppedError


def run(command: list[str], out: Path, minutes: float) -> tuple[int, str, deque[str]]:
    """Run the command; return its exit code, how it ended, and its last lines."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGTERM, _stop)
    with (out / "log.txt").open("w", encoding="utf-8") as log, no_commands():

        def feed(line: str) -> None:
            log.write(line)
            log.flush()  # what is there when the machine goes
            sys.stderr.write(line)
            last.append(line.rstrip("\n"))

        try:
            signal.setitimer(signal.ITIMER_REAL, minutes * 60)
            # A shell opens the file for stdout, and becomes the command.
            keep = ["sh", "-c", 'answer=$1; shift; exec "$@" >"$answer"', "cell", str(out / "answer.json")]
            status = followed([*keep, *command], feed=feed, cwd=ROOT, patience=90.0)
            ended = "passed" if status == 0 else "interrupted" if status == 130 else "failed"
        except OutOfTimeError:
            status, ended = 5, "out of time"
            feed(f"cell.py: stopped after {minutes:g} minutes\n")
        except (StoppedError, KeyboardInterrupt):
            status, ended = 130, "interrupted"
            feed("cell.py: interrupted\n")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return status, ended, last


def answer_of(out: Path) -> dict[str, Any]:
    """Return what the command printed, or nothing where that is no JSON object."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        path = out / "answer.json"
        if path.stat().st_size <= ANSWER_LIMIT:
            found = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
    return {}


def error_of(answer: dict[str, Any], last: deque[str]) -> dict[str, str]:
    """Return what went wrong: `what`, `where` and `hint`, from the answer or else from the log."""
    if "error" in answer and "what" in answer:
        return {key: str(answer[key]) for key in ("what", "where", "hint") if answer.get(key)}
    found: dict[str, str] = {}
    for line in last:
        if (started := re.match(r"envbuild: error: (.*)", line)) is not None:
            found = {"what": started[1]}
        elif found and (more := re.match(r" +(where|to do): (.*)", line)) is not None:
            found["where" if more[1] == "where" else "hint"] = more[2]
    return found or {"what": last[-1] if last else "it printed nothing"}


def keep_logs(since: float, out: Path) -> list[str]:
    """Copy the logs of this run; return their names."""
    folder = load_settings().cache_dir / "logs"
    new = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_mtime >= since - 1]
    kept, size = [], 0
    for path in sorted(new, key=lambda path: path.stat().st_mtime, reverse=True):
        size += path.stat().st_size
        if size > LOGS_LIMIT:
            break
        place = out / "logs" / path.relative_to(folder).as_posix().replace("/", "-")
        place.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, place)
        kept.append(place.name)
    return sorted(kept)


def keep_locks(since: float, answer: dict[str, Any], out: Path) -> list[str]:
    """Copy the complete locks that this run made or used and that lie in this machine's cache; return their names.

    A lock may be of an earlier run here whose pull request was never merged: without it nobody else could build the
    image that the record is of.
    """
    folder = load_settings().cache_dir / "locks"
    used = (answer.get("lock") or {}).get("folder")
    kept = []
    for lock in sorted(folder.glob("*/lock.json")):
        own = lock.parent
        wanted = lock.stat().st_mtime >= since - 1 or (used and own.resolve() == Path(used).resolve())
        if wanted and not own.name.endswith("-incomplete"):
            shutil.copytree(own, out / "locks" / own.name)
            kept.append(own.name)
    return kept


def shown(result: dict[str, Any]) -> str:
    """Return a result as markdown."""
    rows = [["ended", f"**{cell_text(result['ended'])}**, exit code {result['exit_code']}"]]
    rows += [["flags", code(result["args"])], ["took", f"{result['seconds'] / 60:.1f} min"]]
    if image := result["image"]:
        size = f"{image['size_bytes'] / 2**30:.1f} GiB" if isinstance(image.get("size_bytes"), int) else ""
        rows.append(["image", f"{code(image['digest'])} {cell_text(image['origin'])} {size}"])
    if smoke := result["smoke"]:
        counts = ", ".join(f"{smoke.get(name)} {name}" for name in ("passed", "failed", "skipped"))
        rows.append(["smoke tests", cell_text(f"{smoke.get('verdict')} on {smoke.get('device')}: {counts}")])
    rows += [["record", code(name)] for name in result["evidence"]]
    rows += [["new lock", code(name)] for name in result["locks"]]
    parts = [f"### {code(result['id'])}", table(["", ""], rows)]
    if error := result["error"]:
        parts.append("\n".join(f"- {name}: {cell_text(error[name], 800)}" for name in error))
    if stages := result["stages"]:
        slow = [[code(stage["name"]), f"{stage['seconds']:.0f} s", f"{stage['cached']} cached"] for stage in stages]
        parts.append(table(["slowest stages", "took", "steps"], slow))
    if result["not_proven"]:
        parts.append("Not proven:\n\n" + "\n".join(f"- {cell_text(text, 500)}" for text in result["not_proven"]))
    if result["ended"] != "passed":
        parts.append(f"<details open><summary>The last lines</summary>\n\n{block(result['last_lines'])}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Run the cell and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--id", required=True, help="the cell's id, for the result")
    parser.add_argument("--args", required=True, help="flags of `envbuild image`, in one line")
    parser.add_argument("--stack", default="", help="the cell's stack, for the result")
    parser.add_argument("--out", type=Path, required=True, help="folder for the files; it must not exist")
    parser.add_argument("--minutes", type=float, default=330.0, help="how long it may take [330]")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True)
    flags = words_of(given.args)
    command = [sys.executable, "-m", "envbuild", "image", *flags, "--tag", tag_of(given.args)]
    command += ["--record", str(out / "evidence"), "--json"]
    since, started = time.time(), time.monotonic()
    status, ended, last = run(command, out, given.minutes)
    answer = answer_of(out)
    stages = sorted(answer.get("stages") or [], key=lambda stage: -stage["seconds"])[:5]
    result = {
        "schema_version": 1,
        "id": given.id,
        "args": given.args,
        "stack": given.stack,
        "ended": ended,
        "exit_code": status,
        "seconds": round(time.monotonic() - started, 1),
        "error": None if ended == "passed" else error_of(answer, last),
        "image": {key: answer.get(key) for key in ("digest", "size_bytes", "origin")} if answer.get("digest") else None,
        "smoke": answer.get("smoke"),
        "not_proven": answer.get("not_proven") or [],
        "stages": stages,
        "evidence": sorted(path.name for path in (out / "evidence").glob("*.json")),
        "locks": keep_locks(since, answer, out),
        "logs": keep_logs(since, out),
        "last_lines": list(last),
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    summary(shown(result))
    return status


if __name__ == "__main__":
    sys.exit(main())
