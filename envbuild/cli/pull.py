"""`envbuild pull`: the prebuilt image of a cell's lock."""

from pathlib import Path
from typing import Any

import click

from envbuild.cli.cell_options import asked_from, cell_options, digest_option, parse_digest
from envbuild.cli.output import doing, emit, json_option, note, progress_options, use_cache


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

    The image must contain the cell's lock. It is verified when its digest is known from somewhere other than the
    registry: --digest, an earlier build of the lock on this machine, or committed evidence. An image with another digest
    is then refused. When no digest is known, the answer shows that the image is not verified.

    Exits with 4 when the cell has no lock, when the registry has no image of it or when the image is not the expected
    one; with 8 when the registry does not answer.
    """
    from envbuild.engine.client import engine_client
    from envbuild.errors import DataError, LockError
    from envbuild.lock.files import read_lock
    from envbuild.pipeline.locked import lock_for
    from envbuild.pipeline.platform import platform_of
    from envbuild.pipeline.prebuilt import expected_of, pull_prebuilt, registry_reference
    from envbuild.plan.plan import plan_of

    named = parse_digest(digest)
    doing("choosing versions")
    asked = asked_from(flags, lock_file=lock_file, sources=sources)
    if lock_file is not None:
        locked = read_lock(lock_file)
    else:
        locked, _ = lock_for(asked.settings, asked.matrix, asked.inputs, locked_only=True, note=note)
    plan = plan_of(asked.matrix, locked, asked.stack)
    name = tag or plan.tag
    reference = registry_reference(asked.settings, locked.lock)
    if reference is None:
        raise DataError(
            "no registry is set to pull from",
            where="pull",
            hint="set `registry` in the settings, such as ghcr.io/acme/envbuild",
        )
    expected = expected_of(asked.settings, plan, named)
    client = engine_client(use_cache(asked.settings))
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
    answer = {
        "tag": built.tag,
        "digest": built.digest,
        "size_bytes": built.size,
        "reference": reference,
        "lock": locked.lock.digest,
        "verified": pulled.verified.as_json(),
    }
    emit(
        answer,
        as_json=as_json,
        human=lambda: f"{built.tag}\n  from    {reference}\n  digest  {built.digest}\n  trust   {pulled.verified.text}",
    )
