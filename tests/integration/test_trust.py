"""What an image of a registry is trusted for, against a real registry that holds hostile and damaged ones."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from command import new_volumes, run, volumes
from published import Published, member, publish

from envbuild.cli.cell_options import asked_from
from envbuild.engine.client import EngineClient
from envbuild.engine.details import Details
from envbuild.engine.guest import LABEL
from envbuild.engine.image_files import files_of_image
from envbuild.engine.trust import expected_digests
from envbuild.errors import HostError, LockError
from envbuild.lock.files import read_lock
from envbuild.pipeline.image import ImageRequest, find_present, make_image
from envbuild.pipeline.prebuilt import expected_of, pull_prebuilt, registry_reference
from envbuild.plan.plan import plan_of
from envbuild.settings import load_settings
from envbuild.util.maker import Maker

OURS = {"org.example.trust": str(os.getpid())}  # a label of each image here, and so of its containers
COMMITTED = min((Path(__file__).resolve().parents[2] / "matrices" / "locks").glob("*-apex*-sm90-fc9f6c2f-*"))
ANY = re.compile(r".*")


class Site:
    """A registry's repository, a cache and a tag, all of one test."""

    def __init__(self, engine, host: str, folder: Path, blobs) -> None:
        self.engine = engine
        self.lock = folder / "lock"
        shutil.copytree(COMMITTED, self.lock)
        # another date makes it a lock that no committed record names: those would say which digest to expect
        committed = json.loads((self.lock / "lock.json").read_text())
        (self.lock / "lock.json").write_text(json.dumps(committed | {"epoch": committed["epoch"] + 1}))
        self.name = f"envbuild-trust-{uuid.uuid4().hex[:12]}"
        self.tag = f"{self.name}:pulled"
        self.env = {"ENVBUILD_REGISTRY": f"{host}/{self.name}", "ENVBUILD_CACHE_DIR": str(folder / "cache")}
        self.settings = load_settings(environ={"HOME": str(folder), **self.env}, root=folder)
        self.client = EngineClient(self.settings)
        self.locked = read_lock(self.lock)
        self.asked = asked_from({"prefer": "proven"}, lock_file=self.lock, sources=())
        self.plan = plan_of(self.asked.matrix, self.locked, self.asked.stack)
        self.reference = registry_reference(self.settings, self.locked.lock)
        self._blobs = blobs

    def files(self, **texts: str) -> list:
        """The files of the lock as members of a layer, with some of them replaced or more of them."""
        carried = {n.removeprefix("lock/"): t for n, t in self.plan.lists.items() if n.startswith("lock/")}
        carried |= {name.replace("__", "."): text for name, text in texts.items()}
        return [member(f"opt/envbuild/{name}", text.encode()) for name, text in carried.items()]

    def publish(self, members=None, *, labels=None, **more) -> Published:
        # a new file: no other test's image has the same layer in the engine
        mark = member("mark", uuid.uuid4().bytes)
        own = self.files() if members is None else members
        return publish(self.reference, [mark, *own], labels=dict(self.plan.labels) | OURS | (labels or {}), **more)

    def stored(self, digest: str) -> Path:
        """The file in which the registry keeps a blob."""
        number = digest.removeprefix("sha256:")
        return self._blobs(f"registry*/data/docker/registry/v2/blobs/sha256/{number[:2]}/{number}/data")

    def pull(self, *flags: str):
        return run("pull", "--lock", str(self.lock), "--tag", self.tag, "--json", *flags, env=self.env)

    def refused(self, done, *words: str) -> None:
        """A refusal: exit 4, one message without control characters, and nothing of it in the engine."""
        assert done.code == 4, (done.out, done.err)
        assert done.err.count("envbuild: error:") == 1
        for word in words:
            assert word in done.err
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.err), ascii(done.err)
        assert json.loads(done.out)["exit_code"] == 4
        assert self.here() == []
        assert not list(Path(self.env["ENVBUILD_CACHE_DIR"]).glob("*/" + self.plan.key))

    def here(self) -> list[str]:
        """Every name of this test's images in the engine, those by digest included."""
        names = docker_lines(
            "image", "ls", "--all", "--digests", "--format", "{{.Repository}}:{{.Tag}} {{.Repository}}@{{.Digest}}"
        )
        return [name for name in names if self.name in name and "<none>" not in name]


def docker_lines(*words: str) -> list[str]:
    """The words that docker prints: one look, which another run that removes its own images cannot disturb."""
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def site(engine, registry, tmp_path, tmp_path_factory):
    made = Site(engine, registry, tmp_path, lambda pattern: next(tmp_path_factory.getbasetemp().glob(pattern)))
    yield made
    for name in made.here():
        with contextlib.suppress(Exception):
            engine.image.remove(name, force=True)
    assert looking(engine) == []


def looking(engine) -> list[str]:
    """The containers that reading an image's files made."""
    ours = [f"--filter=label={name}={value}" for name, value in OURS.items()]
    return docker_lines("ps", "--all", "--filter=name=^envbuild-look-", *ours, "--format={{.Names}}")


def test_what_only_the_registry_confirms_is_not_verified_and_not_built(site):
    """The label and the lock fit, and the rest is not known."""
    hostile = site.publish([*site.files(), member("opt/venv/bin/python", b"#!/bin/steal", mode=0o755)])
    done = site.pull()
    assert done.code == 0, done.err
    assert done.answer["digest"] == hostile.manifest
    assert done.answer["verified"]["by"] == "nobody"
    assert "not verified" in done.answer["verified"]["text"]
    assert site.tag in site.here()
    folder = Path(site.env["ENVBUILD_CACHE_DIR"])
    assert not (folder / "built").exists()
    assert not (folder / "made").exists()
    assert json.loads((folder / "pulled" / site.plan.key).read_text())["by"] == "nobody"
    done = run("pull", "--lock", str(site.lock), "--tag", site.tag, env=site.env)
    assert "not verified: no source but the registry names its digest" in done.out


def test_a_digest_that_a_person_names_is_asked_for(site):
    good = site.publish()
    named = site.pull("--digest", good.manifest)
    assert named.code == 0, named.err
    assert named.answer["verified"] == {
        "by": "flag",
        "digest": good.manifest,
        "record": None,
        "same_as": None,
        "other_recipe": False,
        "text": "verified: it has the digest that --digest named",
    }
    for name in site.here():
        site.engine.image.remove(name, force=True)
    (Path(site.env["ENVBUILD_CACHE_DIR"]) / "pulled" / site.plan.key).unlink()
    moved = site.publish([*site.files(), member("more", b"moved on")])
    site.refused(
        site.pull("--digest", good.manifest), "is not the one that was expected", moved.manifest, good.manifest
    )


def test_the_image_command_refuses_another_digest_too(site):
    site.publish()
    wanted = ("--digest", "sha256:" + "1" * 64)
    done = run("image", "--lock", str(site.lock), "--tag", site.tag, *wanted, "--json", env=site.env)
    site.refused(done, "is not the one that was expected", "--no-pull")


def test_what_this_machine_built_says_which_digest_the_registry_may_hold(site):
    good = site.publish()
    note = Path(site.env["ENVBUILD_CACHE_DIR"]) / "built" / site.plan.key
    note.parent.mkdir(parents=True)
    note.write_text(good.manifest)
    assert site.pull().answer["verified"]["by"] == "build"
    site.publish([*site.files(), member("more", b"other content")])
    refused = site.pull()
    assert refused.code == 4
    assert "this machine built from the same lock" in refused.err


def test_committed_evidence_says_which_digest_the_registry_may_hold(site, engine):
    from envbuild.evidence.refs import committed_evidence

    good = site.publish()
    passed = next(record for record in committed_evidence() if record.passed)
    proven = {"kind": "image", "digest": good.manifest}
    record = passed.model_copy(update={"lock_digest": site.plan.lock.digest, "target": proven})
    expected = expected_digests(site.settings, site.plan, [record])
    _, pulled = pull_prebuilt(site.client, site.plan, site.tag, expected=expected)
    assert (pulled.verified.by, pulled.verified.record) == ("evidence", record.id)
    for name in site.here():
        engine.image.remove(name, force=True)
    site.publish([*site.files(), member("more", b"other content")])
    with pytest.raises(LockError, match="the evidence records of this lock name"):
        pull_prebuilt(site.client, site.plan, site.tag, expected=expected)
    assert site.here() == []


def test_a_second_image_takes_what_was_pulled_and_does_not_say_that_it_was_built(site):
    published = site.publish()

    def image(settings, **more):
        request = ImageRequest(
            matrix=site.asked.matrix, inputs=site.asked.inputs, tag=site.tag, locked_only=True, **more
        )
        silent = (lambda *_: None, lambda _: None, Details())
        return make_image(request, EngineClient(settings), (site.locked, site.lock), lambda plan: silent)

    first = image(site.settings)
    assert (first.origin, first.verified.by, first.built.digest) == ("pulled", "nobody", published.manifest)
    # nobody answers there: the registry is not asked again
    again = image(site.settings.model_copy(update={"registry": "127.0.0.1:9/gone"}))
    assert (again.origin, again.verified.by) == ("found", "nobody")
    assert again.reference == f"{site.reference}@{published.manifest}"
    with pytest.raises(LockError, match="is not the one that was expected"):
        image(site.settings, digest="sha256:" + "1" * 64)
    # a person's word stays with the note
    image(site.settings, digest=published.manifest)
    assert image(site.settings).verified.by == "flag"
    # who says --no-pull does not want it
    expected = expected_of(site.settings, site.plan, None)
    assert find_present(site.client, site.plan, site.tag, pull=False, expected=expected) is None


def test_an_image_of_another_lock_is_refused(site):
    site.publish(labels={"io.envbuild.lock": "sha256:" + "2" * 64})
    site.refused(site.pull(), "made from another lock", "--no-pull")


@pytest.mark.parametrize("label", ["io.envbuild.cell", "io.envbuild.stack", "io.envbuild.complete"])
def test_an_image_whose_labels_are_another_ones_is_refused(site, label):
    site.publish(labels={label: "another"})
    site.refused(site.pull(), label, "says another")


def other_lock(site) -> str:
    lock = site.locked.lock.model_copy(update={"epoch": site.locked.lock.epoch + 86400})
    return lock.model_dump_json(exclude_defaults=True)


def test_an_image_that_carries_another_lock_is_refused(site):
    site.publish(site.files(lock__json=other_lock(site)))
    site.refused(site.pull(), "the lock in the image has digest")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', "\x1b]0;owned\x07"])
def test_an_image_whose_lock_is_none_is_refused(site, text):
    site.publish(site.files(lock__json=text))
    site.refused(site.pull(), "the lock in the image cannot be read")


def test_an_image_without_a_lock_is_refused(site):
    site.publish([])
    site.refused(site.pull(), "there is none in /opt/envbuild")


def test_an_image_without_a_file_of_its_lock_is_refused(site):
    site.publish([m for m in site.files() if not m[0].name.endswith("pylock.torch.toml")])
    site.refused(site.pull(), "the lock in the image cannot be read", "pylock.torch.toml")


SYMLINK, HARDLINK, FIFO, DEVICE, FOLDER = b"2", b"1", b"6", b"3", b"5"


@pytest.mark.parametrize(
    ("kind", "target"),
    [(SYMLINK, "/etc/passwd"), (HARDLINK, "mark"), (FIFO, ""), (DEVICE, ""), (FOLDER, "")],
    ids=["link", "hard link", "fifo", "device", "folder"],
)
def test_a_lock_that_is_no_regular_file_is_refused(site, kind, target):
    others = [m for m in site.files() if not m[0].name.endswith("/lock.json")]
    hostile = member("opt/envbuild/lock.json", type=kind, linkname=target, devmajor=1, devminor=5)
    # a hard link is one file with two names: the second in the folder is the link, whichever the engine meets first
    extra = [member("opt/envbuild/a", type=HARDLINK, linkname="mark")] if kind == HARDLINK else []
    site.publish([*others, *extra, hostile])
    site.refused(site.pull(), "not a regular file")


def test_a_folder_of_the_lock_that_is_a_link_is_not_followed(site):
    site.publish([*[member(m.name.replace("envbuild", "real"), b) for m, b in site.files()],
                  member("opt/envbuild", type=SYMLINK, linkname="real")])  # fmt: skip
    site.refused(site.pull(), "there is none in /opt/envbuild")


def test_a_lock_folder_without_end_is_refused_quickly(site):
    site.publish([*site.files(), member("opt/envbuild/zeros", b"\0" * 2**25)])
    begun = time.monotonic()
    site.refused(site.pull(), "holds more than 16 MiB")
    assert time.monotonic() - begun < 30


def test_a_volume_over_the_lock_hides_nothing_and_is_removed(site, engine):
    before = volumes()
    published = site.publish(site.files(lock__json=other_lock(site)), config={"Volumes": {"/opt/envbuild": {}}})
    site.refused(site.pull(), "the lock in the image has digest")
    assert published.manifest
    assert not new_volumes(before)


def test_what_a_foreign_image_says_never_reaches_the_terminal_raw(site):
    site.publish(labels={"io.envbuild.lock": "\x1b]0;owned\x07\x1b[2J\r\u202e"})
    site.refused(site.pull(), "made from another lock", r"\x1b]0;owned\x07")


def test_a_manifest_swapped_in_the_registrys_storage_is_refused(site):
    other = site.publish([*site.files(), member("more", b"hostile")])
    held = site.publish()
    site.stored(held.manifest).write_bytes(site.stored(other.manifest).read_bytes())
    site.refused(site.pull(), "has another digest", "--no-pull")


def test_a_layer_changed_in_the_registrys_storage_is_refused(site):
    blob = site.stored(site.publish().layer)
    body = blob.read_bytes()
    blob.write_bytes(body[:60] + bytes([body[60] ^ 1]) + body[61:])
    site.refused(site.pull(), "is damaged", "unexpected commit digest")


def test_a_layer_cut_short_in_the_registrys_storage_is_refused(site):
    blob = site.stored(site.publish().layer)
    blob.write_bytes(blob.read_bytes()[:60])
    site.refused(site.pull(), "is damaged", "short read")


@pytest.mark.parametrize("part", ["layer", "config"])
def test_a_part_that_the_registry_lost_is_named(site, part):
    site.stored(getattr(site.publish(), part)).unlink()
    site.refused(site.pull(), "is damaged", "could not fetch content descriptor")


def test_layers_that_are_not_the_manifests_are_refused(site):
    site.publish(diff_id="sha256:" + "3" * 64)
    site.refused(site.pull(), "is damaged", "wrong diff id")


def test_a_layer_that_is_no_archive_is_refused(site):
    site.publish(packed=os.urandom(4000))
    site.refused(site.pull(), "is damaged", "invalid tar header")


def test_a_registry_that_is_down_names_the_way_without_it(tmp_path):
    env = {"ENVBUILD_REGISTRY": "127.0.0.1:9/envbuild", "ENVBUILD_CACHE_DIR": str(tmp_path)}
    done = run("image", "--lock", str(COMMITTED), "--locked", "--tag", "envbuild-trust:none", env=env)
    assert done.code == 8, done.err
    assert "127.0.0.1:9 cannot be reached" in done.err
    assert "--no-pull" in done.err


def test_files_of_an_image_are_those_that_are_wanted(site, engine, client):
    published = site.publish([*site.files(), member("opt/envbuild/built/te.json", b"{}"), member("opt/other", b"x")])
    name = f"{site.reference.rpartition(':')[0]}@{published.manifest}"
    engine.image.pull(name)
    image = client.image(name)
    found = files_of_image(client, image, "/opt/envbuild", re.compile(r"lock\.json|expected\.json"))
    assert set(found) == {"lock.json", "expected.json"}
    assert found["lock.json"].decode() == site.plan.lists["lock/lock.json"]
    assert files_of_image(client, image, "/opt/none", ANY) == {}
    with pytest.raises(HostError, match="there is no image --help here"):
        client.image("--help")
    assert client.find_image("Not A Name") is None


def test_a_reader_that_was_ended_leaves_no_container(site, engine):
    published = site.publish()
    name = f"{site.reference.rpartition(':')[0]}@{published.manifest}"
    engine.image.pull(name)
    code = (
        "import pathlib, re, signal, sys\n"
        "for each in (signal.SIGTERM, signal.SIGHUP): signal.signal(each, signal.default_int_handler)\n"
        "from envbuild.engine.client import EngineClient\n"
        "from envbuild.engine.image_files import files_of_image\n"
        "from envbuild.settings import Settings\n"
        "client = EngineClient(Settings(cache_dir=pathlib.Path('unused')))\n"
        "image = client.image(sys.argv[1])\n"
        "print('ready', flush=True)\n"
        "while True: files_of_image(client, image, '/opt/envbuild', re.compile('lock.json'))\n"
    )
    for number, by in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 4):
        command = [sys.executable, "-c", code, name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout.readline()
            time.sleep(0.05 + 0.06 * number)
            process.send_signal(by)
            assert process.wait(60)
        assert looking(engine) == [], (by, number)


def test_what_a_killed_reader_left_goes_with_a_later_one(site, engine, client):
    published = site.publish()
    name = f"{site.reference.rpartition(':')[0]}@{published.manifest}"
    engine.image.pull(name)
    left, living = (f"envbuild-look-{uuid.uuid4().hex[:12]}" for _ in range(2))
    maker = Maker.here(seconds=600)
    try:
        for each, by in ((left, replace(maker, started=1)), (living, maker)):
            engine.container.create(name, ["/none"], name=each, labels={LABEL: str(by)})
        files_of_image(client, client.image(name), "/opt/envbuild", ANY)
        assert looking(engine) == [living]
    finally:
        for each in looking(engine):
            engine.container.remove(each)
