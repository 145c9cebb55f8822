"""`envbuild check`: what contradicts itself in a recipe that somebody wrote."""

from pathlib import Path

import click

from envbuild.cli.output import emit, json_option, note

CONTRADICTIONS = 4
"""The exit code when something was found."""

@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def check(file: Path, as_json: bool) -> int:
    """Check a recipe: a Dockerfile, a requirements file, a shell script, or a TOML of axes or a stack.

    Every contradiction is listed with its line, rule, source and what to do. Exits with 0 when there is none and with 4
    when there is one.
    """
    from envbuild.matrix.load import load_matrix
    from envbuild.recipes.check import check_recipe
    from envbuild.recipes.findings import Finding
    from envbuild.recipes.read import KINDS, read_recipe

    matrix = load_matrix()
    recipe = read_recipe(matrix, file)
    report = check_recipe(matrix, recipe)

    def told(finding: Finding) -> str:
        return f"{file}:{finding.line}: {finding.rule}: {finding.why}\n    source: {finding.source}\n    to do:  {finding.todo}"

    def human() -> str:
        read_as = f"{file}: read as {KINDS[recipe.kind]}"
        return "\n".join(
            [read_as, *map(told, report.findings)] if report.findings else [f"{read_as}: no contradiction found"]
        )

    for statement in report.unknown:
        listed = matrix.has(statement.axis, statement.spec)
        none = "has no cell with" if listed else "lists no"
        note(f"envbuild: {file}:{statement.line}: the matrix {none} {statement.axis} {statement.spec}; not checked")
    emit(
        {
            "file": str(file),
            "kind": recipe.kind,
            "findings": [finding.as_json() for finding in report.findings],
            "statements": [{"line": s.line, "axis": s.axis, "spec": s.spec} for s in report.statements],
            "unknown": [{"line": s.line, "axis": s.axis, "spec": s.spec} for s in report.unknown],
            "matrix": matrix.digest,
        },
        as_json=as_json,
        human=human,
    )
    return CONTRADICTIONS if report.findings else 0
