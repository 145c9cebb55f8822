"""The command line: one module per command group, each parses, calls and prints, and nothing else.

Command modules load on first use, so that `envbuild render` never pays for the engine's libraries.
"""

import gc
import importlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

from envbuild import __version__
from envbuild.cli.declared import Declared
from envbuild.cli.output import printed
from envbuild.errors import EnvbuildError, HostError, InternalError, UsageError
from envbuild.util.space import is_full
from envbuild.util.text import for_people, outgoing

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# Title -> command -> (module under envbuild.cli that defines a click command of the same name, what it does in a line).
# The line is here and not taken from the command, so that `envbuild --help` loads none of them.
SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Choose": {
        "resolve": ("resolve", "Choose versions that work together: CUDA, PyTorch, Transformer Engine, …"),
        "explain": ("resolve", "Explain why each version was chosen, or why no versions fit"),
        "matrix": ("matrix", "List versions, rules and cells; check and update this data"),
        "check": ("check", "Find versions that do not go together in a Dockerfile, requirements file, …"),
    },
    "Build": {
        "image": ("image", "Build or pull an image, audit it and run the smoke tests"),
        "lock": ("lock", "Pin every input of a build by hash"),
        "render": ("render", "Print the build as a Dockerfile, bake file, Apptainer file or script"),
        "pull": ("pull", "Pull a prebuilt image and show who confirmed its digest"),
        "catalog": ("catalog", "List prebuilt images by their versions; publish and sign them"),
        "bundle": ("bundle", "Put an image, all its inputs and envbuild into one file, for a host without a network"),
        "unbundle": ("bundle", "Check such a file on that host, unpack it and load the image"),
        "patch": ("patch", "List patches; check, apply or undo them in a source tree"),
    },
    "Prove": {
        "audit": ("verify", "Check an image, a wheel or a folder without a GPU"),
        "smoke": ("smoke", "Run the smoke tests in an image or on this host"),
        "compare": ("compare", "Compare two recorded training runs: where their losses part, what differs"),
        "bisect": ("bisect", "Find the version that makes a test fail, between two cells"),
        "sbom": ("supply", "Write the SBOM of an image or a lock: its inputs, and whose each file is"),
        "provenance": ("supply", "Write who built an image, from which lock and inputs (SLSA)"),
        "reproduce": ("verify", "Rebuild an image from its own lock and compare digests"),
        "ci": ("ci", "List the cells to verify, as the matrix of a GitHub workflow"),
    },
    "Train": {
        "run": ("run", "Run a command in a container with the flags that training needs"),
        "dev": ("dev", "Run a command with your own tree in place of the stack's repository"),
        "launch": ("run", "Run a script on every host of a hostfile"),
        "doctor": ("doctor", "Show what this machine has, what is missing, and what it can run"),
    },
    "Set up": {
        "wheels": ("wheels", "List compiled wheels; write an index of them that pip and uv install from"),
        "cache": ("cache", "List what the cache holds, with sizes, or remove it"),
        "completion": ("completion", "Print the script that completes commands, flags and versions in a shell"),
    },
}
_NEAR = 0.62
"""How like a name a mistyped one is (difflib's ratio) for the name to be suggested: `help` is not like `wheels`."""
COMMANDS = {name: module for section in SECTIONS.values() for name, (module, _) in section.items()}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the sections."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command `cmd_name`, or None when there is none of that name."""
        del ctx
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command = getattr(importlib.import_module(f"envbuild.cli.{module}"), cmd_name)
        if isinstance(command, Declared):
            command = command.real()
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` name and what is left of them, once no option of it is repeated or empty.

        Raises:
            UsageError: an option that takes one value is given twice, or without a value.

        """
        if args and args[0] not in self.list_commands(ctx) and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], self.list_commands(ctx), 1, _NEAR)
            if near and not ctx.resilient_parsing:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not ctx.resilient_parsing:  # a shell completes a line that is not finished yet
            _refuse_repeated(ctx, command, name, rest)
        return name, command, rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete the name of a command, without loading any of them, and the group's own options."""
        from click.shell_completion import CompletionItem

        lines = {name: line for section in SECTIONS.values() for name, (_, line) in section.items()}
        named = [CompletionItem(name, help=line) for name, line in lines.items() if name.startswith(incomplete)]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section."""
        del ctx
        for title, section in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in section.items()], col_max=12)


def _refuse_repeated(parent: click.Context, command: click.Command, name: str | None, args: Sequence[str]) -> None:
    """Refuse an option that takes one value and is given twice, of which click would take the last, and an empty value.

    Args:
        parent: context of the group that `command` is in.
        command: the command, or a group, whose own command is looked at, too.
        name: what the user called it.
        args: what follows it.

    """
    context = command.context_class(command, info_name=name, parent=parent, **command.context_settings)
    try:
        values, rest, order = command.make_parser(context).parse_args(list(args))
    except click.UsageError as error:  # click's parser does not say of which command
        error.ctx = error.ctx or context
        raise
    if any(param.is_eager and isinstance(param, click.Option) for param in order):  # --help
        return
    for option in dict.fromkeys(order):
        if isinstance(option, click.Argument) and isinstance(option.type, click.Path):
            _refuse_empty_path(context, option, values.get(option.name or ""))
        if not isinstance(option, click.Option) or option.is_flag or option.count:
            continue
        flag = max(option.opts, key=len)
        if not option.multiple and order.count(option) > 1:
            raise UsageError(
                f"{flag} is given {order.count(option)} times and takes one value",
                where=context.command_path,
                hint=f"give {flag} once",
            )
        given: Any = values.get(option.name or "")
        if any(isinstance(each, str) and not each.strip() for each in (given if option.multiple else (given,))):
            raise UsageError(
                f"the value of {flag} is empty",
                where=context.command_path,
                hint=f"a shell variable that is not set? Write a value, or leave {flag} out",
            )
    if isinstance(command, click.Group) and rest:
        inner = command.get_command(context, rest[0])
        if inner is not None:
            _refuse_repeated(context, inner, rest[0], rest[1:])


def _refuse_empty_path(context: click.Context, argument: click.Argument, given: Any) -> None:
    """Refuse an empty text where a path is an argument: it would mean the current folder."""
    for each in given if isinstance(given, (list, tuple)) else (given,):
        if isinstance(each, str) and not each.strip():
            raise UsageError(
                f"the value of {argument.make_metavar(context)} is empty",
                where=context.command_path,
                hint="a shell variable that is not set? Write a path",
            )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="envbuild")
def cli() -> None:
    """Build, check and prove training environments for Megatron-LM and Megatron-DeepSpeed.

    Begin with `envbuild doctor` and `envbuild image --cuda 13.0 --te 2.12`. Every command takes --json and --help.

    Exit codes: 0 done, 2 wrong usage or bad data file, 3 no cell fits, 4 lock or verification failed, 5 build failed,
    6 audit found a defect, 7 smoke test failed, 8 something is missing on this host or another host does not answer,
    70 error in envbuild itself, 130 interrupted.
    """


def _wants_json(argv: list[str]) -> bool:
    head = argv[: argv.index("--")] if "--" in argv else argv
    return "--json" in head


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code; errors go to stderr in one message."""
    args = sys.argv[1:] if argv is None else argv
    printed.answer = printed.errors_as_json = False
    # Modules and data files make objects that live as long as the process: looking for garbage among them again and again
    # is a twentieth of a short command's time.
    gc.set_threshold(50_000, 20, 100)
    # These models use no plugin of pydantic, and looking for one reads every installed distribution's metadata.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # A scheduler ends a job by SIGTERM: what Ctrl-C cleans up, credentials in a temporary folder among it, goes then too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A dropped ssh sends SIGHUP; under nohup it is ignored, and stays so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    # Recipes and JSON are UTF-8 wherever they are read; what a terminal of another kind shows of them matters less.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
    try:
        _run(args)
    except BrokenPipeError:  # the reader went away: envbuild matrix | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        full = is_full(error)
        reported = HostError(
            "the disk is full" if full else (error.strerror or str(error)),
            where=str(error.filename) if error.filename else None,
            hint="free some space and run again; what was built stays cached"
            if full
            else "check the path and its permissions",
        )
        try:
            _fail(reported, args)
        except OSError:  # stdout itself is what is full
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"envbuild: error: {for_people(str(reported))}", file=sys.stderr)
            sys.exit(reported.exit_code)


def _run(args: list[str]) -> NoReturn:
    try:
        result: Any = cli.main(args=args, prog_name="envbuild", standalone_mode=False)
        _flush()
        sys.exit(result if isinstance(result, int) else 0)
    except EnvbuildError as error:
        _fail(error, args)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(2)
    except click.ClickException as error:
        _fail(_usage(error), args)
    except (click.Abort, KeyboardInterrupt):
        text = "interrupted; what was finished stays, and the next run continues from it"
        if printed.errors_as_json:
            print(
                json.dumps({"event": "error", "error": "interrupted", "what": text, "exit_code": 130}), file=sys.stderr
            )
        else:
            print(f"envbuild: {text}", file=sys.stderr)
        sys.exit(130)
    except OSError:
        raise
    except Exception as error:
        if os.environ.get("ENVBUILD_DEBUG", "0") not in {"", "0"}:
            raise
        _fail(internal_error(error), args)


def internal_error(error: Exception) -> EnvbuildError:
    """Return what nobody foresaw as one message: which kind of exception, and where in envbuild."""
    import traceback

    if isinstance(error, MemoryError):
        return HostError("there is not enough memory", hint="end other programs, or run where there is more")
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "envbuild" in Path(frame.filename).parts] or frames
    return InternalError(
        f"internal error: {type(error).__name__}: {str(error)[:200]}",
        where=f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else None,
        hint="please report it with the command line; ENVBUILD_DEBUG=1 shows the traceback",
    )


def _flush() -> None:
    if sys.stdout is not None:  # a caller may have closed it
        sys.stdout.flush()


def _usage(error: click.ClickException) -> UsageError:
    """Return what click says of the arguments as an error like every other."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "envbuild"
    if isinstance(error, click.NoSuchOption):
        near = [name for name in error.possibilities or () if _is_near(name, error.option_name)]
        error = click.NoSuchOption(error.option_name, possibilities=near, ctx=context)
    message = re.sub(r"\n\s*", " ", error.format_message())  # click lists the choices of an argument line by line
    text = message.rstrip(".").replace(". (Did you", " (did you").replace(". Did you", ", did you")
    return UsageError(text[0].lower() + text[1:], where=command, hint=f"`{command} --help` lists what it takes")


def _is_near(name: str, written: str) -> bool:
    """Return whether `name` is like what was written; click also compares the two hyphens that all options begin with."""
    import difflib

    one, other = name.lstrip("-"), written.lstrip("-")
    return one.startswith(other) or difflib.SequenceMatcher(None, one, other).ratio() >= _NEAR


def _fail(error: EnvbuildError, args: list[str]) -> NoReturn:
    # An answer that reports the failure was one JSON object already; a reader does not expect a second.
    if _wants_json(args) and not printed.answer:
        print(json.dumps(outgoing(error.as_json()), indent=2, default=str))
    _flush()
    if printed.errors_as_json:
        print(json.dumps(outgoing({"event": "error", **error.as_json()}), default=str), file=sys.stderr)
    else:
        print(f"envbuild: error: {for_people(str(error))}", file=sys.stderr)
    sys.exit(error.exit_code)
