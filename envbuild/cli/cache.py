"""`envbuild cache`: what the cache holds, and removing it."""

from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.groups import Group
from envbuild.cli.output import doing, emit, json_option, progress_options, show_notices
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from envbuild.engine.cache import Contents, Pruned


def _complete_kind(_context: click.Context, _argument: click.Parameter, begun: str) -> "list[CompletionItem]":
    from click.shell_completion import CompletionItem

    from envbuild.engine.cache import KINDS

    return [CompletionItem(kind.name, help=kind.about) for kind in KINDS if kind.name.startswith(begun)]


@click.group(cls=Group, invoke_without_command=True)
@json_option
@click.pass_context
def cache(ctx: click.Context, as_json: bool) -> None:
    """List what the cache holds, with sizes, or remove it.

    The cache is the folder of the setting `cache_dir`. Without a subcommand, this lists it.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_cache, as_json=as_json, quiet=False, verbose=False, progress="auto")
    elif as_json:  # before the subcommand, it means that one's answer
        ctx.default_map = {ctx.invoked_subcommand: {"as_json": True}}


@cache.command("list")
@json_option
@progress_options
def list_cache(as_json: bool) -> None:
    """List what the cache holds: kinds, sizes, and what is in use."""
    from envbuild.engine.cache import KINDS, contents_of
    from envbuild.engine.cache import as_json as of_entry
    from envbuild.settings import load_settings

    doing("adding up sizes")
    found = contents_of(show_notices(load_settings()).cache_dir)
    kinds = []
    for kind in KINDS:
        mine = [entry for entry in found.entries if entry.kind == kind.name]
        kinds.append(
            {
                "kind": kind.name,
                "about": kind.about,
                "entries": len(mine),
                "bytes": sum(entry.size for entry in mine),
                "in_use": sum(bool(entry.in_use) for entry in mine),
                "pruned_by_default": kind.made_again,
            }
        )
    answer = {
        "cache": str(found.cache),
        "bytes": found.size,
        "kinds": kinds,
        "other": found.other,
        "entries": [of_entry(entry) for entry in found.entries],
    }
    emit(answer, as_json=as_json, human=lambda: _listed(found, kinds))


@cache.command("prune")
@click.argument("kinds", nargs=-1, metavar="[KIND]...", shell_complete=_complete_kind)
@click.option("--all", "every", is_flag=True, help="Remove every kind: compiled wheels, locks and proofs, too.")
@click.option(
    "--older-than", "age", metavar="AGE", help="Remove only what was last written longer ago than this: 12h, 30d, 4w."
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed, and remove nothing.")
@json_option
@progress_options
def prune_cache(kinds: tuple[str, ...], every: bool, age: str | None, dry_run: bool, as_json: bool) -> None:
    """Remove what the cache holds.

    Without KIND, this removes what the next run downloads or makes again by itself. Compiled wheels, locks made here,
    proofs and notes of images go only when you name their kind or give --all.

    Keeps what a run uses, and every file that envbuild did not put there; follows no link.
    """
    from envbuild.cli.quantities import seconds_of
    from envbuild.engine.cache import KINDS, prune
    from envbuild.engine.cache import as_json as of_entry
    from envbuild.errors import UsageError
    from envbuild.settings import load_settings
    from envbuild.util.names import shown

    names = [kind.name for kind in KINDS]
    for name in kinds:
        if name not in names:
            raise UsageError(
                f"there is no kind {shown(name)!r}", where="cache prune", hint=f"kinds: {', '.join(names)}"
            )
    if every and kinds:
        raise UsageError("--all and a KIND contradict each other", where="cache prune", hint="give one of them")
    chosen = kinds or [kind.name for kind in KINDS if every or kind.made_again]
    older_s = seconds_of(age, "--older-than") if age is not None else 0.0
    folder = show_notices(load_settings()).cache_dir
    doing("removing files")
    done = prune(folder, chosen, older_s=older_s, dry_run=dry_run)
    answer = {
        "cache": str(folder),
        "dry_run": dry_run,
        "bytes": done.size,
        "removed": [of_entry(entry) for entry in done.removed],
        "stayed": [{**of_entry(entry), "why": why} for entry, why in done.stayed],
    }
    emit(answer, as_json=as_json, human=lambda: _pruned(done, dry_run=dry_run))


def _listed(found: "Contents", kinds: list[dict[str, Any]]) -> str:
    from envbuild.cli.quantities import size_text
    from envbuild.cli.show import table

    rows: list[tuple[str, ...]] = [("kind", "size", "entries", "in use", "what it is")]
    rows += [
        (k["kind"], size_text(k["bytes"]), str(k["entries"]), str(k["in_use"] or "-"), k["about"])
        for k in kinds
        if k["entries"]
    ]
    lines = [f"{found.cache}: {size_text(found.size)}"]
    lines += ["", table(rows, indent="  ")] if len(rows) > 1 else ["it is empty"]
    if found.other:
        lines += ["", "not envbuild's, so it stays", *(f"  {name}" for name in found.other[:20])]
        lines += [f"  and {len(found.other) - 20} more"] if len(found.other) > 20 else []
    kept = [k["kind"] for k in kinds if k["entries"] and not k["pruned_by_default"]]
    if len(rows) > 1:
        lines += ["", "`envbuild cache prune` removes it" + (f", but for {', '.join(kept)}" if kept else "")]
    return "\n".join(lines)


def _pruned(done: "Pruned", *, dry_run: bool) -> str:
    from envbuild.cli.quantities import size_text
    from envbuild.cli.show import table

    counts: dict[str, list[int]] = {}
    for entry in done.removed:
        counts.setdefault(entry.kind, []).append(entry.size)
    verb = "would remove" if dry_run else "removed"
    rows: list[tuple[str, ...]] = [
        (kind, size_text(sum(sizes)), _entries(len(sizes))) for kind, sizes in counts.items()
    ]
    lines = [f"{verb} {_entries(len(done.removed))}, {size_text(done.size)}", *([table(rows)] if rows else [])]
    reasons: dict[str, int] = {}
    for _, why in done.stayed:
        reasons[why] = reasons.get(why, 0) + 1
    lines += [f"kept {_entries(count)}: {why}" for why, count in reasons.items()]
    return "\n".join(lines)


def _entries(count: int) -> str:
    return count_of(count, "entry", "entries")
