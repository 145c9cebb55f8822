"""`envbuild image`: the image of a cell, proven as far as this host can."""

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.axes import keyword
from envbuild.cli.cell_options import ResolvedRequest, asked_from, cell_options, digest_option, parse_digest
from envbuild.cli.output import doing, emit, json_option, note, progress_options, show_notices, use_cache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from envbuild.engine.client import EngineClient
    from envbuild.errors import EnvbuildError
    from envbuild.lock.files import Locked
    from envbuild.pipeline.image import ImageRequest, Made
    from envbuild.plan.plan import Plan


@click.command()
@cell_options
@click.option("--tag", metavar="NAME:TAG", help="Name of the image. [default: envbuild:<cell id>]")
@click.option("--locked", is_flag=True, help="Use the cell's lock as it is; never make or renew one.")
@click.option(
    "--no-pull", is_flag=True, help="Do not look for a prebuilt image or compiled wheels in the configured registry."
)
@digest_option
@click.option("--no-cache", is_flag=True, help="Run every build step again.")
@click.option("--no-smoke", is_flag=True, help="Stop after the audit; run no smoke tests.")
@click.option(
    "--push",
    "do_push",
    is_flag=True,
    help="Push the image to the configured registry, and the wheels that were compiled here, signed.",
)
@click.option("--builder", metavar="NAME", help="Build with this buildx builder: local, remote or kubernetes.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Run this many compile jobs at a time. [default: from cores, memory and what a job needs]",
)
@click.option(
    "--build-context",
    "contexts",
    multiple=True,
    metavar="STAGE=SOURCE",
    help="Replace an external input, like `docker buildx build --build-context`.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Write the image, too: FILE.oci.tar (an OCI archive), FILE.sif, or a new directory (an Apptainer sandbox).",
)
@click.option(
    "--matrix",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="Make every cell whose id matches, such as 'cu13*-te2.1[0-2]*'; repeat it for more.",
)
@click.option("--skip", multiple=True, metavar="PATTERN", help="With --matrix, leave out the cells whose id matches.")
@click.option("--dry-run", is_flag=True, help="With --matrix, list the cells and make none.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, file_okay=False),
    help="Add an evidence record of the smoke tests to this folder, however they end.",
)
@json_option
@progress_options
def image(
    tag: str | None,
    locked: bool,
    no_pull: bool,
    digest: str | None,
    no_cache: bool,
    no_smoke: bool,
    do_push: bool,
    builder: str | None,
    jobs: int | None,
    contexts: tuple[str, ...],
    output: Path | None,
    record: Path | None,
    patterns: tuple[str, ...],
    skip: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    lock_file: Path | None,
    sources: tuple[str, ...],
    **flags: Any,
) -> None:
    """Build the image of a cell, or pull it if it is prebuilt; audit it and run the smoke tests that this host can run.

    Builds with the local Docker engine or a buildx builder. With `trusted_keys` set, the registry's signed catalogue is
    asked first for a published image that fits the flags; without --lock, its best one is taken with its lock. A pulled
    image is verified only when its digest is known from somewhere other than the registry: --digest, an earlier build
    here, the signed catalogue, or committed evidence.

    --matrix makes many images, one after the other: the best cell of every combination of cuda, torch and te whose id
    matches a pattern, within the other flags. It goes on past a failure, prints a table of all cells, and exits with
    the code of the first cell that failed.

    Exits with 3 when no cell fits, 4 when an input or a prebuilt image is not the expected one, 5 when a stage fails,
    6 when the audit finds a defect, 7 when a smoke test fails, 8 when something is missing on this host or another host
    does not answer.
    """
    from envbuild.cli.image_report import for_people
    from envbuild.errors import UsageError
    from envbuild.pipeline.output import check_output
    from envbuild.settings.values import BuilderName
    from envbuild.util.names import checked, shown

    substitutes = _contexts(contexts)
    if builder is not None:
        try:
            checked(BuilderName, builder)
        except ValueError as error:
            raise UsageError(f"{shown(builder)!r} names no builder: {error}", where="--builder") from None
    if output is not None and not patterns:
        check_output(output)
    asked = Asked(
        tag=tag,
        locked_only=locked,
        pull=not no_pull,
        cache=not no_cache,
        smoke=not no_smoke,
        push=do_push,
        substitutes=substitutes,
        digest=parse_digest(digest),
        from_catalog=not (no_pull or no_cache or substitutes or patterns),
        output=output,
        record=record,
        changed={k: v for k, v in (("builder", builder), ("jobs", jobs)) if v is not None},
    )
    if record is not None and (no_smoke or substitutes):
        raise UsageError(
            "no smoke tests run that could be recorded"
            if no_smoke
            else "an image with a replaced input does not match its lock, and a record is of a lock's image",
            where="--record",
            hint="leave --record out; `envbuild smoke TAG --record FOLDER` records a run, and what was replaced",
        )
    if substitutes and do_push:
        raise UsageError(
            "an image with a replaced input does not match its lock, and the registry stores images by their lock",
            where="--push with --build-context",
            hint="leave --push out; docker tag and docker push publish it under another name",
        )
    given = Given(flags=flags, lock_file=lock_file, sources=sources)
    if patterns:
        from envbuild.cli.image_many import make_many

        make_many(asked, given, patterns, skip, dry_run=dry_run, as_json=as_json)
        return
    if skip or dry_run:
        raise UsageError("there are no cells to choose from", where="--skip or --dry-run", hint="add --matrix PATTERN")
    report, failure = make_one(asked, given)
    emit(report, as_json=as_json, human=lambda: for_people(report))
    if failure is not None:
        raise failure


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of an image besides its cell; see the command's options."""

    tag: str | None
    locked_only: bool
    pull: bool
    cache: bool
    smoke: bool
    push: bool
    substitutes: dict[str, str]
    digest: str | None
    from_catalog: bool
    """Whether the best published image for the flags will do, instead of the cell that `resolve` chooses."""
    output: Path | None
    record: Path | None
    changed: dict[str, Any]
    """Settings that options replace."""


def make_one(options: Asked, given: "Given", *, notices: bool = True) -> tuple[dict[str, Any], "EnvbuildError | None"]:
    """Make and prove the image of a cell; return its report, and what is wrong with the image.

    Args:
        options: what is asked besides the cell.
        given: the flags that name the cell.
        notices: whether what the user should know of the settings is printed.

    Raises:
        EnvbuildError: there is no image; see the command's help.

    """
    from envbuild.cli.building import TestCount
    from envbuild.cli.image_report import report_on
    from envbuild.cli.published import published_to_take
    from envbuild.engine.client import engine_client
    from envbuild.engine.leftovers import clear
    from envbuild.pipeline.image import ImageRequest
    from envbuild.pipeline.output import write_image
    from envbuild.pipeline.platform import require_platform
    from envbuild.pipeline.prebuilt import push_image, require_registry
    from envbuild.pipeline.prove import prove
    from envbuild.pipeline.wheel_sharing import push_wheels, wheel_signers

    started = time.monotonic()
    substitutes, output = options.substitutes, options.output
    published = None
    if options.from_catalog and given.lock_file is None:
        published = published_to_take(given.flags, given.sources)
    if published is not None:
        given = replace(given, lock_file=published.folder)
    doing("choosing versions")
    asked = given.asked()
    settings = use_cache(asked.settings.model_copy(update=options.changed))
    if notices:
        show_notices(settings)
    note(f"cell {asked.solution.cell.id}")
    gpu = asked.solution.cell.versions.get("gpu", "none")
    if gpu != "none" and asked.stack is None and not given.names("gpu"):
        note(f"the image is for {gpu}; --gpu names another GPU, such as --gpu a100")
    if options.push:  # before hours of work
        require_registry(settings)
    keys = wheel_signers(settings) if options.push else ()
    doing("asking the engine")
    client = engine_client(settings)
    require_platform(client, asked.solution.cell)
    clear(settings)
    request = ImageRequest(
        matrix=asked.matrix,
        inputs=asked.inputs,
        tag=options.tag,
        locked_only=options.locked_only,
        pull=options.pull,
        push=options.push,
        cache=options.cache,
        substitutes=substitutes,
        digest=options.digest,
        catalog=published.catalog if published is not None else {},
        layers=published.offer.entry.layers if published is not None else (),
    )
    doing("finding the lock and the sources")
    asked, found, unreached = _with_lock(request, given, asked, client)
    doing("looking for the image")
    made = _made(replace(request, inputs=asked.inputs), client, found)
    report = report_on(asked, made, unreached)
    proof = prove(
        client,
        made,
        proof=asked.stack.proof if asked.stack else (),
        with_smoke=options.smoke,
        note=note,
        progress=TestCount(),
        record=options.record,
    )
    report |= proof.as_json()
    if options.record is not None:
        report["evidence"] = str(proof.evidence) if proof.evidence else None
    report["replaced"] = substitutes
    if made.verified.by == "steps":
        report["not_proven"].append(
            f"that the builder ran every step itself: finished ones may come from {made.verified.record}, and nobody signs them"
        )
    report["not_proven"] += [
        f"the image of this lock: {stage} was replaced by {source}" for stage, source in substitutes.items()
    ]
    if made.verified.by == "nobody":
        report["not_proven"].append(
            "that the image was made from its lock: nobody but the registry confirmed its digest, and what the image reports in "
            "an audit or a test is its own claim (--no-pull builds it here, --digest names the one you expect)"
        )
    pushing = options.push and proof.failure is None
    if pushing:
        note("pushing the image")
    report["wheels_pushed"] = push_wheels(settings, made.plan, keys, note=note) if pushing else []
    report["pushed"] = push_image(client, made.locked.lock, made.built) if pushing else None
    if output is not None and proof.failure is None:
        note(f"writing {output}")
        write_image(client, made.built.digest, output)
    report["output"] = str(output) if output is not None and proof.failure is None else None
    report["seconds"] = round(time.monotonic() - started, 1)
    return report, proof.failure


def _made(request: "ImageRequest", client: "EngineClient", found: "tuple[Locked, Path]") -> "Made":
    """Have the image, and show how it goes."""
    from envbuild.cli.building import shown_build
    from envbuild.pipeline.image import make_image

    shown = shown_build(client.settings)

    def show(plan: "Plan") -> Any:
        shown.planned(plan)
        return shown.change, note, shown.details

    return make_image(request, client, found, show)


def _contexts(texts: tuple[str, ...]) -> dict[str, str]:
    from envbuild.errors import UsageError

    found = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals or not name or not source:
            raise UsageError(
                f"{text!r} replaces nothing",
                where="--build-context",
                hint="write STAGE=SOURCE, as in base=docker-image://debian:12",
            )
        found[name] = source
    return found


@dataclass(frozen=True, kw_only=True)
class Given:
    """The flags that name a cell, as they were given."""

    flags: dict[str, Any]
    lock_file: Path | None
    sources: tuple[str, ...]

    def asked(self) -> ResolvedRequest:
        """Resolve them."""
        return asked_from(self.flags, lock_file=self.lock_file, sources=self.sources)

    def without(self, axes: "Iterable[str]") -> "Given":
        """Return the same flags with these components ruled out."""
        return replace(self, flags=self.flags | {keyword(axis): "none" for axis in axes})

    def names(self, axis: str) -> bool:
        """Whether a flag, or the stack, asks for a component."""
        if self.flags.get(keyword(axis)):
            return True
        if self.flags.get("stack") is not None:
            from envbuild.stacks.load import load_stack

            return axis in load_stack(self.flags["stack"]).axes
        return False


def _with_lock(
    request: "ImageRequest", given: Given, asked: ResolvedRequest, client: "EngineClient"
) -> tuple[ResolvedRequest, "tuple[Locked, Path]", dict[str, str]]:
    """Return the request's lock, and what is left out of it: component -> the host that holds its source.

    Left out is a component that no flag or stack names and whose source cannot be reached. Whether the builder is new enough
    is asked before what takes minutes: making a lock, and fetching the sources of a build.
    """
    from envbuild.cli.image_report import why_unreached
    from envbuild.engine.builders import require_able
    from envbuild.lock.files import read_lock
    from envbuild.lock.find import check_fits, require_complete
    from envbuild.pipeline.image import find_present
    from envbuild.pipeline.locked import UnreachableError, lock_for, require_sources
    from envbuild.plan.plan import plan_of

    settings, replaced = client.settings, request.substitutes

    def require_builder() -> None:
        require_able(settings, client.builder())

    lock_of = partial(lock_for, settings, note=note, replaced=replaced, before_making=require_builder)
    if given.lock_file is not None:
        named = read_lock(given.lock_file)
        check_fits(named.lock, asked.inputs, str(given.lock_file))
        require_complete(named.lock, str(given.lock_file), replaced)
        return asked, (named, given.lock_file), {}
    try:
        found = lock_of(asked.matrix, asked.inputs, locked_only=request.locked_only)
        plan = plan_of(asked.matrix, found[0], asked.stack)
        if find_present(client, plan, request.tag or plan.tag, pull=request.pull, expected=None) is None:
            if not (request.pull and settings.registry):
                require_builder()
            require_sources(settings, plan, replaced=replaced, note=note, pull=request.pull and request.cache)
    except UnreachableError as error:
        unreachable = {m.component: m.host for m in error.missing}
        droppable = all(
            axis in asked.matrix.axes and asked.matrix.axes[axis].use == "default" and not given.names(axis)
            for axis in unreachable
        )
        if request.locked_only or not droppable:
            raise
    else:
        return asked, found, {}
    for name, host in unreachable.items():
        note(f"{name} is left out: {why_unreached(host)}; `--{name} auto` requires it")
    asked = given.without(unreachable).asked()
    note(f"cell {asked.solution.cell.id}")
    found = lock_of(asked.matrix, asked.inputs, locked_only=False)
    return asked, found, unreachable
