"""Keys and policies: what is no key, what no key signed, and a registry's signatures that cannot be read."""

import base64
import json
import stat
import subprocess

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fault_server import FaultServer

from envbuild.errors import DataError, HostError, LockError, UsageError
from envbuild.registry import keyless
from envbuild.registry.keys import KeyVerifier, make_key_pair, read_private_key, read_public_key
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import Policy, payload_of, require_signed, signed_digest, signers

DIGEST = "sha256:" + "ab" * 32


def none():
    return None


@pytest.fixture
def pair(tmp_path):
    private, public = make_key_pair(tmp_path, "release", None)
    return read_private_key(private, none), read_public_key(public)


def test_a_pair_signs_and_verifies(pair):
    private, public = pair
    assert (private.name, public.name) == ("release", "release")
    signature = private.sign(b"content")
    assert public.verifies(signature, b"content")
    assert not public.verifies(signature, b"Content")
    assert not public.verifies(b"", b"content")
    assert not public.verifies(signature[:-1], b"content")


def test_openssl_checks_what_is_signed(pair, tmp_path):
    """Another implementation agrees on the key's format and the signature's."""
    private, _ = pair
    (tmp_path / "content").write_bytes(b"content")
    (tmp_path / "signature").write_bytes(private.sign(b"content"))
    checking = ["openssl", "dgst", "-sha256", "-verify", "release.pub", "-signature", "signature", "content"]
    done = subprocess.run(checking, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Verified OK\n")


def test_the_private_key_is_this_users_alone(pair, tmp_path):
    assert stat.S_IMODE((tmp_path / "release.key").stat().st_mode) == 0o600
    assert b"PRIVATE" not in (tmp_path / "release.pub").read_bytes()


def test_a_key_is_never_replaced(pair, tmp_path):
    before = (tmp_path / "release.key").read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        make_key_pair(tmp_path, "release", None)
    assert (tmp_path / "release.key").read_bytes() == before


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "a b"])
def test_a_keys_name_is_no_path(name, tmp_path):
    with pytest.raises(UsageError, match="not a key's name"):
        make_key_pair(tmp_path, name, None)


def test_a_password(tmp_path):
    path, public = make_key_pair(tmp_path, "release", "secret")
    assert b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes()
    key = read_private_key(path, lambda: "secret")
    assert read_public_key(public).verifies(key.sign(b"a"), b"a")
    with pytest.raises(UsageError, match="password is wrong"):
        read_private_key(path, lambda: "other")
    with pytest.raises(UsageError, match="none was given"):
        read_private_key(path, none)


def test_ed25519_works_as_well(tmp_path):
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", "a.key"], cwd=tmp_path, check=True)
    subprocess.run(["openssl", "pkey", "-in", "a.key", "-pubout", "-out", "a.pub"], cwd=tmp_path, check=True)
    key, public = read_private_key(tmp_path / "a.key", none), read_public_key(tmp_path / "a.pub")
    assert public.verifies(key.sign(b"a"), b"a")
    assert not public.verifies(key.sign(b"a"), b"b")


def of_other_kinds():
    pem = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    yield rsa.generate_private_key(65537, 2048).public_key().public_bytes(*pem)
    yield ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes(*pem)
    yield b""
    yield b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
    yield b"\xff" * 100
    yield b"a" * (65 << 10)


@pytest.mark.parametrize("body", list(of_other_kinds()), ids=["rsa", "p384", "empty", "damaged", "bytes", "large"])
def test_what_is_no_key_is_refused(body, tmp_path):
    (tmp_path / "a.pub").write_bytes(body)
    with pytest.raises(DataError):
        read_public_key(tmp_path / "a.pub")
    with pytest.raises(DataError):
        read_private_key(tmp_path / "a.pub", none)


def test_a_missing_key(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_public_key(tmp_path / "a.pub")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"{}",
        b'{"critical":[]}',
        b'{"critical":{"type":"cosign container image signature"}}',
        b'{"critical":{"type":"cosign container image signature","image":{"docker-manifest-digest":7}}}',
        payload_of("a/b", DIGEST).replace(b"cosign container", b"other"),
        payload_of("a/b", DIGEST).replace(b"abab", b"abag"),
        payload_of("a/b", DIGEST) + b" " * (65 << 10),
    ],
)
def test_what_is_no_payload(payload):
    assert signed_digest(payload_of("a/b", DIGEST)) == DIGEST
    with pytest.raises(ValueError, match=r".+"):
        signed_digest(payload)


def serving(*layers, bundle=None):
    """Serve a manifest of signatures with (annotation, payload) each; `bundle` is what claims to be sigstore's, in each."""
    import hashlib

    blobs = {f"sha256:{hashlib.sha256(payload).hexdigest()}": payload for _, payload in layers}
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "sha256:" + "0" * 64, "size": 1}
    manifest = {
        "schemaVersion": 2,
        "config": config,
        "layers": [
            {
                "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
                "digest": f"sha256:{hashlib.sha256(payload).hexdigest()}",
                "size": len(payload),
                "annotations": {"dev.cosignproject.cosign/signature": text}
                | ({"dev.sigstore.bundle/content": bundle} if bundle else {}),
            }
            for text, payload in layers
        ],
    }

    def answer(fault, number):
        name = fault.path.rsplit("/", 1)[-1]
        if name == "sha256-" + "ab" * 32 + ".sig":
            body = json.dumps(manifest).encode()
            fault.send(body, Content_Type="application/vnd.oci.image.manifest.v1+json")
        elif name in blobs:
            fault.send(blobs[name])
        else:
            fault.send(status=404)

    return FaultServer(answer)


def found(server, *verifiers, needed=None):
    with server as running, Repository(f"{running.url.removeprefix('http://')}/a/b") as repository:
        return signers(repository, DIGEST, verifiers, needed=needed)


def text_of(signature):
    return base64.b64encode(signature).decode()


def test_a_good_signature_counts_among_damaged_ones(pair):
    private, public = pair
    good = payload_of("a/b", DIGEST)
    other = payload_of("a/b", "sha256:" + "cd" * 32)
    layers = [
        ("no base64!", good + b" "),
        ("", good + b"  "),
        (text_of(b"0" * 70), good + b"   "),
        (text_of(private.sign(other)), other),  # of another digest
        (text_of(private.sign(good)), good),
    ]
    verifier = KeyVerifier(key=public)
    assert found(serving(*layers[:4]), verifier) == ()
    assert found(serving(*layers), verifier) == ("release",)
    assert found(serving(*layers)) == ()


def test_a_signed_text_that_is_no_payload_does_not_count(pair):
    private, public = pair
    text = b"anything that was signed for another end: sha256:" + b"ab" * 32
    assert found(serving((text_of(private.sign(text)), text)), KeyVerifier(key=public)) == ()


def test_too_many_signatures_are_not_looked_at(pair):
    private, public = pair
    good = payload_of("a/b", DIGEST)
    layer = (text_of(private.sign(good)), good)
    with pytest.raises(LockError, match="at most 50"):
        found(serving(*[layer] * 51), KeyVerifier(key=public))


def test_k_of_n(pair, tmp_path):
    first, public = pair
    second = read_private_key(make_key_pair(tmp_path, "second", None)[0], none)
    good = payload_of("a/b", DIGEST)
    both = (KeyVerifier(key=public), KeyVerifier(key=second.public))

    def require(needed, *keys):
        layers = [(text_of(key.sign(good)), good) for key in keys]
        with serving(*layers) as running, Repository(f"{running.url.removeprefix('http://')}/a/b") as repository:
            return require_signed(repository, DIGEST, Policy(verifiers=both, needed=needed), what="the catalogue")

    assert require(2, second, first) == ("release", "second")
    assert require(1, second) == ("second",)
    with pytest.raises(LockError, match="is signed by release, and 2 signatures are needed"):
        require(2, first, first)
    with pytest.raises(LockError, match="the catalogue is signed by none of the trusted keys"):
        require(1, read_private_key(make_key_pair(tmp_path, "third", None)[0], none))
    with pytest.raises(LockError, match="the catalogue is not signed"):
        require(1)


@pytest.fixture
def no_public_root(tmp_path, monkeypatch):
    """Close the way to sigstore's public instance, whose trusted root is not on this disk either."""
    monkeypatch.setattr(keyless, "_failed", [])
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


@pytest.mark.usefixtures("no_public_root")
def test_without_the_public_root_the_keys_decide_where_they_are_enough(pair):
    private, public = pair
    identity = keyless.IdentityVerifier(identity=keyless.Identity.parse("ci,https://issuer.example,x"))
    by_key = KeyVerifier(key=public)
    good = payload_of("a/b", DIGEST)
    signed, unsigned = (text_of(private.sign(good)), good), (text_of(b"0" * 70), good + b" ")

    for layers in ([signed], [unsigned, signed]):
        for verifiers in ((by_key, identity), (identity, by_key)):
            assert found(serving(*layers, bundle="{}"), *verifiers, needed=1) == ("release",)
    for layers, needed in (([signed], 2), ([unsigned], 1), ([signed], None)):
        with pytest.raises(HostError, match="trusted root cannot be fetched"):
            found(serving(*layers, bundle="{}"), identity, by_key, needed=needed)
    # nothing to judge for the identity: it did not sign
    assert found(serving(signed), identity, by_key, needed=1) == ("release",)


@pytest.mark.usefixtures("no_public_root")
def test_the_public_instance_is_not_asked_again_at_once(pair, monkeypatch):
    private, _ = pair
    good = payload_of("a/b", DIGEST)
    layer = (text_of(private.sign(good)), good)
    identities = [
        keyless.IdentityVerifier(identity=keyless.Identity.parse(f"ci{n},https://issuer.example,x{n}"))
        for n in range(3)
    ]
    with FaultServer(lambda fault, _: fault.send(status=503)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        monkeypatch.setenv("https_proxy", proxy.url)
        for _ in range(2):
            with pytest.raises(HostError, match="trusted root cannot be fetched"):
                found(serving(layer, bundle="{}"), *identities)
        asked = len(proxy.seen)
        monkeypatch.setattr(keyless, "_failed", [])
        with pytest.raises(HostError, match="trusted root cannot be fetched"):
            found(serving(layer, bundle="{}"), *identities[:1])
        assert len(proxy.seen) == 2 * asked > 0
