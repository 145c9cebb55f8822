"""Pushing to, asking and pulling from a real registry."""

import base64
import json
import uuid

import pytest

from envbuild.engine.client import EngineClient
from envbuild.engine.registry import pull_verified, push
from envbuild.errors import HostError, LockError, UsageError
from envbuild.net.registry import find_digest

NOWHERE = "sha256:" + "0" * 64
# bcrypt, cost 5, of the password "let-me-in"
USERS = "builder:$2b$05$abcdefghijklmnopqrstuu3Jd./u/rH1RxB6auX5v7gLP6uWhKCgG\n"


@pytest.fixture
def make_image(engine, tmp_path):
    """Build an image of one file under a new tag; return the tag. All of them are removed again."""
    made = []

    def make(tag: str, content: str) -> str:
        (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY content /\n")
        (tmp_path / "content").write_text(content)
        engine.buildx.build(tmp_path, output={"type": "image", "name": tag}, provenance=False, progress=False)
        made.append(tag)
        return tag

    yield make
    engine.image.remove(made, force=True)


@pytest.fixture
def repository(registry):
    return f"{registry}/team/cell-{uuid.uuid4().hex}"


def test_a_pushed_image_has_in_the_registry_the_digest_that_push_returned(make_image, engine, client, repository):
    tag = make_image(f"{repository}:one", "one")
    digest = push(client, tag)
    assert find_digest(tag) == digest
    assert find_digest(f"{repository}@{digest}") == digest


def test_a_pull_gives_the_locked_image_though_its_tag_has_moved(make_image, engine, client, repository):
    tag = make_image(f"{repository}:latest", "as locked")
    locked = push(client, tag)
    moved = push(client, make_image(tag, "moved on"))
    assert moved != locked
    assert find_digest(repository) == moved
    engine.image.remove(tag, force=True)

    assert pull_verified(client, tag, locked) == f"{repository}@{locked}"
    assert f"{repository}@{locked}" in engine.image.inspect(tag).repo_digests


def test_another_engine_pulls_the_same_image(make_image, engine, client, second_engine, repository):
    tag = make_image(f"{repository}:shared", "shared")
    digest = push(client, tag)
    other = EngineClient(client.settings.model_copy(update={"engine_host": second_engine.client_config.host}))
    pull_verified(other, tag, digest)
    assert f"{repository}@{digest}" in second_engine.image.inspect(tag).repo_digests


def test_what_the_registry_does_not_hold(make_image, engine, client, repository):
    assert find_digest(f"{repository}:absent") is None
    with pytest.raises(LockError, match="does not have this image"):
        pull_verified(client, f"{repository}:absent", NOWHERE)
    with pytest.raises(LockError, match="not a digest"):
        pull_verified(client, f"{repository}:absent", "sha256:12")
    with pytest.raises(UsageError, match="has no image"):
        push(client, f"{repository}:never-built")


def test_a_registry_that_does_not_answer_is_named(client):
    gone = "127.0.0.1:9/team/cell:one"
    for ask in (find_digest, lambda ref: pull_verified(client, ref, NOWHERE)):
        with pytest.raises(HostError, match=r"127\.0\.0\.1:9") as caught:
            ask(gone)
        assert caught.value.hint


def test_a_login_is_asked_for_and_used(make_image, engine, client, start_registry, tmp_path, monkeypatch):
    users = tmp_path / "htpasswd"
    users.write_text(USERS)
    host = start_registry(f"auth: {{htpasswd: {{realm: tests, path: {users}}}}}\n")
    config = tmp_path / "docker"
    config.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(config))
    tag = make_image(f"{host}/team/private:one", "private")
    for ask in (find_digest, lambda ref: push(client, ref)):
        with pytest.raises(HostError, match="refuses access to team/private") as caught:
            ask(tag)
        assert caught.value.hint == f"docker login {host}"

    def log_in(password: str) -> None:
        auth = base64.b64encode(f"builder:{password}".encode()).decode()
        (config / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))

    log_in("wrong")
    with pytest.raises(HostError, match="refuses access"):
        find_digest(tag)
    log_in("let-me-in")
    assert find_digest(tag) is None
    digest = push(client, tag)
    assert find_digest(tag) == digest

    (config / "config.json").write_text(json.dumps({"credsStore": "nonsuch"}))
    with pytest.raises(HostError, match="docker-credential-nonsuch is not installed"):
        find_digest(tag)
