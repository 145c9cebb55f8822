"""What a signature is, who makes one and who judges one: by a key (`keys`), or by an identity of CI (`keyless`)."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Signature:
    """What claims to be a signature of a payload."""

    payload: bytes
    signature: bytes
    bundle: str = ""
    """Sigstore's bundle in JSON, for a signature without a key of one's own: certificate, signature, the log's entry."""


class Verifier(Protocol):
    """Judges signatures: by a public key, or by an identity in a certificate."""

    @property
    def name(self) -> str:
        """Whose signature it is."""

    @property
    def body(self) -> bytes:
        """Who it is, without the name: two with one body are one signer."""

    @property
    def builder(self) -> str:
        """The URI that provenance names this signer by."""

    def accepts(self, signature: Signature) -> bool:
        """Return whether `signature` is of this signer over just its payload.

        Raises:
            HostError: it cannot be judged here, whoever made it.

        """


class Signer(Protocol):
    """Signs payloads: with a private key, or with a certificate that CI's identity gets."""

    @property
    def name(self) -> str:
        """Whose signature it makes."""

    @property
    def verifier(self) -> Verifier:
        """Judges what this signs."""

    def signed(self, payload: bytes) -> Signature:
        """Return a signature of `payload`.

        Raises:
            HostError: a service that it needs cannot be reached or refuses.
            LockError: what came out is not this signer's.

        """
