"""The recipe of an image goes with its archive to another machine, and the image's digest and blobs stay as they are."""

import json
import tarfile

import pytest
from saved_images import GZIP, PLAIN, Image, layer

from envbuild.engine.archive import Archive, ImageError
from envbuild.engine.stated_recipe import RECIPE, RELEASE, write_recipe
from envbuild.engine.unpacked import look_up
from envbuild.evidence.content import ImageContent
from envbuild.evidence.recording import from_report
from envbuild.evidence.report import SmokeReport
from envbuild.settings import Settings
from envbuild.verify.target import _content

ONE = f"sha256:{'1' * 64}"
BY = ImageContent(recipe=ONE, release="0.1.0")


def image(**config) -> Image:
    return Image((PLAIN, layer(("a", b"x" * 700))), config={"config": config, "rootfs": {"diff_ids": [ONE]}})


def bodies(path) -> dict[str, bytes]:
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_an_archive_states_the_recipe_and_is_the_same_image(tmp_path):
    archive = image().write(tmp_path)
    before, digest = bodies(archive), Archive(archive).image().digest
    assert Archive(archive).image().made_by == ImageContent()
    for by in (BY, BY, ImageContent(recipe=f"sha256:{'2' * 64}", release="0.2.0")):  # once more, and another one
        assert write_recipe(archive, by)
        held = Archive(archive).image()
        assert (held.digest, held.made_by) == (digest, by)
        after = bodies(archive)
        assert after.keys() == before.keys()
        assert {name for name in before if before[name] != after[name]} == {"index.json"}


def test_a_run_elsewhere_records_the_recipe(tmp_path):
    archive = image(User="7").write(tmp_path)
    write_recipe(archive, BY)
    digest = Archive(archive).image().digest
    settings = Settings(cache_dir=tmp_path / "cache")
    (tmp_path / "cache" / "sandboxes" / digest.removeprefix("sha256:")).mkdir(parents=True)  # unpacked earlier
    found = look_up(settings, str(archive))
    assert (found.recipe, found.release, found.layers) == (ONE, "0.1.0", (ONE,))
    stated = {"kind": "image", "reference": "x", "digest": digest, "digest_from": "blobs", "runtime": "apptainer 1.4.5"}
    report = SmokeReport(
        target=stated | _content(found, settings), cell_id="c", cell={}, lock_digest=None, level="step", device="cpu",
        nproc=1, verdict="passed", reason="", suite=ONE, seed=1, machine={}, launchers=(), tests=(), seconds=1.0, log="",
    )  # fmt: skip
    content = from_report(report).content
    assert content == ImageContent(layers=(ONE,), config=found.config, recipe=ONE, release="0.1.0")


def test_an_archive_of_another_order_and_an_unknown_recipe_change_nothing(tmp_path):
    first = tmp_path / "first.tar"
    made = image()
    files = {"index.json": json.dumps(made.index).encode()}
    files |= {f"blobs/sha256/{digest}": body for digest, body in made.blobs.items()}
    first.write_bytes(layer(*files.items()))
    further = tmp_path / "further.tar"
    further.write_bytes(layer(*reversed(files.items()), ("more.txt", b"x")))
    known = image().write(tmp_path)
    for path, by in ((first, BY), (further, BY), (known, ImageContent())):
        before = path.read_bytes()
        assert not write_recipe(path, by)
        assert path.read_bytes() == before


@pytest.mark.parametrize("index", [b"[]", b"{", b'{"manifests": 7}', b'{"manifests": [7]}'])
def test_a_list_of_another_shape_stays(tmp_path, index):
    made = image()
    made.index = index
    archive = made.write(tmp_path)
    before = archive.read_bytes()
    assert not write_recipe(archive, BY)
    assert archive.read_bytes() == before


@pytest.mark.parametrize(
    "stated",
    [{RECIPE: 7}, {RECIPE: "x"}, {RECIPE: [ONE]}, {RECIPE: f"{ONE}\n"}, {RELEASE: "a b"}, {RELEASE: {"a": 1}}],
)
def test_a_hostile_statement_is_refused(tmp_path, stated):
    made = Image((GZIP, b""))
    made.index["manifests"][0]["annotations"] = stated
    with pytest.raises(ImageError, match="states a recipe or a release that is none"):
        Archive(made.write(tmp_path)).image()


@pytest.mark.parametrize("others", [None, {}, {"org.opencontainers.image.ref.name": "x"}, {"a": 7}])
def test_what_others_state_is_passed_over_and_kept(tmp_path, others):
    made = image()
    made.index["manifests"][0]["annotations"] = others
    archive = made.write(tmp_path)
    assert Archive(archive).image().made_by == ImageContent()
    assert write_recipe(archive, BY)
    kept = json.loads(bodies(archive)["index.json"])["manifests"][0]["annotations"]
    assert (others or {}).items() <= kept.items()
    assert Archive(archive).image().made_by == BY
