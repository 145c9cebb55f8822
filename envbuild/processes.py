"""Ending a process that leads a session of its own, with everything that it started."""

import contextlib
import os
import signal
import subprocess


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
