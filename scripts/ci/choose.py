#!/usr/bin/env python3
"""Choose the cells that this run verifies, and the runners that do it: `envbuild ci`, as the outputs of a workflow's step.

    scripts/ci/choose.py --shards 30 --stale-after 30d --runners '["ubuntu-24.04"]' --out cells.json

Writes the cells to --out, and the outputs `matrix`, `runners` and `count`. The variable CHOOSE_SHARDS is the same as
--shards, and so on. An empty value is the default, as an input of a workflow that nobody filled in is. Runs the same on a
plain machine, where it prints the outputs.

Where the settings name a registry, what it holds by the key of its lock is skipped, but for runs on GPUs: those pull it.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from workflow import ROOT, block, cell_text, code, no_commands, output, summary, table, words_of

from envbuild.settings import load_settings

RUNNERS = '["ubuntu-24.04"]'
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def runner_labels(text: str) -> list[str]:
    """Return the labels that a runner must have, from JSON: a list of them, or one.

    Raises:
        SystemExit: it is neither.

    """
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text  # a single label, written without quotes
    labels = [found] if isinstance(found, str) else found
    good = isinstance(labels, list) and 0 < len(labels) <= 20
    if not good or not all(isinstance(label, str) and LABEL.fullmatch(label) for label in labels):
        sys.exit(f'error: {text!r} is no list of labels: write it as ["self-hosted", "gpu", "h100"]')
    return labels


def arguments(given: argparse.Namespace) -> list[str]:
    """Return the arguments of `envbuild ci`."""
    found = [*words_of(given.flags), "--unverified"]
    found += ["--shard", given.shard or f"today/{given.shards or '30'}"]
    for option in ("limit", "seed", "device", "date"):
        if getattr(given, option):
            found += [f"--{option}", getattr(given, option)]
    found += ["--stale-after", given.stale_after or "30d"]
    # An image gets there when its tests passed without a GPU; a run on one shows more.
    return [*found, "--unpublished"] if load_settings().registry and given.device != "cuda" else found


def main() -> int:
    """Choose, write, and return the exit status of `envbuild ci`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add(name: str, text: str) -> None:
        variable = f"CHOOSE_{name.removeprefix('--').replace('-', '_').upper()}"
        parser.add_argument(name, default=os.environ.get(variable, ""), help=text)

    add("--flags", "flags that narrow the cells, such as '--cuda 13.0'")
    add("--limit", "at most so many cells, though others then wait for the next round")
    add("--shards", "days of a round [30]")
    add("--shard", "K/N instead of the share of the day")
    add("--seed", "which cells cover the pairs [the round's]")
    add("--date", "another day than today, YYYY-MM-DD")
    add("--stale-after", "age at which a record verifies nothing any more [30d]")
    add("--device", "count only runs on this")
    add("--runners", f"labels of the runners, as a JSON list [{RUNNERS}]")
    parser.add_argument("--out", type=Path, required=True, help="file for the cells")
    given = parser.parse_args()
    if given.device not in {"", "cpu", "cuda"}:
        parser.error("--device is cpu or cuda")
    runners = runner_labels(given.runners or RUNNERS)
    command = [sys.executable, "-m", "envbuild", "ci", *arguments(given), "--json"]
    with no_commands():
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        sys.stderr.write(done.stderr)
    notes = done.stderr.strip().splitlines()
    if done.returncode:
        summary(f"### The cells could not be chosen\n\n{block(notes[-20:])}\n")
        return done.returncode
    cells = json.loads(done.stdout)
    given.out.write_text(json.dumps(cells), encoding="utf-8")
    output("matrix", json.dumps(cells))
    output("runners", json.dumps(runners))
    output("count", str(len(cells["include"])))
    rows = [[code(cell["id"]), code(cell["args"])] for cell in cells["include"]]
    listed = table(["cell", "flags"], rows) if rows else "Nothing is left to verify today."
    text = "\n".join(f"- {cell_text(line)}" for line in notes)
    summary(f"### Cells of this run\n\n{text}\n\n{listed}\n\nRunners: {code(json.dumps(runners))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
