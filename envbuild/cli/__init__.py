"""The command line: one module per command group, each parses, calls and prints, and nothing else.

`quick` answers a plain `resolve` or `render` without click, whose import alone takes as long as such an answer. `program` is
the whole command line; whatever is not plain goes there, every error and every question for help among it.
"""

import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from envbuild.cli.program import COMMANDS, SECTIONS, LazyGroup, cli

__all__ = ["COMMANDS", "SECTIONS", "LazyGroup", "cli", "main"]


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code; errors go to stderr in one message."""
    args = sys.argv[1:] if argv is None else argv
    from envbuild.cli.quick import answered

    own = argv is None  # the process is this command
    if answered(args):
        _end(own)
    from envbuild.cli import program

    try:
        program.main(args)
    except SystemExit as ended:
        if ended.code == 0 and ((args[-1:] == ["--help"] and len(args) < 3) or "_ENVBUILD_COMPLETE" in os.environ):
            _end(own)
        raise


def _end(own: bool) -> NoReturn:
    """End after an answer that was only printed.

    The process ends at once: Python would take every object apart first, which is 14 ms after a `resolve` and 6 ms after
    `--help`. Nothing that such a command does registers what has to run at the end.
    """
    if own:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(0)


def __getattr__(name: str) -> Any:
    if name not in __all__:  # a module of the package, which the import statement then finds
        raise AttributeError(name)
    from envbuild.cli import program

    return getattr(program, name)
