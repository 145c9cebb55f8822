"""What an image is, however its layers are compressed: compared, recorded, read back, and hostile ones refused."""

import json
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envbuild.engine.image import Label, image_from, image_of, stated_content
from envbuild.errors import DataError
from envbuild.evidence.content import MOST_LAYERS, ImageContent
from envbuild.evidence.kept import records_of
from envbuild.evidence.named import run_differences
from envbuild.evidence.recording import from_report
from envbuild.evidence.records import Evidence, as_json, content_id, load_evidence, read_evidence, record_evidence
from envbuild.evidence.report import SmokeReport
from envbuild.paths import data_dir

ONE, TWO, THREE = (f"sha256:{digit * 64}" for digit in "123")
KNOWN = {"layers": [ONE, TWO], "config": THREE, "recipe": ONE, "release": "0.1.0"}
NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def report(**target) -> SmokeReport:
    stated = {"kind": "image", "reference": "x:1", "digest": ONE, "digest_from": "engine", "runtime": "docker 29"}
    return SmokeReport(
        target=stated | target, cell_id="c", cell={"cuda": "13.0"}, lock_digest=TWO, level="step", device="cpu", nproc=1,
        verdict="passed", reason="", suite=THREE, seed=1, machine={}, launchers=(), tests=(), seconds=1.0, log="",
    )  # fmt: skip


def record(**target) -> Evidence:
    return from_report(report(**target), now=NOW)


# ---- compared

DIGESTS = st.sampled_from([ONE, TWO, THREE])
CONTENTS = st.builds(
    ImageContent,
    layers=st.lists(DIGESTS, max_size=3).map(tuple),
    config=st.none() | DIGESTS,
    recipe=st.none() | DIGESTS,
    release=st.none() | st.sampled_from(["0.1.0", "0.2.0"]),
)


@given(one=CONTENTS, other=CONTENTS)
def test_two_images_are_one_by_their_layers_and_their_configuration_alone(one, other):
    known = one.layers and one.config is not None
    assert one.same_image(other) is bool(known and (one.layers, one.config) == (other.layers, other.config))
    assert one.same_image(other) is other.same_image(one)
    assert not one.same_image(None)


@pytest.mark.parametrize("other", [(TWO, ONE), (ONE,), (ONE, TWO, THREE), (ONE, ONE), ()])
def test_other_layers_another_order_and_more_or_fewer_are_another_image(other):
    mine = ImageContent(layers=(ONE, TWO), config=THREE)
    assert mine.same_image(ImageContent(layers=(ONE, TWO), config=THREE, recipe=TWO))
    assert not mine.same_image(ImageContent(layers=other, config=THREE))


def test_what_is_not_known_of_both_is_not_taken_as_equal():
    for layers, config in (((), None), ((), THREE), ((ONE,), None)):
        unknown = ImageContent(layers=layers, config=config)
        assert not unknown.same_image(unknown)


STARTS = {
    "Env": ["A=1", "B=2"],
    "Entrypoint": ["/entry"],
    "Cmd": ["x"],
    "User": "1000",
    "WorkingDir": "/work",
    "Labels": {"io.envbuild.lock": TWO},
    "Volumes": {"/v": {}},
    "ExposedPorts": {"80/tcp": {}},
}


@pytest.mark.parametrize("missing", [{}, {"User": ""}, {"Cmd": None}, {"Volumes": None}])
@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_an_engine_and_a_configurations_blob_say_the_same_of_an_image(missing, arch):
    """The one is recorded where an archive is unpacked, and the other is what a pull sees."""
    config = STARTS | missing
    rootfs = {"type": "layers", "diff_ids": [ONE, TWO]}
    blob = {"architecture": arch, "os": "linux", "config": config, "rootfs": rootfs, "created": "2026", "history": [{}]}
    inspected = {"Id": ONE, "Os": "linux", "Architecture": arch, "Config": {**config, "Hostname": "", "OnBuild": None}}
    of_engine = image_from([inspected | {"RootFS": {"Type": "layers", "Layers": [ONE, TWO]}}], "x").content
    label = Label(digest=THREE, size=1, config=blob)
    unpacked = image_of(label, reference="x", place=Path("/x"), confirmed_by="blobs").content
    assert of_engine == unpacked == stated_content(blob)
    assert of_engine.same_image(stated_content(blob))


@pytest.mark.parametrize("changed", [{name: None} for name in STARTS] + [{"Env": ["B=2", "A=1"]}, {"User": "0"}])
def test_another_start_is_another_configuration(changed):
    rootfs = {"diff_ids": [ONE]}
    mine = stated_content({"config": STARTS, "rootfs": rootfs})
    assert not mine.same_image(stated_content({"config": STARTS | changed, "rootfs": rootfs}))


@pytest.mark.parametrize(
    "blob",
    [
        None,
        [],
        "x",
        7,
        {"rootfs": []},
        {"rootfs": {"diff_ids": "sha256:" + "1" * 64}},
        {"rootfs": {"diff_ids": [7]}},
        {"rootfs": {"diff_ids": ["sha256:12"]}},
        {"rootfs": {"diff_ids": [ONE + "\n"]}},
        {"rootfs": {"diff_ids": [ONE] * (MOST_LAYERS + 1)}},
        {"config": []},
        {"config": {"Labels": {"a": 7}}},
        {"architecture": 7},
        {"os": "x" * 65},
    ],
)
def test_a_configuration_of_another_shape_is_refused(blob):
    with pytest.raises(ValueError):
        stated_content(blob)


# ---- recorded


def test_a_record_keeps_what_the_image_is_and_reads_back(tmp_path):
    written = record(**KNOWN)
    assert written.content == ImageContent(layers=(ONE, TWO), config=THREE, recipe=ONE, release="0.1.0")
    path = record_evidence(written, tmp_path)
    assert read_evidence(path) == written
    assert set(json.loads(path.read_text())["target"]) == {"kind", "digest", "digest_from", "runtime"}
    for _ in range(2):  # checked, and then as it is kept between runs
        (kept,) = records_of(tmp_path, ".json", Evidence, load_evidence, ("tests",))
        assert kept.content == written.content
        assert kept.content.same_image(written.content)


@pytest.mark.parametrize(
    "target",
    [
        {"digest_from": "label"},
        {"digest": None},
        {"digest": ""},
        {"kind": "host", "os": "Debian 12", "python": "3.11"},
    ],
)
def test_what_is_no_compared_image_has_no_content(target):
    assert record(**KNOWN | target).content is None


def test_what_is_not_known_is_left_out():
    assert record(layers=[ONE], config="").content == ImageContent(layers=(ONE,))
    assert record().content is None


def test_the_committed_records_keep_their_ids_and_their_meaning():
    folder = data_dir("matrices") / "evidence"
    images = 0
    for path in sorted(folder.glob("*.json")):
        raw = json.loads(path.read_text())
        found = read_evidence(path)
        assert found.id == content_id(raw)
        if "content" not in raw:
            assert found.content is None
        images += found.image is not None
    assert images > 1


# ---- hostile


def planted(folder: Path, content: object, **target: object) -> Path:
    """Write a record whose hash and name are right, and whose content is as given."""
    raw = as_json(record())
    raw["target"] |= target
    raw["content"] = content
    raw["id"] = content_id(raw)
    path = folder / f"20261123T120000Z-{raw['id'].removeprefix('sha256:')[:16]}.json"
    path.write_text(json.dumps(raw))
    return path


HOSTILE = [
    7,
    "x",
    [],
    {"layers": ONE},
    {"layers": {ONE: 1}},
    {"layers": [7]},
    {"layers": [None]},
    {"layers": [[ONE]]},
    {"layers": ["sha256:12"]},
    {"layers": [ONE.upper()]},
    {"layers": [f"{ONE}\n"]},
    {"layers": [f"sha512:{'1' * 128}"]},
    {"layers": [f"../../{ONE}"]},
    {"layers": [ONE] * (MOST_LAYERS + 1)},
    {"config": 7},
    {"config": "1" * 64},
    {"config": [ONE]},
    {"recipe": ""},
    {"recipe": "\x1b[2J"},
    {"recipe": True},
    {"release": "a\nb"},
    {"release": "x" * 200},
    {"release": 1.0},
    {"more": ONE},
]


@pytest.mark.parametrize("content", HOSTILE, ids=lambda value: json.dumps(value)[:40])
def test_a_hostile_content_is_refused_where_it_is_loaded(tmp_path, content):
    path = planted(tmp_path, content)
    with pytest.raises(DataError, match="does not load") as error:
        load_evidence(tmp_path)
    assert error.value.where == str(path)
    assert error.value.what.isprintable()
    assert len(error.value.what) < 400


@pytest.mark.parametrize("target", [{"kind": "host"}, {"digest_from": "label"}, {"digest": None}, {"digest": 7}])
def test_a_content_without_a_compared_image_is_refused(tmp_path, target):
    planted(tmp_path, {"layers": [ONE]}, **target)
    with pytest.raises(DataError, match="its target is no image whose digest was compared"):
        load_evidence(tmp_path)


@pytest.mark.parametrize("content", [None, {}, {"layers": [], "config": None}, {"layers": [ONE] * MOST_LAYERS}])
def test_a_content_within_bounds_loads(tmp_path, content):
    planted(tmp_path, content)
    assert len(load_evidence(tmp_path)) == 1


# ---- what two runs ran


def test_two_runs_of_one_image_differ_in_compression_alone():
    first, second = record(**KNOWN), record(**KNOWN, digest=TWO)
    assert first.same_image(second)
    names = [each.what for each in run_differences(first, second)]
    assert names == ["compression of the image's layers"]
    assert run_differences(first, record(**KNOWN)) == ()


def test_two_runs_of_two_images_name_both():
    first = record(**KNOWN)
    for other in (record(digest=TWO), record(**KNOWN | {"layers": [TWO]}, digest=TWO), record(kind="host")):
        assert not first.same_image(other)
        assert "ran" in [each.what for each in run_differences(first, other)]


def test_each_record_is_of_its_own_image_and_of_another_compression_of_it():
    found = [
        record(**KNOWN, **more).is_of(digest, content)
        for more, digest, content in product(
            ({"digest": ONE},),
            (ONE, TWO),
            (None, ImageContent(layers=(ONE, TWO), config=THREE), ImageContent(layers=(ONE,), config=THREE)),
        )
    ]
    assert found == [True, True, True, False, True, False]
    assert not record(digest_from="label").is_of(ONE, None)
