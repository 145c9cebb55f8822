"""`envbuild bundle` and `envbuild unbundle`: all that an image is made of in one file, and that file on another host."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from envbuild.cli.output import emit, json_option, note, progress_options, show_notices, use_cache
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from envbuild.pipeline.unbundle import Opened


@click.command()
@click.argument("named", metavar="CELL|TAG|LOCK")
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="Write the bundle to this new file, such as te.bundle.tar.",
)
@click.option("--stack", "stack_file", metavar="FILE", help="Your own stack file, if the image was made from one.")
@json_option
@progress_options
def bundle(named: str, output: Path, stack_file: str | None, as_json: bool) -> None:
    """Put an image, all that it is made of, and envbuild itself into one file, for a host without a network.

    The image must be in the engine. Name it, the id of its cell, or the folder of its lock (with a slash: ./LOCK).

    The file holds the image (OCI layout), its lock, every wheel, OS package, source and file that the lock names, the
    compiled wheels that this machine keeps, and envbuild with what it needs, for the Python that runs it. With
    `signing_keys` in the settings, these keys sign it.

    The answer states the sha256 of the file. Carry it another way than the file, for `envbuild unbundle --sha256`.

    Exits with 4 when something is not what the lock names, or is to be had no more; with 8 when the engine has no such
    image or another host does not answer.
    """
    from envbuild.cli.published import keys_of
    from envbuild.cli.quantities import size_text
    from envbuild.engine.client import engine_client
    from envbuild.matrix.load import load_matrix
    from envbuild.pipeline.bundle import make_bundle, subject_of
    from envbuild.settings import load_settings

    settings = use_cache(show_notices(load_settings()))
    keys = keys_of(settings) if settings.signing_keys else ()
    client = engine_client(settings)
    subject = subject_of(client, named)
    made = make_bundle(client, load_matrix(), subject, output, stack_file=stack_file, keys=keys, note=note)
    for each in made.bundle.missing:
        note(f"a rebuild needs {each}, which is not in the bundle")
    answer = {
        "file": str(output),
        "sha256": made.sha256,
        "size_bytes": made.size,
        "image": subject.tag,
        "digest": subject.digest,
        "lock": subject.locked.lock.digest,
        "files": len(made.bundle.files),
        "python": made.bundle.python,
        "missing": list(made.bundle.missing),
        "signers": [key.name for key in keys],
    }
    text = (
        f"{output}\n  sha256  {made.sha256}\n  size    {size_text(made.size)}, {count_of(len(made.bundle.files), 'file')}\n"
        f"  image   {subject.tag} {subject.digest}\n  lock    {subject.locked.lock.digest}"
    )
    emit(answer, as_json=as_json, human=lambda: text)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--sha256", metavar="HEX", help="The bundle must have this sha256, as `envbuild bundle` printed it.")
@click.option("--load", is_flag=True, help="Load the image into the engine, too.")
@json_option
@progress_options
def unbundle(file: Path, folder: Path, sha256: str | None, load: bool, as_json: bool) -> None:
    """Check a bundle, unpack it to the new FOLDER, and load its image. It asks no network.

    Every file is compared with the bundle's list, the list with the lock, and the image with both. What is missing, is
    more, or differs ends the command, and FOLDER does not appear. With `trusted_keys` in the settings, as many of them
    as `trusted_signatures` says must have signed it.

    FOLDER/image is an OCI layout, which Apptainer runs. FOLDER/config.toml has settings with which a build takes
    everything from FOLDER: ENVBUILD_CONFIG=FOLDER/config.toml envbuild reproduce TAG. Where neither a trusted key nor
    --sha256 confirms who made the bundle, FOLDER/config.toml leaves out its OS packages, whose scripts would run on
    this host. The answer says so.

    Exits with 4 when the bundle is not right.
    """
    from envbuild.engine.client import engine_client
    from envbuild.errors import UsageError
    from envbuild.pipeline.unbundle import CONFIG, load_image, open_bundle
    from envbuild.settings import load_settings
    from envbuild.util.names import Sha256, checked

    if sha256 is not None:
        try:
            checked(Sha256, sha256)
        except ValueError:
            raise UsageError("this is no sha256", where="--sha256", hint="write its 64 digits, a-f in small") from None
    settings = show_notices(load_settings())
    client = engine_client(settings) if load else None
    opened = open_bundle(settings, file, folder, sha256=sha256, note=note)
    if client is not None:
        note(f"loading {opened.tag}")
        load_image(client, opened)
    found = opened.unpacked
    answer = {
        "folder": str(opened.folder),
        "sha256": found.sha256,
        "files": len(found.bundle.files),
        "image": opened.tag,
        "digest": found.bundle.image,
        "lock": found.bundle.lock,
        "loaded": load,
        "missing": list(found.bundle.missing),
        "signers": list(found.signers),
        "left_out": list(opened.left_out),
        "config": str(opened.folder / CONFIG),
    }
    emit(answer, as_json=as_json, human=lambda: _text(opened, load=load, named=sha256 is not None))


def _text(opened: "Opened", *, load: bool, named: bool) -> str:
    bundle = opened.unpacked.bundle
    if opened.unpacked.signers:
        trust = f"signed by {', '.join(opened.unpacked.signers)}"
    elif named:
        trust = "it has the sha256 that --sha256 names"
    else:
        trust = f"no trusted key signed it; its sha256 is {opened.unpacked.sha256}"
    image = opened.tag if load else f"{opened.folder}/image"
    config = opened.folder / "config.toml"
    lines = [
        str(opened.folder),
        f"  files   {len(bundle.files)}, each as the list and the lock say",
        f"  trust   {trust}",
        f"  image   {opened.tag} {bundle.image}",
        f"  lock    {bundle.lock}",
        *(f"  missing {each}" for each in bundle.missing),
        *(f"  left out  {each}" for each in opened.left_out),
        "use it",
        f"  export ENVBUILD_CONFIG={config}",
        f"  envbuild smoke {image}",
        f"  envbuild run {image}",
        *([f"  envbuild reproduce {image}"] if load else []),
    ]
    return "\n".join(lines)
