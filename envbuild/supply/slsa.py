"""Provenance in SLSA's format, version 1: which machine built an image, from which lock and from which inputs.

It is an in-toto statement about the image's digest (slsa.dev/spec/v1.0/provenance). The lock is the first of the resolved
dependencies; the others are its inputs, each by hash. The builder is who signs: `urn:envbuild:key:sha256:…` of the
public key in DER, or the identity of a CI job. What the builder states is as good as the word of who can sign so.
"""

import json
from collections.abc import Sequence
from typing import Any

from envbuild import __version__
from envbuild.lock.model import Lock
from envbuild.supply.inventory import Input

MEDIA_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://github.com/envbuild/envbuild/blob/main/docs/reference/supply.md#build-type-1"
LOCK = "lock"
"""The name of the lock among the resolved dependencies."""
LAYERS = "layers"
"""The name of a by-product: the digests of the image's layers, uncompressed."""


def provenance(
    lock: Lock,
    inputs: tuple[Input, ...],
    *,
    image: str,
    layers: Sequence[str],
    builder: str,
    wheels_from: str | None = None,
) -> bytes:
    """Return the provenance of an image that this machine built; the same for the same image and builder.

    Args:
        lock: what it was built from.
        inputs: of the lock.
        image: the digest of its manifest.
        layers: the digests of its layers, uncompressed, the lowest first.
        builder: who built it, as `Verifier.builder` names it.
        wheels_from: where compiled wheels came from, if not from this machine.

    """
    dependencies: list[dict[str, Any]] = [
        {"name": LOCK, "uri": f"urn:envbuild:lock:{lock.digest}", "digest": {"sha256": _hex(lock.digest)}}
    ]
    dependencies += [found for each in inputs if (found := _dependency(each)) is not None]
    external: dict[str, Any] = {"cell": lock.as_cell.id, "flavor": lock.flavor, "lock": lock.digest}
    if lock.stack:
        external["stack"] = lock.stack
    internal = {"compiledWheelsFrom": wheels_from} if wheels_from else {}
    value = {
        "_type": STATEMENT,
        "subject": [{"name": lock.as_cell.id, "digest": {"sha256": _hex(image)}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": external,
                "internalParameters": internal,
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": builder, "version": {"envbuild": __version__}},
                "metadata": {"invocationId": f"urn:envbuild:lock:{lock.digest}"},
                "byproducts": [
                    {"name": f"{LAYERS}/{number}", "digest": {"sha256": _hex(layer)}}
                    for number, layer in enumerate(layers)
                ],
            },
        },
    }
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def _dependency(each: Input) -> dict[str, Any] | None:
    """Return an input as in-toto's ResourceDescriptor; None for what the build itself makes."""
    if each.kind in {"envbuild", "compiled-wheel"}:
        return None
    value: dict[str, Any] = {"name": each.ref, "annotations": {"kind": each.kind, "inImage": each.in_image}}
    if "://" in each.uri:
        value["uri"] = f"git+{each.uri}@{each.commit}" if each.commit else each.uri
    if each.commit:
        value["digest"] = {"gitCommit": each.commit} | ({"gitTree": each.tree} if each.tree else {})
    elif len(each.sha256) == 1:
        value["digest"] = {"sha256": each.sha256[0]}
    elif each.sha256:
        value["annotations"]["sha256Any"] = list(each.sha256)
    return value


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
