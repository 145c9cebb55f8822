"""Keys that sign: pairs are made, private ones sign, public ones verify. The work is `cryptography`'s.

A key is ECDSA on P-256 with SHA-256, which every tool that reads sigstore's formats knows (cosign's signature
specification, "Signature Schemes"), or Ed25519. The private one lies in a file as PKCS #8 in PEM, encrypted where a
password is given. The public one is a SubjectPublicKeyInfo in PEM, as `cosign verify --key` takes it, and as cosign
writes its own.

`cryptography` is imported when a key is read: most commands read none.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.errors import DataError, UsageError
from envbuild.registry.signers import Signature
from envbuild.util.below import OutsideError, read_file
from envbuild.util.names import SafeName, checked

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_LARGEST_KEY = 64 << 10
_KINDS = "an ECDSA key on P-256 or an Ed25519 key in PEM"


@dataclass(frozen=True, kw_only=True)
class PublicKey:
    """A key that verifies, and the name of whose it is."""

    name: str
    key: "EllipticCurvePublicKey | Ed25519PublicKey"

    @property
    def body(self) -> bytes:
        """The key without its name, DER: two with one body are one key."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self.key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @property
    def builder(self) -> str:
        """The id of the builder that signs with the private half."""
        return f"urn:envbuild:key:sha256:{hashlib.sha256(self.body).hexdigest()}"

    def verifies(self, signature: bytes, content: bytes) -> bool:
        """Return whether this key's private half signed `content`."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
        from cryptography.hazmat.primitives.hashes import SHA256

        try:
            if isinstance(self.key, EllipticCurvePublicKey):
                self.key.verify(signature, content, ECDSA(SHA256()))
            else:
                self.key.verify(signature, content)
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class KeyVerifier:
    """Judges signatures by a public key."""

    key: PublicKey

    @property
    def name(self) -> str:
        """The key's name."""
        return self.key.name

    @property
    def body(self) -> bytes:
        """The key, DER."""
        return self.key.body

    @property
    def builder(self) -> str:
        """The id of the builder that signs with the key."""
        return self.key.builder

    def accepts(self, signature: Signature) -> bool:
        """Return whether the key signed the payload."""
        return self.key.verifies(signature.signature, signature.payload)


@dataclass(frozen=True, kw_only=True)
class PrivateKey:
    """A key that signs."""

    name: str
    key: "EllipticCurvePrivateKey | Ed25519PrivateKey"

    def sign(self, content: bytes) -> bytes:
        """Return a signature of `content`: in DER for ECDSA, 64 bytes for Ed25519."""
        from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
        from cryptography.hazmat.primitives.hashes import SHA256

        if isinstance(self.key, EllipticCurvePrivateKey):
            return self.key.sign(content, ECDSA(SHA256()))
        return self.key.sign(content)

    @property
    def public(self) -> PublicKey:
        """The public half."""
        return PublicKey(name=self.name, key=self.key.public_key())

    @property
    def verifier(self) -> KeyVerifier:
        """Judges what this key signs."""
        return KeyVerifier(key=self.public)

    def signed(self, payload: bytes) -> Signature:
        """Return a signature of `payload`."""
        return Signature(payload=payload, signature=self.sign(payload))


def read_public_key(path: Path) -> PublicKey:
    """Return the public key in a PEM file; its name is the file's, without the ending.

    Raises:
        DataError: there is none, or of another kind.

    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    body, name = _read(path)
    try:
        key = load_pem_public_key(body)
    except (ValueError, UnsupportedAlgorithm):
        raise DataError("this is no public key", where=str(path), hint=f"it must be {_KINDS}") from None
    if isinstance(key, EllipticCurvePublicKey) and not isinstance(key.curve, SECP256R1):
        raise DataError(f"this key is on the curve {key.curve.name}", where=str(path), hint=f"it must be {_KINDS}")
    if not isinstance(key, EllipticCurvePublicKey | Ed25519PublicKey):
        raise DataError("this key is of another kind", where=str(path), hint=f"it must be {_KINDS}")
    return PublicKey(name=name, key=key)


def read_private_key(path: Path, password: Callable[[], str | None]) -> PrivateKey:
    """Return the private key in a PEM file; its name is the file's, without the ending.

    Args:
        path: the file.
        password: returns the password; called only where the key is encrypted.

    Raises:
        DataError: there is none, or of another kind.
        UsageError: the password is missing or wrong.

    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    body, name = _read(path)
    given = None
    try:
        if b"ENCRYPTED" in body.partition(b"\n")[0]:
            given = password()
            if not given:
                raise UsageError(
                    "the key has a password, and none was given", where=str(path), hint="set COSIGN_PASSWORD"
                )
        key = load_pem_private_key(body, given.encode() if given else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        if given:
            raise UsageError("the key's password is wrong, or the file is no key", where=str(path)) from None
        raise DataError("this is no private key", where=str(path), hint=f"it must be {_KINDS} (PKCS #8)") from None
    good = isinstance(key, Ed25519PrivateKey) or (
        isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1)
    )
    if not good or not isinstance(key, EllipticCurvePrivateKey | Ed25519PrivateKey):
        raise DataError("this key is of another kind", where=str(path), hint=f"it must be {_KINDS}")
    return PrivateKey(name=name, key=key)


def make_key_pair(folder: Path, name: str, password: str | None) -> tuple[Path, Path]:
    """Write a new pair to NAME.key, which this user alone may read, and NAME.pub; return the two paths.

    Args:
        folder: where they go.
        name: whose key it is.
        password: encrypts the private one.

    Raises:
        UsageError: `name` is no name, or one of the files is there.

    """
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        KeySerializationEncryption,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    try:
        checked(SafeName, name)
    except ValueError as error:
        raise UsageError(f"not a key's name: {error}") from None
    key = generate_private_key(SECP256R1())
    encryption: KeySerializationEncryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    places = folder / f"{name}.key", folder / f"{name}.pub"
    bodies = (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption),
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    )
    for place in places:
        if place.exists() or place.is_symlink():
            raise UsageError(f"{place} is there already", hint="choose another name: a key is never replaced")
    for place, body, mode in zip(places, bodies, (0o600, 0o644), strict=True):
        with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(body)
    return places


def _read(path: Path) -> tuple[bytes, str]:
    try:
        return read_file(path, limit=_LARGEST_KEY), checked(SafeName, path.stem)
    except OSError as error:
        raise DataError(f"a key cannot be read: {error.strerror}", where=str(path)) from None
    except (OutsideError, ValueError) as error:
        raise DataError(f"a key cannot be read: {error}", where=str(path)) from None
