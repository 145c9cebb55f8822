"""Where the matrix states one truth twice, in the facts of releases and in rules, both say the same."""

import pytest
from packaging.version import Version

from envbuild.matrix.load import load_matrix
from envbuild.matrix.spec import matches, version_key


@pytest.fixture(scope="module")
def matrix():
    return load_matrix()


def permitted(matrix, topic: str, **releases) -> bool:
    """Whether the rules of a topic permit these releases together; a rule that asks for another axis does not apply."""
    for rule in matrix.rules:
        axes = {*rule.when, *rule.needs}
        if rule.topic != topic or not axes <= releases.keys():
            continue
        assert (rule.any_of, rule.with_, rule.without, rule.same) == ((), (), (), ()), f"{rule.id} is not read here"
        if all(matches(matrix.axes[axis], spec, releases[axis]) for axis, spec in rule.when.items()) and not all(
            matches(matrix.axes[axis], spec, releases[axis]) for axis, spec in rule.needs.items()
        ):
            return False
    return True


def runs_on(archs, sm: str) -> bool:
    """Whether one of these architectures' machine code runs on a GPU: of its major, and not newer.

    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#binary-compatibility
    """
    plain = (arch for arch in archs if arch.isdecimal())
    return any(arch[:-1] == sm[:-1] and int(arch[-1]) <= int(sm[-1]) for arch in plain)


def test_a_gpu_is_named_by_its_architecture(matrix):
    assert {gpu.version for gpu in matrix.releases["gpu"]} == {f"sm_{gpu.facts.sm}" for gpu in matrix.releases["gpu"]}


def test_the_gpus_of_a_cuda_are_those_that_its_nvcc_knows(matrix):
    compared = 0
    for cuda in matrix.releases["cuda"]:
        compilers = [nvcc for nvcc in matrix.releases["nvcc"] if nvcc.version.startswith(f"{cuda.version}.")]
        for gpu in matrix.releases["gpu"]:
            known = {nvcc.version for nvcc in compilers if gpu.facts.sm in nvcc.facts.archs}
            wanted = {
                nvcc.version for nvcc in compilers if permitted(matrix, "gpu-arch-cuda", cuda=cuda, gpu=gpu, nvcc=nvcc)
            }
            assert known == wanted, (cuda.version, gpu.version)
            compared += len(compilers)
    assert compared > 400


def test_the_gpus_of_a_torch_are_those_that_its_kernels_run_on(matrix):
    builds = [torch for torch in matrix.releases["torch"] if "+cu" in torch.version]
    assert [torch.version for torch in builds if not torch.facts.archs] == []
    # `archs` is of the wheels for x86_64; a GPU that only an Arm chip holds is another rule's affair
    (of_arm,) = (set(rule.when["gpu"]) for rule in matrix.rules if rule.needs == {"arch": "aarch64"})
    for torch in builds:
        cuda = matrix.release("cuda", torch.needs["cuda"])
        gpus = [gpu for gpu in matrix.releases["gpu"] if gpu.version not in of_arm]
        found = {gpu.version for gpu in gpus if runs_on(torch.facts.archs, gpu.facts.sm)}
        of = {"torch": torch, "cuda": cuda, "base": matrix.release("base", "debian12-root")}
        rules = {gpu.version for gpu in gpus if permitted(matrix, "gpu-arch-torch", **of, gpu=gpu)}
        assert found == rules, torch.version


def test_the_compiler_of_a_torch_knows_its_cxx_standard(matrix):
    for torch in matrix.releases["torch"]:
        if torch.facts.cxx_standard is None or torch.needs["cuda"] == "cpu":
            continue
        cuda = matrix.release("cuda", torch.needs["cuda"])
        refused = {
            gcc.version
            for gcc in matrix.releases["gcc"]
            if not permitted(matrix, "cxx-standard", torch=torch, cuda=cuda, gcc=gcc)
        }
        # torch's own headers refuse gcc 7 from 2.2 on
        of_headers = {"7"} if Version(torch.version) >= Version("2.2") else set()
        assert refused == ({"7", "9"} if torch.facts.cxx_standard >= 20 else of_headers), torch.version


def test_a_flash_attention_of_less_than_cxx_20_goes_with_no_torch_that_refuses_it(matrix):
    newest = max(matrix.releases["torch"], key=lambda torch: version_key(torch.version))
    assert newest.facts.cxx_standard == 20
    for flash_attn in matrix.releases["flash-attn"]:
        if "base" not in flash_attn.needs:  # an image's own is compiled already
            fits = permitted(matrix, "cxx-standard", torch=newest, **{"flash-attn": flash_attn})
            assert fits == (flash_attn.facts.cxx_standard >= 20), flash_attn.version
