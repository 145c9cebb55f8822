"""Which recipe built the image of an OCI archive: stated in the archive's list, so that the image's own digest stays.

An image states no recipe: its bytes follow from the lock and the recipe alone. An archive that goes to another machine has
the statement next to the image's digest, as annotations of OCI's image index. It is the word of who wrote the archive.
"""

import json
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

from envbuild.evidence.content import ImageContent
from envbuild.util.foreign_tar import Bounds, files_in
from envbuild.util.oci_json import parse_oci

RECIPE, RELEASE = "io.envbuild.recipe", "io.envbuild.release"
_BLOCK = 512
_LIMIT = 1 << 20
"""Bytes of each file next to the blobs."""
_TAIL = frozenset({"index.json", "manifest.json", "oci-layout", "repositories"})
"""What an engine writes after the blobs."""


def write_recipe(archive: Path, by: ImageContent) -> bool:
    """State the recipe in an archive that an engine wrote of one image; return whether it does now.

    Only what follows the blobs is written again. An archive of another order stays as it is.

    Args:
        archive: the file.
        by: the recipe and the release.

    Raises:
        OSError: the archive cannot be written.
        TarError: it is no archive.

    """
    places = files_in(archive, Bounds(members=100_000))
    blobs = [place for name, place in places.items() if name.startswith("blobs/")]
    end = max((offset + -(-size // _BLOCK) * _BLOCK for offset, size in blobs), default=0)
    tail = {name: place for name, place in places.items() if not name.startswith("blobs/")}
    movable = "index.json" in tail and tail.keys() <= _TAIL
    if by.recipe is None or not movable or any(at < end or size > _LIMIT for at, size in tail.values()):
        return False
    with archive.open("r+b") as file:
        bodies = {}
        for name, (at, size) in sorted(tail.items()):
            file.seek(at)
            bodies[name] = file.read(size)
        stated = _stated(bodies["index.json"], by)
        if stated is None:
            return False
        bodies["index.json"] = stated
        file.seek(end)
        file.truncate()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name, body in bodies.items():
                member = tarfile.TarInfo(name)
                member.size = len(body)
                tar.addfile(member, BytesIO(body))
    return True


def _stated(body: bytes, by: ImageContent) -> bytes | None:
    """Return the list with the statement at each image; None where it is of another shape."""
    try:
        index: Any = parse_oci(body, limit=_LIMIT)
        for each in index["manifests"]:
            each["annotations"] = {**(each.get("annotations") or {}), RECIPE: by.recipe, RELEASE: by.release or ""}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return json.dumps(index).encode()


def read_recipe(annotations: dict[str, Any]) -> ImageContent:
    """Return the recipe and the release that annotations state, both foreign; neither where they state none.

    Raises:
        ValueError: what they state is no digest or no version.

    """
    known = {"recipe": annotations.get(RECIPE) or None, "release": annotations.get(RELEASE) or None}
    return ImageContent.model_validate(known)
