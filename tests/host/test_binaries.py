"""What is wrong with binaries, each fault compiled for real into a small root, next to one that is as it should be."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
import zipfile

import pytest
from binary_root import C10, LIBRARIES, MODULE, SITE, TAG, USES_TORCH, Root, cuda_library, good_root
from click.testing import CliRunner

from envbuild.cli.verify import audit as command
from envbuild.errors import AuditError, UsageError
from envbuild.verify.binaries.elf import Binary
from envbuild.verify.binaries.examine import examine
from envbuild.verify.binaries.files import Files, read_folder
from envbuild.verify.binaries.image import binary_checks, reader
from envbuild.verify.binaries.local import audit_local, local_path
from envbuild.verify.binaries.process import RootExpectation
from envbuild.verify.installed import read_tree

C10_LIBRARY = f"{SITE}/torch/lib/libc10.so"
CUDNN = f"{SITE}/nvidia/cudnn/lib"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Root:
    return good_root(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def root(sound, tmp_path) -> Root:
    return Root(shutil.copytree(sound.folder, tmp_path / "root", symlinks=True))


def only(root: Root, check: str, **asked) -> str:
    """Return what the one check that failed says."""
    found = root.defects(**asked)
    assert list(found) == [check], found
    return found[check]


def test_a_sound_root_has_no_defect(sound):
    found = sound.examine(sms=(90,), extensions={"apex": ("amp_C",)})
    assert {name: each.text for name, each in found.items() if each.verdict == "failed"} == {}
    assert "2 extension modules" in found["libraries"].text
    assert found["libraries opened by name"].verdict == "unproven"  # cuDNN 9.20 names what it goes on without
    assert "tensor_ir" in found["libraries opened by name"].text
    assert {name for name, each in found.items() if each.verdict == "unproven"} == {
        "libraries opened by name",
        "GPU code",
    }


def test_an_extension_against_another_torch(root):
    other = USES_TORCH + "namespace c10 { long streams(long); }\nlong more() { return c10::streams(1); }\n"
    root.module("fused", other, needs=(C10_LIBRARY,))
    text = only(root, "symbols")
    assert (
        f"/{SITE}/fused.{TAG}.so was compiled against another torch: it needs a symbol that this one does not define"
        in text
    )
    assert "c10::streams" in text


def test_a_symbol_that_nothing_defines(root):
    root.module("fused", 'extern "C" int nvte_absent(); int used() { return nvte_absent(); }\n')
    assert "needs a symbol that nothing defines: nvte_absent" in only(root, "symbols")


def test_a_weak_symbol_may_stay_without_a_definition(root):
    source = 'extern "C" int absent() __attribute__((weak)); int used() { return absent ? absent() : 0; }\n'
    root.module("fused", source)
    assert root.defects() == {}


def test_libcudart_of_cuda_12_under_cuda_13(root):
    cuda_library(root, "libcudart.so.12", "libcudart.so.12", version="12.8")
    root.module("fused", USES_TORCH, needs=(C10_LIBRARY, "libcudart.so.12"))
    (root / "libcudart.so.12").unlink()
    text = only(root, "libraries")
    assert "needs libcudart.so.12, which is nowhere (torch has libcudart.so.13)" in text


def test_another_runtime_next_to_torchs(root):
    other = f"{SITE}/nvidia/cuda_runtime/lib"
    cuda_library(root, f"{other}/libcudart.so.12", "libcudart.so.12", version="12.8")
    root.module("fused", USES_TORCH, needs=(C10_LIBRARY, f"{other}/libcudart.so.12"))
    assert f"needs libcudart.so.12, which it does not find: it is at /{other}/" in only(root, "libraries")
    path = "-Wl,-rpath,$ORIGIN/nvidia/cuda_runtime/lib"
    root.module("fused", USES_TORCH, path, needs=(C10_LIBRARY, f"{other}/libcudart.so.12"))
    assert "loads libcudart.so.12, torch has libcudart.so.13" in only(root, "copies of CUDA")


def test_a_library_of_the_driver_is_the_hosts(root):
    cuda_library(root, "libcuda.so.1", "libcuda.so.1", version="580")
    root.module("fused", USES_TORCH, needs=(C10_LIBRARY, "libcuda.so.1"))
    (root / "libcuda.so.1").unlink()
    found = root.examine()
    assert found["libraries"].verdict == "passed"
    assert "of the host: libcuda.so.1" in found["libraries"].text


def test_a_libc_that_is_too_old(root):
    (root / "map").write_text("GLIBC_2.99 { global: future_call; local: *; };\n")
    source = 'extern "C" int future_call() { return 0; }\n'
    version = f"-Wl,--version-script={root / 'map'}"
    root.compile("future/libc.so.6", source, version, "-nostdlib", soname="libc.so.6")
    use = 'extern "C" int future_call(); int used() { return future_call(); }\n'
    root.compile(f"{SITE}/fused.{TAG}.so", use + MODULE.format(name="fused"), "-nostdlib", needs=("future/libc.so.6",))
    shutil.rmtree(root / "future")
    found = root.defects()
    assert "needs GLIBC_2.99 of libc.so.6, which has up to GLIBC_2." in found["versions of symbols"]
    assert set(found) == {"versions of symbols", "symbols"}


def test_two_cudnns(root):
    cuda_library(root, f"{LIBRARIES}/libcudnn.so.9", "libcudnn.so.9", version="9.10")
    text = only(root, "copies of CUDA")
    assert f"libcudnn.so.9 is there twice: torch gets /{CUDNN}/libcudnn.so.9" in text
    assert f"also /{LIBRARIES}/libcudnn.so.9 (by the loader's own search)" in text
    assert root.defects(devel=True) == {}  # an image with a whole toolkit has both on purpose


def test_the_same_library_twice_is_no_conflict(root):
    shutil.copyfile(root / f"{CUDNN}/libcudnn.so.9", root / f"{LIBRARIES}/libcudnn.so.9")
    for name in ("libcudnn_ops.so.9", "libcudnn_graph.so.9", "libcudnn_engines_precompiled.so.9"):
        shutil.copyfile(root / f"{CUDNN}/{name}", root / f"{LIBRARIES}/{name}")
    assert root.defects() == {}


def test_a_copy_where_no_process_looks(root):
    cuda_library(root, "opt/nvidia/profiler/libcudnn.so.9", "libcudnn.so.9", version="9.10")
    assert root.defects() == {}


def test_library_path_comes_before_the_search_path_of_a_file(root):
    cuda_library(root, "usr/local/other/libcudnn.so.9", "libcudnn.so.9", version="9.10")
    assert root.defects() == {}
    text = only(root, "copies of CUDA", library_path=("/usr/local/other",))
    assert "torch gets /usr/local/other/libcudnn.so.9" in text


def test_cudnn_without_its_engine(root):
    (root / f"{CUDNN}/libcudnn_engines_precompiled.so.9").unlink()
    text = only(root, "libraries opened by name")
    assert f"/{CUDNN}/libcudnn_graph.so.9 opens libcudnn_engines_precompiled.so.9, which is nowhere" in text


def test_what_cudnn_goes_on_without_must_not_come_from_another_cudnn(root):
    name = "libcudnn_engines_tensor_ir.so.9"
    cuda_library(root, f"{LIBRARIES}/{name}", name, version="9.24")
    text = only(root, "libraries opened by name")
    assert f"gets /{LIBRARIES.removeprefix('usr/')}/{name}, which is of another set" in text


def test_nvrtc_without_its_builtins(root):
    (root / f"{SITE}/nvidia/cu13/lib/libnvrtc-builtins.so.13.0").unlink()
    assert "opens libnvrtc-builtins.so.13.0, which is nowhere" in only(root, "libraries opened by name")


def test_apex_without_its_extensions(root):
    root.write(f"{SITE}/apex/__init__.py", "")
    root.write(f"{SITE}/apex-0.1.dist-info/RECORD", "apex/__init__.py,,\n")
    wanted = {"apex": ("amp_C", "fused_layer_norm_cuda")}
    assert "apex is there without all its extension modules" in only(root, "extension modules", extensions=wanted)
    root.module("amp_C", USES_TORCH, needs=(C10_LIBRARY,))
    assert "apex is there without fused_layer_norm_cuda" in only(root, "extension modules", extensions=wanted)
    root.module("fused_layer_norm_cuda", USES_TORCH, needs=(C10_LIBRARY,))
    assert root.defects(extensions=wanted) == {}


@pytest.mark.parametrize("how", ["configured", "library path", "default folder", "search path"])
def test_a_stub_of_the_driver(root, how):
    stubs = "usr/local/cuda/lib64/stubs"
    cuda_library(root, f"{stubs}/libcuda.so", "libcuda.so.1", version="stub")
    assert root.defects() == {}  # a toolkit has it, to link with
    if how == "configured":
        root.write("etc/ld.so.conf.d/cuda.conf", f"/{stubs}\n")
    elif how == "default folder":
        shutil.copyfile(root / stubs / "libcuda.so", root / LIBRARIES / "libcuda.so.1")
    elif how == "search path":
        (root / stubs / "libcuda.so.1").symlink_to("libcuda.so")
        root.module("fused", "", f"-Wl,-rpath,/{stubs}", needs=(f"{stubs}/libcuda.so",))
    asked = {"library_path": (f"/{stubs}",)} if how == "library path" else {}
    assert "stub" in only(root, "stubs of the driver", **asked)


def test_a_search_path_of_the_build_machine(root):
    root.compile("tmp/build/libhelper.so", "int help() { return 0; }", soname="libhelper.so")
    root.module("fused", USES_TORCH, "-Wl,-rpath,/tmp/build", needs=(C10_LIBRARY, "tmp/build/libhelper.so"))
    shutil.rmtree(root / "tmp")
    found = root.defects()
    assert set(found) == {"libraries", "search paths"}
    assert (
        "searches /tmp/build, a folder of the machine that it was compiled on, and libhelper.so is nowhere else"
        in found["search paths"]
    )


def test_a_search_path_of_the_build_machine_that_nothing_depends_on(root):
    root.write(f"{SITE}/other-1.0.dist-info/RECORD", "")
    root.module("fused", USES_TORCH, "-Wl,-rpath,/tmp/build:$ORIGIN", needs=(C10_LIBRARY,))
    assert "fused" in only(root, "search paths")  # of no wheel, so it was compiled here, and its maker can correct it
    root.write(f"{SITE}/fused-1.0.dist-info/RECORD", f"fused.{TAG}.so,,\n")
    assert root.defects() == {}  # wheels of indexes have such paths: triton 3.7, torchvision 0.16
    assert "fused" in only(root, "search paths", compiled=frozenset({"fused"}))


def test_a_library_of_torchs_friends_is_not_torchs(root):
    """torchaudio 2.8 opens libtorchaudio.so by its path before it imports the module that needs it."""
    lib = f"{SITE}/torchaudio/lib"
    root.compile(f"{lib}/libtorchaudio.so", "int help() { return 0; }", soname="libtorchaudio.so")
    source = USES_TORCH + MODULE.format(name="_torchaudio")
    root.compile(f"{lib}/_torchaudio.so", source, needs=(C10_LIBRARY, f"{lib}/libtorchaudio.so"))
    root.write(f"{SITE}/torchaudio-2.8.dist-info/RECORD", "torchaudio/lib/_torchaudio.so,,\n")
    found = root.examine()["libraries"]
    assert (found.verdict, "it is at" in found.text) == ("unproven", True)


def test_a_library_that_a_wheel_of_an_index_does_not_contain(root):
    root.compile("libtbb.so.12", "int help() { return 0; }", soname="libtbb.so.12")
    root.module("pool", USES_TORCH, needs=(C10_LIBRARY, "libtbb.so.12"))
    (root / "libtbb.so.12").unlink()
    root.write(f"{SITE}/pool-1.0.dist-info/RECORD", f"pool.{TAG}.so,,\n")
    found = root.examine()["libraries"]
    assert (found.verdict, "needs libtbb.so.12, which is nowhere" in found.text) == ("unproven", True)
    assert "pool" in only(root, "libraries", compiled=frozenset({"pool"}))


def test_a_relative_search_path_leads_to_the_files_own_folder(root):
    root.compile(f"{SITE}/fused.libs/libhelper.so", "int help() { return 0; }", soname="libhelper.so")
    root.module(
        "fused", USES_TORCH, "-Wl,-rpath,$ORIGIN/fused.libs", needs=(C10_LIBRARY, f"{SITE}/fused.libs/libhelper.so")
    )
    assert root.defects() == {}
    shutil.move(root / f"{SITE}/fused.libs", root / f"{SITE}/gone.libs")
    assert "needs libhelper.so, which it does not find" in only(root, "libraries")


def test_the_abi_before_cxx11(root):
    root.module("fused", USES_TORCH, "-D_GLIBCXX_USE_CXX11_ABI=0", needs=(C10_LIBRARY,))
    text = only(root, "symbols")
    assert "has the C++ ABI before C++11, torch has the one of C++11: a symbol of torch that it does not define" in text


def test_a_torch_of_the_abi_before_cxx11(root):
    """The wheels of torch 2.6 and older: what has that ABI fits, and what has the newer one does not."""
    root.compile(C10_LIBRARY, C10, "-D_GLIBCXX_USE_CXX11_ABI=0", soname="libc10.so")
    (root / f"{SITE}/good.{TAG}.so").unlink()
    root.module("fused", USES_TORCH, "-D_GLIBCXX_USE_CXX11_ABI=0", needs=(C10_LIBRARY,))
    assert root.defects() == {}
    root.module("other", USES_TORCH, needs=(C10_LIBRARY,))
    assert "has the C++ ABI of C++11, torch has the one before C++11" in only(root, "symbols")


PRINTS = "#include <iostream>\nint used(int n) { std::cout << n << std::endl; return n; }\n"


def test_a_module_that_offers_a_copy_of_the_cxx_library(root):
    source = PRINTS + MODULE.format(name="helpers")
    root.compile(f"workspace/megatron/data/helpers.{TAG}.so", source, "-static-libstdc++")
    text = only(root, "C++ library")
    assert f"/workspace/megatron/data/helpers.{TAG}.so holds a copy of libstdc++ and offers it to all" in text
    assert "next to the libstdc++.so.6 of torch: link it with libstdc++.so.6" in text


@pytest.mark.parametrize("flags", [(), ("-static-libstdc++", "-Wl,--exclude-libs,ALL")])
def test_a_cxx_library_that_is_shared_or_hidden_is_no_defect(root, flags):
    root.module("helpers", PRINTS, *flags)
    assert root.examine()["C++ library"].verdict == "passed"


def test_a_copy_of_the_cxx_library_among_packages_with_torch(root):
    root.module("helpers", PRINTS, "-static-libstdc++")
    found = Root(root / SITE).defects()
    assert list(found) == ["C++ library"]
    assert "next to the libstdc++.so.6 of torch" in found["C++ library"]


def test_a_copy_of_the_cxx_library_without_torch_is_no_defect(root, tmp_path):
    alone = Root(tmp_path / "alone")
    alone.compile(f"helpers.{TAG}.so", PRINTS + MODULE.format(name="helpers"), "-static-libstdc++")
    assert alone.examine()["C++ library"].verdict == "unproven"


def test_a_copy_of_the_cxx_library_in_a_wheel_of_an_index_is_no_defect(root):
    root.module("theirs", PRINTS, "-static-libstdc++")
    root.write(f"{SITE}/theirs-1.0.dist-info/RECORD", f"theirs.{TAG}.so,,\n")
    assert root.examine()["C++ library"].verdict == "unproven"


@pytest.mark.parametrize("tag", ["cpython-310-x86_64-linux-gnu", "cpython-313t-x86_64-linux-gnu"])
def test_a_wrong_python_tag(root, tag):
    root.module("fused", USES_TORCH, needs=(C10_LIBRARY,), tag=tag)
    assert f"fused.{tag}.so is not for Python 3.12" in only(root, "Python's tags")
    root.module("fused", USES_TORCH, needs=(C10_LIBRARY,))
    assert root.defects() == {}  # a module for each Python


@pytest.mark.parametrize("tag", ["abi3", TAG])
def test_a_good_python_tag(root, tag):
    root.module("fused", USES_TORCH, needs=(C10_LIBRARY,), tag=tag)
    assert root.defects() == {}


def test_binaries_that_name_each_other_without_an_end_are_given_up(monkeypatch):
    """1000 modules and 1000 libraries that all need one another: a billion look-ups."""
    monkeypatch.setattr("envbuild.verify.binaries.loader._STEPS", 1_000_000)
    names = [f"lib{number}.so" for number in range(1000)]
    files = Files()
    for name in names:
        files.binaries[f"usr/lib/{name}"] = Binary(
            kind="library", machine="x86-64", size=1, soname=name, needed=tuple(names), wanted=((b"absent", ""),)
        )
    for number in range(1000):
        files.binaries[f"usr/lib/python3.12/lib-dynload/m{number}.so"] = Binary(
            kind="library",
            machine="x86-64",
            size=1,
            needed=tuple(names),
            offered=frozenset({f"PyInit_m{number}".encode()}),
        )
    begun = time.process_time()
    with pytest.raises(AuditError, match="name each other more than"):
        examine(files, RootExpectation())
    assert time.process_time() - begun < 20


def test_links_in_a_circle(root):
    (root / "usr/lib/a").symlink_to("b")
    (root / "usr/lib/b").symlink_to("a")
    root.write("etc/ld.so.conf.d/a.conf", "/usr/lib/a\ninclude /etc/ld.so.conf\n")
    assert root.defects() == {}


def test_a_stripped_library_is_read_by_its_segments(root):
    subprocess.run(["strip", str(root / f"{SITE}/good.{TAG}.so")], check=True)
    assert root.defects() == {}


# -- an image, a wheel, a folder --------------------------------------------------------------------------------------


def tar_of(root: Root) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.add(root.folder, ".")
    out.seek(0)
    return out


def test_an_images_files_say_what_a_folder_says(root):
    os.link(root / f"{SITE}/good.{TAG}.so", root / f"{SITE}/zlinked.{TAG}.so")
    root.module("fused", USES_TORCH, "-D_GLIBCXX_USE_CXX11_ABI=0", needs=(C10_LIBRARY,))
    with reader() as binaries:
        tree = read_tree(tar_of(root), binaries.take)
    assert examine(binaries.files, RootExpectation()) == examine(read_folder(root.folder), RootExpectation())
    assert tree.hashes == read_tree(tar_of(root)).hashes  # who reads after it has every byte
    body = (root / f"{SITE}/good.{TAG}.so").read_bytes()
    assert tree.hashes[f"{SITE}/good.{TAG}.so"] == hashlib.sha256(body).digest()
    facts = {
        "expected": {
            "components": {"apex": {"distribution": "apex", "extensions": ["amp_C"]}, "stack": {}},
            "cell": {"gpu": "sm_90", "cuda": "13.0"},
            "flavor": "runtime",
        },
        "built": {},
    }
    checks = binary_checks(binaries.files, facts, ["PATH=/bin", "LD_LIBRARY_PATH=/usr/local/other:"])
    assert {check.name for check in checks if check.verdict == "failed"} == {"symbols"}


def audit(*words: str):
    return CliRunner().invoke(command, list(words), catch_exceptions=True)


def test_the_command_takes_a_folder(root):
    done = audit(str(root.folder), "--gpu", "h100", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["defects"] == 0
    (root / f"{CUDNN}/libcudnn_ops.so.9").unlink()
    done = audit(f"{root.folder}/")
    assert isinstance(done.exception, AuditError)
    assert done.exception.exit_code == 6
    assert "libraries opened by name" in str(done.exception)


def wheel_of(root: Root, folder, name: str) -> str:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(root / f"{SITE}/fused.{TAG}.so", f"fused-1.0.data/platlib/fused.{TAG}.so")
        archive.writestr("fused-1.0.dist-info/RECORD", f"fused.{TAG}.so,,\n")
        archive.writestr("fused-1.0.dist-info/WHEEL", "Tag: cp312-cp312-linux_x86_64\n")
    return str(path)


def test_the_command_takes_a_wheel(root, tmp_path):
    root.module("fused", USES_TORCH, needs=(C10_LIBRARY,))
    good = wheel_of(root, tmp_path, "fused-1.0-cp312-cp312-linux_x86_64.whl")
    assert audit(good).exit_code == 0
    assert "is not for Python 3.10" in str(
        audit(wheel_of(root, tmp_path, "fused-1.0-cp310-cp310-linux_x86_64.whl")).exception
    )
    entropy = "#include <unistd.h>\nint more(void* p) { return getentropy(p, 1); }\n"  # new in glibc 2.25
    root.module("fused", USES_TORCH + entropy, needs=(C10_LIBRARY,))
    old = audit(wheel_of(root, tmp_path, "fused-1.0-cp312-cp312-manylinux2014_x86_64.whl")).exception
    assert "needs GLIBC_2.25, and its wheel says that 2.17 is enough" in str(old)
    assert audit(wheel_of(root, tmp_path, "fused-1.0-cp312-cp312-manylinux_2_28_x86_64.whl")).exception is None
    root.module("fused", USES_TORCH, "-Wl,-rpath,/root/build", needs=(C10_LIBRARY,))
    wheel_of(root, tmp_path, "fused-1.0-cp312-cp312-linux_x86_64.whl")
    assert "searches /root/build" in str(audit(good).exception)


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        (("./absent",), UsageError, "does not exist"),
        ((__file__,), UsageError, "is neither a wheel nor a folder"),
        (("{bad}",), AuditError, "cannot be read"),
        (("{folder}", "--gpu", "h1000"), UsageError, "h1000 is not a GPU of the matrix"),
        (("{folder}", "--deep"), UsageError, "a wheel or a folder has no lock"),
        (("some/image:tag", "--gpu", "h100"), UsageError, "an image is checked for its own cell's GPU"),
    ],
)
def test_what_the_command_does_not_take(tmp_path, words, error, text):
    (tmp_path / "bad.whl").write_bytes(b"PK")
    done = audit(*(word.format(bad=tmp_path / "bad.whl", folder=tmp_path) for word in words))
    assert isinstance(done.exception, error)
    assert text in str(done.exception)


def test_what_holds_no_binary_does_not_pass(tmp_path):
    with pytest.raises(UsageError, match="holds no binary, so there is nothing to check"):
        audit_local(tmp_path, (90,))
    with pytest.raises(UsageError, match="does not exist"):
        audit_local(local_path("nope.whl"))
    assert local_path("mine:1.whl") is None


def test_a_folder_is_never_left_by_a_link(root, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copyfile(root / f"{SITE}/good.{TAG}.so", outside / f"other.{TAG}.so")
    (root / f"{SITE}/other").symlink_to(outside)
    (root / f"{SITE}/self").symlink_to(root.folder)
    os.mkfifo(root / f"{SITE}/pipe.so")
    assert [path for path in read_folder(root.folder).binaries if "other." in path] == []
