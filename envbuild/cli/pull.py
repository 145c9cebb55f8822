"""`envbuild pull`: the prebuilt image of a cell, by flags from the registry's catalogue, or of a lock."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from envbuild.cli.cell_options import asked_from, cell_options, digest_option, parse_digest
from envbuild.cli.output import doing, emit, json_option, note, progress_options, show_notices, use_cache


@click.command()
@cell_options
@click.option("--tag", metavar="NAME:TAG", help="Name of the image. [default: envbuild:<cell id>]")
@digest_option
@json_option
@progress_options
def pull(
    tag: str | None,
    digest: str | None,
    as_json: bool,
    lock_file: Path | None,
    sources: tuple[str, ...],
    **flags: Any,
) -> None:
    """Pull the prebuilt image of a cell from the configured registry, and show who confirmed its digest.

    With `trusted_keys` set, the registry's signed catalogue is asked for the best image that fits the flags, this machine's
    GPUs and its driver; the lock and the digest come from there, and nothing local is needed. With --lock, or without
    `trusted_keys`, it is the image of that lock, or of the cell's own.

    The image must contain the lock. It is verified when its digest is known from somewhere other than the registry:
    --digest, an earlier build of the lock on this machine, the signed catalogue, or committed evidence. An image with
    another digest is then refused, unless only the compression of its layers differs. A build or evidence by another
    release's recipe confirms only its own image. When no digest is known, the answer shows that the image is not verified.

    Exits with 4 when no published image fits, when the cell has no lock, when the registry has no image of it, or when the
    catalogue, the lock or the image is not the expected one; with 8 when the registry does not answer.
    """
    from envbuild.cli.image_report import left_out_lines, left_out_of
    from envbuild.cli.published import build_command, published_for, uses_catalog
    from envbuild.engine.podman import pulling_client
    from envbuild.errors import LockError, no_registry
    from envbuild.lock.files import read_lock
    from envbuild.pipeline.cataloged import describe_nearest
    from envbuild.pipeline.locked import lock_for
    from envbuild.pipeline.platform import platform_of
    from envbuild.pipeline.prebuilt import expected_of, image_reference, pull_prebuilt
    from envbuild.plan.plan import plan_of
    from envbuild.settings import load_settings

    named = parse_digest(digest)
    settings = load_settings()
    if not settings.registry:  # before anything is chosen or read
        raise no_registry("pull", "to pull from")
    catalog: Mapping[str, str] = {}
    layers: tuple[str, ...] = ()
    if lock_file is None and uses_catalog(settings):
        show_notices(use_cache(settings))
        published = published_for(flags, sources, settings)
        if isinstance(published, tuple):
            near = describe_nearest(published)
            raise LockError(
                "no published image fits the flags" + (f"; the nearest are{near}" if near else ""),
                where=settings.registry,
                hint=f"change the flags, or build it: {build_command(flags, sources)}",
            )
        lock_file, catalog, layers = published.folder, published.catalog, published.offer.entry.layers
    doing("choosing versions")
    asked = asked_from(flags, lock_file=lock_file, sources=sources)
    if lock_file is not None:
        locked = read_lock(lock_file)
    else:
        locked, _ = lock_for(asked.settings, asked.matrix, asked.inputs, locked_only=True, note=note)
    plan = plan_of(asked.matrix, locked, asked.stack)
    name = tag or plan.tag
    reference = image_reference(settings.registry, locked.lock)
    expected = expected_of(asked.settings, plan, named, catalog, layers)
    client = pulling_client(use_cache(asked.settings))
    here = client.machine().platform
    if here and here != platform_of(plan.cell):
        note(
            f"note: the image is for {platform_of(plan.cell)}, and this engine runs {here}: it can be stored here, but not run"
        )
    note(f"pulling {reference}")
    found = pull_prebuilt(client, plan, name, expected=expected)
    if found is None:
        raise LockError(
            "the registry has no image of this lock",
            where=reference,
            hint="build it: envbuild image, with --push to put it there",
        )
    built, pulled = found
    left_out = left_out_of(asked)
    answer = {
        "tag": built.tag,
        "digest": built.digest,
        "size_bytes": built.size,
        "reference": reference,
        "lock": locked.lock.digest,
        "verified": pulled.verified.as_json(),
        "left_out": left_out,
    }
    lines = [built.tag, f"  from    {reference}", f"  digest  {built.digest}", f"  trust   {pulled.verified.text}"]
    lines += left_out_lines(left_out)
    emit(answer, as_json=as_json, human=lambda: "\n".join(lines))
