"""A catalogue in a real registry that an attacker may write to: published, read, and every tamper refused."""

import concurrent.futures
import datetime as dt
import json
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from cell_inputs import complete, inputs_for

from envbuild.catalog.locks import keep_lock, pull_lock, push_lock
from envbuild.catalog.model import ARTIFACT_TYPE, BLOB_TYPE, TAG, Catalog, Entry
from envbuild.catalog.store import claims_of, publish, read_catalog
from envbuild.errors import DataError, EnvbuildError, LockError, UsageError
from envbuild.lock.files import read_lock
from envbuild.registry.keys import PrivateKey, make_key_pair, read_private_key
from envbuild.registry.manifests import MANIFEST, Descriptor, artifact_of, read_artifact
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import sign, signature_tag
from envbuild.settings import Settings, load_settings

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def entry(name: str, *, image: str = "1") -> Entry:
    cell = inputs_for(cuda=name).cell.of_image
    return Entry.model_validate(
        {
            "id": cell.id,
            "cell": dict(cell.versions),
            "commits": dict(cell.commits),
            "flavor": "runtime",
            "platform": "linux/amd64",
            "lock": "sha256:" + "1" * 64,
            "lock_artifact": "sha256:" + "2" * 64,
            "image": "sha256:" + image * 64,
            "size": 1,
            "release": "1.0",
            "added": NOW,
        }
    )


CPU, GPU, OLD = entry("cpu"), entry("13.0"), entry("12.6")


@dataclass
class Site:
    """A repository, a publisher's key and a client with an empty cache, all of one test."""

    registry: str
    folder: Path
    key: PrivateKey

    def settings(self, **values: str) -> Settings:
        return load_settings(
            environ={
                "HOME": str(self.folder),
                "ENVBUILD_REGISTRY": self.registry,
                "ENVBUILD_CACHE_DIR": str(self.folder / "cache"),
                "ENVBUILD_TRUSTED_KEYS": str(self.folder / "release.pub"),
                **values,
            },
            root=self.folder,
        )

    def publish(self, *entries, now=NOW, **values):
        return publish(self.settings(**values), entries, [self.key], now=lambda: now)

    def read(self, now=NOW, **values):
        return read_catalog(self.settings(**values), now=lambda: now)

    def repository(self) -> Repository:
        return Repository(self.registry)

    def put(self, body: bytes, key: PrivateKey | None, **changed) -> str:
        """Put a catalogue as somebody with the right to push, and perhaps a key, would."""
        with self.repository() as repo:
            blob = repo.push_blob(body, changed.get("media_type", BLOB_TYPE))
            artifact = artifact_of(changed.get("artifact_type", ARTIFACT_TYPE), [blob] * changed.get("times", 1))
            digest = repo.push_artifact(artifact, tag=TAG).digest
            if key:
                sign(repo, digest, key, alone=True, claims=claims_of(repo))
            return digest

    def refused(self, words: str, **values) -> None:
        with pytest.raises(LockError, match=words) as error:
            self.read(**values)
        assert error.value.exit_code == 4


@pytest.fixture
def site(registry, tmp_path):
    private, _ = make_key_pair(tmp_path, "release", None)
    return Site(f"{registry}/acme/{secrets.token_hex(4)}", tmp_path, read_private_key(private, lambda: None))


def other_key(folder: Path, name: str = "other") -> PrivateKey:
    (folder / "keys").mkdir(exist_ok=True)
    return read_private_key(make_key_pair(folder / "keys", name, None)[0], lambda: None)


def test_what_is_published_is_read(site):
    assert site.read() is None
    first = site.publish(CPU)
    found = site.read()
    assert found == first
    assert found.signers == ("release",)
    assert [(e.id, e.signers) for e in found.catalog.entries] == [(CPU.id, ("release",))]
    second = site.publish(GPU)
    assert second.catalog.version == first.catalog.version + 1
    assert {e.id for e in site.read().catalog.entries} == {CPU.id, GPU.id}


def test_publishing_again_replaces_an_image_and_changes_nothing_else(site):
    site.publish(CPU, GPU)
    again = site.publish(CPU)
    assert site.publish(CPU) == again
    newer = entry("cpu", image="5")
    found = site.publish(newer)
    assert {e.image for e in found.catalog.entries} == {GPU.image, newer.image}


def test_publishers_at_once_lose_nothing(site):
    entries = [CPU, GPU, OLD]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one: publish(site.settings(), [one], [site.key]), entries))
    found = read_catalog(site.settings())
    assert {e.id for e in found.catalog.entries} == {e.id for e in entries}


def test_without_a_key_or_a_registry_nothing_is_read(site):
    with pytest.raises(DataError, match="no key is trusted"):
        site.read(ENVBUILD_TRUSTED_KEYS="")
    with pytest.raises(DataError, match="no registry is set"):
        site.read(ENVBUILD_REGISTRY="")


# ---- tampers


def test_an_unsigned_catalogue_is_refused(site):
    site.put(Catalog(version=1, created=NOW, entries=(CPU,)).body(), None)
    site.refused("is not signed")


def test_a_catalogue_signed_by_somebody_else_is_refused(site):
    site.publish(CPU)
    site.put(Catalog(version=9, created=NOW, entries=(CPU,)).body(), other_key(site.folder))
    site.refused("signed by none of the trusted keys")


def test_a_key_with_a_trusted_name_is_not_the_trusted_key(site):
    site.put(Catalog(version=9, created=NOW, entries=(CPU,)).body(), other_key(site.folder, "release"))
    site.refused("signed by none of the trusted keys")


def test_a_signature_of_another_catalogue_does_not_count(site):
    first = site.publish(CPU)
    digest = site.put(Catalog(version=9, created=NOW, entries=(GPU,)).body(), None)
    with site.repository() as repo:
        body = repo.manifest(signature_tag(first.digest)).body
        repo.push_manifest(body, MANIFEST, tag=signature_tag(digest))
    site.refused("signed by none of the trusted keys")


def test_a_rolled_back_catalogue_is_refused(site):
    first = site.publish(CPU)
    site.publish(GPU)
    site.read()
    with site.repository() as repo:
        repo.push_manifest(repo.manifest(first.digest).body, MANIFEST, tag=TAG)
    site.refused("rolled back: it is version 2, and this machine has seen 3")
    # who never saw the newer one takes it, as it is signed and young enough
    shutil.rmtree(site.folder / "cache" / "catalogs")
    assert site.read().digest == first.digest


def test_nobody_publishes_on_top_of_a_rolled_back_catalogue(site):
    first = site.publish(CPU)
    site.publish(GPU)
    with site.repository() as repo:
        repo.push_manifest(repo.manifest(first.digest).body, MANIFEST, tag=TAG)
    with pytest.raises(LockError, match="rolled back"):
        site.publish(OLD)


def test_nobody_signs_what_somebody_else_slipped_in(site):
    site.publish(CPU)
    forged = site.put(Catalog(version=9, created=NOW, entries=(GPU,)).body(), None)
    with pytest.raises(LockError, match="is not signed"):
        site.publish(OLD)
    with site.repository() as repo:
        assert repo.manifest(TAG).descriptor.digest == forged


def test_a_catalogue_that_is_gone_is_a_rollback(site, tmp_path_factory):
    site.publish(CPU)
    site.read()
    moved = Settings.model_validate(site.settings().model_dump() | {"registry": site.registry + "-empty"})
    assert read_catalog(moved) is None  # another repository is another catalogue
    path = site.registry.partition("/")[2]
    tags = f"registry*/data/docker/registry/v2/repositories/{path}/_manifests/tags/{TAG}"
    shutil.rmtree(next(tmp_path_factory.getbasetemp().glob(tags)))
    site.refused("has no catalogue any more, and this machine has seen its version 2")


def test_a_stale_catalogue_is_refused(site):
    site.publish(CPU)
    assert site.read(NOW + dt.timedelta(days=90))
    site.refused("is stale: it is of 2026-01-01, and at most 90 days", now=NOW + dt.timedelta(days=91))
    site.refused("at most 7 days", now=NOW + dt.timedelta(days=8), ENVBUILD_CATALOG_MAX_AGE_DAYS="7")
    later = NOW + dt.timedelta(days=91)
    again = site.publish(now=later)
    assert site.read(later) == again
    assert [e.id for e in again.catalog.entries] == [CPU.id]


def test_a_catalogue_of_tomorrow_is_refused(site):
    site.publish(CPU, now=NOW + dt.timedelta(days=3))
    site.refused("still to come")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"format":2}', b"{" * 5000, Catalog(version=1, created=NOW).body().replace(b"1", b"0")]
)
def test_a_signed_text_that_is_no_catalogue_is_refused(site, body):
    site.put(body, site.key)
    site.refused("the catalogue cannot be read")


@pytest.mark.parametrize("changed", [{"times": 2}, {"media_type": "text/plain"}, {"artifact_type": "application/x"}])
def test_a_signed_artifact_of_another_kind_is_refused(site, changed):
    site.put(Catalog(version=1, created=NOW).body(), site.key, **changed)
    site.refused("another content|another type")


def test_a_changed_blob_is_refused(site, tmp_path_factory):
    """Who owns the registry's disk can change any byte of it."""
    own = entry("cpu", image="8")  # no other test's catalogue has the same bytes
    read = site.publish(own)
    with site.repository() as repo:
        blob = repo.artifact(read.digest, ARTIFACT_TYPE)[1].blobs[0]
    number = blob.digest.removeprefix("sha256:")
    found = tmp_path_factory.getbasetemp().glob(f"registry*/data/docker/registry/v2/blobs/sha256/*/{number}/data")
    stored = next(found)
    stored.write_bytes(stored.read_bytes().replace(own.image.encode(), b"sha256:" + b"6" * 64))
    site.refused("is another one")


# ---- who must sign


def test_two_of_three_must_sign(site):
    second = other_key(site.folder, "second")
    keys = f"{site.folder}/release.pub {site.folder}/keys/second.pub"
    both = {"ENVBUILD_TRUSTED_KEYS": keys, "ENVBUILD_TRUSTED_SIGNATURES": "2"}
    with pytest.raises(UsageError, match="2 signatures are needed, and 1 key"):
        site.publish(CPU, **both)
    one = site.publish(CPU)
    site.refused("is signed by release, and 2 signatures are needed", **both)
    with site.repository() as repo:
        sign(repo, one.digest, second, claims=claims_of(repo))
    assert site.read(**both).signers == ("release", "second")
    done = publish(site.settings(**both), [GPU], [site.key, second], now=lambda: NOW)
    assert done.signers == ("release", "second")


def test_one_key_under_two_names_counts_once(site):
    shutil.copy(site.folder / "release.pub", site.folder / "again.pub")
    with pytest.raises(DataError, match="under two names"):
        site.read(ENVBUILD_TRUSTED_KEYS=f"{site.folder}/release.pub {site.folder}/again.pub")
    with pytest.raises(DataError, match="2 signatures are needed, and 1 key is trusted"):
        site.read(ENVBUILD_TRUSTED_SIGNATURES="2")


def test_one_key_under_two_names_signs_once(site):
    """The publisher's private key is in a file of another name than its public key's."""
    bob = other_key(site.folder, "bob")
    keys = f"{site.folder}/release.pub {site.folder}/keys/bob.pub"
    both = {"ENVBUILD_TRUSTED_KEYS": keys, "ENVBUILD_TRUSTED_SIGNATURES": "2"}
    renamed = [PrivateKey(name=f"{key.name}-sign", key=key.key) for key in (site.key, bob)]
    done = publish(site.settings(**both), [CPU], renamed, now=lambda: NOW)
    assert done.signers == ("release", "bob")
    # One key alone signs a next version: nobody adds to it, and nobody signs it.
    forged = site.put(done.catalog.with_entries((GPU,), now=NOW).body(), site.key)
    with pytest.raises(LockError, match="is signed by release, and 2 signatures are needed"):
        publish(site.settings(**both), [OLD], renamed, now=lambda: NOW)
    with site.repository() as repo:
        assert repo.manifest(TAG).descriptor.digest == forged
    with pytest.raises(UsageError, match="2 signatures are needed, and 1 key"):
        publish(site.settings(**both), [OLD], [site.key, renamed[0]], now=lambda: NOW)


def test_a_key_that_signs_under_a_trusted_name_is_the_trusted_one(site):
    with pytest.raises(DataError, match="is not the trusted key of that name"):
        publish(site.settings(), [CPU], [other_key(site.folder, "release")], now=lambda: NOW)


def test_a_catalogue_of_another_registry_is_refused(site):
    """Every client of both trusts the same key; one registry's catalogue must not pass for the other's."""
    done = site.publish(CPU)
    moved = Settings.model_validate(site.settings().model_dump() | {"registry": site.registry + "-prod"})
    with site.repository() as staging, Repository(moved.registry, moved) as prod:
        for name in (done.digest, signature_tag(done.digest)):
            found = staging.manifest(name)
            for blob in read_artifact(found.body).blobs:
                prod.push_blob(staging.read_blob(blob, limit=1 << 20), blob.mediaType)
            config = json.loads(found.body)["config"]
            described = Descriptor.model_validate(config)
            prod.push_blob(staging.read_blob(described, limit=1 << 20), described.mediaType)
            prod.push_manifest(found.body, MANIFEST, tag=TAG if name == done.digest else name)
    with pytest.raises(LockError, match="is signed by none of the trusted keys"):
        read_catalog(moved, now=lambda: NOW)


def test_nobody_renews_an_old_catalogue_that_they_never_saw(site):
    site.publish(CPU)
    shutil.rmtree(site.folder / "cache" / "catalogs")
    for entries in ((GPU,), ()):
        with pytest.raises(LockError, match="is stale"):
            site.publish(*entries, now=NOW + dt.timedelta(days=400))


def test_nobody_adds_to_an_old_catalogue(site):
    site.publish(CPU)
    with pytest.raises(LockError, match="is stale"):
        site.publish(GPU, now=NOW + dt.timedelta(days=400))
    site.publish(now=NOW + dt.timedelta(days=400))  # whoever has seen it may renew its date


def test_nobody_publishes_after_a_catalogue_of_tomorrow(site):
    site.put(Catalog(version=3, created=NOW + dt.timedelta(days=3000), entries=()).body(), site.key)
    for entries in ((GPU,), ()):
        with pytest.raises(LockError, match="still to come"):
            site.publish(*entries)


def test_nobody_starts_again_where_a_catalogue_was(site, tmp_path_factory):
    site.publish(CPU)
    path = site.registry.partition("/")[2]
    tags = f"registry*/data/docker/registry/v2/repositories/{path}/_manifests/tags/{TAG}"
    shutil.rmtree(next(tmp_path_factory.getbasetemp().glob(tags)))
    with pytest.raises(LockError, match="has no catalogue any more"):
        site.publish(GPU)


def test_the_last_version_ends_with_a_message(site):
    site.put(Catalog(version=1 << 53, created=NOW, entries=()).body(), site.key)
    with pytest.raises(DataError, match="the next version of the catalogue would be none"):
        site.publish(GPU)


def test_a_note_that_cannot_be_read_does_not_let_an_old_catalogue_pass(site):
    first = site.publish(CPU)
    site.publish(GPU)
    with site.repository() as repo:
        repo.push_manifest(repo.manifest(first.digest).body, MANIFEST, tag=TAG)
    (note,) = (site.folder / "cache" / "catalogs").glob("*.json")
    note.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        site.read()


def test_an_entry_without_cuda_or_python_is_refused(site):
    body = json.loads(Catalog(version=1, created=NOW, entries=(CPU,)).body())
    del body["entries"][0]["cell"]["python"]
    site.put(json.dumps(body).encode(), site.key)
    site.refused("the catalogue cannot be read")


# ---- locks


@pytest.fixture(scope="module")
def locked():
    return complete(inputs_for(cuda="cpu"))


def test_a_lock_comes_back(site, locked):
    with site.repository() as repo:
        own = push_lock(repo, locked)
        assert push_lock(repo, locked).digest == own.digest
        found = pull_lock(repo, own.digest, locked.lock.digest)
    assert (found.lock, found.pylocks) == (locked.lock, locked.pylocks)
    folder = keep_lock(site.settings(), found)
    assert read_lock(folder).lock.digest == locked.lock.digest


def test_a_lock_of_another_digest_is_refused(site, locked):
    with site.repository() as repo:
        own = push_lock(repo, locked)
        with pytest.raises(LockError, match="is another one"):
            pull_lock(repo, own.digest, "sha256:" + "0" * 64)
        with pytest.raises(LockError, match="does not hold a lock"):
            pull_lock(repo, "sha256:" + "0" * 64, locked.lock.digest)


def test_a_lock_without_one_of_its_files_is_refused(site, locked):
    with site.repository() as repo:
        _, artifact = repo.artifact(push_lock(repo, locked).digest, "application/vnd.envbuild.lock.v1")
        for left_out in range(len(artifact.blobs)):
            blobs = [blob for i, blob in enumerate(artifact.blobs) if i != left_out]
            digest = repo.push_artifact(artifact_of("application/vnd.envbuild.lock.v1", blobs)).digest
            with pytest.raises(EnvbuildError, match="cannot be read") as error:
                pull_lock(repo, digest, locked.lock.digest)
            assert error.value.exit_code == 4
