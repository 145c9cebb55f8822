"""Processes that lead a session of their own, and end with everything that they started."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def end_group(
    process: "subprocess.Popen[bytes] | subprocess.Popen[str]", *, first: signal.Signals, patience: float
) -> None:
    """Send `first` to the group that `process` leads, and SIGKILL when that did not end it within `patience` seconds.

    Args:
        process: one that was started with `start_new_session=True`.
        first: what it takes as the request to clean up and go.
        patience: how long it may take for that, seconds.

    """
    for number, seconds in ((first, patience), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
            return


def followed(
    command: Sequence[str],
    *,
    feed: Callable[[str], object],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: bool = False,
    patience: float = 30.0,
) -> int:
    """Run `command`, hand each line of its stderr to `feed` as it comes, and return the exit code.

    When `feed` raises or Ctrl-C comes, the command is asked to end by SIGTERM and nothing of it runs any more when this raises.

    Args:
        command: program and arguments.
        feed: takes a line, its end included.
        cwd: where it runs; here by default.
        env: its whole environment; this process's own by default.
        stdout: whether its stdout is fed, too, and not dropped.
        patience: how long the command may take to end, seconds.

    """
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout else subprocess.DEVNULL,
        stderr=subprocess.STDOUT if stdout else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        said = process.stdout if stdout else process.stderr
        assert said is not None  # noqa: S101 - it was asked for
        try:
            for line in said:
                feed(line)
        except BaseException:
            # Somebody reads on: a command whose pipe is full cannot end. On Ctrl-C the `with` alone would wait 0.25 s.
            threading.Thread(target=said.read, daemon=True).start()
            end_group(process, first=signal.SIGTERM, patience=patience)
            raise
    return process.returncode
