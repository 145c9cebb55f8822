"""Compiled wheels in a real registry: pushed and taken by key, and whatever a hostile one may put there instead."""

import hashlib
import json
import secrets
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from envbuild.cli import main
from envbuild.components.base import Wheel
from envbuild.engine import shared_wheels
from envbuild.engine.build import Builder
from envbuild.engine.kept import kept_wheel, remember_compiled, taken_from, wheels_from
from envbuild.engine.shared_wheels import (
    ARTIFACT_TYPE,
    INPUTS_TYPE,
    RECORD_TYPE,
    WHEEL_TYPE,
    SharedWheels,
    push_wheel,
    tag_of,
    take_wheel,
)
from envbuild.engine.wheels import kept_wheels
from envbuild.errors import LockError
from envbuild.lock.model import GitSource
from envbuild.pipeline.locked import UnreachableError, require_sources
from envbuild.pipeline.wheel_sharing import push_wheels
from envbuild.registry.keys import KeyVerifier, make_key_pair, read_private_key
from envbuild.registry.manifests import artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import Policy, sign
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
    pushed = push_wheel(repo, only(made), keys[:1])
    assert (pushed.tag, pushed.new) == (tag_of("apex", STAGE.key), True)
    again = push_wheel(repo, only(made), keys[:1])
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
    push_wheel(repo, only(made), ())
    with pytest.raises(LockError, match="is not signed"):
        take_wheel(empty, repo, plan(), APEX, policy)
    push_wheel(repo, only(made), keys[1:])
    with pytest.raises(LockError, match="none of the trusted keys"):
        take_wheel(empty, repo, plan(), APEX, policy)
    with pytest.raises(LockError, match="trust no key"):
        take_wheel(empty, repo, plan(), APEX, Policy(verifiers=()))
    push_wheel(repo, only(made), keys[:1])
    two = Policy(verifiers=(*policy.verifiers, KeyVerifier(key=keys[1].public)), needed=2)
    with pytest.raises(LockError, match="3 signatures"):
        take_wheel(empty, repo, plan(), APEX, Policy(verifiers=two.verifiers, needed=3))
    nothing_was_kept(empty)
    assert take_wheel(empty, repo, plan(), APEX, two).signers == ("ours", "theirs")


def test_the_record_of_this_machine_names_its_own_wheel(repo, made, policy):
    """A damaged wheel comes back unsigned: only its sha256 is needed, and that is known here."""
    push_wheel(repo, only(made), ())
    wheel = only(made)
    wheel.path.write_bytes(b"damaged")
    assert kept_wheel(made, plan(), "apex") is None
    taken = take_wheel(made, repo, plan(), APEX, policy)
    assert taken.signers == ()
    assert only(made).record == wheel.record


def test_another_record_of_this_machines_wheel_must_be_signed(repo, made, policy, empty):
    """What it states goes into images, and this machine would sign it as its own later."""
    wheel = only(made)
    contents = parts(wheel.path, extensions=["forged"])
    blobs = [repo.push_blob(content, media_type) for media_type, content in contents.items()]
    repo.push_artifact(artifact_of(ARTIFACT_TYPE, blobs), tag=tag_of("apex", STAGE.key))
    wheel.path.unlink()
    with pytest.raises(LockError, match="is not signed"):
        take_wheel(made, repo, plan(), APEX, policy)
    assert take_wheel(made, repo, plan(), APEX, Policy(verifiers=())) is None  # it is compiled again


def test_what_another_run_took_meanwhile_keeps_its_note(registry, keys, made, tmp_path):
    """A run that compiled the wheel, too, does not make the other's wheel its own."""
    name = f"{registry}/{secrets.token_hex(4)}"
    with Repository(f"{name}/wheels") as repository:
        push_wheel(repository, only(made), keys[:1])
    elsewhere = site(registry, tmp_path, registry=name)
    assert builder(elsewhere, [])._take_wheels()
    there = only(elsewhere)
    compiled = store(
        tmp_path / "compiled", STAGE, write_wheel(tmp_path / "two", members={"apex_C.so": b"compiled here"})
    )
    remember_compiled(elsewhere, compiled)
    assert taken_from(elsewhere, there.record.sha256) is not None


def test_an_image_with_a_wheel_of_a_registry_is_not_signed_as_built_here_alone(registry, keys, made, tmp_path):
    name = f"{registry}/{secrets.token_hex(4)}"
    with Repository(f"{name}/wheels") as repository:
        push_wheel(repository, only(made), keys[:1])
    elsewhere = site(registry, tmp_path, registry=name)
    of = SimpleNamespace(stage=plan().stage, components=(APEX,))
    assert wheels_from(elsewhere, of) is None  # nothing is kept yet
    (taken,) = builder(elsewhere, [])._take_wheels()
    assert wheels_from(elsewhere, of) == taken.reference
    assert wheels_from(made, of) is None


@pytest.mark.parametrize("record", [b"", b"[]", b'{"sha256": 5}', b'{"wheel": "a.whl", "sha256": null}'])
def test_a_compiled_wheel_without_a_record_is_not_kept(empty, tmp_path, record):
    (tmp_path / "record.json").write_bytes(record)
    with pytest.raises(LockError, match="is not to be kept"):
        remember_compiled(empty, tmp_path)


def test_a_key_holds_one_wheel(repo, keys, made, empty, tmp_path):
    push_wheel(repo, only(made), keys[:1])
    store(empty.cache_dir, STAGE, write_wheel(tmp_path / "other", members={"apex_C.so": b"other"}))
    with pytest.raises(LockError, match="under the same key"):
        push_wheel(repo, only(empty), keys[:1])


def test_what_a_key_leaves_open_is_not_shared(repo, keys, empty, tmp_path):
    folder = store(empty.cache_dir, STAGE, write_wheel(tmp_path / "one"), inputs=False)
    with pytest.raises(LockError, match="is not noted"):
        push_wheel(repo, only(empty), keys[:1])
    shutil.rmtree(folder)
    open_stage = stage(compiler=["debian12", "12"])
    store(empty.cache_dir, open_stage, write_wheel(tmp_path / "two"))
    with pytest.raises(LockError, match="leaves something open: compiler"):
        push_wheel(repo, only(empty), keys[:1])
    assert repo.manifest(tag_of("apex", open_stage.key)) is None


# -- what a build does with it


def site(host, tmp_path, cache="elsewhere", **more):
    """Return the settings of a machine that trusts `ours`."""
    return Settings(
        cache_dir=tmp_path / cache, **{"registry": f"{host}/site", "trusted_keys": (tmp_path / "ours.pub",)} | more
    )


def builder(settings, notes, **more):
    return Builder(
        client=SimpleNamespace(settings=settings),
        plan=SimpleNamespace(stage=plan().stage, components=(APEX,), stack=None),
        on_change=lambda *_: None,
        note=notes.append,
        **{"pull": True} | more,
    )


def run(capsys, monkeypatch, settings, *words):
    for name in ("registry", "cache_dir"):
        monkeypatch.setenv(f"ENVBUILD_{name.upper()}", str(getattr(settings, name)))
    for name in ("trusted_keys", "signing_keys"):
        monkeypatch.setenv(f"ENVBUILD_{name.upper()}", " ".join(map(str, getattr(settings, name))))
    with pytest.raises(SystemExit) as ended:
        main(["wheels", *words])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_what_one_machine_pushes_another_builds_with(registry, keys, made, tmp_path, capsys, monkeypatch):
    ours = Settings(cache_dir=made.cache_dir, registry=f"{registry}/site", signing_keys=(tmp_path / "ours.key",))
    code, out, err = run(capsys, monkeypatch, ours, "push", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert answer["signers"] == ["ours"]
    assert [(each["component"], each["new"]) for each in answer["pushed"]] == [("apex", True)]
    notes = []
    elsewhere = site(registry, tmp_path)
    one = builder(elsewhere, notes)
    taken = one._take_wheels()
    assert [(each.component, each.signers, each.reference) for each in taken] == [
        ("apex", ("ours",), answer["pushed"][0]["reference"])
    ]
    assert one._kept_wheel("apex") == only(elsewhere).folder
    assert notes == [f"the wheel of apex comes from {registry}/site/wheels, signed by ours"]
    assert one._take_wheels() == ()  # it is there
    for more in (
        {"pull": False},
        {"cache": False},
        {"substitutes": {"src-apex": "/x"}},
        {"substitutes": {"base": "/x"}},
    ):
        assert builder(site(registry, tmp_path, "third"), notes, **more)._take_wheels() == ()
    assert not (tmp_path / "third" / "wheels").exists()
    assert len(notes) == 1


def test_a_build_ends_at_a_wheel_that_it_may_not_take(registry, repo, keys, made, tmp_path):
    name = repo.name.removesuffix("/wheels")
    push_wheel(repo, only(made), keys[1:])
    notes = []
    with pytest.raises(LockError, match="is signed by none of the trusted keys") as refused:
        builder(site(registry, tmp_path, registry=name), notes)._take_wheels()
    assert refused.value.exit_code == 4
    assert "--no-pull compiles the wheel here" in refused.value.hint
    assert notes == []
    assert not list((tmp_path / "elsewhere").glob("wheels/*"))
    assert builder(site(registry, tmp_path, registry=name), notes, pull=False)._take_wheels() == ()
    # nobody is trusted: nothing is asked
    asked = []
    assert builder(Settings(cache_dir=tmp_path / "n", registry="127.0.0.1:1/x"), asked)._take_wheels() == ()
    assert asked == []


def test_a_registry_that_does_not_answer_is_asked_once(keys, tmp_path):
    notes = []
    shared = SharedWheels(site("127.0.0.1:1", tmp_path), notes.append)
    assert not shared.take(plan(), APEX)
    assert not shared.take(plan(), APEX)
    (text,) = notes
    assert text.startswith("no wheel is taken from 127.0.0.1:1/site/wheels")


def test_a_source_that_cannot_be_reached_is_not_needed_where_its_wheel_is(registry, keys, made, tmp_path, monkeypatch):
    settings = site(registry, tmp_path, registry=f"{registry}/{secrets.token_hex(4)}", git_protocols=("file",))
    source = GitSource(name="apex", url=f"file://{tmp_path}/none.git", commit="c" * 40)
    mine = SimpleNamespace(stage=plan().stage, components=(APEX,), lock=SimpleNamespace(sources=(source,)))
    with pytest.raises(UnreachableError):
        require_sources(settings, mine, pull=True)
    with Repository(f"{settings.registry}/wheels") as repository:
        push_wheel(repository, only(made), keys[:1])
    with pytest.raises(UnreachableError):
        require_sources(settings, mine)
    require_sources(settings, mine, pull=True)
    assert only(settings).record.component == "apex"


@pytest.mark.parametrize(
    ("more", "code", "says"),
    [
        ({"registry": None}, 2, "no registry is set"),
        ({"signing_keys": ()}, 2, "no key signs the wheels"),
        ({"registry": "127.0.0.1:1/x"}, 8, "127.0.0.1:1"),
        ({"cache_dir": Path("none")}, 4, "no compiled wheel fits"),
    ],
)
def test_what_push_needs(registry, keys, made, tmp_path, capsys, monkeypatch, more, code, says):
    values = {"cache_dir": made.cache_dir, "registry": f"{registry}/x", "signing_keys": (tmp_path / "ours.key",)} | more
    if values["cache_dir"] == Path("none"):
        values["cache_dir"] = tmp_path / "none"
    settings = SimpleNamespace(trusted_keys=(), **values)
    if settings.registry is None:
        settings.registry = ""
    ended, _, err = run(capsys, monkeypatch, settings, "push")
    assert (ended, says in err) == (code, True), err


def test_push_goes_on_past_a_wheel_that_cannot_be_shared(registry, keys, made, tmp_path, capsys, monkeypatch):
    store(made.cache_dir, stage("te"), write_wheel(tmp_path / "te", "transformer_engine_torch"), inputs=False)
    ours = SimpleNamespace(
        cache_dir=made.cache_dir, registry=f"{registry}/y", signing_keys=(tmp_path / "ours.key",), trusted_keys=()
    )
    code, out, err = run(capsys, monkeypatch, ours, "push", "--json")
    answer = json.loads(out)
    assert code == 4
    assert [each["component"] for each in answer["pushed"]] == ["apex"]
    assert [each["component"] for each in answer["failed"]] == ["te"]
    assert "is not noted" in err


def test_a_wheel_from_a_registry_is_not_signed_as_compiled_here(registry, keys, made, tmp_path, capsys, monkeypatch):
    name = f"{registry}/{secrets.token_hex(4)}"
    with Repository(f"{name}/wheels") as repository:
        push_wheel(repository, only(made), keys[:1])
    elsewhere = site(registry, tmp_path, registry=name, signing_keys=(tmp_path / "theirs.key",))
    notes = []
    (taken,) = builder(elsewhere, notes)._take_wheels()
    mine = SimpleNamespace(stage=plan().stage, components=(APEX,))
    assert push_wheels(elsewhere, mine, keys[1:], note=notes.append) == []
    assert f"came from {taken.reference}" in notes[-1]
    code, _, err = run(capsys, monkeypatch, elsewhere, "push")
    assert (code, taken.reference in err) == (4, True), err
    # with steps of a builder that nobody knows, it was not compiled here either
    remember_compiled(elsewhere.model_copy(update={"cache_from": "r.example.org/steps"}), only(elsewhere).folder)
    assert push_wheels(elsewhere, mine, keys[1:], note=notes.append) == []
    assert "came from r.example.org/steps" in notes[-1]
    # compiled here as well, it is
    remember_compiled(elsewhere, only(elsewhere).folder)
    (pushed,) = push_wheels(elsewhere, mine, keys[1:], note=notes.append)
    assert pushed == {"component": "apex", "reference": taken.reference, "new": False}
    both = Policy(verifiers=tuple(KeyVerifier(key=key.public) for key in keys), needed=2)
    with Repository(f"{name}/wheels") as repository:
        assert take_wheel(Settings(cache_dir=tmp_path / "x"), repository, plan(), APEX, both).signers == (
            "ours",
            "theirs",
        )
    assert push_wheels(elsewhere, mine, (), note=notes.append) == []  # nobody takes what nobody signed


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
    pushed = push_wheel(repo, only(made), keys[:1])
    other = stage(torch="2.12.0+cu130")
    signed = repo.manifest(pushed.digest)
    repo.push_manifest(signed.body, signed.descriptor.mediaType, tag=tag_of("apex", other.key))
    with pytest.raises(LockError, match="something else than its tag says"):
        take_wheel(empty, repo, plan(other), APEX, policy)
    nothing_was_kept(empty)


def test_a_wheel_larger_than_any_is_not_downloaded(repo, keys, policy, made, empty, monkeypatch):
    push_wheel(repo, only(made), keys[:1])
    monkeypatch.setattr(shared_wheels, "LARGEST", 100)
    with pytest.raises(LockError, match="more than any that we know"):
        take_wheel(empty, repo, plan(), APEX, policy)
