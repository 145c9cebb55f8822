"""What the smoke tests read from NVIDIA's libraries: the version that a library states, whatever its file is called."""

import ctypes
import importlib
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SUITE = Path(__file__).parents[2] / "smoke_tests"
SITE = "/opt/venv/lib/python3.11/site-packages/nvidia"
MAPS = f"""\
7f0000000000-7f0000001000 r--p 00000000 08:01 11    {SITE}/cu13/lib/libcublas.so.13
7f0000001000-7f0000002000 r-xp 00001000 08:01 11    {SITE}/cu13/lib/libcublas.so.13
7f0000002000-7f0000003000 r--p 00000000 08:01 12    {SITE}/cu13/lib/libcublasLt.so.13
7f0000003000-7f0000004000 r--p 00000000 08:01 13    /opt/with space/libcudnn.so.9
7f0000004000-7f0000005000 r--p 00000000 08:01 14    {SITE}/cudnn/lib/libcudnn_ops.so.9
7f0000005000-7f0000006000 r--p 00000000 08:01 15    {SITE}/nccl/lib/libnccl.so.2
7f0000006000-7f0000007000 rw-p 00000000 00:00 0
7f0000007000-7f0000008000 r--p 00000000 08:01 16    /usr/lib/libcublas.so.12
"""


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SUITE))
    return importlib.import_module("smokelib.cuda_libraries")


def test_what_a_process_loaded(libraries: ModuleType) -> None:
    assert libraries.loaded(MAPS.splitlines(keepends=True)) == {
        f"{SITE}/cu13/lib/libcublas.so.13": "cublas",
        f"{SITE}/cu13/lib/libcublasLt.so.13": "cublasLt",
        "/opt/with space/libcudnn.so.9": "cudnn",
        f"{SITE}/nccl/lib/libnccl.so.2": "nccl",
        "/usr/lib/libcublas.so.12": "cublas",  # a second one: which of the two computes is not known
    }


@pytest.mark.parametrize(
    ("name", "packages", "version"),
    [
        ("cublas", {"nvidia-cublas": "13.1.0.3"}, "13.1.0.3"),
        ("cublasLt", {"nvidia-cublas-cu12": "12.6.4.1"}, "12.6.4.1"),
        ("cusparse", {"nvidia-cusparselt-cu12": "0.6.3", "nvidia-cusparse-cu12": "12.5.4.2"}, "12.5.4.2"),
        ("cusparseLt", {"nvidia-cusparselt-cu13": "0.8.0", "nvidia-cusparse": "12.6.3.3"}, "0.8.0"),
        ("nccl", {"nvidia-nccl-cu13": "2.28.9"}, "2.28.9"),
        ("cudnn", {"nvidia-cublas": "13.1.0.3"}, None),
    ],
)
def test_the_wheel_of_a_library(libraries: ModuleType, name: str, packages: dict[str, str], version: str) -> None:
    assert libraries.locked(name, packages) == version


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("13.1.0.3", (13, 1, 0)), ("2.28.9", (2, 28, 9)), ("2.26.2.post1", (2, 26, 2)), ("0.8", (0, 8, 0))],
)
def test_the_numbers_that_a_library_states(libraries: ModuleType, version: str, numbers: tuple[int, ...]) -> None:
    assert libraries.release(version) == numbers


@pytest.mark.parametrize(
    ("name", "code", "stated"),
    [
        (
            "cublas",
            "int cublasGetProperty(int part, int *value) { static int all[] = {13, 0, 19}; *value = all[part]; return 0; }",
            (13, 0, 19),
        ),
        ("cublas", "int cublasGetProperty(int part, int *value) { return 1; }", None),
        ("cufft", "int nothing;", None),
        ("nccl", "int ncclGetVersion(int *value) { *value = 22809; return 0; }", (2, 28, 9)),
        ("nccl", "int ncclGetVersion(int *value) { *value = 2708; return 0; }", (2, 7, 8)),
    ],
)
def test_a_library_is_asked_for_its_version(
    libraries: ModuleType, name: str, code: str, stated: tuple[int, ...] | None, tmp_path: Path
) -> None:
    source, library = tmp_path / "library.c", tmp_path / f"lib{name}.so.1"
    source.write_text(code)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    ctypes.CDLL(str(library))  # as torch loads it
    with Path("/proc/self/maps").open() as maps:
        assert libraries.loaded(maps)[str(library)] == name
    assert libraries.stated(name, str(library)) == stated
