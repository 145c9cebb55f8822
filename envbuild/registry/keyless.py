"""Signatures without a key of one's own, for CI: sigstore's short-lived certificates. The work is sigstore's library's.

CI gives a job an OIDC token that says which workflow it is. Fulcio, sigstore's authority, puts that identity into a
certificate of ten minutes, and Rekor, its log, records the signature, so that it can be judged when the certificate has
expired. What is kept is sigstore's bundle: certificate, signature and the log's entry. It is judged offline, by the
trusted root alone: the keys of the authority and of the logs.

The trusted root is the public instance's, which the library fetches and checks by TUF, or the file in the settings.
sigstore is imported when such a signature is made or judged: it is an extra of the package, `envbuild[keyless]`.
"""

import base64
import functools
import importlib.util
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.registry.signers import Signature
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, read_file
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig, TrustedRoot
    from sigstore.verify import Verifier as Judge

_LARGEST_TRUST = 1 << 20
_LARGEST_BUNDLE = 64 << 10
_AGAIN_S = 60.0
"""How long the public instance is not asked again after it did not answer: each question takes its time limits."""
_WHOLE = "application/vnd.dev.sigstore.clienttrustconfig."
_GITHUB = "https://token.actions.githubusercontent.com"
_HOW_IN_CI = "signing_identity is for CI, which gives a job an OIDC token; on GitHub the job needs `permissions: id-token: write`"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Somebody whom an OIDC issuer confirms: a workflow, a person."""

    name: str
    """What the settings call it."""
    issuer: str
    identity: str
    """The certificate's subject alternative name: a workflow's URI, an e-mail address."""

    @classmethod
    def parse(cls, text: str) -> "Identity":
        """Return the identity in a value of the setting `trusted_identities`."""
        name, issuer, identity = text.split(",", 2)
        return cls(name=name, issuer=issuer, identity=identity)

    @property
    def body(self) -> bytes:
        """It without its name: two with one body are one signer."""
        return f"{self.issuer}\n{self.identity}".encode()


def require_library() -> None:
    """Check that sigstore's library is installed.

    Raises:
        HostError: it is not.

    """
    if importlib.util.find_spec("sigstore") is None:
        raise HostError(
            "signatures by identity need sigstore's library, which is not installed",
            where="trusted_identities",
            hint="pip install 'envbuild[keyless]'",
        )


def _silent() -> None:
    """Keep the library's log away from stderr: it repeats foreign text."""
    for name in ("sigstore", "tuf", "id"):
        log = logging.getLogger(name)
        log.propagate = False
        if not log.handlers:
            log.addHandler(logging.NullHandler())


def _trust_of_file(path: Path) -> "ClientTrustConfig | TrustedRoot":
    from sigstore.models import ClientTrustConfig, TrustedRoot
    from sigstore_models.trustroot.v1 import TrustedRoot as Root

    try:
        body = read_file(path, limit=_LARGEST_TRUST)
        value: Any = parse_json(body, limit=_LARGEST_TRUST)
        if isinstance(value, dict) and str(value.get("mediaType")).startswith(_WHOLE):
            return ClientTrustConfig.from_json(body.decode())
        return TrustedRoot(Root.from_json(body))
    except OSError as error:
        raise DataError(f"the trusted root cannot be read: {error.strerror}", where=str(path)) from None
    except (OutsideError, ValueError) as error:
        why = shown(str(error).partition("\n")[0])
    except Exception as error:  # noqa: BLE001 - the library's own errors have no common class but this
        why = shown(str(error).partition("\n")[0])
    raise DataError(
        f"this is no trusted root of sigstore: {why}",
        where=str(path),
        hint="it is a trusted_root.json, or a client trust configuration where this machine signs",
    )


@functools.lru_cache(maxsize=4)
def _trust(path: Path | None) -> "ClientTrustConfig | TrustedRoot":
    """Return what is trusted: of a file, or of the public instance.

    Raises:
        DataError: the file cannot be read, or is none.
        HostError: the public instance's root cannot be fetched.

    """
    _silent()
    if path is not None:
        return _trust_of_file(path)
    return _trust_of_public_instance()


_failed: list[tuple[float, str]] = []
"""When the public instance did not answer last, and why."""


def _trust_of_public_instance() -> "ClientTrustConfig":
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig

    if not _failed or time.monotonic() - _failed[-1][0] > _AGAIN_S:
        try:
            return ClientTrustConfig.production()
        except (Error, OSError, ValueError) as error:
            _failed[:] = [(time.monotonic(), shown(str(error).partition("\n")[0]))]
    raise HostError(
        f"sigstore's trusted root cannot be fetched: {_failed[-1][1]}",
        where="tuf-repo-cdn.sigstore.dev",
        hint="try again, or name a copy of trusted_root.json in the setting sigstore_trust",
    )


@functools.lru_cache(maxsize=4)
def _judge(path: Path | None) -> "Judge":
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig
    from sigstore.verify import Verifier as Judge

    trust = _trust(path)
    try:
        return Judge(trusted_root=trust.trusted_root if isinstance(trust, ClientTrustConfig) else trust)
    except (Error, ValueError) as error:  # a root without a log or an authority
        raise DataError(
            f"this trusted root cannot be used: {shown(str(error).partition(chr(10))[0])}",
            where=str(path or "sigstore_trust"),
        ) from None


@dataclass(frozen=True, kw_only=True)
class IdentityVerifier:
    """Judges signatures by an identity in a certificate."""

    identity: Identity
    trust: Path | None = None
    """The file of the trusted root; None for the public instance's."""

    @property
    def name(self) -> str:
        """The identity's name in the settings."""
        return self.identity.name

    @property
    def body(self) -> bytes:
        """Issuer and identity."""
        return self.identity.body

    @property
    def builder(self) -> str:
        """The identity as a URI: a workflow's is one already."""
        text = self.identity.identity
        return text if "://" in text else f"mailto:{text}"

    def accepts(self, signature: Signature) -> bool:
        """Return whether a certificate of the trusted authority has this identity, and its key signed the payload.

        Raises:
            DataError, HostError: there is no trusted root to judge by.

        """
        if not signature.bundle:
            return False
        judge = _judge(self.trust)
        from sigstore.models import Bundle
        from sigstore.verify.policy import Identity as Asked

        asked = Asked(identity=self.identity.identity, issuer=self.identity.issuer)
        try:
            parse_json(signature.bundle.encode(), limit=_LARGEST_BUNDLE)  # bounds its depth
            judge.verify_artifact(signature.payload, Bundle.from_json(signature.bundle), asked)
        except Exception:  # noqa: BLE001 - what a foreign certificate or JSON makes the libraries raise has no common class
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class KeylessSigner:
    """Signs with a certificate that the identity token of this CI job gets; a new one for each signature."""

    verifier: IdentityVerifier
    trust: "ClientTrustConfig"

    @property
    def name(self) -> str:
        """The identity's name in the settings."""
        return self.verifier.name

    def signed(self, payload: bytes) -> Signature:
        """Return a signature of `payload`; the log keeps its hash and the certificate for good.

        Raises:
            UsageError: CI gives no token any more.
            HostError: the authority or the log cannot be reached or refuses.
            LockError: the certificate is of another identity than the settings name.

        """
        from sigstore.oidc import IdentityToken
        from sigstore.sign import SigningContext

        token = _token()
        try:
            context = SigningContext.from_trust_config(self.trust)
            with context.signer(IdentityToken(token)) as signer:
                bundle = signer.sign_artifact(payload)
            content = bundle.to_json()
            raw = base64.b64decode(json.loads(content)["messageSignature"]["signature"])
        except Exception as error:  # noqa: BLE001 - requests', the authority's and the log's errors have no common class
            raise HostError(
                f"sigstore gave no signature: {type(error).__name__} {shown(str(error).partition(chr(10))[0])}".rstrip(),
                where=self.verifier.identity.identity,
                hint="try again; its state is on status.sigstore.dev",
            ) from None
        made = Signature(payload=payload, signature=raw, bundle=content)
        if not self.verifier.accepts(made):
            raise LockError(
                f"the certificate that this job got is not of the identity {self.name}",
                where=self.verifier.identity.identity,
                hint="correct identity and issuer in trusted_identities; nothing was signed in the registry",
            )
        return made


def identities_of(settings: Settings) -> tuple[IdentityVerifier, ...]:
    """Return the identities that the settings trust.

    Raises:
        HostError: there are some, and sigstore's library is not installed.

    """
    if settings.trusted_identities:
        require_library()
    return tuple(
        IdentityVerifier(identity=Identity.parse(text), trust=settings.sigstore_trust)
        for text in settings.trusted_identities
    )


def keyless_signer(settings: Settings) -> KeylessSigner | None:
    """Return what signs with this CI job's identity; None where the settings name none.

    Raises:
        DataError: the settings trust no identity of that name, or their trusted root names no services to sign with.
        UsageError: there is no identity token, or it is of another workflow or issuer.
        HostError: the library or the trusted root is missing.

    """
    if settings.signing_identity is None:
        return None
    found = next((each for each in identities_of(settings) if each.name == settings.signing_identity), None)
    if found is None:
        raise DataError(
            f"trusted_identities has no {shown(settings.signing_identity)}",
            where="signing_identity",
            hint="name one of trusted_identities: who signs must be trusted by those who pull",
        )
    from sigstore.models import ClientTrustConfig

    trust = _trust(settings.sigstore_trust)
    if not isinstance(trust, ClientTrustConfig):
        raise DataError(
            "this trusted root names no services that sign",
            where=str(settings.sigstore_trust),
            hint="signing needs a client trust configuration: a trusted root and a signing configuration in one file",
        )
    _require_identity(found.identity, _token())
    return KeylessSigner(verifier=found, trust=trust)


def _token() -> str:
    """Return the identity token that CI gives this job.

    Raises:
        UsageError: it gives none.

    """
    from sigstore.oidc import IdentityError, detect_credential

    _silent()
    try:
        token = detect_credential()
    except IdentityError as error:
        raise UsageError(f"CI gave no identity token: {shown(str(error))}", where="CI", hint=_HOW_IN_CI) from None
    if token is None:
        raise UsageError("there is no identity token here", where="signing_identity", hint=_HOW_IN_CI)
    return token


def _require_identity(identity: Identity, token: str) -> None:
    """Check what a token says before anything is signed; whether it is right is the authority's to say.

    Raises:
        UsageError: it is of another issuer, or, on GitHub, of another workflow.

    """
    from sigstore.oidc import IdentityError, IdentityToken

    try:
        issuer = IdentityToken(token).federated_issuer
        body = token.split(".")[1]
        claims: Any = parse_json(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)), limit=_LARGEST_BUNDLE)
    except (IdentityError, ValueError, IndexError) as error:
        raise UsageError(f"CI's identity token cannot be read: {shown(str(error))}", where="signing_identity") from None
    if issuer != identity.issuer:
        raise UsageError(
            f"CI's identity token is of {shown(issuer)}, and {identity.name} is of {identity.issuer}",
            where="signing_identity",
            hint="correct the issuer in trusted_identities",
        )
    workflow = claims.get("job_workflow_ref") if isinstance(claims, dict) else None
    # Fulcio makes the certificate's name of these two (its configuration of GitHub: ci-provider-metadata).
    if issuer == _GITHUB and isinstance(workflow, str) and f"https://github.com/{workflow}" != identity.identity:
        raise UsageError(
            f"this job is https://github.com/{shown(workflow)}, and {identity.name} is {identity.identity}",
            where="signing_identity",
            hint="correct the identity in trusted_identities, or sign in the workflow and on the branch that it names",
        )
