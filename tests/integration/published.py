"""Images written straight into a registry, byte by byte: what no build would make."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.request import Request, urlopen

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest_of(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was put: the digests of the manifest, the configuration and the layer."""

    manifest: str
    config: str
    layer: str


def member(name: str, body: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(body)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, body


def layer_of(members: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for info, body in members:
            tar.addfile(info, io.BytesIO(body))
    return stream.getvalue()


def _send(method: str, url: str, body: bytes, kind: str) -> str | None:
    request = Request(url, data=body, method=method, headers={"Content-Type": kind})
    with urlopen(request, timeout=20) as answer:
        return answer.headers.get("Location")


def _blob(base: str, body: bytes) -> dict[str, Any]:
    where = _send("POST", f"{base}/blobs/uploads/", b"", "application/octet-stream")
    digest = digest_of(body)
    _send("PUT", f"{where}{'&' if '?' in where else '?'}digest={digest}", body, "application/octet-stream")
    return {"digest": digest, "size": len(body)}


def publish(
    reference: str,
    members: Iterable[tuple[tarfile.TarInfo, bytes]],
    *,
    labels: Mapping[str, str],
    config: Mapping[str, Any] | None = None,
    diff_id: str | None = None,
    packed: bytes | None = None,
) -> Published:
    """Put an image of one layer under `reference` (HOST/PATH:TAG), without any engine."""
    repository, _, tag = reference.rpartition(":")
    host, _, path = repository.partition("/")
    base = f"http://{host}/v2/{path}"
    tar = layer_of(members)
    body = packed if packed is not None else gzip.compress(tar, mtime=0)
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Labels": dict(labels), **(config or {})},
        "rootfs": {"type": "layers", "diff_ids": [diff_id or digest_of(tar)]},
    }
    layer = _blob(base, body) | {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip"}
    described = _blob(base, json.dumps(settings).encode()) | {"mediaType": "application/vnd.oci.image.config.v1+json"}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": [layer]}).encode()
    _send("PUT", f"{base}/manifests/{tag}", manifest, MANIFEST)
    return Published(manifest=digest_of(manifest), config=described["digest"], layer=layer["digest"])
