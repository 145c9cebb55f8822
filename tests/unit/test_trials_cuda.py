"""What a front end prints of a .cu file decides only what torch's headers decide."""

import re
from pathlib import Path

import pytest

from envbuild.curate.trials import cuda
from envbuild.curate.trials.cuda import FrontEnd, own_nvcc, own_nvccs, require_reads
from envbuild.curate.trials.kernels import KernelFile, check_kernels
from envbuild.curate.trials.sources import cuda_tools
from envbuild.errors import HostError, UsageError


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
    found = FrontEnd(name, Path("nvcc"), (headers,)).judge(text.format(torch=headers))
    assert found.verdict == verdict
    assert found.first


def test_a_file_that_one_set_of_macros_passes_has_passed(headers, tmp_path):
    """Builds take torch's macros against half operators back for some extensions, and not for others."""
    compiler = tmp_path / "clang++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *__CUDA_NO_HALF_OPERATORS__*) exit 0 ;; esac\necho boom >&2\nexit 1\n')
    compiler.chmod(0o755)
    unit = tmp_path / "k.cu"
    unit.write_text("")
    front = FrontEnd("clang", compiler, (headers,))
    assert list(check_kernels(front, [unit], ())) == [KernelFile(unit, ("passed", ""))]
    compiler.write_text("#!/bin/sh\necho boom >&2\nexit 1\n")
    assert list(check_kernels(front, [unit], ())) == [KernelFile(unit, ("undecided", "clang: boom"))]


class Reader:
    """A front end that refuses two definitions of a name, and says where the second one is; it counts its runs."""

    def __init__(self, *, says_where: bool) -> None:
        self.says_where = says_where
        self.runs = 0

    def errors(self, unit, flags, place, *, first):
        self.runs += 1
        found = []
        seen = set()
        for path in self.read(unit):
            for line in path.read_text().splitlines():
                if line == "broken":
                    found.append(f"{path if self.says_where else place}:1: error: broken")
                if line.startswith("int ") and line in seen:
                    found.append(f"{path}:1: error: {line} has already been defined" if self.says_where else "twice")
                seen.add(line)
        return "\n".join(found)

    def read(self, path):
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                yield from self.read(path.parent / line.split('"')[1])
        yield path

    def judge(self, text):
        return cuda.Checked("failed", text.splitlines()[0].rpartition(": ")[2])


@pytest.mark.parametrize(
    ("texts", "runs", "failed"),
    [
        (("int a", "int b", "int c", "int d"), (1, 1), ""),  # all at once
        (("int a", "int b", "int a", "int a"), (7, 7), ""),  # a b, and the two others by themselves
        (("int a", "broken", "int c", "int d"), (5, 8), "b"),  # the three others at once, where the error says where
        (("int a", '#include "h.cuh"', '#include "h.cuh"', "int d"), (5, 4), ""),  # one by one: h.cuh has no guard
        (("int a", "int b", "int c", '#include "a.cu"\n#include "b.cu"'), (2, 2), ""),  # it defines what those define
    ],
)
@pytest.mark.parametrize("says_where", [True, False])
def test_cu_files_are_checked_together_and_those_that_do_not_fit_alone(texts, runs, failed, says_where, tmp_path):
    units = [tmp_path / f"{name}.cu" for name in "abcd"]
    for unit, text in zip(units, texts, strict=True):
        unit.write_text(f"{text}\n")
    (tmp_path / "h.cuh").write_text("int h\n")
    reader = Reader(says_where=says_where)
    found = {path.stem: checked.verdict for path, checked in check_kernels(reader, units, ())}
    assert found == {name: "failed" if name == failed else "passed" for name in "abcd"}
    assert reader.runs == runs[not says_where]  # each group that fails is read with both sets of macros


NVCC = """#!/bin/sh
for word; do
    case "$word" in *.cu) unit=$word ;; esac
    [ "$last" != --keep-dir ] || place=$word
    last=$word
done
echo "#\\$ g++ -E -x c++ $unit -o $place/k.cpp4.ii" >&2
echo "#\\$ cudafe++{option} --module_id_file_name $place/id $place/k.cpp4.ii" >&2
"""
CUDAFE = """#!/bin/sh
case "$*" in *--gen_module_id_file*) ;; *) echo "catastrophic error: cannot open module id file"; exit 4 ;; esac
for file; do :; done
exec g++ -fsyntax-only -x c++ "$file"
"""


@pytest.mark.parametrize("option", ["", " --gen_module_id_file"], ids=["11.8", "12.4"])
def test_the_steps_of_an_nvcc_of_cuda_11_and_12_read_a_file(headers, tmp_path, option):
    """In CUDA 11 a step that is left out here writes a file that cudafe++ wants."""
    for name, text in (("nvcc", NVCC.replace("{option}", option)), ("cudafe++", CUDAFE)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    front = FrontEnd("nvcc", tmp_path / "nvcc", (headers,))
    for text, passes in (("int f() { return 1; }\n", True), ("int f() { return nothing; }\n", False)):
        (tmp_path / "k.cu").write_text(text)
        assert (front.errors(tmp_path / "k.cu", (), tmp_path) == "") is passes
    with pytest.raises(HostError, match="does not read CUDA's own headers"):
        require_reads(front)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("#define CHECK(x)\n", "#ifndef CHECK\n"),
        ("#ifndef K_CU\n#define K_CU\n#endif\n", "#ifndef K_CU\n#define K_CU\n"),
    ],
)
def test_what_one_cu_file_defines_hides_nothing_of_the_next(headers, tmp_path, first, second):
    compiler = tmp_path / "clang++"
    compiler.write_text(
        '#!/bin/sh\nfor file; do case "$file" in *.cu) exec g++ -x c++ -fsyntax-only "$file" ;; esac; done\n'
    )
    compiler.chmod(0o755)
    units = [tmp_path / "a.cu", tmp_path / "b.cu"]
    units[0].write_text(first)
    units[1].write_text(f"{second}int f() {{ return nothing; }}\n#endif\n")
    front = FrontEnd("clang", compiler, (headers,))
    found = {path.stem: checked.verdict for path, checked in check_kernels(front, units, ())}
    assert found == {"a": "passed", "b": "undecided"}


def test_a_group_that_does_not_end_is_read_in_parts(tmp_path):
    units = [tmp_path / f"{name}.cu" for name in "abc"]
    for unit in units:
        unit.write_text("")

    class Slow(Reader):
        def errors(self, unit, flags, place, *, first):
            if unit not in units:
                raise HostError("nvcc did not end within 1800 s")
            return super().errors(unit, flags, place, first=first)

    found = check_kernels(Slow(says_where=True), units, ())
    assert sorted((path.stem, checked.verdict) for path, checked in found) == [(name, "passed") for name in "abc"]


def test_an_nvcc_is_known_by_its_release(tmp_path, monkeypatch):
    program = tmp_path / "nvcc"
    with pytest.raises(UsageError, match="is not an nvcc"):
        own_nvcc(program)
    program.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'\n")
    program.chmod(0o755)
    with pytest.raises(UsageError, match=r"is not an nvcc with cudafe\+\+"):
        own_nvcc(program)
    program.with_name("cudafe++").write_text("")
    own = own_nvcc(program)
    assert (own.release, own.major) == ("12.4", "12")
    link = tmp_path / "bin" / "nvcc"
    link.parent.mkdir()
    link.symlink_to(program)
    assert own_nvcc(link) == own
    monkeypatch.chdir(tmp_path)
    assert own_nvcc(Path("nvcc")) == own  # and not one of PATH
    with pytest.raises(UsageError, match="two are of one CUDA major version"):
        own_nvccs([program, link])
    for release in ("13.0", "11.7", "10.2"):
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
        with pytest.raises(UsageError, match=f"is nvcc {re.escape(release)}"):
            own_nvcc(program)


def test_an_nvcc_that_says_nothing_of_its_steps_decides_nothing(headers, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nexit 0\n")
    nvcc.chmod(0o755)
    front = FrontEnd("nvcc", nvcc, (headers,))
    text = front.errors(tmp_path / "k.cu", (), tmp_path)
    assert front.judge(text) == ("undecided", "nvcc: the steps of this nvcc are not known")


@pytest.mark.skipif(cuda.clang() is None, reason="there is no clang here")
def test_a_clang_without_cuda_s_headers_decides_nothing(headers, tmp_path):
    (headers / "cuda.h").write_text("#define CUDA_VERSION 12080\n")
    unit = tmp_path / "k.cu"
    unit.write_text("__global__ void k() {}\n")
    front = FrontEnd("clang", Path(cuda.clang()), (headers,))
    assert front.judge(front.errors(unit, (), tmp_path)).verdict == "undecided"


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


def test_an_nvcc_of_this_machine_reads_the_headers_of_its_own_release() -> None:
    asked = cuda_tools({"nvidia-cuda-runtime-cu12": "12.8.90"}, "12.4")
    tools = ("nvcc-cu12==12.4.*", "cccl-cu12==12.5.*", "profiler-api-cu12==12.4.*", "runtime-cu12==12.4.*")
    assert asked == tuple(f"nvidia-cuda-{tool}" for tool in tools)
