"""Trials end to end: an index on this machine, uv, compiled libraries, and the ledger that is written."""

import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from index_server import Index, wheel
from small_matrix import release, small_matrix

from envbuild.cli.matrix_try import outcome_text
from envbuild.curate.trials import cuda, precompiled, sources
from envbuild.curate.trials.cuda import own_nvcc
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.pairs import pairs_of, read_axes
from envbuild.curate.trials.precompiled import Precompiled
from envbuild.curate.trials.run import Runner
from envbuild.curate.trials.subject import find
from envbuild.errors import LockError, UsageError
from envbuild.evidence.trials import load_trials
from envbuild.matrix.model import BaseFacts
from envbuild.settings import load_settings

LINUX = "manylinux_2_28_x86_64"
ONNX_OF_28 = {"torch/onnx/__init__.py": "", "torch/onnx/_type_utils.py": "class JitScalarType: ...\n"}
ONNX_OF_29 = {"torch/onnx/__init__.py": "def export(): ...\n"}


def binary(tmp_path, needs):
    """Return a shared library that needs `needs`."""
    source = tmp_path / "empty.c"
    source.write_text("int unused;\n")
    other, out = tmp_path / needs, tmp_path / "out.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", other, f"-Wl,-soname,{needs}", source], check=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", out, source, other], check=True)
    return out.read_bytes()


def te_wheels(version, source, library):
    members = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch/__init__.py": source}
    return (
        ("transformer-engine", version, [wheel("transformer_engine", version, "py3-none-any", members=members)]),
        (
            "transformer-engine-cu12",
            version,
            [
                wheel(
                    "transformer_engine_cu12",
                    version,
                    f"py3-none-{LINUX}",
                    members={"transformer_engine/lib.so": library},
                )
            ],
        ),
    )


@pytest.fixture
def index(tmp_path):
    made = Index()
    made.add("setuptools", "80.0", wheel("setuptools", "80.0", "py3-none-any"))
    runtime = {"nvidia/lib/libcudart.so.12": b""}
    made.add(
        "nvidia-cuda-runtime-cu12",
        "12.8.90",
        wheel("nvidia_cuda_runtime_cu12", "12.8.90", f"py3-none-{LINUX}", members=runtime),
    )
    for version, members, pythons in (("2.8.0", ONNX_OF_28, ("311", "312")), ("2.9.0", ONNX_OF_29, ("311",))):
        files = {"torch/__init__.py": "class Tensor: ...\n", **members}
        wheels = (
            wheel("torch", version, f"cp{p}-cp{p}-{LINUX}", ("nvidia-cuda-runtime-cu12==12.8.90",), members=files)
            for p in pythons
        )
        made.add("torch", version, *wheels)
    for name, version, files in (
        *te_wheels("2.5.0", "from torch.onnx import _type_utils\n", binary(tmp_path, "libcudart.so.12")),
        *te_wheels(
            "2.6.0",
            "import torch\ntry:\n    from torch.onnx import _type_utils\nexcept ImportError:\n    pass\nx = torch.Tensor\n",
            binary(tmp_path, "libnccl.so.2"),
        ),
    ):
        made.add(name, version, *files)
    return made


@pytest.fixture
def matrix():
    made = small_matrix()
    bases = (release("slim", facts=BaseFacts(kind="root")),)
    pythons = (release("3.11"), release("3.12"))
    return dataclasses.replace(made, releases={**made.releases, "base": bases, "python": pythons})


def settings_of(tmp_path, url):
    return load_settings(environ={"HOME": str(tmp_path), "ENVBUILD_INDEX_URL": url}, root=tmp_path)


def run(matrix, tmp_path, url, *axes, kinds=("metadata", "names", "libraries"), **options):
    runner = Runner(matrix, settings_of(tmp_path, url), records=tmp_path / "records", **options)
    notes = []
    pairs = list(pairs_of(runner.files, matrix, read_axes(matrix, axes), every=False))
    return runner.run(pairs, kinds, note=notes.append), notes


def test_each_kind_finds_what_does_not_fit_and_a_second_run_tries_nothing_again(index, matrix, tmp_path):
    with index.served() as url:
        outcome, notes = run(matrix, tmp_path, url, "te", "torch")
        sent = index.bytes_sent
        again, _ = run(matrix, tmp_path, url, "te", "torch")
        assert index.bytes_sent - sent < 40_000  # the listings alone
    found = {(*t.pair.values(), t.kind): t for t in load_trials(tmp_path / "records")}
    assert {key: trial.verdict for key, trial in found.items()} == {
        ("2.6.0", "2.9.0", "metadata"): "passed",
        ("2.6.0", "2.9.0", "names"): "passed",
        ("2.6.0", "2.9.0", "libraries"): "failed",
        ("2.6.0", "2.8.0", "metadata"): "passed",
        ("2.6.0", "2.8.0", "names"): "passed",
        ("2.6.0", "2.8.0", "libraries"): "failed",
        ("2.5.0", "2.9.0", "metadata"): "passed",
        ("2.5.0", "2.9.0", "names"): "failed",
        ("2.5.0", "2.9.0", "libraries"): "passed",
        ("2.5.0", "2.8.0", "metadata"): "passed",
        ("2.5.0", "2.8.0", "names"): "passed",
        ("2.5.0", "2.8.0", "libraries"): "passed",
    }
    names = found["2.5.0", "2.9.0", "names"]
    assert names.first == "transformer_engine/pytorch/__init__.py:1: torch.onnx._type_utils"
    assert names.command == "envbuild matrix try te=2.5.0 torch=2.9.0 --kind names"
    assert "transformer_engine/lib.so needs libnccl.so.2" in found["2.6.0", "2.8.0", "libraries"].first
    assert found["2.6.0", "2.9.0", "metadata"].pythons == {"3.11": "passed", "3.12": "failed"}
    assert found["2.6.0", "2.8.0", "metadata"].pythons == {"3.11": "passed", "3.12": "passed"}
    assert outcome.absent == ["te 2.9.0"]
    assert (outcome.pairs, outcome.complete, outcome.made, outcome.kept) == (6, 4, 12, 0)
    assert (again.made, again.kept) == (0, 12)
    assert again.contradictions == outcome.contradictions
    assert "te 2.5.0 with torch 2.9.0: transformer_engine/pytorch/__init__.py:1: torch.onnx._type_utils" in (
        outcome.contradictions
    )
    assert any(text.startswith("te 2.6.0 with torch 2.9.0 on Python 3.12: ") for text in outcome.contradictions)
    assert notes[-1].startswith("[6/6] te 2.5.0 with torch 2.8.0: metadata passed, names passed")


def test_a_pair_with_nothing_to_try_does_not_count_as_tried(index, matrix, tmp_path):
    with index.served() as url:
        outcome, notes = run(matrix, tmp_path, url, "te=2.5", "torch=2.8", kinds=("headers",))
    assert (outcome.pairs, outcome.complete, outcome.unasked, outcome.made) == (1, 0, 1, 0)
    assert notes == ["[1/1] te 2.5.0 with torch 2.8.0: nothing to try"]
    assert "; 0 tried, 0 trials made now" in outcome_text(outcome)
    assert "nothing to try of 1 pair" in outcome_text(outcome)


def test_what_changes_on_the_index_is_tried_again_and_the_old_record_stays(index, matrix, tmp_path):
    with index.served() as url:
        run(matrix, tmp_path, url, "te=2.5", "torch=2.9", kinds=("names",))
        files = {"torch/__init__.py": "", **ONNX_OF_28}
        torch = wheel("torch", "2.9.1", f"cp311-cp311-{LINUX}", ("nvidia-cuda-runtime-cu12==12.8.90",), members=files)
        index.add("torch", "2.9.0", (torch[0].replace("2.9.1", "2.9.0"), torch[1]))
        outcome, _ = run(matrix, tmp_path, url, "te=2.5", "torch=2.9", kinds=("names",))
    assert outcome.made == 1
    assert [trial.verdict for trial in load_trials(tmp_path / "records")] == ["failed", "passed"]


def test_a_tree_stands_in_for_what_no_index_has(index, matrix, tmp_path):
    tree = tmp_path / "src"
    (tree / "transformer_engine" / "pytorch").mkdir(parents=True)
    (tree / "transformer_engine" / "__init__.py").write_text("")
    (tree / "transformer_engine" / "pytorch" / "__init__.py").write_text("from torch import Gone\n")
    with index.served() as url:
        runner = Runner(matrix, settings_of(tmp_path, url), records=tmp_path / "records", trees={"te": tree})
        pairs = pairs_of(runner.files, matrix, read_axes(matrix, ("te=2.9", "torch=2.8")), every=False)
        outcome = runner.run(list(pairs), ("metadata", "names", "libraries"))
    (trial,) = load_trials(tmp_path / "records")
    assert (trial.kind, trial.verdict, outcome.absent) == ("names", "failed", [])
    assert trial.first == "transformer_engine/pytorch/__init__.py:1: torch.Gone"


def test_pairs_are_a_component_and_what_it_is_used_with(matrix, tmp_path):
    unfit = (("torch", "te"), ("te", "te"), ("te", "python"), ("nothing", "torch"), ("fa3-kernels", "torch"))
    for axes in unfit:
        with pytest.raises(UsageError):
            read_axes(matrix, axes)
    with pytest.raises(UsageError, match="is not a version"):
        read_axes(matrix, ("te=nonsense", "torch"))


def test_the_header_of_a_library_that_torch_s_wheel_does_not_ask_for_is_not_decided(index, matrix, tmp_path):
    members = {
        "torch/__init__.py": "",
        "torch/include/torch/extension.h": "#pragma once\n",
        "torch/utils/cpp_extension.py": "flag = '-std=c++17'\n",
    }
    index.add("torch", "2.8.0", wheel("torch", "2.8.0", f"cp311-cp311-{LINUX}", members=members))
    for version, header in (("2.5.0", "cusparse.h"), ("2.6.0", "custom.h")):
        sdist = {
            "PKG-INFO": "Metadata-Version: 2.1\nRequires-Dist: torch\n",
            "csrc/a.cpp": f"#include <torch/extension.h>\n#include <{header}>\n",
        }
        index.add("transformer-engine-torch", version, tar(f"transformer_engine_torch-{version}", sdist))
    with index.served() as url:
        run(matrix, tmp_path, url, "te", "torch=2.8", kinds=("sources",), cpp_only=True)
    found = {trial.pair["te"]: trial.verdict for trial in load_trials(tmp_path / "records")}
    assert found == {"2.5.0": "undecided", "2.6.0": "failed"}


def test_sources_are_checked_against_the_headers_of_the_wheel(index, matrix, tmp_path):
    header = "namespace torch { struct Tensor { int dim(); }; }\n"
    for version, text in (("2.8.0", header), ("2.9.0", header.replace("dim", "ndim"))):
        members = {
            "torch/__init__.py": "",
            "torch/include/torch/extension.h": text,
            "torch/include/ATen/ATen.h": "#pragma once\n",
            "torch/utils/cpp_extension.py": "flag = '-std=c++17'\n",
        }
        index.add("torch", version, wheel("torch", version, f"cp311-cp311-{LINUX}", members=members))
    unit = '#include <torch/extension.h>\n#include "own.h"\nint f(torch::Tensor t) { return t.dim() + own; }\n'
    sdist = {
        "PKG-INFO": "Metadata-Version: 2.1\nRequires-Dist: torch\n",
        "csrc/a.cpp": unit,
        "csrc/b.cpp": "#include <torch/extension.h>\n",
        "csrc/c.cpp": "#include <torch/extension.h>\nstatic_assert(__cplusplus == 201703L);\n",
        "csrc/own.h": "static int own = 1;\n",
        "csrc/kernel.cu": "__global__ void k() {}\n",
    }
    index.add("transformer-engine-torch", "2.5.0", tar("transformer_engine_torch-2.5.0", sdist))
    with index.served() as url:
        outcome, _ = run(matrix, tmp_path, url, "te=2.5", "torch", kinds=("headers", "sources"))
        less, _ = run(matrix, tmp_path, url, "te=2.5", "torch", kinds=("sources",), cpp_only=True)
        assert (less.made, less.kept) == (0, 2)  # what was looked at with .cu files counts for less, too
        less, _ = run(matrix, tmp_path, url, "te=2.5", "torch=2.8", kinds=("sources",), cpp_only=True, again=True)
        assert less.made == 1
        whole, _ = run(matrix, tmp_path, url, "te=2.5", "torch", kinds=("sources",))
        assert (whole.made, whole.kept) == (1, 1)  # and not the other way round
    found = {(t.pair["torch"], t.kind): t for t in load_trials(tmp_path / "records")}
    assert {key: trial.verdict for key, trial in found.items()} == {
        ("2.9.0", "headers"): "passed",
        ("2.9.0", "sources"): "failed",
        ("2.8.0", "headers"): "passed",
        ("2.8.0", "sources"): "passed",
    }
    assert "csrc/a.cpp" in found["2.9.0", "sources"].first
    assert "has no member named" in found["2.9.0", "sources"].first
    assert found["2.8.0", "sources"].counts == {"units": 3, "failed": 0, "standard": 17, "cuda_files": 1}
    assert any("te 2.5.0 with torch 2.9.0: csrc/a.cpp" in text for text in outcome.contradictions)


@pytest.mark.parametrize(
    ("texts", "runs", "failing"),
    [
        (("int a;", "int b;", "int c;"), 2, ()),  # torch's headers, and all at once
        (("void f() { int TORCH_EXTENSION_NAME; }",) + 2 * ("class TORCH_EXTENSION_NAME {};",), 2, ()),  # its own each
        (("static int a;", "static int a;", "int c;"), 4, ()),  # the same name twice: a alone, and b with c
        (("int a;", "int b;", "int c = nothing;"), 7, ("c.cpp",)),  # precompiled, a b c, a, b c, b, c, and c once more
    ],
)
def test_files_that_do_not_pass_together_are_checked_alone(texts, runs, failing, tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/extension.h").write_text("#pragma once\n")
    units = [tmp_path / f"{name}.cpp" for name in "abc"]
    for unit, text in zip(units, texts, strict=True):
        unit.write_text(f"#include <torch/extension.h>\n{text}\n")
    commands = []
    run = sources.compile_with
    monkeypatch.setattr(sources, "compile_with", lambda command: commands.append(command) or run(command))
    with Precompiled(sources.compile_with) as kept:
        for again in range(2):  # a second component of the same flags finds torch's headers ready
            failed = sources._check_units(units, ["-std=c++17", f"-isystem{tmp_path}"], [], tmp_path, kept)
            assert [each.partition(":")[0] for each in failed] == list(failing)
            assert len(commands) == runs + again * (runs - 1)


def test_few_precompiled_headers_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(precompiled, "_MOST", 2)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/extension.h").write_text("#pragma once\n")
    with Precompiled(sources.compile_with) as kept:
        for name in "ABAC":
            _, folder, *_ = kept.flags("g++", [f"-I{tmp_path}", f"-D{name}"])
        place = Path(folder).parent
        assert len(list(place.rglob("*.gch"))) == 2
        assert not kept.flags("g++", ["-std=c++17"])  # no torch there: nothing is included
    assert not place.exists()


GLOBAL = "__attribute__((global))"
PROGRAMS = ("nvcc", "nvcc.profile", "cudafe++")
NVCC = Path("/usr/local/cuda/bin/nvcc")
"""A toolkit of CUDA 13, whose files a wheel of this index holds as PyPI's does."""


@pytest.mark.skipif(
    not all(NVCC.with_name(name).is_file() for name in PROGRAMS),
    reason=f"there is no {NVCC} here",
)
def test_cu_files_are_checked_by_the_nvcc_of_the_wheel(index, matrix, tmp_path):
    """A .cu file was counted and not looked at: one that calls what torch does not have passed."""
    cu13 = "nvidia/cu13"
    runtime = f"#pragma once\n#define __global__ {GLOBAL}\n"
    for name, version, members in (
        ("nvidia-cuda-runtime", "13.0.96", {f"{cu13}/include/cuda_runtime.h": runtime}),
        ("nvidia-cuda-nvcc", "13.0.88", {f"{cu13}/bin/{p}": NVCC.with_name(p).read_bytes() for p in PROGRAMS}),
        ("nvidia-cuda-cccl", "13.0.85", {}),
        ("nvidia-cuda-crt", "13.0.88", {}),
        ("nvidia-cuda-profiler-api", "13.0.85", {}),
    ):
        index.add(name, version, wheel(name, version, f"py3-none-{LINUX}", members=members))
    header = "#pragma once\nnamespace torch { struct Tensor { int dim(); }; }\n"
    for version, text in (("2.8.0", header), ("2.9.0", header.replace("dim", "ndim"))):
        members = {
            "torch/__init__.py": "",
            "torch/include/torch/extension.h": text,
            "torch/utils/cpp_extension.py": "flag = '-std=c++17'\n",
        }
        needs = ("nvidia-cuda-runtime==13.0.96",)
        index.add("torch", version, wheel("torch", version, f"cp311-cp311-{LINUX}", needs, members=members))
    kernel = "#include <torch/extension.h>\n__global__ void k(int* x) { *x = 1; }\n"
    sdist = {
        "PKG-INFO": "Metadata-Version: 2.1\nRequires-Dist: torch\n",
        "csrc/kernel.cu": kernel + "int f(torch::Tensor t) { return t.dim(); }\n",
    }
    index.add("transformer-engine-torch", "2.5.0", tar("transformer_engine_torch-2.5.0", sdist))
    sdist["csrc/a_submodule.cu"] = "#include <cutlass/cutlass.h>\n"
    index.add("transformer-engine-torch", "2.6.0", tar("transformer_engine_torch-2.6.0", sdist))
    with index.served() as url:
        run(matrix, tmp_path, url, "te", "torch", kinds=("sources",))
        files = Files(settings_of(tmp_path, url))
        file = files.wheel("nvidia-cuda-nvcc", "13.0.88")
        assert os.access(files.programs(file, ()) / cu13 / "bin" / "nvcc", os.X_OK)
        with pytest.raises(LockError, match="is not the file"):  # what is run is what the index states
            files.programs(dataclasses.replace(file, sha256="0" * 64), (f"{cu13}/bin/nvcc",))
        with pytest.raises(LockError, match="states no hash"):
            files.programs(dataclasses.replace(file, sha256=None), (f"{cu13}/bin/nvcc",))
        less, _ = run(matrix, tmp_path, url, "te", "torch", kinds=("sources",), cpp_only=True, again=True)
        kept = (tmp_path / "records" / "te.jsonl").read_text()
        run(matrix, tmp_path, url, "te", "torch", kinds=("sources",), again=True)
        assert (tmp_path / "records" / "te.jsonl").read_text() == kept  # what says the same of one day is not added
        assert (less.made, less.unasked) == (0, 4)  # without .cu files there is none to look at, and nothing has passed
    found = {tuple(t.pair.values()): t for t in load_trials(tmp_path / "records")}
    assert {key: trial.verdict for key, trial in found.items()} == {
        ("2.6.0", "2.9.0"): "failed",
        ("2.6.0", "2.8.0"): "undecided",
        ("2.5.0", "2.9.0"): "failed",
        ("2.5.0", "2.8.0"): "passed",
    }
    assert found["2.5.0", "2.9.0"].first.startswith("csrc/kernel.cu: ")
    assert found["2.5.0", "2.9.0"].first.endswith('class "torch::Tensor" has no member "dim"')
    assert "not decided by nvcc" in found["2.6.0", "2.8.0"].first
    counts = {"units": 0, "failed": 0, "standard": 17, "cuda_files": 1, "cuda_by_nvcc": 1}
    assert found["2.5.0", "2.8.0"].counts == counts
    assert found["2.6.0", "2.8.0"].counts == {**counts, "cuda_files": 2}


DRY = """#!/bin/sh
case "$*" in *--version*) echo "Cuda compilation tools, release 12.4, V12.4.131"; exit 0 ;; esac
headers=""
while [ $# -gt 0 ]; do
    case "$1" in --keep-dir) place=$2 ;; -isystem=*) headers="$headers -isystem ${1#*=}" ;; *.cu) unit=$1 ;; esac
    shift
done
echo "#\\$ g++ -E -x c++$headers $unit -o $place/k.cpp4.ii" >&2
echo "#\\$ cudafe++ $place/k.cpp4.ii" >&2
"""
"""An nvcc of two steps that knows no CUDA."""


def test_an_nvcc_of_this_machine_checks_cu_files_with_the_headers_of_its_own_release(
    index, matrix, tmp_path, monkeypatch
):
    runtime = "nvidia/cuda_runtime/include/cuda_runtime.h"
    for tool, version in itertools.product(
        ("runtime", "nvcc", "cccl", "profiler-api"), ("12.4.90", "12.5.90", "12.8.90")
    ):
        name = f"nvidia-cuda-{tool}-cu12"
        members = {runtime: f"#define MINOR {version[3]}\n"} if tool == "runtime" else {}
        index.add(name, version, wheel(name, version, f"py3-none-{LINUX}", members=members))
    members = {
        "torch/__init__.py": "",
        "torch/include/torch/extension.h": "",
        "torch/utils/cpp_extension.py": "flag = '-std=c++17'\n",
    }
    needs = ("nvidia-cuda-runtime-cu12==12.8.90",)
    index.add("torch", "2.8.0", wheel("torch", "2.8.0", f"cp311-cp311-{LINUX}", needs, members=members))
    asks = "#include <cuda_runtime.h>\nstatic_assert(MINOR == {});\n"
    sdist = {
        "PKG-INFO": "Metadata-Version: 2.1\nRequires-Dist: torch\n",
        "csrc/a.cpp": asks.format(8),
        "csrc/k.cu": asks.format(4),
    }
    index.add("transformer-engine-torch", "2.5.0", tar("transformer_engine_torch-2.5.0", sdist))
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(DRY)
    nvcc.chmod(0o755)
    nvcc.with_name("cudafe++").write_text('#!/bin/sh\nfor file; do :; done\nexec g++ -fsyntax-only -x c++ "$file"\n')
    nvcc.with_name("cudafe++").chmod(0o755)
    with index.served() as url:
        run(matrix, tmp_path, url, "te=2.5", "torch=2.8", kinds=("sources",), cpp_only=True)
        monkeypatch.setattr(sources, "_check_units", None)  # its C++ files have passed: .cu files alone are left
        monkeypatch.setattr(cuda, "clang", lambda: None)
        unread, _ = run(matrix, tmp_path, url, "te=2.5", "torch=2.8", kinds=("sources",))
        assert unread.made == 1  # the file was counted, and nothing here reads it
        run(matrix, tmp_path, url, "te=2.5", "torch=2.8", kinds=("sources",), nvccs=[own_nvcc(nvcc)])
        for others in ({}, {"cpp_only": True}):
            again, _ = run(matrix, tmp_path, url, "te=2.5", "torch=2.8", kinds=("sources",), **others)
            assert (again.made, again.kept) == (0, 1)  # what it looked at counts without it, too
    first, second, trial = load_trials(tmp_path / "records")
    assert first.command.endswith("--kind sources --cpp-only")
    assert second.counts == {"units": 1, "failed": 0, "standard": 17, "cuda_files": 1}
    assert trial.command.endswith("--kind sources --nvcc nvcc-12.4")
    assert (trial.verdict, trial.first) == ("passed", "")
    assert trial.counts == {"units": 1, "failed": 0, "standard": 17, "cuda_files": 1, "cuda_by_nvcc": 1}


def tar(stem, files):
    """Return (filename, bytes) of an sdist."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as archive:
        for path, text in files.items():
            info = tarfile.TarInfo(f"{stem}/{path}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return f"{stem}.tar.gz", body.getvalue()


def test_an_sdist_gives_its_python_and_what_it_asks_for(index, tmp_path):
    files = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
        "flash_attn.egg-info/requires.txt": "torch\neinops\n\n[test]\npytest\n",
        "flash_attn/__init__.py": "import torch\n",
        "flash_attn/weights.bin": "0000",
    }
    index.add("flash-attn", "2.8.3", tar("flash_attn-2.8.3", files))
    with index.served() as url:
        files = Files(settings_of(tmp_path, url))
        found = find(files, small_matrix(), "flash-attn", "2.8.3", cuda="12", trees={}, clones={}, submodules={})
    assert found.requirements == ("torch", "einops")
    assert (files.source(found.sdists[0]) / "flash_attn/__init__.py").read_text() == "import torch\n"
    assert not (files.source(found.sdists[0]) / "flash_attn/weights.bin").exists()


def test_the_command_lists_tries_and_answers_in_json(tmp_path):
    environ = {**os.environ, "HOME": str(tmp_path), "ENVBUILD_INDEX_URL": "http://127.0.0.1:9/simple"}
    command = [sys.executable, "-m", "envbuild", "matrix", "try", "te", "torch", "--json"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 8
    assert json.loads(done.stdout)["error"] == "host"
    done = subprocess.run([*command[:-3], "torch", "te"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
