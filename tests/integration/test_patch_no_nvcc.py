"""The no-nvcc patch: what only asks nvcc for its version does without, in an image that has none."""

import pytest
from patch_support import kernels, the_patch, toolkit_of

PATCH = the_patch("no-nvcc")

# a loader of our own, around the patch's lines
BETWEEN = {
    0: "import subprocess\nfrom torch.utils import cpp_extension\n",
    1: '    print(subprocess.check_output([cpp_extension.CUDA_HOME + "/bin/nvcc", "-V"], text=True))\n',
}
CALL = """
import sys
from torch.utils import cpp_extension
cpp_extension.CUDA_HOME = sys.argv[2] or None
sys.path.insert(0, sys.argv[1])
import kernels
kernels.load(None)
print("loaded")
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["stand-in", "real"])
def load(request, tmp_path_factory):
    return kernels(request.param, PATCH, BETWEEN, tmp_path_factory.mktemp("kernels"), CALL)


@pytest.fixture
def toolkit(tmp_path):
    """A toolkit whose nvcc notes that it was asked."""
    return toolkit_of(tmp_path, "12.6", does=f"touch {tmp_path}/asked")


def test_without_a_toolkit_nothing_is_asked(load):
    done = load("after", "")
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr


def test_before_it_failed(load):
    done = load("before", "")
    assert done.returncode == 1
    assert "unsupported operand type(s) for +: 'NoneType' and 'str'" in done.stderr


def test_an_nvcc_that_is_there_is_still_asked(load, toolkit):
    done = load("after", toolkit)
    assert done.returncode == 0, done.stderr
    assert (toolkit.parent / "asked").exists()
