"""PyPI's CUDA 13 toolchain, through the build's own stages: one kernel is compiled, and a failing compile is reported."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from command import image_names

from envbuild.cli.cell_options import asked_from
from envbuild.engine.build import Builder
from envbuild.engine.client import EngineClient
from envbuild.pipeline.locked import lock_for, renewed
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import plan_of

CELL = ("--cuda", "13.0", "--te", "2.12", "--apex", "none")

KERNEL = """
#include <torch/extension.h>
#if defined(__CUDACC__) && !defined(FETCHED)
#error compiled by another nvcc than the one that was given
#endif
__global__ void twice(float* x, long n) { long i = blockIdx.x * 256L + threadIdx.x; if (i < n) x[i] *= 2; }
void launch(torch::Tensor x) { twice<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), x.numel()); }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &launch); }
"""
# Some processes first, so that nvcc's own number, which its temporary files are named by, is never twice the same.
# What a setup.py would fetch is there, and the network is not.
SETUP = """
import os, random, socket, subprocess
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension
if os.path.exists("/run/envbuild/downloads"):
    os.environ["PYTORCH_NVCC"] = "/tmp/envbuild-downloads/own/nvcc/fetched-1/bin/nvcc"
    try:
        socket.create_connection(("deb.debian.org", 80), timeout=5)
    except OSError:
        pass
    else:
        raise SystemExit("a compile reaches the network")
for _ in range(random.randint(1, 99)):
    subprocess.run(["true"])
setup(name="one", version="1.0", ext_modules=[CUDAExtension("one_kernel", ["one.cu"], extra_compile_args={"nvcc": ["-lineinfo"]})], cmdclass={"build_ext": BuildExtension})
"""
STAGES = """
FROM builder AS build-one
ENV TORCH_CUDA_ARCH_LIST="9.0"
RUN --network=none --mount=type=bind,from=recipe,source=/build-wheel,target=/run/envbuild/recipe/build-wheel \
    --mount=type=bind,from=torch,source=/opt/venv,target=/opt/venv \
    --mount=type=bind,from=src-one,target=/src,rw \
    --mount=type=bind,from=src-fetched,target=/run/envbuild/downloads/own/nvcc \
    --mount=type=bind,from=uv,target=/run/envbuild/uv \
    sh /run/envbuild/recipe/build-wheel one one_kernel
FROM scratch AS wheel-one
COPY --from=build-one /out/ /
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"ENVBUILD_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


def program_at(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def built(engine, cache, tmp_path_factory):
    """The one-kernel wheel, built in the CUDA 13 cell's builder against the CUDA 13 cell's torch."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cache.items():
            patch.setenv(name, value)
        asked = asked_from({"axis_cuda": "13.0", "axis_te": "2.12", "axis_apex": "none"}, lock_file=None, sources=())
    wanted = (asked.settings, asked.matrix, asked.inputs)
    found = lock_for(*wanted, locked_only=False, note=lambda _: None)
    # as `image` does: the archive drops the packages of a committed lock with each security update
    locked, _ = renewed(*wanted, found[0], note=lambda _: None) or found
    plan = plan_of(asked.matrix, locked)
    client = EngineClient(asked.settings)
    builder = Builder(client=client, plan=plan, on_change=lambda *_: None, note=lambda _: None)
    context = folder / "context"
    context.mkdir()
    with (folder / "log").open("w") as log:
        builder.prepare(context, folder / "secrets", log)
    source = folder / "source"
    source.mkdir()
    (source / "one.cu").write_text(KERNEL)
    (source / "setup.py").write_text(SETUP)
    fetched = folder / "fetched"
    fetched.mkdir()
    program = program_at(folder / "nvcc", '#!/bin/sh\nexec /usr/local/cuda/bin/nvcc -DFETCHED "$@"\n')
    with tarfile.open(fetched / "fetched-1.tar.xz", "w:xz") as tar:
        tar.add(program, "fetched-1/bin/nvcc")
    (context / "Dockerfile").write_text(dockerfile(plan) + STAGES)
    command = [
        "docker",
        "buildx",
        "build",
        "--target",
        "wheel-one",
        "--progress=plain",
    ]
    for name, place in {**builder.contexts, "src-one": str(source), "src-fetched": str(fetched)}.items():
        command += ["--build-context", f"{name}={place}"]
    for name, place in builder.secrets.items():
        command += ["--secret", f"id={name},src={place}"]
    for output, more in (("out", ()), ("again", ("--no-cache-filter=wheel-one,build-one,torch,builder",))):
        done = subprocess.run(
            [*command, "--output", f"type=local,dest={folder / output}", *more, str(context)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
    return folder / "out"


def test_one_kernel_compiles_for_hopper(built):
    record = json.loads((built / "record.json").read_text())
    assert record["extensions"] == ["one_kernel"]
    assert "cuda_13.0" in record["nvcc"]
    assert record["gcc"].startswith("12.")


def test_the_wheel_holds_machine_code_for_the_cells_gpu(built):
    (wheel,) = built.glob("*.whl")
    body = subprocess.run(["unzip", "-p", str(wheel), "*.so"], capture_output=True, check=True).stdout
    assert b".nv_fatbin" in body
    assert b"sm_90" in body


def test_the_same_bytes_at_another_time(built):
    """Headers and source have other times, nvcc another process id, ccache nothing: the second build is made again."""
    first, again = (json.loads((folder / "record.json").read_text()) for folder in (built, built.parent / "again"))
    assert first == again


def test_a_failing_compile_names_stage_log_and_error(built, engine, cache, tmp_path):
    """The last stages of the same cell, with a source that does not compile."""
    folder = tmp_path / "broken-1.0"
    folder.mkdir()
    (folder / "setup.py").write_text(
        'import os\nos.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"\n' + SETUP.replace("one.cu", "bad.cu")
    )
    (folder / "bad.cu").write_text("__global__ void k() { this is no C++; }\n")
    with tarfile.open(tmp_path / "broken-1.0.tar.gz", "w:gz") as tar:
        tar.add(folder, arcname="broken-1.0")
    context = tmp_path / "context"
    context.mkdir()
    (tmp_path / "broken-1.0.tar.gz").rename(context / "broken-1.0.tar.gz")
    command = [sys.executable, "-m", "envbuild", "image", *CELL, "--tag", "envbuild-test:broken"]
    command += ["--build-context", f"src-te={context}"]
    for _ in range(2):
        done = subprocess.run(command, env=os.environ | cache, capture_output=True, text=True, check=False)
        if done.returncode != 8:  # a host did not answer: the message says to run it again
            break
    assert done.returncode == 5, done.stderr
    assert "stage build-te failed" in done.stderr, done.stderr
    assert "bad.cu" in done.stderr
    log = Path(done.stderr.split("the whole log is in ")[1].splitlines()[0])
    assert "bad.cu" in log.read_text()
    assert not image_names("envbuild-test:broken")
    assert not list((Path(cache["ENVBUILD_CACHE_DIR"]) / "wheels").glob("te-*"))
