"""Signatures in a real registry: signed once each, by several, and never by who did not sign."""

import concurrent.futures
import secrets

import pytest

from envbuild.errors import LockError
from envbuild.registry.keys import KeyVerifier, make_key_pair, read_private_key
from envbuild.registry.manifests import MANIFEST, artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import Policy, require_signed, sign, signature_tag, signers

TYPE = "application/vnd.envbuild.test.v1"


@pytest.fixture
def repo(registry):
    with Repository(f"{registry}/team/{secrets.token_hex(4)}") as repository:
        yield repository


@pytest.fixture
def keys(tmp_path):
    return [read_private_key(make_key_pair(tmp_path, name, None)[0], lambda: None) for name in ("a", "b", "c")]


def pushed(repo, text):
    return repo.push_artifact(artifact_of(TYPE, [], annotations={"text": text})).digest


def test_signed_by_two_of_three(repo, keys):
    digest = pushed(repo, "one")
    verifiers = [KeyVerifier(key=key.public) for key in keys]
    assert signers(repo, digest, verifiers) == ()
    sign(repo, digest, keys[1])
    sign(repo, digest, keys[0])
    assert signers(repo, digest, verifiers) == ("a", "b")
    assert require_signed(repo, digest, Policy(verifiers=verifiers, needed=2), what="it") == ("a", "b")
    with pytest.raises(LockError, match="3 signatures are needed"):
        require_signed(repo, digest, Policy(verifiers=verifiers, needed=3), what="it")


def test_a_key_signs_once(repo, keys):
    digest = pushed(repo, "one")
    sign(repo, digest, keys[0])
    before = repo.manifest(signature_tag(digest)).descriptor
    sign(repo, digest, keys[0])
    assert repo.manifest(signature_tag(digest)).descriptor == before


def test_signing_at_once_loses_nobody(repo, keys):
    digest = pushed(repo, "one")

    def one(key):
        with Repository(repo.name) as own:
            sign(own, digest, key)

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(one, keys))
    assert signers(repo, digest, [KeyVerifier(key=key.public) for key in keys]) == ("a", "b", "c")


def test_signatures_of_another_manifest_do_not_count(repo, keys):
    """Who may push can put one manifest's signatures at another's tag."""
    good, bad = pushed(repo, "good"), pushed(repo, "bad")
    sign(repo, good, keys[0])
    body = repo.manifest(signature_tag(good)).body
    repo.push_manifest(body, MANIFEST, tag=signature_tag(bad))
    with pytest.raises(LockError, match="signed by none of the trusted keys"):
        require_signed(repo, bad, Policy(verifiers=[KeyVerifier(key=keys[0].public)]), what="it")


def test_what_is_no_signature_is_replaced_by_signing(repo, keys):
    digest = pushed(repo, "one")
    repo.push_artifact(artifact_of(TYPE, []), tag=signature_tag(digest))
    verifier = KeyVerifier(key=keys[0].public)
    with pytest.raises(LockError, match="another type"):
        signers(repo, digest, [verifier])
    sign(repo, digest, keys[0])
    assert signers(repo, digest, [verifier]) == ("a",)
