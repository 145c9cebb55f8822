"""`envbuild audit` and `envbuild reproduce`: compare an image with its lock, and with its own rebuild."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from envbuild.cli.output import emit, json_option, note, progress_options, use_cache

if TYPE_CHECKING:
    from envbuild.verify.binaries.local import LocalAudit
    from envbuild.verify.checks import Audit


@click.command()
@click.argument("tag", metavar="IMAGE|WHEEL|FOLDER")
@click.option(
    "--deep",
    is_flag=True,
    help="Download locked wheels that this machine has not seen yet, and compare the installed files with them.",
)
@click.option(
    "--gpu",
    metavar="GPU",
    help="Check that a wheel or a folder has code for this GPU, such as h100 or sm_90, or for each of a100,h100.",
)
@json_option
@progress_options
def audit(tag: str, deep: bool, gpu: str | None, as_json: bool) -> None:
    """Check an image, a wheel or a folder without a GPU; nothing in a wheel or a folder is run.

    In an image: versions, files, imports, extensions, no compiler, one CUDA, no leftovers of the build. Every installed
    file is compared with its RECORD, and the RECORD with the locked wheel's where that is known here.

    An image is a tag of the engine, or the path of an OCI archive, an OCI layout, a .sif or a sandbox, which Apptainer runs.

    In all three, the binaries: missing libraries and symbols, versions of libc, code for the GPU, the C++ ABI, copies of
    CUDA's libraries, search paths of the build machine. Write a folder with a slash (./lib).

    Exits with 6 when it finds a defect.
    """
    from envbuild.cli.show import table
    from envbuild.engine.place import kind_of
    from envbuild.errors import UsageError
    from envbuild.settings import load_settings
    from envbuild.verify.binaries.local import audit_local, local_path

    found: Audit | LocalAudit
    if (path := local_path(tag)) is not None and kind_of(path) is None:
        if deep:
            raise UsageError("a wheel or a folder has no lock", where="--deep", hint="leave the flag out")
        found = audit_local(path, _sms_of(gpu) if gpu else ())
    else:
        if gpu:
            text = "an image is checked for its own cell's GPU"
            raise UsageError(text, where="--gpu", hint="leave the flag out")
        from envbuild.verify.audit import audit as look

        found = look(use_cache(load_settings()), tag, deep=deep, note=note)
    word = {"passed": "ok", "failed": "DEFECT", "unproven": "?"}
    checks = found.checks
    emit(found.as_json(), as_json=as_json, human=lambda: table([(word[c.verdict], c.name, c.text) for c in checks]))
    found.raise_for_defects()


def _sms_of(gpus: str) -> tuple[int, ...]:
    from envbuild.errors import UsageError
    from envbuild.matrix.fleet import pieces
    from envbuild.matrix.load import load_matrix

    releases = load_matrix().releases["gpu"]
    found = set()
    for gpu in pieces(gpus):
        named = next((each for each in releases if gpu.lower() in {each.version, *each.aliases}), None)
        if named is None:
            known = ", ".join(release.version for release in releases)
            raise UsageError(
                f"{gpu} is not a GPU of the matrix", where="--gpu", hint=f"name one of {known}, or an alias of them"
            )
        found.add(int(named.version.removeprefix("sm_")))
    return tuple(sorted(found))


@click.command()
@click.argument("tag")
@click.option("--stack", "stack_file", metavar="FILE", help="Your own stack file, if the image was made from one.")
@click.option(
    "--sign", "do_sign", is_flag=True, help="If the digests are equal, sign that in the registry, with `signing_keys`."
)
@json_option
@progress_options
def reproduce(tag: str, stack_file: str | None, do_sign: bool, as_json: bool) -> None:
    """Rebuild an image from the lock in it, without the build cache, and compare digests.

    TAG is an image of the engine, or the path of an OCI archive, an OCI layout, a .sif or a sandbox. Of an archive or a
    layout each blob is compared with its digest. A .sif and a sandbox only state theirs: their files are compared, too, but
    for their owners and times and what Apptainer adds: /.singularity.d, whose scripts run at each start, and links to it.
    The answer names what was not compared.

    What follows from a lock is the image's configuration and its uncompressed layers. Where another engine compressed the
    same layers in another way, only the digests differ: the answer says so, and this exits with 0.

    With --sign, the registry that holds the image gets a signature: built here, same digest or same layers. The setting
    `trusted_builders` of those who pull asks for as many.

    Exits with 4 when they differ, and lists the differences file by file.
    """
    from envbuild.catalog.builders import BUILT, LAYERS, sign_built
    from envbuild.catalog.store import repository_name
    from envbuild.cli.building import shown_build
    from envbuild.cli.published import signers_of
    from envbuild.engine.client import engine_client
    from envbuild.engine.originals import open_original
    from envbuild.engine.place import is_path
    from envbuild.engine.reproduce import COMPRESSION, InEngine
    from envbuild.engine.reproduce import reproduce as again
    from envbuild.errors import LockError
    from envbuild.matrix.load import load_matrix
    from envbuild.registry.repository import Repository
    from envbuild.settings import load_settings

    settings = use_cache(load_settings())
    keys = signers_of(settings) if do_sign else ()
    if do_sign:
        repository_name(settings)  # before the hours of a build
    client = engine_client(settings)
    with open_original(settings, tag) if is_path(tag) else nullcontext(InEngine(client, tag)) as original:
        note(f"rebuilding {tag} from its own lock")
        shown = shown_build(client.settings)
        found = again(
            client,
            load_matrix(),
            original,
            stack_file=stack_file,
            on_change=shown.change,
            note=note,
            details=shown.details,
            planned=shown.planned,
        )
    signed = do_sign and found.same_layers
    if signed:
        with Repository(repository_name(settings), settings) as repository:
            sign_built(repository, found.digest, keys, claims=BUILT if found.equal else LAYERS)
    answer = {
        "image": tag,
        "digest": found.digest,
        "digest_from": found.digest_from,
        "again": found.again,
        "equal": found.equal,
        "same_layers": found.same_layers,
        "seconds": round(found.seconds, 1),
        "differences": [{"path": d.path, "what": d.what} for d in found.differences],
        "not_compared": list(found.not_compared),
        "signers": [key.name for key in keys] if signed else [],
    }
    emit(
        answer,
        as_json=as_json,
        human=lambda: (
            f"{tag}\n  image    {found.digest}\n  rebuilt  {found.again}\n  "
            + (
                "equal, and so are the files; its label states the digest"
                if found.equal and found.digest_from == "label"
                else "equal"
                if found.equal
                else COMPRESSION.what
                if found.same_layers
                else "DIFFERENT"
            )
            + "".join(f"\n  not compared: {each}" for each in found.not_compared)
        ),
    )
    if not found.same_layers:
        listed = "".join(f"\n  - {d.path}: {d.what}" for d in found.differences[:40])
        more = f"\n  - and {len(found.differences) - 40} more (--json lists all)" if len(found.differences) > 40 else ""
        raise LockError(
            f"the rebuild differs in {len(found.differences)} place{'s'[: len(found.differences) != 1]}{listed}{more}",
            where=tag,
            hint="please report it: an image must follow from its lock alone",
        )
