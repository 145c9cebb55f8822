"""`envbuild ci`: the cells to verify, as the matrix of a workflow."""

from typing import Any

import click

from envbuild.cli.axes import axis_options, request_from
from envbuild.cli.output import emit, json_option, note, progress_options

GITHUB_LIMIT = 256
"""Jobs that GitHub runs of one matrix."""


@click.command()
@axis_options
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    default=GITHUB_LIMIT,
    show_default=True,
    help="List at most this many cells, the most important first; GitHub runs at most 256 jobs per matrix.",
)
@json_option
@progress_options
def ci(limit: int, as_json: bool, **flags: Any) -> None:
    """List the cells to verify: the documented ones, every stack, then a pairwise cover of cuda, torch and te.

    The flags narrow the list: `envbuild ci --cuda 13.0 --limit 20`. Every pair of minor releases that fits together is in
    at least one cell of the whole list. --json prints the `strategy.matrix` of a GitHub workflow:
    {"include": [{"id", "args", "stack"}, …]}, where `args` are flags for `envbuild image`.
    """
    from envbuild.curate.coverage import cells_to_verify
    from envbuild.evidence.refs import evidence_refs
    from envbuild.matrix.load import load_matrix
    from envbuild.stacks.load import load_stack, stack_names

    stack = flags["stack"]
    found = cells_to_verify(
        load_matrix(),
        {name: load_stack(name).axes for name in ([stack] if stack else stack_names())},
        request_from({**flags, "stack": None}),
        stack=stack,
        evidence=evidence_refs(),
        limit=limit,
    )

    def human() -> str:
        from envbuild.cli.show import table

        return table([(v.cell.id, v.args, v.why) for v in found.cells], indent="")

    # GitHub would read any other key next to `include` as an axis.
    answer = {"include": [{"id": v.cell.id, "args": v.args, "stack": v.stack or ""} for v in found.cells]}
    emit(answer, as_json=as_json, human=human)
    note(f"{len(found.cells)} cells contain {found.covered} of the {found.pairs} pairs of cuda, torch and te")
