"""A CI job publishes with its identity and no key, and those who pull trust that identity alone."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from sigstore_instance import CI, GITHUB, IDENTITY, Instance
from test_pull_by_flags import CPU, Site

from envbuild.catalog.store import claims_of, read_catalog
from envbuild.pipeline.cataloged import publish_image
from envbuild.registry.keyless import keyless_signer
from envbuild.registry.manifests import MANIFEST, Artifact
from envbuild.registry.signatures import CONFIG_TYPE, sign, signature_tag

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = "dev.sigstore.bundle/content"


class Job:
    """A repository with an image that was proven; a job of CI that may sign for it; a client without any key."""

    def __init__(self, site: Site, instance: Instance) -> None:
        self.site, self.instance = site, instance
        self.locked, self.image = site.push(CPU)
        self.folder = site.folder
        self.client_trust, root = (instance.trust(self.folder / name) for name in ("client.json", "root.json"))
        site.client |= {
            "ENVBUILD_TRUSTED_KEYS": "",
            "ENVBUILD_TRUSTED_IDENTITIES": CI,
            "ENVBUILD_SIGSTORE_TRUST": str(root),
        }
        self.env = instance.ci | {
            "HOME": str(self.folder),
            "ENVBUILD_REGISTRY": site.registry,
            "ENVBUILD_CACHE_DIR": str(self.folder / "cache"),
            "ENVBUILD_TRUSTED_IDENTITIES": CI,
            "ENVBUILD_SIGSTORE_TRUST": str(self.client_trust),
            "ENVBUILD_SIGNING_IDENTITY": "ci",
        }

    def results(self, **changed: object) -> Path:
        """What a job that proved the cell leaves."""
        result = {"id": "cell", "ended": "passed", "image": {"digest": self.image.manifest}} | changed
        folder = self.folder / "results" / secrets.token_hex(4)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result))
        return folder.parent

    def publish(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the step of the workflow."""
        script = ROOT / "scripts" / "ci" / "publish.py"
        command = [ROOT / "scripts" / "ci" / "with-login", sys.executable, script, "--results", self.folder / "results"]
        whole = os.environ | {"PYTHONPATH": str(ROOT)} | self.env | env
        return subprocess.run(command, capture_output=True, text=True, env=whole, check=False, timeout=600)

    def catalog(self) -> str:
        """The digest of the catalogue's manifest, as the client reads it."""
        return read_catalog(self.settings()).digest

    def settings(self, **values: str):
        return self.site.settings(**{**self.site.client, "ENVBUILD_SIGNING_KEYS": "", **values})


@pytest.fixture
def instance():
    with Instance() as running:
        yield running


@pytest.fixture
def job(engine, registry, tmp_path, instance):
    site = Site(registry, tmp_path, None)
    yield Job(site, instance)
    for name in site.here():
        subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, check=False)


@pytest.fixture
def published(job, monkeypatch):
    """The image in a catalogue that the job signed."""
    with monkeypatch.context() as patch:
        for name, value in job.instance.ci.items():
            patch.setenv(name, value)
        settings = job.settings(ENVBUILD_SIGNING_IDENTITY="ci", ENVBUILD_SIGSTORE_TRUST=str(job.client_trust))
        publish_image(settings, job.locked, job.image.manifest, [keyless_signer(settings)])
    return job


def test_a_job_without_a_key_publishes_and_a_client_without_a_key_pulls(job, instance):
    job.results()
    published = job.publish()
    assert published.returncode == 0, published.stderr
    assert job.site.here() == []  # the runner has its room back
    assert instance.entries == 2  # the catalogue, and the image's SBOM
    site = job.site
    instance.server.__exit__(None, None, None)  # whoever pulls asks neither the authority nor the log
    try:
        done = site.pull(CPU, ENVBUILD_TRUSTED_DOCUMENTS="sbom")
    finally:
        instance.server.__enter__()
    assert done.code == 0, done.err
    assert (done.answer["digest"], done.answer["verified"]["by"]) == (job.image.manifest, "catalog")
    assert done.answer["verified"]["record"] == "ci"
    (entry,) = read_catalog(job.settings()).catalog.entries
    assert entry.signers == ("ci",)


def test_a_job_of_another_workflow_publishes_nothing(job, instance):
    job.results()
    instance.claims = {"workflow": "acme/envbuild/.github/workflows/verify.yml@refs/heads/topic"}
    done = job.publish()
    assert (done.returncode, done.stderr.count("envbuild: error:")) == (2, 1)
    assert "this job is https://github.com/acme/envbuild/.github/workflows/verify.yml@refs/heads/topic" in done.stderr
    assert read_catalog(job.settings()) is None
    assert instance.entries == 0


def test_only_what_passed_is_published_and_a_bad_result_stops_nothing(job, instance):
    job.results(ended="failed")
    job.results(image=None)
    job.results(image={"digest": "../x"})
    done = job.publish()
    assert done.returncode == 2
    assert instance.entries == 0
    job.results()
    assert job.publish().returncode == 2  # the bad one is still there
    assert len(read_catalog(job.settings()).catalog.entries) == 1


# ---- each is exit 4, and nothing is tagged


def wrong_identity(job):
    return {"ENVBUILD_TRUSTED_IDENTITIES": f"ci,{GITHUB},{IDENTITY}-other"}


def wrong_issuer(job):
    return {"ENVBUILD_TRUSTED_IDENTITIES": f"ci,https://accounts.google.com,{IDENTITY}"}


def another_authority(job):
    with Instance() as other:
        return {"ENVBUILD_SIGSTORE_TRUST": str(other.trust(job.folder / "other.json"))}


def _resigned(job, digest: str, change) -> None:
    """Put the signatures of the catalogue there again, for `digest`, with other annotations."""
    with job.site.repository() as repo:
        _, held = repo.artifact(signature_tag(job.catalog()), CONFIG_TYPE)
        blobs = [blob.model_copy(update={"annotations": change(dict(blob.annotations))}) for blob in held.blobs]
        body = Artifact(artifact_type=CONFIG_TYPE, config=held.config, blobs=tuple(blobs)).body()
        repo.push_manifest(body, MANIFEST, tag=signature_tag(digest))


def bundle_altered(job):
    def change(annotations):
        bundle = json.loads(annotations[BUNDLE])
        (entry,) = bundle["verificationMaterial"]["tlogEntries"]
        entry["integratedTime"] = str(int(entry["integratedTime"]) + 1)
        return annotations | {BUNDLE: json.dumps(bundle)}

    _resigned(job, job.catalog(), change)
    return {}


def bundle_removed(job):
    _resigned(job, job.catalog(), lambda annotations: {k: v for k, v in annotations.items() if k != BUNDLE})
    return {}


def signature_of_another_digest(job):
    """A catalogue that somebody else pushed, with the signatures of the right one."""
    found = read_catalog(job.settings())
    changed = found.catalog.model_copy(update={"version": found.catalog.version + 1})
    job.site.put_catalog(changed, None)
    with job.site.repository() as repo:
        digest = repo.artifact("envbuild-catalog", "application/vnd.envbuild.catalog.v1")[0].digest
        _, held = repo.artifact(signature_tag(found.digest), CONFIG_TYPE)
        repo.push_manifest(held.body(), MANIFEST, tag=signature_tag(digest))
    return {}


def signed_for_another_end(job):
    """By the right job, but as a builder of something, and not as the publisher of this catalogue."""
    found = read_catalog(job.settings())
    job.site.put_catalog(found.catalog.model_copy(update={"version": found.catalog.version + 1}), None)
    with pytest.MonkeyPatch.context() as patch, job.site.repository() as repo:
        for name, value in job.instance.ci.items():
            patch.setenv(name, value)
        digest = repo.artifact("envbuild-catalog", "application/vnd.envbuild.catalog.v1")[0].digest
        signer = keyless_signer(job.settings(**{k: v for k, v in job.env.items() if k.startswith("ENVBUILD_SIG")}))
        sign(repo, digest, signer, claims={"io.envbuild.built": "x"})
        assert claims_of(repo) != {"io.envbuild.built": "x"}
    return {}


def a_key_of_that_name(job):
    found = read_catalog(job.settings())
    job.site.put_catalog(
        found.catalog.model_copy(update={"version": found.catalog.version + 1}), job.site.new_key("ci")
    )
    return {}


@pytest.mark.parametrize(
    "tamper",
    [
        wrong_identity,
        wrong_issuer,
        another_authority,
        bundle_altered,
        bundle_removed,
        signature_of_another_digest,
        signed_for_another_end,
        a_key_of_that_name,
    ],
    ids=lambda tamper: tamper.__name__,
)
def test_what_the_identity_did_not_sign_is_refused_and_nothing_is_tagged(published, tamper):
    env = tamper(published)
    published.site.refused(published.site.pull(CPU, **env), "is signed by none of the trusted keys and identities")


def test_a_key_and_an_identity_count_together(published):
    both = {
        "ENVBUILD_TRUSTED_KEYS": str(published.folder / "release.pub"),
        "ENVBUILD_TRUSTED_SIGNATURES": "2",
    }
    published.site.refused(published.site.pull(CPU, **both), "is signed by ci, and 2 signatures are needed")
    with published.site.repository() as repo:
        sign(repo, published.catalog(), published.site.key, claims=claims_of(repo))
    done = published.site.pull(CPU, **both)
    assert done.code == 0, done.err
