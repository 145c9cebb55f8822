"""Signatures over manifests in a registry, in cosign's format: who signed a digest, and whether that is enough.

A signature of the manifest `sha256:HEX` lies in the same repository under the tag `sha256-HEX.sig`: a manifest with a
blob per signature. The blob is a "simple signing" payload that names the digest; its signature, in base64, is an
annotation of its descriptor (cosign's SIGNATURE_SPEC.md). So `cosign verify --key` checks what is signed here, and what
cosign signed with a key counts here.

The tag and the manifest are hints, as everything that a registry serves: a signature counts only where a trusted key
signed the payload's bytes and the payload names the digest that was asked for.

A signature without a key of one's own (`keyless`, for CI) has the same layout, with sigstore's bundle as a further
annotation: certificate, signature and the transparency log's entry in one. Only the bundle is judged then.
"""

import base64
import binascii
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.errors import HostError, LockError
from envbuild.registry.manifests import MANIFEST, Artifact, Descriptor
from envbuild.registry.repository import Repository
from envbuild.registry.signers import Signature, Signer, Verifier
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import Digest, checked
from envbuild.util.text import count_of

PAYLOAD_TYPE = "application/vnd.dev.cosign.simplesigning.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
_SIGNATURE = "dev.cosignproject.cosign/signature"
_BUNDLE = "dev.sigstore.bundle/content"
_KIND = "cosign container image signature"
_LARGEST_PAYLOAD = 64 << 10
_MOST_SIGNATURES = 50
_SIGNATURES_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Who may sign, and how many of them must."""

    verifiers: Sequence[Verifier]
    needed: int = 1
    identities: bool = False
    """Whether some of them are no keys."""


def signature_tag(digest: str) -> str:
    """Return the tag of the signatures of `digest`."""
    return checked(Digest, digest).replace(":", "-") + ".sig"


def payload_of(repository: str, digest: str, claims: Mapping[str, str] | None = None) -> bytes:
    """Return what is signed for the manifest `digest`."""
    value = {
        "critical": {
            "identity": {"docker-reference": repository},
            "image": {"docker-manifest-digest": checked(Digest, digest)},
            "type": _KIND,
        },
        "optional": dict(claims or {}) or None,
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def signed_digest(payload: bytes) -> str:
    """Return the digest that a payload is about.

    Raises:
        ValueError: it is no payload of this kind.

    """
    value: Any = parse_json(payload, limit=_LARGEST_PAYLOAD)
    critical = value.get("critical") if isinstance(value, dict) else None
    image = critical.get("image") if isinstance(critical, dict) else None
    if not isinstance(critical, dict) or not isinstance(image, dict) or critical.get("type") != _KIND:
        raise ValueError("it is no simple signing payload")
    return checked(Digest, image.get("docker-manifest-digest"))


def claims_in(payload: bytes) -> Mapping[str, str]:
    """Return what a payload claims next to its digest; nothing where it cannot be read."""
    try:
        value: Any = parse_json(payload, limit=_LARGEST_PAYLOAD)
    except ValueError:
        return {}
    found = value.get("optional") if isinstance(value, dict) else None
    return {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}


def sign(
    repository: Repository,
    digest: str,
    signer: Signer,
    *,
    alone: bool = False,
    claims: Mapping[str, str] | None = None,
) -> None:
    """Sign the manifest `digest` of a repository, and keep the signatures of others.

    Args:
        repository: where the manifest is.
        digest: of the manifest.
        signer: signs.
        alone: whether nobody else knows the manifest yet, so that nobody else signs it at the same time.
        claims: what the signer states of the manifest, by name.

    Raises:
        HostError, LockError: as the methods of `Repository` and of the signer.

    """

    def is_signed() -> bool:
        return bool(signers(repository, digest, (signer.verifier,), claims=(claims,) if claims else ()))

    with contextlib.suppress(LockError):  # what is there cannot be read, so it counts for nobody
        if not alone and is_signed():  # so that a public log gets no second entry for nothing
            return
    payload = payload_of(repository.name, digest, claims)
    made = signer.signed(payload)
    annotations = {_SIGNATURE: base64.b64encode(made.signature).decode()}
    if made.bundle:
        annotations[_BUNDLE] = made.bundle
    blob = repository.push_blob(payload, PAYLOAD_TYPE, annotations=annotations)

    def added() -> bytes | None:
        try:
            if is_signed():
                return None
            held = _held(repository, digest)
        except LockError:
            held = ()  # what is there cannot be read, so it counts for nobody
        blobs = (*held[: _MOST_SIGNATURES - 1], blob)
        config = _config(blobs)
        described_config = repository.push_blob(config, CONFIG_TYPE)
        return Artifact(artifact_type=CONFIG_TYPE, config=described_config, blobs=blobs).body()

    if not alone:
        repository.change_tag(signature_tag(digest), added, MANIFEST)
    elif (body := added()) is not None:
        repository.push_manifest(body, MANIFEST, tag=signature_tag(digest))


def _config(blobs: Sequence[Descriptor]) -> bytes:
    """Return the config that makes the signatures' manifest an image in the eyes of older registries."""
    value = {
        "architecture": "",
        "config": {},
        "history": [],
        "os": "",
        "rootfs": {"type": "layers", "diff_ids": [blob.digest for blob in blobs]},
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _held(repository: Repository, digest: str) -> tuple[Descriptor, ...]:
    """Return the blobs of the signatures that the registry holds for `digest`."""
    found = repository.artifact(signature_tag(digest), CONFIG_TYPE)
    if found is None:
        return ()
    blobs = tuple(blob for blob in found[1].blobs if blob.mediaType == PAYLOAD_TYPE)
    if len(blobs) > _MOST_SIGNATURES:
        raise LockError(
            f"{digest} has {len(blobs)} signatures, and at most {_MOST_SIGNATURES} are looked at",
            where=f"{repository.name}:{signature_tag(digest)}",
            hint="have the tag deleted and the manifest signed again",
        )
    return blobs


def signers(
    repository: Repository,
    digest: str,
    verifiers: Sequence[Verifier],
    *,
    claims: Sequence[Mapping[str, str]] = (),
    needed: int | None = None,
) -> tuple[str, ...]:
    """Return the names of those among `verifiers` who signed the manifest `digest`, in their order.

    One that cannot judge here, as an identity without its trusted root, counts for nobody where the others are enough.

    Args:
        repository: where the manifest is.
        digest: of the manifest.
        verifiers: whose signatures count.
        claims: what a signature must state to count, all of one of these; by default any counts.
        needed: how many are enough; by default each must be judged.

    Raises:
        HostError: the registry cannot be reached or refuses, or too few are found and one cannot judge.
        LockError: it serves something else than signatures.

    """
    found: set[str] = set()
    unable: dict[str, HostError] = {}
    started = time.monotonic()
    for blob in _held(repository, digest):
        if time.monotonic() - started > _SIGNATURES_S:
            raise HostError(
                f"the registry takes over {_SIGNATURES_S:.0f} s to serve the signatures of {digest}",
                where=f"{repository.name}:{signature_tag(digest)}",
                hint="try again, or ask who runs the registry",
            )
        signature = _read(repository, blob)
        if signature is None:
            continue
        stated = claims_in(signature.payload).items()
        if not _names(signature.payload, digest) or (claims and not any(each.items() <= stated for each in claims)):
            continue
        for each in verifiers:
            if each.name in found or each.name in unable:
                continue
            try:
                if each.accepts(signature):
                    found.add(each.name)
            except HostError as error:
                unable[each.name] = error
    if unable and len(found) < (len(verifiers) if needed is None else needed):
        raise next(iter(unable.values()))
    return tuple(each.name for each in verifiers if each.name in found)


def _names(payload: bytes, digest: str) -> bool:
    try:
        return signed_digest(payload) == digest
    except ValueError:
        return False


def _read(repository: Repository, blob: Descriptor) -> Signature | None:
    """Return a signature, or None where what is there is none: somebody else's damage must not hide a good one."""
    try:
        raw = base64.b64decode(blob.annotations.get(_SIGNATURE, ""), validate=True)
    except (binascii.Error, ValueError):
        return None
    if not raw:
        return None
    try:
        payload = repository.read_blob(blob, limit=_LARGEST_PAYLOAD)
    except LockError:
        return None
    return Signature(payload=payload, signature=raw, bundle=blob.annotations.get(_BUNDLE, ""))


def require_signed(
    repository: Repository, digest: str, policy: Policy, *, what: str, claims: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return who signed the manifest `digest`, by the policy.

    Args:
        repository: where the manifest is.
        digest: of the manifest.
        policy: who may sign, and how many must.
        what: of the error: what the manifest is.
        claims: what a signature must state to count; by default any counts.

    Raises:
        LockError: it is not signed, or not by enough of those who may.
        HostError: the registry cannot be reached or refuses, or too few are found and one of those who may cannot be judged.

    """
    found = signers(repository, digest, policy.verifiers, claims=(claims,) if claims else (), needed=policy.needed)
    if len(found) >= policy.needed:
        return found
    trusted = ", ".join(each.name for each in policy.verifiers)
    if found:
        why = f"is signed by {', '.join(found)}, and {count_of(policy.needed, 'signature is', 'signatures are')} needed"
    elif _held(repository, digest):
        why = (
            "is signed by none of the trusted keys and identities"
            if policy.identities
            else "is signed by none of the trusted keys"
        )
    else:
        why = "is not signed"
    raise LockError(
        f"{what} {why}",
        where=f"{repository.name}@{digest}",
        hint=f"do not use it, and ask who publishes there; the settings trust {trusted or 'no key'} (trusted_keys)",
    )
