"""The dist-checkpoint patch on the real megatron-core 0.12.3, from its source archive on PyPI, with a torch newer than 2.8."""

import json

import pytest
from patch_support import REQUIREMENTS, megatron_core, run_probe, the_patch, venv

from envbuild.patches.apply import apply

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def python():
    return venv(*REQUIREMENTS, "psutil==7.2.2")


@pytest.fixture
def save(python, tmp_path):
    """Save and load with the tree as it is, or with the patch."""
    tree = megatron_core(python, tmp_path)

    def run(*names):
        assert all(report.state == "applies" for report in apply(tree, [the_patch(name) for name in names]))
        return run_probe(python, tree, "dist_checkpoint.py", tmp_path / "checkpoint")

    return run


def test_before_a_save_failed(save):
    done = save()
    assert done.returncode == 1
    assert "_write_item() missing 1 required positional argument: 'serialization_format'" in done.stderr


def test_what_is_loaded_is_what_was_saved(save):
    done = save("dist-checkpoint")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"weight": True, "more": {"step": 7}}
