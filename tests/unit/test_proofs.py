"""What was proven of an image once, and where that still counts."""

import pytest

from envbuild.settings import load_settings
from envbuild.stacks.model import Use
from envbuild.verify import proofs

REPORT = {"audit": {}, "smoke": {"device": "cpu"}, "stack_proof": [], "not_proven": [], "seconds": 3.0}
DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def settings(tmp_path):
    return load_settings(environ={"HOME": str(tmp_path)}, root=tmp_path)


@pytest.mark.parametrize(
    ("proven", "asked", "counts"),
    [("cpu", "cpu", True), ("cpu", "cuda", False), ("cuda", "cuda", True), ("cuda", "cpu", True)],
)
def test_what_a_processor_proved_does_not_do_where_a_gpu_can_be_asked(settings, proven, asked, counts):
    proofs.keep_proof(settings, DIGEST, REPORT | {"smoke": {"device": proven}})
    assert (proofs.kept_proof(settings, DIGEST, asked) is not None) is counts


def test_another_suite_proves_again(settings, monkeypatch):
    proofs.keep_proof(settings, DIGEST, REPORT)
    monkeypatch.setattr(proofs, "suite_hash", lambda: "another")
    assert proofs.kept_proof(settings, DIGEST, "cpu") is None


def test_another_command_of_the_stack_proves_again(settings):
    use = Use(name="trains", run="python train.py")
    proofs.keep_proof(settings, DIGEST, REPORT | {"stack_proof": [{"run": use.run}]})
    assert proofs.kept_proof(settings, DIGEST, "cpu", stack_proof=(use,)) is not None
    assert proofs.kept_proof(settings, DIGEST, "cpu", stack_proof=(Use(name="trains", run="exit 3"),)) is None
    assert proofs.kept_proof(settings, DIGEST, "cpu") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", '{"suite": "x"}', '"smoke"'])
def test_half_a_proof_is_none(settings, text):
    proofs.keep_proof(settings, DIGEST, REPORT)
    next((settings.cache_dir / "proofs").iterdir()).write_text(text)
    assert proofs.kept_proof(settings, DIGEST, "cpu") is None


def test_a_proof_is_of_one_digest(settings):
    proofs.keep_proof(settings, DIGEST, REPORT)
    assert proofs.kept_proof(settings, "sha256:" + "1" * 64, "cpu") is None


def test_what_was_never_proven(settings):
    assert proofs.kept_proof(settings, DIGEST, "cpu") is None
