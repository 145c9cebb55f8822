"""Images as an engine saves them, in the making: sound ones, and ones that are spoiled before they are written."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import zlib
from pathlib import Path

ZSTD, GZIP, PLAIN = (f"application/vnd.oci.image.layer.v1.tar{suffix}" for suffix in ("+zstd", "+gzip", ""))


def layer(*members: tuple[str, bytes | str | None], **fields) -> bytes:
    """Return a tar of files (bytes), links (text) and folders (None)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, content in members:
            info = tarfile.TarInfo(path)
            body = content if isinstance(content, bytes) else b""
            info.size = len(body)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            elif content is None:
                info.type = tarfile.DIRTYPE
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(body))
    return out.getvalue()


def packed(body: bytes, media_type: str) -> bytes:
    if media_type == ZSTD:
        return subprocess.run(["zstd", "-q", "-1"], input=body, capture_output=True, check=True).stdout
    return gzip.compress(body, 1) if media_type == GZIP else body


def _diff_id(media_type: str, body: bytes) -> str:
    """Return the digest of a layer's tar, which may be very large; nothing where it is spoiled."""
    if media_type == ZSTD:
        done = subprocess.run(["sh", "-c", "zstd -dcq | sha256sum"], input=body, capture_output=True, check=True)
        return f"sha256:{done.stdout.split()[0].decode()}"
    sha = hashlib.sha256()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(body)) if media_type == GZIP else io.BytesIO(body) as stream:
            while piece := stream.read(1 << 20):
                sha.update(piece)
    except (OSError, EOFError, zlib.error):
        return ""
    return f"sha256:{sha.hexdigest()}"


class Image:
    """An archive in the making; `blobs` and `index` can be spoiled before it is written."""

    def __init__(self, *layers: tuple[str, bytes], config=None) -> None:
        self.blobs: dict[str, bytes] = {}
        described = [self.blob(body, media_type) for media_type, body in layers]
        content = {"config": {}, **(config or {})}
        own = {"type": "layers", "diff_ids": [_diff_id(*each) for each in layers]}
        content["rootfs"] = own | content.get("rootfs", {})
        self.manifest = {"config": self.blob(json.dumps(content).encode()), "layers": described}
        self.index = {"manifests": [self.blob(json.dumps(self.manifest).encode())]}

    def blob(self, body: bytes, media_type: str = "application/json") -> dict:
        digest = hashlib.sha256(body).hexdigest()
        self.blobs[digest] = body
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(body)}

    def write(self, folder: Path, name: str = "image.tar") -> Path:
        files = {f"blobs/sha256/{digest}": body for digest, body in self.blobs.items()}
        body = self.index if isinstance(self.index, bytes) else json.dumps(self.index).encode()
        (folder / name).write_bytes(layer(*(files | {"index.json": body}).items()))
        return folder / name
