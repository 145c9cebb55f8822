#!/usr/bin/env python3
"""Compare what two revisions render: the default cell, the headline, the CPU cell and every stack, in every format.

    scripts/compare_renders.py REVISION            # that revision against the working tree
    scripts/compare_renders.py REVISION REVISION   # two revisions

Each is rendered with the locks that the tree holds, and with --unlocked. A change of the house must change no byte of it.
Prints each difference as a unified diff and exits with 1; exits with 0 when all texts are equal. --only NAME takes the
renderings whose name holds NAME; --expect NAME names one that is meant to differ.
"""

import argparse
import difflib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORMATS = ("dockerfile", "bake", "apptainer", "shell")
CELLS = {
    "default": ("--cuda", "13.0", "--te", "2.12"),
    "headline": ("--cuda", "12.6", "--te", "2.6"),
    "headline-h100": ("--cuda", "12.6", "--te", "2.6", "--gpu", "h100"),
    "cpu": ("--cuda", "cpu"),
    "hopper": ("--cuda", "13.0", "--flash-attn-hopper", "auto", "--megatron", "auto"),
    "te-git": ("--cuda", "12.6", "--te", "2.6", "--source", "te=git"),
    "devel": ("--cuda", "12.6", "--te", "2.6", "--flavor", "devel"),
    "flash-attn": ("--cuda", "13.0", "--flash-attn", "auto"),
    "mpich": ("--cuda", "cpu", "--mpi", "mpich"),
    "ngc": ("--base", "ngc-25.03", "--te", "none", "--apex", "none"),
}

# Runs in the tree that is measured: its own command line, one process for all renderings.
CHILD = """
import contextlib, dataclasses, functools, io, json, sys
from envbuild.cli import cli
from envbuild.errors import EnvbuildError
from envbuild.matrix import load
# The digest of the matrix' files is in every lock: a release that is new in them is no change of the house.
files = load._load
load._load = functools.cache(lambda folder: dataclasses.replace(files(folder), digest="sha256:" + "0" * 64))
found = {}
for name, arguments in json.load(sys.stdin).items():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(args=arguments, prog_name="envbuild", standalone_mode=False)
        except EnvbuildError as error:
            out.write(f"{type(error).__name__}, exit {error.exit_code}")
        except Exception as error:
            out.write(f"{type(error).__name__}: {error}")
    found[name] = out.getvalue()
    if "--json" in arguments and out.getvalue().startswith("{"):
        answer = json.loads(out.getvalue())
        answer.pop("left_out", None)  # names every axis that there is
        found[name] = json.dumps(answer, indent=1)
json.dump(found, sys.stdout)
"""


def requests(tree: Path) -> dict[str, list[str]]:
    """Return the command lines by name."""
    cells = {name: list(flags) for name, flags in CELLS.items()}
    cells |= {f"stack {p.stem}": ["--stack", p.stem] for p in sorted((tree / "matrices/stacks").glob("*.toml"))}
    locks = sorted([*(tree / "matrices/locks").glob("*/lock.json"), *(tree / "docs").rglob("lock.json")])
    asked = {}
    for form in FORMATS:
        for name, flags in cells.items():
            asked[f"{name}, {form}, unlocked"] = ["render", *flags, "--format", form, "--unlocked"]
        for lock in locks:
            where = lock.parent.relative_to(tree)
            flags = ["render", "--lock", str(where), "--format", form, "--json"]
            if (stack := tree / f"{where}.toml").is_file():  # a user's stack, which a lock names and does not hold
                flags += ["--stack", str(stack.relative_to(tree))]
            if json.loads(lock.read_text()).get("missing"):
                flags.append("--unlocked")
            asked[f"{where}, {form}, locked"] = flags
    return asked | {f"{name}, resolve": ["resolve", *flags, "--json"] for name, flags in cells.items()}


def rendered(tree: Path, asked: dict[str, list[str]]) -> dict[str, str]:
    """Return the texts that the code in `tree` gives, by name."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ENVBUILD_")}
        environment |= {"PYTHONPATH": str(tree), "ENVBUILD_CACHE_DIR": empty, "HOME": empty}
        done = subprocess.run(
            [sys.executable, "-c", CHILD], cwd=tree, env=environment, input=json.dumps(asked),
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    return dict(json.loads(done.stdout))


def main() -> int:
    """Compare, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?")
    parser.add_argument("--only", default="")
    parser.add_argument("--expect", action="append", default=[])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        trees = []
        for number, revision in enumerate((options.before, options.after)):
            tree = ROOT
            if revision:
                tree = Path(scratch) / str(number)
                tree.mkdir()
                archive = subprocess.run(["git", "-C", ROOT, "archive", revision], stdout=subprocess.PIPE, check=True)
                subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
            trees.append(tree)
        asked = {name: flags for name, flags in requests(trees[0]).items() if options.only in name}
        before, after = (rendered(tree, asked) for tree in trees)
    differing = [name for name in asked if before[name] != after[name]]
    for name in differing:
        diff = difflib.unified_diff(before[name].splitlines(), after[name].splitlines(), "before", "after", lineterm="")
        print(f"== {name}", *(line[:200] for line in list(diff)[:40]), sep="\n")
    unexpected = [name for name in differing if not any(word in name for word in options.expect)]
    failed = sum("Error" in text[:40] for text in before.values())
    print(
        f"{len(asked)} renderings ({failed} refused by both or one), {len(differing)} differ, {len(unexpected)} of them unexpected"
    )
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
