"""What an image is: its configuration, and its files as its layers leave them."""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from envbuild.engine.archive import PIECE, Archive, ImageError
from envbuild.errors import HostError
from envbuild.util.foreign_tar import Bounds, Kind, Member, Readable, TarError, read_tar

LIMITS = Bounds(bytes=128 << 30, members=1_000_000)
"""Of all layers of an image together."""
_BLOCK = 4096
"""Bytes that an entry takes on a disk in addition to its content, at least."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class Entry(NamedTuple):
    """One file, link, folder or device of an image."""

    kind: Kind
    sha256: str | None
    """A file's whole hash: the files of a sandbox are equal by it alone."""
    mode: str
    owner: str
    mtime: float
    link: str


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an image is."""

    config: dict[str, Any]
    layers: tuple[str, ...]
    """Digest of each layer, the lowest first."""
    diff_ids: tuple[str, ...]
    """Digest of each layer, uncompressed: what it is, however it was packed. Computed here, not taken from the image."""
    files: dict[str, Entry]
    """By path, what a container of the image sees: upper layers win, and what they delete is gone."""
    digest: str
    """As the image's list names it: of the manifest, or of the list over its platforms."""
    manifest: Mapping[str, Any]
    """The manifest's own values."""
    listed: bool = False
    """Whether the digest is that of a list."""
    of_several: bool = False
    """Whether the image's digest is that of a list which names other images, too."""


def require_room(folder: Path, what: str, size: int, members: int, hint: str) -> None:
    """Check that the disk of a folder holds what a foreign image unpacks to.

    Args:
        folder: where it is unpacked.
        what: the image, such as `the .sif`.
        size: bytes of its files.
        members: how many files, folders and links they are.
        hint: of the error.

    Raises:
        HostError: the disk does not hold it.

    """
    needed, free = size + members * _BLOCK, shutil.disk_usage(folder).free
    if needed > free:
        raise HostError(
            f"{what} unpacks to {needed / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            where=str(folder),
            hint=f"{hint}; and ask who made the file if that is a surprise",
        )


def read_image(archive: Path, where: str, limits: Bounds = LIMITS) -> Contents:
    """Read the archive that `docker image save` wrote of an image.

    Args:
        archive: its path.
        where: the image's name, for messages.
        limits: of all its layers together.

    Raises:
        ImageError: a blob is damaged or missing, or is not what an image has.
        HostError: `zstd` is missing.

    """
    try:
        return contents_of(Archive(archive), limits)
    except TarError as error:
        raise ImageError(f"the image cannot be read: {error}", where=where) from None
    except ImageError as error:
        raise ImageError(error.what, where=where, hint="pull or build it again") from None


def contents_of(archive: Archive, limits: Bounds = LIMITS) -> Contents:
    """Return what the image of an archive or a layout is; see `read_image`.

    Raises:
        ImageError: a blob is damaged or missing, or is not what an image has.
        TarError: a layer is out of bounds.
        HostError: `zstd` is missing.

    """
    held = archive.image()
    manifest = held.manifest
    config = archive.json(manifest.config)
    if not isinstance(config, dict):
        raise ImageError(f"the configuration {manifest.config.digest} is not an object")
    root, left = _Node(), _Left(limits)
    diff_ids = []
    for layer in manifest.layers:
        with archive.layer(layer) as stream:
            hashed = _Hashed(stream)
            merge(root, read_layer(hashed, left))
            diff_ids.append(f"sha256:{hashed.sha.hexdigest()}")
    rootfs = config.get("rootfs")
    if not isinstance(rootfs, dict) or rootfs.get("diff_ids") != diff_ids:
        raise ImageError(f"the configuration {manifest.config.digest} is of other layers than the manifest's")
    layers = tuple(each.digest for each in manifest.layers)
    return Contents(
        config=config,
        layers=layers,
        diff_ids=tuple(diff_ids),
        files=flat(root),
        digest=held.digest,
        manifest=held.body,
        listed=len(held.listing) > 1,
        of_several=held.of_several,
    )


class _Hashed:
    """A stream whose bytes are hashed as they are read."""

    def __init__(self, stream: Readable) -> None:
        self._stream, self.sha = stream, hashlib.sha256()

    def read(self, count: int) -> bytes:
        piece = self._stream.read(count)
        self.sha.update(piece)
        return piece


@dataclass
class _Left:
    """What may still be read of an image's layers."""

    limits: Bounds
    bytes: int = 0
    members: int = 0

    @property
    def bounds(self) -> Bounds:
        return Bounds(bytes=self.limits.bytes - self.bytes, members=self.limits.members - self.members)


@dataclass(slots=True)
class _Node:
    """A path of a layer, or of the layers below it together."""

    entry: Entry | None = None
    below: "dict[str, _Node] | None" = None
    deleted: set[str] | None = None
    """Names that this layer takes out of the folder."""
    opaque: bool = False
    """This layer's folder stands for itself: what lower layers have in it is gone."""


class _Metered:
    """A stream that counts; what follows the end of the tar in it is part of the bound."""

    def __init__(self, stream: Readable, left: _Left) -> None:
        self._stream, self._left = stream, left

    def read(self, count: int) -> bytes:
        piece = self._stream.read(count)
        self._left.bytes += len(piece)
        if self._left.bytes > self._left.limits.bytes:
            raise TarError(f"its layers unpack to more than {self._left.limits.bytes:,} bytes")
        return piece


def read_layer(stream: Readable, left: _Left | None = None) -> _Node:
    """Read one layer as a tree, with what it takes out of the layers below.

    Raises:
        TarError: it is damaged or out of bounds.

    """
    left = left or _Left(LIMITS)
    metered = _Metered(stream, left)
    root = _Node(entry=None)
    for member in read_tar(metered, left.bounds):
        left.members += 1
        _add(root, member)
    while metered.read(PIECE):  # padding
        pass
    return root


def _add(root: _Node, member: Member) -> None:
    node = root
    *folders, name = member.path.split("/")
    for folder in folders:
        node.below = {} if node.below is None else node.below
        node = node.below.setdefault(folder, _Node())
    if name == _OPAQUE:
        node.opaque = True
        return
    if name.startswith(_WHITEOUT):
        if not name.startswith(_WHITEOUT * 2):  # aufs keeps its own affairs under these
            node.deleted = {*(node.deleted or ()), name.removeprefix(_WHITEOUT)}
        return
    if name:
        node.below = {} if node.below is None else node.below
        node = node.below.setdefault(name, _Node())
    node.entry = _entry(member)


def _entry(member: Member) -> Entry:
    digest = None
    if member.body is not None:
        sha = hashlib.sha256()
        while piece := member.body.read(PIECE):
            sha.update(piece)
        digest = sha.hexdigest()
    return Entry(
        kind=member.kind,
        sha256=digest,
        mode=oct(member.mode),
        owner=f"{member.owner}:{member.group}",
        mtime=member.mtime,
        link=member.link,
    )


def merge(lower: _Node, upper: _Node) -> None:
    """Lay `upper` over `lower`, which becomes both."""
    stack = [(lower, upper)]
    while stack:
        under, over = stack.pop()
        if over.opaque:
            under.below = None
        for name in over.deleted or ():
            if under.below is not None:
                under.below.pop(name, None)
        if over.entry is not None:
            under.entry = over.entry
            if over.entry.kind != "folder":
                under.below = None
        for name, child in (over.below or {}).items():
            if under.below is None:
                under.below = {}
            stack.append((under.below.setdefault(name, _Node()), child))
        if over.below and under.entry is not None and under.entry.kind != "folder":
            under.entry = None  # a folder that the upper layer does not list took the place of a file


def flat(root: _Node) -> dict[str, Entry]:
    """Return the entries of a tree by their paths."""
    found: dict[str, Entry] = {}
    stack = [("", root)]
    while stack:
        path, node = stack.pop()
        if node.entry is not None:
            found[path] = node.entry
        stack += [(f"{path}/{name}" if path else name, child) for name, child in (node.below or {}).items()]
    return found
