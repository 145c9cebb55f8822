"""Fuzzing of every reader of somebody else's data: `python -m tests.fuzz --help`."""
