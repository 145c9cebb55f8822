"""The man pages: a page for `envbuild` and one for each command, written from the command line's own help.

`write_reference.py` writes them into man/, and the package installs them in share/man/man1.
"""

import inspect
from collections.abc import Iterator

import click

_HEAD = ".\\\" Written by scripts/write_reference.py from the command line's help: do not edit.\n"


def roff(text: str) -> str:
    """Return a text as roff reads it: nothing in it is a request or an escape."""
    lines = text.replace("\\", "\\e").replace("-", "\\-").splitlines()
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in lines)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith("\b\n"):  # click keeps its lines
            yield f".PP\n.nf\n{roff(paragraph.partition(chr(10))[2])}\n.fi\n"
        else:
            yield f".PP\n{roff(' '.join(paragraph.split()))}\n"


def _page(name: str, about: str, usage: str, body: str, also: list[str]) -> str:
    title = name.replace(" ", "-")
    links = "\n".join(f".BR {roff(each)} (1){',' if each != also[-1] else ''}" for each in also)
    return (
        f'{_HEAD}.TH {roff(title.upper())} 1 "" envbuild\n.SH NAME\n{roff(title)} \\- {roff(about)}\n'
        f".SH SYNOPSIS\n.B {roff(name)}\n{roff(usage)}\n.SH DESCRIPTION\n{body}.SH SEE ALSO\n{links}\n"
    )


def _options(command: click.Command, context: click.Context) -> str:
    rows = []
    for param in command.params:
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None:
            rows.append(f".TP\n.B {roff(record[0])}\n{roff(' '.join(record[1].split()))}\n")
    # Without click's own row: click keeps the first that was asked for, which knows `-h` only below the whole command line.
    rows.append(f".TP\n.B {roff('-h, --help')}\nShow this help and exit.\n")
    return ".SH OPTIONS\n" + "".join(rows)


def man_pages(
    root: click.Group, commands: dict[tuple[str, ...], click.Command], sections: dict[str, dict[str, tuple[str, str]]]
) -> dict[str, str]:
    """Return the text of each page by the name of its file.

    Args:
        root: the command `envbuild`.
        commands: each command by its words, those of groups among them.
        sections: the commands by the headings of `envbuild --help`, each with its module and what it does.

    """
    pages = {}
    listed = "".join(
        f".SS {roff(heading)}\n"
        + "".join(f".TP\n.B {roff(name)}\n{roff(entry[1])}\n" for name, entry in section.items())
        for heading, section in sections.items()
    )
    names = [f"envbuild-{'-'.join(words)}" for words in commands]
    body = "".join(_paragraphs(root.help or "")) + f".SH COMMANDS\n{listed}"
    about = "reproducible container environments for training"
    pages["envbuild.1"] = _page("envbuild", about, "COMMAND [OPTIONS]", body, names)
    for words, command in commands.items():
        name = " ".join(("envbuild", *words))
        context = click.Context(command, info_name=name)
        text = "".join(_paragraphs(command.help or "")) + _options(command, context)
        about = command.get_short_help_str(limit=200).rstrip(".")
        usage = " ".join(command.collect_usage_pieces(context))
        pages[f"{name.replace(' ', '-')}.1"] = _page(name, about, usage, text, ["envbuild"])
    return pages
