"""What nvcc names after its own process, and the recipe that keeps that out of wheels (dockerfiles/recipe/build-templates)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from envbuild.paths import data_dir

RECIPE = data_dir("dockerfiles") / "recipe" / "build-templates"
# an internal, which needs a name of its file, in a file with nothing but templates, as flash-attention has hundreds
KERNEL = """
namespace { __device__ int calls; }
template <class T> __global__ void kernel(T *to) { *to = static_cast<T>(atomicAdd(&calls, 1)); }
template <class T> void run(T *to) { kernel<T><<<1, 1>>>(to); }
template void run<NUMBER>(NUMBER *);
"""
COMPILE = """
set -eu
for type in int float; do
    $COMPILER -DNUMBER=$type -arch=sm_90 -Xcompiler -fPIC -c "$SOURCE/$type.cu" -o "$OUT/$type.o"
done
g++ -shared -Wl,--strip-all "$OUT/int.o" "$OUT/float.o" -o "$OUT/module.so"
echo "compiled $1 for $2"
"""


@pytest.fixture
def scripts(tmp_path) -> Path:
    """The recipe next to a script that compiles, as those of an image lie."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "build-templates").write_text(RECIPE.read_text().replace("/tmp/", f"{tmp_path}/tmp/"))
    (folder / "build-for-sm").write_text(COMPILE)
    return folder


def compiled(scripts: Path, name: str, *words: str, compiler: str) -> bytes:
    """Run one of the scripts with these words and return the module that it linked."""
    source, out = scripts.parent / "source", scripts.parent / name
    for folder in (source, out):
        folder.mkdir(exist_ok=True)
    for kind in ("int", "float"):
        (source / f"{kind}.cu").write_text(KERNEL)
    env = {"PATH": os.environ["PATH"], "SOURCE": str(source), "OUT": str(out), "COMPILER": compiler}
    done = subprocess.run(["sh", scripts / words[0], *words[1:]], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled 90 for some-wheel\n"
    return (out / "module.so").read_bytes()


def test_two_compiles_of_nothing_but_templates_give_the_same_bytes(scripts):
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc on this host")
    alone = ("build-for-sm", "90", "some-wheel")
    assert compiled(scripts, "a", *alone, compiler=nvcc) != compiled(scripts, "b", *alone, compiler=nvcc)
    through = ("build-templates", *alone)
    first = compiled(scripts, "c", *through, compiler=nvcc)
    assert first == compiled(scripts, "d", *through, compiler=nvcc)
    assert b"envbuild_unit" not in first


def test_the_header_comes_before_the_flags_that_are_there(scripts):
    (scripts / "build-wheel").write_text('echo "$NVCC_PREPEND_FLAGS $CCACHE_NAMESPACE $*"\n')
    env = {"PATH": os.environ["PATH"], "NVCC_PREPEND_FLAGS": "-lineinfo"}
    command = ["sh", scripts / "build-templates", "build-wheel", "some-wheel", "its_cuda"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    header = f"{scripts.parent}/tmp/envbuild-templates/unit.h"
    assert done.stdout == f"-include {header} -lineinfo envbuild-templates some-wheel its_cuda\n"
    assert Path(header).is_file()


@pytest.mark.parametrize("ccache", [True, False])
def test_ccache_gets_the_short_flags_for_dependencies(scripts, ccache):
    """As build-wheel does it: ccache, where there is one, stands in front of nvcc when uv runs."""
    top = scripts.parent
    asked = "--generate-dependencies-with-compile --dependency-output x.d -O3 '-DX=a b' -c x.cu"
    programs = {
        "programs/nvcc": 'printf "%s\\n" "$@"',
        "programs/uv": f'echo "$*"; $PYTORCH_NVCC {asked}',
        "recipe/build-wheel": 'if command -v ccache >/dev/null; then export PYTORCH_NVCC="ccache $TOP/programs/nvcc"\n'
        'else export PYTORCH_NVCC="$TOP/programs/nvcc"; fi\n"$ENVBUILD_UV" build --wheel\n',
    }
    if ccache:
        programs["programs/ccache"] = 'echo ccache; exec "$@"'
    for name, text in programs.items():
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text(f"#!/bin/sh\n{text}\n")
        (top / name).chmod(0o755)
    # the host's own ccache is not looked for
    tools = top / "tools"
    tools.mkdir()
    for name in ("sh", "mkdir", "cat", "chmod", "dirname"):
        (tools / name).symlink_to(shutil.which(name))
    env = {"PATH": f"{top}/programs:{tools}", "TOP": str(top), "ENVBUILD_UV": f"{top}/programs/uv"}
    command = [tools / "sh", scripts / "build-templates", "build-wheel", "some-wheel", ""]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    given = ["-MD", "-MF"] if ccache else ["--generate-dependencies-with-compile", "--dependency-output"]
    began = ["build --wheel", *(["ccache"] if ccache else [])]
    assert done.stdout.splitlines() == [*began, given[0], given[1], "x.d", "-O3", "-DX=a b", "-c", "x.cu"]
