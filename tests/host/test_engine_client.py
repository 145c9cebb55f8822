"""The client of the engine where no engine answers, or what answers is no engine."""

from pathlib import Path

import pytest

from envbuild.engine.client import EngineClient, EngineError, NoImageError, engine_client
from envbuild.errors import HostError
from envbuild.settings import Settings


@pytest.fixture
def client(tmp_path) -> EngineClient:
    return EngineClient(Settings(cache_dir=tmp_path, engine_host=f"unix://{tmp_path}/none.sock"))


def docker_that(tmp_path: Path, monkeypatch, script: str) -> EngineClient:
    """A client whose docker command is a script."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return EngineClient(Settings(cache_dir=tmp_path))


def test_an_engine_that_does_not_answer_is_an_error_of_the_host(client):
    for ask in (
        lambda: engine_client(client.settings),
        lambda: client.image("one"),
        lambda: client.find_image("one"),  # whether there is one is not known
        client.machine,
        lambda: client.tag("one", "two"),
        lambda: client.save("one", Path("unused")),
    ):
        with pytest.raises(HostError) as caught:
            ask()
        assert not isinstance(caught.value, NoImageError)
        assert caught.value.exit_code == 8
    for do in (lambda: client.pull("one"), lambda: client.push("one"), lambda: client.load(Path("none.tar"))):
        with pytest.raises(EngineError) as failed:
            do()
        assert failed.value.output


def test_what_is_tidied_up_is_left_where_no_engine_answers(client):
    assert client.tags("one") == []
    assert list(client.labelled("one")) == []
    client.untag("one")
    client.remove("one")


def test_a_container_that_the_engine_is_removing_is_waited_for(tmp_path, monkeypatch):
    """`--rm` removes it, too, and the engine refuses the second one while that goes on."""
    busy = "removal of container one is already in progress"
    script = f"""echo x >>{tmp_path}/asked
[ $(wc -l <{tmp_path}/asked) -lt 7 ] || {{ echo 'No such container: one' >&2; exit 1; }}
echo 'Error response from daemon: {busy}' >&2; exit 1"""
    docker_that(tmp_path, monkeypatch, script).remove("one")
    assert (tmp_path / "asked").read_text().count("x") == 7


def test_a_missing_docker_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    client = EngineClient(Settings(cache_dir=tmp_path))
    for ask in (client.require, lambda: client.image("one")):
        with pytest.raises(HostError, match="docker command"):
            ask()
    assert list(client.labelled("one")) == []
    assert client.tags("one") == []
    client.remove("one")


def test_an_image_that_the_engine_loads_and_cannot_unpack_is_an_error(tmp_path, monkeypatch):
    """The command itself ends with 0."""
    output = "Error unpacking image one:latest: failed to extract layer: no space left on device"
    client = docker_that(tmp_path, monkeypatch, f"echo 'Loaded image: one:latest'; echo '{output}'")
    with pytest.raises(EngineError, match="does not unpack") as caught:
        client.load(Path("unused.tar"))
    assert "no space left on device" in caught.value.output


DRIVERS = {
    "Name: default\nDriver: docker": True,
    "Name: farm\nDriver: docker-container": False,
    "Name: Driver: docker\nDriver: remote": False,
    "": False,
}


@pytest.mark.parametrize("answer", DRIVERS)
def test_only_the_engines_own_builder_builds_into_its_store(tmp_path, monkeypatch, answer):
    assert docker_that(tmp_path, monkeypatch, f"printf '{answer}\n'").builder().is_engines is DRIVERS[answer]


ANSWERS = {
    "endless": ("exec yes", "printed more than 16,777,216 bytes"),
    "another shape": ("echo '[{}]'", "cannot be read"),
    "two images": ("echo '[{}, {}]'", "not one image"),
    "escapes": (r"printf '\033[2Jno' >&2; exit 1", r"\x1b[2Jno"),
    "silent": ("exit 1", "does not answer"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_is_known_of_an_image_is_read_within_bounds(tmp_path, monkeypatch, kind):
    script, says = ANSWERS[kind]
    with pytest.raises(HostError) as caught:
        docker_that(tmp_path, monkeypatch, script).image("one")
    assert says in str(caught.value)
    assert str(caught.value).replace("\n", "").isprintable()


def test_a_missing_image_and_a_missing_engine_differ(tmp_path, monkeypatch):
    script = "echo 'Error response from daemon: No such image: one:latest' >&2; exit 1"
    client = docker_that(tmp_path, monkeypatch, script)
    assert client.find_image("one") is None
    with pytest.raises(NoImageError, match="there is no image one here"):
        client.image("one")


def test_each_line_names_the_engine_of_the_settings(client, tmp_path):
    host = f"unix://{tmp_path}/none.sock"
    assert client.start_line("one") == ["docker", "--host", host, "start", "--attach", "one"]
    assert EngineClient(Settings(cache_dir=tmp_path)).start_line("one", stdin=True) == [
        "docker", "start", "--attach", "--interactive", "one",
    ]  # fmt: skip
