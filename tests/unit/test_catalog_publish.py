"""Publishing with too few signers, or an image that failed: it ends before anything is written to the registry."""

from types import SimpleNamespace

import pytest
from cell_inputs import complete, inputs_for
from fault_server import FaultServer

from envbuild.cli import main
from envbuild.engine.built import Built
from envbuild.engine.client import EngineClient
from envbuild.errors import AuditError, LockError, SmokeError, UsageError
from envbuild.pipeline.cataloged import publish_image, push_and_publish, refresh_catalog
from envbuild.registry.keys import make_key_pair, read_private_key
from envbuild.settings import load_settings
from envbuild.verify.proofs import keep_failure

DIGEST = "sha256:" + "1" * 64
WORDS = "2 signatures are needed, and 1 key is there to sign"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Settings that ask for two signatures and have one private key; a registry that notes each request; no engine."""
    public = [make_key_pair(tmp_path, name, None)[1] for name in ("one", "two")]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with FaultServer(lambda fault, number: fault.send(status=404)) as server:
        environ = {
            "HOME": str(tmp_path),
            "ENVBUILD_REGISTRY": f"{server.url.removeprefix('http://')}/acme",
            "ENVBUILD_TRUSTED_KEYS": " ".join(map(str, public)),
            "ENVBUILD_TRUSTED_SIGNATURES": "2",
            "ENVBUILD_SIGNING_KEYS": str(tmp_path / "one.key"),
            "ENVBUILD_CACHE_DIR": str(tmp_path / "cache"),
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        yield load_settings(environ=environ, root=tmp_path), server


def test_too_few_keys_are_noticed_before_anything_is_written(site, tmp_path):
    settings, server = site
    locked = complete(inputs_for(cuda="cpu"))
    one = read_private_key(tmp_path / "one.key", lambda: None)
    held = Built(tag="mine:1", digest=DIGEST, size=1)
    steps = []
    for keys in ([one], [one, one]):
        with pytest.raises(UsageError, match=WORDS):
            push_and_publish(
                EngineClient(settings), held, locked, keys, built=True, documents={"sbom": b"{}"}, doing=steps.append
            )
        with pytest.raises(UsageError, match=WORDS):
            publish_image(settings, locked, DIGEST, keys, built=True, documents={"sbom": b"{}"})
        with pytest.raises(UsageError, match=WORDS):
            refresh_catalog(settings, keys)
    assert (server.seen, steps) == ([], [])


@pytest.mark.parametrize("words", [["publish", "mine:1"], ["publish", "mine:1", "--digest", DIGEST], ["refresh"]])
def test_the_command_ends_with_one_message_and_exit_code_2(site, capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(["catalog", *words])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.count("envbuild: error:") == 1
    assert WORDS in printed
    assert "nothing was published" in printed
    assert site[1].seen == []


@pytest.mark.parametrize("error", [AuditError("the image has 1 defect"), SmokeError("slow")])
def test_an_image_that_failed_here_is_published_only_when_that_is_asked_for(site, capsys, monkeypatch, error):
    settings, server = site
    monkeypatch.setenv("ENVBUILD_TRUSTED_SIGNATURES", "1")
    client = SimpleNamespace(image=lambda _: SimpleNamespace(id=DIGEST, size=1))
    monkeypatch.setattr("envbuild.engine.client.engine_client", lambda _: client)

    def taken(*_, **__):
        raise LockError("it was taken")

    monkeypatch.setattr("envbuild.pipeline.cataloged.require_publishable", taken)

    def published(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as caught:
            main(["catalog", "publish", "mine:1", *words])
        return caught.value.code, capsys.readouterr().err

    assert published()[0] == LockError.exit_code
    keep_failure(settings, DIGEST, error)
    for words in ((), ("--digest", DIGEST)):
        code, printed = published(*words)
        assert (code, f"for this image: {error.what}" in printed) == (error.exit_code, True)
        assert "it was taken" not in printed
    assert "it was taken" in published("--even-if-failed")[1]
    assert server.seen == []
