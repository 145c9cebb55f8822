"""Compiled wheels in a real registry: pushed and taken by key, and whatever a hostile one may put there instead."""

import hashlib
import json
import secrets
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from envbuild.components.base import Wheel
from envbuild.engine import shared_wheels
from envbuild.engine.kept import kept_wheel
from envbuild.engine.shared_wheels import (
    ARTIFACT_TYPE,
    INPUTS_TYPE,
    RECORD_TYPE,
    WHEEL_TYPE,
    push_wheel,
    tag_of,
    take_wheel,
)
from envbuild.engine.wheels import kept_wheels
from envbuild.errors import LockError
from envbuild.registry.keys import make_key_pair, read_private_key
from envbuild.registry.manifests import artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import KeyVerifier, Policy, sign
from envbuild.settings import Settings
from tests.host.wheel_store import stage, store, write_wheel

APEX = Wheel(axis="apex", distribution="apex", module="apex", job_gib=3.0)
STAGE = stage()


@pytest.fixture
def keys(tmp_path):
    """A trusted key and one of somebody else."""
    return [read_private_key(make_key_pair(tmp_path, name, None)[0], lambda: None) for name in ("ours", "theirs")]


@pytest.fixture
def policy(keys):
    return Policy(verifiers=(KeyVerifier(key=keys[0].public),))


@pytest.fixture
def repo(registry):
    with Repository(f"{registry}/team/{secrets.token_hex(4)}/wheels") as repository:
        yield repository


@pytest.fixture
def made(tmp_path):
    """The store of a machine that compiled apex."""
    settings = Settings(cache_dir=tmp_path / "made")
    store(settings.cache_dir, STAGE, write_wheel(tmp_path))
    return settings


@pytest.fixture
def empty(tmp_path):
    """The settings of a machine that compiled nothing."""
    return Settings(cache_dir=tmp_path / "empty")


def plan(of=STAGE):
    return SimpleNamespace(stage=lambda name: {of.name: of}[name])


def only(settings):
    (wheel,), faults = kept_wheels(settings)
    assert faults == {}
    return wheel


def test_a_wheel_is_compiled_once_and_taken_elsewhere(repo, keys, policy, made, empty):
    assert take_wheel(empty, repo, plan(), APEX, policy) is None
    pushed = push_wheel(repo, only(made), keys[0])
    assert (pushed.tag, pushed.new) == (tag_of("apex", STAGE.key), True)
    again = push_wheel(repo, only(made), keys[0])
    assert (again.digest, again.new) == (pushed.digest, False)
    taken = take_wheel(empty, repo, plan(), APEX, policy)
    assert taken.signers == ("ours",)
    assert taken.reference == f"{repo.name}:{pushed.tag}@{pushed.digest}"
    mine, theirs = only(made), only(empty)
    assert kept_wheel(empty, plan(), "apex") == theirs.folder
    assert {path.name: path.read_bytes() for path in mine.folder.iterdir()} == {
        path.name: path.read_bytes() for path in theirs.folder.iterdir()
    }
    assert {oct(path.stat().st_mode & 0o777) for path in theirs.folder.iterdir()} == {"0o644"}
    assert theirs.inputs.text == STAGE.text
    # another key is another wheel
    assert take_wheel(empty, repo, plan(stage(python="3.12")), APEX, policy) is None


def nothing_was_kept(settings):
    assert kept_wheels(settings) == ([], {})
    assert not list((settings.cache_dir / "wheels").glob("*")) if (settings.cache_dir / "wheels").exists() else True


def test_who_signs_decides(repo, keys, policy, made, empty):
    push_wheel(repo, only(made), None)
    with pytest.raises(LockError, match="is not signed"):
        take_wheel(empty, repo, plan(), APEX, policy)
    push_wheel(repo, only(made), keys[1])
    with pytest.raises(LockError, match="none of the trusted keys"):
        take_wheel(empty, repo, plan(), APEX, policy)
    with pytest.raises(LockError, match="trust no key"):
        take_wheel(empty, repo, plan(), APEX, Policy(verifiers=()))
    push_wheel(repo, only(made), keys[0])
    two = Policy(verifiers=(*policy.verifiers, KeyVerifier(key=keys[1].public)), needed=2)
    with pytest.raises(LockError, match="3 signatures"):
        take_wheel(empty, repo, plan(), APEX, Policy(verifiers=two.verifiers, needed=3))
    nothing_was_kept(empty)
    assert take_wheel(empty, repo, plan(), APEX, two).signers == ("ours", "theirs")


def test_the_record_of_this_machine_names_its_own_wheel(repo, made, policy):
    """A damaged wheel comes back unsigned: only its sha256 is needed, and that is known here."""
    push_wheel(repo, only(made), None)
    wheel = only(made)
    wheel.path.write_bytes(b"damaged")
    assert kept_wheel(made, plan(), "apex") is None
    taken = take_wheel(made, repo, plan(), APEX, policy)
    assert taken.signers == ()
    assert only(made).record == wheel.record


def test_a_key_holds_one_wheel(repo, keys, made, empty, tmp_path):
    push_wheel(repo, only(made), keys[0])
    store(empty.cache_dir, STAGE, write_wheel(tmp_path / "other", members={"apex_C.so": b"other"}))
    with pytest.raises(LockError, match="under the same key"):
        push_wheel(repo, only(empty), keys[0])


def test_what_a_key_leaves_open_is_not_shared(repo, keys, empty, tmp_path):
    folder = store(empty.cache_dir, STAGE, write_wheel(tmp_path / "one"), inputs=False)
    with pytest.raises(LockError, match="is not noted"):
        push_wheel(repo, only(empty), keys[0])
    shutil.rmtree(folder)
    open_stage = stage(compiler=["debian12", "12"])
    store(empty.cache_dir, open_stage, write_wheel(tmp_path / "two"))
    with pytest.raises(LockError, match="leaves something open: compiler"):
        push_wheel(repo, only(empty), keys[0])
    assert repo.manifest(tag_of("apex", open_stage.key)) is None


# -- what is signed and still not what it says: a key that was misled, or a registry that moves what is signed


def parts(path: Path, /, **record):
    body = path.read_bytes()
    stated = {"component": "apex", "wheel": path.name, "sha256": hashlib.sha256(body).hexdigest(), "extensions": []}
    return {
        WHEEL_TYPE: body,
        RECORD_TYPE: json.dumps(stated | record).encode(),
        INPUTS_TYPE: STAGE.text.encode(),
    }


def put(repo, key, contents, *, kind=ARTIFACT_TYPE, tag=None):
    blobs = [repo.push_blob(content, media_type) for media_type, content in contents.items()]
    own = repo.push_artifact(artifact_of(kind, blobs), tag=tag or tag_of("apex", STAGE.key))
    sign(repo, own.digest, key)


def no_zip(tmp_path):
    path = tmp_path / "apex-1.0-py3-none-any.whl"
    path.write_bytes(b"#!/bin/sh\n")
    return path


def with_member(tmp_path, name):
    """Return a wheel with a member that its RECORD lists under a name that leads out."""
    wheel = write_wheel(tmp_path / "evil", members={name: b"evil"})
    with zipfile.ZipFile(wheel) as archive:
        assert name in archive.namelist()
    return wheel


HOSTILE = {
    "another key's inputs": (
        lambda path: parts(write_wheel(path)) | {INPUTS_TYPE: stage("te").text.encode()},
        "something else",
    ),
    "no inputs": (lambda path: parts(write_wheel(path)) | {INPUTS_TYPE: b""}, "something else"),
    "inputs with a space more": (
        lambda path: parts(write_wheel(path)) | {INPUTS_TYPE: STAGE.text.encode() + b" "},
        "something else",
    ),
    "no record": (lambda path: parts(write_wheel(path)) | {RECORD_TYPE: b"{"}, "cannot be read"),
    "a name that leads out": (lambda path: parts(write_wheel(path), wheel="../../evil.whl"), "cannot be read"),
    "a name of controls": (lambda path: parts(write_wheel(path), gcc="\x1b[2J"), "cannot be read"),
    "another component": (lambda path: parts(write_wheel(path), component="te"), "the record of another"),
    "another sha256": (lambda path: parts(write_wheel(path), sha256="0" * 64), "the record of another"),
    "a record of a megabyte": (lambda path: parts(write_wheel(path)) | {RECORD_TYPE: b" " * (2 << 20)}, "too large"),
    "another distribution": (lambda path: parts(write_wheel(path, "evil")), "installs evil, not apex"),
    "another name": (
        lambda path: parts(write_wheel(path, "evil"), wheel="apex-1.0-py3-none-any.whl"),
        "not what its file name says",
    ),
    "no zip": (lambda path: parts(write_wheel(path)) | {WHEEL_TYPE: b"#!/bin/sh\n"}, "the record of another"),
    "no zip, and a record of it": (lambda path: parts(no_zip(path)), "is not sound"),
    "a member that leads out": (lambda path: parts(with_member(path, "../../../evil.py")), "no path below a folder"),
    "a member from the root": (lambda path: parts(with_member(path, "/etc/evil.py")), "no path below a folder"),
    "a part too many": (lambda path: parts(write_wheel(path)) | {"text/plain": b"x"}, "not the parts of one"),
    "a part too few": (lambda path: {WHEEL_TYPE: write_wheel(path).read_bytes()}, "not the parts of one"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_signature_is_not_all(repo, keys, policy, empty, tmp_path, what):
    contents, says = HOSTILE[what]
    put(repo, keys[0], contents(tmp_path))
    with pytest.raises(LockError, match=says) as caught:
        take_wheel(empty, repo, plan(), APEX, policy)
    assert str(caught.value).replace("\n", "").isprintable()
    nothing_was_kept(empty)
    assert not list(tmp_path.rglob("evil.py"))


def test_another_artifact_that_is_signed_is_no_wheel(repo, keys, policy, empty, tmp_path):
    put(repo, keys[0], parts(write_wheel(tmp_path)), kind="application/vnd.envbuild.catalog.v1")
    with pytest.raises(LockError, match="another type"):
        take_wheel(empty, repo, plan(), APEX, policy)


def test_a_signed_wheel_of_another_key_does_not_pass_under_this_one(repo, keys, policy, made, empty):
    """Whoever may push may move a tag."""
    pushed = push_wheel(repo, only(made), keys[0])
    other = stage(torch="2.12.0+cu130")
    signed = repo.manifest(pushed.digest)
    repo.push_manifest(signed.body, signed.descriptor.mediaType, tag=tag_of("apex", other.key))
    with pytest.raises(LockError, match="something else than its tag says"):
        take_wheel(empty, repo, plan(other), APEX, policy)
    nothing_was_kept(empty)


def test_a_wheel_larger_than_any_is_not_downloaded(repo, keys, policy, made, empty, monkeypatch):
    push_wheel(repo, only(made), keys[0])
    monkeypatch.setattr(shared_wheels, "LARGEST", 100)
    with pytest.raises(LockError, match="more than any that we know"):
        take_wheel(empty, repo, plan(), APEX, policy)
