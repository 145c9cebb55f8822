"""A pull from a registry on loopback, with an engine that is a script: records by other recipes, and other compressions."""

import hashlib
import io
import json
import tarfile
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cell_inputs import complete, inputs_for

from envbuild.cli import main
from envbuild.engine.built import OwnBuild, find_built, recipe_of_image, remember_built
from envbuild.engine.client import EngineClient
from envbuild.engine.image import stated_content
from envbuild.engine.trust import UnknownImageError, expected_digests, pulled_for
from envbuild.errors import LockError
from envbuild.evidence.content import ImageContent
from envbuild.evidence.records import as_json, content_id, load_evidence
from envbuild.evidence.refs import committed_evidence
from envbuild.lock.files import write_lock
from envbuild.matrix.load import load_matrix
from envbuild.pipeline import image as pipeline
from envbuild.pipeline import prebuilt
from envbuild.pipeline.image import ImageRequest, find_present
from envbuild.pipeline.prebuilt import pull_prebuilt, registry_reference
from envbuild.plan.dockerfile import recipe_digest
from envbuild.plan.plan import plan_of
from envbuild.settings import Settings

OLD_RECIPE = f"sha256:{'a' * 64}"
FIRST, SECOND = (f"sha256:{digit * 64}" for digit in "12")
TYPES = {
    "manifest": "application/vnd.oci.image.manifest.v1+json",
    "config": "application/vnd.oci.image.config.v1+json",
    "layer": "application/vnd.oci.image.layer.v1.tar+",
}
INFO = {"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]], "Architecture": "x86_64", "NCPU": 2}


def described(body: bytes, kind: str) -> dict:
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(body).hexdigest()}", "size": len(body)}


@dataclass
class Image:
    """An image as a registry holds it, and what the engine finds it to be."""

    config: object
    packed: str = "zstd"
    """By what its layers are compressed: the manifest names other blobs, and the content is the same."""
    found: tuple[str, ...] | None = None
    """The layers that the engine computes; those that the configuration states by default."""

    def __post_init__(self) -> None:
        self.blob = json.dumps(self.config).encode()
        layer = described(self.packed.encode(), TYPES["layer"] + self.packed)
        body = {"schemaVersion": 2, "config": described(self.blob, TYPES["config"]), "layers": [layer]}
        self.manifest = json.dumps(body).encode()
        self.digest = described(self.manifest, "")["digest"]

    def inspected(self, repository: str) -> dict:
        layers = self.found or self.config["rootfs"]["diff_ids"]
        return {
            "Id": self.digest, "Os": "linux", "Architecture": "amd64", "Config": self.config["config"], "Size": 7,
            "RootFS": {"Layers": list(layers)}, "RepoDigests": [f"{repository}@{self.digest}"],
        }  # fmt: skip


@pytest.fixture(scope="module")
def locked():
    return complete(inputs_for(cuda="cpu"))


@pytest.fixture(scope="module")
def plan(locked):
    return plan_of(load_matrix(), locked)


def image(plan, *layers: str, packed: str = "zstd", found=None, **config) -> Image:
    stated = {"Labels": dict(plan.labels), "Env": ["A=1"]} | config
    rootfs = {"type": "layers", "diff_ids": list(layers or (FIRST, SECOND))}
    return Image({"os": "linux", "architecture": "amd64", "config": stated, "rootfs": rootfs}, packed, found)


@dataclass
class Site:
    """A registry that holds one image under every tag, an engine that writes down what it is asked, and records."""

    folder: object
    plan: object
    host: str = ""
    held: Image | None = None
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = Settings(cache_dir=self.folder / "cache", registry=f"{self.host}/team")
        self.records = self.folder / "records"
        self.records.mkdir()
        self.reference = registry_reference(self.settings, self.plan.lock)
        (self.folder / "lock.tar").write_bytes(self._lock())

    def _lock(self) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for name, text in self.plan.lists.items():
                if name.startswith("lock/"):
                    member = tarfile.TarInfo(f"envbuild/{name.removeprefix('lock/')}")
                    member.size = len(text.encode())
                    tar.addfile(member, io.BytesIO(text.encode()))
        return out.getvalue()

    def serve(self, held: Image) -> Image:
        """Let the registry hold an image, which the engine does not have yet."""
        self.held = held
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "asked").write_text("")
        if isinstance(held.config, dict) and {"config", "rootfs"} <= held.config.keys():
            (self.folder / "facts").write_text(json.dumps([held.inspected(self.settings.registry)]))
        return held

    def record(self, ran: Image, *, content: bool = True, recipe: str | None = None) -> str:
        """Add a record of a run that passed in an image; return its id."""
        passed = next(each for each in committed_evidence() if each.passed and each.device == "cpu")
        raw = as_json(passed) | {"lock_digest": self.plan.lock.digest}
        raw["target"] = {"kind": "image", "digest": ran.digest, "digest_from": "engine", "runtime": "docker 29"}
        known = stated_content(ran.config).model_dump(mode="json") | {"recipe": recipe, "release": "0.1.0"}
        raw["content"] = known if content else None
        raw["id"] = content_id(raw)
        (self.records / f"20261123T120000Z-{raw['id'].removeprefix('sha256:')[:16]}.json").write_text(json.dumps(raw))
        return raw["id"]

    def expected(self):
        return expected_digests(self.settings, self.plan, load_evidence(self.records))

    def pull(self):
        built, pulled = pull_prebuilt(EngineClient(self.settings), self.plan, "mine:1", expected=self.expected())
        assert built.digest == self.held.digest
        assert f"{self.held.digest} mine:1" in self.words()
        return pulled.verified

    def words(self) -> str:
        return (self.folder / "asked").read_text()

    def refused(self, *words: str, kind: type[LockError] = LockError, came: bool = False) -> LockError:
        """A refusal: exit 4, nothing is tagged or kept, and the image is not even fetched where that can be known before."""
        with pytest.raises(LockError) as caught:
            self.pull()
        error = caught.value
        assert type(error) is kind, error
        assert error.exit_code == 4
        text = f"{error.what}; {error.hint}"
        for word in words:
            assert word in text, text
        assert "mine:1" not in self.words()
        assert (f"pull --quiet {self.settings.registry}@" in self.words()) is came
        if came:
            assert "image rm" in self.words()
        assert pulled_for(self.settings, self.plan) is None
        return error


@pytest.fixture
def site(tmp_path, monkeypatch, plan):
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            held = made.held
            kind, _, name = self.path.rpartition("/")
            found = held.manifest if kind.endswith("manifests") else held.blob
            if name.startswith("sha256:") and name != described(found, "")["digest"]:
                found = None
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", TYPES["manifest" if kind.endswith("manifests") else "config"])
            if found is not None:
                self.send_header("Docker-Content-Digest", described(found, "")["digest"])
            self.send_header("Content-Length", str(len(found or b"")))
            self.end_headers()
            if body and found:
                self.wfile.write(found)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        made = Site(tmp_path, plan, f"127.0.0.1:{server.server_port}")
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir()
        program.write_text(
            f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n'
            f'case "$*" in\n*"image inspect"*) [ -e {tmp_path}/held ] || {{ echo "No such image" >&2; exit 1; }}\n'
            f"  cat {tmp_path}/facts;;\n*info*) cat {tmp_path}/info;;\n*buildx*) echo buildx is here;;\n"
            f"*pull*@*) touch {tmp_path}/held;;\ncp\\ *) cat {tmp_path}/lock.tar;;\nesac\n"
        )
        program.chmod(0o755)
        (tmp_path / "info").write_text(json.dumps(INFO))
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        yield made
        server.shutdown()


# ---- another compression


def test_another_compression_of_a_recorded_image_is_that_image(site, plan):
    ran = image(plan)
    record = site.record(ran, recipe=recipe_digest(plan))
    held = site.serve(image(plan, packed="gzip"))
    assert held.digest != ran.digest
    verified = site.pull()
    assert (verified.by, verified.digest, verified.record) == ("evidence", held.digest, record)
    assert (verified.same_as, verified.other_recipe) == (ran.digest, False)
    assert verified.text.startswith(
        "verified: only the compression differs; it has the layers and the configuration of"
    )
    assert pulled_for(site.settings, plan).verified == verified
    # and it is taken from the engine the next time, for the same reason
    again = find_present(EngineClient(site.settings), plan, "mine:1", pull=True, expected=site.expected())
    assert again is not None
    assert again[1] == verified
    # but not once its name is another image's
    site.serve(image(plan, FIRST))
    (site.folder / "held").touch()
    assert find_present(EngineClient(site.settings), plan, "mine:1", pull=True, expected=None) is None


def test_another_compression_of_what_this_machine_built_is_that_image(site, plan):
    own = image(plan)
    content = stated_content(own.config)
    remember_built(site.settings, plan, OwnBuild(digest=own.digest, layers=content.layers, config=content.config))
    site.serve(image(plan, packed="gzip"))
    verified = site.pull()
    assert (verified.by, verified.same_as) == ("build", own.digest)
    assert "this machine built its layers and its configuration" in verified.text
    site.serve(image(plan, FIRST, packed="gzip"))
    (site.settings.cache_dir / "pulled" / plan.key).unlink()
    site.refused("this machine built from the same lock")


@pytest.mark.parametrize(
    ("layers", "config"),
    [
        ((SECOND, FIRST), {}),
        ((FIRST,), {}),
        ((FIRST, SECOND, FIRST), {}),
        ((), {"Env": ["A=1", "LD_PRELOAD=/x.so"]}),
        ((), {"Entrypoint": ["/bin/sh", "-c", "steal"]}),
        ((), {"User": "0"}),
    ],
)
def test_other_layers_or_another_start_are_refused_before_they_are_fetched(site, plan, layers, config):
    site.record(image(plan), recipe=recipe_digest(plan))
    site.serve(image(plan, *layers, packed="gzip", **config))
    site.refused("is not the one that was expected", "the evidence records of this lock name")


def test_a_registry_that_states_the_recorded_layers_of_other_ones_is_found_out(site, plan):
    """What it states lets the image come; what the engine computes of it decides."""
    site.record(image(plan), recipe=recipe_digest(plan))
    site.serve(image(plan, packed="gzip", found=(FIRST, FIRST)))
    site.refused("is not the one that was expected", came=True)


@pytest.mark.parametrize("known", [{"layers": (FIRST, SECOND)}, {"config": FIRST}, {}])
def test_a_record_that_does_not_know_all_of_an_image_makes_no_other_one_equal(site, plan, known, monkeypatch):
    ran = image(plan)
    site.record(ran, recipe=recipe_digest(plan))
    (record,) = load_evidence(site.records)
    half = record.model_copy(update={"content": ImageContent(recipe=recipe_digest(plan), **known)})
    monkeypatch.setattr(site, "expected", lambda: expected_digests(site.settings, plan, [half]))
    site.serve(image(plan, packed="gzip"))
    site.refused("is not the one that was expected")


@pytest.mark.parametrize(
    "config",
    [
        None,
        [],
        {"rootfs": {"diff_ids": "x"}},
        {"rootfs": {"diff_ids": [7]}},
        {"rootfs": {"diff_ids": [FIRST] * 257}},
        {"config": {"Labels": 7}},
    ],
)
def test_a_hostile_configuration_in_the_registry_is_another_image(site, plan, config):
    site.record(image(plan), recipe=recipe_digest(plan))
    site.serve(Image(config))
    site.refused("is not the one that was expected")


# ---- another recipe


def test_a_record_by_another_recipe_names_no_digest_to_expect(site, plan):
    ran = image(plan, FIRST)
    record = site.record(ran, recipe=OLD_RECIPE)
    held = site.serve(image(plan))
    error = site.refused(
        "nobody confirms the registry's image", held.digest, record, "of an image that another recipe made", ran.digest,
        "envbuild image --lock", "catalogue", "--digest", kind=UnknownImageError,
    )  # fmt: skip
    assert "was expected" not in error.what
    # the image that ran is still one of the lock, and the answer says by which recipe
    site.serve(ran)
    verified = site.pull()
    assert (verified.by, verified.record, verified.other_recipe) == ("evidence", record, True)
    assert verified.text.endswith("by another recipe than this release's")
    # in another compression, too
    (site.settings.cache_dir / "pulled" / plan.key).unlink()
    site.serve(image(plan, FIRST, packed="gzip"))
    verified = site.pull()
    assert (verified.same_as, verified.other_recipe) == (ran.digest, True)


@pytest.mark.parametrize("older", ["other recipe", "no recipe"])
def test_a_record_by_this_recipe_wins(site, plan, older):
    old, new = image(plan, FIRST), image(plan)
    site.record(old, content=older == "other recipe", recipe=OLD_RECIPE)
    record = site.record(new, recipe=recipe_digest(plan))
    assert set(site.expected().records) == {new.digest}
    site.serve(old)
    site.refused("is not the one that was expected", new.digest)
    site.serve(new)
    verified = site.pull()
    assert (verified.record, verified.other_recipe, verified.same_as) == (record, False, None)


def test_a_record_without_a_recipe_keeps_its_meaning_and_a_refusal_states_what_it_does_not_know(site, plan):
    ran = image(plan, FIRST)
    record = site.record(ran, content=False)
    site.serve(ran)
    verified = site.pull()
    assert (verified.by, verified.record, verified.other_recipe) == ("evidence", record, False)
    (site.settings.cache_dir / "pulled" / plan.key).unlink()
    site.serve(image(plan))
    site.refused("is not the one that was expected", ran.digest, "do not state which recipe", kind=UnknownImageError)


def test_a_build_of_this_machine_by_another_recipe_is_no_digest_to_expect(site, plan):
    own = image(plan, FIRST)
    remember_built(site.settings, plan, OwnBuild(digest=own.digest, layers=(FIRST,), config=SECOND))
    assert recipe_of_image(site.settings, own.digest).recipe == recipe_digest(plan)
    assert site.expected().by == "build"
    note = site.settings.cache_dir / "made-by" / own.digest.removeprefix("sha256:")
    whole = note.read_text()
    for half in range(len(whole)):
        note.write_text(whole[:half])
        assert recipe_of_image(site.settings, own.digest) == ImageContent(), half
    note.write_text(whole.replace(recipe_digest(plan), OLD_RECIPE))
    site.serve(image(plan))
    site.refused(
        "what this machine built from the lock is of an image that another recipe made", kind=UnknownImageError
    )
    # a catalogue names another one with other layers: no contradiction
    signed = {site.held.digest: "release"}
    expected = expected_digests(site.settings, plan, (), catalog=signed, layers=(FIRST, SECOND))
    assert (expected.by, dict(expected.records)) == ("catalog", signed)
    _, pulled = pull_prebuilt(EngineClient(site.settings), plan, "mine:1", expected=expected)
    assert pulled.verified.by == "catalog"
    # what it built is still its own
    (site.settings.cache_dir / "pulled" / plan.key).unlink()
    site.serve(own)
    verified = site.pull()
    assert (verified.by, verified.other_recipe) == ("build", True)


def test_an_image_that_this_machine_built_by_another_recipe_is_built_again(site, plan):
    own = image(plan)
    content = stated_content(own.config)
    remember_built(site.settings, plan, OwnBuild(digest=own.digest, layers=content.layers, config=content.config))
    site.serve(own)
    site.pull()
    client = EngineClient(site.settings)
    found = find_built(client, plan, "mine:1")
    assert found is not None
    assert found.digest == own.digest
    note = site.settings.cache_dir / "made-by" / own.digest.removeprefix("sha256:")
    note.write_text(note.read_text().replace(recipe_digest(plan), OLD_RECIPE))
    assert find_built(client, plan, "mine:1") is None


def test_image_builds_what_nobody_confirms(site, plan):
    site.record(image(plan, FIRST), recipe=OLD_RECIPE)
    site.serve(image(plan))
    notes: list[str] = []
    request = ImageRequest(matrix=None, inputs=None, tag="mine:1")
    client = EngineClient(site.settings)
    records = load_evidence(site.records)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prebuilt, "committed_evidence", lambda: records)
        assert pipeline._ready_made(request, client, plan, (None, None), notes.append) is None
        (text,) = notes
        assert "nobody confirms the registry's image" in text
        assert "the image is built here" in text
        assert "mine:1" not in site.words().replace("inspect -- mine:1", "")
        # where a record by this recipe names another digest, something is wrong, and no build hides it
        site.record(image(plan, SECOND), recipe=recipe_digest(plan))
        records = load_evidence(site.records)
        with pytest.raises(LockError, match="is not the one that was expected"):
            pipeline._ready_made(request, client, plan, (None, None), notes.append)


def test_the_command_says_why_and_exits_with_4(site, plan, locked, tmp_path, monkeypatch, capsys):
    """The whole of `envbuild pull`, over a lock in a folder and records in files."""
    ran = image(plan, FIRST)
    record = site.record(ran, recipe=OLD_RECIPE)
    write_lock(locked, tmp_path / "lock")
    monkeypatch.setattr(prebuilt, "committed_evidence", lambda: load_evidence(site.records))
    monkeypatch.setenv("ENVBUILD_REGISTRY", site.settings.registry)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(site.settings.cache_dir))
    words = ["pull", "--lock", str(tmp_path / "lock"), "--tag", "mine:1"]

    def run(*flags: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*words, *flags])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    site.serve(image(plan))
    code, _, err = run()
    assert code == 4, err
    assert f"the evidence record {record} is of an image that another recipe made" in " ".join(err.split())
    site.serve(ran)
    code, out, _ = run("--json")
    assert code == 0
    verified = json.loads(out)["verified"]
    assert (verified["by"], verified["record"], verified["other_recipe"]) == ("evidence", record, True)
    site.serve(image(plan, FIRST, packed="gzip"))
    code, out, _ = run()
    assert code == 0
    assert "only the compression differs" in out
