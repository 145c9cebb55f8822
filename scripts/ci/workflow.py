"""What the scripts for workflows have in common: outputs, the job's summary, text from elsewhere in a log.

On a plain machine there is no file for outputs or the summary, and nothing here needs one.
"""

import contextlib
import html
import os
import re
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUMMARY_LIMIT = 900_000
"""Bytes of a job's summary; GitHub takes 1 MiB of a step, and none of a larger one."""


def output(name: str, value: str) -> None:
    """Set an output of the step; `value` is one line."""
    if "\n" in value or "\r" in value:
        raise ValueError(f"the output {name} holds a line break")
    path = os.environ.get("GITHUB_OUTPUT")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{name}={value}\n")
    else:
        print(f"{name}={value}")


def summary(text: str) -> None:
    """Add markdown to the job's summary, where there is one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        body = text.encode()
        if len(body) > SUMMARY_LIMIT:
            body = body[:SUMMARY_LIMIT].decode(errors="ignore").encode() + b"\n\n(cut: the log has all of it)\n"
        with Path(path).open("ab") as file:
            file.write(body + b"\n")


def cell_text(text: object, limit: int = 300) -> str:
    """Return text from elsewhere for a cell of a table, or a line, of markdown: nothing in it is markup."""
    one_line = " ".join(str(text).split())
    cut = one_line if len(one_line) <= limit else one_line[: limit - 1] + "…"
    printable = "".join(c if c.isprintable() else "\ufffd" for c in cut)
    # `@` would notify people, a `#1` would link an issue, in a pull request's text
    return re.sub(r"([\\`*_{}\[\]()#+!|~@<>&:-])", lambda found: f"&#{ord(found[1])};", printable)


def code(text: object, limit: int = 300) -> str:
    """Return text from elsewhere as code in a line of markdown; HTML, because a backtick in it ends no tag."""
    one_line = " ".join(str(text).split())
    cut = one_line if len(one_line) <= limit else one_line[: limit - 1] + "…"
    return f"<code>{html.escape(cut).replace('|', '&#124;')}</code>"


def block(lines: Sequence[str]) -> str:
    """Return lines from elsewhere as a block of code that nothing in it ends."""
    body = "\n".join("".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line) for line in lines)
    fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", body)), default=0))
    return f"{fence}text\n{body}\n{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of markdown; the cells are markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@contextlib.contextmanager
def no_commands() -> Iterator[None]:
    """Have the runner read nothing that is printed inside as a command to it, such as `::add-path::`."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        yield
        return
    word = secrets.token_hex(16)
    print(f"::stop-commands::{word}", flush=True)
    try:
        yield
    finally:
        sys.stderr.flush()
        print(f"::{word}::", flush=True)


def words_of(text: str) -> list[str]:
    """Return flags that were written as one line, as a shell would split them.

    Raises:
        SystemExit: a quote is not closed.

    """
    try:
        return shlex.split(text)
    except ValueError as error:
        sys.exit(f"error: {text!r} cannot be read as flags: {error}")
