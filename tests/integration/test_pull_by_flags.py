"""Images pulled by flags from a registry's signed catalogue, as a user does, and every tamper on the way refused."""

import datetime as dt
import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cell_inputs import complete, inputs_for
from command import run
from published import Published, member, publish

from envbuild.catalog.builders import sign_built
from envbuild.catalog.locks import push_lock
from envbuild.catalog.model import ARTIFACT_TYPE, BLOB_TYPE, TAG, Catalog
from envbuild.catalog.store import claims_of, now_utc, read_catalog
from envbuild.catalog.store import publish as publish_entries
from envbuild.errors import LockError
from envbuild.lock.files import Locked
from envbuild.matrix.load import load_matrix
from envbuild.pipeline.cataloged import publish_image
from envbuild.pipeline.prebuilt import registry_reference
from envbuild.plan.plan import plan_of
from envbuild.registry.keys import make_key_pair, read_private_key
from envbuild.registry.manifests import MANIFEST, artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import CONFIG_TYPE, sign, signature_tag
from envbuild.settings import Settings, load_settings

CPU = {"cuda": "cpu"}
GPU = {"cuda": "13.0", "gpu": "h100"}
PLAIN = {"cuda": "13.0", "gpu": "h100", "apex": "none"}
OLD = {"cuda": "12.6", "te": "2.6", "gpu": "h100"}

_locks: dict[str, Locked] = {}


def lock_of(axes) -> Locked:
    """A complete lock of the cell that these flags resolve to."""
    return _locks.setdefault(json.dumps(axes), complete(inputs_for(**axes)))


class Site:
    """A registry's repository, its publisher with a key, and a client that has the address and the public key alone."""

    def __init__(self, host: str, folder: Path, blobs) -> None:
        self.registry = f"{host}/envbuild-flags-{secrets.token_hex(6)}"
        self.name = self.registry.partition("/")[2]
        self.folder = folder
        self.tag = f"{self.name}:pulled"
        (folder / "client").mkdir()
        self.key = self.new_key("release")
        self.client = {
            "HOME": str(folder / "client"),
            "ENVBUILD_REGISTRY": self.registry,
            "ENVBUILD_CACHE_DIR": str(folder / "client" / "cache"),
            "ENVBUILD_TRUSTED_KEYS": str(folder / "release.pub"),
        }
        self._blobs = blobs
        self.images: list[Published] = []
        self.undo: list[Callable[[], object]] = []

    def new_key(self, name: str):
        return read_private_key(make_key_pair(self.folder, name, None)[0], lambda: None)

    def settings(self, **values: str) -> Settings:
        """The publisher's."""
        own = {
            "HOME": str(self.folder),
            "ENVBUILD_REGISTRY": self.registry,
            "ENVBUILD_CACHE_DIR": str(self.folder / "cache"),
            "ENVBUILD_TRUSTED_KEYS": str(self.folder / "release.pub"),
            "ENVBUILD_SIGNING_KEYS": str(self.folder / "release.key"),
        }
        return load_settings(environ=own | values, root=self.folder)

    def push(self, axes, *more, **changed) -> tuple[Locked, Published]:
        """Put an image of one small layer with its labels and its lock into the registry."""
        locked = lock_of(axes)
        plan = plan_of(load_matrix(), locked, None)
        carried = {n.removeprefix("lock/"): t for n, t in plan.lists.items() if n.startswith("lock/")}
        members = [member(f"opt/envbuild/{name}", text.encode()) for name, text in carried.items()]
        mark = member("mark", secrets.token_bytes(16))  # no other test's image has the same layer in the engine
        reference = registry_reference(self.settings(), locked.lock)
        return locked, publish(reference, [mark, *members, *more], labels=plan.labels, **changed)

    def publish(self, *cells) -> list[Published]:
        """Publish an image for each of `cells` in the catalogue."""
        done = []
        for axes in cells:
            locked, image = self.push(axes)
            publish_image(self.settings(), locked, image.manifest, [self.key])
            done.append(image)
        return done

    def repository(self) -> Repository:
        return Repository(self.registry)

    def stored(self, digest: str) -> Path:
        """The file in which the registry keeps a blob."""
        number = digest.removeprefix("sha256:")
        return self._blobs(f"registry*/data/docker/registry/v2/blobs/sha256/{number[:2]}/{number}/data")

    def put_catalog(self, catalog: Catalog, key) -> None:
        """Put a catalogue as somebody with the right to push, and perhaps a key, would."""
        with self.repository() as repo:
            blob = repo.push_blob(catalog.body(), BLOB_TYPE)
            pushed = repo.push_artifact(artifact_of(ARTIFACT_TYPE, [blob]), tag=TAG)
            if key:
                sign(repo, pushed.digest, key, alone=True, claims=claims_of(repo))

    def catalog(self) -> Catalog:
        return read_catalog(self.settings()).catalog

    def pull(self, axes, *flags: str, **env: str):
        return run("pull", *words(axes), "--tag", self.tag, "--json", *flags, env=self.client | env)

    def image(self, axes, *flags: str, **env: str):
        return run("image", *words(axes), "--tag", self.tag, "--json", "--no-smoke", *flags, env=self.client | env)

    def listed(self, axes=(), *flags: str, **env: str):
        return run("catalog", *words(dict(axes)), *flags, env=self.client | env)

    def refused(self, done, *texts: str) -> None:
        """A refusal: exit 4, one message, nothing tagged and nothing noted."""
        assert done.code == 4, (done.out, done.err)
        assert done.err.count("envbuild: error:") == 1
        for text in texts:
            assert text in done.err
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", done.err), ascii(done.err)
        assert self.here() == []
        assert not list((self.folder / "client" / "cache").glob("pulled/*"))

    def here(self) -> list[str]:
        """Every name of this test's images in the engine."""
        form = "{{.Repository}}:{{.Tag}} {{.Repository}}@{{.Digest}}"
        shown = ["docker", "image", "ls", "--all", "--digests", "--format", form]
        found = subprocess.run(shown, capture_output=True, text=True, check=True).stdout.split()
        return [name for name in found if self.name in name and "<none>" not in name]


def words(axes) -> list[str]:
    return [word for axis, spec in axes.items() for word in (f"--{axis}", spec)]


@pytest.fixture
def site(engine, registry, tmp_path, tmp_path_factory):
    made = Site(registry, tmp_path, lambda pattern: next(tmp_path_factory.getbasetemp().glob(pattern)))
    yield made
    for step in made.undo:
        step()
    for name in made.here():
        subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, check=False)


# ---- by flags


def test_flags_find_the_image_its_lock_and_its_digest(site):
    """The client has an address and a key: the lock and the digest to expect come from the signed catalogue."""
    cpu, _, gpu, old = site.publish(CPU, PLAIN, GPU, OLD)
    for axes, image in ((CPU, cpu), (GPU, gpu), (OLD, old)):
        done = site.pull(axes)
        assert done.code == 0, done.err
        assert (done.answer["digest"], done.answer["lock"]) == (image.manifest, lock_of(axes).lock.digest)
        assert done.answer["verified"] == {
            "by": "catalog",
            "digest": image.manifest,
            "record": "release",
            "same_as": None,
            "other_recipe": False,
            "text": "verified: it has the digest in the catalogue that release signed",
        }
        assert site.tag in site.here()


def test_image_takes_what_is_published_before_it_builds(site):
    """What it does then is its usual proof; these images hold nothing that an audit accepts."""
    (old,) = site.publish(OLD)
    for there in (True, False):
        if not there:  # what was pulled is found: the registry's image is not asked for again
            image_removed(site)
        done = site.image({"te": "2.6"})
        assert done.code == 6, done.err
        assert f"has {lock_of(OLD).lock.as_cell.id}" in done.err
        held = subprocess.run(
            ["docker", "inspect", "-f", "{{.Id}}", site.tag], capture_output=True, text=True, check=True
        )
        assert held.stdout.strip() == old.manifest
        (note,) = (site.folder / "client" / "cache" / "pulled").iterdir()
        assert (json.loads(note.read_text())["by"], json.loads(note.read_text())["record"]) == ("catalog", "release")


def test_a_moved_tag_changes_nothing(site):
    """The image is asked for by the digest in the catalogue, whatever the registry's tag names."""
    (good,) = site.publish(CPU)
    _, hostile = site.push(CPU, member("opt/venv/bin/python", b"#!/bin/steal", mode=0o755))
    assert hostile.manifest != good.manifest
    assert site.pull(CPU).answer["digest"] == good.manifest


def test_a_digest_that_a_person_names_comes_first(site):
    site.publish(CPU)
    site.refused(site.pull(CPU, "--digest", "sha256:" + "1" * 64), "--digest names")


def test_a_lock_that_is_named_is_used(site):
    """The catalogue is then not asked: its tag is gone, and nothing notices."""
    from envbuild.lock.files import write_lock

    locked, _ = site.push(CPU)
    write_lock(locked, site.folder / "own")
    done = site.pull({}, "--lock", str(site.folder / "own"))
    assert (done.code, done.answer["verified"]["by"]) == (0, "nobody")


def test_what_is_not_published_names_the_nearest_and_the_command(site):
    site.publish(CPU, OLD)
    asked = {"cuda": "12.9", "te": "2.6", "gpu": "h100"}
    done = site.pull(asked)
    site.refused(
        done,
        "no published image fits",
        "cuda: 12.6, not 12.9",
        "envbuild image --no-pull --cuda 12.9 --gpu h100 --te 2.6",
    )
    listed = site.listed(asked, "--json")
    assert listed.code == 0, listed.err
    assert listed.answer["entries"] == []
    assert listed.answer["nearest"][0]["differs"] == {"cuda": ["12.9", "12.6"]}
    text = site.listed(asked).out
    assert "no published image fits" in text
    assert "build it: envbuild image --no-pull --cuda 12.9" in text


def test_an_empty_registry_has_nothing(site):
    site.refused(site.pull(CPU), "no published image fits")
    assert "has no catalogue" in site.listed().out


def test_the_list_shows_and_filters(site):
    cpu, gpu, old = site.publish(CPU, GPU, OLD)
    every = site.listed({}, "--json").answer
    assert {one["image"] for one in every["entries"]} == {cpu.manifest, gpu.manifest, old.manifest}
    assert (every["version"], every["signers"]) == (4, ["release"])
    some = site.listed({"cuda": "12.6"}, "--json").answer
    assert [one["image"] for one in some["entries"]] == [old.manifest]
    assert some["entries"][0]["reference"] == f"{site.registry}@{old.manifest}"
    assert some["entries"][0]["sms"] == ["sm_90"]
    table = site.listed({"cuda": "12.6"}).out
    assert lock_of(OLD).lock.as_cell.id in table
    assert lock_of(CPU).lock.as_cell.id not in table
    after = run("catalog", "--cuda", "12.6", "refresh", env=site.client)
    assert (after.code, "before the name of a subcommand" in after.err) == (2, True)


# ---- publishing


def test_a_publisher_pushes_adds_and_signs_in_one_command(site, engine):
    """The image is in the engine alone; a client then pulls it by flags."""
    env = {
        "HOME": str(site.folder),
        "ENVBUILD_REGISTRY": site.registry,
        "ENVBUILD_CACHE_DIR": str(site.folder / "cache"),
        "ENVBUILD_TRUSTED_KEYS": str(site.folder / "team.pub"),
        "ENVBUILD_SIGNING_KEYS": str(site.folder / "team.key"),
        "COSIGN_PASSWORD": "quite secret",
    }
    made = run(
        "catalog", "keygen", "team", "--out", str(site.folder), "--json", env={"COSIGN_PASSWORD": "quite secret"}
    )
    assert made.code == 0, made.err
    assert (site.folder / "team.key").stat().st_mode & 0o077 == 0
    locked, image = site.push(CPU)
    own = f"{site.name}:own"
    engine.image.pull(f"{site.registry}@{image.manifest}")
    engine.image.tag(f"{site.registry}@{image.manifest}", own)
    nobody = run("catalog", "publish", own, env=env)
    assert nobody.code == 4
    assert "nobody confirms that this image follows from its lock" in nobody.err
    other = run("catalog", "publish", own, "--digest", "sha256:" + "1" * 64, env=env)
    assert (other.code, "it was not published" in other.err) == (4, True)
    assert "no key is set to sign with" in run("catalog", "publish", own, env=env | {"ENVBUILD_SIGNING_KEYS": ""}).err
    wrong = run("catalog", "publish", own, "--digest", image.manifest, env=env | {"COSIGN_PASSWORD": "wrong"})
    assert (wrong.code, "password is wrong" in wrong.err) == (2, True)
    with site.repository() as repo:
        assert repo.artifact(TAG, ARTIFACT_TYPE) is None
    done = run("catalog", "publish", own, "--digest", image.manifest, "--json", env=env)
    assert done.code == 0, done.err
    assert (done.answer["digest"], done.answer["signers"]) == (image.manifest, ["team"])
    assert done.answer["lock"] == locked.lock.digest
    for name in site.here():
        engine.image.remove(name, force=True)
    trusted = str(site.folder / "team.pub")
    assert site.pull(CPU, ENVBUILD_TRUSTED_KEYS=trusted).answer["verified"]["by"] == "catalog"
    again = run("catalog", "refresh", "--json", env=env)
    assert (again.code, again.answer["version"] >= done.answer["version"]) == (0, True)


# ---- who built it


def test_two_builders_must_have_come_to_the_digest(site):
    """A signature of the catalogue, or one of the image that states nothing, is no builder's."""
    second, stranger = site.new_key("second"), site.new_key("stranger")
    keys = f"{site.folder / 'release.pub'} {site.folder / 'second.pub'}"
    two = {"ENVBUILD_TRUSTED_KEYS": keys, "ENVBUILD_TRUSTED_BUILDERS": "2"}
    locked, image = site.push(CPU)
    publish_image(site.settings(), locked, image.manifest, [site.key], built=True)
    with site.repository() as repo:
        sign(repo, image.manifest, second)
        sign_built(repo, image.manifest, [stranger])
        with pytest.raises(LockError, match="does not hold the image"):
            sign_built(repo, "sha256:" + "1" * 64, [second])
    site.refused(site.pull(CPU, **two), "2 trusted builders must have built this image, and release did")
    too_many = site.pull(CPU, **two | {"ENVBUILD_TRUSTED_BUILDERS": "3"})
    assert (too_many.code, "3 builders are needed, and 2 keys are trusted" in too_many.err) == (2, True)
    with site.repository() as repo:
        sign_built(repo, image.manifest, [second])
        sign_built(repo, image.manifest, [second])
        assert len(repo.artifact(signature_tag(image.manifest), CONFIG_TYPE)[1].blobs) == 4
    assert site.pull(CPU, **two).answer["digest"] == image.manifest


def test_a_builder_of_another_image_does_not_count(site):
    """The signature is moved to the image that is published."""
    locked, image = site.push(CPU)
    _, other = site.push(CPU)
    publish_image(site.settings(), locked, image.manifest, [site.key])
    with site.repository() as repo:
        sign_built(repo, other.manifest, [site.key])
        body = repo.manifest(signature_tag(other.manifest)).body
        repo.push_manifest(body, MANIFEST, tag=signature_tag(image.manifest))
    site.refused(
        site.pull(CPU, ENVBUILD_TRUSTED_BUILDERS="1"), "1 trusted builder must have built this image, and none"
    )


def test_a_rebuild_is_signed_only_with_a_key(site):
    """This is found out before the build."""
    done = run("reproduce", "none", "--sign", env=site.client)
    assert (done.code, "no key is set to sign with" in done.err) == (2, True)


# ---- tampers: each is exit 4, and nothing is tagged


def unsigned(site):
    site.put_catalog(site.catalog(), None)
    return {}, ("is not signed",)


def signed_by_another(site):
    site.put_catalog(site.catalog(), site.new_key("other"))
    return {}, ("is signed by none of the trusted keys",)


def signature_removed(site):
    digest = read_catalog(site.settings()).digest
    path = f"registry*/data/docker/registry/v2/repositories/{site.name}/_manifests/tags/{signature_tag(digest)}"
    shutil.rmtree(site._blobs(path))
    return {}, ("is not signed",)


def one_of_two_signed(site):
    site.new_key("second")
    keys = f"{site.folder / 'release.pub'} {site.folder / 'second.pub'}"
    env = {"ENVBUILD_TRUSTED_KEYS": keys, "ENVBUILD_TRUSTED_SIGNATURES": "2"}
    return env, ("is signed by release, and 2 signatures are needed",)


def stale(site):
    held = site.catalog()
    old = now_utc() - dt.timedelta(days=91)
    site.put_catalog(Catalog(version=9, created=old, entries=held.entries), site.key)
    return {}, ("is stale",)


def rolled_back(site):
    first = read_catalog(site.settings())
    publish_entries(site.settings(), (), [site.key], now=lambda: now_utc() + dt.timedelta(hours=1))
    assert site.listed().code == 0  # the client has now seen the newer one
    with site.repository() as repo:
        repo.push_manifest(repo.manifest(first.digest).body, MANIFEST, tag=TAG)
    return {}, ("was rolled back",)


def catalog_removed(site):
    assert site.listed().code == 0
    shutil.rmtree(site._blobs(f"registry*/data/docker/registry/v2/repositories/{site.name}/_manifests/tags/{TAG}"))
    return {}, ("has no catalogue any more",)


def image_swapped(site):
    """Who owns the registry's disk puts another image where the digest leads."""
    _, other = site.push(CPU, member("more", b"hostile"))
    site.stored(site.catalog().entries[0].image).write_bytes(site.stored(other.manifest).read_bytes())
    return {}, ()


def image_of_another_lock(site):
    """A publisher errs: the entry names an image that another lock made."""
    _, other = site.push(OLD)
    held = site.catalog()
    entry = held.entries[0].model_copy(update={"image": other.manifest})
    site.put_catalog(Catalog(version=9, created=now_utc(), entries=(entry,)), site.key)
    return {}, ("the registry's image is another one", "its label")


def image_removed(site):
    digest = site.catalog().entries[0].image.removeprefix("sha256:")
    shutil.rmtree(
        site._blobs(f"registry*/data/docker/registry/v2/repositories/{site.name}/_manifests/revisions/sha256/{digest}")
    )
    return {}, ("has no image of this lock",)


def layer_changed(site):
    blob = site.stored(site.images[0].layer)
    body = blob.read_bytes()
    blob.write_bytes(body[:60] + bytes([body[60] ^ 1]) + body[61:])
    return {}, ("is damaged",)


def lock_changed(site):
    with site.repository() as repo:
        found = repo.artifact(site.catalog().entries[0].lock_artifact, "application/vnd.envbuild.lock.v1")[1]
        blob = next(each for each in found.blobs if "lock.json" in each.annotations.values())
    place = site.stored(blob.digest)
    body = place.read_bytes()
    place.write_bytes(body.replace(b"https://", b"http:///"))
    site.undo.append(lambda: place.write_bytes(body))  # the registry keeps it once for all repositories
    assert place.read_bytes() != body
    return {}, ("is another one",)


def lock_of_another_cell(site):
    """A publisher errs: the entry names a lock that is not of its cell."""
    other = lock_of(OLD)
    with site.repository() as repo:
        artifact = push_lock(repo, other).digest
    held = site.catalog()
    entry = held.entries[0].model_copy(update={"lock_artifact": artifact, "lock": other.lock.digest})
    site.put_catalog(Catalog(version=9, created=now_utc(), entries=(entry,)), site.key)
    return {}, ("the catalogue's entry does not describe its lock",)


def lock_removed(site):
    digest = site.catalog().entries[0].lock_artifact.removeprefix("sha256:")
    shutil.rmtree(
        site._blobs(f"registry*/data/docker/registry/v2/repositories/{site.name}/_manifests/revisions/sha256/{digest}")
    )
    return {}, ("does not hold a lock of its catalogue",)


OF_THE_CATALOGUE = [
    unsigned,
    signed_by_another,
    signature_removed,
    one_of_two_signed,
    stale,
    rolled_back,
    catalog_removed,
]
OF_THE_IMAGE = [image_swapped, image_of_another_lock, image_removed, layer_changed]
OF_THE_LOCK = [lock_changed, lock_of_another_cell, lock_removed]


@pytest.mark.parametrize("tamper", [*OF_THE_CATALOGUE, *OF_THE_IMAGE, *OF_THE_LOCK], ids=lambda tamper: tamper.__name__)
def test_a_tamper_is_refused_and_nothing_is_tagged(site, tamper):
    site.images = site.publish(CPU)
    env, texts = tamper(site)
    site.refused(site.pull(CPU, **env), *texts)


@pytest.mark.parametrize("tamper", [signed_by_another, rolled_back, lock_changed], ids=lambda tamper: tamper.__name__)
def test_image_refuses_it_too_and_names_the_way_without_the_registry(site, tamper):
    site.images = site.publish(CPU)
    env, texts = tamper(site)
    site.refused(site.image(CPU, **env), *texts, "--no-pull builds the image without the registry")


@pytest.mark.parametrize("tamper", [unsigned, one_of_two_signed, stale], ids=lambda tamper: tamper.__name__)
def test_the_list_is_refused_too(site, tamper):
    site.images = site.publish(CPU)
    env, texts = tamper(site)
    site.refused(site.listed({}, "--json", **env), *texts)


def test_a_registry_that_is_down_is_exit_8(site):
    away = {"ENVBUILD_REGISTRY": "127.0.0.1:9/none"}
    for done in (site.pull(CPU, **away), site.listed(**away), site.image(CPU, **away)):
        assert (done.code, "127.0.0.1:9 cannot be reached" in done.err) == (8, True), done.err
