"""What the matrix page reads and works out besides its tables: proof by GPU, published images, what many cells share."""

import json
from datetime import UTC, datetime

import pytest
from small_page import record

from envbuild.curate.page_proof import proof_by_gpu
from envbuild.curate.page_published import read_published
from envbuild.errors import DataError, UsageError

H100 = ({"name": "NVIDIA H100 80GB HBM3", "sm": "90", "memory_gib": 79.1, "count": 1},)
HOST = {"kind": "host", "os": "debian 12", "python": "3.11.2"}


def test_proof_is_by_board_and_by_what_ran():
    rows = proof_by_gpu(
        [
            record(id="sha256:01"),
            record(id="sha256:02", target=HOST),
            record(id="sha256:03", target=HOST, gpus=H100, verdict="failed", reason="boom"),
            record(id="sha256:04", target=HOST, gpus=H100, date=datetime(2026, 11, 18, tzinfo=UTC)),
            record(id="sha256:05", device="cpu", gpus=(), suite="sha256:1"),
            record(id="sha256:06", gpus=H100, verdict="host", reason="no driver"),
        ],
        "sha256:22",
    )
    assert [(r["board"], r["gpu"], r["by"], r["status"], r["record"]) for r in rows] == [
        ("H100 80GB HBM3", "sm_90", "environment on a host", "verified", "sha256:04"),
        ("H200", "sm_90", "image", "verified", "sha256:01"),
        ("H200", "sm_90", "environment on a host", "verified", "sha256:02"),
        ("CPU", "none", "image", "stale", "sha256:05"),
    ]
    assert (rows[0]["cuda"], rows[0]["torch"], rows[0]["te"]) == ("13.0", "2.11.0+cu130", "2.12.0")


def entry(**changes):
    return {
        "id": "cu126-py312-torch2.8.0-te2.6.0-sm90-00112233",
        "cell": {"cuda": "12.6", "torch": "2.8.0+cu126", "te": "2.6.0"},
        "image": "sha256:" + "0a" * 32,
        "platform": "linux/amd64",
        "size": 5_000_000_000,
        "flavor": "runtime",
        "stack": None,
        "signers": ["team"],
        "proof": "verified",
        "lock": "sha256:" + "0b" * 32,
    } | changes


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_published_images_are_those_of_the_catalogue(tmp_path):
    answer = {"registry": "registry.example.org:5000/team/megatron", "version": 3, "entries": [entry()], "nearest": []}
    (image,) = read_published(write(tmp_path / "catalog.json", answer))
    assert image.reference == f"registry.example.org:5000/team/megatron@sha256:{'0a' * 32}"
    assert (image.cell["te"], image.platform, image.signers) == ("2.6.0", "linux/amd64", ("team",))
    # a registry without a catalogue
    assert read_published(write(tmp_path / "none.json", {"registry": "r.example.org/x", "entries": []})) == ()


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("{", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ([], "it has no list of entries"),
        ({"registry": "r.example.org/x"}, "it has no list of entries"),
        ({"registry": "r.example.org/x; rm -rf ~", "entries": [entry()]}, "is not the name of a repository"),
        ({"registry": None, "entries": [entry()]}, "is not the name of a repository"),
        ({"registry": "r.example.org/x", "entries": ["x"]}, "entry 0 is no object"),
        ({"registry": "r.example.org/x", "entries": [entry(image="sha256:0a; reboot")]}, "entry 0, image"),
        ({"registry": "r.example.org/x", "entries": [entry(id="<b>")]}, "entry 0, id"),
        ({"registry": "r.example.org/x", "entries": [entry(platform="linux/amd64 --privileged")]}, "entry 0, platform"),
        ({"registry": "r.example.org/x", "entries": [entry(), entry(size=-1)]}, "entry 1, size"),
        ({"registry": "r.example.org/x", "entries": [{"id": "x"}]}, "entry 0, cell"),
    ],
)
def test_a_catalogue_that_is_none_is_refused(tmp_path, value, what):
    with pytest.raises(DataError) as caught:
        read_published(write(tmp_path / "catalog.json", value))
    assert what in caught.value.what
    assert caught.value.where == str(tmp_path / "catalog.json")


def test_a_catalogue_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="the catalogue cannot be read"):
        read_published(tmp_path / "missing.json")
