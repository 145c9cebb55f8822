"""An image comes into the engine with one digest, through the engine's store and through an archive."""

import io
import json
import subprocess
from random import Random
from types import SimpleNamespace

import pytest

from envbuild.engine import exports as exports_module
from envbuild.engine.build import Builder
from envbuild.engine.own_tags import EXPORTED
from envbuild.engine.progress import Watch

REPOSITORY = "envbuild-test-export"
LAYER_BYTES = 3_000_000
DOCKERFILE = """\
FROM scratch AS large
COPY large /large
FROM large AS image
COPY small /small
CMD ["/small"]
"""


class Exports:
    """A build of two layers on the real engine, and the archives that it loads."""

    def __init__(self, client, folder, monkeypatch):
        self.client, self.folder, self.loaded = client, folder, []
        (folder / "Dockerfile").write_text(DOCKERFILE)
        (folder / "large").write_bytes(Random(1).randbytes(LAYER_BYTES))
        target = {
            "context": ".",
            "dockerfile": "Dockerfile",
            "args": {"SOURCE_DATE_EPOCH": "1700000000"},
            "target": "image",
            "attest": ["type=provenance,disabled=true"],
        }
        monkeypatch.setattr(exports_module, "bake", lambda _: json.dumps({"target": {"image": target}}))
        monkeypatch.setattr(Builder, "_keep_times", lambda *_: None)  # the plan has no parts
        load = client.load
        monkeypatch.setattr(
            client, "load", lambda archive: self.loaded.append(archive.stat().st_size) or load(archive), raising=False
        )

    def builder(self, small: str) -> Builder:
        (self.folder / "small").write_text(small)
        plan = SimpleNamespace(platform=None, tag="envbuild-test-export:plan", dated=False)
        made = Builder(client=self.client, plan=plan, on_change=lambda *_: None, note=lambda _: None)
        made.folder = made._private = self.folder
        self.log = io.StringIO()
        made._watch = Watch(log=self.log)
        return made

    def files(self, image: str) -> str:
        """The names of an image's files, as the engine has them unpacked."""
        name = "envbuild-test-export-files"
        made = self.client.create(name, image, ("/none",), ())
        assert made.code == 0, made.err
        try:
            tar = subprocess.run(["docker", "export", name], check=True, capture_output=True).stdout
        finally:
            self.client.remove(name)
        return subprocess.run(["tar", "-t"], input=tar, check=True, capture_output=True).stdout.decode()


@pytest.fixture
def exports(client, engine, tmp_path, monkeypatch):
    yield Exports(client, tmp_path, monkeypatch)
    for tag in client.tags(REPOSITORY):
        client.untag(tag)


def test_the_store_and_an_archive_give_one_digest(exports):
    stored = exports.builder("one")._into_store(f"{REPOSITORY}:stored")
    assert stored is not None
    archived = exports.builder("one")._through_archive(f"{REPOSITORY}:archived")
    assert stored.digest == archived.digest == exports.client.image(stored.tag).digest
    assert {"large", "small"} <= set(exports.files(stored.tag).split())
    listing, archive = exports.loaded
    assert listing < 20_000  # no layer is copied
    assert archive > LAYER_BYTES
    assert exports.client.tags(EXPORTED) == []
    assert "ERROR" not in exports.log.getvalue()


def test_a_rebuild_unpacks_only_the_layer_that_changed(exports):
    """The engine keeps layers by their content: equal ones are one."""
    layers = []
    for small in ("one", "two"):
        made = exports.builder(small)._into_store(f"{REPOSITORY}:{small}")
        inspected = subprocess.run(["docker", "image", "inspect", made.tag], check=True, capture_output=True).stdout
        layers.append(json.loads(inspected)[0]["RootFS"]["Layers"])
    assert layers[0][0] == layers[1][0]
    assert layers[0][1] != layers[1][1]
    assert all(size < 20_000 for size in exports.loaded)


def test_a_tag_that_had_another_image_moves(exports):
    tag = f"{REPOSITORY}:moved"
    first = exports.builder("one")._into_store(tag)
    second = exports.builder("two")._into_store(tag)
    assert first.digest != second.digest
    assert exports.client.image(tag).digest == second.digest


def test_a_builder_that_has_no_such_store_goes_through_an_archive(exports, monkeypatch):
    """As where an engine refuses before it has named the image."""
    builder = exports.builder("one")
    monkeypatch.setattr(exports.client, "find_image", lambda _: None, raising=False)
    made = builder._make_image(f"{REPOSITORY}:archive")
    assert exports.client.image(made.tag).digest == made.digest
    assert exports.loaded[0] > LAYER_BYTES
