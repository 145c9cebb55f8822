"""`envbuild ci`: the cells to verify, as the matrix of a workflow."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.axes import axis_options, request_from
from envbuild.cli.output import doing, emit, json_option, note, progress_options
from envbuild.util.text import count_of

if TYPE_CHECKING:
    import datetime as dt

    from envbuild.curate.coverage import Coverage, Verification
    from envbuild.curate.rotation import Verified
    from envbuild.lock.model import Lock
    from envbuild.matrix.load import Matrix
    from envbuild.settings import Settings

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
@click.option("--unverified", is_flag=True, help="Leave out what recorded runs of the whole suite verified.")
@click.option(
    "--stale-after",
    "age",
    metavar="AGE",
    help="With --unverified: a record older than this verifies nothing: 12h, 30d, 4w. [default: a record never ages]",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="With --unverified: count only runs on a CPU, or only those on GPUs. [default: both]",
)
@click.option(
    "--shard",
    metavar="K/N",
    help="List only share K of N. `today/N` is the share of the day, and each round of N days takes other cells.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Cover the pairs with other cells. [default: the newest; --shard: 0]"
)
@click.option(
    "--date", "date", metavar="YYYY-MM-DD", help="The day of `--shard today/N` and of `--stale-after`. [default: now]"
)
@click.option("--unpublished", is_flag=True, help="Leave out cells whose image the configured registry holds.")
@json_option
@progress_options
def ci(
    limit: int,
    unverified: bool,
    age: str | None,
    device: Any,
    shard: str | None,
    seed: int | None,
    date: str | None,
    unpublished: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """List the cells to verify: the documented ones, every stack, then a pairwise cover of cuda, torch and te.

    The flags narrow the list: `envbuild ci --cuda 13.0 --limit 20`. Every pair of minor releases that fits together is in
    at least one cell of the whole list, and in one cell of its N shares. --json prints the `strategy.matrix` of a GitHub
    workflow: {"include": [{"id", "args", "stack"}, …]}, where `args` are flags for `envbuild image`.

    `envbuild ci --unverified --stale-after 30d --shard today/10` lists another part each day. It depends on nothing but
    the matrix, the records, the seed and the date.
    """
    from envbuild.curate.coverage import cells_to_verify
    from envbuild.curate.rotation import read_share
    from envbuild.errors import UsageError
    from envbuild.evidence.refs import evidence_refs
    from envbuild.matrix.load import load_matrix
    from envbuild.stacks.load import load_stack, stack_names

    for option, given in (("--stale-after", age), ("--device", device)):
        if given is not None and not unverified:
            raise UsageError("this changes nothing without --unverified", where=option)
    if date is not None and age is None and not (shard or "").startswith("today/"):
        raise UsageError("this changes nothing without --shard today/N or --stale-after", where="--date")
    now = _moment(date)
    share = read_share(shard, seed=seed, day=now.date()) if shard is not None else None
    verified = _verified(now, age, device) if unverified else None
    matrix = load_matrix()
    stack = flags["stack"]
    found = cells_to_verify(
        matrix,
        {name: load_stack(name).axes for name in ([stack] if stack else stack_names())},
        request_from({**flags, "stack": None}),
        stack=stack,
        evidence=evidence_refs(),
        limit=limit,
        share=share,
        seed=seed,
        verified=verified,
        needless=_needless(matrix, verified, unpublished=unpublished),
    )

    def human() -> str:
        from envbuild.cli.show import table

        return table([(v.cell.id, v.args, v.why) for v in found.cells], indent="")

    # GitHub would read any other key next to `include` as an axis.
    answer = {"include": [{"id": v.cell.id, "args": v.args, "stack": v.stack or ""} for v in found.cells]}
    emit(answer, as_json=as_json, human=human)
    for one, why in found.left_out:
        note(f"left out: {one.cell.id}{f' of {one.stack}' if one.stack else ''}: {why}")
    note(_counted(found, f"share {share.number}/{share.of}, seed {share.seed}" if share else None))


def _counted(found: "Coverage", share: str | None) -> str:
    text = f"{count_of(len(found.cells), 'cell contains', 'cells contain')} {found.covered} of the {count_of(found.pairs, 'pair')} of cuda, torch and te"
    if share is not None:
        text += f"; {share}, has {found.share} of them"
    text += f"; {found.verified} are verified" if found.verified else ""
    return f"{text}; --limit leaves {found.left} out" if found.left else text


def _moment(date: str | None) -> "dt.datetime":
    """Return the end of the day `date` in UTC, or this moment."""
    import datetime as dt

    from envbuild.errors import UsageError
    from envbuild.util.names import shown

    if date is None:
        return dt.datetime.now(dt.UTC)
    try:
        day = dt.date.fromisoformat(date)
    except ValueError:
        raise UsageError(f"{shown(date, 40)!r} is no date", where="--date", hint="write it as 2026-11-30") from None
    return dt.datetime.combine(day, dt.time.max, tzinfo=dt.UTC)


def _verified(now: "dt.datetime", age: str | None, device: Any) -> "Verified":
    import datetime as dt

    from envbuild.cli.quantities import seconds_of
    from envbuild.curate.rotation import verified_by
    from envbuild.evidence.refs import committed_evidence
    from envbuild.verify.suite import suite_of

    since = now - dt.timedelta(seconds=seconds_of(age, "--stale-after")) if age is not None else None
    return verified_by(committed_evidence(), since=since, suite=suite_of, device=device)


def _needless(
    matrix: "Matrix", verified: "Verified | None", *, unpublished: bool
) -> "Callable[[Verification], str | None]":
    """Return what gives the reason why a cell needs no run, or None.

    Raises:
        DataError: the settings name no registry, and `unpublished` asks for one.

    """
    from envbuild.errors import no_registry
    from envbuild.pipeline.published import published_image
    from envbuild.settings import load_settings

    settings = load_settings()
    if unpublished and not settings.registry:
        raise no_registry("--unpublished", "to ask")

    def reason(one: "Verification") -> str | None:
        # The image of a stack is another one than that of its cell alone: they differ in the lock alone.
        if verified is None and not unpublished:
            return None
        lock = _lock_of(settings, matrix, one) if unpublished or one.stack else None
        if verified is not None and (lock is not None or not one.stack):
            digest = lock.digest if lock is not None and one.stack else None
            if verified.cell(one.cell.id, digest):
                return "verified"
        if not unpublished or lock is None:
            return None
        doing("asking the registry")
        image = published_image(settings, lock)
        return None if image is None else f"the registry has its image: {image[0]}@{image[1]}"

    return reason


def _lock_of(settings: "Settings", matrix: "Matrix", one: "Verification") -> "Lock | None":
    """Return the complete lock of a cell as `envbuild image` would find it, or None."""
    from envbuild.errors import UsageError
    from envbuild.lock.inputs import inputs_of
    from envbuild.pipeline.published import complete_lock
    from envbuild.stacks.load import load_stack

    flavor: Any = one.cell.versions.get("flavor", "runtime")
    try:
        inputs = inputs_of(matrix, one.cell, stack=load_stack(one.stack) if one.stack else None, flavor=flavor)
    except UsageError:  # it cannot be locked: its run will say why
        return None
    return complete_lock(settings, inputs)
