"""The SBOM and the provenance: those that are attached to an image, and those that a lock of others makes."""

import json
from typing import Any

IMAGE = "sha256:" + "1" * 64
LOCK = "sha256:" + "2" * 64
BUILDER = "urn:envbuild:key:sha256:" + "3" * 64
KINDS = ("sbom", "provenance")


def read(kind: str, body: bytes) -> None:
    """Read a document that somebody attached."""
    from envbuild.supply.attached import check_document

    check_document("sbom" if kind == "sbom" else "provenance", body, IMAGE, LOCK, {BUILDER}, where="here")


def write(locked: Any) -> None:
    """Write both documents of a lock."""
    for body in written(locked.lock).values():
        json.loads(body)


def written(lock: Any) -> dict[str, bytes]:
    """Return both documents of a lock, with the digests that `read` expects."""
    from envbuild.supply.inventory import inventory
    from envbuild.supply.sbom import sbom
    from envbuild.supply.slsa import provenance

    inputs = inventory(lock, {"te": {"sha256": "not a hash"}})
    statement = provenance(lock, inputs, image=IMAGE, layers=[IMAGE], builder=BUILDER)
    own = lock.digest.removeprefix("sha256:").encode()
    bodies = {"sbom": sbom(lock, inputs, image=IMAGE), "provenance": statement}
    return {kind: body.replace(own, LOCK.removeprefix("sha256:").encode()) for kind, body in bodies.items()}
