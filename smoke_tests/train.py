#!/usr/bin/env python3
"""Run the smoke tests to the level `train`: what run.py does, with that level after the others.

The level lies in files of its own, each with `LEVEL` below. They count in the suite's hash only for runs to this level, so
that the records of shorter runs stay those of the present suite.
"""

import sys

import run

LEVEL = "train"

if __name__ == "__main__":
    run.LEVELS += (LEVEL,)
    sys.exit(run.main())
