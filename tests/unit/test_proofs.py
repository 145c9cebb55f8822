"""What was proven of an image once, and where that still counts."""

import contextlib
from types import SimpleNamespace

import pytest

from envbuild.errors import AuditError, HostError, SmokeError
from envbuild.pipeline import prove
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


@pytest.mark.parametrize(("error", "code"), [(AuditError("torch has no code for sm_90"), 6), (SmokeError("slow"), 7)])
def test_a_failure_of_an_image_is_kept_until_it_is_proven_after_all(settings, error, code):
    proofs.require_no_failure(settings, DIGEST, "mine:1")
    proofs.keep_failure(settings, DIGEST, error)
    with pytest.raises(type(error)) as refused:
        proofs.require_no_failure(settings, DIGEST, "mine:1")
    assert (refused.value.exit_code, refused.value.where) == (code, "mine:1")
    assert error.what in refused.value.what
    assert "--even-if-failed" in refused.value.hint
    proofs.require_no_failure(settings, "sha256:" + "1" * 64, "other:1")
    proofs.forget_failure(settings, DIGEST, "cpu")
    proofs.require_no_failure(settings, DIGEST, "mine:1")


def test_a_failure_of_an_image_outdates_its_proof(settings):
    proofs.keep_proof(settings, DIGEST, REPORT)
    proofs.keep_failure(settings, DIGEST, HostError("the disk is full"))
    assert proofs.kept_proof(settings, DIGEST, "cpu") is not None
    proofs.keep_failure(settings, DIGEST, SmokeError("slow"))
    assert proofs.kept_proof(settings, DIGEST, "cpu") is None


@pytest.mark.parametrize(
    ("failed", "passed", "forgotten"),
    [("cpu", "cpu", True), ("cpu", "cuda", True), ("cuda", "cuda", True), ("cuda", "cpu", False)],
)
def test_what_failed_on_a_gpu_is_not_forgotten_for_what_a_processor_proved(settings, failed, passed, forgotten):
    proofs.keep_failure(settings, DIGEST, SmokeError("slow"), failed)
    proofs.forget_failure(settings, DIGEST, passed)
    with contextlib.nullcontext() if forgotten else pytest.raises(SmokeError, match="slow"):
        proofs.require_no_failure(settings, DIGEST, "mine:1")


def test_each_defect_of_an_audit_has_its_line_in_the_refusal(settings):
    what = "the image has 2 defects\n  - torch: " + "x" * 300 + "\n  - files: an odd \x1b[2J name"
    proofs.keep_failure(settings, DIGEST, AuditError(what))
    with pytest.raises(AuditError) as refused:
        proofs.require_no_failure(settings, DIGEST, "mine:1")
    assert refused.value.what.splitlines()[1:] == what.replace("\x1b", "\\x1b").splitlines()[1:]


def test_a_failure_of_the_machine_says_nothing_of_the_image(settings):
    proofs.keep_failure(settings, DIGEST, HostError("the disk is full"))
    proofs.require_no_failure(settings, DIGEST, "mine:1")


@pytest.mark.parametrize("text", ["", "[]", "{", "7", "\0"])
def test_a_damaged_note_of_a_failure_is_one_of_a_failure(settings, text):
    proofs.keep_failure(settings, DIGEST, SmokeError("slow"))
    (note,) = (settings.cache_dir / "failures").iterdir()
    note.write_text(text)
    with pytest.raises(AuditError, match="its note cannot be read"):
        proofs.require_no_failure(settings, DIGEST, "mine:1")
    proofs.forget_failure(settings, DIGEST, "cpu")
    proofs.require_no_failure(settings, DIGEST, "mine:1")


def test_a_failure_that_a_full_disk_does_not_keep_outdates_the_proof_all_the_same(settings, monkeypatch):
    proofs.keep_proof(settings, DIGEST, REPORT)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="No space"):
        proofs.keep_failure(settings, DIGEST, SmokeError("slow"))
    assert proofs.kept_proof(settings, DIGEST, "cpu") is None


def test_what_image_finds_wrong_is_kept_and_what_it_proves_is_forgotten(settings, monkeypatch):
    def raise_for_defects():
        raise AuditError("the image has 1 defect")

    bad = SimpleNamespace(as_json=dict, checks=(), defects=1, raise_for_defects=raise_for_defects)
    good = SimpleNamespace(as_json=dict, checks=(), defects=0, facts={})
    passed = SimpleNamespace(
        verdict="passed", level="step", device="cpu", counts={}, reason="", raise_for_verdict=lambda: None
    )
    made = SimpleNamespace(
        built=SimpleNamespace(tag="mine:1", digest=DIGEST),
        origin="built",
        plan=SimpleNamespace(cell=SimpleNamespace(versions={"cuda": "cpu"})),
    )
    client = SimpleNamespace(settings=settings)
    monkeypatch.setattr(prove, "_smoke", lambda *_: (passed, []))
    monkeypatch.setattr(prove, "find_image", lambda *_: object())

    def proven(audited, **more):
        monkeypatch.setattr(prove, "audit", lambda *_: audited)
        return prove.prove(client, made, proof=(), note=lambda _: None, **{"with_smoke": True} | more)

    assert isinstance(proven(bad).failure, AuditError)
    with pytest.raises(AuditError, match="1 defect"):
        proofs.require_no_failure(settings, DIGEST, "mine:1")
    assert proven(good, with_smoke=False).failure is None  # nothing was shown: what failed stays failed
    with pytest.raises(AuditError):
        proofs.require_no_failure(settings, DIGEST, "mine:1")
    assert proven(good).failure is None
    proofs.require_no_failure(settings, DIGEST, "mine:1")


@pytest.fixture
def prove_failing(settings, monkeypatch):
    """Return what proves an image whose smoke tests fail on a device."""

    def proven(device, note=lambda _: None):
        def raise_for_verdict():
            raise SmokeError("slow")

        good = SimpleNamespace(as_json=dict, checks=(), defects=0, facts={})
        failed = SimpleNamespace(
            verdict="failed", level="step", device=device, counts={}, reason="slow", raise_for_verdict=raise_for_verdict
        )
        made = SimpleNamespace(
            built=SimpleNamespace(tag="mine:1", digest=DIGEST),
            origin="built",
            plan=SimpleNamespace(cell=SimpleNamespace(versions={"cuda": "cpu"})),
        )
        monkeypatch.setattr(prove, "audit", lambda *_: good)
        monkeypatch.setattr(prove, "_smoke", lambda *_: (failed, []))
        return prove.prove(SimpleNamespace(settings=settings), made, proof=(), with_smoke=True, note=note).failure

    return proven


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_failure_is_kept_with_the_device_that_it_was_seen_on(settings, prove_failing, device):
    assert prove_failing(device) is not None
    proofs.forget_failure(settings, DIGEST, "cpu")
    with pytest.raises(SmokeError) if device == "cuda" else contextlib.nullcontext():
        proofs.require_no_failure(settings, DIGEST, "mine:1")


def test_a_failure_that_cannot_be_kept_is_still_the_failure(settings, prove_failing):
    settings.cache_dir.mkdir(parents=True)
    (settings.cache_dir / "failures").touch()
    notes = []
    assert isinstance(prove_failing("cpu", notes.append), SmokeError)
    assert "the failure is not kept (File exists)" in notes[-1]
