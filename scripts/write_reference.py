#!/usr/bin/env python3
"""Write the parts of the reference that the code states: commands, settings, exit codes, the stack file, the lock file; and the man pages.

    python scripts/write_reference.py            # write them into docs/reference and man
    python scripts/write_reference.py --check    # write nothing; exit with 1 and the names of stale pages

A generated part stands between two comments in its page. What is around it is written by hand and stays.
"""

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
MAN = ROOT / "man"
sys.path.insert(0, str(ROOT))

from envbuild import errors  # noqa: E402
from envbuild.cli import SECTIONS, cli  # noqa: E402
from envbuild.settings.model import LIST_KEYS, Settings  # noqa: E402
from scripts.man_pages import man_pages  # noqa: E402

BEGIN = "<!-- generated: {} -->"
END = "<!-- end -->"
# Names of types, as people say them. Names that the modules define stay as they are, and link to nothing.
PLAIN = {
    "str": "text",
    "Text": "text",
    "Line": "text, one line",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "Url": "address of a git repository",
    "Commit": "git id, 40 digits",
    "Sha256": "sha256, 64 digits",
    "Digest": "digest, `sha256:…`",
    "Variables": "table of variables",
    "OsName": "name of an OS package",
    "OsPackageName": "name of an OS package",
    "OsVersion": "version of an OS package",
    "Constraint": "constraint",
    "Source": "source",
    "Epoch": "seconds since 1970",
    "RequirementLine": "requirement",
    "PackageName": "name of a distribution",
    "AxisName": "axis",
    "AxisKey": "axis",
    "Version": "version",
    "SafeName": "name",
    "StackName": "name of a stack",
    "FileName": "name of a file",
    "FileUrl": "address of a file",
    "SourceUrl": "address of a git repository",
    "TreePath": "path in the tree",
    "ArchivePath": "path in the archive",
    "ImageReference": "name of an image",
}


def escaped(text: str) -> str:
    """Return the text as a table's cell: one line, with nothing that Markdown or HTML reads as markup outside of code."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = [part if part.startswith("`") else part.replace("*", r"\*").replace("<", "&lt;") for part in parts]
    return "".join(plain).replace("|", r"\|")


# Commands


def _commands(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


def _options(command: click.Command, context: click.Context, *, of_axes: bool) -> list[str]:
    rows = []
    for param in command.get_params(context):
        if isinstance(param, click.Option) and (param.name or "").startswith("axis_") == of_axes:
            record = param.get_help_record(context)
            if record is not None and "--help" not in param.opts:
                rows.append(f"| `{record[0].replace('|', chr(92) + '|')}` | {escaped(record[1])} |")
    return rows


def commands() -> str:
    """Return a section per command, by the groups of `envbuild --help`, and the flags of axes once."""
    of = dict(_commands(cli, ()))
    lines = ["| command | does |", "|---|---|"]
    for section in SECTIONS.values():
        for name, entry in section.items():
            lines.append(f"| [`{name}`](#envbuild-{name}) | {escaped(entry[1])} |")
    for path, command in of.items():
        name = " ".join(("envbuild", *path))
        context = click.Context(command, info_name=name)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += ["", f"## `{name}`", ""]
        for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
            if paragraph.startswith("\b\n"):  # click keeps its lines
                lines += ["```text", *paragraph.split("\n")[1:], "```", ""]
            else:
                lines += [*wrapped(escaped(paragraph).replace(r"\|", "|")), ""]
        lines += ["```", f"{name} {usage}", "```"]
        if _options(command, context, of_axes=True):
            lines += ["", "It takes the [flags of axes](#flags-of-axes), too."]
        if rows := _options(command, context, of_axes=False):
            lines += ["", "| option | what |", "|---|---|", *rows]
    resolve = of["resolve",]
    rows = _options(resolve, click.Context(resolve, info_name="envbuild resolve"), of_axes=True)
    lines += ["", "## Flags of axes", "", "| flag | what |", "|---|---|", *rows]
    return "\n".join(lines)


def wrapped(text: str) -> list[str]:
    """Return the text in lines of at most 120 columns."""
    import textwrap

    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


# Settings


def settings() -> str:
    """Return the table of the settings' keys."""
    rows = ["| key | value | default | what |", "|---|---|---|---|"]
    for key, field in Settings.model_fields.items():
        kind = (
            "list of text"
            if key in LIST_KEYS
            else "whole number"
            if key == "jobs"
            else "number"
            if key == "memory_gib"
            else "path"
            if key in {"ca_bundle", "sources", "debs", "cache_dir"}
            else "text"
        )
        default = "`$XDG_CACHE_HOME/envbuild`" if key == "cache_dir" else f"`{field.default}`" if field.default else "-"
        rows.append(f"| `{key}` | {kind} | {default} | {field.description} |")
    return "\n".join(rows)


# Exit codes


def exit_codes() -> str:
    """Return the table of exit codes, from the classes of errors."""
    rows = [(0, "", "done")]
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.EnvbuildError) and kind is not errors.EnvbuildError:
            rows.append((kind.exit_code, f"`{name}`", (kind.__doc__ or "").strip().splitlines()[0].removesuffix(".")))
    rows.append((130, "", "interrupted, by Ctrl-C, SIGTERM or SIGHUP"))
    lines = [f"| {code} | {name} | {escaped(what)} |" for code, name, what in sorted(rows, key=lambda row: row[0])]
    return "\n".join(["| code | error | means |", "|---|---|---|", *lines])


# Files: their models' fields, read from the source, so that whatever library the models are of, the table is the same.


def _type(node: ast.expr, local: dict[str, ast.ClassDef]) -> str:
    match node:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            return _type(inner, local)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[inner, *_])):
            return f"list: {_type(inner, local)}"
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[key, value])):
            return f"table, {_type(key, local)} to {_type(value, local)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=values):
            each = values.elts if isinstance(values, ast.Tuple) else [values]
            return " or ".join(f"`{value.value}`" for value in each if isinstance(value, ast.Constant))
        case ast.BinOp(left=left, op=ast.BitOr(), right=ast.Constant(value=None)):
            return _type(left, local)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return f"{_type(left, local)} or {_type(right, local)}"
        case ast.Name(id=name):
            return f"[{name}](#{name.lower()})" if name in local else PLAIN.get(name, f"`{name}`")
        case _:
            return f"`{ast.unparse(node)}`"


def _needed(statement: ast.AnnAssign) -> bool:
    value = statement.value
    if isinstance(value, ast.Call):
        return not value.args and all(keyword.arg not in {"default", "default_factory"} for keyword in value.keywords)
    return value is None


def _fields(kind: ast.ClassDef, local: dict[str, ast.ClassDef]) -> Iterator[str]:
    for statement, after in zip(kind.body, [*kind.body[1:], ast.Pass()], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        note = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            note = inspect.cleandoc(after.value.value)
        else:
            for name in [node.id for node in ast.walk(statement.annotation) if isinstance(node, ast.Name)]:
                if name in local:
                    note = (ast.get_docstring(local[name]) or "").splitlines()[0]
        needed = "yes" if _needed(statement) else ""
        yield f"| `{statement.target.id}` | {needed} | {_type(statement.annotation, local)} | {escaped(note)} |"


def fields_of(module: Path, first: str) -> str:
    """Return a table per class of a module of models, beginning with the class `first`, then those that it uses."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    local = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(isinstance(part, ast.AnnAssign) for part in node.body)
    }
    order, lines = [first], []
    for name in order:
        for node in ast.walk(ast.Module([s for s in local[name].body if isinstance(s, ast.AnnAssign)], [])):
            if isinstance(node, ast.Name) and node.id in local and node.id not in order:
                order.append(node.id)
    for name in order:
        note = " ".join((ast.get_docstring(local[name]) or "").split("\n\n")[0].split())
        lines += [f"### {name}", "", *wrapped(note), "", "| key | needed | value | what |", "|---|---|---|---|"]
        lines += [*_fields(local[name], local), ""]
    return "\n".join(lines).rstrip()


PARTS: dict[str, Callable[[], str]] = {
    "commands": commands,
    "settings": settings,
    "exit-codes": exit_codes,
    "stack-file": lambda: fields_of(ROOT / "envbuild" / "stacks" / "model.py", "Stack"),
    "lock": lambda: fields_of(ROOT / "envbuild" / "lock" / "model.py", "Lock"),
}


def page_with(name: str, text: str) -> str:
    """Return the text of a page with its generated part made again.

    Raises:
        ValueError: the page has no such part.

    """
    begin = BEGIN.format(name)
    head, found, rest = text.partition(f"{begin}\n")
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"docs/reference/{name}.md has no part between {begin} and {END}")
    return f"{head}{begin}\n\n{PARTS[name]()}\n\n{END}{tail}"


def write_man(*, check: bool) -> list[str]:
    """Write the man pages, or with `check` only compare them; return the paths of those that were stale."""
    pages = man_pages(cli, dict(_commands(cli, ())), SECTIONS)
    there = {path.name: path.read_text(encoding="utf-8") for path in MAN.glob("*.1")}
    stale = sorted(name for name in pages.keys() | there.keys() if pages.get(name) != there.get(name))
    for name in stale if not check else ():
        MAN.mkdir(exist_ok=True)
        if name in pages:
            (MAN / name).write_text(pages[name], encoding="utf-8")
        else:
            (MAN / name).unlink()
    return [f"man/{name}" for name in stale]


def main() -> int:
    """Write the pages, or with --check name those that are stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is stale")
    check = parser.parse_args().check
    stale = []
    for name in PARTS:
        path = PAGES / f"{name}.md"
        old = path.read_text(encoding="utf-8")
        new = page_with(name, old)
        if new != old:
            stale.append(f"docs/reference/{name}.md")
            if not check:
                path.write_text(new, encoding="utf-8")
    stale += write_man(check=check)
    if stale:
        print(f"{'stale' if check else 'written'}: {', '.join(stale)}")
    if stale and check:
        print("run: python scripts/write_reference.py")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
