"""A plain `resolve` or `render` without click: long options that take one value or none, each at most once.

What it takes is read from the declarations that click reads. Whatever is less plain, or goes wrong in any way, is left to
`program`, which does all of it again: neither command changes anything, and each prints at its very end.
"""

import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from envbuild.cli.declared import Declared, Stated

QUICK = ("resolve", "render")
"""The commands that read, print once, and write nothing."""
_READ = {"is_flag", "multiple", "default", "type", "help", "metavar", "show_default", "shell_complete"}
"""What an option may state for its value to be read here."""


def answered(args: Sequence[str]) -> bool:
    """Answer the command line `args` where that is plain; return whether it is done."""
    if not args or args[0] not in QUICK or "_ENVBUILD_COMPLETE" in os.environ or "click" in sys.modules:
        return False
    if os.environ.get("ENVBUILD_DEBUG", "0") not in {"", "0"}:
        return False
    gc.set_threshold(50_000, 20, 100)  # as in `program.main`
    try:
        command = getattr(importlib.import_module(f"envbuild.cli.{args[0]}"), args[0])
        values = parsed(command, args[1:])
        if values is None:
            return False
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        command.function(**values)
        sys.stdout.flush()
    except Exception:  # noqa: BLE001 - `program` meets it again and reports it
        return False
    return True


def parsed(command: Declared, args: Sequence[str]) -> dict[str, Any] | None:
    """Return the values of a command's parameters, as click would; None where it takes click to read them."""
    flags: dict[str, tuple[str, Stated]] = {}
    values: dict[str, Any] = {}
    for stated in command.stated:
        if stated.name == "argument":  # of the words after `--`, which take click to read: none
            values[stated.arguments[0]] = ()
        if stated.name != "option":
            continue
        name, long = _names(stated)
        flags[long] = name, stated
        default: Any = () if stated.options.get("multiple") else False if stated.options.get("is_flag") else None
        values[name] = stated.options.get("default", default)
    given = iter(args)
    seen = set()
    for word in given:
        flag, equals, value = word.partition("=")
        name, stated = flags.get(flag, ("", Stated("", (), {})))
        if not name or name in seen or stated.options.get("multiple") or not stated.options.keys() <= _READ:
            return None
        seen.add(name)
        if stated.options.get("is_flag"):
            if equals:
                return None
            values[name] = True
            continue
        value = value if equals else next(given, "")
        kind = stated.options.get("type")
        choices = kind.arguments[0] if isinstance(kind, Stated) and kind.name == "Choice" else None
        if not value.strip() or value.startswith("-") or (choices is None and kind is not None):
            return None
        if choices is not None and value not in choices:
            return None
        values[name] = value
    return values


def _names(stated: Stated) -> tuple[str, str]:
    """Return the parameter's name and the long option of an option."""
    long = next((each for each in stated.arguments if each.startswith("--")), "")
    name = next((each for each in stated.arguments if not each.startswith("-")), long.lstrip("-").replace("-", "_"))
    return name, long
