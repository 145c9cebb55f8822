"""`envbuild matrix`: list axes, releases and rules, count cells, write the page, check the data, propose releases."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.complete import complete_axis
from envbuild.cli.groups import AxisGroup
from envbuild.cli.matrix_rows import cells, is_about
from envbuild.cli.matrix_try import list_trials, try_pairs
from envbuild.cli.output import emit, json_option, note, progress_options, show_notices, use_cache
from envbuild.paths import data_dir
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from envbuild.matrix.model import Rule

_folder_option = click.option(
    "--matrix",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Use this folder of axis files. [default: this installation's]",
)


@click.group(cls=AxisGroup, invoke_without_command=True)
@json_option
@click.pass_context
def matrix(ctx: click.Context, as_json: bool) -> None:
    """List axes, releases and rules; count cells; check the data; propose new releases.

    `envbuild matrix AXIS [SPEC]` lists the releases of one axis, e.g. `envbuild matrix torch ">=2.8"`.
    """
    if ctx.invoked_subcommand is None:
        _list(as_json=as_json)
    elif as_json:  # --json before the subcommand is meant for the subcommand's answer
        ctx.default_map = {ctx.invoked_subcommand: {"as_json": True}}


matrix.add_command(cells)
matrix.add_command(try_pairs)
matrix.add_command(list_trials)


@matrix.command("list")
@json_option
def list_axes(as_json: bool) -> None:
    """List the axes: how each gets into a cell, and how many releases it has."""
    _list(as_json=as_json)


def _list(*, as_json: bool) -> None:
    from envbuild.cli.show import table
    from envbuild.matrix.load import load_matrix

    loaded = load_matrix()
    axes = sorted(loaded.axes.values(), key=lambda axis: axis.name)
    answer = {
        "matrix": loaded.digest,
        "axes": [{**axis.model_dump(), "releases": len(loaded.releases[axis.name])} for axis in axes],
        "rules": len(loaded.rules),
    }

    def human() -> str:
        rows: list[tuple[str, ...]] = [("axis", "use", "releases", "what it is")]
        rows += [(axis.name, axis.use, str(len(loaded.releases[axis.name])), axis.about) for axis in axes]
        kinds = ("requires", "inert", "tested-with", "note")
        counts = ", ".join(f"{sum(r.kind == kind for r in loaded.rules)} {kind}" for kind in kinds)
        return f"{table(rows, indent='')}\n\n{count_of(len(loaded.rules), 'rule')}: {counts}\nmatrix {loaded.digest}"

    emit(answer, as_json=as_json, human=human)


@matrix.command()
@click.option(
    "--axis",
    "axes",
    multiple=True,
    metavar="AXIS",
    shell_complete=complete_axis,
    help="List only rules about this axis; repeat it for more.",
)
@click.option(
    "--topic", "topics", multiple=True, metavar="TOPIC", help="List only rules on this topic; repeat it for more."
)
@json_option
def rules(axes: tuple[str, ...], topics: tuple[str, ...], as_json: bool) -> None:
    """List the rules with their reasons and sources."""
    from envbuild.errors import UsageError
    from envbuild.matrix.load import load_matrix

    loaded = load_matrix()
    known = {rule.topic for rule in loaded.rules}
    for flag, given, names in (("--axis", axes, set(loaded.axes)), ("--topic", topics, known)):
        unknown = [name for name in given if name not in names]
        if unknown:
            raise UsageError(
                f"there is no {flag[2:]} {unknown[0]!r}", where=flag, hint="one of: " + ", ".join(sorted(names))
            )
    found = [
        rule
        for rule in loaded.rules
        if (not topics or rule.topic in topics) and all(is_about(rule, axis) for axis in axes)
    ]
    answer = {
        "matrix": loaded.digest,
        "rules": [
            rule.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True) for rule in found
        ],
    }
    emit(answer, as_json=as_json, human=lambda: "\n".join(_rule_lines(rule) for rule in found))


def _rule_lines(rule: "Rule") -> str:
    from envbuild.matrix.text import rule_text

    when, then = rule_text(rule)
    arrow = f"\n  {when} -> {then}" if then else f"\n  {when}"
    return f"{rule.id} ({rule.kind}, {rule.topic}): {rule.why}{arrow}\n  {rule.source}"


@matrix.command()
@_folder_option
@click.option("--online", is_flag=True, help="Compare with the package metadata on the index, too (takes a minute).")
@click.option("--notes", is_flag=True, help="Print notes, too: redundant rules, releases that no cell uses yet.")
@json_option
@progress_options
def check(folder: Path | None, online: bool, notes: bool, as_json: bool) -> int:
    """Check the data: references, rules without effect, and with --online the package metadata.

    Exits with 2 when there is an error.
    """
    from envbuild.curate.checks import check_matrix
    from envbuild.curate.proposals import unfilled
    from envbuild.errors import DataError
    from envbuild.matrix.load import load_matrix
    from envbuild.settings import load_settings

    place = folder or data_dir("matrices")
    note(f"reading {place}")
    loaded = load_matrix(folder)
    settings = show_notices(use_cache(load_settings())) if online else None
    found = [
        *unfilled(place),
        *check_matrix(loaded, online=online, settings=settings, folder=folder),
    ]
    shown = [finding for finding in found if notes or as_json or finding.level != "note"]
    levels = {level: sum(f.level == level for f in found) for level in ("error", "warning", "note")}
    answer = {
        "matrix": loaded.digest,
        "findings": [{"level": f.level, "where": f.where, "text": f.text} for f in shown],
        **{f"{level}s": number for level, number in levels.items()},
    }

    def human() -> str:
        releases = sum(len(r) for r in loaded.releases.values())
        sizes = ((len(loaded.axes), "axis", "axes"), (releases, "release", ""), (len(loaded.rules), "rule", ""))
        counts = ", ".join(count_of(number, level) for level, number in levels.items())
        return "\n".join([*map(str, shown), f"{', '.join(count_of(*each) for each in sizes)}: {counts}"])

    emit(answer, as_json=as_json, human=human)
    return DataError.exit_code if levels["error"] else 0


@matrix.command()
@click.argument("folder", metavar="DIR", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--catalog",
    "catalog_file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Show the published images of this catalogue, with their pull commands: what `envbuild catalog --json` prints.",
)
@json_option
@progress_options
def page(folder: Path, catalog_file: Path | None, as_json: bool) -> None:
    """Write the matrix as a web page to DIR/index.html, one file that needs no network and no server.

    The page shows every combination of cuda, torch and te: whether it fits, the rule and source behind that, and what
    was proven; then stacks, images, proof by GPU, evidence, rules and releases. Its search field reads the flags of the
    command line, and its address holds them. Writing it takes some seconds.
    """
    from envbuild.curate.page import build_page
    from envbuild.curate.page_html import page_path, render_page, write_page
    from envbuild.curate.page_published import read_published
    from envbuild.evidence.pairs import trials_of
    from envbuild.evidence.refs import committed_evidence, evidence_refs
    from envbuild.matrix.load import load_matrix
    from envbuild.stacks.load import load_stack, stack_names
    from envbuild.verify.suite import suite_of

    published = read_published(catalog_file) if catalog_file is not None else ()
    loaded = load_matrix()
    path = page_path(folder)
    built = build_page(
        loaded,
        stacks=[load_stack(name) for name in stack_names()],
        records=committed_evidence(),
        evidence=evidence_refs(),
        trials=trials_of(loaded),
        published=published,
        suite=suite_of,
        note=note,
    )
    text = render_page(built)
    write_page(text, path)
    answer: dict[str, Any] = {
        "matrix": loaded.digest,
        "file": str(path),
        "bytes": len(text.encode()),
        "cells": len(built.cells),
        "refused": sum(n < 0 for grid in built.grids for row in grid.entries for n in row),
        "reasons": len(built.reasons),
    }
    emit(
        answer,
        as_json=as_json,
        human=lambda: (
            f"{path}\n  {count_of(answer['cells'], 'combination')} with a cell, {answer['refused']} without, {answer['bytes'] / 2**20:.1f} MiB"
        ),
    )


@matrix.command()
@click.argument("axes", nargs=-1)
@click.option("--write", is_flag=True, help="Append the proposals to the axis files; existing lines do not change.")
@_folder_option
@json_option
@progress_options
def update(axes: tuple[str, ...], write: bool, folder: Path | None, as_json: bool) -> None:
    """Propose new releases of AXES, read from package indexes and upstream tags.

    torch is looked up on PyPI and on PyTorch's index of each CUDA variant. Prints TOML with gaps for a person to fill in;
    writes nothing without --write. Exits with 8 when an upstream does not answer; its releases are then missing from the
    answer.
    """
    from envbuild.curate.proposals import append
    from envbuild.curate.update import propose
    from envbuild.errors import HostError
    from envbuild.matrix.load import load_matrix
    from envbuild.settings import load_settings

    proposals = propose(load_matrix(folder), axes, show_notices(use_cache(load_settings())))
    answer: dict[str, Any] = {
        "proposals": [
            {"axis": p.axis, "version": p.version, "toml": p.toml(), "to_fill_in": p.to_fill_in}
            for p in proposals.found
        ],
        "asked": proposals.asked,
        "unreachable": proposals.unreachable,
    }
    if write:
        changed = append(folder or data_dir("matrices"), proposals.found)
        answer["files"] = [str(path) for path in changed]

    def human() -> str:
        if not proposals.found:
            return "nothing new at " + ", ".join(proposals.asked)
        blocks = [f"# {p.axis}.toml\n{p.toml()}" for p in proposals.found]
        return "\n".join(blocks) + f"\n# {count_of(len(blocks), 'proposal')}" + (", appended" if write else "")

    emit(answer, as_json=as_json, human=human)
    if proposals.unreachable:
        raise HostError(
            "upstreams cannot be reached: their releases are missing from the answer, and their commits are left to fill in",
            where=", ".join(proposals.unreachable),
            hint="check the network and the proxy in your settings (docs/reference/settings.md), then run it again",
        )


@matrix.command()
@click.argument("name", required=False)
@click.option(
    "--write",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write all schemas to this folder as NAME.schema.json.",
)
@json_option
def schema(name: str | None, folder: Path | None, as_json: bool) -> None:
    """Print the JSON Schema of the data file NAME; list the names without one; write them all with --write."""
    from envbuild.curate.schema import as_text, schemas, write_schemas
    from envbuild.errors import UsageError

    published = schemas()
    if folder is not None:
        files = [str(path) for path in write_schemas(folder)]
        emit({"files": files}, as_json=as_json, human=lambda: "\n".join(files))
    elif name is None:
        kinds = {kind: str(each["title"]) for kind, each in published.items()}
        emit(kinds, as_json=as_json, human=lambda: "\n".join(f"{kind}: {title}" for kind, title in kinds.items()))
    elif name in published:
        emit(published[name], as_json=as_json, human=lambda: as_text(published[name]).rstrip("\n"))
    else:
        raise UsageError(
            f"there is no schema {name!r}", where="envbuild matrix schema", hint="one of: " + ", ".join(published)
        )
