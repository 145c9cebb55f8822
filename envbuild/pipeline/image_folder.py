"""Images that lie in a folder as files, each under the cell that it states: for a machine that runs images and builds none."""

from collections.abc import Callable
from pathlib import Path

from envbuild.engine.image import Image
from envbuild.engine.place import kind_of
from envbuild.engine.unpacked import stated_of
from envbuild.errors import LockError, UsageError
from envbuild.matrix.cell import CELL_LABEL
from envbuild.util.names import shown

_MOST = 4096
"""Entries of a folder that are looked at."""


def images_in(folder: Path, note: Callable[[str], None] = lambda _: None) -> dict[str, tuple[Image, ...]]:
    """Return the images that lie directly in `folder`: id of the cell that an image states -> the images, sorted by name.

    What is no image is passed over without a word, and one that states no cell or cannot be read with a line to `note`.

    Args:
        folder: holds OCI archives, OCI layouts, .sif files and sandboxes, as `envbuild image --output` writes them.
        note: takes a line about each image that is passed over.

    Returns:
        Images whose reference is the path. Of an archive or a layout, manifest and configuration were checked, and no layer.

    Raises:
        HostError: a .sif is there, and Apptainer, which reads it, is missing or failed.
        UsageError: it is no folder, cannot be read, or holds more than 4096 entries.

    """
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise UsageError(
            f"{shown(str(folder))} cannot be read: {error.strerror}",
            where="--images",
            hint="name the folder that `envbuild image --output` wrote images to",
        ) from None
    if len(entries) > _MOST:
        raise UsageError(
            f"{shown(str(folder))} holds {len(entries)} files and folders, more than {_MOST}",
            where="--images",
            hint="name a folder with the images alone",
        )
    found: dict[str, tuple[Image, ...]] = {}
    for path in entries:
        kind = kind_of(path)
        if kind is None:
            continue
        try:
            image = stated_of(path, kind)
        except (LockError, UsageError) as error:
            note(f"passed over {shown(path.name)}: {error.what}")
            continue
        cell = image.labels.get(CELL_LABEL)
        if cell is None:
            note(f"passed over {shown(path.name)}: it states no cell")
            continue
        found[cell] = (*found.get(cell, ()), image)
    return found
