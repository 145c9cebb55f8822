"""SBOM and provenance of an image in a registry: attached as referrers, signed, and checked by a policy.

Each is an artifact whose subject is the image's manifest (OCI distribution specification 1.1, "Referrers"), and each
artifact's manifest is signed in cosign's format. So the image's digest stays, and a signature covers the document, its
type and the image that it is about. The list of referrers is a hint, as everything that a registry serves: what others put
there does not hide a good one, and does not count.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from envbuild.errors import HostError, LockError
from envbuild.registry.manifests import Descriptor, artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import Policy, require_signed, sign
from envbuild.registry.signers import Signer
from envbuild.supply import sbom, slsa
from envbuild.util.foreign_json import parse_json

Document = Literal["sbom", "provenance"]

TYPES: Mapping[Document, str] = {"sbom": sbom.MEDIA_TYPE, "provenance": slsa.MEDIA_TYPE}
WORDS: Mapping[Document, str] = {"sbom": "SBOM", "provenance": "provenance"}
LARGEST = 64 << 20
"""Bytes of a document; the SBOM of our largest image has 6 MiB."""
_SECONDS = 120.0
_TITLE = "org.opencontainers.image.title"
_FILES: Mapping[Document, str] = {"sbom": "sbom.cdx.json", "provenance": "provenance.intoto.json"}
_HINT = "do not use the image, and ask who publishes there; the setting trusted_documents asks for these documents"


def claims_of(document: Document) -> dict[str, str]:
    """Return what a signature of a document states."""
    return {"io.envbuild.document": document}


def attach(
    repository: Repository, image: Descriptor, document: Document, body: bytes, keys: Sequence[Signer]
) -> Descriptor:
    """Attach a document to an image that the registry holds, sign it, and return the descriptor of its manifest.

    The same document of the same image is attached once.

    Raises:
        HostError, LockError: as the methods of `Repository`.

    """
    blob = repository.push_blob(body, TYPES[document], annotations={_TITLE: _FILES[document]})
    pushed = repository.push_artifact(artifact_of(TYPES[document], [blob], subject=image))
    for key in keys:
        sign(repository, pushed.digest, key, claims=claims_of(document))
    return pushed


def require_attached(
    repository: Repository, image: str, lock: str, document: Document, policy: Policy
) -> tuple[str, ...]:
    """Return who signed a document of an image that is about just this image and this lock.

    Args:
        repository: where the image is.
        image: the digest of its manifest.
        lock: the digest of its lock.
        document: which one.
        policy: who may sign, and how many must.

    Raises:
        HostError: the registry cannot be reached, refuses, or takes too long.
        LockError: there is none, or none that is signed and says this.

    """
    where = f"{repository.name}@{image}"
    started, first = time.monotonic(), None
    for listed in repository.referrers(image, TYPES[document]):
        if time.monotonic() - started > _SECONDS:
            raise HostError(
                f"the registry takes over {_SECONDS:.0f} s to serve the documents of an image",
                where=where,
                hint="try again, or ask who runs the registry",
            )
        try:
            return _check(repository, image, lock, document, policy, listed)
        except LockError as error:
            first = first or error
    if first is None:
        raise LockError(f"the image has no {WORDS[document]} in the registry", where=where, hint=_HINT)
    raise LockError(
        f"the image has no {WORDS[document]} that is to be trusted: {first.what}",
        where=first.where or where,
        hint=_HINT,
    )


def _check(
    repository: Repository, image: str, lock: str, document: Document, policy: Policy, listed: Descriptor
) -> tuple[str, ...]:
    what, where = f"the {WORDS[document]}", f"{repository.name}@{listed.digest}"
    found = repository.artifact(listed.digest, TYPES[document], subject=image)
    if found is None:
        raise LockError(f"{what} is listed, and the registry does not hold it", where=where)
    signers = require_signed(repository, listed.digest, policy, what=what, claims=claims_of(document))
    blobs = found[1].blobs
    if len(blobs) != 1 or blobs[0].mediaType != TYPES[document]:
        raise LockError(f"{what} has another content", where=where)
    body = repository.read_blob(blobs[0], limit=LARGEST)
    builders = {each.builder for each in policy.verifiers if each.name in signers}
    check_document(document, body, image, lock, builders, where=where)
    return signers


def check_document(document: Document, body: bytes, image: str, lock: str, builders: set[str], *, where: str) -> None:
    """Check what a document states: that it is one, and about just this image and this lock.

    Args:
        document: which one it is to be.
        body: of it.
        image: the digest of the image's manifest.
        lock: the digest of its lock.
        builders: the ids of those who signed it.
        where: of the error.

    Raises:
        LockError: it states something else, or cannot be read.

    """
    what = f"the {WORDS[document]}"
    try:
        value: Any = parse_json(body, limit=LARGEST)
        _READERS[document](value, image, lock, builders)
    except (KeyError, TypeError, IndexError, AttributeError):
        raise LockError(f"{what} has another form", where=where) from None
    except ValueError as error:
        raise LockError(f"{what} {error}", where=where) from None


def _check_sbom(value: Any, image: str, lock: str, builders: set[str]) -> None:
    """Raise ValueError where an SBOM is about something else."""
    del builders
    if value["bomFormat"] != "CycloneDX":
        raise ValueError("is no CycloneDX document")
    stated = {each["name"]: each["value"] for each in value["metadata"]["component"]["properties"]}
    if stated.get(sbom.IMAGE) != image:
        raise ValueError(f"is about another image than {image}")
    if stated.get(sbom.LOCK) != lock:
        raise ValueError(f"is about another lock than {lock}")


def _check_provenance(value: Any, image: str, lock: str, builders: set[str]) -> None:
    """Raise ValueError where a statement is about something else, or names a builder who did not sign it."""
    if (value["_type"], value["predicateType"]) != (slsa.STATEMENT, slsa.PREDICATE):
        raise ValueError("is no statement of SLSA provenance")
    if [subject["digest"]["sha256"] for subject in value["subject"]] != [image.removeprefix("sha256:")]:
        raise ValueError(f"is about another image than {image}")
    definition = value["predicate"]["buildDefinition"]
    locks = [each["digest"]["sha256"] for each in definition["resolvedDependencies"] if each["name"] == slsa.LOCK]
    if locks != [lock.removeprefix("sha256:")] or definition["buildType"] != slsa.BUILD_TYPE:
        raise ValueError(f"is about another lock than {lock}")
    if value["predicate"]["runDetails"]["builder"]["id"] not in builders:
        raise ValueError("names a builder that did not sign it")


_READERS: Mapping[Document, Callable[[Any, str, str, set[str]], None]] = {
    "sbom": _check_sbom,
    "provenance": _check_provenance,
}
