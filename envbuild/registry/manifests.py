"""The manifests of artifacts and indexes, by the OCI image specification 1.1: bytes in, checked values out."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from envbuild.util.model import AfterValidator, Field, Model
from envbuild.util.names import Digest, shown
from envbuild.util.oci_json import parse_oci
from envbuild.util.patterns import pattern

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"

LARGEST_MANIFEST = 4 << 20
"""Bytes. Registries need not take more (OCI distribution specification 1.1, "Pushing manifests")."""

_MOST_BLOBS = 1000
_MOST_REFERRERS = 1000
_MOST_ANNOTATIONS = 100
_LONGEST_ANNOTATION = 16384  # a signature's certificate chain is an annotation

# RFC 6838, 4.2
_MEDIA_TYPE = pattern(r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}")


def _check_media_type(value: str) -> str:
    if not _MEDIA_TYPE.fullmatch(value):
        raise ValueError(f"{shown(value, 80)!r} is not a media type")
    return value


def _check_annotations(value: dict[str, str]) -> dict[str, str]:
    if len(value) > _MOST_ANNOTATIONS:
        raise ValueError(f"more than {_MOST_ANNOTATIONS} annotations")
    for name, text in value.items():
        if not name or len(name) > 256 or not name.isprintable() or len(text) > _LONGEST_ANNOTATION:
            raise ValueError(f"the annotation {shown(name, 80)!r} is too long, or has no name")
    return value


MediaType = Annotated[str, AfterValidator(_check_media_type)]


class Descriptor(Model):
    """What names a blob or a manifest: its type, its digest, its size in bytes."""

    mediaType: MediaType  # noqa: N815 - the specification's name
    digest: Digest
    size: int = Field(ge=0, le=1 << 40)
    annotations: dict[str, str] = {}
    artifactType: MediaType | None = None  # noqa: N815 - the specification's name

    def plain(self) -> dict[str, Any]:
        """Return it as values of JSON, without what is empty."""
        return {name: value for name, value in self.model_dump(mode="json").items() if value not in (None, {})}


EMPTY_CONFIG = b"{}"


def described(body: bytes, media_type: str, *, annotations: Mapping[str, str] | None = None) -> Descriptor:
    """Return the descriptor of `body`."""
    digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
    return Descriptor(mediaType=media_type, digest=digest, size=len(body), annotations=dict(annotations or {}))


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A manifest: what kind of thing it is, what it consists of, and what it is about."""

    artifact_type: str
    config: Descriptor
    blobs: tuple[Descriptor, ...]
    """Its `layers`."""
    subject: Descriptor | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the manifest's bytes, the same for the same values."""
        value: dict[str, Any] = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.config.plain(),
            "layers": [blob.plain() for blob in self.blobs],
        }
        if self.artifact_type != self.config.mediaType:
            value["artifactType"] = self.artifact_type
        if self.subject is not None:
            value["subject"] = self.subject.plain()
        if self.annotations:
            value["annotations"] = dict(self.annotations)
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def typed(descriptor: Descriptor, artifact_type: str) -> Descriptor:
    """Return a descriptor that says which artifact it is of."""
    return descriptor.model_copy(update={"artifactType": artifact_type})


def empty_config() -> Descriptor:
    """Return the descriptor of the config of an artifact that has none."""
    return described(EMPTY_CONFIG, EMPTY_TYPE)


def artifact_of(
    artifact_type: str,
    blobs: Sequence[Descriptor],
    *,
    subject: Descriptor | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Artifact:
    """Return an artifact without a config."""
    return Artifact(
        artifact_type=artifact_type,
        config=empty_config(),
        blobs=tuple(blobs) or (empty_config(),),
        subject=subject and bare(subject),
        annotations=dict(annotations or {}),
    )


def bare(descriptor: Descriptor) -> Descriptor:
    """Return a descriptor without annotations: type, digest and size, as a subject is written."""
    return Descriptor(mediaType=descriptor.mediaType, digest=descriptor.digest, size=descriptor.size)


def read_artifact(body: bytes) -> Artifact:
    """Return the artifact whose manifest is `body`.

    A manifest without `artifactType` is of its config's type (specification, "Guidelines for Artifact Usage").

    Raises:
        ValueError: it is no manifest of an image or an artifact.

    """
    value = _object(body)
    if value.get("schemaVersion") != 2 or value.get("mediaType", MANIFEST) != MANIFEST:
        raise ValueError("it is no OCI image manifest")
    config = _descriptor(value.get("config"), "config")
    layers = value.get("layers")
    if not isinstance(layers, list) or len(layers) > _MOST_BLOBS:
        raise ValueError(f"its layers are no list of at most {_MOST_BLOBS}")
    kind = value.get("artifactType")
    subject = value.get("subject")
    return Artifact(
        artifact_type=_media_type(kind) if kind else config.mediaType,
        config=config,
        blobs=tuple(_descriptor(each, "a layer") for each in layers),
        subject=None if subject is None else _descriptor(subject, "subject"),
        annotations=_annotations(value.get("annotations")),
    )


def read_referrers(body: bytes) -> tuple[Descriptor, ...]:
    """Return the manifests that an index lists.

    Raises:
        ValueError: it is no index.

    """
    value = _object(body)
    listed = value.get("manifests")
    if value.get("schemaVersion") != 2 or value.get("mediaType", INDEX) != INDEX or not isinstance(listed, list):
        raise ValueError("it is no OCI image index")
    if len(listed) > _MOST_REFERRERS:
        raise ValueError(f"it lists more than {_MOST_REFERRERS} manifests")
    return tuple(_descriptor(each, "a manifest") for each in listed)


def index_body(manifests: tuple[Descriptor, ...]) -> bytes:
    """Return an index of `manifests`."""
    value = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [each.plain() for each in manifests]}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _object(body: bytes) -> dict[str, Any]:
    value = parse_oci(body, limit=LARGEST_MANIFEST)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - the value is wrong, not its use
    return value


def _descriptor(value: Any, what: str) -> Descriptor:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is no descriptor")  # noqa: TRY004 - the value is wrong, not its use
    known = {name: value[name] for name in Descriptor.model_fields if value.get(name) is not None}
    if isinstance(known.get("size"), bool | float):
        raise ValueError(f"the size of {what} is no whole number")  # noqa: TRY004
    try:
        found = Descriptor.model_validate(known)
        _check_annotations(found.annotations)
    except ValueError as error:
        raise ValueError(f"{what} cannot be read: {_first(error)}") from None
    return found


def _first(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return shown(f"{place}: {first['msg'].removeprefix('Value error, ')}")


def _media_type(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("artifactType is no text")  # noqa: TRY004
    return _check_media_type(value)


def _annotations(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("its annotations are no texts")
    return _check_annotations(value)
