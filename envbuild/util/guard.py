"""Run a command for as long as the process that asked for it lives: `python guard.py PARENT PATIENCE COMMAND…`.

A process that is killed by SIGKILL cleans up nothing, and what it started runs on: a build, a bootstrap, a download. This
program stands between the two. The kernel signals it when its parent dies; it then asks the command to end by SIGTERM, and
kills it when that takes longer than PATIENCE seconds. Where it leads a process group, the group is asked and killed.

It runs by its path, as a program of the standard library alone, so that it starts in a few hundredths of a second.
"""

import os
import signal
import sys
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_WATCHED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    """Run the command of the arguments; return its exit code, or end by the signal that ended it."""
    parent, patience, *command = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, a child would leave no exit code
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    prctl = _prctl()
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died meanwhile
        return 128 + signal.SIGTERM
    child = os.fork()
    if not child:
        _become(command, before, prctl)
    code = _wait(child, int(parent), float(patience))
    if code >= 0:
        return code
    # The parent reads from the signal what happened.
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)
    return 128 - code


def _prctl() -> Callable[[int, int], int]:
    try:
        import ctypes
    except ImportError:  # a Python without it: the command runs, and outlives a parent that is killed
        return lambda _option, _value: 0
    return ctypes.CDLL(None).prctl


def _become(command: list[str], mask: set[int | signal.Signals], prctl: Callable[[int, int], int]) -> None:
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should this program itself be killed
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and so would the command
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(command[0], command)  # noqa: S606
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


def _wait(child: int, parent: int, patience: float) -> int:
    leads = os.getpgrp() == os.getpid()
    end = None
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if end is not None and leads:
                os.killpg(0, signal.SIGKILL)  # what the command left behind, and this program
            return os.waitstatus_to_exitcode(status)
        if end is None:
            signal.sigwaitinfo(_WATCHED)
            if os.getppid() != parent:
                end = time.monotonic() + patience
                # A living parent signals the group, or has its terminal do that.
                os.killpg(0, signal.SIGTERM) if leads else os.kill(child, signal.SIGTERM)
        elif signal.sigtimedwait(_WATCHED, max(0.0, end - time.monotonic())) is None:
            os.killpg(0, signal.SIGKILL) if leads else os.kill(child, signal.SIGKILL)
            end += 5


if __name__ == "__main__":
    sys.exit(main())
