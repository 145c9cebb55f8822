"""Image -> the same image again: rebuild from the lock that the image carries, and compare byte by byte."""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from envbuild.engine.build import Builder, Built, Change
from envbuild.engine.leftovers import LABEL, mark
from envbuild.errors import HostError, LockError, UsageError
from envbuild.lock.make import Locked, Note, read_lock
from envbuild.matrix.load import Matrix
from envbuild.plan.plan import plan_of
from envbuild.settings import Settings
from envbuild.stacks import stack_of_lock
from envbuild.util.scratch import scratch

if TYPE_CHECKING:
    from python_on_whales import DockerClient

_IN_IMAGE = "/opt/envbuild"
_AGAIN = "envbuild-reproduce:again"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One file that the two images do not share."""

    path: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a rebuild came to."""

    image: str
    digest: str
    again: str
    seconds: float
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether both images have one digest."""
        return self.digest == self.again


def carried_lock(client: "DockerClient", image: str) -> Locked:
    """Return the lock that `image` carries, checked against its label.

    Raises:
        HostError: the engine has no such image.
        UsageError: it carries no lock.
        LockError: its lock is not the one that its label names.

    """
    from python_on_whales.exceptions import DockerException

    try:
        labels = client.image.inspect(image).config.labels or {}
    except DockerException as error:
        raise HostError(f"the engine has no image {image}", hint="`docker image ls` lists what it has") from error
    label = labels.get("io.envbuild.lock")
    if label is None:
        raise UsageError(
            f"{image} carries no lock: envbuild did not build it", hint="name an image that `envbuild image` made"
        )
    with scratch("lock") as folder:
        container = client.container.create(image, labels={LABEL: mark().partition("=")[2]})
        try:
            client.container.copy((container, _IN_IMAGE), str(folder))
        finally:
            client.container.remove(container, force=True)
        locked = read_lock(folder / "envbuild")
    if locked.lock.digest != label:
        raise LockError(
            f"the lock in the image has digest {locked.lock.digest}, its label says {label}",
            where=image,
            hint="the image was changed after its build",
        )
    if not locked.lock.complete:
        raise LockError(
            "the image was built without a complete lock", where=image, hint="lock its cell and build it again"
        )
    return locked


def reproduce(
    settings: Settings,
    matrix: Matrix,
    client: "DockerClient",
    image: str,
    *,
    stack_file: str | None = None,
    on_change: Change,
    note: Note,
) -> Reproduction:
    """Rebuild `image` from its own lock, every step anew, and compare.

    `stack_file` is the file of a user's own stack, which the lock names and does not hold.

    Raises:
        UsageError: the lock's stack is a user's own and `stack_file` is not its file.
        LockError: an input is gone or is not what the lock names.
        BuildError: a stage failed.

    """
    locked = carried_lock(client, image)
    stack = stack_of_lock(locked.lock.stack, stack_file) if locked.lock.stack else None
    plan = plan_of(matrix, locked, stack)
    digest = client.image.inspect(image).id
    builder = Builder(settings=settings, plan=plan, client=client, on_change=on_change, note=note, cache=False)
    built: Built = builder.build(_AGAIN)
    try:
        differences = () if built.digest == digest else tuple(compare(client, image, _AGAIN))
    finally:
        client.image.remove(_AGAIN)
    return Reproduction(image=image, digest=digest, again=built.digest, seconds=built.seconds, differences=differences)


def compare(client: "DockerClient", one: str, other: str) -> Iterator[Difference]:
    """Yield what differs between two images of the engine: metadata first, then file by file."""
    with scratch("compare") as folder:
        found = []
        for number, image in enumerate((one, other)):
            archive = folder / f"{number}.tar"
            client.image.save(image, output=str(archive))
            found.append(_contents(archive))
            archive.unlink()
        (config_one, files_one), (config_other, files_other) = found
        for key in sorted(config_one.keys() | config_other.keys()):
            if config_one.get(key) != config_other.get(key) and key not in {"rootfs", "history"}:
                yield Difference(
                    path=f"(configuration) {key}", what=f"{config_one.get(key)} / {config_other.get(key)}"[:300]
                )
        for path in sorted(files_one.keys() | files_other.keys()):
            before, after = files_one.get(path), files_other.get(path)
            if before is None or after is None:
                yield Difference(path=path, what=f"only in {other if before is None else one}")
            elif before != after:
                names = [name for name in before if before[name] != after[name]]
                yield Difference(path=path, what=", ".join(f"{name} {before[name]} / {after[name]}" for name in names))


def _contents(archive: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return an image's configuration and, by path, each file's content hash and metadata, upper layers winning."""
    files: dict[str, dict[str, Any]] = {}
    with tarfile.open(archive) as outer:

        def blob(digest: str) -> IO[bytes]:
            body = outer.extractfile(f"blobs/{digest.replace(':', '/')}")
            assert body is not None  # noqa: S101
            return body

        manifest: dict[str, Any] = json.load(outer.extractfile("index.json") or io.BytesIO(b"{}"))["manifests"][0]
        body = json.load(blob(manifest["digest"]))
        if "manifests" in body:  # an index over one platform
            body = json.load(blob(body["manifests"][0]["digest"]))
        config: dict[str, Any] = json.load(blob(body["config"]["digest"]))
        for layer in body["layers"]:
            with _layer(blob(layer["digest"]), layer["mediaType"]) as tar:
                for member in tar:
                    files[member.name] = _facts(tar, member)
    return config, files


def _layer(stream: IO[bytes], media_type: str) -> tarfile.TarFile:
    if media_type.endswith("zstd"):
        import subprocess

        # Python gets zstd in 3.14; the host's tool is already needed for the export.
        process = subprocess.run(["zstd", "-dcq"], input=stream.read(), capture_output=True, check=True)
        return tarfile.open(fileobj=io.BytesIO(process.stdout))
    return tarfile.open(fileobj=stream, mode="r|*" if media_type.endswith("gzip") else "r|")


def _facts(tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    body = tar.extractfile(member) if member.isreg() else None
    return {
        "sha256": hashlib.sha256(body.read()).hexdigest()[:16] if body else None,
        "mode": oct(member.mode),
        "owner": f"{member.uid}:{member.gid}",
        "mtime": member.mtime,
        "link": member.linkname,
    }
