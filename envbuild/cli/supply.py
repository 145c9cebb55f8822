"""`envbuild sbom` and `envbuild provenance`: what an image is made of and who built it, in the formats that others read."""

from pathlib import Path
from typing import Any

import click

from envbuild.cli.output import doing, emit, json_option, note, progress_options, show_notices, use_cache
from envbuild.util.text import count_of

_output_option = click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this file. [default: print it]",
)
_stack_option = click.option(
    "--stack", "stack_file", metavar="FILE", help="Your own stack file, if the image was made from one."
)


@click.command()
@click.argument("subject", metavar="TAG|LOCK")
@_output_option
@_stack_option
@json_option
@progress_options
def sbom(subject: str, output: Path | None, stack_file: str | None, as_json: bool) -> None:
    """Write the SBOM of an image of the engine, or of a lock, in CycloneDX 1.6.

    Each locked input is a component: Debian packages, wheels, compiled wheels, source trees, files. In an image's SBOM each
    has its files. Files that belong to no locked input are components of type `file`, and are counted on stderr. Nothing of
    the image runs.

    LOCK is a lock.json, or a folder with one.
    """
    from envbuild.settings import load_settings

    found = _lock_at(subject)
    if found is not None:
        from envbuild.lock.files import read_lock
        from envbuild.supply.inventory import inventory
        from envbuild.supply.sbom import sbom as write

        lock = read_lock(found).lock
        inputs = inventory(lock)
        body = write(lock, inputs)
        answer: dict[str, Any] = {"image": None, "lock": lock.digest, "inputs": len(inputs), "files": None}
        unowned: tuple[str, ...] = ()
    else:
        settings = show_notices(use_cache(load_settings()))
        looked = _looked(settings, subject, stack_file)
        body, unowned = looked.sbom(), looked.owned.unowned
        answer = {
            "image": looked.image.digest,
            "lock": looked.plan.lock.digest,
            "inputs": len(looked.inputs),
            "files": looked.owned.count,
        }
    if unowned:
        first = ", ".join(unowned[:5]) + (" …" if len(unowned) > 5 else "")
        note(f"note: {count_of(len(unowned), 'file belongs', 'files belong')} to no locked input: {first}")
    _write(answer | {"unowned": list(unowned)}, body, output, as_json=as_json)


@click.command()
@click.argument("tag")
@_output_option
@_stack_option
@json_option
@progress_options
def provenance(tag: str, output: Path | None, stack_file: str | None, as_json: bool) -> None:
    """Write the provenance of an image that this machine built: an in-toto statement with SLSA's provenance, version 1.

    It names the builder by the first key of the setting `signing_keys`, or by the job's identity in CI, the lock and its inputs by hash, and the image by
    digest. It is not signed here: `catalog publish` signs it and attaches it to the image.

    Exits with 4 when this machine did not build the image, or took finished steps of others for it.
    """
    from envbuild.cli.published import signers_of
    from envbuild.errors import LockError
    from envbuild.settings import load_settings
    from envbuild.supply.look import own_provenance

    settings = show_notices(use_cache(load_settings()))
    signer = signers_of(settings)[0].verifier
    looked = _looked(settings, tag, stack_file)
    body = own_provenance(settings, looked, signer)
    if body is None:
        raise LockError(
            "this machine did not build this image, or not every step of it",
            where=f"{tag} ({looked.image.digest})",
            hint="who built it writes its provenance; `envbuild reproduce` builds it again here",
        )
    answer = {"image": looked.image.digest, "lock": looked.plan.lock.digest, "builder": signer.name}
    _write(answer, body, output, as_json=as_json)


def _lock_at(subject: str) -> Path | None:
    """Return the lock that an argument names, or None where it names an image."""
    path = Path(subject).expanduser()
    if path.is_dir():
        return path
    return path if path.suffix == ".json" else None


def _looked(settings: Any, tag: str, stack_file: str | None) -> Any:
    from envbuild.engine.client import engine_client
    from envbuild.engine.reproduce import carried_lock
    from envbuild.matrix.load import load_matrix
    from envbuild.plan.plan import plan_of
    from envbuild.stacks.load import stack_of_lock
    from envbuild.supply.look import look

    client = engine_client(settings)
    doing("reading the image's lock")
    digest = client.image(tag).id  # from here on this image, whatever the tag names meanwhile
    locked = carried_lock(client, digest)
    stack = stack_of_lock(locked.lock.stack, stack_file) if locked.lock.stack else None
    return look(settings, digest, plan_of(load_matrix(), locked, stack), note)


def _write(answer: dict[str, Any], body: bytes, output: Path | None, *, as_json: bool) -> None:
    """Write a document to its file, or show it."""
    import json

    from envbuild.errors import UsageError

    if output is not None:
        try:
            output.write_bytes(body)
        except OSError as error:
            raise UsageError(f"the file cannot be written: {error.strerror}", where=str(output)) from None
        emit(answer | {"output": str(output), "bytes": len(body)}, as_json=as_json, human=lambda: str(output))
        return
    emit(
        answer | {"document": json.loads(body)} if as_json else {},
        as_json=as_json,
        human=body.decode().rstrip,
        exact=True,
    )
