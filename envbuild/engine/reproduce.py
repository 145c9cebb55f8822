"""Image -> the same image again: rebuild from the lock in the image, and compare byte by byte."""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.engine.build import Builder, Change
from envbuild.engine.built import Built
from envbuild.engine.client import EngineClient
from envbuild.engine.details import Details
from envbuild.engine.image_files import files_of_image
from envbuild.engine.layers import Contents, Entry, read_image
from envbuild.engine.originals import (
    IN_IMAGE,
    LABEL,
    LOCK_FILES,
    NOT_COMPARED,
    From,
    Original,
    added,
    as_unpacked,
    checked_lock,
)
from envbuild.engine.own_tags import REBUILT, own_tag
from envbuild.lock.files import Locked
from envbuild.lock.make import Note
from envbuild.matrix.load import Matrix
from envbuild.plan.plan import Plan, plan_of
from envbuild.stacks.load import stack_of_lock
from envbuild.util.names import shown
from envbuild.util.scratch import scratch


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One file that the two images do not share."""

    path: str
    what: str


COMPRESSION = Difference(path="(layers)", what="the same layers, compressed in another way")
"""What differs where another engine's compressor packed the very same layers: what the lock makes is the same."""

LIST = Difference(path="(list)", what="the digest is of a list of several images, and one of them was compared")
"""What keeps a list for several platforms from counting as built here: a signature of its digest would be of each of them."""

STATED = "the label states another digest than the rebuild has; a .sif and a sandbox have no layers to compare"


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """What a rebuild came to."""

    digest: str
    again: str
    seconds: float
    differences: tuple[Difference, ...]
    digest_from: From = "engine"
    """Where the digest comes from: a label of a .sif or a sandbox is only what somebody wrote."""

    @property
    def not_compared(self) -> tuple[str, ...]:
        """What of the image was passed over, and may be anything."""
        return NOT_COMPARED if self.digest_from == "label" else ()

    @property
    def equal(self) -> bool:
        """Whether both images have one digest; and the same files, where a label alone states the digest."""
        return self.digest == self.again and not self.differences

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
    label = found.labels.get(LABEL)
    files = files_of_image(client, found, IN_IMAGE, LOCK_FILES) if label is not None else {}
    return checked_lock(label, lambda name: _file_of(files, name), image)


def _file_of(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return files[name]


@dataclass
class InEngine:
    """An image of the engine: from the start this image, whatever its tag names meanwhile."""

    client: EngineClient
    name: str
    digest_from: From = "engine"

    def __post_init__(self) -> None:
        self.digest = self.client.image(self.name).id

    def locked(self) -> Locked:
        """Return the lock that it carries; see `carried_lock`."""
        return carried_lock(self.client, self.digest)

    def contents(self) -> Contents:
        """Return what it is."""
        return saved(self.client, self.digest, self.name)


def saved(client: EngineClient, image: str, name: str) -> Contents:
    """Return what an image of the engine is.

    Raises:
        LockError: a blob of it is damaged, of another shape, or out of bounds.
        HostError: the engine does not hand it over.

    """
    with scratch("compare") as folder:
        client.save(image, folder / "image.tar")
        return read_image(folder / "image.tar", name)


def reproduce(
    client: EngineClient,
    matrix: Matrix,
    original: Original,
    *,
    stack_file: str | None = None,
    on_change: Change,
    note: Note,
    details: Details | None = None,
    planned: Callable[[Plan], object] = lambda _: None,
) -> Reproduction:
    """Rebuild an image from its own lock, without the build cache, and compare.

    Args:
        client: the engine that builds.
        matrix: the matrix.
        original: the image.
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
    locked = original.locked()
    stack = stack_of_lock(locked.lock.stack, stack_file) if locked.lock.stack else None
    plan = plan_of(matrix, locked, stack)
    planned(plan)
    builder = Builder(
        client=client, plan=plan, on_change=on_change, note=note, details=details or Details(), cache=False
    )
    with own_tag(client, REBUILT) as tag:
        built: Built = builder.build(tag)
        differences: tuple[Difference, ...] = ()
        stated = original.digest_from == "label"
        if stated or built.digest != original.digest:
            note(
                "comparing the files of both images" if stated else "another digest: comparing the files of both images"
            )
            differences = tuple(between(original, saved(client, built.digest, tag), (original.name, tag)))
    if stated and built.digest != original.digest:
        differences = (Difference(path="(digest)", what=STATED), *differences)
    return Reproduction(
        digest=original.digest,
        again=built.digest,
        seconds=built.seconds,
        differences=differences,
        digest_from=original.digest_from,
    )


def between(original: Original, again: Contents, names: tuple[str, str]) -> Iterator[Difference]:
    """Yield what differs between an image and its rebuild, called by `names`.

    Raises:
        LockError: the image is damaged, of another shape, or out of bounds.
        HostError: it is not handed over.

    """
    found = original.contents()
    if isinstance(found, Contents):
        yield from differences_of(found, again, names)
        return
    unpacked = as_unpacked(again)
    files = {path: entry for path, entry in found.items() if path in unpacked or not added(path, entry)}
    yield from _of_files(files, unpacked, names)


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
    yield from differences_of(saved(client, one, first), saved(client, other, second), (first, second))


def differences_of(one: Contents, other: Contents, names: tuple[str, str]) -> Iterator[Difference]:
    """Yield what differs between two images, called by `names`, fit for a terminal."""
    same = not (one.of_several or other.of_several)
    if not same:
        yield LIST
    for key in sorted(one.config.keys() | other.config.keys()):
        if one.config.get(key) != other.config.get(key) and key not in {"rootfs", "history"}:
            same = False
            yield _difference(f"(configuration) {shown(key)}", one.config.get(key), other.config.get(key))
    for difference in _of_files(one.files, other.files, names):
        same = False
        yield difference
    if same and one.layers != other.layers and one.diff_ids == other.diff_ids:
        yield COMPRESSION
    elif same and one.layers != other.layers:
        yield Difference(path="(layers)", what="the same files in layers that are packed or cut in another way")
    elif same and one.digest != other.digest:
        yield from _of_documents(one, other)


def _of_documents(one: Contents, other: Contents) -> Iterator[Difference]:
    """Yield why two images of the same layers, files and settings have two digests: something always does."""
    found = [
        _difference(f"(configuration) {shown(key)}", one.config.get(key), other.config.get(key))
        for key in ("history", "rootfs")
        if one.config.get(key) != other.config.get(key)
    ]
    first, second = (each.manifest for each in (one, other))
    if not found and _part(first, "config").get("digest") != _part(second, "config").get("digest"):
        found.append(Difference(path="(configuration)", what="the same values, written in another order or spacing"))
    named = {"digest", "size"}  # of the configuration, whose values were compared
    parts = [
        ("", first, second, {"config", "layers"}),
        ("config ", _part(first, "config"), _part(second, "config"), named),
    ]
    layers = zip(first.get("layers", ()), second.get("layers", ()), strict=False)
    parts += [(f"layer {number} ", a, b, set()) for number, (a, b) in enumerate(layers, 1)]
    for what, a, b, passed in parts:
        found += [
            _difference(f"(manifest) {what}{shown(key)}", a.get(key), b.get(key))
            for key in sorted(a.keys() | b.keys())
            if key not in passed and a.get(key) != b.get(key)
        ]
    if one.listed != other.listed:
        found.append(
            Difference(path="(list)", what="one digest is of a list that names the image, the other of the image")
        )
    elif not found and one.listed:
        found.append(Difference(path="(list)", what="the same image in another list"))
    yield from found or [Difference(path="(manifest)", what="the same values, written in another order or spacing")]


def _part(manifest: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = manifest.get(key) or {}
    return found


def _difference(path: str, one: Any, other: Any) -> Difference:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        number = next(number for number, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        return _difference(f"{path}, entry {number + 1}", one[number], other[number])
    if isinstance(one, dict) and isinstance(other, dict):
        differing = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        one, other = ({key: each[key] for key in differing if key in each} for each in (one, other))
    values = [json.dumps(each, sort_keys=True) for each in (one, other)]
    # of long values what differs, and not how both begin
    start = next((at for at, (a, b) in enumerate(zip(*values, strict=False)) if a != b), min(map(len, values)))
    shift = 0 if start < 100 else start - 40
    return Difference(
        path=path, what=" / ".join(shown(f"{'…' if shift else ''}{each[shift:]}", 150) for each in values)
    )


def _of_files(one: Mapping[str, Entry], other: Mapping[str, Entry], names: tuple[str, str]) -> Iterator[Difference]:
    for path in sorted(one.keys() | other.keys()):
        before, after = one.get(path), other.get(path)
        if before == after:
            continue
        if before is None or after is None:
            yield Difference(path=shown(path, 4096), what=f"only in {names[1] if before is None else names[0]}")
        else:
            fields = [(n, b, a) for n, b, a in zip(Entry._fields, before, after, strict=True) if b != a]
            what = ", ".join(f"{n} {shown(str(b))} / {shown(str(a))}" for n, b, a in fields)
            yield Difference(path=shown(path, 4096), what=what)
