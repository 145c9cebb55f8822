"""What a front end prints of a .cu file decides only what torch's headers decide."""

from pathlib import Path

import pytest

from envbuild.curate.trials import cuda
from envbuild.curate.trials.cuda import FrontEnd
from envbuild.curate.trials.sources import cuda_tools


@pytest.fixture
def headers(tmp_path):
    made = tmp_path / "torch" / "include"
    (made / "ATen").mkdir(parents=True)
    (made / "ATen" / "ATen.h").write_text(
        "namespace at { struct Tensor; }\n#ifdef NEVER\nint behind_a_condition;\n#endif\n"
    )
    return made


CXX20 = "error: #error C++20 or later compatible compiler is required to use ATen."
BY_NVCC = [
    ('csrc/k.cu(2): error: class "at::Tensor" has no member "ndim"', "failed"),
    ('csrc/k.cu(2): error: namespace "at" has no member "Gone"', "failed"),
    ('csrc/k.cu(3): error: no suitable conversion function from "at::Old" to "c10::ScalarType" exists', "failed"),
    ("csrc/k.cu:1:10: fatal error: torch/gone.h: No such file or directory", "failed"),
    ("{torch}/ATen/ATen.h:5:2: " + CXX20, "failed"),
    ("{torch}/ATen/ATen.h(7): error: expected a declaration", "failed"),
    ("csrc/k.cu:1:10: fatal error: cutlass/cutlass.h: No such file or directory", "undecided"),
    ("csrc/own.h:5:2: error: #error C++20 is required", "undecided"),
    ('csrc/k.cu(3): error: identifier "MACRO_OF_THE_BUILD" is undefined', "undecided"),
    ("Segmentation fault", "undecided"),
]
BY_CLANG = [
    ("csrc/k.cu:2:5: error: no type named 'Gone' in namespace 'at'", "failed"),
    ("csrc/k.cu:2:32: error: no member named 'ndim' in 'at::Tensor'; did you mean 'dim'?", "failed"),
    ("csrc/k.cu:1:10: fatal error: 'torch/gone.h' file not found", "failed"),
    ("{torch}/ATen/ATen.h:5:2: error: C++20 or later compatible compiler is required to use ATen.", "failed"),
    ("csrc/k.cu:2:32: error: no member named 'behind_a_condition' in namespace 'at'", "undecided"),
    ("csrc/k.cu:3:17: error: no viable conversion from 'at::Old' to 'at::S'", "undecided"),
    ("{torch}/ATen/ATen.h:7:1: error: reference to __host__ function in __device__ function", "undecided"),
    ("cuda/include/crt/math.hpp:7:1: error: no member named 'isinf' in namespace 'std'", "undecided"),
    ("clang: error: cannot find CUDA installation; provide its path via '--cuda-path'", "undecided"),
]


@pytest.mark.parametrize(
    ("name", "text", "verdict"),
    [("nvcc", *each) for each in BY_NVCC] + [("clang", *each) for each in BY_CLANG],
)
def test_an_error_fails_a_file_only_where_torch_s_headers_decide_it(headers, name, text, verdict):
    """clang does not compile these files in a build: what it alone objects to is not decided."""
    found = FrontEnd(name, Path("nvcc"), (headers,))._judge(text.format(torch=headers))
    assert found.verdict == verdict
    assert found.first


def test_a_file_that_one_set_of_macros_passes_has_passed(headers, tmp_path):
    """Builds take torch's macros against half operators back for some extensions, and not for others."""
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *__CUDA_NO_HALF_OPERATORS__*) exit 0 ;; esac\necho boom >&2\nexit 1\n')
    compiler.chmod(0o755)
    unit = tmp_path / "k.cu"
    unit.write_text("")
    assert FrontEnd("clang", compiler, (headers,)).check(unit, (), tmp_path).verdict == "passed"
    compiler.write_text("#!/bin/sh\necho boom >&2\nexit 1\n")
    assert FrontEnd("clang", compiler, (headers,)).check(unit, (), tmp_path) == ("undecided", "clang: boom")


def test_an_nvcc_that_says_nothing_of_its_steps_decides_nothing(headers, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nexit 0\n")
    nvcc.chmod(0o755)
    found = FrontEnd("nvcc", nvcc, (headers,)).check(tmp_path / "k.cu", (), tmp_path)
    assert found == ("undecided", "nvcc: the steps of this nvcc are not known")


@pytest.mark.skipif(cuda.clang() is None, reason="there is no clang here")
def test_a_clang_without_cuda_s_headers_decides_nothing(headers, tmp_path):
    (headers / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
    unit = tmp_path / "k.cu"
    unit.write_text("__global__ void k() {}\n")
    assert FrontEnd("clang", Path(cuda.clang()), (headers,)).check(unit, (), tmp_path).verdict == "undecided"


def test_without_cuda_s_headers_nothing_looks_at_cu_files(headers):
    assert cuda.front_end(None, (), (headers,)) is None


@pytest.mark.parametrize(
    ("runtime", "tools"),
    [
        (
            ("nvidia-cuda-runtime", "13.0.96"),
            ("nvcc==13.0.*", "cccl==13.0.*", "profiler-api==13.0.*", "crt==13.0.*"),
        ),
        (
            ("nvidia-cuda-runtime-cu12", "12.6.77"),
            ("nvcc-cu12==12.6.*", "cccl-cu12==12.6.*", "profiler-api-cu12==12.6.*"),
        ),
        (
            ("nvidia-cuda-runtime-cu12", "12.1.105"),
            ("nvcc-cu12==12.1.*", "cccl-cu12==12.5.*", "profiler-api-cu12==12.1.*"),
        ),  # 12.1's has no nv/target
        (
            ("nvidia-cuda-runtime-cu11", "11.7.99"),
            ("nvcc-cu11==11.8.*", "cccl-cu11==11.8.*", "profiler-api-cu11==11.8.*"),
        ),  # nvcc 11.7's has no crt
        (("torch", "2.13.0"), ()),
    ],
)
def test_the_rest_of_cudas_headers_fit_the_runtime(runtime: tuple[str, str], tools: tuple[str, ...]) -> None:
    assert cuda_tools(dict([runtime])) == tuple(f"nvidia-cuda-{tool}" for tool in tools)
