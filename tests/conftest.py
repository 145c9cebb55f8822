"""For every test."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

# A runner started in the background ignores Ctrl-C, one started by nohup ignores a terminal that goes away, and so would
# every command that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Bytecode is kept, whatever the environment says: else each worker, and each command that a test starts, compiles every
# module again. It lies in folders that git ignores.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("silence", "Seconds without the end of a test, after which workers are ended.", default="300")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse the text of a set in a test's name: its order differs between a worker that compiled the module and one
    that read its bytecode, and workers with other names run nothing at all."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        for value in callspec.params.values() if callspec else ():
            if isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.name:
                raise pytest.UsageError(f"{item.nodeid}: the order of a set differs between workers; give sorted ids")


def pytest_configure(config: pytest.Config) -> None:
    """Say what fails when it fails, and watch the workers of a run that has some."""
    if hasattr(config, "workerinput"):
        return
    config.pluginmanager.register(_FailuresNow(config))
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(_Watch(float(config.getini("silence"))))


class _FailuresNow:
    """Shows the end of a failure at once: pytest shows it after the last test, which a run that is ended never reaches."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(
                f"\n{report.nodeid} ({report.when})\n" + "\n".join(report.longreprtext.splitlines()[-40:])
            )


class _Watch:
    """Ends workers when no test has ended for some minutes; they show what they did, and the run goes on without them.

    pytest-timeout cannot do this: it raises in the test, whose own cleanup may wait for ever, and it does not run between
    two tests.
    """

    def __init__(self, silent_s: float) -> None:
        self.silent_s = silent_s
        self._last = time.monotonic()
        self._begun: set[str] = set()
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._begun.add(nodeid)
        self._last = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._last = time.monotonic()
        if report.when == "teardown":
            self._begun.discard(report.nodeid)

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            if time.monotonic() - self._last > self.silent_s:
                print(
                    f"\nno test ended for {self.silent_s:.0f} s; begun: {', '.join(sorted(self._begun)) or 'none'}",
                    file=sys.stderr,
                )
                for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(child), signal.SIGABRT)  # pytest's faulthandler shows the stacks of all threads
                self._last = time.monotonic()
