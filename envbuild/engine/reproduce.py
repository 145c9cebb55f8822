"""Image -> the same image again: rebuild from the lock in the image, and compare byte by byte."""

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from envbuild.engine.build import Builder, Change
from envbuild.engine.built import Built
from envbuild.engine.client import EngineClient
from envbuild.engine.details import Details
from envbuild.engine.image_files import files_of_image
from envbuild.engine.layers import Contents, Entry, read_image
from envbuild.engine.own_tags import REBUILT, own_tag
from envbuild.errors import DataError, LockError, UsageError
from envbuild.lock.files import Locked, parse_lock
from envbuild.lock.make import Note
from envbuild.matrix.load import Matrix
from envbuild.plan.plan import Plan, plan_of
from envbuild.stacks.load import stack_of_lock
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

_IN_IMAGE = "/opt/envbuild"
# `pylock.SET.toml`; a set's name is a SafeName.
_LOCK_FILES = re.compile(r"lock\.json|pylock\.[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\.toml", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One file that the two images do not share."""

    path: str
    what: str


COMPRESSION = Difference(path="(layers)", what="the same layers, compressed in another way")
"""What differs where another engine's compressor packed the very same layers: what the lock makes is the same."""


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

    @property
    def same_layers(self) -> bool:
        """Whether both images have the same layers and the same configuration, however their layers are compressed."""
        return self.equal or self.differences == (COMPRESSION,)


def carried_lock(client: EngineClient, image: str) -> Locked:
    """Return the lock that `image` carries, checked against its label.

    The image is not trusted: nothing of it runs, and nothing but the files of a lock is read, up to a limit.

    Raises:
        HostError: the engine has no such image.
        UsageError: it carries no lock.
        LockError: its lock cannot be read, has no hashes, or is not the one that its label names.

    """
    found = client.image(image)
    label = found.labels.get("io.envbuild.lock")
    if label is None:
        raise UsageError(
            f"{shown(image)} contains no lock: envbuild did not build it",
            hint="name an image that `envbuild image` made",
        )
    files = files_of_image(client, found, _IN_IMAGE, _LOCK_FILES)
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
    client: EngineClient,
    matrix: Matrix,
    image: str,
    *,
    stack_file: str | None = None,
    on_change: Change,
    note: Note,
    details: Details | None = None,
    planned: Callable[[Plan], object] = lambda _: None,
) -> Reproduction:
    """Rebuild `image` from its own lock, without the build cache, and compare.

    Args:
        client: the engine that holds it.
        matrix: the matrix.
        image: its name.
        stack_file: the file of a user's own stack, which the lock names and does not hold.
        on_change: takes the name of a stage and what became of it.
        note: takes a line about what is done.
        details: takes what running stages print and how far they are.
        planned: takes the plan, before it is built.

    Raises:
        UsageError: the lock's stack is a user's own and `stack_file` is not its file.
        LockError: an input is gone or is not what the lock names.
        BuildError: a stage failed.

    """
    digest = client.image(image).id  # from here on this image, whatever the tag names meanwhile
    locked = carried_lock(client, digest)
    stack = stack_of_lock(locked.lock.stack, stack_file) if locked.lock.stack else None
    plan = plan_of(matrix, locked, stack)
    planned(plan)
    builder = Builder(
        client=client, plan=plan, on_change=on_change, note=note, details=details or Details(), cache=False
    )
    with own_tag(client, REBUILT) as tag:
        built: Built = builder.build(tag)
        if built.digest != digest:
            note("another digest: comparing the files of both images")
        differences = () if built.digest == digest else tuple(compare(client, digest, built.digest, names=(image, tag)))
    return Reproduction(digest=digest, again=built.digest, seconds=built.seconds, differences=differences)


def compare(
    client: EngineClient, one: str, other: str, *, names: tuple[str, str] | None = None
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
            client.save(image, archive)
            found.append(read_image(archive, name))
            archive.unlink()
    yield from differences_of(found[0], found[1], (first, second))


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
    if same and one.layers != other.layers and one.diff_ids == other.diff_ids:
        yield COMPRESSION
    elif same and one.layers != other.layers:
        yield Difference(path="(layers)", what="the same files in layers that are packed or cut in another way")
