"""One cell with one compiled wheel, built here, and by a builder elsewhere that shares only the registry."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from command import Done, run
from h2c_bridge import serve
from kill_runs import STACK, TREE

from envbuild.net.registry import find_digest
from envbuild.registry.keys import make_key_pair, read_private_key
from envbuild.registry.manifests import artifact_of
from envbuild.registry.repository import Repository
from envbuild.registry.signatures import CONFIG_TYPE, sign, signature_tag

BUILDER = f"envbuild-t-{os.getpid()}"
TAG = f"envbuild-shared-{os.getpid()}:image"


@dataclass(frozen=True)
class Site:
    """A machine: its cache and settings, and the stack that all of them build."""

    folder: Path
    registry: str

    def env(self, cache: str, **settings: object) -> dict[str, str]:
        values = {"cache_dir": self.folder / cache, "sources": self.folder / "sources", "registry": ""} | settings
        return {f"ENVBUILD_{name.upper()}": str(value) for name, value in values.items()}

    def image(self, *words: str, cache: str, **settings: object) -> Done:
        start = ("image", "--stack", str(self.folder / "shared.toml"), "--no-smoke", "--json", "--tag", TAG)
        return run(*start, *words, env=self.env(cache, **settings))

    def machine(self, name: str) -> str:
        """Make a cache with nothing but the lock that the first machine made."""
        shutil.copytree(self.folder / "first" / "locks", self.folder / name / "locks")
        return name

    @property
    def ours(self) -> dict[str, object]:
        return {"registry": f"{self.registry}/site", "trusted_keys": self.folder / "ours.pub"}


@pytest.fixture(scope="module")
def site(registry, engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    tree = folder / "sources" / "tree"
    tree.mkdir(parents=True)
    (tree / "train.py").write_text(TREE)
    git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    date = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True, env=os.environ | date)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "shared.toml").write_text(STACK.format(name="shared", commit=commit))
    for name in ("ours", "theirs"):
        make_key_pair(folder, name, None)
    yield Site(folder=folder, registry=registry)
    engine.image.remove([tag for tag in (TAG,) if engine.image.exists(tag)], force=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def first(site):
    """Return the first machine's answer: it compiles the wheel, leaves its steps in the registry, and pushes the wheel."""
    done = site.image(cache="first", cache_to=f"{site.registry}/cache")
    assert done.code == 0, done.err
    assert "the build cache is not" not in done.err
    env = site.env("first", registry=f"{site.registry}/site", signing_keys=site.folder / "ours.key")
    pushed = run("wheels", "push", "--json", env=env)
    assert pushed.code == 0, pushed.err
    (wheel,) = pushed.answer["pushed"]
    return done.answer | {"wheel": wheel}


@pytest.fixture(scope="module")
def remote(second_engine):
    """The name of a buildx builder with the driver `remote`, which shares nothing with the first engine."""
    listening, address = serve(second_engine.client_config.host.removeprefix("unix://"))
    subprocess.run(
        ["docker", "buildx", "create", "--name", BUILDER, "--driver", "remote", address],
        check=True,
        capture_output=True,
    )
    yield BUILDER
    subprocess.run(["docker", "buildx", "rm", BUILDER], check=True, capture_output=True)
    listening.close()


def stages(answer):
    return {stage["name"]: stage for stage in answer["stages"]}


def test_the_wheel_is_compiled_once(site, first):
    assert "build-regex" in stages(first)
    assert first["wheels_taken"] == []
    done = site.image("--locked", cache=site.machine("second"), **site.ours)
    assert done.code == 0, done.err
    answer = done.answer
    assert [(each["reference"], each["signers"]) for each in answer["wheels_taken"]] == [
        (first["wheel"]["reference"], ["ours"])
    ]
    assert "build-regex" not in stages(answer)  # BuildKit does not even look at it
    assert stages(answer)["wheel-regex"]["executed"] == 0
    assert (answer["origin"], answer["digest"]) == ("built", first["digest"])


def manifest_of(reference: str) -> tuple[str, str, str]:
    """Return repository, tag and digest of `repository:tag@digest`."""
    name, _, digest = reference.partition("@")
    repository, _, tag = name.rpartition(":")
    return repository, tag, digest


def another_wheel(bodies):
    bodies[0] = bodies[0][:-1] + bytes([bodies[0][-1] ^ 1])
    record = json.loads(bodies[1]) | {"sha256": hashlib.sha256(bodies[0]).hexdigest()}
    bodies[1] = json.dumps(record).encode()


def another_record(bodies):
    bodies[1] = json.dumps(json.loads(bodies[1]) | {"gcc": "99"}).encode()


def another_key(bodies):
    text = json.loads(bodies[2])
    text["inputs"]["python"] = "3.12"
    bodies[2] = json.dumps(text, sort_keys=True, separators=(",", ":")).encode()


def nothing(bodies):
    del bodies


TAMPERED = {
    "not signed": (nothing, None, "is not signed"),
    "signed by somebody else": (nothing, "theirs", "is signed by none of the trusted keys"),
    "another wheel under the signature of the first": (another_wheel, "moved", "is signed by none of the trusted keys"),
    "another record under the signature of the first": (
        another_record,
        "moved",
        "is signed by none of the trusted keys",
    ),
    "a signed wheel of another key": (another_key, "ours", "was compiled from something else than its tag says"),
    "other bytes in the registry's storage": (nothing, "ours", "serves is another one"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_what_was_tampered_with_ends_the_build(site, first, start_registry, kind, tmp_path_factory):
    """Each in a separate registry, which holds the same wheel otherwise."""
    change, by, says = TAMPERED[kind]
    base = tmp_path_factory.getbasetemp()
    before = set(base.glob("registry*"))
    host = start_registry()
    (folder,) = set(base.glob("registry*")) - before
    repository, tag, digest = manifest_of(first["wheel"]["reference"])
    with Repository(repository) as source, Repository(f"{host}/site/wheels") as target:
        artifact = source.manifest(digest).artifact()
        bodies = [source.read_blob(blob, limit=1 << 26) for blob in artifact.blobs]
        change(bodies)
        pairs = zip(bodies, artifact.blobs, strict=True)
        blobs = [target.push_blob(body, blob.mediaType, annotations=blob.annotations) for body, blob in pairs]
        put = target.push_artifact(artifact_of(artifact.artifact_type, blobs), tag=tag)
        assert (put.digest == digest) is (change is nothing)
        if by == "moved":
            _, signatures = source.artifact(signature_tag(digest), CONFIG_TYPE)
            for blob in (signatures.config, *signatures.blobs):
                target.push_blob(source.read_blob(blob, limit=1 << 20), blob.mediaType)
            target.push_artifact(signatures, tag=signature_tag(put.digest))
        elif by is not None:
            sign(target, put.digest, read_private_key(site.folder / f"{by}.key", lambda: None))
    if kind.startswith("other bytes"):
        sha256 = blobs[0].digest.removeprefix("sha256:")
        (stored,) = folder.glob(f"data/docker/registry/v2/blobs/sha256/*/{sha256}/data")
        stored.write_bytes(bodies[0][:-1] + bytes([bodies[0][-1] ^ 1]))
    cache = site.machine(f"refused-{list(TAMPERED).index(kind)}")
    done = site.image("--locked", cache=cache, **site.ours | {"registry": f"{host}/site"})
    assert done.code == 4, done.err
    assert says in done.err
    assert "--no-pull" in done.err
    assert not list((site.folder / cache).glob("wheels/*"))


def test_a_builder_elsewhere_pushes_the_image_itself(site, first, remote, engine):
    """It takes the first one's steps from the registry, and nothing of the image is pushed by the engine here."""
    repository = f"{site.registry}/elsewhere"
    done = site.image(
        *("--locked", "--push", "--builder", remote),
        cache=site.machine("third"),
        registry=repository,
        trusted_keys=site.folder / "ours.pub",
        signing_keys=site.folder / "theirs.key",
        cache_from=f"{site.registry}/cache",
    )
    assert done.code == 0, done.err
    answer = done.answer
    assert "asking the builder for its cores and memory" in done.err
    assert "the build cache is not" not in done.err
    assert answer["digest"] == first["digest"]
    ran = {name for name, stage in stages(answer).items() if stage["executed"]}
    assert not {"build-regex", "env", "stack"} & ran, ran  # the first engine's steps
    assert f"may come from {site.registry}/cache" in " ".join(answer["not_proven"])
    reference, _, digest = answer["pushed"].partition("@")
    assert find_digest(reference) == digest == first["digest"]
    assert reference not in engine.image.inspect(TAG).repo_tags  # what the engine pushes has this name there
    assert answer["wheels_pushed"] == []  # its steps are not known to be this builder's
    assert f"came from {site.registry}/cache" in done.err


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_the_wheel_is_installed_without_a_container(site, first, tool, tmp_path):
    exported = run("wheels", "export", str(tmp_path / "out"), "--json", env=site.env("first"))
    assert exported.code == 0, exported.err
    (index,) = [path for path in (tmp_path / "out").iterdir() if (path / "regex").is_dir()]
    words = {
        "pip": [sys.executable, "-m", "pip", "download", "--no-cache-dir", "--dest"],
        "uv": [str(Path(sys.executable).with_name("uv")), "pip", "install", "--no-cache", "--no-config", "--target"],
    }[tool]
    python = first["cell"]["python"]
    chosen = ["--python-version", python, "--only-binary", ":all:", "--no-deps", "--index-url", index.as_uri()]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment["PIP_CONFIG_FILE"] = os.devnull  # this machine's own index
    done = subprocess.run(
        [*words, str(tmp_path / "site"), *chosen, "regex"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    got = tmp_path / "site"
    if tool == "pip":
        (file,) = got.iterdir()
        assert hashlib.sha256(file.read_bytes()).hexdigest() == first["wheel"]["sha256"]
    else:
        assert list((got / "regex").glob("_regex.*.so"))
