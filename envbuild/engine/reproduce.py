"""Image -> the same image again: rebuild from the lock that the image carries, and compare byte by byte."""

import contextlib
import errno
import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.engine.build import Builder, Built, Change
from envbuild.engine.image_files import files_of_image
from envbuild.engine.layers import Contents, Entry, read_image
from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.lock.files import Locked, parse_lock
from envbuild.lock.make import Note
from envbuild.matrix.load import Matrix
from envbuild.plan.plan import plan_of
from envbuild.run.container import last_words
from envbuild.settings import Settings
from envbuild.stacks import stack_of_lock
from envbuild.util.names import shown
from envbuild.util.processes import Maker, bounded, uninterrupted
from envbuild.util.scratch import scratch

if TYPE_CHECKING:
    from python_on_whales import DockerClient

_IN_IMAGE = "/opt/envbuild"
# `pylock.SET.toml`; a set's name is a SafeName.
_LOCK_FILES = re.compile(r"lock\.json|pylock\.[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\.toml", re.ASCII)
_AGAIN = "envbuild-reproduce"
"""Repository of the rebuilds; the tag says which run made one."""
_LASTS_S = 2 * 86400.0
_SAVE_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One file that the two images do not share."""

    path: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a rebuild came to."""

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

    The image may be anybody's: nothing of it runs, and nothing but the files of a lock is read, up to a limit.

    Raises:
        HostError: the engine has no such image.
        UsageError: it carries no lock.
        LockError: its lock cannot be read, lacks hashes, or is not the one that its label names.

    """
    from python_on_whales.exceptions import DockerException

    try:
        found = client.image.inspect(image)
    except DockerException as error:
        raise HostError(
            f"the engine has no image {shown(image)}", hint="`docker image ls` lists what it has"
        ) from error
    label = ((found.config.labels if found.config else None) or {}).get("io.envbuild.lock")
    if label is None:
        raise UsageError(
            f"{shown(image)} carries no lock: envbuild did not build it",
            hint="name an image that `envbuild image` made",
        )
    files = files_of_image(client, found.id, _IN_IMAGE, _LOCK_FILES)  # by id: a name may move meanwhile
    if "lock.json" not in files:
        raise LockError(
            f"the image's label names a lock, and there is none in {_IN_IMAGE}",
            where=shown(image),
            hint="the image was changed after its build; do not use it",
        )
    try:
        locked = parse_lock(files["lock.json"], lambda name: _file_of(files, name), _IN_IMAGE)
    except (DataError, LockError) as error:
        raise LockError(
            f"the lock in the image cannot be read: {shown(error.what, 400)}",
            where=f"{shown(image)}: {shown(error.where or _IN_IMAGE)}",
            hint="the image was changed after its build; do not use it",
        ) from None
    if locked.lock.digest != label:
        raise LockError(
            f"the lock in the image has digest {locked.lock.digest}, its label says {shown(label)}",
            where=shown(image),
            hint="the image was changed after its build",
        )
    if not locked.lock.complete:
        raise LockError(
            "the image was built without a complete lock", where=shown(image), hint="lock its cell and build it again"
        )
    return locked


def _file_of(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return files[name]


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
    from python_on_whales.exceptions import DockerException

    try:
        digest = client.image.inspect(image).id  # from here on this image, whatever the tag names meanwhile
    except DockerException as error:
        raise HostError(f"the engine has no image {image}", hint="`docker image ls` lists what it has") from error
    locked = carried_lock(client, digest)
    stack = stack_of_lock(locked.lock.stack, stack_file) if locked.lock.stack else None
    plan = plan_of(matrix, locked, stack)
    builder = Builder(settings=settings, plan=plan, client=client, on_change=on_change, note=note, cache=False)
    with _own_tag(client) as tag:
        built: Built = builder.build(tag)
        differences = () if built.digest == digest else tuple(compare(client, digest, built.digest, names=(image, tag)))
    return Reproduction(digest=digest, again=built.digest, seconds=built.seconds, differences=differences)


@contextlib.contextmanager
def _own_tag(client: "DockerClient") -> Iterator[str]:
    """Yield a tag that no other run has; it goes at the end, and so do those of runs that SIGKILL ended."""
    remove_left_tags(client)
    tag = f"{_AGAIN}:{Maker.here(seconds=_LASTS_S)}-{uuid.uuid4().hex[:6]}"
    try:
        yield tag
    finally:
        _remove_tag(client, tag)


def remove_left_tags(client: "DockerClient") -> None:
    """Remove the tags of runs whose makers are gone."""
    listing = [*client.client_config.docker_cmd, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", _AGAIN]
    said = bounded([*map(str, listing)], seconds=60.0, limit=1 << 20)
    for line in said.out.decode("utf-8", "replace").splitlines():
        maker = Maker.parse(line.removeprefix(f"{_AGAIN}:").rpartition("-")[0])
        if maker is not None and maker.gone:
            _remove_tag(client, line)


def _remove_tag(client: "DockerClient", tag: str) -> None:
    with uninterrupted(), contextlib.suppress(OSError):
        bounded([*map(str, client.client_config.docker_cmd), "image", "rm", "--", tag], seconds=60.0, limit=1 << 20)


def compare(
    client: "DockerClient", one: str, other: str, *, names: tuple[str, str] | None = None
) -> Iterator[Difference]:
    """Yield what differs between two images of the engine: metadata first, then file by file.

    `names` are what the two are called in the answer.

    Raises:
        LockError: a blob of them is damaged, of another shape, or out of bounds.
        HostError: the engine does not hand an image over.

    """
    first, second = names or (one, other)
    with scratch("compare") as folder:
        found = []
        for number, (image, name) in enumerate(((one, first), (other, second))):
            archive = folder / f"{number}.tar"
            _save(client, image, archive)
            found.append(read_image(archive, name))
            archive.unlink()
    yield from differences_of(found[0], found[1], (first, second))


def _save(client: "DockerClient", image: str, archive: Path) -> None:
    command = [*map(str, client.client_config.docker_cmd), "image", "save", "--output", str(archive), "--", image]
    said = bounded(command, seconds=_SAVE_S, limit=1 << 20)
    if said.fault or said.code:
        last = said.fault or last_words(said.err.decode("utf-8", "replace"))
        raise HostError(f"the engine does not hand the image over: {shown(last)}", where=image)


def differences_of(one: Contents, other: Contents, names: tuple[str, str]) -> Iterator[Difference]:
    """Yield what differs between two images, called by `names`, fit for a terminal."""
    same = True
    for key in sorted(one.config.keys() | other.config.keys()):
        if one.config.get(key) != other.config.get(key) and key not in {"rootfs", "history"}:
            same = False
            values = " / ".join(shown(json.dumps(each.config.get(key), sort_keys=True), 150) for each in (one, other))
            yield Difference(path=f"(configuration) {shown(key)}", what=values)
    for path in sorted(one.files.keys() | other.files.keys()):
        before, after = one.files.get(path), other.files.get(path)
        if before == after:
            continue
        same = False
        if before is None or after is None:
            yield Difference(path=shown(path, 4096), what=f"only in {names[1] if before is None else names[0]}")
        else:
            fields = [(n, b, a) for n, b, a in zip(Entry._fields, before, after, strict=True) if b != a]
            what = ", ".join(f"{n} {shown(str(b))} / {shown(str(a))}" for n, b, a in fields)
            yield Difference(path=shown(path, 4096), what=what)
    if same and one.layers != other.layers:
        yield Difference(path="(layers)", what="the same files in layers that are packed or cut in another way")
