"""GPU code that NVIDIA's nvcc compiled: which GPUs run it, compared with NVIDIA's cuobjdump; both come from PyPI."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from binary_root import MODULE, SITE, TAG, good_root
from uv import find_uv_bin

from envbuild.settings import load_settings
from envbuild.verify.binaries.elf import read_elf
from envbuild.verify.binaries.gpu_code import Code

KERNEL = """
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
extern "C" void launch(float* x) { twice<<<1, 32>>>(x); }
"""
PACKAGES = ("cuda-toolkit[nvcc,cccl,crt,nvvm,cudart]==13.0.2", "nvidia-cuda-cuobjdump==13.5.37")


@pytest.fixture(scope="module")
def cuda(tmp_path_factory) -> Path:
    """NVIDIA's compiler and its cuobjdump, as their wheels hold them."""
    folder = tmp_path_factory.mktemp("cuda")
    index = load_settings().index_url
    command = [
        find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--no-config",
        "--target",
        str(folder),
        "--python",
        sys.executable,
    ]
    command += ["--only-binary", ":all:", "--default-index", index, *PACKAGES]
    subprocess.run(command, check=True)
    place = folder / "nvidia" / "cu13"
    for program in (*place.glob("bin/*"), *place.glob("nvvm/bin/*")):
        if program.is_file():
            program.chmod(0o755)
    return place


def compiled(cuda: Path, out: Path, *targets: str, more: tuple[str, ...] = ()) -> Path:
    """Compile a library with one kernel for `targets`, as nvcc's -gencode takes them."""
    source = out.parent / f"{out.name}.cu"
    name = out.name.partition(".")[0]
    source.write_text(KERNEL + MODULE.format(name=name))
    flags = [flag for target in targets for flag in ("-gencode", target)]
    command = [str(cuda / "bin" / "nvcc"), "-shared", "-Xcompiler", "-fPIC", *flags, *more, "-o", str(out), str(source)]
    environment = os.environ | {"LIBRARY_PATH": str(cuda / "lib"), "CPLUS_INCLUDE_PATH": str(cuda / "include")}
    subprocess.run(command, check=True, env=environment)
    source.unlink()
    return out


def cubin(sm: str) -> str:
    return f"arch=compute_{sm},code=sm_{sm}"


def ptx(sm: str) -> str:
    return f"arch=compute_{sm},code=compute_{sm}"


def codes_in(path: Path) -> set[Code]:
    with path.open("rb") as file:
        gpu = read_elf(file, path.name, path.stat().st_size).gpu
    assert gpu is not None
    return set(gpu.codes)


def codes_by_cuobjdump(cuda: Path, path: Path) -> set[Code]:
    done = subprocess.run(
        [str(cuda / "bin" / "cuobjdump"), "-lelf", "-lptx", str(path)], capture_output=True, text=True, check=True
    )
    return {
        Code(sm=int(m[1]), suffix=m[2], ptx=m[3] == "ptx")
        for m in re.finditer(r"\.sm_(\d+)([af]?)\.(ptx|cubin)$", done.stdout, re.MULTILINE)
    }


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        ((cubin("80"), cubin("90"), ptx("90")), ()),
        ((cubin("80"), cubin("90"), ptx("90")), ("-Xfatbin=-compress-all",)),
        ((cubin("80"), cubin("90"), ptx("90")), ("-no-compress",)),
        ((cubin("90a"), ptx("90a")), ()),
        ((cubin("100a"), cubin("103a"), ptx("100f")), ()),
        ((cubin("100a"), cubin("103a"), ptx("100f")), ("-no-compress",)),
        ((cubin("100f"), cubin("120f")), ()),
        ((ptx("75"),), ()),
        ((ptx("75"),), ("-Xfatbin=-compress-all",)),
    ],
)
def test_what_is_read_is_what_cuobjdump_says(cuda, tmp_path, targets, more):
    path = compiled(cuda, tmp_path / "one.so", *targets, more=more)
    found = codes_in(path)
    # its list calls the cubin of a family by its number alone
    listed = {Code(sm=c.sm, suffix="" if c.suffix == "f" and not c.ptx else c.suffix, ptx=c.ptx) for c in found}
    assert listed == codes_by_cuobjdump(cuda, path)
    asked = {re.search(r"code=(\w+)", target)[1] for target in targets}
    assert asked <= {str(code) for code in found}


def test_code_that_is_there_to_be_linked_again_is_not_counted(cuda, tmp_path):
    path = compiled(cuda, tmp_path / "one.so", cubin("80"), ptx("90"), more=("-rdc=true",))
    assert codes_in(path) == codes_by_cuobjdump(cuda, path) == {Code(sm=80, suffix="", ptx=False)}


@pytest.mark.parametrize(
    ("targets", "sm", "verdict", "text"),
    [
        ((cubin("80"),), 90, "failed", "has no GPU code that sm_90 runs: sm_80"),
        ((cubin("100a"),), 103, "failed", "has no GPU code that sm_103 runs: sm_100a"),
        ((cubin("90a"),), 100, "failed", "has no GPU code that sm_100 runs: sm_90a"),
        (
            (cubin("80"), ptx("80")),
            90,
            "unproven",
            "has no cubin for sm_90: the driver compiles its PTX as it first runs",
        ),
        ((cubin("80"), ptx("90a")), 100, "failed", "has no GPU code that sm_100 runs"),
        ((cubin("80"),), 86, "passed", "1 binary with cubins for sm_86"),
        ((cubin("90a"),), 90, "passed", "1 binary with cubins for sm_90"),
        ((cubin("100f"),), 103, "passed", "1 binary with cubins for sm_103"),
        ((cubin("100"),), 103, "passed", "1 binary with cubins for sm_103"),
    ],
)
def test_gpu_code_is_held_against_the_gpu_of_the_cell(cuda, tmp_path, targets, sm, verdict, text):
    root = good_root(tmp_path / "root")
    compiled(cuda, root / f"{SITE}/fused.{TAG}.so", *targets)
    found = root.examine(sms=(sm,))
    assert found["GPU code"].verdict == verdict
    assert text in found["GPU code"].text


FLEET = (cubin("80"), cubin("90"), cubin("100"), ptx("100"))


def test_an_extension_for_a_fleet_serves_each_gpu_of_it(cuda, tmp_path):
    root = good_root(tmp_path / "root")
    compiled(cuda, root / f"{SITE}/fused.{TAG}.so", *FLEET)
    found = root.examine(sms=(80, 90, 100))
    assert "GPU code" not in found
    texts = {sm: found[f"GPU code for sm_{sm}"].text for sm in (80, 90, 100)}
    assert texts[80] == "1 binary with cubins for sm_80"
    assert texts[90] == "1 binary with cubins for sm_90"
    assert texts[100].startswith("1 binary with cubins for sm_100; 1 of all hold PTX")
    assert {found[f"GPU code for sm_{sm}"].verdict for sm in (80, 90, 100)} == {"passed"}


def test_an_extension_without_code_for_one_gpu_of_a_fleet_is_a_defect_for_that_one(cuda, tmp_path):
    root = good_root(tmp_path / "root")
    compiled(cuda, root / f"{SITE}/fused.{TAG}.so", cubin("80"), cubin("90"))
    found = root.examine(sms=(80, 90, 100))
    verdicts = {sm: found[f"GPU code for sm_{sm}"].verdict for sm in (80, 90, 100)}
    assert verdicts == {80: "passed", 90: "passed", 100: "failed"}
    assert "has no GPU code that sm_100 runs: sm_80, sm_90" in found["GPU code for sm_100"].text


def test_a_distribution_that_is_for_one_gpu_of_a_fleet_is_held_against_that_one(cuda, tmp_path):
    root = good_root(tmp_path / "root")
    compiled(cuda, root / f"{SITE}/fused.{TAG}.so", cubin("90a"))
    assert root.examine(sms=(80, 90))["GPU code for sm_80"].verdict == "failed"
    root.write(f"{SITE}/fused-1.0.dist-info/RECORD", f"fused.{TAG}.so,,\n")
    found = root.examine(sms=(80, 90), served={"fused": [90]})
    assert found["GPU code for sm_80"].verdict == "passed"
    assert "fused is for other GPUs alone" in found["GPU code for sm_80"].text
    assert found["GPU code for sm_90"].text.startswith("1 binary with cubins for sm_90")
