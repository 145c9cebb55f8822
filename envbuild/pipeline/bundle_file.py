"""A bundle on the disk: one tar that begins with `bundle.json`, which lists every other file with its size and sha256.

A bundle comes from another machine, so nothing in it is trusted. It holds plain files alone, each below one of the known
folders, listed, once, with the listed bytes. Anything else ends the reading, before a file has its name. What the files
are is checked afterwards, against the lock (`pipeline.unbundle`).
"""

import base64
import binascii
import contextlib
import hashlib
import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self, cast

from pydantic import ValidationError

from envbuild.errors import LockError
from envbuild.registry.keys import PrivateKey
from envbuild.registry.signatures import Policy, payload_of, signed_digest
from envbuild.registry.signers import Signature
from envbuild.util.below import OutsideError, open_below
from envbuild.util.foreign_json import parse_json
from envbuild.util.foreign_tar import Bounds, Member, TarError, read_tar
from envbuild.util.model import AfterValidator, Field, Model, model_validator
from envbuild.util.names import Digest, Line, Sha256, TreePath, Version, shown
from envbuild.util.text import count_of

LISTING = "bundle.json"
SIGNATURES = "signatures.json"
FOLDERS = ("cache", "debs", "image", "lock", "packages", "sources", "tool")
"""What a bundle has, as it lies on the disk: what a cache holds, OS packages, the image, its lock, Python packages, …"""
_MOST = 50_000
_LISTING_BYTES = 12 << 20
_SIGNATURES_BYTES = 1 << 20
_MOST_SIGNATURES = 50
_PIECE = 1 << 20
_SIGNED_AS = "bundle"
# Parts of a path; the deepest that `envbuild bundle` writes has four.
_DEEPEST = 12


class BundleError(LockError):
    """A bundle that is damaged, not what it should be, or made to do harm."""


def _below_known(value: str) -> str:
    if value.partition("/")[0] not in FOLDERS or "/" not in value:
        raise ValueError(f"{shown(value, 80)!r} is in none of the folders of a bundle")
    if value.count("/") >= _DEEPEST:
        raise ValueError(f"{shown(value, 80)!r} has more than {_DEEPEST} parts")
    return value


class BundledFile(Model):
    """One file of a bundle."""

    path: Annotated[TreePath, AfterValidator(_below_known)]
    size: int = Field(ge=0, strict=True)
    """Bytes."""
    sha256: Sha256


class Bundle(Model):
    """What a bundle states of itself: `bundle.json`."""

    version: Literal[1] = 1
    """Version of this format."""
    envbuild: Version
    """The release that made it."""
    python: Version
    """major.minor of the Python that the wheels in `tool` are for."""
    lock: Digest
    image: Digest
    missing: tuple[Line, ...] = Field(default=(), max_length=100)
    """What a rebuild needs and the bundle does not have."""
    files: tuple[BundledFile, ...] = Field(max_length=_MOST)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        paths = {file.path for file in self.files}
        if len(paths) != len(self.files):
            raise ValueError("a file is listed twice")
        for path in paths:
            parts = path.split("/")
            if any("/".join(parts[:count]) in paths for count in range(1, len(parts))):
                raise ValueError(f"{path} lies below a file")
        return self


@dataclass(frozen=True, kw_only=True)
class Written:
    """A bundle that was written."""

    bundle: Bundle
    sha256: str
    """Of the whole file."""
    size: int
    """Its bytes."""


class _Hashed:
    """A file whose bytes are hashed as they go through."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.sha256, self.size = file, hashlib.sha256(), 0

    def _seen(self, piece: bytes) -> bytes:
        self.sha256.update(piece)
        self.size += len(piece)
        return piece

    def write(self, piece: bytes) -> int:
        self._seen(piece)
        return self.file.write(piece)

    def read(self, count: int) -> bytes:
        return self._seen(self.file.read(count))


def write_bundle(output: Path, files: Mapping[str, Path], keys: Sequence[PrivateKey], **stated: Any) -> Written:
    """Write a bundle; the same files give the same bytes.

    Args:
        output: the new file, in a folder that exists.
        files: the file for each path in the bundle.
        keys: each signs the list of files.
        stated: the other fields of `Bundle`.

    Raises:
        BundleError: a file has a name that a bundle cannot hold, or changed meanwhile.
        OSError: there is no room, or a file cannot be read.

    """
    listed = []
    for path in sorted(files):
        with files[path].open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        listed.append({"path": path, "size": files[path].stat().st_size, "sha256": digest})
    try:
        bundle = Bundle.model_validate({**stated, "files": listed})
    except ValidationError as error:
        raise _shape(error, str(output)) from None
    body = (bundle.model_dump_json(indent=1) + "\n").encode()
    if len(body) > _LISTING_BYTES:
        raise BundleError(f"its list would have {len(body)} bytes, and may have {_LISTING_BYTES}", where=str(output))
    with output.open("xb") as raw:
        hashed = _Hashed(raw)
        with tarfile.open(fileobj=cast("IO[bytes]", hashed), mode="w|", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, LISTING, io.BytesIO(body), len(body))
            if keys:
                signatures = _signatures(body, keys)
                _add(tar, SIGNATURES, io.BytesIO(signatures), len(signatures))
            for each in bundle.files:
                with files[each.path].open("rb") as file:
                    again = _Hashed(file)
                    _add(tar, each.path, again, each.size)
                if again.sha256.hexdigest() != each.sha256:
                    raise BundleError("a file changed while it was read", where=str(files[each.path]), hint="try again")
    return Written(bundle=bundle, sha256=hashed.sha256.hexdigest(), size=hashed.size)


def _add(tar: tarfile.TarFile, name: str, content: Any, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    tar.addfile(member, content)


def _signatures(body: bytes, keys: Sequence[PrivateKey]) -> bytes:
    payload = payload_of(_SIGNED_AS, _digest(body))
    made = [
        {"payload": base64.b64encode(payload).decode(), "signature": base64.b64encode(key.sign(payload)).decode()}
        for key in keys
    ]
    return (json.dumps({"signatures": made}, indent=1) + "\n").encode()


def _digest(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """A bundle that was read whole."""

    bundle: Bundle
    signers: tuple[str, ...]
    """The trusted keys that signed it."""
    sha256: str
    """Of the whole file."""


def unpack_bundle(
    path: Path, folder: Path, *, policy: Policy | None, sha256: str | None = None, note: Callable[[str], object]
) -> Unpacked:
    """Write every file of a bundle below an empty folder, each compared with the list of the bundle.

    Args:
        path: the bundle.
        folder: where its files go; after an error it may hold some of them.
        policy: who must have signed; None asks for no signature.
        sha256: of the whole file, where a person named it.
        note: takes a line about what is read.

    Raises:
        BundleError: it is no bundle, is damaged, holds what it does not list, or the wrong people signed it.
        OSError: the file cannot be read, or the folder cannot be written.

    """
    where = shown(str(path))
    with _opened(path) as raw:
        hashed = _Hashed(raw)
        members = read_tar(hashed, Bounds(members=_MOST + 2))
        try:
            bundle, signers, first = _head(members, policy, where)
            waiting = {file.path: file for file in bundle.files}
            note(f"checking {count_of(len(waiting), 'file')}")
            for member in _with(first, members):
                listed = waiting.pop(member.path, None)
                if member.kind != "file" or member.body is None:
                    raise BundleError(
                        f"{shown(member.path)} is a {member.kind}, and a bundle holds files alone", where=where
                    )
                if listed is None:
                    raise BundleError(f"{shown(member.path)} is not listed, or is in it twice", where=where, hint=_DROP)
                _write(member, listed, folder, where)
        except TarError as error:
            raise BundleError(f"this is not a bundle: {error}", where=where, hint=_DROP) from None
        if waiting:
            names = ", ".join(sorted(waiting)[:3])
            raise BundleError(
                f"{count_of(len(waiting), 'file is', 'files are')} missing, {names} first",
                where=where,
                hint="copy it again",
            )
        while hashed.read(_PIECE):
            pass
    found = hashed.sha256.hexdigest()
    if sha256 is not None and found != sha256:
        raise BundleError(f"its sha256 is {found}, not {sha256}", where=where, hint=_DROP)
    return Unpacked(bundle=bundle, signers=signers, sha256=found)


_DROP = "do not use it; copy it again, or ask who made it"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise BundleError(
                "this is no file", where=shown(str(path)), hint="name the file that `envbuild bundle` wrote"
            )
        yield file


def _with(first: Member | None, rest: Iterator[Member]) -> Iterator[Member]:
    if first is not None:
        yield first
    yield from rest


def _head(
    members: Iterator[Member], policy: Policy | None, where: str
) -> tuple[Bundle, tuple[str, ...], Member | None]:
    """Return what a bundle states, the trusted keys that signed it, and the first member behind."""
    listing = next(members, None)
    if listing is None or listing.path != LISTING:
        raise BundleError(f"this is not a bundle: it does not begin with {LISTING}", where=where, hint=_DROP)
    body = _text(listing, _LISTING_BYTES, where)
    first = next(members, None)
    signatures: list[Signature] = []
    if first is not None and first.path == SIGNATURES:
        signatures = _read_signatures(_text(first, _SIGNATURES_BYTES, where), where)
        first = next(members, None)
    # Before the list is read: what the wrong people signed takes no time and no memory.
    signers = _signers(signatures, _digest(body), policy, where)
    try:
        bundle = Bundle.model_validate(parse_json(body, limit=_LISTING_BYTES))
    except ValidationError as error:
        raise _shape(error, where) from None
    except ValueError as error:
        raise BundleError(f"{LISTING} cannot be read: {error}", where=where, hint=_DROP) from None
    return bundle, signers, first


def _text(member: Member, limit: int, where: str) -> bytes:
    if member.body is None or member.size > limit:
        raise BundleError(f"{member.path} is no file of at most {limit} bytes", where=where, hint=_DROP)
    body = bytearray()
    while piece := member.body.read(_PIECE):
        body += piece
    return bytes(body)


def _shape(error: ValidationError, where: str) -> BundleError:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    return BundleError(f"{LISTING} is not right: {shown(place, 100)}: {shown(first['msg'])}", where=where, hint=_DROP)


def _read_signatures(body: bytes, where: str) -> list[Signature]:
    try:
        stated: Any = parse_json(body, limit=_SIGNATURES_BYTES)
        listed = stated["signatures"]
        if not isinstance(listed, list) or len(listed) > _MOST_SIGNATURES:
            raise ValueError("more than 50, or no list")  # noqa: TRY301 - reported below
        return [
            Signature(
                payload=base64.b64decode(each["payload"], validate=True),
                signature=base64.b64decode(each["signature"], validate=True),
            )
            for each in listed
        ]
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise BundleError(f"{SIGNATURES} cannot be read: {shown(str(error))}", where=where, hint=_DROP) from None


def _signers(signatures: Sequence[Signature], digest: str, policy: Policy | None, where: str) -> tuple[str, ...]:
    """Return the trusted keys that signed the list of files with this digest."""
    if policy is None:
        return ()
    good = [each for each in signatures if _names(each, digest)]
    found = tuple(v.name for v in policy.verifiers if any(v.accepts(each) for each in good))
    if len(found) < policy.needed:
        trusted = ", ".join(v.name for v in policy.verifiers)
        raise BundleError(
            f"{count_of(policy.needed, 'signature is', 'signatures are')} needed, and {len(found)} of the trusted keys signed this bundle",
            where=where,
            hint=f"do not use it, and ask who made it; the settings trust {trusted} (trusted_keys)",
        )
    return found


def _names(signature: Signature, digest: str) -> bool:
    try:
        return signed_digest(signature.payload) == digest
    except ValueError:
        return False


def _write(member: Member, listed: BundledFile, folder: Path, where: str) -> None:
    """Write one file, and raise BundleError unless it has the listed size and hash."""
    assert member.body is not None  # noqa: S101
    digest = hashlib.sha256()
    if member.size != listed.size:
        raise BundleError(f"{listed.path} has {member.size} bytes, {listed.size} are listed", where=where, hint=_DROP)
    try:
        handle = open_below(folder, listed.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True)
    except OutsideError as error:
        raise BundleError(str(error), where=where, hint=_DROP) from None
    with os.fdopen(handle, "wb") as file:
        while piece := member.body.read(_PIECE):
            digest.update(piece)
            file.write(piece)
    if digest.hexdigest() != listed.sha256:
        raise BundleError(
            f"{listed.path} has the sha256 {digest.hexdigest()}, {listed.sha256} is listed", where=where, hint=_DROP
        )
