#!/usr/bin/env python3
"""Propose new releases for the matrix: `envbuild matrix update --write`, committed to a new branch for a pull request.

    scripts/ci/update.py --branch update/2026-11-23 --body body.md

Writes the outputs `branch` (empty where nothing is new), `title`, and `draft`, which is true while something is left for a
person to fill in, an upstream did not answer, or `envbuild matrix check` fails. Nothing is pushed. The text of the pull
request goes to --body.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from branches import check_branch, commit, git
from workflow import ROOT, block, cell_text, code, no_commands, output, summary


def envbuild(repository: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the working tree's own envbuild, with its data, and show its notes."""
    with no_commands():
        line = [sys.executable, "-m", "envbuild", *command]
        env = os.environ | {"PYTHONPATH": str(repository)}
        done = subprocess.run(line, cwd=repository, env=env, capture_output=True, text=True, check=False)
        sys.stderr.write(done.stderr)
    return done


def main() -> int:
    """Propose, commit, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", help="axes to look at [all that have an upstream]")
    parser.add_argument("--branch", required=True, help="branch to make")
    parser.add_argument("--body", type=Path, required=True, help="file for the text of the pull request")
    parser.add_argument("--repository", type=Path, default=ROOT, help="the working tree [this one]")
    given = parser.parse_args()
    check_branch(given.branch)
    repository = given.repository.absolute()
    if git(repository, "status", "--porcelain", "--", "matrices"):
        sys.exit("error: matrices/ has changes that are not committed; commit them first")
    asked = envbuild(repository, "matrix", "update", *given.axes, "--write", "--json")
    try:
        answer: dict[str, Any] = json.loads(asked.stdout)
        proposals, unreachable = answer["proposals"], answer["unreachable"]
    except (ValueError, KeyError):
        summary(f"### No proposals\n\n{block(asked.stderr.splitlines()[-20:])}\n")
        return asked.returncode or 1
    checked = envbuild(repository, "matrix", "check")
    names = [f"{each['axis']} {each['version']}" for each in proposals]
    title = f"New releases: {', '.join(names)}"
    title = title if len(title) <= 100 else f"{len(proposals)} new releases"
    lines = ["Proposed from the package indexes and upstream tags; each needs a look before it is merged.", ""]
    for name, each in zip(names, proposals, strict=True):
        lines += [f"- {code(name)}"]
        lines += [f"    - [ ] fill in {cell_text(todo, 500)}" for todo in each["to_fill_in"]]
    lines += [f"- did not answer: {cell_text(name)}" for name in unreachable]
    if checked.returncode:
        lines += ["", "`envbuild matrix check` fails:", "", block((checked.stdout + checked.stderr).splitlines()[-20:])]
    paths = [Path(path) for path in answer.get("files", [])]
    if paths:
        commit(repository, given.branch, paths, title)
    given.body.write_text("\n".join(lines) + "\n", encoding="utf-8")
    summary(f"## {cell_text(title)}\n\n" + "\n".join(lines) + "\n" if paths else "Nothing is new.\n")
    unfinished = bool(unreachable or checked.returncode or any(each["to_fill_in"] for each in proposals))
    output("branch", given.branch if paths else "")
    output("title", title if paths else "")
    output("draft", "true" if unfinished else "false")
    return 0


if __name__ == "__main__":
    sys.exit(main())
