"""What `reproduce` compares a rebuild with: an image of the engine, an OCI archive or layout, a .sif or a sandbox.

None of them is trusted: nothing of it runs, and no link in it is followed.
"""

import contextlib
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from envbuild.engine import apptainer, unpacked
from envbuild.engine.archive import Archive, ImageError
from envbuild.engine.image import image_of
from envbuild.engine.layers import LIMITS, Contents, Entry, contents_of
from envbuild.engine.place import Kind as ImageKind
from envbuild.engine.place import kind_of
from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.lock.files import Locked, parse_lock
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, read_below
from envbuild.util.foreign_tar import Kind, TarError, read_tar
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

IN_IMAGE = "/opt/envbuild"
LABEL = "io.envbuild.lock"
# `pylock.SET.toml`; a set's name is a SafeName.
LOCK_FILES = re.compile(r"lock\.json|pylock\.[A-Za-z0-9][A-Za-z0-9._+-]{0,127}\.toml", re.ASCII)
_LOCK_BYTES = 16 << 20
"""Of the files of a lock together, as of an image in the engine."""
_CHANGED = "the image was changed after its build; do not use it"
_PIECE = 1 << 20
_ADDED = frozenset({"etc/hosts", "etc/resolv.conf"})
"""Files that Apptainer puts into a sandbox where the image has none, empty ones."""
_EMPTY = hashlib.sha256().hexdigest()
NOT_COMPARED = (
    f"/{apptainer.FOLDER} (Apptainer's scripts, which each start of a container runs) and Apptainer's links to it",
    "owners and times of files",
)
"""What is not compared of a .sif and a sandbox."""


From = Literal["engine", "blobs", "label"]
"""Where a digest comes from; see `Image.confirmed_by`."""


class Original(Protocol):
    """The image that a rebuild is compared with."""

    @property
    def name(self) -> str:
        """What the user called it."""

    @property
    def digest(self) -> str:
        """Its digest."""

    @property
    def digest_from(self) -> From:
        """Where the digest comes from; where a label alone states it, the files are compared even if it is the same."""

    def locked(self) -> Locked:
        """Return the lock that it carries; see `checked_lock`."""

    def contents(self) -> "Contents | Mapping[str, Entry]":
        """Return what it is: its configuration and its files, or its files alone where there are no layers."""


def checked_lock(label: str | None, read: Callable[[str], bytes], name: str) -> Locked:
    """Return the lock that an image carries, checked against its label.

    Args:
        label: what its label states.
        read: returns a file of the lock; it may raise OSError or OutsideError.
        name: the image's, for messages.

    Raises:
        UsageError: it carries no lock.
        LockError: its lock cannot be read, has no hashes, or is not the one that its label names.

    """
    if label is None:
        raise UsageError(
            f"{shown(name)} contains no lock: envbuild did not build it",
            hint="name an image that `envbuild image` made",
        )
    try:
        body = read("lock.json")
    except (OSError, OutsideError, ValueError):
        raise LockError(
            f"the image's label names a lock, and there is none in {IN_IMAGE}", where=shown(name), hint=_CHANGED
        ) from None
    try:
        locked = parse_lock(body, read, IN_IMAGE)
    except (DataError, LockError) as error:
        raise LockError(
            f"the lock in the image cannot be read: {shown(error.what, 400)}",
            where=f"{shown(name)}: {shown(error.where or IN_IMAGE)}",
            hint=_CHANGED,
        ) from None
    if locked.lock.digest != label:
        raise LockError(
            f"the lock in the image has digest {locked.lock.digest}, its label says {shown(label)}",
            where=shown(name),
            hint="the image was changed after its build",
        )
    if not locked.lock.complete:
        raise LockError(
            "the image was built without a complete lock", where=shown(name), hint="lock its cell and build it again"
        )
    return locked


@dataclass
class InArchive:
    """The image of an OCI archive or layout; each blob is compared with its digest as it is read."""

    name: str
    path: Path
    kind: ImageKind
    digest_from: From = "blobs"

    def __post_init__(self) -> None:
        with self._named():
            self._archive = unpacked.open_image(self.path, self.kind)
            self._held = self._archive.image()
            label = unpacked.label_of(self._archive, self._held)
            image = image_of(label, reference=self.name, place=self.path, confirmed_by="blobs")
        self.digest, self._label = self._held.digest, image.labels.get(LABEL)

    def locked(self) -> Locked:
        with self._named():
            files = _lock_files(self._archive) if self._label is not None else {}
        return checked_lock(self._label, lambda name: _of(files, name), self.name)

    def contents(self) -> Contents:
        with self._named():
            return contents_of(self._archive)

    def _named(self) -> "_Named":
        return _Named(self.name)


@dataclass
class _Named:
    """What cannot be read of an image is a damaged image of this name."""

    name: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        hint = "the file was damaged or changed on its way: fetch it again"
        if isinstance(error, ImageError):
            raise ImageError(error.what, where=shown(self.name), hint=hint) from None
        if isinstance(error, (TarError, OSError, ValueError)):
            raise ImageError(
                f"the image cannot be read: {shown(str(error))}", where=shown(self.name), hint=hint
            ) from None


def _of(files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise FileNotFoundError(2, os.strerror(2))
    return files[name]


def _lock_files(archive: Archive) -> dict[str, bytes]:
    """Return the files of the lock as the layers leave them.

    Raises:
        ImageError: a layer is damaged or missing.
        TarError: a layer is out of bounds.

    """
    found: dict[str, bytes] = {}
    folder = IN_IMAGE.strip("/")
    above = {"", folder.rpartition("/")[0], folder}
    for layer in archive.manifest().layers:
        own: dict[str, bytes] = {}
        with archive.layer(layer) as stream:
            for member in read_tar(stream, LIMITS):
                parent, _, name = member.path.rpartition("/")
                gone = name.removeprefix(".wh.") if name.startswith(".wh.") else ""
                if (parent in above and name == ".wh..wh..opq") or (gone and f"{parent}/{gone}".lstrip("/") in above):
                    found.clear()
                elif gone and parent == folder:
                    found.pop(gone, None)
                elif member.path in above and member.kind != "folder":
                    found.clear()
                    own.clear()
                elif parent == folder and LOCK_FILES.fullmatch(name):
                    if member.body is None or member.size > _LOCK_BYTES:
                        raise ImageError(f"{IN_IMAGE}/{name} in the image is no regular file of fewer than 16 MiB")
                    if member.size + sum(map(len, (found | own).values())) > _LOCK_BYTES:
                        raise ImageError(f"the files of the lock in {IN_IMAGE} have more than 16 MiB together")
                    own[name] = b"".join(iter(lambda body=member.body: body.read(_PIECE), b""))  # type: ignore[misc]
        found |= own
    return found


@dataclass
class InFolder:
    """The image of a sandbox, or of a .sif that was unpacked. Its digest is what its label states."""

    name: str
    digest: str
    label: str | None
    root: Path
    digest_from: From = "label"

    def locked(self) -> Locked:
        folder = IN_IMAGE.strip("/")
        return checked_lock(
            self.label, lambda name: read_below(self.root, f"{folder}/{name}", limit=_LOCK_BYTES), self.name
        )

    def contents(self) -> Mapping[str, Entry]:
        try:
            return dict(_walk(self.root))
        except OSError as error:
            raise HostError(f"the image's files cannot be read: {shown(str(error))}", where=shown(self.name)) from None


def _walk(root: Path) -> Iterator[tuple[str, Entry]]:
    """Yield each path below `root`, but for what Apptainer adds, and what it is. Owner and time are left out.

    Apptainer gives the files to whoever unpacks them, and touches folders.
    """
    for folder, folders, files, handle in os.fwalk(root, onerror=_raised):  # an image's names are of any characters
        inside = os.path.relpath(folder, root)
        if inside == ".":
            folders[:] = [name for name in folders if not apptainer.is_made(name, handle)]
        for name in (*folders, *files):
            path = name if inside == "." else f"{inside}/{name}"
            if inside == "." and apptainer.is_made(name, handle):
                continue
            facts = os.lstat(name, dir_fd=handle)
            kind = _kind(facts.st_mode)
            digest = None
            if kind == "file":
                with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=handle), "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            link = os.readlink(name, dir_fd=handle) if kind == "link" else ""
            yield path, Entry(kind, digest, oct(stat.S_IMODE(facts.st_mode)), "", 0, link)


def _raised(error: OSError) -> None:
    raise error


def _kind(mode: int) -> Kind:
    kinds: dict[int, Kind] = {
        stat.S_IFREG: "file",
        stat.S_IFDIR: "folder",
        stat.S_IFLNK: "link",
        stat.S_IFIFO: "fifo",
    }
    return kinds.get(stat.S_IFMT(mode), "device")


def as_unpacked(contents: Contents) -> dict[str, Entry]:
    """Return an image's files as a sandbox has them: hard links are files, and owner and time are left out."""
    found = {}
    for path, entry in contents.files.items():
        target = contents.files.get(entry.link.removeprefix("./").lstrip("/")) if entry.kind == "hard link" else entry
        if path:
            found[path] = (target or entry)._replace(owner="", mtime=0)
    return found


def added(path: str, entry: Entry) -> bool:
    """Whether a file of a sandbox that the image has not is Apptainer's own."""
    return path in _ADDED and entry.kind == "file" and entry.sha256 == _EMPTY


@contextlib.contextmanager
def open_original(settings: Settings, reference: str) -> Iterator[Original]:
    """Open the image that a path names, for the time of a block; a .sif is unpacked for it.

    Raises:
        UsageError: there is no image at that path, or it does not say which one it was made from.
        LockError: it is damaged, or what it states cannot be read.
        HostError: Apptainer is missing, or there is no room.

    """
    path = Path(reference).expanduser().absolute()
    kind = kind_of(path)
    if kind in {"archive", "layout"}:
        yield InArchive(name=reference, path=path, kind=kind)
        return
    image = unpacked.look_up(settings, reference)
    with contextlib.ExitStack() as held:
        root = path
        if kind == "sif":
            root = held.enter_context(scratch("reproduce")) / "root"
            try:
                apptainer.unpack_sif(path, root)
            except ValueError as error:
                raise ImageError(f"the .sif cannot be read: {shown(str(error))}", where=shown(reference)) from None
        yield InFolder(name=reference, digest=image.digest, label=image.labels.get(LABEL), root=root)
