"""A small root for the audit of binaries: a real libc, and a Python, a torch and CUDA libraries compiled here."""

import shutil
import subprocess
from pathlib import Path

from envbuild.verify.binaries.examine import examine
from envbuild.verify.binaries.files import read_folder
from envbuild.verify.binaries.process import RootExpectation

SITE = "opt/venv/lib/python3.12/site-packages"
TAG = "cpython-312-x86_64-linux-gnu"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2")

C10 = """
#include <string>
namespace c10 { void warn(const std::string& text) { (void)text.size(); } int devices(int n) { return n; } }
"""
MODULE = 'extern "C" void* PyInit_{name}() {{ return nullptr; }}\n'
USES_TORCH = """
#include <string>
namespace c10 { void warn(const std::string&); int devices(int); }
extern "C" int PyLong_AsInt(void*);
int used() { c10::warn(std::string("x")); return c10::devices(PyLong_AsInt(nullptr)); }
"""


class Root:
    """A folder that is filled file by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __truediv__(self, path: str) -> Path:
        return self.folder / path

    def compile(
        self, path: str, source: str, *flags: str, needs: tuple[str, ...] = (), soname: str | None = None
    ) -> Path:
        """Compile a C++ library; `needs` are paths in this root that it is linked with."""
        out = self.folder / path
        out.parent.mkdir(parents=True, exist_ok=True)
        name = [f"-Wl,-soname,{soname}"] if soname else []
        subprocess.run(
            [
                *("g++", "-x", "c++", "-", "-shared", "-fPIC", "-O1", "-w", "-o", str(out), *name, *flags),
                *("-Wl,--no-as-needed", "-Wl,-x", "-x", "none", *(str(self.folder / each) for each in needs)),
            ],
            input=source,
            text=True,
            check=True,
            capture_output=True,
        )
        return out

    def module(self, name: str, source: str = "", *flags: str, needs: tuple[str, ...] = (), tag: str = TAG) -> Path:
        """Compile an extension module into site-packages."""
        return self.compile(f"{SITE}/{name}.{tag}.so", source + MODULE.format(name=name), *flags, needs=needs)

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        place = self.folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def examine(self, **asked):
        """Return the outcome of each check, by its name."""
        return {each.name: each for each in examine(read_folder(self.folder), RootExpectation(**asked))}

    def defects(self, **asked) -> dict[str, str]:
        """Return the checks that failed, and what they say."""
        return {name: each.text for name, each in self.examine(**asked).items() if each.verdict == "failed"}


def cuda_library(
    root: Root, path: str, name: str, *, version: str, opens: tuple[str, ...] = (), more: str = ""
) -> Path:
    """Compile something that has the name and the looks of one of NVIDIA's libraries."""
    stem = name.partition(".so")[0].removeprefix("lib").replace("-", "_")
    texts = ", ".join(f'"{each}"' for each in (*opens, version))
    body = f"static const char* const t[] = {{{texts}}}; volatile int i = 0; return t[i];"
    source = f'extern "C" {{ const char* {stem}_names() {{ {body} }} }}\n'
    return root.compile(path, source + more, "-Wl,-rpath,$ORIGIN", "-Wl,--build-id", soname=name)


def good_root(folder: Path) -> Root:
    """Make a root in which nothing is wrong."""
    root = Root(folder)
    for name in SYSTEM:
        found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        place = root / LIBRARIES / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(found.strip()).resolve(), place)
    (root / "lib").symlink_to("usr/lib")
    (root / "lib64").mkdir()
    (root / "lib64/ld-linux-x86-64.so.2").symlink_to("../lib/x86_64-linux-gnu/ld-linux-x86-64.so.2")
    root.write("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    root.write(
        "etc/ld.so.conf.d/x86_64-linux-gnu.conf",
        "# Multiarch support\n/usr/local/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu\n",
    )
    program = root / "usr/bin/python3.12"
    program.parent.mkdir(parents=True)
    source = 'extern "C" int PyLong_AsInt(void*) { return 0; }\nint main() { return 0; }\n'
    subprocess.run(["g++", "-x", "c++", "-", "-rdynamic", "-o", str(program)], input=source, text=True, check=True)
    (root / "opt/venv/bin").mkdir(parents=True)
    (root / "opt/venv/bin/python").symlink_to("/usr/bin/python3.12")
    lib, cu13, cudnn = f"{SITE}/torch/lib", f"{SITE}/nvidia/cu13/lib", f"{SITE}/nvidia/cudnn/lib"
    cuda_library(root, f"{cu13}/libcudart.so.13", "libcudart.so.13", version="13.0")
    cuda_library(root, f"{cu13}/libnvrtc.so.13", "libnvrtc.so.13", version="13.0", opens=("libnvrtc-builtins.so.13.0",))
    cuda_library(root, f"{cu13}/libnvrtc-builtins.so.13.0", "libnvrtc-builtins.so.13.0", version="13.0")
    opens = ("libcudnn_graph.so", "libcudnn_ops.so")
    cuda_library(root, f"{cudnn}/libcudnn.so.9", "libcudnn.so.9", version="9.20", opens=opens)
    cuda_library(root, f"{cudnn}/libcudnn_ops.so.9", "libcudnn_ops.so.9", version="9.20")
    opens = ("libcudnn_engines_precompiled.so", "libcudnn_engines_tensor_ir.so", "libnvrtc.so", "libnvrtc.so.%d")
    cuda_library(root, f"{cudnn}/libcudnn_graph.so.9", "libcudnn_graph.so.9", version="9.20", opens=opens)
    name = "libcudnn_engines_precompiled.so.9"
    cuda_library(root, f"{cudnn}/{name}", name, version="9.20")
    path = "-Wl,-rpath,$ORIGIN/../../nvidia/cu13/lib:$ORIGIN/../../nvidia/cudnn/lib:$ORIGIN"
    cuda = (f"{cu13}/libcudart.so.13", f"{cudnn}/libcudnn.so.9")
    root.compile(f"{lib}/libc10.so", C10, path, soname="libc10.so")
    root.compile(f"{lib}/libtorch_cuda.so", "int cuda() { return 0; }", path, needs=cuda, soname="libtorch_cuda.so")
    root.compile(f"{lib}/libtorch_global_deps.so", "", path, needs=cuda, soname="libtorch_global_deps.so")
    root.compile(
        f"{SITE}/torch/_C.{TAG}.so",
        MODULE.format(name="_C"),
        "-Wl,-rpath,$ORIGIN/lib",
        needs=(f"{lib}/libc10.so", f"{lib}/libtorch_cuda.so"),
    )
    # as torch's own tools link an extension: without a search path, since torch is imported first
    root.module("good", USES_TORCH, needs=(f"{lib}/libc10.so", *cuda))
    return root
