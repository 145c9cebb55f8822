"""The sgd patch on the real megatron-core 0.12.3, from its source archive on PyPI, with the real sgd-sai."""

import json

import pytest
from patch_support import REQUIREMENTS, megatron_core, run_probe, the_patch, venv

from envbuild.patches.apply import apply, check

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def python():
    return venv(*REQUIREMENTS)


@pytest.fixture(scope="module")
def tree(python, tmp_path_factory):
    root = megatron_core(python, tmp_path_factory.mktemp("sgd"))
    assert [report.state for report in apply(root, [the_patch("sgd")])] == ["applies"]
    assert [report.state for report in check(root, [the_patch("sgd")])] == ["applied"]
    return root


@pytest.fixture(scope="module")
def probe(python, tree):
    def run(mode):
        place = tree / "checkpoint"
        done = run_probe(python, tree, "sgd.py", mode, place)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(place.with_name(f"checkpoint.{mode}.json").read_text())

    return run


@pytest.fixture(scope="module")
def full(probe):
    return probe("full")


def test_equal_to_plain_sgd_sai(full):
    assert full["megatron"] == full["plain"]
    assert full["same_weights"]
    assert all(0.1 < loss < 10.0 for loss in full["megatron"])
    assert len(set(full["megatron"])) == len(full["megatron"])


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(full, probe):
    first = probe("first")
    resumed = probe("resumed")
    assert first["dims"] == [0]
    assert first["losses"] + resumed["losses"] == full["megatron"]
    # the control: with the flag lost, as sgd-sai by itself loses it, the run takes another course
    assert first["losses"] + resumed["warmup_lost"] != full["megatron"]
    assert resumed["before_the_first_step"] is False


@pytest.fixture(scope="module")
def refusals(probe):
    return probe("refusals")


def test_what_it_cannot_do_is_refused(refusals):
    assert refusals["cpu offload"].startswith(
        "ValueError: --optimizer sgd (SGD_sai) does not work with --optimizer-cpu-off"
    )
    assert refusals["distributed optimizer"].startswith(
        "ValueError: --optimizer sgd (SGD_sai) does not work with --use-dist"
    )
    assert "does not work with --ckpt-format torch_dist" in refusals["torch_dist"]
    assert "does not work with --ckpt-format zarr" in refusals["zarr"]
    assert "needs a momentum" in refusals["momentum"]
    for mode in ("sharded save", "sharded load"):
        assert refusals[mode].startswith(
            "sharded: NotImplementedError: --optimizer sgd (SGD_sai) has no sharded state dict"
        )


def test_other_optimizers_are_as_they_were(refusals):
    assert refusals["adam"] == "AdamW"
