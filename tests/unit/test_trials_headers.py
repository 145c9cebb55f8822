"""Headers of torch that a component's C++ includes, looked up without a compiler."""

import pytest

from envbuild.components.base import HostSources
from envbuild.curate.trials.headers import (
    includes_of,
    kernels_of,
    required_standard,
    stated_flags,
    try_headers,
    without_asserts,
)

SOURCES = HostSources(folders=("csrc",), includes=("csrc",), flags_in=("setup.py", "tools/torch.py"))
TORCH = {"torch/include/ATen/ATen.h", "torch/include/torch/csrc/api/include/torch/torch.h"}
SETUP = """
import os
cxx_flags = ["-O3", "-std=c++17"]
if bool(int(os.getenv("WITH_EP", "1"))):
    cxx_flags.append("-DWITH_EP")
if bool(int(os.getenv("WITH_MPI", "0"))):
    cxx_flags.append("-DWITH_MPI")
if debug():
    cxx_flags.append("-DDEBUG")
def more():
    return ["-DALWAYS=1"]
"""


@pytest.fixture
def tree(tmp_path):
    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def test_the_flags_of_a_default_build(tree):
    folder = tree(setup_dot_py="import setuptools\n", tools__torch_dot_py=SETUP)
    assert stated_flags(folder, SOURCES) == (("-DWITH_EP", "-DALWAYS=1"), 17)
    assert stated_flags(tree(tools__torch_dot_py="def (:"), SOURCES) == ((), None)


@pytest.mark.parametrize(
    ("setup", "built"),
    [
        ('sources = ["csrc/a.cu", "csrc/b.cu"]  # "csrc/c.cu"\n# "csrc/c.cu",\n', ["a.cu", "b.cu"]),
        ('sources = ["csrc/a.cu", *(f"csrc/{n}.cu" for n in more)]\n', ["a.cu", "b.cu", "c.cu"]),
        ("def (:", ["a.cu", "b.cu", "c.cu"]),
    ],
)
def test_a_build_that_names_its_kernels_compiles_no_others(tree, setup, built):
    folder = tree(setup_dot_py=setup, csrc__a_dot_cu="", csrc__b_dot_cu="", csrc__c_dot_cu="", csrc__d_dot_cpp="")
    assert [path.name for path in kernels_of(folder, SOURCES, "2.8.0")] == built


@pytest.mark.parametrize(
    ("setup", "without"),
    [
        (b'flags = ["-O3", "-DNDEBUG"]\n', True),
        (b'flags = "-O3 -DNDEBUG"\n', True),
        (b'flags = ["-O3"]  # "-DNDEBUG"\n', False),
        (b'flags = {"cxx": ["-DNDEBUG"], "nvcc": ["-UNDEBUG"]}\n', False),
        ('flags = ["-DNDEBUG"]  # \xe9\n'.encode("latin-1"), False),  # it cannot be read
    ],
)
def test_asserts_are_left_out_where_the_build_says_so(tree, setup, without):
    folder = tree(setup_dot_py="")
    (folder / "setup.py").write_bytes(setup)
    assert without_asserts(folder, SOURCES) is without


def test_the_standard_of_cxx_files_is_the_one_that_their_function_states(tree):
    setup = 'def cxx_args():\n    return ["-std=c++17"]\ndef nvcc_args():\n    return ["-std=c++20"]\n'
    folder = tree(setup_dot_py=setup)
    assert stated_flags(folder, HostSources(folders=(), includes=())) == ((), 20)
    assert stated_flags(folder, HostSources(folders=(), includes=(), cxx_flags="cxx_args")) == ((), 17)
    assert stated_flags(folder, HostSources(folders=(), includes=(), cxx_flags="gone")) == ((), 20)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#include <ATen/ATen.h>", [(1, "ATen/ATen.h", True)]),
        ("\n  #  include <torch/torch.h> // why", [(2, "torch/torch.h", True)]),
        ('#include <vector>\n#include "torch/mine.h"', []),
        ("#ifdef WITH_EP\n#include <ATen/a.h>\n#endif\n#include <ATen/b.h>", [(2, "ATen/a.h", True), (4, "ATen/b.h", True)]),
        ("#ifdef OTHER\n#include <ATen/a.h>\n#else\n#include <ATen/b.h>\n#endif", [(2, "ATen/a.h", False), (4, "ATen/b.h", False)]),
        ("#ifndef WITH_EP\n#include <ATen/a.h>\n#else\n#include <ATen/b.h>\n#endif", [(4, "ATen/b.h", True)]),
        ("#ifndef MINE_H_\n#define MINE_H_\n#include <ATen/a.h>\n#endif", [(3, "ATen/a.h", True)]),
        ("#if TORCH_VERSION_MAJOR > 2\n#include <ATen/a.h>\n#endif", [(2, "ATen/a.h", False)]),
        ("#if defined(WITH_EP)\n#include <ATen/a.h>\n#elif X\n#include <ATen/b.h>\n#endif", [(2, "ATen/a.h", True)]),
        ("#ifdef OTHER\n#ifdef WITH_EP\n#include <ATen/a.h>\n#endif\n#endif", [(3, "ATen/a.h", False)]),
        ("#endif\n#else\n#include <ATen/a.h>", [(3, "ATen/a.h", True)]),
    ],
)  # fmt: skip
def test_what_is_included_and_whether_for_sure(text, found):
    assert list(includes_of(text, {"WITH_EP"})) == found


def test_a_header_that_is_not_in_the_wheel_fails_and_a_guarded_one_does_not(tree):
    folder = tree(
        tools__torch_dot_py=SETUP.replace("-std=c++17", "-O2"),
        csrc__a_dot_cpp="#include <ATen/ATen.h>\n#include <torch/torch.h>\n#ifdef WITH_EP\n#include <ATen/Gone.h>\n#endif\n",
        csrc__deep__b_dot_cuh="#ifdef OTHER\n#include <ATen/Other.h>\n#endif\n",
        csrc__notes_dot_txt="#include <ATen/Never.h>\n",
    )
    found = try_headers(folder, SOURCES, TORCH, 20)
    assert found.missing == ("csrc/a.cpp:4: <ATen/Gone.h>",)
    assert (found.files, found.present, found.guarded) == (2, 2, 1)


@pytest.mark.parametrize(("required", "fails"), [(None, False), (17, False), (20, True)])
def test_a_build_that_states_an_older_standard_than_torch_takes_fails(tree, required, fails):
    folder = tree(tools__torch_dot_py=SETUP, csrc__a_dot_cpp="#include <torch/torch.h>\n")
    reason = "setup.py states -std=c++17, and torch's ATen/ATen.h refuses less than C++20"
    assert try_headers(folder, SOURCES, TORCH, required).missing == ((reason,) if fails else ())


def test_headers_of_the_stable_abi_take_any_standard(tree):
    folder = tree(tools__torch_dot_py=SETUP, csrc__a_dot_cpp="#include <torch/csrc/stable/tensor.h>\n")
    assert try_headers(folder, SOURCES, {"torch/include/torch/csrc/stable/tensor.h"}, 20).missing == ()


@pytest.mark.parametrize(
    ("text", "standard"),
    [
        ("#if !defined(_MSC_VER) && __cplusplus < 202002L\n#error C++20 or later\n#endif", 20),
        ("#if __cplusplus < 201703L", 17),
        ("#pragma once", None),
    ],
)
def test_the_standard_that_torch_requires(text, standard):
    assert required_standard(text) == standard


@pytest.mark.parametrize(
    ("files", "torch", "missing"),
    [
        (("old", "new"), "2.8.0", ()),
        (("old", "new"), "2.9.0", ("csrc/new.cpp:1: <torch/stable.h>",)),
        (("old",), "2.9.0", ()),
    ],
)
def test_of_two_files_the_one_that_the_build_takes_with_this_torch_counts(tree, files, torch, missing):
    sources = HostSources(folders=("csrc",), includes=(), instead={"csrc/new.cpp": (">=2.9", "csrc/old.cpp")})
    texts = {"old": "#include <ATen/ATen.h>\n", "new": "#include <torch/stable.h>\n"}
    folder = tree(**{f"csrc__{name}_dot_cpp": texts[name] for name in files})
    assert try_headers(folder, sources, TORCH, None, torch=torch).missing == missing
