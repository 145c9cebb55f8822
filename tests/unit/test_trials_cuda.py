"""What a front end prints of a .cu file decides only what torch's headers decide."""

import os
import re
from pathlib import Path

import pytest

from envbuild.curate.trials import cuda
from envbuild.curate.trials.cuda import FrontEnd, own_nvcc, own_nvccs, require_reads
from envbuild.curate.trials.kernels import KernelFile, check_kernels
from envbuild.curate.trials.known import Known
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

    program = Path("nvcc")
    includes = ()

    def __init__(self, root, *, says_where: bool) -> None:
        self.root = root
        self.known = Known()
        self.says_where = says_where
        self.runs = 0

    def errors(self, unit, flags, place, *, first=True):
        self.runs += 1
        found = []
        seen = set()
        for path, line in self.read(unit):
            if line == "broken":
                found.append(f"{path if self.says_where else place}:1: error: broken")
            if line.startswith("int ") and line in seen:
                name = line.removeprefix("int ").removesuffix("!")
                found.append(f'{path}:1: error: "own::{name}" has already been defined' if self.says_where else "twice")
            seen.add(line)
        text = "".join(f'# 1 "{path}" 1\n' for path, _ in self.read(unit))
        self.known.note_files(text.encode(), self.root)
        return "\n".join(found)

    def read(self, path, macros=None):
        macros = {} if macros is None else macros
        for line in path.read_text().splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "#define":
                macros.update([rest.split(" ")])
            elif kind == "#undef":
                macros.pop(rest)
            elif kind == "#include":
                yield from self.read(path.parent / line.split('"')[1], macros)
            else:
                yield path, f"int {macros.get(rest, rest)}" if kind == "int" else line

    def judge(self, text):
        return cuda.Checked("failed", text.splitlines()[0].rpartition(": ")[2])


@pytest.mark.parametrize(
    ("texts", "runs", "failed"),
    [
        # all at once
        (("int a", "int b", "int c", "int d"), (1, 1), ""),
        # a gets a number in three of them
        (("int a", "int b", "int a", "int a"), (2, 7), ""),
        # not by a number: a b, and the others by themselves
        (("int a!", "int b", "int a!", "int a!"), (5, 7), ""),
        # the three others at once, where the error says where
        (("int a", "broken", "int c", "int d"), (5, 8), "b"),
        # h.cuh has no guard, nor has the one that n.cuh includes
        (("int a", '#include "h.cuh"', '#include "h.cuh"', "int d"), (2, 4), ""),
        (("int a", '#include "n.cuh"', '#include "n.cuh"', "int d"), (2, 4), ""),
        # not by a number: a and d, and the others by themselves
        (("int a", '#include "x.cuh"', '#include "x.cuh"', "int d"), (5, 4), ""),
        # the last one defines what the first two define
        (("int a", "int b", "int c", '#include "a.cu"\n#include "b.cu"'), (2, 2), ""),
    ],
)
@pytest.mark.parametrize("says_where", [True, False])
def test_cu_files_are_checked_together_and_those_that_do_not_fit_alone(texts, runs, failed, says_where, tmp_path):
    units = [tmp_path / f"{name}.cu" for name in "abcd"]
    for unit, text in zip(units, texts, strict=True):
        unit.write_text(f"{text}\n")
    for name, text in (("h", "int h"), ("n", '#include "h.cuh"'), ("x", "int x!")):
        (tmp_path / f"{name}.cuh").write_text(f"{text}\n")
    reader = Reader(tmp_path, says_where=says_where)
    found = {path.stem: checked.verdict for path, checked in check_kernels(reader, units, ())}
    assert found == {name: "failed" if name == failed else "passed" for name in "abcd"}
    assert reader.runs == runs[not says_where]  # each group that fails is read with both sets of macros


def test_the_same_files_of_another_release_are_not_read_again(tmp_path):
    """Those that passed with others and those that did not: the answer is that of the first release."""
    readers = []
    for release, header in (("1", "int h\n"), ("2", "int h\n"), ("3", "int a\n")):
        root = tmp_path / release / "csrc"
        root.mkdir(parents=True)
        for name, text in (("a.cu", "int a"), ("b.cu", '#include "h.cuh"'), ("c.cu", "broken"), ("h.cuh", header)):
            (root / name).write_text(f"{text}\n")
        reader = Reader(root.parent, says_where=True)
        if readers:
            reader.known = readers[0].known
        found = dict(check_kernels(reader, [root / f"{name}.cu" for name in "abc"], [f"-I{root}"]))
        assert {path.name: checked.verdict for path, checked in found.items()} == {
            "a.cu": "passed",
            "b.cu": "passed",
            "c.cu": "failed",
        }
        assert all(path.is_relative_to(root) for path in found)
        readers.append(reader)
    assert [reader.runs > 0 for reader in readers] == [True, False, True]
    assert readers[2].runs == 4  # c at once by itself, with both sets of macros; a and b twice
    reader = Reader(tmp_path / "2", says_where=True)
    reader.known = readers[0].known
    assert len(list(check_kernels(reader, [tmp_path / "2/csrc/a.cu"], [f"-I{tmp_path / '2/csrc'}", "-DX"]))) == 1
    assert reader.runs == 1  # with other flags it is read


NVCC = """#!/bin/sh
for word; do
    case "$word" in *.cu) unit=$word ;; -isystem*) isystem="$isystem -isystem ${word#-isystem=}" ;; -I*) isystem="$isystem $word" ;; esac
    [ "$last" != --keep-dir ] || place=$word
    last=$word
done
echo "#\\$ g++ -E $isystem -x c++ $unit -o $place/k.cpp4.ii" >&2
echo "#\\$ cudafe++{option} --module_id_file_name $place/id $place/k.cpp4.ii" >&2
"""
CUDAFE = """#!/bin/sh
case "$*" in *--gen_module_id_file*) ;; *) echo "catastrophic error: cannot open module id file"; exit 4 ;; esac
for file; do :; done
says=$(LC_ALL=C g++ -fsyntax-only -x c++ "$file" 2>&1) && exit
echo "$says" | sed -E >&2 -e "s/[{]anonymous[}]/<unnamed>/g" \
    -e "s/redefinition of '[a-z]* ([^'(]*)/function \\"\\1\\" has already been defined '/" \
    -e "s/(conflicting declaration )?'using ([A-Za-z:]*) = void'/\\"\\2\\" has already been declared /"
exit 1
"""


@pytest.mark.parametrize("option", ["", " --gen_module_id_file"], ids=["11.8", "12.4"])
def test_the_steps_of_an_nvcc_of_cuda_11_and_12_read_a_file(headers, tmp_path, option):
    """In CUDA 11 a step that is left out here writes a file that cudafe++ wants."""
    fake_nvcc(tmp_path, option)
    front = FrontEnd("nvcc", tmp_path / "nvcc", (headers,))
    for text, passes in (("int f() { return 1; }\n", True), ("int f() { return nothing; }\n", False)):
        (tmp_path / "k.cu").write_text(text)
        assert (front.errors(tmp_path / "k.cu", (), tmp_path) == "") is passes
    with pytest.raises(HostError, match="does not read CUDA's own headers"):
        require_reads(front)


def fake_nvcc(folder, option=" --gen_module_id_file"):
    for name, text in (("nvcc", NVCC.replace("{option}", option)), ("cudafe++", CUDAFE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder / "nvcc"


@pytest.mark.parametrize("name", ["clash", "own::clash"])
def test_a_name_that_torch_defines_too_is_not_hidden(headers, tmp_path, name):
    """Two files that define it are read by themselves, and the one that includes torch's is refused."""
    *scope, last = name.split("::")
    define = f"namespace {scope[0]} {{ int {last}; }}\n" if scope else f"int {last};\n"
    (headers / "ATen" / "clash.h").write_text(f"#pragma once\n{define}")
    root = tmp_path / "source"
    root.mkdir()
    include = "#include <ATen/clash.h>\n"
    texts = {"a": f"{include}int a = sizeof({name});\n", "b": f"{include}{define}", "c": define, "d": define}
    for stem, text in texts.items():
        (root / f"{stem}.cu").write_text(text)
    front = FrontEnd("nvcc", fake_nvcc(tmp_path), (headers,), root)
    found = {path.stem: checked.verdict for path, checked in check_kernels(front, sorted(root.iterdir()), ())}
    assert found == {"a": "passed", "b": "undecided", "c": "passed", "d": "passed"}


ONE_BY_ONE = {
    "a-guarded-header-of-both": {
        "h.h": "#pragma once\ninline int shim() { return 1; }\n",
        "a.cu": '#include "h.h"\nint a() { return shim(); }\n',
        "b.cu": '#include "h.h"\nint shim() { return 2; }\n',
    },
    "another-overload-of-torch": {
        "a.cu": "#include <ATen/n.h>\nint ceil_div(at::T) { return 1; }\n",
        "b.cu": "#include <ATen/n.h>\nint ceil_div(at::T) { return 1; }\nint b(at::T t) { return ceil_div(t); }\n",
    },
    "a-name-of-another-scope": {
        "a.cu": "#include <ATen/n.h>\nnamespace { struct T {}; }\n",
        "b.cu": "#include <ATen/n.h>\nnamespace { struct T {}; }\nusing namespace at;\nT b;\n",
    },
    "a-macro-of-torch": {
        "a.cu": "int CHECK(float) { return 1; }\n",
        "b.cu": "#include <ATen/n.h>\nint CHECK(float) { return 1; }\n",
    },
    "a-condition": {
        "a.cu": "int shim(float) { return 1; }\n",
        "b.cu": "int shim(float) { return 2; }\n#ifndef shim\nint g() { return nothing; }\n#endif\n",
    },
    "a-macro-of-torch-that-one-file-takes-away": {
        "a.cu": "#include <ATen/n.h>\n#undef TX\n#define TX 2\n",
        "b.cu": "#include <ATen/n.h>\n#ifdef TX\nint g() { return nothing; }\n#endif\n",
    },
    "a-header-of-cuda-in-quotes": {
        "a.cu": '#include "cuda_x.h"\n// clash\n',
        "b.cu": "int clash;\n",
        "c.cu": '#include "cuda_x.h"\nint clash;\n',
    },
    "by-a-header-of-the-component": {
        "h.h": "#pragma once\n#include <ATen/n.h>\n",
        "a.cu": '#include "h.h"\n// clash\n',
        "b.cu": '#include "h.h"\nint clash;\n',
        "c.cu": "int clash;\n",
        "z.cu": '#include "gone.h"\n',
    },
    "a-header-that-is-read-twice": {
        "h.h": "int shim() { return 1; }\n",
        "a.cu": '#include "h.h"\n#include "h.h"\n',
        "b.cu": "int b;\n",
    },
}


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_files_that_are_read_together_get_the_answers_that_they_get_one_by_one(headers, tmp_path, name):
    text = "#define CHECK(x) int y\n#define TX 1\nnamespace at { struct T {}; int ceil_div(T); }\nextern float clash;\n"
    (headers / "ATen" / "n.h").write_text(f"#pragma once\n{text}")
    (headers / "cuda_x.h").write_text("#pragma once\nextern float clash;\n")
    root = tmp_path / "source"
    root.mkdir()
    for each, content in ONE_BY_ONE[name].items():
        (root / each).write_text(content)
    units = sorted(root.glob("*.cu"))
    program = fake_nvcc(tmp_path)
    alone = {}
    for unit in units:
        (found,) = check_kernels(FrontEnd("nvcc", program, (headers,), root), [unit], ())
        alone[unit] = found.checked.verdict
    assert set(alone.values()) != {"passed"}
    together = check_kernels(FrontEnd("nvcc", program, (headers,), root), units, ())
    assert {unit: checked.verdict for unit, checked in together} == alone


def test_a_name_that_a_newer_torch_has_is_not_hidden_by_what_an_older_one_took(headers, tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    (root / "h.h").write_text("#pragma once\n#include <ATen/n.h>\n")
    for each, content in (("a", "// clash"), ("b", "int clash;"), ("c", "int clash;")):
        (root / f"{each}.cu").write_text(f'#include "h.h"\n{content}\n')
    known = Known()
    program = fake_nvcc(tmp_path)
    for torch, verdict in (("1", "passed"), ("2", "undecided")):
        folder = tmp_path / torch
        (folder / "ATen").mkdir(parents=True)
        (folder / "ATen/n.h").write_text(f"#pragma once\n{'extern float clash;' if torch == '2' else ''}\n")
        found = check_kernels(FrontEnd("nvcc", program, (folder,), root, known), sorted(root.glob("*.cu")), ())
        assert {unit.stem: checked.verdict for unit, checked in found} == {"a": "passed", "b": verdict, "c": verdict}


def test_files_with_odd_names_are_read_by_themselves(headers, tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    names = ["a.cu", "k'q.cu", 'k"q.cu', "k\nq.cu", os.fsdecode(b"k\xff.cu")]
    for name in names:
        (root / name).write_text("int a;\n")
    front = FrontEnd("nvcc", fake_nvcc(tmp_path), (headers,), root)
    found = {unit.name: checked.verdict for unit, checked in check_kernels(front, [root / name for name in names], ())}
    assert found.keys() == set(names)
    assert found["a.cu"] == "passed"


@pytest.mark.parametrize("change", ["shadow", "asks-if-there", "gone", "other-flags", "other-nvcc", "other-torch"])
def test_the_answer_of_another_release_counts_only_where_nothing_differs(headers, tmp_path, change):
    known = Known()
    other = tmp_path / "torch2" / "include"
    other.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for release in ("1", "2"):
        root = tmp_path / release
        (root / "i0").mkdir(parents=True)
        (root / "i").mkdir()
        (root / "i/own.h").write_text("#define WELL 1\n")
        (root / "k.cu").write_text('#include <own.h>\n#if __has_include("x.h")\n#undef WELL\n#endif\nint k = WELL;\n')
        flags, program, includes = [f"-I{root}/i0", f"-I{root}/i"], fake_nvcc(tmp_path), headers
        if release == "2":
            if change == "shadow":
                (root / "i0/own.h").write_text("\n")
            elif change == "asks-if-there":
                (root / "x.h").write_text("\n")
            elif change == "gone":
                (root / "i/own.h").unlink()
            elif change == "other-flags":
                flags = [f"-I{root}/i0"]
            elif change == "other-nvcc":
                program = fake_nvcc(tmp_path / "bin")
                program.with_name("cudafe++").write_text("#!/bin/sh\necho no\nexit 1\n")
            else:
                includes = other
                (other / "own.h").write_text("int;;\n")
                flags = [f"-I{root}/i0"]
        front = FrontEnd("nvcc", program, (includes,), root, known)
        (found,) = check_kernels(front, [root / "k.cu"], flags)
        assert found.checked.verdict == ("undecided" if release == "2" else "passed")


def test_a_front_end_that_was_killed_is_asked_again(headers, tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    (root / "k.cu").write_text("int k;\n")
    program = fake_nvcc(tmp_path)
    well = program.with_name("cudafe++").read_text()
    known = Known()
    for text, verdict in (("#!/bin/sh\nkill -9 $$\n", "undecided"), (well, "passed")):
        program.with_name("cudafe++").write_text(text)
        (found,) = check_kernels(FrontEnd("nvcc", program, (headers,), root, known), [root / "k.cu"], ())
        assert found.checked.verdict == verdict


BOTH_DEFINE = [
    ("", '#include "shim.h"\nint a() { return shim(); }\n', '#include "shim.h"\nint b() { return shim(); }\n'),
    ("", "int shim(float) { return 1; }\n", "int shim(float) { return 2; }\n"),
    ("", "namespace { struct Add {}; }\n", "namespace { struct Add { Add(int); }; }\n"),
    ("nothing", '#include "shim.h"\nint a() { return shim(); }\n', '#include "shim.h"\nint b() { return nothing; }\n'),
]


@pytest.mark.parametrize(("wrong", "first", "second"), BOTH_DEFINE)
def test_a_name_that_two_files_define_does_not_keep_them_apart(headers, tmp_path, wrong, first, second):
    root = tmp_path / "source"
    root.mkdir()
    (root / "shim.h").write_text("int shim() { return 1; }\n")
    units = [root / "a.cu", root / "b.cu"]
    for unit, text in zip(units, (first, second), strict=True):
        unit.write_text(text)
    front = FrontEnd("nvcc", fake_nvcc(tmp_path), (headers,), root)
    found = {path.stem: checked for path, checked in check_kernels(front, units, ())}
    assert found["a"].verdict == "passed"
    assert found["b"].verdict == ("undecided" if wrong else "passed")
    assert wrong in found["b"].first
    if not wrong:
        assert len(front.known.answers) == 2  # as they are, and with numbers
        known = FrontEnd("nvcc", front.program, (headers,), root, front.known)
        (root / "c.cu").write_text("int c;\n")
        assert len(list(check_kernels(known, [*units, root / "c.cu"], ()))) == 3
        assert len(front.known.answers) == 3  # the names are known: one run is enough


def test_an_answer_of_another_release_names_the_files_of_this_one(headers, tmp_path):
    nvcc = fake_nvcc(tmp_path)
    known = Known()
    place = tmp_path / "place"
    place.mkdir()
    for release in ("1", "2"):
        root = tmp_path / release
        root.mkdir()
        (root / "k.cu").write_text("int f() { return nothing; }\n")
        text = FrontEnd("nvcc", nvcc, (headers,), root, known).errors(root / "k.cu", (), place)
        assert f"{root}/k.cu:1:" in text
    assert len(known.answers) == 1
    for text, kept in (("int k;\n", 1), ('#include "gone.h"\n', 0)):
        (root / "k.cu").write_text(text)
        known.start()
        known.note_files(f'# 1 "{root}/k.cu"\n'.encode(), root)
        FrontEnd("nvcc", nvcc, (headers,), root, known).errors(root / "k.cu", (), place)
        known.keep((text,), root, {"k.cu": cuda.Checked("passed")})
        assert len(known.same((text,), root)) == kept  # which files it would have read is not known


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
        def errors(self, unit, flags, place, *, first=True):
            if unit not in units:
                raise HostError("nvcc did not end within 1800 s")
            return super().errors(unit, flags, place, first=first)

    found = check_kernels(Slow(tmp_path, says_where=True), units, ())
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


@pytest.mark.parametrize(
    ("says", "first"),
    [
        ("exit 0", "the steps of this nvcc are not known"),
        (  # nvcc 11.8 knows no C++20
            "echo \"nvcc fatal   : Value 'c++20' is not defined for option 'std'\" >&2; exit 1",
            "Value 'c++20' is not defined for option 'std'",
        ),
    ],
)
def test_an_nvcc_that_says_no_steps_decides_nothing(headers, tmp_path, says, first):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{says}\n")
    nvcc.chmod(0o755)
    front = FrontEnd("nvcc", nvcc, (headers,))
    text = front.errors(tmp_path / "k.cu", (), tmp_path)
    assert front.judge(text) == ("undecided", f"nvcc: {first}")


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
