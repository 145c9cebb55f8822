"""A host that does not answer is exit 8 in the commands that need an engine, too; tests/host has the others."""

import socket
import subprocess
import tarfile

import pytest
from cell_inputs import complete, inputs_for
from command import run
from fault_server import FaultServer

from envbuild.engine.registry import push
from envbuild.errors import HostError
from envbuild.lock.files import write_lock

CPU = ("--cuda", "cpu", "--os", "debian12")


@pytest.fixture(params=["refuses", "answers 503"])
def away(request):
    """The address of a host that fails in one manner."""
    with FaultServer(lambda fault, number: fault.send(b"down", 503, "Service Unavailable")) as host:
        if request.param == "refuses":
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                yield f"127.0.0.1:{taken.getsockname()[1]}"
        else:
            yield host.url.removeprefix("http://")


@pytest.fixture
def env(away, tmp_path):
    return {
        "HOME": str(tmp_path),
        "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"),
        "ENVBUILD_INDEX_URL": f"http://{away}/simple",
        "ENVBUILD_TORCH_INDEX": f"http://{away}/torch",
        "ENVBUILD_DEBIAN_MIRROR": f"http://{away}/debian",
        "ENVBUILD_DEBIAN_SECURITY_MIRROR": f"http://{away}/security",
        "ENVBUILD_HTTPS_PROXY": f"http://{away}",
        "ENVBUILD_NO_PROXY": "127.0.0.1",
    }


@pytest.fixture
def lock(tmp_path):
    write_lock(complete(inputs_for(cuda="cpu", os="debian12")), tmp_path / "lock")
    return tmp_path / "lock"


def test_image_whose_inputs_nobody_serves(engine, env):
    made = run("image", *CPU, env=env)
    assert made.code == 8, made.err
    assert "held by 127.0.0.1" in made.err
    assert "name a mirror of the archive in the settings" in made.err


@pytest.mark.parametrize(("command", "to_do"), [("pull", "to do: "), ("image", "--no-pull builds the image")])
def test_a_registry_that_does_not_answer(engine, env, away, lock, command, to_do):
    done = run(command, *CPU, "--lock", str(lock), env={**env, "ENVBUILD_REGISTRY": f"{away}/envbuild"})
    assert (done.code, away in done.err, to_do in done.err) == (8, True, True), done.err


def test_a_push_to_a_registry_that_does_not_answer(client, engine, away, tmp_path):
    reference = f"{away}/team/nothing:1"
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    subprocess.run(["docker", "image", "import", tmp_path / "empty.tar", reference], check=True, capture_output=True)
    try:
        with pytest.raises(HostError) as caught:
            push(client, reference)
    finally:
        engine.image.remove(reference)
    assert away in str(caught.value)
    assert caught.value.hint
