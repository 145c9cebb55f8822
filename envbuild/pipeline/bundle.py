"""All that an image is made of, with the image and envbuild itself, in one file for a host without a network."""

import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild import __version__
from envbuild.engine import unpacked
from envbuild.engine.client import EngineClient
from envbuild.engine.kept import inputs_file, kept_wheel
from envbuild.engine.reproduce import carried_lock
from envbuild.engine.wheels import read_kept
from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.lock.files import Locked, read_lock, write_lock
from envbuild.lock.model import GitSource
from envbuild.lock.released import released_file
from envbuild.lock.sources import SourceStore
from envbuild.lock.wheels import compatible_wheels
from envbuild.matrix.load import Matrix
from envbuild.pipeline.bundle_file import Written, write_bundle
from envbuild.pipeline.fetched import fetch_debs, fetch_wheel
from envbuild.pipeline.tool_wheels import python_here, suite_wheels, tool_wheels
from envbuild.plan.plan import Plan, plan_of, tag_of
from envbuild.registry.keys import PrivateKey
from envbuild.settings import Settings
from envbuild.stacks.load import stack_of_lock
from envbuild.util.names import image_tag, shown
from envbuild.util.scratch import scratch
from envbuild.util.text import count_of

Note = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a bundle is made of: an image of the engine, and the lock that it carries."""

    tag: str
    digest: str
    locked: Locked


def subject_of(client: EngineClient, named: str) -> Subject:
    """Return the image that is meant, and its lock.

    Args:
        client: the engine.
        named: an image of the engine, the id of a cell (the image `envbuild:ID`), or the path of a lock.

    Raises:
        UsageError: it is no name, or the image carries no lock.
        DataError: the lock cannot be read.
        HostError: the engine has no such image.
        LockError: the image carries another lock.

    """
    if not named.isprintable():
        raise UsageError(f"{shown(named)!r} names no image", hint="write a tag, the id of a cell, or a path of a lock")
    wanted, tag = None, named
    if "/" in named or named.endswith(".json"):
        try:
            wanted = read_lock(Path(named))
        except DataError:
            if Path(named).exists() or not client.find_image(named):
                raise
        else:
            tag = tag_of(wanted.lock)
    elif ":" not in named:
        tag = f"envbuild:{image_tag(named)}"
    image = client.find_image(tag) or client.find_image(named)
    if image is None:
        raise HostError(
            f"the engine has no image {shown(tag)}",
            hint=f"build it first: envbuild image --lock {shown(named)}"
            if wanted
            else "build it first: envbuild image",
        )
    locked = carried_lock(client, image.id)
    if wanted is not None and wanted.lock.digest != locked.lock.digest:
        raise LockError(
            f"the image {shown(tag)} is of another lock: {locked.lock.digest}, not {wanted.lock.digest}",
            where=shown(named),
            hint="build it from this lock: envbuild image --lock",
        )
    return Subject(tag=tag, digest=image.id, locked=locked)


def make_bundle(
    client: EngineClient,
    matrix: Matrix,
    subject: Subject,
    output: Path,
    *,
    stack_file: str | None,
    keys: Sequence[PrivateKey],
    note: Note,
) -> Written:
    """Write the bundle of an image.

    Args:
        client: the engine that has it.
        matrix: the matrix.
        subject: the image and its lock.
        output: the new file.
        stack_file: the file of a user's own stack, which the lock names and does not hold.
        keys: sign the bundle.
        note: takes a line about what is done.

    Raises:
        UsageError: `output` exists or its folder does not.
        HostError: something cannot be reached, or there is no room.
        LockError: something is not what the lock names, or is to be had no more.

    """
    if output.exists() or not output.absolute().parent.is_dir():
        what = "exists" if output.exists() else "is in a folder that does not exist"
        raise UsageError(f"{shown(str(output))} {what}", where="--output", hint="name a new file in a folder")
    settings, lock = client.settings, subject.locked.lock
    stack = stack_of_lock(lock.stack, stack_file) if lock.stack else None
    plan = plan_of(matrix, subject.locked, stack)
    with scratch("bundle", output.absolute().parent) as own:
        note("copying the image")
        files = _image(client, subject.digest, own)
        files |= _inputs(settings, subject.locked, own, note)
        files |= _compiled(settings, plan)
        note("collecting envbuild and what it needs")
        downloads = settings.cache_dir / "files"
        downloads.mkdir(parents=True, exist_ok=True)
        (own / "tool").mkdir()
        wheels = tool_wheels(settings, own / "tool", note=note)
        wheels |= suite_wheels(settings, lock.cell["python"], downloads, note=note)
        files |= {f"tool/{name}": path for name, path in wheels.items()}
        note(f"writing {count_of(len(files), 'file')}")
        part = own / "bundle.tar"
        written = write_bundle(
            part,
            files,
            keys,
            envbuild=__version__,
            python=python_here(),
            lock=lock.digest,
            image=subject.digest,
            missing=tuple(f"the base image {image.reference}@{image.digest}" for image in lock.images),
        )
        part.replace(output)
    return written


def _image(client: EngineClient, digest: str, own: Path) -> dict[str, Path]:
    archive, layout = own / "image.tar", own / "image"
    client.save(digest, archive)
    layout.mkdir()
    held = unpacked.open_image(archive, "archive").copy_to(layout)
    archive.unlink()
    if held.listing[-1].digest != digest:
        raise HostError(
            f"the engine handed over {held.listing[-1].digest} for {digest}",
            hint="a bundle holds an image that envbuild built or pulled for one platform",
        )
    return {f"image/{path.relative_to(layout)}": path for path in layout.rglob("*") if path.is_file()}


def _inputs(settings: Settings, locked: Locked, own: Path, note: Note) -> dict[str, Path]:
    """Return the lock and everything that it names by hash."""
    lock, downloads = locked.lock, settings.cache_dir / "files"
    write_lock(locked, own / "lock")
    found = {f"lock/{path.name}": path for path in (own / "lock").iterdir()}
    indexes: dict[str, str | None] = {python_set.name: python_set.index for python_set in lock.python}
    for wheel in compatible_wheels(lock, locked.pylocks):
        found[f"packages/{wheel.filename}"] = fetch_wheel(
            settings, wheel.project, wheel.filename, wheel.sha256, indexes[wheel.set_name], downloads, note=note
        )
    found |= {f"debs/{digest}.deb": path for digest, path in fetch_debs(settings, lock, downloads, note=note).items()}
    for file in (lock.uv, *lock.files):
        path = released_file(settings, file, downloads)
        found[f"cache/files/{file.sha256}/{path.name}"] = path
    store = SourceStore(settings=settings, note=note)
    for source in lock.sources:
        note(f"collecting the source of {source.name}")
        place = own / "sources" / source_name(source)
        place.parent.mkdir(exist_ok=True)
        pack_tree(store.checkout(source), place)
        found[f"sources/{place.name}"] = place
    return found


def source_name(source: GitSource) -> str:
    """Return the name under which the setting `sources` finds the tree of a source."""
    return f"{source.name}-{source.commit}.tar"


def pack_tree(tree: Path, target: Path) -> None:
    """Write a tree to a tar with one folder in it; the same tree gives the same bytes."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return None if member.name == "tree/.git" else member

    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname="tree", filter=plain)


def _compiled(settings: Settings, plan: Plan) -> Mapping[str, Path]:
    """Return the compiled wheels of a plan that this machine keeps."""
    found: dict[str, Path] = {}
    for component in plan.components:
        folder = kept_wheel(settings, plan, component.axis)
        if folder is None:
            continue
        place = f"cache/wheels/{folder.name}"
        try:
            wheel = read_kept(folder).path
        except ValueError:  # `unbundle` would refuse it; the other host compiles it again
            continue
        found |= {f"{place}/{path.name}": path for path in (folder / "record.json", wheel)}
        if inputs_file(folder).is_file():
            found[f"{place}.json"] = inputs_file(folder)
    return found
