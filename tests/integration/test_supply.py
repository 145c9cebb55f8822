"""SBOM and provenance attached to images of a registry that an attacker may write to: found, checked, tampers refused."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from command import run
from test_pull_by_flags import CPU, GPU, Site, lock_of

from envbuild.catalog.builders import LAYERS, sign_built
from envbuild.catalog.choose import Wanted
from envbuild.catalog.store import read_catalog
from envbuild.cli.published import keys_of
from envbuild.engine.built import Built
from envbuild.engine.client import EngineClient
from envbuild.errors import DataError, EnvbuildError, LockError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.pipeline.cataloged import Published, find_published, publish_image, push_and_publish, refresh_catalog
from envbuild.registry.manifests import artifact_of, bare
from envbuild.registry.signatures import CONFIG_TYPE, sign, signature_tag
from envbuild.supply.attached import TYPES, attach, claims_of
from envbuild.supply.inventory import inventory
from envbuild.supply.owners import Owned
from envbuild.supply.sbom import sbom
from envbuild.supply.slsa import provenance

BOTH = ("sbom", "provenance")
ASKED = {"ENVBUILD_TRUSTED_DOCUMENTS": "sbom provenance"}


@pytest.fixture
def site(registry, tmp_path, tmp_path_factory):
    made = Site(registry, tmp_path, lambda pattern: next(tmp_path_factory.getbasetemp().glob(pattern)))
    yield made
    for name in made.here():
        subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, check=False)


def documents(axes, image: str, key) -> dict:
    lock = lock_of(axes).lock
    inputs = inventory(lock)
    return {
        "sbom": sbom(lock, inputs, image=image, owned=Owned(files={}, unowned=())),
        "provenance": provenance(lock, inputs, image=image, layers=["sha256:" + "1" * 64], builder=key.public.builder),
    }


def publish(site, axes=CPU, *, names=BOTH):
    """Publish an image with documents of it, signed by the site's key."""
    locked, image = site.push(axes)
    own = documents(axes, image.manifest, site.key)
    publish_image(site.settings(), locked, image.manifest, [site.key], documents={name: own[name] for name in names})
    return image


def put(site, image, name: str, body: bytes, key, *, subject=None, media_type=None) -> str:
    """Attach a document as somebody with the right to push, and perhaps a key, would; return its manifest's digest."""
    with site.repository() as repo:
        held = repo.manifest((subject or image).manifest)
        blob = repo.push_blob(body, media_type or TYPES[name])
        pushed = repo.push_artifact(artifact_of(TYPES[name], [blob], subject=bare(held.descriptor)))
        if key:
            sign(repo, pushed.digest, key, alone=True, claims=claims_of(name))
        return pushed.digest


def client(site, **values: str):
    """The settings of who pulls."""
    return site.settings(ENVBUILD_SIGNING_KEYS="", **(ASKED | values))


def found(site, **values: str):
    wanted = Wanted(request=Request(pins=(Pin(axis="cuda", spec="cpu", origin="--cuda"),)))
    return find_published(client(site, **values), load_matrix(), wanted, note=lambda _: None)


def refused(site, *words: str, **values: str) -> None:
    with pytest.raises(LockError) as error:
        found(site, **values)
    assert error.value.exit_code == 4
    for word in words:
        assert word in str(error.value)


def test_documents_are_found_and_the_image_keeps_its_digest(engine, site):
    image = publish(site)
    with site.repository() as repo:
        assert repo.manifest(image.manifest).descriptor.digest == image.manifest
        for name in BOTH:
            assert len(repo.referrers(image.manifest, TYPES[name])) == 1
    assert isinstance(found(site), Published)
    (entry,) = read_catalog(site.settings()).catalog.entries
    assert len(entry.layers) == 1
    done = site.pull(CPU, **ASKED)
    assert (done.code, done.answer["digest"]) == (0, image.manifest), done.err


def test_the_same_document_is_attached_once(site):
    image = publish(site)
    with site.repository() as repo:
        held = bare(repo.manifest(image.manifest).descriptor)
        again = attach(repo, held, "sbom", documents(CPU, image.manifest, site.key)["sbom"], [site.key])
        assert [each.digest for each in repo.referrers(image.manifest, TYPES["sbom"])] == [again.digest]


@pytest.mark.parametrize("name", BOTH)
def test_an_image_without_a_document_is_refused_where_it_is_asked_for(site, name):
    publish(site, names=[each for each in BOTH if each != name])
    refused(site, "has no " + {"sbom": "SBOM", "provenance": "provenance"}[name])
    assert isinstance(found(site, ENVBUILD_TRUSTED_DOCUMENTS=""), Published)


def test_pull_tags_nothing_without_its_document(engine, site):
    publish(site, names=())
    site.refused(site.pull(CPU, **ASKED), "the image has no SBOM in the registry", "trusted_documents")


@pytest.mark.parametrize("name", BOTH)
def test_what_somebody_else_attached_does_not_count(site, name):
    image = publish(site, names=[each for each in BOTH if each != name])
    body = documents(CPU, image.manifest, site.key)[name]
    put(site, image, name, body, None)
    refused(site, "is not signed")
    put(site, image, name, body.replace(b"\n", b" \n"), site.new_key("other"))
    refused(site, "that is to be trusted")
    # a good one counts, whatever else is there
    put(site, image, name, body + b" ", site.key)
    assert isinstance(found(site), Published)


@pytest.mark.parametrize("name", BOTH)
def test_a_signed_document_of_another_image_or_lock_does_not_count(site, name):
    other = publish(site, GPU)
    image = publish(site, CPU, names=[each for each in BOTH if each != name])
    put(site, image, name, documents(CPU, other.manifest, site.key)[name], site.key)
    refused(site, "is about another image")
    with site.repository() as repo:  # not the first in the list any more
        assert repo.referrers(image.manifest, TYPES[name])
    put(site, image, name, documents(GPU, image.manifest, site.key)[name], site.key)
    refused(site, "that is to be trusted")


def test_a_signature_of_one_document_does_not_count_for_another(site):
    """Whoever may push copies the signature of what was signed to what was not."""
    image = publish(site, names=("provenance",))
    with site.repository() as repo:
        (signed,) = repo.referrers(image.manifest, TYPES["provenance"])
        digest = put(site, image, "sbom", documents(CPU, image.manifest, site.key)["sbom"], None)
        body = repo.manifest(signature_tag(signed.digest)).body
        repo.push_manifest(body, "application/vnd.oci.image.manifest.v1+json", tag=signature_tag(digest))
        assert repo.artifact(signature_tag(digest), CONFIG_TYPE)
    refused(site, "signed by none of the trusted keys")


def test_a_builder_that_did_not_sign_is_refused(site):
    image = publish(site, names=("sbom",))
    forged = documents(CPU, image.manifest, site.new_key("other"))["provenance"]
    put(site, image, "provenance", forged, site.key)
    refused(site, "names a builder that did not sign it")


def test_a_signed_thing_that_is_no_document_is_refused(site):
    image = publish(site, names=("provenance",))
    for body in (b"", b"[]", b"{}", b'{"bomFormat": "CycloneDX", "metadata": null}', b"[" * 5000):
        put(site, image, "sbom", body, site.key)
    refused(site, "no SBOM that is to be trusted")


def test_a_damaged_document_is_refused(site):
    image = publish(site)
    with site.repository() as repo:
        (listed,) = repo.referrers(image.manifest, TYPES["sbom"])
        (blob,) = repo.artifact(listed.digest, TYPES["sbom"])[1].blobs
    stored = site.stored(blob.digest)
    stored.write_bytes(stored.read_bytes().replace(b"1", b"2"))
    refused(site, "a blob that", "is another one")


def test_a_listed_document_of_another_image_is_refused(site):
    """The list of referrers is the registry's word; the manifest itself says which image it is about."""
    other, image = publish(site, GPU), publish(site, CPU, names=("provenance",))
    with site.repository() as repo:
        (of_other,) = repo.referrers(other.manifest, TYPES["sbom"])
        fallback = image.manifest.replace(":", "-")
        held = repo.manifest(fallback)
        listed = json.loads(held.body) if held else {"schemaVersion": 2, "manifests": []}
        listed["manifests"].append(of_other.plain())
        repo.push_manifest(json.dumps(listed).encode(), "application/vnd.oci.image.index.v1+json", tag=fallback)
    refused(site, "the artifact is about")


def test_refresh_signs_no_catalogue_whose_images_miss_a_document(site):
    publish(site, names=("sbom",))
    before = read_catalog(site.settings())
    asked = site.settings(**ASKED)
    with pytest.raises(LockError, match="has no provenance"):
        refresh_catalog(asked, keys_of(asked))
    assert read_catalog(site.settings()) == before
    assert refresh_catalog(site.settings(), [site.key]).catalog.version == before.catalog.version + 1


def test_nobody_publishes_what_those_who_pull_would_refuse(site):
    locked, image = site.push(CPU)
    with pytest.raises(LockError, match="has no SBOM"):
        publish_image(site.settings(**ASKED), locked, image.manifest, [site.key])
    assert read_catalog(site.settings()) is None


def test_nothing_is_signed_where_a_document_is_missing_that_this_machine_cannot_write(site):
    locked, image = site.push(CPU)
    own = documents(CPU, image.manifest, site.key)
    settings = site.settings(**ASKED)
    only = {"sbom": own["sbom"]}
    with pytest.raises(LockError, match="has no provenance"):
        publish_image(settings, locked, image.manifest, [site.key], built=True, documents=only)
    with site.repository() as repo:
        assert repo.referrers(image.manifest) == ()
        assert repo.manifest(signature_tag(image.manifest)) is None
    # where the builder attached its own, this machine's SBOM is enough
    put(site, image, "provenance", own["provenance"], site.key)
    read = publish_image(settings, locked, image.manifest, [site.key], built=True, documents=only)
    assert [entry.image for entry in read.catalog.entries] == [image.manifest]


def test_nothing_is_pushed_where_a_document_is_missing_that_this_machine_cannot_write(site, tmp_path, monkeypatch):
    """The engine is not even asked."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nexit 1\n')
    program.chmod(0o755)
    image, locked = "sha256:" + "1" * 64, lock_of(CPU)
    own = documents(CPU, image, site.key)
    steps: list[str] = []

    def publish_it(**values: str) -> None:
        push_and_publish(
            EngineClient(site.settings(**values)),
            Built(tag="mine:1", digest=image, size=1),
            locked,
            [site.key],
            built=False,
            documents={"sbom": own["sbom"]},
            doing=steps.append,
        )

    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        with pytest.raises(LockError, match="has no provenance"):
            publish_it(**ASKED)
        assert not steps
        assert not (tmp_path / "asked").exists()
        with pytest.raises(EnvbuildError):  # that engine takes nothing
            publish_it(ENVBUILD_TRUSTED_DOCUMENTS="sbom")
        assert steps == ["pushing the image"]
        assert (tmp_path / "asked").exists()


def test_a_builder_of_the_same_layers_counts(site):
    """Another engine compressed them in another way: what the lock makes is the same."""
    image = publish(site, names=())
    asked = {"ENVBUILD_TRUSTED_DOCUMENTS": "", "ENVBUILD_TRUSTED_BUILDERS": "1"}
    refused(site, "must have built this image", **asked)
    with site.repository() as repo:
        sign(repo, image.manifest, site.key, claims={"io.envbuild.built": "something else"})
    refused(site, "must have built this image", **asked)
    with site.repository() as repo:
        sign_built(repo, image.manifest, [site.key], claims=LAYERS)
    assert isinstance(found(site, **asked), Published)


def test_the_layers_that_were_built_here_are_taken_in_another_compression(engine, site):
    """This machine built the same layers, and its engine compressed them in another way: the catalogue says which to take."""
    image = publish(site)
    (entry,) = read_catalog(site.settings()).catalog.entries
    note = Path(site.client["ENVBUILD_CACHE_DIR"]) / "built" / plan_key(lock_of(CPU))
    note.parent.mkdir(parents=True)
    note.write_text(f"layers sha256:{'3' * 64}\nsha256:{'2' * 64}")
    refused_pull = site.pull(CPU)
    assert refused_pull.code == 4
    assert "this machine built from the same lock" in refused_pull.err
    note.write_text(f"layers {','.join(entry.layers)}\nsha256:{'2' * 64}")
    done = site.pull(CPU)
    assert done.code == 0, done.err
    assert (done.answer["digest"], done.answer["verified"]["by"]) == (image.manifest, "catalog")
    # the same layers under another entry point are another image
    own = EngineClient(site.settings()).image(site.tag).config
    for config, code in (("sha256:" + "4" * 64, 4), (own, 0)):
        for name in site.here():
            subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, check=False)
        shutil.rmtree(note.parent.parent / "pulled")
        (note.parent.parent / "pulled").mkdir()
        note.write_text(f"config {config}\nlayers {','.join(entry.layers)}\nsha256:{'2' * 64}")
        done = site.pull(CPU)
        assert done.code == code, done.err
        assert bool(site.here()) is (code == 0)
        assert code == 0 or "starts them in another way" in done.err


def test_an_unknown_document_in_the_settings_is_refused(site):
    with pytest.raises(DataError, match="trusted_documents"):
        site.settings(ENVBUILD_TRUSTED_DOCUMENTS="vex")


def test_provenance_is_of_what_this_machine_built(engine, site, tmp_path):
    """An image that came from elsewhere has an SBOM; who built it is not this machine's to say."""
    image = publish(site)
    assert site.pull(CPU).code == 0
    env = site.client | {"ENVBUILD_SIGNING_KEYS": str(site.folder / "release.key")}
    done = run("provenance", site.tag, "--output", str(tmp_path / "p.json"), env=env)
    assert (done.code, (tmp_path / "p.json").exists()) == (4, False)
    assert "this machine did not build this image" in done.err
    locked = lock_of(CPU)
    note = Path(env["ENVBUILD_CACHE_DIR"]) / "built" / plan_key(locked)
    note.parent.mkdir(parents=True)
    note.write_text(image.manifest)
    done = run("provenance", site.tag, "--output", str(tmp_path / "p.json"), env=env)
    assert done.code == 0, done.err
    statement = json.loads((tmp_path / "p.json").read_bytes())
    assert statement["subject"][0]["digest"]["sha256"] == image.manifest.removeprefix("sha256:")
    assert statement["predicate"]["runDetails"]["builder"]["id"] == site.key.public.builder
    assert len(statement["predicate"]["runDetails"]["byproducts"]) == 1
    note.write_text(f"steps from registry.example.org/steps\n{image.manifest}")
    assert run("provenance", site.tag, env=env).code == 4


def test_the_sbom_of_an_image_lists_what_belongs_to_no_input(engine, site, tmp_path):
    """These images hold a file of no input."""
    publish(site)
    assert site.pull(CPU).code == 0
    done = run("sbom", site.tag, "--json", "--output", str(tmp_path / "s.json"), env=site.client)
    assert done.code == 0, done.err
    assert done.answer["unowned"] == ["/mark"]
    assert "1 file belongs to no locked input: /mark" in done.err
    first = (tmp_path / "s.json").read_bytes()
    assert run("sbom", site.tag, "--output", str(tmp_path / "s.json"), env=site.client).code == 0
    assert (tmp_path / "s.json").read_bytes() == first


def plan_key(locked) -> str:
    from envbuild.plan.plan import plan_of

    return plan_of(load_matrix(), locked, None).key
