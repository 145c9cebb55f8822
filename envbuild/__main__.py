"""Where a process starts: `envbuild` and `python -m envbuild`.

It imports the command line inside `main`, so that Ctrl-C while modules load is one line, too.
"""

import os
import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        _open_closed_streams()
        from envbuild.cli import main as run

        run()
    except KeyboardInterrupt:
        print("envbuild: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        import signal  # 2 ms, which a quick answer does not wait for: it ends before this

        # All is done: a Ctrl-C while the interpreter ends would print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Open /dev/null in the place of a standard stream that the caller closed.

    Otherwise the next file that is opened would take its number, and a message for stderr would go to stdout.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


if __name__ == "__main__":
    main()
