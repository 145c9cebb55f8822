"""An image of the engine, written to a file or a folder that runs without the engine."""

from pathlib import Path

from envbuild.engine import apptainer, unpacked
from envbuild.engine.built import recipe_of_image
from envbuild.engine.client import EngineClient
from envbuild.engine.stated_recipe import write_recipe
from envbuild.errors import HostError, UsageError
from envbuild.evidence.content import ImageContent
from envbuild.util.names import shown
from envbuild.util.scratch import scratch


def check_output(path: Path) -> None:
    """Check, before anything is built, that an image can be written to `path`.

    Raises:
        UsageError: something is there already, or its folder is not.
        HostError: it takes Apptainer, which is missing.

    """
    where = f"--output {shown(str(path))}"
    if path.exists():
        raise UsageError(f"{shown(str(path))} exists", where=where, hint="name a new file or directory")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"there is no directory {shown(str(path.absolute().parent))}", where=where, hint="make it first"
        )
    if path.suffix != ".tar":
        try:
            apptainer.program()
        except HostError as error:
            hint = f"write FILE.oci.tar, which needs no Apptainer, or {error.hint}"
            raise HostError(
                "a .sif or a sandbox is made by Apptainer, which is missing", where=where, hint=hint
            ) from None


def write_image(client: EngineClient, image: str, path: Path) -> None:
    """Write an image to `path`: `FILE.oci.tar` is an OCI archive, `FILE.sif` a SIF, anything else an Apptainer sandbox.

    Args:
        client: the engine that has it.
        image: its digest.
        path: where it goes; see `check_output`.

    Raises:
        HostError: the engine or Apptainer fails, or there is no room.
        LockError: what the engine hands over is not what its digests say.

    """
    path = path.absolute()
    with scratch("image", path.parent) as own:
        archive = own / "image.oci.tar"
        client.save(image, archive)
        held = unpacked.open_image(archive, "archive").image()
        if held.digest != image:
            raise HostError(
                f"the engine handed over {held.digest} for {image}", where=shown(str(path)), hint="try again"
            )
        if path.suffix == ".tar":
            _state_recipe(archive, recipe_of_image(client.settings, image))
        unpacked.write(archive, path)


def _state_recipe(archive: Path, by: ImageContent) -> None:
    """State in the archive by which recipe the image was built, so that a record of a run elsewhere has it."""
    try:
        write_recipe(archive, by)
    except OSError as error:
        raise HostError(
            f"the archive cannot be written: {error.strerror or error}",
            where=shown(str(archive)),
            hint="free some room",
        ) from None
