"""Artifacts in a real registry: pushed, pulled, listed by what they are about, changed by many at once."""

import concurrent.futures
import io
import secrets

import pytest

from envbuild.errors import LockError
from envbuild.registry.manifests import MANIFEST, artifact_of, described, index_body
from envbuild.registry.repository import Repository

TYPE = "application/vnd.envbuild.test.v1"


@pytest.fixture
def repo(registry):
    with Repository(f"{registry}/team/{secrets.token_hex(4)}") as repository:
        yield repository


def test_an_artifact_comes_back(repo, tmp_path):
    path = tmp_path / "large"
    path.write_bytes(secrets.token_bytes(5 << 20))
    blobs = [repo.push_blob(b"content", "text/plain", annotations={"a": "b"}), repo.push_blob(path, "application/zip")]
    artifact = artifact_of(TYPE, blobs, annotations={"org.example": "ä"})
    own = repo.push_artifact(artifact, tag="v1")
    for reference in ("v1", own.digest):
        descriptor, found = repo.artifact(reference, TYPE)
        assert descriptor.digest == own.digest
        assert found == artifact
    assert repo.read_blob(blobs[0], limit=100) == b"content"
    file = io.BytesIO()
    repo.save_blob(blobs[1], file, limit=6 << 20)
    assert file.getvalue() == path.read_bytes()
    assert repo.manifest("v2") is None


def test_a_blob_is_sent_once(repo):
    assert not repo.has_blob(described(b"content", "text/plain").digest)
    assert repo.push_blob(b"content", "text/plain") == repo.push_blob(b"content", "text/plain")
    assert repo.has_blob(described(b"content", "text/plain").digest)


def test_a_manifest_without_its_blobs_is_refused(repo):
    with pytest.raises(Exception, match="answered 4"):
        repo.push_artifact(artifact_of(TYPE, [described(b"not there", "text/plain")]))


def test_what_refers_to_a_manifest(repo):
    subject = repo.push_artifact(artifact_of(TYPE, []), tag="subject")
    assert repo.referrers(subject.digest) == ()
    pushed = []
    for kind in ("sbom", "provenance"):
        blob = repo.push_blob(kind.encode(), "text/plain")
        pushed.append(repo.push_artifact(artifact_of(f"application/vnd.{kind}", [blob], subject=subject)))
    assert {each.digest for each in repo.referrers(subject.digest)} == {each.digest for each in pushed}
    (sbom,) = repo.referrers(subject.digest, "application/vnd.sbom")
    _, artifact = repo.artifact(sbom.digest, "application/vnd.sbom", subject=subject.digest)
    assert repo.read_blob(artifact.blobs[0], limit=100) == b"sbom"
    # the subject keeps its digest
    assert repo.manifest("subject").descriptor.digest == subject.digest


def test_a_listed_referrer_that_is_about_something_else_is_refused(repo):
    """The list is a tag that anybody who may push can write."""
    subject = repo.push_artifact(artifact_of(TYPE, []), tag="subject")
    other = repo.push_artifact(artifact_of(TYPE, [], annotations={"other": "1"}))
    forged = repo.push_artifact(artifact_of("application/vnd.sbom", [], subject=other))
    repo.push_manifest(
        index_body((forged,)), "application/vnd.oci.image.index.v1+json", tag=subject.digest.replace(":", "-")
    )
    (listed,) = repo.referrers(subject.digest)
    with pytest.raises(LockError, match="is about"):
        repo.artifact(listed.digest, "application/vnd.sbom", subject=subject.digest)


def test_many_attach_at_once(repo):
    subject = repo.push_artifact(artifact_of(TYPE, []), tag="subject")

    def attach(number):
        with Repository(repo.name) as own:
            return own.push_artifact(artifact_of(TYPE, [], subject=subject, annotations={"n": str(number)})).digest

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        digests = set(pool.map(attach, range(4)))
    assert {each.digest for each in repo.referrers(subject.digest)} == digests


def test_a_manifest_by_digest_is_of_its_repository(repo, registry):
    own = repo.push_artifact(artifact_of(TYPE, []))
    assert repo.manifest(own.digest).descriptor.mediaType == MANIFEST
    with Repository(f"{registry}/team/{secrets.token_hex(4)}") as other:
        assert other.manifest(own.digest) is None


def test_the_same_blob_pushed_at_once_by_several(registry):
    """The registry writes a blob's link again for each, and refuses a manifest that it looks at meanwhile."""
    name = f"{registry}/team/{secrets.token_hex(4)}"

    def one(number):
        with Repository(name) as own:
            for turn in range(10):
                blob = own.push_blob(f"turn {turn}".encode(), "text/plain")
                own.push_artifact(artifact_of(TYPE, [blob]), tag=f"of-{number}-{turn}")

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(4)))
    with Repository(name) as own:
        assert all(own.manifest(f"of-{number}-{turn}") for number in range(4) for turn in range(10))
