"""A bundle on the host that it was carried to: checked whole, unpacked, its image loaded, and settings for a rebuild.

Three things are compared: every file with the bundle's list; the list with the lock, which names what must be there and
nothing else; and the image with the lock. Who made all of that is another question: a signature by a key that the
settings trust answers it, or the sha256 of the bundle that came another way.
"""

import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.catalog.store import policy_of
from envbuild.engine import unpacked
from envbuild.engine.archive import ImageError, Layout
from envbuild.engine.client import EngineClient
from envbuild.engine.image import StoredManifest
from envbuild.engine.kept import remember_taken, unsigned_origin
from envbuild.engine.stored import write_listing
from envbuild.engine.wheels import kept_wheels
from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.lock.files import Locked, read_lock
from envbuild.lock.model import os_packages
from envbuild.lock.sources import SourceStore
from envbuild.lock.wheels import compatible_wheels
from envbuild.net.download import file_name
from envbuild.pipeline.bundle import source_name
from envbuild.pipeline.bundle_file import Bundle, BundleError, Unpacked, unpack_bundle
from envbuild.plan.plan import tag_of
from envbuild.settings import Settings
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

CONFIG = "config.toml"
_CONFIG_TEXT = """\
# Written by `envbuild unbundle`. ENVBUILD_CONFIG names this file to envbuild: a build then takes everything from here.
cache_dir = "cache"
find_links = ["packages", "tool"]
"""
_DEBS_TEXT = 'debs = "debs"\n'
_SOURCES_TEXT = 'sources = "sources"\n'
_NO_DEBS = (
    "the setting `debs`: nobody confirms who made the bundle, and to make a root from its OS packages runs their "
    "scripts on this host; a rebuild asks Debian's archive. "
    "Unpack it with --sha256, or with a key of its maker in `trusted_keys`"
)
_DROP = "do not use it; ask who made it"
_TOOL = re.compile(r"tool/[A-Za-z0-9_.+-]+\.whl", re.ASCII)
_LAYOUT = {"image/oci-layout", "image/index.json"}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A bundle that was checked and unpacked."""

    folder: Path
    unpacked: Unpacked
    locked: Locked
    left_out: tuple[str, ...] = ()
    """What its settings do not name, and why, in words."""

    @property
    def tag(self) -> str:
        """The image's name, by its lock. A bundle names nothing in the engine itself."""
        return tag_of(self.locked.lock)


def open_bundle(
    settings: Settings, path: Path, folder: Path, *, sha256: str | None, note: Callable[[str], object]
) -> Opened:
    """Check a bundle and unpack it into a new folder, which appears only when all of it is right.

    Args:
        settings: say whose signature it must have.
        path: the bundle.
        folder: the new folder.
        sha256: of the bundle, where a person named it.
        note: takes a line about what is done.

    Raises:
        UsageError: the folder exists, or its own folder does not.
        DataError: a trusted key cannot be read.
        LockError: the bundle is damaged, not signed as it must be, or holds something else than its lock names.
        HostError: it cannot be read, or there is no room.

    """
    folder = folder.absolute()
    if folder.exists() or not folder.parent.is_dir():
        what = "exists" if folder.exists() else "is in a folder that does not exist"
        raise UsageError(f"{shown(str(folder))} {what}", where="FOLDER", hint="name a new folder")
    policy = policy_of(settings) if settings.trusted_keys else None
    with scratch("bundle", folder.parent) as own:
        part = own / "bundle"
        part.mkdir()
        try:
            found = unpack_bundle(path, part, policy=policy, sha256=sha256, note=note)
        except OSError as error:
            if not path.exists():
                raise UsageError(f"there is no {shown(str(path))}", where="FILE", hint="name a bundle") from None
            raise HostError(
                f"the bundle cannot be unpacked: {error.strerror or error}",
                where=shown(str(error.filename or path)),
                hint="check the path, and the room on the disk",
            ) from None
        locked = _lock_of(part, found.bundle)
        note("comparing with the lock")
        check_contents(part, found.bundle, locked)
        _check_image(part, found.bundle, locked)
        confirmed = bool(found.signers) or sha256 is not None
        _settle(part, found, locked, confirmed, note)
        part.chmod(0o755)
        part.rename(folder)
    left_out = () if confirmed or not os_packages(locked.lock.root, locked.lock.os) else (_NO_DEBS,)
    return Opened(folder=folder, unpacked=found, locked=locked, left_out=left_out)


def _lock_of(folder: Path, bundle: Bundle) -> Locked:
    try:
        locked = read_lock(folder / "lock")
    except DataError as error:
        raise BundleError(f"its lock cannot be read: {error.what}", where="lock", hint=_DROP) from None
    if locked.lock.digest != bundle.lock or not locked.lock.complete:
        raise BundleError(f"its lock is not {bundle.lock}, or is not complete", where="lock", hint=_DROP)
    return locked


def check_contents(folder: Path, bundle: Bundle, locked: Locked) -> None:
    """Check that a bundle holds what its lock names, with the lock's hashes, and nothing else.

    Args:
        folder: where it was unpacked.
        bundle: its list, with which the files were compared.
        locked: its lock.

    Raises:
        LockError: something is missing, is more, or is not what the lock names.

    """
    lock, listed = locked.lock, {file.path: file.sha256 for file in bundle.files}
    named: dict[str, str | None] = dict.fromkeys(_LAYOUT)
    named |= dict.fromkeys(("lock/lock.json", *(f"lock/pylock.{name}.toml" for name in locked.pylocks)))
    named |= {f"packages/{w.filename}": w.sha256 for w in compatible_wheels(lock, locked.pylocks)}
    named |= {f"debs/{p.sha256}.deb": p.sha256 for p in os_packages(lock.root, lock.os)}
    for file in (lock.uv, *lock.files):
        try:
            named[f"cache/files/{file.sha256}/{file_name(file.url)}"] = file.sha256
        except ValueError as error:
            raise BundleError(f"its lock names no file: {shown(str(error))}", where="lock", hint=_DROP) from None
    named |= dict.fromkeys(f"sources/{source_name(source)}" for source in lock.sources)
    blobs = {d.digest: d for d in _blobs(folder)}
    named |= {f"image/blobs/sha256/{digest[7:]}": digest[7:] for digest in blobs}
    for path, sha256 in named.items():
        if path not in listed:
            raise BundleError(f"{path} is missing, and its lock or its image names it", hint=_DROP)
        if sha256 is not None and listed[path] != sha256:
            raise BundleError(f"{path} has the sha256 {listed[path]}, and {sha256} is locked", hint=_DROP)
    wheels, faults = kept_wheels(Settings(cache_dir=folder / "cache"))
    for name, why in faults.items():
        raise BundleError(f"the compiled wheel {shown(name)} is not right: {why}", hint=_DROP)
    known = set(named)
    for wheel in wheels:
        if wheel.record.component not in lock.components:
            raise BundleError(f"its lock compiles no {wheel.record.component}", hint=_DROP)
        # A build installs every wheel of the folder, so the one that its record names is the only one.
        place = f"cache/wheels/{wheel.folder.name}"
        known |= {f"{place}.json", f"{place}/record.json", f"{place}/{wheel.record.wheel}"}
    for path in sorted(listed.keys() - known):
        if not _TOOL.fullmatch(path):
            raise BundleError(f"neither its lock nor its image names {path}", hint=_DROP)


def _blobs(folder: Path) -> list[Any]:
    held = unpacked.open_image(folder / "image", "layout").image()
    return [held.listing[-1], held.manifest.config, *held.manifest.layers]


def _check_image(folder: Path, bundle: Bundle, locked: Locked) -> None:
    """Raise LockError unless the image is the one that the bundle states, each blob whole, and states the lock's digest."""
    layout = unpacked.open_image(folder / "image", "layout")
    held = layout.image()
    if held.digest != bundle.image:
        raise ImageError(f"the image is {held.digest}, {bundle.image} is stated", where="image", hint=_DROP)
    for each in (held.manifest.config, *held.manifest.layers):
        with layout.blob(each):
            pass  # compared with its digest at the end
    config = unpacked.label_of(layout, held).config.get("config")
    labels = config.get("Labels") if isinstance(config, dict) else None
    stated = labels.get("io.envbuild.lock") if isinstance(labels, dict) else None
    if stated != locked.lock.digest:
        raise ImageError(f"the image is of another lock: {shown(str(stated))}", where="image", hint=_DROP)


def _settle(folder: Path, found: Unpacked, locked: Locked, confirmed: bool, note: Callable[[str], object]) -> None:
    """Write the settings, compare the source trees with their ids, and note where the compiled wheels came from.

    A root is made on this host, and scripts of its packages run, as root for root. The lock's hashes do not say whose
    they are: who made the bundle wrote the lock. So `debs` is set only where somebody confirms the bundle.
    """
    for name in ("cache", "packages", "debs", "tool"):
        (folder / name).mkdir(exist_ok=True)
    sources = folder / "sources"
    text = _CONFIG_TEXT + (_DEBS_TEXT if confirmed else "") + (_SOURCES_TEXT if sources.is_dir() else "")
    (folder / CONFIG).write_text(text, encoding="utf-8")
    own = Settings(cache_dir=folder / "cache", sources=sources if sources.is_dir() else None)
    store = SourceStore(settings=own, note=note)
    for source in locked.lock.sources:
        note(f"checking the source of {source.name}")
        if store.plain_folder(source) is None:
            raise BundleError(f"the source of {source.name} is missing", hint=_DROP)
    for file in found.bundle.files:
        if file.path.startswith("cache/wheels/") and file.path.endswith(".whl"):
            origin = f"bundle {found.sha256[:16]}"
            remember_taken(own, file.sha256, origin if found.signers else unsigned_origin(origin))


def load_image(client: EngineClient, opened: Opened) -> str:
    """Take the image of a bundle into the engine under the name that its lock gives it; return its digest there.

    What the engine reads is written here, with no name but that one.

    Raises:
        HostError: the engine does not take it.
        LockError: a blob is not what its digest says, or another image has the name.

    """
    layout = unpacked.open_image(opened.folder / "image", "layout")
    assert isinstance(layout, Layout)  # noqa: S101
    last = layout.image().listing[-1]
    held = client.find_image(opened.tag)
    if held is not None and held.id != last.digest:  # the tag is of the cell, and a cell may have several locks
        raise LockError(
            f"the engine has another image under {opened.tag}: {held.id}, and the bundle's is {last.digest}",
            where=shown(str(opened.folder)),
            hint="give that one another name, or remove it; the bundle is unpacked, and its image is "
            "in the folder `image`",
        )
    with scratch("image", opened.folder) as own:
        archive = own / "image.tar"
        manifest = StoredManifest(media_type=last.media_type, digest=last.digest, size=last.size)
        write_listing(archive, manifest, opened.tag)
        with tarfile.open(archive, "a") as tar:
            for digest in sorted({each.digest for each in _blobs(opened.folder)}):
                name = f"blobs/sha256/{digest.removeprefix('sha256:')}"
                tar.add(opened.folder / "image" / name, arcname=name, recursive=False)
        client.load(archive)
    loaded = client.image(opened.tag).id
    if loaded != last.digest:
        raise HostError(f"the engine has {loaded} under {opened.tag} after it loaded {last.digest}", hint="try again")
    return loaded
