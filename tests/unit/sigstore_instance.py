"""An instance of sigstore on the loopback interface, with its own keys: CI's tokens, the authority, its log, Rekor.

sigstore's library speaks to it as to the public one: it gives certificates for tokens (Fulcio's API, version 2), with a
signed timestamp of a certificate log (RFC 6962), and enters signatures in a Merkle tree (Rekor's API, version 1).
"""

import base64
import datetime as dt
import hashlib
import json
import secrets
import struct
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier
from fault_server import FaultServer

GITHUB = "https://token.actions.githubusercontent.com"
WORKFLOW = "acme/envbuild/.github/workflows/verify.yml@refs/heads/main"
IDENTITY = f"https://github.com/{WORKFLOW}"
CI = f"ci,{GITHUB},{IDENTITY}"
"""A value of the setting `trusted_identities`."""

_ISSUER = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_START = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def text(body: bytes) -> str:
    return base64.b64encode(body).decode()


def der(key) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def canonical(value) -> bytes:
    """JSON as RFC 8785 has it, for values without floating point and without odd characters."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def token(workflow: str = WORKFLOW, *, issuer: str = GITHUB, **claims: object) -> str:
    """Return an identity token as GitHub makes it; the library does not check who signed it, the authority does."""
    now = int(dt.datetime.now(dt.UTC).timestamp())
    stated = {
        "iss": issuer,
        "aud": "sigstore",
        "sub": "repo:acme/envbuild:ref:refs/heads/main",
        "job_workflow_ref": workflow,
        "iat": now,
        "nbf": now - 1,
        "exp": now + 300,
        **claims,
    }
    parts = ({"alg": "RS256", "typ": "JWT"}, stated)
    return ".".join(base64.urlsafe_b64encode(canonical(part)).decode().rstrip("=") for part in parts) + ".c2ln"


class Tree:
    """A Merkle tree (RFC 6962, 2.1)."""

    def __init__(self) -> None:
        self.leaves: list[bytes] = []

    def add(self, body: bytes) -> int:
        self.leaves.append(hashlib.sha256(b"\0" + body).digest())
        return len(self.leaves) - 1

    def root(self, leaves: list[bytes] | None = None) -> bytes:
        leaves = self.leaves if leaves is None else leaves
        if len(leaves) == 1:
            return leaves[0]
        half = 1 << (len(leaves) - 1).bit_length() - 1
        return hashlib.sha256(b"\1" + self.root(leaves[:half]) + self.root(leaves[half:])).digest()

    def path(self, index: int, leaves: list[bytes] | None = None) -> list[bytes]:
        leaves = self.leaves if leaves is None else leaves
        if len(leaves) == 1:
            return []
        half = 1 << (len(leaves) - 1).bit_length() - 1
        if index < half:
            return [*self.path(index, leaves[:half]), self.root(leaves[half:])]
        return [*self.path(index - half, leaves[half:]), self.root(leaves[:half])]


class Instance:
    """The authority, the logs and CI. `claims` is what CI's next tokens state."""

    def __init__(self) -> None:
        self.authority, self.certificates, self.log = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.root = self._root()
        self.tree = Tree()
        self.claims: dict[str, object] = {}
        self.server = FaultServer(self._answer)

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self.server.__exit__(*args)

    @property
    def entries(self) -> int:
        """How many signatures the log holds."""
        return len(self.tree.leaves)

    @property
    def ci(self) -> dict[str, str]:
        """What GitHub puts into the environment of a job with `id-token: write`."""
        return {
            "GITHUB_ACTIONS": "true",
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self.server.url}/token?api-version=2.0",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "of-this-job",
        }

    def trust(self, path: Path) -> Path:
        """Write the client trust configuration of this instance: whom to trust, and where to sign."""
        valid = {"start": _START.isoformat()}

        def log(key) -> dict[str, object]:
            return {
                "baseUrl": self.server.url,
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": text(der(key)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": valid,
                },
                "logId": {"keyId": text(hashlib.sha256(der(key)).digest())},
            }

        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.log)],
            "certificateAuthorities": [
                {
                    "subject": {"organization": "acme", "commonName": "authority"},
                    "uri": self.server.url,
                    "certChain": {"certificates": [{"rawBytes": text(self.root.public_bytes(Encoding.DER))}]},
                    "validFor": valid,
                }
            ],
            "ctlogs": [log(self.certificates)],
            "timestampAuthorities": [],
        }
        service = {"url": self.server.url, "majorApiVersion": 1, "validFor": valid, "operator": "acme"}
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [service],
            "oidcUrls": [service],
            "rekorTlogUrls": [service],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaUrls": [],
            "tsaConfig": {"selector": "ANY"},
        }
        whole = {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": root,
            "signingConfig": signing,
        }
        path.write_text(json.dumps(whole if path.name.startswith("client") else root))
        return path

    def _answer(self, fault, number: int) -> None:
        del number
        place = fault.path.partition("?")[0]
        if place == "/token" and "audience=sigstore" in fault.path:
            assert fault.headers["Authorization"] == "bearer of-this-job"
            self._json(fault, {"value": token(**self.claims)})
        elif place == "/api/v2/signingCert":
            stated = fault.headers["Authorization"].removeprefix("Bearer ").split(".")[1]
            claims = json.loads(base64.urlsafe_b64decode(stated + "=" * (-len(stated) % 4)))
            request = base64.b64decode(json.loads(fault.body())["certificateSigningRequest"])
            leaf = self.certificate(x509.load_pem_x509_csr(request).public_key(), claims)
            chain = [each.public_bytes(Encoding.PEM).decode() for each in (leaf, self.root)]
            self._json(fault, {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}})
        elif place == "/api/v1/log/entries":
            self._json(fault, {secrets.token_hex(32): self._entered(canonical(json.loads(fault.body())))}, status=201)
        else:
            fault.send(status=404)

    @staticmethod
    def _json(fault, value: object, status: int = 200) -> None:
        fault.send(json.dumps(value).encode(), status=status, Content_Type="application/json")

    def _root(self) -> x509.Certificate:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        public = self.authority.public_key()
        usage = {"digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"}
        more = {"encipher_only", "decipher_only"}
        return (
            x509.CertificateBuilder(name, name, public, 1, _START, _START + dt.timedelta(days=3650))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(
                x509.KeyUsage(key_cert_sign=True, crl_sign=True, **dict.fromkeys(usage | more, False)), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority, SHA256())
        )

    def certificate(self, public, claims) -> x509.Certificate:
        """Return a certificate of ten minutes for the identity in a token, which a log of certificates has seen."""
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        uri = f"https://github.com/{claims['job_workflow_ref']}"
        off = {"content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "key_cert_sign"}
        more = {"crl_sign", "encipher_only", "decipher_only"}
        builder = (
            x509.CertificateBuilder(
                self.root.subject,
                x509.Name([]),
                public,
                x509.random_serial_number(),
                now,
                now + dt.timedelta(minutes=10),
            )
            .add_extension(x509.KeyUsage(digital_signature=True, **dict.fromkeys(off | more, False)), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER, claims["iss"].encode()), critical=False)
        )
        before = builder.sign(self.authority, SHA256()).tbs_certificate_bytes
        stamp = self._timestamp(before, int(now.timestamp() * 1000))
        value = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        octets = b"\x04" + (struct.pack("!B", len(value)) if len(value) < 128 else struct.pack("!BB", 0x81, len(value)))
        listed = x509.UnrecognizedExtension(_TIMESTAMPS, octets + value)
        return builder.add_extension(listed, critical=False).sign(self.authority, SHA256())

    def _timestamp(self, certificate: bytes, moment: int) -> bytes:
        """Return a log's timestamp of a certificate that does not hold it yet (RFC 6962, 3.2 and 3.3)."""
        issuer = hashlib.sha256(der(self.authority)).digest()
        entry = issuer + struct.pack("!I", len(certificate))[1:] + certificate
        signed = self.certificates.sign(
            struct.pack("!BBQH", 0, 0, moment, 1) + entry + struct.pack("!H", 0), ec.ECDSA(SHA256())
        )
        log = hashlib.sha256(der(self.certificates)).digest()
        return struct.pack("!B32sQH", 0, log, moment, 0) + struct.pack("!BBH", 4, 3, len(signed)) + signed

    def _entered(self, body: bytes) -> dict[str, object]:
        """Enter a signature, and return what Rekor answers: the entry, the promise and the proof that it is in the tree."""
        index, log = self.tree.add(body), hashlib.sha256(der(self.log)).digest()
        entry = {
            "body": text(body),
            "integratedTime": int(dt.datetime.now(dt.UTC).timestamp()),
            "logID": log.hex(),
            "logIndex": index,
        }
        note = f"acme - 1\n{self.entries}\n{text(self.tree.root())}\n"
        signed = self.log.sign(note.encode(), ec.ECDSA(SHA256()))
        proof = {
            "logIndex": index,
            "rootHash": self.tree.root().hex(),
            "treeSize": self.entries,
            "hashes": [each.hex() for each in self.tree.path(index)],
            "checkpoint": f"{note}\n\u2014 acme {text(log[:4] + signed)}\n",
        }
        promise = text(self.log.sign(canonical(entry), ec.ECDSA(SHA256())))
        return {**entry, "verification": {"signedEntryTimestamp": promise, "inclusionProof": proof}}
