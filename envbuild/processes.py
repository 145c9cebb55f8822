"""Processes that lead a session of their own, and end with everything that they started, or with who started them."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

# Characters of a line that are read at once.
_LONGEST = 8_000_000
_GUARD = Path(__file__).with_name("guard.py")


def guarded(command: Sequence[str], *, patience: float = 30.0, env: Mapping[str, str] | None = None) -> list[str]:
    """Return `command` as one that ends when this process dies, however it dies.

    Started with `start_new_session=True`, everything of its session ends; else the command alone.

    Args:
        command: program and arguments.
        patience: how long it may take to end by SIGTERM, seconds.
        env: the environment that it will get; its PATH says where the program is.

    Raises:
        FileNotFoundError: there is no such program.

    """
    if shutil.which(command[0], path=(os.environ if env is None else env).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(patience), *command]


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
    It is asked as well when this process is killed.

    Args:
        command: program and arguments.
        feed: takes a line, its end included; one of more than 8 million characters comes in pieces.
        cwd: where it runs; here by default.
        env: its whole environment; this process's own by default.
        stdout: whether its stdout is fed, too, and not dropped.
        patience: how long the command may take to end, seconds.

    """
    with subprocess.Popen(
        guarded(command, patience=patience, env=env),
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
            while line := said.readline(_LONGEST):
                feed(line)
        except BaseException:
            # Somebody reads on: a command whose pipe is full cannot end. On Ctrl-C the `with` alone would wait 0.25 s.
            threading.Thread(target=lambda: all(iter(partial(said.read, 65536), "")), daemon=True).start()
            end_group(process, first=signal.SIGTERM, patience=patience)
            raise
    return process.returncode
