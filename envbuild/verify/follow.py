"""Follow a suite that runs: read what it prints within bounds, and end it in time."""

import contextlib
import queue
import subprocess
import threading
import time
from typing import IO, Protocol

from envbuild.verify.events import LINE
from envbuild.verify.start import Started

_LOG_LIMIT = 256 << 20
"""Bytes of a run that are kept; one that prints more is ended."""
_LAST_WORDS_S = 5.0  # for output that is still on its way when the suite's process has ended
_EXIT_S = 30.0  # for a suite that has reported its end, or closed its output, to exit


class Listener(Protocol):
    """Takes what is printed, and how it came to an end."""

    broken: str | None
    """Set where it printed too much."""
    timed_out: bool
    interrupted: bool

    @property
    def ended(self) -> bool:
        """Whether what was printed says that it has ended."""

    @property
    def place(self) -> str:
        """Where it is, as the end of a sentence."""

    def line(self, text: str) -> None:
        """Take a line, its end included."""


def follow(started: Started, collected: Listener, log: IO[str], timeout_s: float) -> int | None:
    """Read what a process prints until it ends, its time is up or Ctrl-C comes; return its exit code where it has one."""
    lines: queue.Queue[str | None] = queue.Queue(maxsize=1000)  # a suite that prints faster than it is read waits
    stream = started.process.stdout
    assert stream is not None  # noqa: S101 - it was requested

    def pump() -> None:
        for line in iter(lambda: stream.readline(LINE), ""):
            while not left_off.is_set():
                with contextlib.suppress(queue.Full):
                    lines.put(line, timeout=1.0)
                    break
            else:
                return
        with contextlib.suppress(queue.Full):
            lines.put(None, timeout=1.0)

    process, kept, left_off = started.process, 0, threading.Event()
    pumping = threading.Thread(target=pump, daemon=True)
    pumping.start()
    deadline = limit = time.monotonic() + timeout_s
    ended = gone = False
    try:
        while (left := limit - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=min(left, 1.0))
            except queue.Empty:
                line = ""
            if line is None:
                break
            if line:
                kept += len(line)
                if kept > _LOG_LIMIT:
                    collected.broken = f"it printed more than {_LOG_LIMIT:,} characters {collected.place}"
                    return None
                log.write(line)
                log.flush()
                collected.line(line)
            if not gone and process.poll() is not None:
                # What it left running may hold the pipe, and then its end never comes.
                gone, limit = True, min(limit, time.monotonic() + _LAST_WORDS_S)
            elif not ended and collected.ended:
                ended, limit = True, min(limit, time.monotonic() + _EXIT_S)
        if process.poll() is None and time.monotonic() >= deadline:
            collected.timed_out = True
            return None
        return process.wait(timeout=max(0.0, min(_EXIT_S, limit - time.monotonic())))
    except KeyboardInterrupt:
        collected.interrupted = True  # what it saw until then is kept like any other run's
        return None
    except subprocess.TimeoutExpired:
        return None
    finally:
        left_off.set()
        started.remove()
        pumping.join(5)
        if not pumping.is_alive():
            stream.close()
