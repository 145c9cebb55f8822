"""A wheel from elsewhere: a sound zip, of the distribution that its name says, with a hash for each file in its RECORD."""

import base64
import csv
import email.parser
import email.policy
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, NormalizedName, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from envbuild.util.foreign_zip import ANY_WHEEL, Bounds, ZipError, opened_zip, pieces, read_member
from envbuild.util.names import FileName, checked, shown

_TEXT = 1 << 20
_RECORD = 32 << 20
_SIGNATURES = ("RECORD.jws", "RECORD.p7s")


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """What a wheel says of itself."""

    name: str
    """Its file name."""
    project: NormalizedName
    version: Version
    pythons: tuple[str, ...]
    """Its interpreter tags, such as cp312."""
    platforms: tuple[str, ...]
    """Its platform tags, such as linux_x86_64."""
    requires_python: str | None
    metadata: bytes
    """Its METADATA."""


def check_wheel(path: Path, name: str, *, bounds: Bounds = ANY_WHEEL) -> WheelFile:
    """Check that a file is the wheel that `name` says, and that its RECORD has the sha256 of every file.

    Args:
        path: the file.
        name: the file name that it has, or gets.
        bounds: how much of it is read.

    Raises:
        ValueError: the name is none of a wheel's, or the wheel is damaged, says two things, or is out of bounds.

    """
    try:
        project, version, _, tags = parse_wheel_filename(checked(FileName, name))
    except (InvalidWheelFilename, InvalidVersion) as error:
        raise ValueError(f"{shown(name)} is not the name of a wheel: {shown(str(error))}") from None
    with opened_zip(path, bounds) as archive:
        files = {info.filename for info in archive.infolist() if not info.is_dir()}
        infos = sorted({file.split("/", 1)[0] for file in files if file.split("/", 1)[0].endswith(".dist-info")})
        if len(infos) != 1:
            raise ZipError("it has no .dist-info, or more than one")
        folder = infos[0]
        for needed in ("METADATA", "WHEEL", "RECORD"):
            if f"{folder}/{needed}" not in files:
                raise ZipError(f"it has no {needed}")
        metadata = read_member(archive, f"{folder}/METADATA", _TEXT)
        stated = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(metadata, headersonly=True)
        _check_is(stated["Name"], stated["Version"], project, version)
        _check_record(archive, folder, files, bounds)
    return WheelFile(
        name=name,
        project=project,
        version=version,
        pythons=tuple(sorted({tag.interpreter for tag in tags})),
        platforms=tuple(sorted({tag.platform for tag in tags})),
        requires_python=_specifiers(stated["Requires-Python"]),
        metadata=metadata,
    )


def _check_is(name: object, version: object, project: NormalizedName, expected: Version) -> None:
    try:
        same = canonicalize_name(str(name)) == project and Version(str(version)) == expected
    except InvalidVersion:
        same = False
    if not same:
        raise ZipError(f"it is {shown(str(name), 80)} {shown(str(version), 80)}, not what its file name says")


def _check_record(archive: zipfile.ZipFile, folder: str, files: set[str], bounds: Bounds) -> None:
    record = f"{folder}/RECORD"
    text = read_member(archive, record, _RECORD).decode("utf-8", "surrogateescape")
    listed: dict[str, str] = {}
    try:
        for row in csv.reader(io.StringIO(text, newline="")):
            if len(row) != 3 or row[0] in listed:
                raise ZipError("its RECORD has a line that is none, or a file twice")
            listed[row[0]] = row[1]
    except csv.Error as error:
        raise ZipError(f"its RECORD cannot be read: {shown(str(error))}") from None
    without = {record, *(f"{folder}/{name}" for name in _SIGNATURES)}
    if other := sorted((listed.keys() | without) ^ (files | without)):
        raise ZipError(f"its RECORD and its files differ, in {shown(other[0])} first")
    for name in sorted(files - without):
        digest = hashlib.sha256()
        for piece in pieces(archive, name, bounds.bytes):
            digest.update(piece)
        if listed[name] != "sha256=" + base64.urlsafe_b64encode(digest.digest()).decode().rstrip("="):
            raise ZipError(f"{shown(name)} is not the file of its RECORD")


def _specifiers(stated: object) -> str | None:
    if stated is None:
        return None
    try:
        return str(SpecifierSet(str(stated)))
    except InvalidSpecifier:
        return None
