"""Printing: the answer on stdout, everything else on stderr.

Whatever a command prints goes through here, so that data from elsewhere cannot write to the terminal's controls and no
login is shown.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from envbuild.cli import declared as click
from envbuild.util.text import for_people, outgoing, printable

if TYPE_CHECKING:
    from envbuild.cli.work import Mode, Work
    from envbuild.settings import Settings

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")


class Printed:
    """What this command has printed, and what it is at."""

    answer = False
    """Whether the answer is on stdout."""
    errors_as_json = False
    """Whether whoever reads stderr takes each line for a JSON object."""
    work: "Work | None" = None


printed = Printed()


def progress_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --quiet, --verbose and --progress to a command that may take longer than a second, and show what it is at."""

    @functools.wraps(command)
    def run(*args: Any, quiet: bool, verbose: bool, progress: str, **options: Any) -> Any:
        from envbuild.cli.work import Work
        from envbuild.errors import UsageError

        if quiet and (verbose or progress == "json"):
            raise UsageError(
                f"--quiet and {'--verbose' if verbose else '--progress json'} contradict each other", hint="give one"
            )
        mode: Mode = "quiet" if quiet else _mode(progress)
        printed.errors_as_json = mode == "json"
        with Work(mode, verbose=verbose) as work:
            printed.work = work
            try:
                return command(*args, **options)
            finally:
                printed.work = None

    for option in (
        click.option(
            "--progress",
            type=click.Choice(["auto", "plain", "json"]),
            default="auto",
            show_default=True,
            help="How progress is shown on stderr: a live view on a terminal, lines, or a JSON object per line.",
        ),
        click.option("-v", "--verbose", is_flag=True, help="Print every line of a build's output, too."),
        click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr."),
    ):
        run = option(run)
    return run


def _mode(progress: str) -> "Mode":
    if progress == "json":
        return "json"
    terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}
    return "live" if progress == "auto" and terminal else "plain"


def emit(answer: Any, *, as_json: bool, human: Callable[[], str], exact: bool = False) -> None:
    """Print `answer` as JSON, or the text that `human` makes of it.

    Logins and tokens are masked in both; in the text, control characters are printed as escapes.

    Args:
        answer: what JSON can hold.
        as_json: which of the two.
        human: makes the text.
        exact: the text is a file's content, which a file or a pipe gets as it is. A terminal gets no control characters.

    """
    printed.answer = True
    if printed.work:
        printed.work.close()
    if as_json:
        print(json.dumps(answer if exact else outgoing(answer), indent=2, sort_keys=False, default=str))
    elif exact:
        print(printable(human()) if sys.stdout is not None and sys.stdout.isatty() else human())
    else:
        print(for_people(human()))


def note(text: str) -> None:
    """Print one line of progress or advice on stderr."""
    if printed.work:
        printed.work.note(text)
    else:
        print(for_people(text), file=sys.stderr, flush=True)


def use_cache(settings: "Settings") -> "Settings":
    """Keep `envbuild cache prune` from removing what this command uses until it ends; return the settings."""
    from envbuild.util.in_use import share

    share(settings.cache_dir, note)
    return settings


def doing(text: str) -> None:
    """Take what is done now; it is shown only to who waits for it."""
    if printed.work:
        printed.work.activity(text)


def marked(text: str) -> str:
    """Return `text` for a line that rich prints: as `note` prints it, and nothing in it is markup."""
    from rich.markup import escape

    return escape(for_people(text))


def show_notices(settings: "Settings") -> "Settings":
    """Print what the user should know of the settings, and return them."""
    for text in settings.notices:
        note(text)
    return settings
