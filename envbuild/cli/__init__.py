"""The command line: one module per command group, each parses, calls and prints, and nothing else.

`quick` answers a plain `resolve` or `render` without click, whose import alone takes as long as such an answer. `program` is
the whole command line; whatever is not plain goes there, every error and every question for help among it.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envbuild.cli.program import COMMANDS, SECTIONS, LazyGroup, cli

__all__ = ["COMMANDS", "SECTIONS", "LazyGroup", "cli", "main"]


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code; errors go to stderr in one message."""
    args = sys.argv[1:] if argv is None else argv
    from envbuild.cli.quick import answered

    if answered(args):
        if argv is None:  # the process is this command: Python would take every object apart first, 14 ms
            sys.stderr.flush()
            os._exit(0)
        sys.exit(0)
    from envbuild.cli import program

    program.main(args)


def __getattr__(name: str) -> Any:
    if name not in __all__:  # a module of the package, which the import statement then finds
        raise AttributeError(name)
    from envbuild.cli import program

    return getattr(program, name)
