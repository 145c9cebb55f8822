"""What the engine reports of an untrusted image: bytes in, values out."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from envbuild.evidence.content import MOST_LAYERS, ImageContent
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import Digest

LIMIT = 16 << 20
"""Bytes that the engine may say of one image."""

# What a container of it starts with: the fields of OCI's image configuration, and the three that Docker adds.
_RUNS = (
    *("Cmd", "Entrypoint", "Env", "ExposedPorts", "Labels", "StopSignal", "User", "Volumes", "WorkingDir"),
    *("Healthcheck", "OnBuild", "Shell"),
)


class _Config(BaseModel):
    labels: dict[str, str] | None = Field(None, alias="Labels")
    volumes: dict[str, Any] | None = Field(None, alias="Volumes")
    environment: list[str] | None = Field(None, alias="Env")


class _Descriptor(BaseModel):
    media_type: str = Field("", alias="mediaType", max_length=128)
    digest: Digest
    size: int = Field(0, ge=0)


class _Root(BaseModel):
    layers: list[Digest] | None = Field(None, alias="Layers", max_length=MOST_LAYERS)


class _Inspected(BaseModel):
    id: Digest = Field(alias="Id")
    config: _Config | None = Field(None, alias="Config")
    descriptor: _Descriptor | None = Field(None, alias="Descriptor")
    size: int = Field(0, alias="Size", ge=0)
    repo_digests: list[str] | None = Field(None, alias="RepoDigests")
    os: str = Field("", alias="Os", max_length=64)
    architecture: str = Field("", alias="Architecture", max_length=64)
    root: _Root | None = Field(None, alias="RootFS")


@dataclass(frozen=True, kw_only=True)
class StoredManifest:
    """The manifest of an image, as an index lists it."""

    media_type: str
    digest: str
    size: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image of the engine, as it was when it was looked up; a tag may name another a moment later."""

    reference: str
    """What the user named."""
    id: str
    """What the engine runs, whatever the tag names by then."""
    digest: str
    """The manifest's digest; the id where the engine keeps no manifests."""
    size: int
    """Bytes that the engine keeps of it."""
    labels: dict[str, str]
    volumes: tuple[str, ...]
    """Paths where a container gets a volume instead of what the image has there."""
    environment: tuple[str, ...]
    """Variables of its processes, each `NAME=value`."""
    repo_digests: tuple[str, ...]
    """`repository@digest` of each registry that the engine knows it from."""
    platform: str = ""
    """The platform that it is for, e.g. linux/arm64; empty where it states none."""
    manifest: StoredManifest | None = None
    """The image's manifest, where the engine describes it: Docker does since 28."""
    layers: tuple[str, ...] = ()
    """Digest of each layer, uncompressed, the lowest first: what the image is, however it was packed."""
    config: str = ""
    """Digest of how a container of it starts, and for which platform: environment, entry point, user and so on. Engines write
    a field without a value in several ways, so that it is not the digest of the configuration's blob."""
    place: Path | None = None
    """The folder or the .sif that a runtime without an engine runs; None for an image of the engine."""
    confirmed_by: Literal["engine", "blobs", "label"] = "engine"
    """Where the digest comes from: the engine's store; blobs that were compared with it as they were unpacked here; a label of the
    sandbox or .sif, which whoever made it wrote."""
    recipe: str | None = None
    """The recipe that built it, where the archive that it comes from states one; see `ImageContent`."""
    release: str | None = None
    """Likewise the release."""

    @property
    def content(self) -> ImageContent:
        """What it is, however its layers are compressed."""
        return ImageContent(layers=self.layers, config=self.config or None)


def parse_image_facts(body: bytes, reference: str) -> Image:
    """Read what `docker image inspect` prints of one image.

    Raises:
        ValueError: it has another shape.

    """
    return image_from(parse_json(body, limit=LIMIT), reference)


def image_from(found: object, reference: str) -> Image:
    """Return the one image that an engine describes, from its parsed answer.

    Raises:
        ValueError: it has another shape.

    """
    if not isinstance(found, list) or len(found) != 1:
        raise ValueError("not one image")
    try:
        facts = _Inspected.model_validate(found[0])
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    stored = facts.descriptor
    config = facts.config or _Config.model_validate({})
    return Image(
        reference=reference,
        id=facts.id,
        digest=stored.digest if stored else facts.id,
        size=facts.size,
        labels=config.labels or {},
        volumes=tuple(sorted(config.volumes or ())),
        environment=tuple(config.environment or ()),
        repo_digests=tuple(facts.repo_digests or ()),
        platform=f"{facts.os or 'linux'}/{facts.architecture}" if facts.architecture else "",
        manifest=StoredManifest(media_type=stored.media_type, digest=stored.digest, size=stored.size)
        if stored and stored.media_type and stored.size
        else None,
        layers=tuple((facts.root.layers if facts.root else None) or ()),
        config=_config_digest(found[0]),
    )


def _config_digest(stated: Mapping[str, Any]) -> str:
    config = stated.get("Config") or {}
    value = {name: config[name] for name in _RUNS if config.get(name) not in (None, "", [], {})}
    whole = {"config": value, "os": stated.get("Os") or "linux", "architecture": stated.get("Architecture")}
    return f"sha256:{hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()}"


def stated_content(config: object) -> ImageContent:
    """Return what an image states to be in the blob of its configuration: its layers, and how a container of it starts.

    Args:
        config: the blob, parsed.

    Raises:
        ValueError: it has another shape.

    """
    try:
        stated = _Stated.model_validate(config)
    except ValidationError as error:
        raise ValueError(_first(error)) from None
    assert isinstance(config, dict)  # noqa: S101 - or it would not be valid
    as_inspected = {"Config": config.get("config"), "Os": stated.os, "Architecture": stated.architecture}
    layers = tuple(stated.rootfs.diff_ids or ()) if stated.rootfs else ()
    return ImageContent(layers=layers, config=_config_digest(as_inspected))


def _first(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


class _Files(BaseModel):
    diff_ids: list[Digest] | None = Field(None, max_length=MOST_LAYERS)


class _Stated(BaseModel):
    """An image's configuration, as its blob holds it."""

    config: _Config | None = None
    rootfs: _Files | None = None
    os: str = Field("", max_length=64)
    architecture: str = Field("", max_length=64)


class Label(BaseModel):
    """What a sandbox or a .sif states of the image that it was made from."""

    digest: Digest
    size: int = Field(0, ge=0)
    config: dict[str, Any] = {}


def image_of(label: Label, *, reference: str, place: Path, confirmed_by: Literal["blobs", "label"]) -> Image:
    """Return the image that a folder or a .sif holds.

    Args:
        label: its digest and its configuration.
        reference: what the user named.
        place: the folder or the .sif.
        confirmed_by: where the digest comes from.

    Raises:
        ValueError: the configuration has another shape.

    """
    content = stated_content(label.config)
    stated = _Stated.model_validate(label.config)
    config = stated.config or _Config.model_validate({})
    return Image(
        reference=reference,
        id=label.digest,
        digest=label.digest,
        size=label.size,
        labels=config.labels or {},
        volumes=tuple(sorted(config.volumes or ())),
        environment=tuple(config.environment or ()),
        repo_digests=(),
        platform=f"{stated.os or 'linux'}/{stated.architecture}" if stated.architecture else "",
        layers=content.layers,
        config=content.config or "",
        place=place,
        confirmed_by=confirmed_by,
    )
