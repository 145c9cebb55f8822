"""The command line: one module per command group, each parses, calls and prints, and nothing else.

Command modules load on first use, so that `envbuild render` never pays for the engine's libraries.
"""

import errno
import gc
import importlib
import json
import os
import sys
from typing import Any

import click

from envbuild import __version__
from envbuild.errors import EnvbuildError, HostError

# command -> module under envbuild.cli that defines a click command of the same name
COMMANDS = {
    "audit": "verify",
    "check": "check",
    "ci": "ci",
    "doctor": "doctor",
    "explain": "resolve",
    "image": "image",
    "launch": "run",
    "lock": "lock",
    "matrix": "matrix",
    "patch": "patch",
    "pull": "image",
    "render": "render",
    "reproduce": "verify",
    "resolve": "resolve",
    "run": "run",
    "smoke": "smoke",
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands whose module exists, in alphabetical order."""
        del ctx
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command `cmd_name`, or None when there is none of that name."""
        del ctx
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command = getattr(importlib.import_module(f"envbuild.cli.{module}"), cmd_name)
        assert isinstance(command, click.Command)  # noqa: S101
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="envbuild")
def cli() -> None:
    """Build, check and prove training environments for Megatron-LM and Megatron-DeepSpeed.

    Exit codes: 0 done, 2 usage or bad data file, 3 no cell, 4 lock or verification failed, 5 build failed,
    6 audit found a defect, 7 smoke failed, 8 the host lacks something, 130 interrupted.
    """


def _wants_json(argv: list[str]) -> bool:
    head = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in head


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code; errors go to stderr in one message."""
    args = sys.argv[1:] if argv is None else argv
    # Modules and data files make objects that live as long as the process: looking for garbage among them again and again
    # is a twentieth of a short command's time.
    gc.set_threshold(50_000, 20, 100)
    try:
        result: Any = cli.main(args=args, prog_name="envbuild", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except EnvbuildError as error:
        if _wants_json(args):
            print(json.dumps(error.as_json(), indent=2))
        print(f"envbuild: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        print("envbuild: interrupted; what was built stays cached and the next run continues from it", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader went away: envbuild matrix | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        told = HostError(
            "the disk is full" if full else (error.strerror or str(error)),
            where=str(error.filename) if error.filename else None,
            hint="free some space and run again; what was built stays cached"
            if full
            else "check the path and its permissions",
        )
        print(f"envbuild: error: {told}", file=sys.stderr)
        sys.exit(told.exit_code)
