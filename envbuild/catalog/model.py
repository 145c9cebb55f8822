"""What the catalogue says: an entry for each image, and the catalogue's own version and date."""

import datetime as dt
import hashlib
import json
from typing import Any, Literal

from envbuild.matrix.cell import Cell
from envbuild.util.foreign_json import parse_json
from envbuild.util.model import Field, Model
from envbuild.util.names import CellId, Commit, Digest, Line, SafeName, StackName, Version, shown

LARGEST = 16 << 20
"""Bytes of a catalogue: some 10,000 entries."""

ARTIFACT_TYPE = "application/vnd.envbuild.catalog.v1"
BLOB_TYPE = "application/vnd.envbuild.catalog.v1+json"
TAG = "envbuild-catalog"

_MOST = 10_000


class Entry(Model):
    """An image that the registry holds, and the lock that makes it."""

    id: CellId
    """The cell's."""
    cell: dict[SafeName, Version]
    """Axis -> release, as in the lock."""
    commits: dict[SafeName, Commit] = {}
    flavor: Literal["runtime", "devel"]
    stack: StackName | None = None
    stack_digest: Line | None = None
    te_source: Literal["pypi", "git"] = "pypi"
    compat: bool = False
    """Whether the image carries NVIDIA's package for older drivers."""
    platform: Literal["linux/amd64", "linux/arm64"]
    sms: tuple[SafeName, ...] = Field((), max_length=20)
    """The GPU architectures that its kernels are compiled for, such as `sm_90`."""
    lock: Digest
    """The lock's own digest."""
    lock_artifact: Digest
    """The manifest of the lock's files."""
    image: Digest
    """The image's manifest."""
    layers: tuple[Digest, ...] = Field((), max_length=256, exclude_if=lambda layers: not layers)
    """Digests of the image's layers, uncompressed, the lowest first: what follows from the lock, whoever compressed them.
    Empty in an entry of an earlier release."""
    size: int = Field(ge=0, le=1 << 40)
    """Bytes to download, without what is there already."""
    release: Version
    """The envbuild that made it."""
    evidence: tuple[SafeName, ...] = Field((), max_length=1000)
    """Records of runs that passed in an image of this digest."""
    signers: tuple[SafeName, ...] = Field((), max_length=50)
    """Names of the keys of who published it."""
    added: dt.datetime

    @property
    def as_cell(self) -> Cell:
        """The cell."""
        return Cell(versions=self.cell, commits=self.commits)

    @property
    def key(self) -> tuple[object, ...]:
        """What a newer entry replaces an older one by."""
        return (self.id, self.flavor, self.stack, self.te_source, self.compat, self.platform)


class Catalog(Model):
    """One version of a registry's catalogue."""

    format: Literal[1] = 1
    version: int = Field(ge=1, le=1 << 53)
    """Grows by one or more with each change."""
    created: dt.datetime
    entries: tuple[Entry, ...] = Field((), max_length=_MOST)

    def with_entries(self, entries: tuple[Entry, ...], *, now: dt.datetime) -> "Catalog":
        """Return the next version: `entries` replace those with their keys."""
        new = {entry.key for entry in entries}
        kept = tuple(entry for entry in self.entries if entry.key not in new)
        return Catalog(version=self.version + 1, created=now, entries=(*kept, *entries))

    def body(self) -> bytes:
        """Return the bytes that are published."""
        value = self.model_dump(mode="json")
        value["entries"] = sorted(value["entries"], key=lambda entry: json.dumps(entry, sort_keys=True))
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def read_body(body: bytes) -> Catalog:
    """Return the catalogue in `body`.

    Raises:
        ValueError: it is none.

    """
    from pydantic import ValidationError

    value: Any = parse_json(body, limit=LARGEST)
    if isinstance(value, dict) and value.get("format") != 1:
        raise ValueError(f"it has the format {shown(str(value.get('format')), 20)}: a newer envbuild reads it")
    try:
        found = Catalog.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(shown(f"{place}: {first['msg'].removeprefix('Value error, ')}")) from None
    for moment in (found.created, *(entry.added for entry in found.entries)):
        if moment.tzinfo is None:
            raise ValueError("a time in it has no zone")
    for entry in found.entries:
        if not {"cuda", "python"} <= entry.cell.keys():
            raise ValueError(f"the entry {entry.id} names no CUDA or no Python")
        if entry.as_cell.id != entry.id:
            raise ValueError(f"the entry {entry.id} is of another cell: {entry.as_cell.id}")
    if len({entry.key for entry in found.entries}) != len(found.entries):
        raise ValueError("two of its entries are about the same")
    return found


def name_of(entry: Entry) -> str:
    """Return a short name of an entry, for people and notes."""
    return hashlib.sha256(f"{entry.lock}{entry.image}".encode()).hexdigest()[:12]
