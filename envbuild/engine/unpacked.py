"""An image that is a file or a folder: an OCI archive or layout, a .sif, a sandbox. What Apptainer runs, and of which digest."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from envbuild.engine import apptainer
from envbuild.engine.archive import Archive, Held, ImageError, Layout
from envbuild.engine.image import Image, Label, image_of
from envbuild.engine.layers import LIMITS, require_room
from envbuild.engine.place import Kind, kind_of
from envbuild.errors import HostError, UsageError
from envbuild.settings import Settings
from envbuild.util.foreign_json import parse_json
from envbuild.util.foreign_tar import Bounds, TarError, read_tar
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

_FORMS = "name an OCI archive (FILE.oci.tar), an OCI layout, a .sif or a sandbox"
_LABEL_LIMIT = 1 << 20
_HEX = re.compile(r"[0-9a-f]{64}")


def no_image(path: Path, reference: str, *, what: str = "holds no image", hint: str = _FORMS) -> UsageError:
    """Return the error for a path at which there is no image that Apptainer can run.

    Args:
        path: the place that was looked at.
        reference: the path as it was written.
        what: what is wrong with what is there.
        hint: what to name instead.

    """
    if path.suffix == ".sqsh":
        what, hint = "is an image of enroot", f"start it with `launch --launcher srun`, by pyxis; or {hint}"
    elif not path.exists():
        what = "does not exist"
    return UsageError(f"{shown(str(path))} {what}", where=shown(reference), hint=hint)


def look_up(settings: Settings, reference: str, *, note: Callable[[str], None] = lambda _: None) -> Image:
    """Return the image that a path names, ready to run: an archive or a layout is unpacked once, each blob checked.

    Args:
        settings: say where the cache is, which keeps what was unpacked.
        reference: the path.
        note: takes a line about what takes its time.

    Raises:
        UsageError: there is no image at that path.
        LockError: a blob is not what its digest says, or what is stated of the image cannot be read.
        HostError: Apptainer is missing or failed.

    """
    path = Path(reference).expanduser().absolute()
    match kind_of(path):
        case "archive" | "layout" as kind:
            return _unpacked(settings, reference, path, kind, note)
        case "sif" | "sandbox" as kind:
            apptainer.program()
            return _labelled(reference, path, kind)
        case None:
            raise no_image(path, reference)


def stated_of(path: Path, kind: Kind) -> Image:
    """Return what is stated of an image. Nothing is unpacked: of a layout or an archive, manifest and configuration are checked.

    Raises:
        UsageError: a .sif or a sandbox does not say which OCI image it was made from.
        LockError: what is stated of it cannot be read.
        HostError: Apptainer, which reads a .sif, is missing or failed.

    """
    if kind in {"sif", "sandbox"}:
        return _labelled(str(path), path, kind)
    archive = open_image(path, kind)
    return _image(label_of(archive, archive.image()), str(path), path, "blobs")


def open_image(path: Path, kind: Kind) -> Archive:
    """Open an archive or a layout.

    Raises:
        ImageError: it cannot be read.

    """
    try:
        return Archive(path) if kind == "archive" else Layout(path)
    except (TarError, OSError) as error:
        raise ImageError(f"the image cannot be read: {shown(str(error))}", where=shown(str(path))) from None


def label_of(archive: Archive, held: Held) -> Label:
    """Return what is stated of the image that an archive holds, from its checked blobs.

    Raises:
        ImageError: its configuration is of another shape.

    """
    config = archive.json(held.manifest.config)
    if not isinstance(config, dict):
        raise ImageError("the image's configuration is no table")
    kept = {key: config[key] for key in ("config", "os", "architecture", "rootfs") if key in config}
    return Label(digest=held.digest, size=sum(each.size for each in held.manifest.layers), config=kept)


def make_sandbox(archive: Archive, target: Path, own: Path, limits: Bounds = LIMITS) -> Label:
    """Unpack an image into the sandbox `target`, each blob compared with its digest, and label it.

    Args:
        archive: the image.
        target: the folder that is made.
        own: a folder of ours on the same disk, with room for the packed and the unpacked image.
        limits: of what its layers unpack to, which is read once before Apptainer does it.

    Raises:
        LockError: a blob is not what its digest says, or the layers unpack to more than any image is.
        HostError: Apptainer is missing or failed, or there is no room.

    """
    apptainer.program()
    layout = own / "layout"
    try:
        layout.mkdir()
        held = archive.copy_to(layout)
        label = label_of(archive, held)
        _require_bounds(Layout(layout), held, own, limits)
        apptainer.build(target, f"oci:{layout}", scratch=own, sandbox=True)
        try:
            apptainer.add_label(target, label.model_dump_json())
        except ValueError as error:
            raise ImageError(f"the image's own /{apptainer.FOLDER} cannot be used: {shown(str(error))}") from None
    except OSError as error:
        raise HostError(f"the image cannot be unpacked: {error.strerror or error}", where=str(own)) from None
    return label


def _require_bounds(layout: Layout, held: Held, folder: Path, limits: Bounds) -> None:
    """Check what the layers of an image unpack to: Apptainer unpacks whatever is there. Without `zstd`, its layers are not counted.

    Raises:
        ImageError: they are damaged, of an unknown kind, or more than any image is.
        HostError: the disk of `folder` has no room for them.

    """
    size = members = 0
    for layer in held.manifest.layers:
        if layer.media_type.endswith("zstd") and shutil.which("zstd") is None:
            continue  # Apptainer unpacks it by itself; a host that only runs images need not have the command
        with layout.layer(layer) as stream:
            try:
                for member in read_tar(stream, Bounds(bytes=limits.bytes - size, members=limits.members - members)):
                    size += member.size
                    members += 1
            except TarError as error:
                raise ImageError(f"a layer cannot be unpacked: {error}") from None
    require_room(folder, "the image", size, members, "make room there")


def _unpacked(settings: Settings, reference: str, path: Path, kind: Kind, note: Callable[[str], None]) -> Image:
    archive = open_image(path, kind)
    try:
        held = archive.image()
        label = label_of(archive, held)
    except ImageError as error:
        raise ImageError(error.what, where=shown(reference)) from None
    # by the image alone: the digest of a list says nothing of which of its platforms lies here
    hexes = held.listing[-1].digest.removeprefix("sha256:")
    if not _HEX.fullmatch(hexes):
        raise ImageError("its digest is no sha256", where=shown(reference))
    store = settings.cache_dir / "sandboxes"
    place = store / hexes
    if not place.is_dir():
        note(f"unpacking {held.digest} into {place}")
        store.mkdir(parents=True, exist_ok=True)
        with scratch("sandbox", store) as own:
            try:
                make_sandbox(archive, own / "root", own)
            except ImageError as error:
                raise ImageError(
                    error.what,
                    where=shown(reference),
                    hint="the file was damaged or changed on its way: fetch it again",
                ) from None
            with contextlib.suppress(OSError):  # another run may have been quicker
                (own / "root").rename(place)
    found = _image(label, reference, place, "blobs")
    return replace(found, recipe=held.made_by.recipe, release=held.made_by.release)


def _labelled(reference: str, path: Path, kind: Kind) -> Image:
    try:
        labels: dict[str, Any] = (
            apptainer.labels_of_sandbox(path) if kind == "sandbox" else apptainer.labels_of_sif(path)
        )
        text = labels.get(apptainer.LABEL)
        if not isinstance(text, str):
            raise UsageError(
                "it does not say which OCI image it was made from",
                where=shown(reference),
                hint="give the OCI archive or layout that it was made from, or make it with "
                f"`envbuild image --output {'DIR' if kind == 'sandbox' else 'FILE.sif'}`, which writes the digest into it",
            )
        label = Label.model_validate(parse_json(text, limit=_LABEL_LIMIT))
    except ValidationError:
        raise ImageError(f"its label {apptainer.LABEL} is of another shape", where=shown(reference)) from None
    except (ValueError, OSError) as error:
        raise ImageError(f"its labels cannot be read: {shown(str(error))}", where=shown(reference)) from None
    return _image(label, reference, path, "label")


def _image(label: Label, reference: str, place: Path, confirmed_by: Literal["blobs", "label"]) -> Image:
    try:
        return image_of(label, reference=reference, place=place, confirmed_by=confirmed_by)
    except ValueError as error:
        raise ImageError(
            f"the image's configuration is of another shape: {shown(str(error))}", where=shown(reference)
        ) from None


def write(archive_path: Path, target: Path) -> None:
    """Write an image out of an OCI archive to `target`: `FILE.oci.tar` as it is, `FILE.sif`, or else a sandbox.

    Raises:
        LockError: a blob is not what its digest says.
        HostError: Apptainer is missing or failed, or there is no room.

    """
    with scratch("output", target.parent) as own:
        if target.suffix == ".tar":
            made = own / "image.tar"
            os.rename(archive_path, made)  # noqa: PTH104
        else:
            made = own / "root"
            make_sandbox(Archive(archive_path), made, own)
            if target.suffix == ".sif":
                sif = own / "image.sif"
                apptainer.build(sif, str(made), scratch=own, sandbox=False)
                made = sif
        made.rename(target)
