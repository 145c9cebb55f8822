"""`envbuild patch`: list the patches, check a tree against them, apply them, undo them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from envbuild.cli.groups import Group
from envbuild.cli.output import emit, json_option, note, progress_options
from envbuild.errors import PatchError
from envbuild.patches import apply as trees
from envbuild.patches.manifest import Patch, load_patches, select
from envbuild.patches.tree import PatchReport
from envbuild.patches.upstream import check_upstream

_TREE = click.Path(exists=True, file_okay=False, path_type=Path)
_names = click.option(
    "--patch",
    "names",
    multiple=True,
    metavar="NAME",
    help="Use only this patch; repeat it for more. [default: the tree's]",
)
_skipped = click.option(
    "--skip", "skipped", multiple=True, metavar="NAME", help="Leave out this patch; repeat it for more."
)


@click.group(cls=Group)
def patch() -> None:
    """List patches; check, apply or undo them in a source tree."""


@patch.command("list")
@json_option
def list_patches(as_json: bool) -> None:
    """List the patches, what they change and when each can be removed."""
    patches = load_patches().values()
    answer = [{**p.model_dump(mode="json", exclude={"diff"}), "digest": p.digest} for p in patches]
    emit({"patches": answer}, as_json=as_json, human=lambda: "\n\n".join(map(_described, patches)))


@patch.command()
@click.argument("tree", type=_TREE)
@_names
@_skipped
@click.option("--upstream", is_flag=True, help="Check whether TREE, the newest upstream, still needs the patch.")
@json_option
@progress_options
def check(tree: Path, names: tuple[str, ...], skipped: tuple[str, ...], upstream: bool, as_json: bool) -> int:
    """Check whether each patch fits TREE, is already applied, or is refused, and why.

    Without --patch, checks the patches of the project that TREE is recognised as. With --upstream, TREE needs only the
    files that the patches look at, and the exit code is 4 when upstream has changed since it was last checked.
    """
    if upstream:
        return _check_upstream(tree, names, skipped, as_json=as_json)
    reports = trees.check(tree, _chosen(tree, names, skipped))
    emit(
        {"patches": [r.as_json() for r in reports]}, as_json=as_json, human=lambda: "\n".join(map(_state_line, reports))
    )
    refused = [report.error for report in reports if report.error]
    for error in refused:
        note(f"envbuild: error: {error}")
    return PatchError.exit_code if refused else 0


@patch.command()
@click.argument("tree", type=_TREE)
@_names
@_skipped
@json_option
def apply(tree: Path, names: tuple[str, ...], skipped: tuple[str, ...], as_json: bool) -> None:
    """Apply every chosen patch to TREE, or none when one is refused."""
    reports = trees.apply(tree, _chosen(tree, names, skipped))
    _emit_changes(reports, {"applies": "applied", "applied": "already applied, nothing changed"}, as_json=as_json)


@patch.command()
@click.argument("tree", type=_TREE)
@_names
@_skipped
@json_option
def undo(tree: Path, names: tuple[str, ...], skipped: tuple[str, ...], as_json: bool) -> None:
    """Remove every chosen patch from TREE, or none when one is refused."""
    reports = trees.undo(tree, _chosen(tree, names, skipped))
    _emit_changes(reports, {"applied": "undone", "applies": "not applied, nothing changed"}, as_json=as_json)


def _emit_changes(reports: tuple[PatchReport, ...], words: Mapping[str, str], *, as_json: bool) -> None:
    answer = [{**r.as_json(), "state": words[r.state].partition(",")[0]} for r in reports]
    emit({"patches": answer}, as_json=as_json, human=lambda: "\n".join(f"{r.name}: {words[r.state]}" for r in reports))


def _check_upstream(tree: Path, names: tuple[str, ...], skipped: tuple[str, ...], *, as_json: bool) -> int:
    patches = load_patches()
    if not names:
        raise click.UsageError("--upstream needs --patch: a newer tree cannot be recognised")
    reports = check_upstream(tree, _without(select(patches, names), skipped, patches))
    answer: list[dict[str, Any]] = [
        {"name": r.name, "path": r.path, "state": r.state, "known": r.known, "text": r.text} for r in reports
    ]
    emit(
        {"upstream": answer},
        as_json=as_json,
        human=lambda: "\n".join(f"{r.name}: {r.state}: {r.text}" for r in reports),
    )
    news = [report for report in reports if report.state != report.known]
    for report in news:
        note(
            f"envbuild: {report.name} was last seen {report.known} upstream; it may go: {patches[report.name].expires}"
        )
    return PatchError.exit_code if news else 0


def _chosen(tree: Path, names: tuple[str, ...], skipped: tuple[str, ...]) -> list[Patch]:
    patches = load_patches()
    chosen = select(patches, names) if names else trees.of_tree(tree, patches.values())
    return _without(chosen, skipped, patches)


def _without(chosen: list[Patch], skipped: tuple[str, ...], patches: Mapping[str, Patch]) -> list[Patch]:
    out = {patch.name for patch in select(patches, skipped, flag="--skip")}
    left = [patch for patch in chosen if patch.name not in out]
    if not left:
        note("envbuild: every patch is skipped")
    return left


def _described(entry: Patch) -> str:
    return "\n".join(
        [
            f"{entry.name}  ({entry.repo}, {entry.known()})",
            f"  what:    {entry.what}",
            f"  why:     {entry.why}",
            f"  issue:   {entry.issue}",
            f"  stacks:  {', '.join(entry.stacks)}",
            f"  may go:  {entry.expires}",
            *(f"  file:    {file.path}  {file.pre[:12]} -> {file.post[:12]}" for file in entry.files),
        ]
    )


def _state_line(report: PatchReport) -> str:
    words = {"applies": "fits", "applied": "already applied", "refused": "refused"}
    return f"{report.name}: {words[report.state]}"
