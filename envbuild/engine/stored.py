"""An image that BuildKit put into the engine's store: it is complete there, and has neither its name nor been unpacked.

`docker image load` does both. Where the store has all blobs, an archive that lists the image is enough: the engine checks
and writes again whatever an archive holds, and that is gigabytes of layers.
"""

import io
import json
import tarfile
from pathlib import Path

from envbuild.engine.image import StoredManifest
from envbuild.net.registry import parse_reference

_LAYOUT = {"imageLayoutVersion": "1.0.0"}


def write_listing(archive: Path, manifest: StoredManifest, tag: str) -> None:
    """Write an archive that lists an image of the engine's store and holds no blob.

    Args:
        archive: where it goes.
        manifest: the image's manifest.
        tag: the name that the image gets.

    Raises:
        UsageError: `tag` is no image reference.

    """
    ref = parse_reference(tag)
    names = {
        "io.containerd.image.name": f"{ref.repository}:{ref.tag}",
        "org.opencontainers.image.ref.name": ref.tag,
    }
    entry = {"mediaType": manifest.media_type, "digest": manifest.digest, "size": manifest.size, "annotations": names}
    index = {"schemaVersion": 2, "manifests": [entry]}
    with tarfile.open(archive, "w") as tar:
        for name, content in (("oci-layout", _LAYOUT), ("index.json", index)):
            body = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
