"""An OCI layout, in a folder or in a tar as `docker image save` writes it, read within bounds: manifest, configuration, layers.

Every blob is compared with the digest that names it while it is read. Layers go through as streams: what one of them
unpacks to is never in memory, however small it looks.
"""

import contextlib
import gzip
import hashlib
import json
import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from pydantic import BaseModel, Field, ValidationError

from envbuild.engine.stated_recipe import read_recipe
from envbuild.errors import HostError, LockError
from envbuild.evidence.content import ImageContent
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.util.below import OutsideError, open_below
from envbuild.util.foreign_tar import Bounds, Readable, TarError, files_in
from envbuild.util.names import Digest, shown
from envbuild.util.oci_json import parse_oci
from envbuild.util.processes import streamed

_JSON_LIMIT = 8 << 20
"""Bytes of an index, a manifest or a configuration; registries take 4 MiB."""
_LAYERS = 256
"""An engine mounts 127 at most."""
PIECE = 1 << 20
"""Bytes that are read at once."""
_UNPACK_S = 3600.0
"""Seconds that one layer may take to be read."""


class ImageError(LockError):
    """An image whose blobs are damaged, of another shape, or out of bounds."""


class _Platform(BaseModel):
    os: str = ""
    architecture: str = ""


class Descriptor(BaseModel):
    """A blob, as the document that lists it describes it."""

    media_type: str = Field("", alias="mediaType")
    digest: Digest
    size: int = Field(ge=0)
    platform: _Platform = _Platform()
    annotations: dict[str, Any] | None = None


class _Index(BaseModel):
    manifests: list[Descriptor] = Field(min_length=1, max_length=100)


class Manifest(BaseModel):
    """What an image is made of."""

    config: Descriptor
    layers: list[Descriptor] = Field(max_length=_LAYERS)


class Blob:
    """One blob of the archive, hashed as it is read."""

    def __init__(self, stream: IO[bytes], descriptor: Descriptor) -> None:
        self._stream, self._left, self._sha = stream, descriptor.size, hashlib.sha256()
        self._digest = descriptor.digest

    def read(self, count: int = -1) -> bytes:
        """Return the next bytes, at most `count`; none at the end."""
        piece = self._stream.read(min(PIECE if count < 0 else count, self._left))
        self._left -= len(piece)
        self._sha.update(piece)
        return piece

    def check(self) -> None:
        """Read what is left, and raise ImageError unless the whole is what its digest says."""
        while self.read(PIECE):
            pass
        if self._left or f"sha256:{self._sha.hexdigest()}" != self._digest:
            raise ImageError(f"the blob {self._digest} is damaged: its content has another digest")


def _parsed(body: bytes, what: str) -> Any:
    try:
        return parse_oci(body, limit=_JSON_LIMIT)
    except ValueError as error:
        raise ImageError(f"{what} is not the JSON of an image: {error}") from None


def read_index(body: Any) -> _Index:
    """Return a list of manifests.

    Raises:
        ImageError: it is of another shape.

    """
    return cast("_Index", _model(_Index, body, "the list of manifests"))


def read_manifest(body: Any) -> Manifest:
    """Return a manifest.

    Raises:
        ImageError: it is of another shape.

    """
    return cast("Manifest", _model(Manifest, body, "the manifest"))


def _real(listed: list[Descriptor]) -> list[Descriptor]:
    """Leave out BuildKit's statements about an image, which are listed next to it with an unknown platform."""
    return [each for each in listed if each.platform.architecture != "unknown"] or listed


def _made_by(descriptor: Descriptor) -> ImageContent:
    try:
        return read_recipe(descriptor.annotations or {})
    except ValueError:
        raise ImageError("its list states a recipe or a release that is none") from None


def _of_several(listed: list[Descriptor]) -> bool:
    """Return whether a list names several images.

    Raises:
        ImageError: two of them may be for this machine: each reader could take another one.

    """
    images = {each.digest: each.platform for each in _real(listed)}
    here = {_architecture(platform.machine()), ""}
    mine = [each for each in images.values() if each.os in {"linux", ""} and _architecture(each.architecture) in here]
    if len(images) > 1 and len(mine) > 1:
        raise ImageError("its list names two images for one platform: save one of them alone")
    return len(images) > 1


def _architecture(name: str) -> str:
    return DEBIAN_ARCH.get(name.lower(), name.lower())


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
    command = [program, "-dcq", "--memory=128MB"]
    try:
        # the tar ends where zstd gave up
        with streamed(command, seconds=_UNPACK_S, stdin=blob.read, damaged=(TarError,)) as stream:
            yield stream
    except subprocess.CalledProcessError as error:
        why = f" ({error.__cause__})" if error.__cause__ else ""
        raise ImageError(f"a layer does not unpack: zstd refuses it{why}") from None
    except TimeoutError:
        raise ImageError("a layer does not unpack: zstd does not end") from None


class Archive:
    """The blobs of a tar, and which of them the image is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places = self._places()

    def _places(self) -> dict[str, tuple[int, int]]:
        """Return offset and size of each file, by its name."""
        return files_in(self.path, Bounds(members=100_000))

    def _open(self, name: str) -> IO[bytes]:
        """Open a file of `places` at its first byte."""
        file = self.path.open("rb")
        file.seek(self.places[name][0])
        return file

    @contextlib.contextmanager
    def blob(self, descriptor: Descriptor) -> Iterator[Blob]:
        """Yield a blob; what the block leaves of it is read and checked at the end.

        Raises:
            ImageError: it is damaged or missing.

        """
        name = f"blobs/{descriptor.digest.replace(':', '/')}"
        if name not in self.places:
            raise ImageError(f"the blob {descriptor.digest} is missing")
        _, size = self.places[name]
        if size != descriptor.size:
            raise ImageError(f"the blob {descriptor.digest} has {size:,} bytes instead of {descriptor.size:,}")
        with self._open(name) as file:
            blob = Blob(file, descriptor)
            yield blob
            blob.check()

    def json(self, descriptor: Descriptor) -> Any:
        """Return a blob that is JSON.

        Raises:
            ImageError: it is damaged, missing, too large or no JSON.

        """
        if descriptor.size > _JSON_LIMIT:
            raise ImageError(f"the blob {descriptor.digest} has {descriptor.size:,} bytes: too many for JSON")
        body = bytearray()
        with self.blob(descriptor) as blob:
            while piece := blob.read(PIECE):
                body += piece
        return _parsed(bytes(body), descriptor.digest)

    def manifest(self) -> Manifest:
        """Return the image's manifest.

        Raises:
            ImageError: it has none, or one of another shape.

        """
        return self.image().manifest

    def image(self) -> "Held":
        """Return which image it is: the one that its list names, or this machine's of a list over platforms.

        Raises:
            ImageError: it has none, or one of another shape.

        """
        index = read_index(_parsed(self._index(), "index.json"))
        listing: list[Descriptor] = []
        several = False
        for _ in range(2):  # an index over the platforms, in which the image itself is one
            listing.append(self._chosen(index.manifests))
            body = self.json(listing[-1])
            if not (isinstance(body, dict) and "manifests" in body):
                manifest = read_manifest(body)
                return Held(
                    digest=listing[0].digest,
                    listing=tuple(listing),
                    manifest=manifest,
                    body=body,
                    of_several=several,
                    made_by=_made_by(listing[0]),
                )
            if {"config", "layers"} & body.keys():  # each reader would take another half for the truth
                raise ImageError(f"the blob {listing[-1].digest} is an index and a manifest at once")
            index = read_index(body)
            several = _of_several(index.manifests)
        raise ImageError("an index in an index in an index")

    def _chosen(self, listed: list[Descriptor]) -> Descriptor:
        """Return the one image of a list, or the one for this machine's platform.

        Raises:
            ImageError: it lists several, and which one is meant is open.

        """
        real = _real(listed)
        images = list({each.digest: each for each in reversed(real)}.values())[::-1]  # one image can have several tags
        if len(images) > 1:
            # an engine saves the list of all platforms with the image of one of them
            images = [each for each in images if f"blobs/{each.digest.replace(':', '/')}" in self.places] or images
        if len(images) > 1:
            here = DEBIAN_ARCH.get(platform.machine(), platform.machine())
            images = [each for each in images if (each.platform.os, each.platform.architecture) == ("linux", here)]
            if len(images) != 1:
                what = f"{len(images)} of them" if images else "none of them"
                raise ImageError(f"it holds several images, {what} for linux/{here}: save one of them alone")
        return images[0]

    def _index(self) -> bytes:
        if "index.json" not in self.places:
            raise ImageError("it has no index.json: it is no OCI layout")
        with self._open("index.json") as file:
            return file.read(min(self.places["index.json"][1], _JSON_LIMIT + 1))

    @contextlib.contextmanager
    def layer(self, descriptor: Descriptor) -> Iterator[Readable]:
        """Yield a layer's tar.

        Raises:
            ImageError: it is damaged or missing, does not unpack, or is packed in an unknown way.
            HostError: `zstd` is missing.

        """
        with self.blob(descriptor) as blob, unpacked(blob, descriptor.media_type) as stream:
            yield stream

    def copy_to(self, folder: Path) -> "Held":
        """Write the image as an OCI layout into an empty folder, each blob compared with its digest; return which image it is.

        Raises:
            ImageError: a blob is damaged or missing, or of another shape.
            OSError: there is no room for it.

        """
        held = self.image()
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="utf-8")
        last = held.listing[-1]
        descriptor = {"mediaType": last.media_type, "digest": last.digest, "size": last.size}
        (folder / "index.json").write_text(
            json.dumps({"schemaVersion": 2, "manifests": [descriptor]}), encoding="utf-8"
        )
        for each in {d.digest: d for d in (last, held.manifest.config, *held.manifest.layers)}.values():
            with self.blob(each) as blob, (blobs / each.digest.removeprefix("sha256:")).open("xb") as out:
                while piece := blob.read(PIECE):
                    out.write(piece)
        return held


@dataclass(frozen=True, kw_only=True)
class Held:
    """The image that an archive or a layout holds."""

    digest: str
    """As its list names it: of the manifest, or of the list over its platforms."""
    listing: tuple[Descriptor, ...]
    """From the list down to the manifest."""
    manifest: Manifest
    body: Mapping[str, Any]
    """The manifest's own values."""
    made_by: ImageContent
    """The recipe and the release that built it, where its list states them: the word of who wrote the archive."""
    of_several: bool = False
    """Whether the digest is of a list that names other images, too, for other platforms."""


class Layout(Archive):
    """The blobs of an OCI layout in a folder; no link in it is followed."""

    def _places(self) -> dict[str, tuple[int, int]]:
        found = {}
        for inside in ("", "blobs/sha256"):
            with contextlib.suppress(OSError), os.scandir(self.path / inside) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        name = f"{inside}/{entry.name}" if inside else entry.name
                        found[name] = (0, entry.stat(follow_symlinks=False).st_size)
        return found

    def _open(self, name: str) -> IO[bytes]:
        try:
            return os.fdopen(open_below(self.path, name), "rb")
        except OutsideError as error:
            raise ImageError(f"the layout cannot be read: {error}") from None
