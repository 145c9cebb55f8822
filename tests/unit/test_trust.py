"""Who confirmed the digest of an image, and what is read of a foreign one, where no engine is needed."""

import io
import json
import re
import struct
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from cell_inputs import complete, inputs_for

from envbuild.cli import main
from envbuild.cli.cell_options import parse_digest
from envbuild.cli.image_report import for_people
from envbuild.engine.built import OwnBuild, built_digest, own_build, remember_built
from envbuild.engine.image_files import NotRegularError, regular_files
from envbuild.engine.registry import _engine_failure
from envbuild.engine.trust import (
    Expected,
    Pulled,
    Verified,
    expected_digests,
    pulled_for,
    remember_pulled,
    verified_build,
)
from envbuild.errors import HostError, LockError
from envbuild.evidence.refs import committed_evidence
from envbuild.matrix.load import load_matrix
from envbuild.net.registry import parse_reference
from envbuild.pipeline import image as pipeline
from envbuild.plan.plan import plan_of
from envbuild.settings import load_settings

ONE, TWO, THREE = (f"sha256:{digit * 64}" for digit in "123")
LOCK_FILES = re.compile(r"lock\.json|pylock\.[a-z]+\.toml")


@pytest.fixture
def settings(tmp_path):
    return load_settings(environ={"HOME": str(tmp_path)}, root=tmp_path)


@pytest.fixture(scope="module")
def plan():
    return plan_of(load_matrix(), complete(inputs_for(cuda="cpu")))


def record(plan, digest, **more):
    """A committed record that passed, made to be of this plan's lock and of the image `digest`."""
    passed = next(each for each in committed_evidence() if each.passed)
    update = {"lock_digest": plan.lock.digest, "target": {"kind": "image", "digest": digest}}
    return passed.model_copy(update=update | more)


def test_without_anybody_who_knows_nothing_is_expected(settings, plan):
    others = [
        record(plan, ONE, lock_digest=TWO),
        record(plan, ONE, verdict="failed"),
        record(plan, None),
        record(plan, "not a digest"),
        record(plan, ONE, target={"kind": "host", "os": "x", "python": "y"}),
        # a .sif can state any digest
        record(
            plan, ONE, target={"kind": "image", "digest": ONE, "digest_from": "label", "runtime": "apptainer 1.4.5"}
        ),
    ]
    assert expected_digests(settings, plan, others) is None


def test_the_signed_catalogue_comes_after_this_machine_and_before_the_evidence(settings, plan):
    records, signed = [record(plan, ONE)], {TWO: "release and second"}
    found = expected_digests(settings, plan, records, catalog=signed)
    assert (found.by, set(found.records)) == ("catalog", {TWO})
    verified = found.verify(TWO, where="here", what="the image")
    assert verified.text == "verified: it has the digest in the catalogue that release and second signed"
    with pytest.raises(LockError, match="the signed catalogue names"):
        found.verify(ONE, where="here", what="the image")
    assert expected_digests(settings, plan, records, catalog={}).by == "evidence"
    assert expected_digests(settings, plan, records, catalog=signed, flag=THREE).by == "flag"
    remember_built(settings, plan, OwnBuild(digest=THREE))
    assert expected_digests(settings, plan, records, catalog=signed).by == "build"
    # what follows from the lock are the layers, whoever compressed them
    remember_built(settings, plan, OwnBuild(digest=THREE, layers=(ONE, TWO)))
    assert own_build(settings, plan) == OwnBuild(digest=THREE, layers=(ONE, TWO))
    remember_built(settings, plan, OwnBuild(digest=THREE, layers=(ONE, TWO), config=ONE))
    assert own_build(settings, plan) == OwnBuild(digest=THREE, layers=(ONE, TWO), config=ONE)
    for layers, by in (((ONE, TWO), "catalog"), ((TWO, ONE), "build"), ((ONE,), "build"), ((), "build")):
        assert expected_digests(settings, plan, records, catalog=signed, layers=layers).by == by
    assert expected_digests(settings, plan, records, catalog={}, layers=(ONE, TWO)).by == "build"
    remember_built(settings, plan, OwnBuild(digest=THREE))
    assert expected_digests(settings, plan, records, catalog=signed).by == "build"


def test_a_person_comes_before_this_machine_and_this_machine_before_the_evidence(settings, plan):
    records = [record(plan, ONE)]
    assert expected_digests(settings, plan, records).by == "evidence"
    remember_built(settings, plan, OwnBuild(digest=TWO))
    assert expected_digests(settings, plan, records).by == "build"
    assert expected_digests(settings, plan, records, flag=THREE).by == "flag"


def test_every_image_of_the_lock_in_the_evidence_will_do_and_another_is_refused(settings, plan):
    records = [record(plan, ONE), record(plan, TWO)]
    expected = expected_digests(settings, plan, records)
    found = expected.verify(TWO, where="here", what="the registry's image")
    assert found.as_json() == {
        "by": "evidence",
        "digest": TWO,
        "record": records[1].id,
        "same_as": None,
        "other_recipe": False,
        "text": f"verified: it has the digest in the evidence record {records[1].id}",
    }
    with pytest.raises(LockError, match=f"it has {THREE}, the evidence records of this lock name {ONE} or {TWO}"):
        expected.verify(THREE, where="here", what="the registry's image")


def test_a_build_that_may_have_taken_steps_of_others_confirms_nothing(settings, plan):
    """Nobody signs a build cache, so the image is this machine's and still not known to follow from its lock."""
    records = [record(plan, ONE)]
    remember_built(settings, plan, OwnBuild(digest=TWO, steps_from="r.example/cache", wheels_from="r.example/wheels"))
    note = own_build(settings, plan)
    assert (note.digest, note.steps_from, note.wheels_from) == (TWO, "r.example/cache", "r.example/wheels")
    assert not note.alone
    assert expected_digests(settings, plan, ()) is None
    assert expected_digests(settings, plan, records).by == "evidence"
    known = verified_build(note.digest, note.steps_from)
    assert known.by == "steps"
    assert known.text.startswith("not verified: ")
    assert "r.example/cache" in known.text
    place = settings.cache_dir / "built" / plan.key
    whole = place.read_text()
    for half in range(len(whole)):
        place.write_text(whole[:half])
        assert own_build(settings, plan) is None, half
    remember_built(settings, plan, OwnBuild(digest=TWO, wheels_from="r.example/wheels"))  # a trusted key signed those
    assert expected_digests(settings, plan, records).by == "build"
    assert not own_build(settings, plan).alone
    remember_built(settings, plan, OwnBuild(digest=TWO))
    assert own_build(settings, plan).alone


def test_a_pulled_image_is_noted_as_pulled_and_not_as_built(settings, plan):
    pulled = Pulled(verified=Verified(by="nobody", digest=ONE), reference=f"r.example/x:y@{ONE}")
    remember_pulled(settings, plan, pulled)
    assert pulled_for(settings, plan) == pulled
    assert built_digest(settings, plan) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"sha256"', '{"by": "nobody"}', '{"by": [], "digest": 5}', '{"by": "lock", "digest": ""}'],
)
def test_half_a_note_is_none(settings, plan, text):
    remember_pulled(settings, plan, Pulled(verified=Verified(by="flag", digest=ONE), reference="r"))
    (settings.cache_dir / "pulled" / plan.key).write_text(text)
    assert pulled_for(settings, plan) is None
    remember_built(settings, plan, OwnBuild(digest=text))
    assert built_digest(settings, plan) is None


def test_a_note_of_an_earlier_release_does_not_say_that_an_image_was_built(settings, plan):
    """Images that were pulled got such notes, too."""
    (settings.cache_dir / "made").mkdir(parents=True)
    (settings.cache_dir / "made" / plan.key).write_text(ONE)
    assert built_digest(settings, plan) is None


@pytest.mark.parametrize("text", ["", "sha256:12", "1" * 64, ONE.upper(), ONE + "\n", " " + ONE, ONE + "\x1b[2J"])
@pytest.mark.parametrize("command", ["pull", "image"])
def test_what_is_no_digest_is_a_mistake_in_the_arguments(capsys, command, text):
    with pytest.raises(SystemExit) as caught:
        main([command, "--cuda", "cpu", "--digest", text])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert "--digest" in printed
    assert "\x1b" not in printed


def test_a_digest_is_taken_as_it_is():
    assert parse_digest(ONE) == ONE
    assert parse_digest(None) is None


# What Docker 28 says of a registry whose storage was changed, and of other failures.
DAMAGED = [
    f'failed commit on ref "layer-{ONE}": commit failed: unexpected commit digest {TWO}, expected {ONE}: failed precondition',
    "short read: expected 3185 bytes but got 100: unexpected EOF",
    f"failed to copy: httpReadSeeker: failed open: could not fetch content descriptor {ONE} (application/x) from remote: not found",
    f'wrong diff id calculated on extraction "{ONE}"',
    f'failed to extract layer (application/x {ONE}) to overlayfs as "x": mount callback failed on /x: archive/tar: invalid tar header',
]
REFERENCE = parse_reference("r.example/team/denied-unauthorized:not-found")


@pytest.mark.parametrize("printed", DAMAGED)
def test_what_a_registry_damaged_is_a_failed_verification(printed):
    error = _engine_failure(f"{REFERENCE.repository}\n {printed}\n", REFERENCE, "pulling x")
    assert isinstance(error, LockError)
    assert "is damaged" in error.what
    assert "--no-pull" in error.hint


@pytest.mark.parametrize(
    ("printed", "kind", "what"),
    [
        ("failed to extract layer: write /x: no space left on device", HostError, "the disk is full"),
        ("pull access denied for x, repository does not exist or may require 'docker login'", HostError, "refuses access"),
        ("failed to resolve reference: r.example/x: not found", LockError, "does not have this image"),
        ("dial tcp 127.0.0.1:9: connect: connection refused", HostError, "pulling x failed"),
        (f'Get "https://{REFERENCE.repository}": EOF', HostError, "pulling x failed"),
        ("received unexpected HTTP status: 503 Service Unavailable", HostError, "pulling x failed"),
        ("net/http: request canceled while waiting for connection", HostError, "pulling x failed"),
        ("", HostError, "docker gave no reason"),
    ],
)  # fmt: skip
def test_other_failures_of_a_pull_keep_their_meaning(printed, kind, what):
    error = _engine_failure(printed, REFERENCE, "pulling x")
    assert isinstance(error, kind)
    assert what in error.what


@pytest.mark.parametrize(
    "printed", ["\x1b]0;owned\x07\x1b[2J", "x: unexpected EOF \x1b[31m\u202e", "x" * 10**6 + "\x9b2J"]
)
def test_what_a_registry_has_the_engine_say_is_printed_as_text_and_cut(printed):
    text = str(_engine_failure(printed, REFERENCE, "pulling x"))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert len(text) < 2000


def test_a_push_that_breaks_off_says_nothing_of_what_the_registry_holds():
    assert isinstance(_engine_failure("unexpected EOF", REFERENCE, "pushing x"), HostError)


def tar_of(*members: tuple[str, bytes, dict]) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, body, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(body)
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(body))
    stream.seek(0)
    return stream


def read(stream) -> dict[str, bytes]:
    return regular_files(stream, "envbuild", LOCK_FILES)


def test_only_wanted_files_directly_in_the_folder_are_read():
    stream = tar_of(
        ("envbuild", b"", {"type": tarfile.DIRTYPE}),
        ("envbuild/lock.json", b"{}", {}),
        ("envbuild/pylock.torch.toml", b"x", {}),
        ("envbuild/expected.json", b"no", {}),
        ("envbuild/built/lock.json", b"no", {}),
        ("envbuild/../lock.json", b"no", {}),
        ("/envbuild/lock.json", b"no", {}),
        ("lock.json", b"no", {}),
        ("other/lock.json", b"no", {}),
        ("envbuild/link", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
    )
    assert read(stream) == {"lock.json": b"{}", "pylock.torch.toml": b"x"}


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE]
)
def test_what_has_a_wanted_name_and_is_no_file_is_refused(kind):
    with pytest.raises(NotRegularError, match=r"lock\.json"):
        read(tar_of(("envbuild/lock.json", b"", {"type": kind, "linkname": "envbuild/expected.json"})))


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(NotRegularError):
        read(tar_of(("envbuild/lock.json", b"{}", {}), ("envbuild/lock.json", b"{}", {})))


def sparse() -> io.BytesIO:
    """A file of 2**40 zeros in a header of 512 bytes."""
    fields = {"GNU.sparse.major": "0", "GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**40)}
    return tar_of(("envbuild/lock.json", b"", {"pax_headers": fields}))


def test_a_sparse_file_is_refused_before_it_is_read():
    with pytest.raises(NotRegularError):
        read(sparse())


def claimed(size: int) -> bytes:
    """A header whose file claims `size` bytes, which are not there."""
    header = bytearray(tar_of(("envbuild/lock.json", b"", {})).getvalue()[:512])
    header[124:136] = b"\x80" + b"\0" * 3 + struct.pack(">q", size)
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    return bytes(header)


@pytest.mark.parametrize(
    "body",
    [b"", b"x" * 512, b"\xff" * 4096, tar_of(("envbuild/lock.json", b"{}" * 999, {})).getvalue()[:700],
     claimed(2**40), claimed(2**62), claimed(-5) + b"x" * 2000],
    ids=["nothing", "text", "noise", "cut", "1 TiB", "2**62", "negative"],
)  # fmt: skip
def test_what_is_no_whole_tar_is_an_error_of_tars(body):
    with pytest.raises(tarfile.TarError):
        read(io.BytesIO(body))


def test_the_answer_of_a_pull_is_json_that_names_who_confirmed_it():
    found = Verified(by="nobody", digest=ONE).as_json()
    assert json.loads(json.dumps(found)) == found
    assert found["text"].startswith("not verified")


def answer(**more) -> dict:
    """The answer of `image` for a pulled image."""
    verified = Verified(by="nobody", digest=ONE).as_json()
    return {
        "tag": "envbuild:x", "origin": "pulled", "seconds": 3.0, "digest": ONE, "size_bytes": 1, "verified": verified,
        "reference": f"r.example/team:x@{ONE}", "lock": {"digest": TWO, "folder": "/lock"}, "stages": [], "proven": "now",
        "audit": {"size": {"bytes": 1}, "checks": []}, "smoke": None, "stack_proof": [], "not_proven": [],
        "left_out": {}, "unreached": {}, "notes": [{"rule": "r", "text": "a thing to know", "source": "s"}], "only_when_asked": [], "pushed": None, "run": "docker run",
    } | more  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "words"),
    [("pulled", "pulled from r.example/team:x in 3 s"), ("found", "pulled earlier from r.example/team:x in 3 s")],
)
def test_the_answer_of_an_image_says_where_it_is_from_and_who_confirmed_it(origin, words):
    printed = for_people(answer(origin=origin))
    assert words in printed
    assert "trust   not verified: no source but the registry names its digest" in printed
    assert "what the image reports about itself" in printed
    assert "\nproven" not in printed


def test_the_answer_of_a_built_image_says_no_more_than_that_it_was_built():
    built = Verified(by="build", digest=ONE).as_json()
    for origin in ("built", "found"):
        printed = for_people(answer(origin=origin, reference=None, verified=built))
        assert "pulled" not in printed
        assert "trust" not in printed
        assert "\nto know\n  - a thing to know\n" in printed


def test_what_an_image_says_of_itself_in_an_audit_reaches_no_terminal_raw():
    check = {"name": "packages\x1b[2J", "verdict": "failed", "text": "torch\x1b]0;owned\x07 is not in the lock\r\u202e"}
    audit = {"size": {"bytes": 1}, "checks": [check]}
    printed = for_people(answer(audit=audit, not_proven=["smoke: \x9b31m"]))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed)
    assert r"torch\x1b]0;owned\x07 is not in the lock" in printed


def test_with_trusted_keys_an_image_that_nobody_confirms_is_built_and_not_pulled(settings, plan, monkeypatch):
    """The registry alone names it; the signed catalogue has no such image, or is not there."""
    asked = []
    monkeypatch.setattr(pipeline, "_present", lambda *_: None)
    monkeypatch.setattr(pipeline, "pull_prebuilt", lambda *_, **more: asked.append(more["expected"]))
    monkeypatch.setattr(pipeline, "expected_of", lambda *_: None)
    request = SimpleNamespace(digest=None, catalog={}, layers=(), pull=True, tag="t:1")

    def ready(**more):
        client = SimpleNamespace(settings=settings.model_copy(update=more))
        return pipeline._ready_made(request, client, plan, (None, None), lambda _: None)

    assert ready() is None
    assert asked == [None]
    assert ready(trusted_keys=(Path("release.pub"),)) is None
    assert asked == [None]
    named = Expected(by="catalog", records={ONE: "release"})
    monkeypatch.setattr(pipeline, "expected_of", lambda *_: named)
    ready(trusted_keys=(Path("release.pub"),))
    assert asked == [None, named]
