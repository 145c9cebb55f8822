"""Printing: the answer on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from envbuild.settings import Settings

json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")


class Printed:
    """What this command has printed on stdout so far."""

    answer = False


printed = Printed()


def emit(answer: Any, *, as_json: bool, human: Callable[[], str]) -> None:
    """Print `answer` as JSON, or the text that `human` makes of it."""
    printed.answer = True
    print(json.dumps(answer, indent=2, sort_keys=False, default=str) if as_json else human())


def note(text: str) -> None:
    """Print one line of progress or advice on stderr."""
    print(text, file=sys.stderr, flush=True)


def tell(settings: "Settings") -> "Settings":
    """Print what the user should know of the settings, and return them."""
    for text in settings.notices:
        note(text)
    return settings
