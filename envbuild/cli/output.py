"""Printing: the answer on stdout, everything else on stderr.

Whatever a command prints goes through here, so that data from elsewhere cannot write to the terminal's controls and no
login is shown.
"""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from envbuild.util.text import for_people, outgoing, printable

if TYPE_CHECKING:
    from envbuild.settings import Settings

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")


class Printed:
    """What this command has printed on stdout so far."""

    answer = False


printed = Printed()


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
    if as_json:
        print(json.dumps(answer if exact else outgoing(answer), indent=2, sort_keys=False, default=str))
    elif exact:
        print(printable(human()) if sys.stdout is not None and sys.stdout.isatty() else human())
    else:
        print(for_people(human()))


def note(text: str) -> None:
    """Print one line of progress or advice on stderr."""
    print(for_people(text), file=sys.stderr, flush=True)


def marked(text: str) -> str:
    """Return `text` for a line that rich prints: as `note` prints it, and nothing in it is markup."""
    from rich.markup import escape

    return escape(for_people(text))


def show_notices(settings: "Settings") -> "Settings":
    """Print what the user should know of the settings, and return them."""
    for text in settings.notices:
        note(text)
    return settings
