"""`envbuild catalog`: what a registry holds, by its signed catalogue; publishing in it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.axes import axis_options
from envbuild.cli.cell_options import digest_option, parse_digest
from envbuild.cli.groups import Group
from envbuild.cli.output import doing, emit, json_option, note, progress_options, show_notices, use_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from envbuild.catalog.model import Entry


_here_option = click.option("--here", is_flag=True, help="List only what this machine's GPUs and driver can run.")


@click.group(cls=Group, invoke_without_command=True)
@axis_options
@_here_option
@json_option
@click.pass_context
def catalog(ctx: click.Context, /, here: bool, as_json: bool, **flags: Any) -> None:
    """List the prebuilt images of the configured registry, or publish one.

    The catalogue lies in the registry itself. It must be signed by the keys of the setting `trusted_keys`, young enough,
    and of no lower version than this machine has seen; otherwise every command that reads it exits with 4. Without a
    subcommand, this lists what fits the flags, as `catalog list` does.
    """
    from envbuild.errors import UsageError

    if ctx.invoked_subcommand is None:
        ctx.invoke(list_catalog, here=here, as_json=as_json, quiet=False, verbose=False, progress="auto", **flags)
        return
    if here or _asked(flags):
        raise UsageError(
            "flags that filter come before the name of a subcommand", where="catalog", hint="write them after the name"
        )
    if as_json:  # before the subcommand, it means that one's answer
        ctx.default_map = {ctx.invoked_subcommand: {"as_json": True}}


def _asked(flags: "Mapping[str, Any]") -> bool:
    """Return whether a flag filters."""
    return any(value is not None for name, value in flags.items() if name != "prefer")


@catalog.command("list")
@axis_options
@_here_option
@json_option
@progress_options
def list_catalog(here: bool, as_json: bool, **flags: Any) -> None:
    """List the prebuilt images that fit the flags, the best first; without flags, all of them.

    Exits with 4 when the catalogue is not to be trusted, with 8 when the registry does not answer.
    """
    from envbuild.catalog.choose import nearest_published, offers
    from envbuild.catalog.store import read_catalog
    from envbuild.cli.published import build_command, wanted_of
    from envbuild.evidence.refs import evidence_refs
    from envbuild.matrix.load import load_matrix
    from envbuild.pipeline.cataloged import describe_nearest
    from envbuild.settings import load_settings

    settings = show_notices(use_cache(load_settings()))
    doing("reading the catalogue")
    read = read_catalog(settings)
    entries: Sequence[Entry] = read.catalog.entries if read else ()
    asked = here or _asked(flags)
    near: Sequence[Any] = ()
    proofs: dict[str, str] = {}
    if asked:
        matrix = load_matrix()
        wanted = wanted_of(flags, (), matrix, here=here)
        found = offers(matrix, wanted, entries, evidence_refs())
        near = nearest_published(matrix, wanted, entries) if not found else ()
        proofs = {offer.entry.image: offer.proof for offer in found}
        entries = [offer.entry for offer in found]
    else:
        entries = sorted(entries, key=lambda entry: (entry.stack or "", entry.id))
    answer = {
        "registry": settings.registry,
        "version": read.catalog.version if read else None,
        "created": read.catalog.created.isoformat() if read else None,
        "digest": read.digest if read else None,
        "signers": list(read.signers) if read else [],
        "entries": [
            entry.model_dump(mode="json")
            | {"reference": f"{settings.registry}@{entry.image}", "proof": proofs.get(entry.image)}
            for entry in entries
        ],
        "nearest": [
            {"id": one.entry.id, "differs": {axis: list(pair) for axis, pair in one.differs.items()}} for one in near
        ],
    }

    def human() -> str:
        if read is None:
            return f"{settings.registry} has no catalogue; `envbuild catalog publish` begins one"
        head = (
            f"{settings.registry}: version {read.catalog.version} of {read.catalog.created:%Y-%m-%d}, "
            f"signed by {', '.join(read.signers)}"
        )
        if entries:
            return f"{head}\n\n{_table(entries)}"
        lines = f"\nnearest:{describe_nearest(near)}" if near else ""
        return f"{head}\n\nno published image fits{lines}\nbuild it: {build_command(flags, ())}"

    emit(answer, as_json=as_json, human=human)


def _table(entries: "Sequence[Entry]") -> str:
    from envbuild.cli.show import table

    rows: list[tuple[str, ...]] = [("cell", "flavor", "stack", "platform", "size", "signed by", "image")]
    rows += [
        (
            entry.id,
            entry.flavor,
            entry.stack or "-",
            entry.platform,
            f"{entry.size / 2**30:.2f} GiB",
            ", ".join(entry.signers),
            entry.image[:19] + "…",
        )
        for entry in entries
    ]
    return table(rows)


@catalog.command("publish")
@click.argument("image")
@digest_option
@click.option("--stack", "stack_file", metavar="FILE", help="Your own stack file, if the image was made from one.")
@click.option(
    "--even-if-failed", is_flag=True, help="Publish an image whose audit or tests failed on this machine, too."
)
@json_option
@progress_options
def publish_catalog(
    image: str, digest: str | None, stack_file: str | None, even_if_failed: bool, as_json: bool
) -> None:
    """Push IMAGE, which envbuild built, to the configured registry, and add it to the signed catalogue.

    The keys of the setting `signing_keys` sign the catalogue's next version, and, where this machine built the image, that
    it did. The image's SBOM, and its provenance where this machine built it, are attached to it in the registry and signed;
    its digest stays. A digest is published only if this machine built the image from its lock, if committed evidence names it, or if you name it with --digest.

    Exits with 4 when nobody confirms the image, when it is not what its lock makes, or when the catalogue that is there is
    not to be trusted, and with 6 or 7 when `envbuild image` found the image wrong on this machine; then nothing is published.
    """
    from envbuild.catalog.store import signing_policy
    from envbuild.cli.published import signers_of
    from envbuild.engine.built import Built
    from envbuild.engine.client import engine_client
    from envbuild.matrix.load import load_matrix
    from envbuild.pipeline.cataloged import documents_of, push_and_publish, require_publishable
    from envbuild.settings import load_settings
    from envbuild.verify.proofs import require_no_failure

    named = parse_digest(digest)
    settings = show_notices(use_cache(load_settings()))
    keys = signers_of(settings)
    signing_policy(settings, keys)  # before the minutes of reading and pushing
    client = engine_client(settings)
    doing("reading the image's lock")
    held = client.image(image)
    found = held.id  # from here on this image, whatever the tag names meanwhile
    if not even_if_failed:
        require_no_failure(settings, found, image)
    matrix = load_matrix()
    locked, built = require_publishable(client, matrix, found, named, stack_file)
    doing("reading the image's files")
    documents = documents_of(settings, matrix, locked, found, keys, stack_file=stack_file, note=note)
    local = Built(tag=image, digest=found, size=held.size)
    reference, read = push_and_publish(client, local, locked, keys, built=built, documents=documents, doing=doing)
    answer = {
        "reference": reference,
        "digest": found,
        "lock": locked.lock.digest,
        "catalog": read.digest,
        "version": read.catalog.version,
        "signers": list(read.signers),
        "documents": sorted(documents),
    }
    text = f"{reference}\n  with {' and '.join(documents)}\n  catalogue version {read.catalog.version}, signed by {', '.join(read.signers)}"
    emit(answer, as_json=as_json, human=lambda: text)


@catalog.command("refresh")
@json_option
@progress_options
def refresh_catalog(as_json: bool) -> None:
    """Sign the catalogue again with today's date, so that its age does not make it stale.

    Where the setting `trusted_documents` asks for them, each image must have its SBOM or its provenance. Otherwise this
    exits with 4, and nothing is signed.
    """
    from envbuild.cli.published import signers_of
    from envbuild.pipeline.cataloged import refresh_catalog as refresh
    from envbuild.settings import load_settings

    settings = show_notices(use_cache(load_settings()))
    keys = signers_of(settings)
    doing("signing the catalogue")
    read = refresh(settings, keys)
    answer = {"catalog": read.digest, "version": read.catalog.version, "signers": list(read.signers)}
    text = f"catalogue version {read.catalog.version}, signed by {', '.join(read.signers)}"
    emit(answer, as_json=as_json, human=lambda: text)


@catalog.command("keygen")
@click.argument("name")
@click.option(
    "--out",
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    default=Path(),
    show_default="this folder",
    help="Write the two files here.",
)
@json_option
def keygen(name: str, out: Path, as_json: bool) -> None:
    """Make a pair of keys: NAME.key, which signs, and NAME.pub, which others trust.

    The private key is encrypted with a password: the one in COSIGN_PASSWORD, or one that you type. An empty password
    leaves it as it is. `cosign verify --key NAME.pub` checks what NAME.key signed.
    """
    from envbuild.cli.published import key_password
    from envbuild.registry.keys import make_key_pair

    private, public = make_key_pair(out, name, key_password())
    note(f"keep {private.name} secret; {public.name} goes into the setting trusted_keys of those who pull")
    answer = {"name": name, "private": str(private), "public": str(public)}
    emit(answer, as_json=as_json, human=lambda: f"{private}\n{public}")
