"""For every test."""

import os
import signal
import sys

import pytest

# A runner started in the background ignores Ctrl-C, one started by nohup ignores a terminal that goes away, and so would
# every command that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Bytecode is kept, whatever the environment says: else each worker, and each command that a test starts, compiles every
# module again. It lies in folders that git ignores.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the text of a set in a test's name: its order differs between a worker that compiled the module and one
    that read its bytecode, and workers with other names run nothing at all."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        for value in callspec.params.values() if callspec else ():
            if isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.name:
                raise pytest.UsageError(f"{item.nodeid}: the order of a set differs between workers; give sorted ids")
