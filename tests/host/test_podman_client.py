"""The client of podman, by a command that prints what podman 4.3.1 prints."""

import json
from pathlib import Path

import pytest

from envbuild.engine.client import EngineError, NoImageError
from envbuild.engine.podman import PodmanClient, pulling_client
from envbuild.errors import HostError
from envbuild.settings import Settings

INFO = {"host": {"arch": "arm64", "cpus": 2, "memTotal": 2**34}, "version": {"Version": "4.3.1"}}


@pytest.fixture
def podman(tmp_path, monkeypatch):
    """Return a function that makes a client whose podman command is a script; it keeps the words of each call."""

    def made(script: str) -> PodmanClient:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "podman"
        program.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
        return PodmanClient(Settings(cache_dir=tmp_path, engine="podman"))

    return made


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def test_podman_states_its_version_and_machine(podman):
    client = podman(f"echo '{json.dumps(INFO)}'")
    assert client.version() == "4.3.1"
    assert client.machine().platform == "linux/arm64"
    assert client.machine().memory_gib == 16
    assert client.platforms() == ("linux/arm64",)


@pytest.mark.parametrize("script", ["exit 125", "echo '[]'", "echo", "echo '{\"host\": 1}'"])
def test_a_podman_that_does_not_answer(podman, script):
    client = podman(script)
    assert client.version() == "unknown"
    with pytest.raises(HostError, match="podman"):
        pulling_client(client.settings)


def test_no_podman(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = Settings(cache_dir=tmp_path, engine="podman")
    with pytest.raises(HostError, match="the podman command is missing"):
        pulling_client(settings)
    with pytest.raises(HostError, match="there is no podman command"):
        PodmanClient(settings).image("x")


def test_an_image_that_is_not_there(podman):
    with pytest.raises(NoImageError, match="there is no image x:1 here") as caught:
        podman("echo '[]'; echo 'Error: inspecting object: x:1: image not known' >&2; exit 125").image("x:1")
    assert "`podman image ls`" in caught.value.hint


def test_containers_by_label_come_from_json(podman, tmp_path):
    rows = [
        {"Names": ["envbuild-look-1"], "Labels": {"io.a": "b c"}},
        {"Names": ["other"], "Labels": None},
        {"Names": [], "Labels": {"io.a": "x"}},
        {"Names": ["odd"], "Labels": {"io.a": 1}},
    ]
    client = podman(f"echo '{json.dumps(rows)}'")
    assert list(client.labelled("io.a")) == [("envbuild-look-1", "b c")]
    assert calls(tmp_path) == ["ps --all --filter label=io.a --format json"]
    for script in ("exit 125", "echo nonsense", "echo '{}'"):
        assert list(podman(script).labelled("io.a")) == []


def test_a_container_gets_no_more_than_this_users_limits(podman, tmp_path):
    client = podman("")
    client.create("name", "image", ["true"], ["--network", "none"])
    client.create("name", "image", ["true"], ["--ulimit", "nofile=5:5"])
    first, second = calls(tmp_path)
    assert first.startswith("create --name name --pull never --network none --ulimit nofile=")
    assert first.endswith("-- image true")
    assert "--ulimit nproc=" in first
    assert second == "create --name name --pull never --ulimit nofile=5:5 -- image true"


def test_names_of_images_are_those_of_docker(podman, tmp_path):
    assert podman("echo localhost/envbuild:a; echo quay.io/envbuild:b").tags("envbuild") == [
        "envbuild:a",
        "quay.io/envbuild:b",
    ]
    podman("").tag("sha256:1", "envbuild:a")
    assert calls(tmp_path)[-1] == "image tag -- sha256:1 envbuild:a"
    with pytest.raises(EngineError, match="podman does not tag the image: Error: no"):
        podman("echo 'Error: no' >&2; exit 125").tag("sha256:1", "envbuild:a")
