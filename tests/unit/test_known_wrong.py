"""Requests that were once answered wrong, each by the flags that a user would write, and what holds beyond them."""

import itertools

import pytest

from envbuild.errors import NoCellError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.matrix.packages import caps_for
from envbuild.matrix.spec import version_key
from envbuild.solver.solve import solve

COMPONENTS = {"te", "apex", "flash-attn", "flash-attn-hopper", "megatron", "deepspeed", "mamba-ssm", "causal-conv1d"}
HARDWARE = {"gpu", "driver", "board"}


@pytest.fixture(scope="module")
def matrix():
    return load_matrix()


def request(flags):
    words = flags.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return Request(pins=tuple(Pin(axis=flag.removeprefix("--"), spec=spec, origin=flag) for flag, spec in pairs))


def cell(matrix, flags):
    return solve(matrix, request(flags)).cell.versions


REFUSED = {
    # flags: a rule that must stand in the conflict
    "--te 2.17 --torch 2.10": "te-torch-2.11",
    "--te 2.18 --torch 2.10 --cuda 13.0": "te-torch-2.11",
    "--te 2.19 --torch 2.9": "te-torch-2.11",
    "--te 1.9 --torch 2.9": "te-onnx",
    "--te 1.13 --torch 2.10": "te-onnx",
    "--deepspeed 0.18.9 --torch 2.14": "deepspeed-cxx20",
    "--flash-attn-hopper 27f501d --torch 2.14 --te none": "fa3-cxx20",
    "--flash-attn-hopper 3.0.0b1.post20250814 --torch 2.15 --te none": "fa3-*",
    "--flash-attn auto --torch 2.14": "cxx-fa2-torch-2.14",
    "--apex 23.11 --torch 2.0": "apex-torch-2.1",
    "--apex 22.03 --torch 2.0": "apex-six",
    "--apex 22.03 --torch 2.1": "apex-six",
    "--megatron 0.15 --python 3.13": "mcore-numpy-python",
    "--megatron 0.12.3 --python 3.13": "mcore-numpy-python",
    "--te 2.0 --cuda 12.6 --base debian12-root": "te-git-needs-nvcc",
    "--flash-attn 2.6.3 --gpu b200 --te none": "fa2-blackwell",
    "--flash-attn 2.6.3 --gpu b200": "fa2-blackwell",
    "--flash-attn 2.7.1.post4 --gpu rtx5090 --te none": "fa2-blackwell",
    "--te 1.13 --gpu b200": "te-blackwell-1",
    "--te 1.9 --gpu b300 --apex none": "te-blackwell-1",
    "--torch 2.12 --cuda 13.0 --flavor devel": "cudnn-9.20-devel",
    "--torch 2.13 --cuda 13.2 --flavor devel": "cudnn-9.20-devel",
    "--flash-attn 2.7.4.post1 --cuda 11.6": "fa2-cuda-11.7",
}


@pytest.mark.parametrize(("flags", "rule"), REFUSED.items())
def test_refused(matrix, flags, rule):
    with pytest.raises(NoCellError) as caught:
        solve(matrix, request(flags))
    found = {step.rule for step in caught.value.conflict.steps if step.rule}
    assert any(name == rule or (rule.endswith("*") and name.startswith(rule[:-1])) for name in found), caught.value


FOUND = {
    # flags: what the cell must hold; a value that ends in * is a prefix
    "--te 2.17 --torch 2.11": {"torch": "2.11*"},
    "--te 2.20 --torch 2.10": {"te": "2.20.2"},
    "--te 1.13 --torch 2.8": {"torch": "2.8*"},
    "--deepspeed 0.19 --torch 2.14": {"deepspeed": "0.19.8"},
    "--apex 23.10 --torch 2.0": {"apex": "23.10"},
    "--apex 22.03 --torch 1.13": {"apex": "22.03"},
    "--megatron 0.16 --python 3.13": {"python": "3.13"},
    "--te 2.0 --cuda 12.6": {"base": "nvidia-cuda-12.6*"},
    "--flash-attn 2.7.3 --gpu b200 --te none": {"flash-attn": "2.7.3"},
    "--torch 2.12 --cuda 13.0": {"cudnn": "9.20.0.48", "base": "debian12-root"},
    "--torch 2.8 --cuda 12.8 --gpu v100": {"torch": "2.8.0+cu128"},
    "--torch 2.8 --cuda 12.9 --gpu v100": {"torch": "2.8.0+cu129"},
    "--torch 2.11.0+cu128": {"cudnn": "9.19.0.56"},
    "--flash-attn 2.5.8 --cuda 11.6": {"flash-attn": "2.5.8", "base": "nvidia-cuda-11.6.2*"},
    "--flash-attn 2.6.3 --cuda 11.7": {"flash-attn": "2.6.3", "base": "nvidia-cuda-11.7.1*"},
    "--apex 23.05 --cuda 11.7": {"base": "nvidia-cuda-11.7.1*"},
    "--gpu l40s --cuda 11.7 --te none --apex none": {"torch": "2.0.1+cu117"},
    "--gpu l40s --cuda 11.6": {"torch": "1.13.1+cu116"},
    "--torch 2.9 --cuda 12.9": {"torch": "2.9*+cu129"},
    "--torch 2.10 --cuda 12.9": {"torch": "2.10.0+cu129"},
    "--torch 2.11 --cuda 12.9": {"torch": "2.11.0+cu129"},
    "--torch 2.13 --cuda 12.9": {"torch": "2.13.0+cu129"},
}


@pytest.mark.parametrize(("flags", "wanted"), FOUND.items())
def test_found(matrix, flags, wanted):
    versions = cell(matrix, flags)
    for axis, text in wanted.items():
        begin, star, end = text.partition("*")
        found = versions[axis]
        assert found == text if not star else found.startswith(begin) and found.endswith(end), (axis, found)


CAPS = {
    # flags: a bound that the lock of Python packages must get
    "--deepspeed 0.8.3 --torch 2.0": ("pydantic", "<2"),
    "--deepspeed 0.8.0 --torch 1.13": ("pydantic", "<2"),
    "--deepspeed 0.14.2 --torch 2.3": ("numpy", "<2"),
    "--megatron 0.15": ("setuptools", ">=80"),
    "--megatron 0.14": ("setuptools", "<80"),
    "--megatron 0.16": ("setuptools", "<80"),
}


@pytest.mark.parametrize(("flags", "bound"), CAPS.items())
def test_bound(matrix, flags, bound):
    caps = {(cap.distribution, cap.spec) for cap in caps_for(matrix, solve(matrix, request(flags)).cell)}
    assert bound in caps


def test_bounds_of_one_cell_leave_a_version(matrix):
    flags = [f"--megatron 0.{minor}" for minor in range(8, 20)]
    flags += [f"--deepspeed {r.version}" for r in matrix.releases["deepspeed"] if r.version != "0.5.1"]
    for asked in flags:
        bounds = {}
        for cap in caps_for(matrix, solve(matrix, request(asked)).cell):
            bounds.setdefault(cap.distribution, set()).add(cap.spec)
        assert {"<80", ">=80"} - bounds.get("setuptools", set()), asked
        assert {"<2", ">=2"} - bounds.get("pydantic", set()), asked


def test_no_cell_needs_numpy_1_on_a_python_that_has_none(matrix):
    # NumPy 1's last wheels, of 1.26.4, are for CPython 3.12 and older
    bounded = [cap for cap in matrix.packages.cap if (cap.distribution, cap.spec) == ("numpy", "<2")]
    assert len(bounded) >= 3
    for cap in bounded:
        ((axis, spec),) = cap.when.items()
        for release in matrix.releases[axis]:
            if "ngc" in release.version or release.date is None:
                continue
            for python in ("3.13", "3.14"):
                try:
                    solution = solve(matrix, request(f"--{axis} {release.version} --python {python}"))
                except NoCellError:
                    continue
                assert all(c.spec != "<2" or c.distribution != "numpy" for c in caps_for(matrix, solution.cell)), spec


def test_te_without_a_core_wheel_is_compiled_by_an_nvcc(matrix):
    tried = 0
    for release in matrix.releases["te"]:
        if release.commit is None:
            continue
        for major in {"12", "13"} - set(release.facts.core):
            asked = f"--te {release.version} --cuda >={major}.0,<{int(major) + 1} --nvcc none"
            with pytest.raises(NoCellError):
                solve(matrix, request(asked))
            tried += 1
    assert tried >= 10


def test_a_rule_on_hardware_does_not_hang_on_a_component_that_may_be_left_out(matrix):
    """A rule on a GPU or a driver names at most one component that a cell may lack.

    With two, leaving one out would lift the bound on the other, and no GPU is kinder to flash-attention for want of TE.
    """
    for rule in matrix.rules:
        if rule.kind == "tested-with":
            continue
        named = {*rule.when, *rule.needs, *rule.with_, *rule.without, *rule.same, *itertools.chain(*rule.any_of)}
        if named & HARDWARE:
            assert len(named & COMPONENTS) <= 1, rule.id


def test_every_asked_or_default_component_is_known_to_the_test_above(matrix):
    from envbuild.components import COMPONENTS as ALL

    optional = {name for name in ALL if matrix.axes[name].use in {"asked", "default"} and name not in {"mpi"}}
    assert optional - {"grouped-gemm"} <= COMPONENTS


def test_the_submodules_of_te_are_those_of_its_tag(matrix):
    """`.gitmodules` at v1.13, v2.8, v2.17 and v2.18: cudnn-frontend is a Python package from 2.18 on."""
    for release in matrix.releases["te"]:
        version, found = version_key(release.version), set(release.facts.submodules)
        if version is None or release.commit is None:
            continue
        wanted = {"3rdparty/googletest"}
        wanted |= {"3rdparty/cudnn-frontend"} if version < version_key("2.18") else set()
        wanted |= {"3rdparty/cutlass"} if version >= version_key("2.8") else set()
        wanted |= {"3rdparty/nccl"} if version >= version_key("2.17") else set()
        assert found == wanted, release.version


def test_cuda_13_5_is_a_release_of_pypi_and_no_torch_is_built_for_it(matrix):
    assert "pypi-13.5.0" in {r.version for r in matrix.releases["toolchain"]}
    assert matrix.release("cuda", "13.5").source == "PyPI:cuda-toolkit==13.5.0"
    with pytest.raises(NoCellError, match=r"cuda 13\.5"):
        solve(matrix, request("--cuda 13.5"))
