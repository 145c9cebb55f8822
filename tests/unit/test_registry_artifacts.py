"""Artifacts of a registry that lies, ends early, never ends, or sends its client elsewhere."""

import contextlib
import hashlib
import io
import json

import pytest
from fault_server import FaultServer

from envbuild.errors import HostError, LockError
from envbuild.registry.manifests import (
    EMPTY_TYPE,
    INDEX,
    MANIFEST,
    Descriptor,
    artifact_of,
    described,
    index_body,
    read_artifact,
    read_referrers,
)
from envbuild.registry.repository import Repository

TYPE = "application/vnd.envbuild.test.v1"
BLOB = described(b"content", "text/plain")
ARTIFACT = artifact_of(TYPE, [BLOB])
BODY = ARTIFACT.body()
OWN = described(BODY, MANIFEST)


@contextlib.contextmanager
def repository(answer):
    with FaultServer(answer) as server, Repository(f"{server.url.removeprefix('http://')}/team/name") as repo:
        yield repo, server


def serving(body, media_type=MANIFEST, **headers):
    return lambda fault, number: fault.send(body, Content_Type=media_type, **headers)


def manifest(**changed):
    value = json.loads(BODY) | changed
    return json.dumps({key: each for key, each in value.items() if each is not None}).encode()


def test_a_manifest_goes_both_ways():
    again = read_artifact(BODY)
    assert again == ARTIFACT
    assert again.body() == BODY


def test_a_manifest_of_a_digest_has_it():
    with repository(serving(BODY)) as (repo, _):
        descriptor, artifact = repo.artifact(OWN.digest, TYPE)
        assert (descriptor.digest, artifact) == (OWN.digest, ARTIFACT)
        with pytest.raises(LockError, match="is another one"):
            repo.manifest("sha256:" + "0" * 64)


def test_a_header_with_another_digest_is_refused():
    answer = serving(BODY, Docker_Content_Digest="sha256:" + "1" * 64)
    with repository(answer) as (repo, _), pytest.raises(LockError, match="is another one"):
        repo.manifest("latest")


def test_another_type_is_refused():
    with repository(serving(BODY)) as (repo, _), pytest.raises(LockError, match="another type"):
        repo.artifact("latest", "application/vnd.other")


def test_another_subject_is_refused():
    subject = described(b"{}", MANIFEST)
    about = artifact_of(TYPE, [BLOB], subject=subject)
    with repository(serving(about.body())) as (repo, _):
        assert repo.artifact("latest", TYPE, subject=subject.digest)
        with pytest.raises(LockError, match="is about"):
            repo.artifact("latest", TYPE, subject=OWN.digest)
    with repository(serving(BODY)) as (repo, _), pytest.raises(LockError, match="is about nothing"):
        repo.artifact("latest", TYPE, subject=OWN.digest)


def test_a_manifest_is_no_larger_than_registries_take():
    with repository(serving(b" " * (4 << 20) + BODY)) as (repo, _), pytest.raises(LockError, match="at most 4 MiB"):
        repo.manifest("latest")


def test_none_is_none():
    with repository(lambda fault, number: fault.send(status=404)) as (repo, _):
        assert repo.manifest("latest") is None
        assert repo.artifact("latest", TYPE) is None


WRONG = {
    "no JSON": b"{",
    "a list": b"[]",
    "not UTF-8": b'{"a": "\xff"}',
    "deep": b"[" * 200 + b"]" * 200,
    "another schema": manifest(schemaVersion=1),
    "no config": manifest(config=None),
    "a config that is a list": manifest(config=[]),
    "no layers": manifest(layers=None),
    "layers that are a text": manifest(layers="abc"),
    "too many layers": manifest(layers=[BLOB.plain()] * 1001),
    "a digest that is a path": manifest(layers=[BLOB.plain() | {"digest": "../../etc/passwd"}]),
    "sha512": manifest(layers=[BLOB.plain() | {"digest": "sha512:" + "0" * 128}]),
    "a negative size": manifest(layers=[BLOB.plain() | {"size": -1}]),
    "a size that is no whole number": manifest(layers=[BLOB.plain() | {"size": 1.0}]),
    "a size that is true": manifest(layers=[BLOB.plain() | {"size": True}]),
    "a size beyond any file": manifest(layers=[BLOB.plain() | {"size": 1 << 60}]),
    "a type with a line break": manifest(artifactType="a/b\nc"),
    "a type that is a number": manifest(artifactType=7),
    "annotations that are numbers": manifest(annotations={"a": 1}),
    "too many annotations": manifest(annotations={str(i): "" for i in range(101)}),
    "a long annotation": manifest(annotations={"a": "b" * 20000}),
    "a subject that is a text": manifest(subject="sha256:" + "0" * 64),
    "an image index": manifest(mediaType=INDEX),
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_no_manifest_is_refused(body):
    with repository(serving(body)) as (repo, _), pytest.raises(LockError, match="a manifest cannot be read"):
        repo.artifact("latest", TYPE)


def test_unknown_keys_are_ignored():
    body = manifest(later={"a": 1}, layers=[BLOB.plain() | {"data": "Y29udGVudA==", "urls": ["https://example.org"]}])
    assert read_artifact(body) == ARTIFACT


def test_an_old_manifest_is_of_its_configs_type():
    assert read_artifact(manifest(artifactType=None)).artifact_type == EMPTY_TYPE


@pytest.mark.parametrize("content", [b"Content", b"conten", b"content!", b""])
def test_a_blob_that_is_another_one_is_refused(content):
    with repository(serving(content)) as (repo, _):
        with pytest.raises(LockError):
            repo.read_blob(BLOB, limit=100)
        with pytest.raises(LockError):
            repo.save_blob(BLOB, io.BytesIO(), limit=100)


def test_a_blob_goes_to_a_file_from_its_start():
    def answer(fault, number):
        if number == 1:
            fault.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nbad")
            fault.reset()
        else:
            fault.send(b"content")

    with repository(answer) as (repo, server):
        file = io.BytesIO()
        repo.save_blob(BLOB, file, limit=100)
        assert file.getvalue() == b"content"
        assert len(server.seen) == 2


def test_a_blob_over_its_limit_is_not_asked_for():
    with repository(serving(b"content")) as (repo, server):
        with pytest.raises(LockError, match="too large"):
            repo.read_blob(BLOB, limit=6)
        assert not server.seen


def test_a_blob_that_is_missing():
    answer = lambda fault, number: fault.send(status=404)  # noqa: E731
    with repository(answer) as (repo, _), pytest.raises(LockError, match="does not hold a blob"):
        repo.read_blob(BLOB, limit=100)


def test_referrers_of_one_type_by_pages():
    first, second = (Descriptor(mediaType=MANIFEST, digest=f"sha256:{c * 64}", size=1, artifactType=TYPE) for c in "ab")
    other = Descriptor(mediaType=MANIFEST, digest=f"sha256:{'c' * 64}", size=1, artifactType="application/other")

    def answer(fault, number):
        if "?" in fault.path:
            fault.send(index_body((second,)), Content_Type=INDEX)
        else:
            link = '</v2/team/name/referrers/x?page=2>; rel="next"'
            fault.send(index_body((other, first)), Content_Type=INDEX, Link=link)

    with repository(answer) as (repo, _):
        assert repo.referrers(OWN.digest, TYPE) == (first, second)
        assert repo.referrers(OWN.digest) == (other, first, second)


def test_pages_of_referrers_end():
    def answer(fault, number):
        fault.send(index_body(()), Content_Type=INDEX, Link=f'</v2/team/name/referrers/x?page={number}>; rel="next"')

    with repository(answer) as (repo, server):
        assert repo.referrers(OWN.digest) == ()
        assert len(server.seen) == 20


@pytest.mark.parametrize("place", ["http://example.org/x", "//example.org/x", "http://a:b@127.0.0.1/x", "ftp://x/y"])
def test_a_page_of_another_host_is_refused(place):
    answer = serving(index_body(()), INDEX, Link=f'<{place}>; rel="next"')
    with repository(answer) as (repo, _), pytest.raises(LockError, match="refers to another host"):
        repo.referrers(OWN.digest)


def test_too_many_referrers_are_refused():
    one = Descriptor(mediaType=MANIFEST, digest=f"sha256:{'a' * 64}", size=1)
    with pytest.raises(ValueError, match="more than 1000"):
        read_referrers(index_body((one,) * 1001))


def test_an_upload_goes_to_no_other_host():
    with FaultServer(lambda fault, number: fault.send(status=201)) as other:

        def answer(fault, number):
            if fault.method == "HEAD":
                fault.send(status=404)
            else:
                fault.send(status=202, Location=f"{other.url}/upload")

        with repository(answer) as (repo, _), pytest.raises(LockError, match="refers to another host"):
            repo.push_blob(b"content", "text/plain")
        assert not other.seen


def test_a_redirect_takes_no_upload_elsewhere():
    with FaultServer(lambda fault, number: fault.send(status=201)) as other:

        def answer(fault, number):
            if fault.method == "HEAD":
                fault.send(status=404)
            elif fault.method == "POST":
                fault.send(status=202, Location="/v2/team/name/blobs/uploads/1")
            else:
                fault.body()
                fault.send(status=307, Location=f"{other.url}/upload")

        with repository(answer) as (repo, _), pytest.raises(LockError, match="redirects an upload"):
            repo.push_blob(b"content", "text/plain")
        assert not other.seen


def test_what_is_pushed_is_what_was_given(tmp_path):
    path = tmp_path / "wheel"
    path.write_bytes(b"x" * 600_000)
    sent = {}

    def answer(fault, number):
        if fault.method == "HEAD":
            fault.send(status=404)
        elif fault.method == "POST":
            fault.send(status=202, Location="/v2/team/name/blobs/uploads/1?_state=a")
        else:
            sent[fault.path] = (fault.body(), fault.headers["Content-Type"])
            fault.send(status=201)

    with repository(answer) as (repo, _):
        blob = repo.push_blob(path, "application/zip")
    assert blob.digest == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert sent == {
        f"/v2/team/name/blobs/uploads/1?_state=a&digest={blob.digest.replace(':', '%3A')}": (
            path.read_bytes(),
            "application/octet-stream",
        )
    }


def test_a_registry_that_stores_another_manifest_is_refused():
    def answer(fault, number):
        fault.body()
        fault.send(status=200 if fault.method == "HEAD" else 201, Docker_Content_Digest="sha256:" + "2" * 64)

    with repository(answer) as (repo, _), pytest.raises(LockError, match="it stored"):
        repo.push_artifact(ARTIFACT, tag="latest")


def test_a_refused_push_says_so():
    def answer(fault, number):
        fault.body()
        fault.send(status=200 if fault.method == "HEAD" else 405, reason="Method Not Allowed")

    with repository(answer) as (repo, _), pytest.raises(HostError, match="answered 405 Method Not Allowed"):
        repo.push_artifact(ARTIFACT, tag="latest")


@pytest.mark.parametrize(("refusals", "stored"), [(2, True), (99, False)])
def test_a_manifest_whose_blobs_are_unknown_for_a_moment_is_sent_again(refusals, stored, monkeypatch):
    monkeypatch.setattr("envbuild.registry.repository._PAUSES_S", (0.0, 0.0, 0.0))
    bodies = []

    def answer(fault, number):
        body = fault.body()
        if fault.method == "HEAD":
            fault.send(status=200)
        else:
            bodies.append(body)
            fault.send(status=400 if len(bodies) <= refusals else 201, reason="Bad Request")

    with repository(answer) as (repo, _):
        if stored:
            repo.push_artifact(ARTIFACT, tag="latest")
        else:
            with pytest.raises(HostError, match="answered 400 Bad Request"):
                repo.push_artifact(ARTIFACT, tag="latest")
    assert bodies == [ARTIFACT.body()] * (3 if stored else 4)


def test_a_login_is_asked_for_once_and_what_it_may_do(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    scopes, logins = [], []

    def answer(fault, number):
        if fault.path.startswith("/token"):
            scopes.append(fault.path)
            fault.send(b'{"token": "abc"}')
            return
        fault.body()
        logins.append(fault.headers.get("Authorization"))
        if logins[-1] is None:
            here = fault.headers["Host"]
            fault.send(status=401, WWW_Authenticate=f'Bearer realm="http://{here}/token",service="s"')
        else:
            fault.send(status=201)

    with repository(answer) as (repo, _):
        repo.push_manifest(BODY, MANIFEST, tag="a")
        repo.push_manifest(BODY, MANIFEST, tag="b")
    assert logins == [None, "Bearer abc", "Bearer abc"]
    assert len(scopes) == 1
    assert "repository%3Ateam%2Fname%3Apull%2Cpush" in scopes[0]


@pytest.mark.parametrize("reference", ["", "a/b", "../x", "a b", "sha256:12", "-x", "x" * 129])
def test_a_reference_is_a_tag_or_a_digest(reference):
    with repository(serving(BODY)) as (repo, server), pytest.raises(ValueError, match=r"tag|pattern|digest"):
        repo.manifest(reference)
    assert not server.seen
