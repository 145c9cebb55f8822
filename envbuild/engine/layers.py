"""An image as `docker image save` writes it, read within bounds: its configuration, and its files as the layers leave them.

Every blob is held against the digest that names it while it is read. Layers go through as streams: what one of them
unpacks to is never in memory, however small it looks.
"""

import contextlib
import gzip
import hashlib
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from pydantic import BaseModel, Field, ValidationError

from envbuild.errors import HostError, LockError
from envbuild.util.foreign_json import parse_json
from envbuild.util.foreign_tar import Bounds, Kind, Member, Readable, TarError, files_in, read_tar
from envbuild.util.names import Digest, shown

_JSON_LIMIT = 8 << 20
"""Bytes of an index, a manifest or a configuration; registries take 4 MiB."""
_LAYERS = 256
"""An engine mounts 127 at most."""
_PIECE = 1 << 20
LIMITS = Bounds(bytes=128 << 30, members=1_000_000)
"""Of all layers of an image together."""
_WHITEOUT, _OPAQUE = ".wh.", ".wh..wh..opq"


class ImageError(LockError):
    """An image whose blobs are damaged, of another shape, or out of bounds."""


class _Platform(BaseModel):
    os: str = ""
    architecture: str = ""


class _Descriptor(BaseModel):
    media_type: str = Field("", alias="mediaType")
    digest: Digest
    size: int = Field(ge=0)
    platform: _Platform = _Platform()


class _Index(BaseModel):
    manifests: list[_Descriptor] = Field(min_length=1, max_length=100)


class _Manifest(BaseModel):
    config: _Descriptor
    layers: list[_Descriptor] = Field(max_length=_LAYERS)


class Entry(NamedTuple):
    """One file, link, folder or device of an image."""

    kind: Kind
    sha256: str | None
    """The first 16 digits of a file's hash."""
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
    files: dict[str, Entry]
    """By path, what a container of the image sees: upper layers win, and what they delete is gone."""


class Blob:
    """One blob of the archive, hashed as it is read."""

    def __init__(self, stream: IO[bytes], descriptor: _Descriptor) -> None:
        self._stream, self._left, self._sha = stream, descriptor.size, hashlib.sha256()
        self._digest = descriptor.digest

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""
        piece = self._stream.read(min(_PIECE if count < 0 else count, self._left))
        self._left -= len(piece)
        self._sha.update(piece)
        return piece

    def check(self) -> None:
        """Read what is left, and raise ImageError unless the whole is what its digest says."""
        while self.read(_PIECE):
            pass
        if self._left or f"sha256:{self._sha.hexdigest()}" != self._digest:
            raise ImageError(f"the blob {self._digest} is damaged: its content has another digest")


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
        return _Archive(archive, limits).read()
    except TarError as error:
        raise ImageError(f"the image cannot be read: {error}", where=where) from None
    except ImageError as error:
        raise ImageError(error.what, where=where, hint="pull or build it again") from None


class _Archive:
    def __init__(self, path: Path, limits: Bounds) -> None:
        self.path, self.limits = path, limits
        self.places = files_in(path, Bounds(members=100_000))

    @contextlib.contextmanager
    def blob(self, descriptor: _Descriptor) -> Iterator[Blob]:
        name = f"blobs/{descriptor.digest.replace(':', '/')}"
        if name not in self.places:
            raise ImageError(f"the blob {descriptor.digest} is missing")
        offset, size = self.places[name]
        if size != descriptor.size:
            raise ImageError(f"the blob {descriptor.digest} has {size:,} bytes instead of {descriptor.size:,}")
        with self.path.open("rb") as file:
            file.seek(offset)
            blob = Blob(file, descriptor)
            yield blob
            blob.check()

    def json(self, descriptor: _Descriptor) -> Any:
        if descriptor.size > _JSON_LIMIT:
            raise ImageError(f"the blob {descriptor.digest} has {descriptor.size:,} bytes: too many for JSON")
        body = bytearray()
        with self.blob(descriptor) as blob:
            while piece := blob.read(_PIECE):
                body += piece
        return _parsed(bytes(body), descriptor.digest)

    def read(self) -> Contents:
        offset, size = self.places.get("index.json", (0, 0))
        with self.path.open("rb") as file:
            file.seek(offset)
            body = file.read(min(size, _JSON_LIMIT + 1))
        manifest = self._manifest(read_index(_parsed(body, "index.json")))
        config = self.json(manifest.config)
        if not isinstance(config, dict):
            raise ImageError(f"the configuration {manifest.config.digest} is no object")
        root, left = _Node(), _Left(self.limits)
        for layer in manifest.layers:
            with self.blob(layer) as blob, unpacked(blob, layer.media_type) as stream:
                merge(root, read_layer(stream, left))
        return Contents(config=config, layers=tuple(each.digest for each in manifest.layers), files=flat(root))

    def _manifest(self, index: _Index) -> _Manifest:
        for _ in range(2):  # an index over the platforms, in which the image itself is one
            # BuildKit's statements about an image lie beside it, of an unknown platform
            real = [each for each in index.manifests if each.platform.architecture != "unknown"]
            body = self.json((real or index.manifests)[0])
            if not (isinstance(body, dict) and "manifests" in body):
                return read_manifest(body)
            index = read_index(body)
        raise ImageError("an index in an index in an index")


def _parsed(body: bytes, what: str) -> Any:
    try:
        return parse_json(body, limit=_JSON_LIMIT)
    except ValueError as error:
        raise ImageError(f"{what} is no JSON that an image has: {error}") from None


def read_index(body: Any) -> _Index:
    """Return a list of manifests.

    Raises:
        ImageError: it is of another shape.

    """
    return cast("_Index", _model(_Index, body, "the list of manifests"))


def read_manifest(body: Any) -> _Manifest:
    """Return a manifest.

    Raises:
        ImageError: it is of another shape.

    """
    return cast("_Manifest", _model(_Manifest, body, "the manifest"))


def _model(kind: type[BaseModel], body: Any, what: str) -> BaseModel:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ImageError(f"{what} is of another shape: {shown(place, 100)}: {shown(first['msg'])}") from None


@contextlib.contextmanager
def unpacked(blob: Blob, media_type: str) -> Iterator[Readable]:
    """Yield a layer's tar.

    Raises:
        ImageError: it does not unpack, or is packed in an unknown way.
        HostError: `zstd` is missing.

    """
    if media_type.endswith("zstd"):
        with _zstd(blob) as stream:
            yield stream
    elif media_type.endswith("gzip"):
        try:
            with gzip.GzipFile(fileobj=cast("IO[bytes]", blob), mode="rb") as stream:
                yield stream
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ImageError(f"a layer does not unpack: {shown(str(error))}") from None
    elif media_type.endswith(".tar"):
        yield blob
    else:
        raise ImageError(f"a layer of the unknown kind {shown(media_type, 100)!r}")


@contextlib.contextmanager
def _zstd(blob: Blob) -> Iterator[Readable]:
    # Python gets zstd in 3.14; the host's tool is already needed for the export. It takes 128 MiB of memory at most.
    program = shutil.which("zstd")
    if program is None:
        raise HostError("the command zstd is missing", hint="apt-get install zstd, or run scripts/install-engine")
    process = subprocess.Popen(
        [program, "-dcq", "--memory=128MB"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin and process.stdout  # noqa: PT018, S101 - they were asked for
    stdin = process.stdin

    def feed() -> None:
        # A reader that went away is told of below.
        with contextlib.suppress(OSError, ValueError), stdin:
            while piece := blob.read(_PIECE):
                stdin.write(piece)

    feeding = threading.Thread(target=feed, daemon=True)
    feeding.start()
    try:
        yield process.stdout
        if process.wait(30):
            raise ImageError("a layer does not unpack: zstd refuses it")
    except TarError as error:
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(0.2) > 0:  # the tar ends where zstd gave up
                raise ImageError(f"a layer does not unpack: zstd refuses it ({error})") from None
        raise
    except subprocess.TimeoutExpired:
        raise ImageError("a layer does not unpack: zstd does not end") from None
    finally:
        process.kill()
        process.wait()
        feeding.join()
        process.stdout.close()


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
    while metered.read(_PIECE):  # padding
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
        while piece := member.body.read(_PIECE):
            sha.update(piece)
        digest = sha.hexdigest()[:16]
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
