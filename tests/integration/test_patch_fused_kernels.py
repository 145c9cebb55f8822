"""The fused-kernels patch: the kernels that training compiles are for the GPU of the host."""

import pytest
from patch_support import kernels, the_patch, toolkit_of

PATCH = the_patch("fused-kernels")

# a loader of our own, around the patch's lines
BETWEEN = {
    0: """import subprocess
import torch
from torch.utils import cpp_extension

def load(args):
    printed = subprocess.check_output([cpp_extension.CUDA_HOME + "/bin/nvcc", "-V"], text=True)
    release = printed.split("release ")[1].split(",")[0]
    cc_flag = []
    if torch.version.hip is None:
        cc_flag += ["-gencode", "arch=compute_80,code=sm_80"]
        if int(release.split(".")[0]) >= 12:
            cc_flag.append("-gencode")
""",
    1: """    def compiled(name, extra_cuda_flags):
        if torch.version.hip is not None:
            extra_cuda_cflags = []
        else:
""",
    2: """        return cpp_extension.load(name=name, extra_cuda_cflags=extra_cuda_cflags)

    if args.masked_softmax_fusion:
        compiled("softmax", ["--expt-relaxed-constexpr"])
""",
}
CALL = """
import sys
from types import SimpleNamespace
import torch
from torch.utils import cpp_extension
cpp_extension.CUDA_HOME = sys.argv[2]
cpp_extension.load = lambda **asked: print(*(flag for flag in asked["extra_cuda_cflags"] if "arch=" in flag))
torch.cuda.get_device_capability = lambda *_: tuple(map(int, sys.argv[3].split(".")))
sys.path.insert(0, sys.argv[1])
import kernels
kernels.load(SimpleNamespace(rank=0, masked_softmax_fusion=True))
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["stand-in", "real"])
def asked(request, tmp_path_factory):
    """Return for a side of the patch, a GPU and an nvcc which architectures each kernel is compiled for."""
    folder = tmp_path_factory.mktemp("kernels")
    load = kernels(request.param, PATCH, BETWEEN, folder, CALL)

    def run(side: str, gpu: str, nvcc: str) -> set[str]:
        done = load(side, toolkit_of(folder, nvcc), gpu)
        assert done.returncode == 0, done.stderr
        flags = set(done.stdout.splitlines())
        assert len(flags) == 1  # each kernel is compiled alike
        return set(flags.pop().split())

    return run


def test_an_h100_gets_its_kernels_from_nvcc_11_8(asked) -> None:
    assert asked("after", "9.0", "11.8") == {"arch=compute_90,code=sm_90"}


def test_before_five_others_were_asked_for_and_it_was_not(asked) -> None:
    """torch 2.0.1 adds the host's own to such a list, torch 2.11 does not."""
    before = asked("before", "9.0", "11.8")
    assert "arch=compute_80,code=sm_80" in before
    assert not any("90" in arch or "code=compute" in arch for arch in before)


@pytest.mark.parametrize(("gpu", "nvcc"), [("8.0", "11.8"), ("9.0", "13.0")])
def test_any_other_pair_gets_the_gpus_own(asked, gpu: str, nvcc: str) -> None:
    """CUDA 13 compiles for sm_70 no more, which was always asked for."""
    name = gpu.replace(".", "")
    assert asked("after", gpu, nvcc) == {f"arch=compute_{name},code=sm_{name}"}
