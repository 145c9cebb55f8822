"""Published images on the page: read from a catalogue's JSON, checked before any of it gets into a command."""

import json
from pathlib import Path
from typing import Annotated

from envbuild.errors import DataError, UsageError
from envbuild.util.bounded import read_text
from envbuild.util.model import Field, Model
from envbuild.util.names import CellId, Digest, ImageReference, SafeName, StackName, Version, checked, shown


class Published(Model):
    """One image of a registry, as a catalogue lists it."""

    id: CellId
    """The cell's."""
    cell: dict[SafeName, Version]
    """Axis -> release."""
    image: Digest
    platform: Annotated[str, Field(max_length=40, pattern=r"^[a-z0-9]+/[a-z0-9]+$")]
    size: int = Field(ge=0, le=1 << 40)
    """Bytes to download."""
    flavor: SafeName = "runtime"
    stack: StackName | None = None
    signers: tuple[SafeName, ...] = ()


class PublishedImage(Published):
    """The same with the registry that holds it."""

    registry: str

    @property
    def reference(self) -> str:
        """What a container engine pulls: the repository at this very digest."""
        return f"{self.registry}@{self.image}"


def read_published(path: Path) -> tuple[PublishedImage, ...]:
    """Read the images of a catalogue's JSON: an object with `registry` (the repository) and `entries`.

    Fields that the page has no use for are passed over.

    Raises:
        UsageError: the file cannot be read.
        DataError: it is no such catalogue, or a name or a digest in it is none.

    """
    from pydantic import ValidationError

    try:
        raw = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"the catalogue cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise _unfit(path, f"it is no JSON: {shown(str(error))}") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("entries"), list):
        raise _unfit(path, "it has no list of entries")
    if not raw["entries"]:
        return ()
    try:
        registry = checked(ImageReference, raw.get("registry"))
    except ValueError:
        raise _unfit(
            path, f"its registry {shown(str(raw.get('registry')))!r} is not the name of a repository"
        ) from None
    known = ("id", "cell", "image", "platform", "size", "flavor", "stack", "signers")
    found = []
    for number, entry in enumerate(raw["entries"]):
        if not isinstance(entry, dict):
            raise _unfit(path, f"entry {number} is no object")
        try:
            found.append(
                PublishedImage.model_validate({k: entry[k] for k in known if k in entry} | {"registry": registry})
            )
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise _unfit(path, f"entry {number}, {where}: {shown(first['msg'])}") from None
    return tuple(sorted(found, key=lambda one: (one.id, one.flavor, one.stack or "", one.platform, one.image)))


def _unfit(path: Path, why: str) -> DataError:
    return DataError(
        f"this is not a catalogue of images: {why}",
        where=str(path),
        hint="give the answer of `envbuild catalog --json`, as it is",
    )
