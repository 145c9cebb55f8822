"""`envbuild check`: versions that do not go together in a recipe."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from envbuild.cli.output import emit, json_option, note, printed, progress_options
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuild.errors import DataError
    from envbuild.recipes.batch import Checked

CONTRADICTIONS = 4
"""The exit code when something was found."""

_KINDS = ("dockerfile", "requirements", "shell", "toml", "conda", "pyproject")


@click.command()
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="FILE...")
@click.option("--as", "kind", type=click.Choice(_KINDS), help="Read the files as this kind, whatever their names.")
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="RULE",
    help="Leave out the findings of this rule; repeat it for more.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "github", "sarif"]),
    default="text",
    show_default=True,
    help="github: annotations of a GitHub workflow. sarif: SARIF 2.1.0, for code scanning.",
)
@json_option
@progress_options
def check(files: tuple[Path, ...], kind: Any, ignored: tuple[str, ...], form: str, as_json: bool) -> int:
    """Check recipes: Dockerfiles, requirements files, shell scripts, conda environments, pyproject.toml, TOML of axes.

    FILE can be a folder, of which every recipe is checked, or - for standard input. Every contradiction is listed with
    its line, rule, source and what to do. Exits with 0 when there is none and with 4 when there is one; with 2 when a
    file cannot be read, after the answer for the others.
    """
    from envbuild.matrix.load import load_matrix
    from envbuild.recipes.batch import check_all, check_ignored
    from envbuild.recipes.formats import as_annotations, as_sarif

    matrix = load_matrix()
    check_ignored(matrix, ignored)
    unread: list[DataError] = []
    done = check_all(matrix, files, kind=kind, ignored=ignored, unread=unread)
    if unread and not done:
        _raise_unread(unread)
    for each in done:
        _say(each)
    if printed.work:
        printed.work.close()
    if form == "github" and not as_json:
        click.echo(as_annotations(done), nl=False)
    elif form == "sarif" and not as_json:
        click.echo(json.dumps(as_sarif(matrix, done), indent=2))
    else:
        answers = [each.as_json(matrix) for each in done]
        whole: dict[str, Any] = {"files": answers, "matrix": matrix.digest}
        if unread:
            whole["unread"] = [{"file": error.where, "what": error.what, "hint": error.hint} for error in unread]
        one = len(files) == 1 and len(done) == 1 and not files[0].is_dir()
        emit(answers[0] if one else whole, as_json=as_json, human=lambda: "\n".join(map(_shown, done)))
    if unread:
        printed.answer = True
        _raise_unread(unread)
    return CONTRADICTIONS if any(each.report.findings for each in done) else 0


def _raise_unread(errors: "Sequence[DataError]") -> NoReturn:
    """Raise the last of `errors`, with a line on stderr for each of the others."""
    for error in errors[:-1]:
        note(f"envbuild: error: {error}")
    raise errors[-1]


def _say(each: "Checked") -> None:
    """Say on stderr what was not checked."""
    for statement in each.report.unknown:
        none = "has no cell with" if statement in each.without_cell else "lists no"
        note(
            f"envbuild: {each.name}:{statement.line}: the matrix {none} {statement.axis} {statement.spec}; not checked"
        )
    for line, text in each.report.not_understood:
        note(f"envbuild: {each.name}: not understood, line {line}: {text}")


def _shown(each: "Checked") -> str:
    read_as = f"{each.name}: read as {each.kind}"
    found = [
        f"{each.name}:{f.line}: {f.rule}: {f.why}\n    source: {f.source}\n    to do:  {f.todo}"
        for f in each.report.findings
    ]
    if found:
        return "\n".join([read_as, *found])
    skipped = len(each.report.not_understood)
    if skipped:
        lines = count_of(skipped, "line was", "lines were")
        return f"{read_as}: no contradiction found, but {lines} not understood"
    return f"{read_as}: no contradiction found"
