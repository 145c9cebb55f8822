"""`python -m tests.fuzz`: mutated inputs for every reader, counted; exits with 1 when one of them fails.

A failure is anything but an `EnvbuildError`, more than 2 s of the processor, or more than 500 MiB of growth.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from tests.fuzz.drive import as_json, fuzz, keep, replay, table
from tests.fuzz.targets import TARGETS, forget, matrix


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000, help="executions, over all targets")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so long, whatever was run")
    parser.add_argument("--seed", type=int, default=1, help="the same seed makes the same inputs")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; may be given again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="folder of the inputs that fail")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--replay", type=Path, help="run one kept input, and show its traceback")
    asked = parser.parse_args()
    if asked.replay:
        replay(asked.replay)
        return 0
    targets = [TARGETS[name] for name in asked.target or TARGETS]
    matrix()  # loaded once, before the processes part
    began = time.monotonic()

    def say(done: int) -> None:
        print(f"{done:,} executions in {time.monotonic() - began:.0f} s", file=sys.stderr)

    try:
        results = fuzz(targets, runs=asked.runs, seconds=asked.seconds, seed=asked.seed, jobs=asked.jobs, say=say)
    finally:
        forget()
    print(as_json(results, asked.seed) if asked.json else table(results))
    kept = keep(results, asked.keep)
    for path in kept:
        print(f"failed: {path}", file=sys.stderr)
    if kept:
        print("`python -m tests.fuzz --replay FILE` shows a traceback", file=sys.stderr)
    return 1 if kept else 0


if __name__ == "__main__":
    sys.exit(main())
