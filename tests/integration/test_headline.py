"""The headline cell's own Dockerfile, byte for byte, with what is out of reach replaced by --build-context.

A trixie root with Debian's CUDA 12.4 stands in for nvidia/cuda, and PyPI's torch for the cu126 index: apex against torch
2.6.0+cu124 (nvcc and torch agree, as apex demands), Transformer Engine's extension against torch 2.7.1+cu126.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.engine.bootstrap import bootstrap_root
from envbuild.lock.index import download, files_of
from envbuild.lock.make import uv_wheel
from envbuild.lock.python import uv_executable
from envbuild.settings import load_settings

HEADLINE = ("--cuda", "12.6", "--te", "2.6", "--gpu", "h100", "--flash-attn-hopper", "auto")
PYTHON = "3.12"  # where the headline looks for its Python
OWN = "3.13"  # what trixie brings instead

ROOT = f"""FROM scratch
ADD rootfs.tar /
RUN sed -i 's/ main$/ main contrib non-free/' /etc/apt/sources.list && apt-get -q update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qy --no-install-recommends install python3 python3-dev g++ git make ccache nvidia-cuda-toolkit \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
 && ln -s python{OWN} /usr/bin/python{PYTHON} \
 && mkdir -p /usr/local/cuda/bin && ln -s /usr/bin/nvcc /usr/local/cuda/bin/nvcc \
 && ln -s /usr/include /usr/local/cuda/include && ln -s /usr/lib/x86_64-linux-gnu /usr/local/cuda/lib64
"""
BUILDER = """FROM envbuild-test:trixie-cuda
COPY tools /opt/tools
"""

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("room")]


@pytest.fixture(scope="module")
def settings():
    return load_settings()


@pytest.fixture(scope="module")
def headline(tmp_path_factory) -> Path:
    """The rendered Dockerfile in a folder of its own."""
    folder = tmp_path_factory.mktemp("headline")
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "render", *HEADLINE, "--unlocked"],
        capture_output=True,
        text=True,
        check=True,
    )
    (folder / "Dockerfile").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def builder(engine, settings, tmp_path_factory) -> str:
    """A builder image with Debian's nvcc 12.4 and the build tools."""
    folder = tmp_path_factory.mktemp("builder")
    bootstrap_root(
        suite="trixie",
        packages=(),
        epoch=1754697600,
        dest=folder / "rootfs.tar",
        log=folder / "log",
        mirror=settings.debian_mirror,
        security_mirror=settings.debian_security_mirror,
    )
    (folder / "Dockerfile").write_text(ROOT)
    build(folder, "envbuild-test:trixie-cuda")
    tools = tmp_path_factory.mktemp("tools")
    (tools / "Dockerfile").write_text(BUILDER)
    wheels(["setuptools<82", "wheel", "ninja", "packaging", "psutil", "einops"], tools / "tools")
    build(tools, "envbuild-test:headline-builder")
    yield "docker-image://envbuild-test:headline-builder"
    engine.image.remove(["envbuild-test:headline-builder", "envbuild-test:trixie-cuda"], force=True)


def build(folder: Path, tag: str) -> None:
    subprocess.run(
        ["docker", "buildx", "build", "--quiet", "--provenance=false", "--tag", tag, str(folder)],
        check=True,
        capture_output=True,
    )


def wheels(requirements: list[str], target: Path) -> None:
    command = [
        uv_executable(),
        "pip",
        "install",
        "--quiet",
        "--python-version",
        OWN,
        "--python-platform",
        "x86_64-manylinux_2_40",
        "--only-binary",
        ":all:",
    ]
    subprocess.run([*command, "--target", str(target), *requirements], check=True)


def environment(engine, folder: Path, requirement: str) -> str:
    """A torch stage: /opt/venv with a torch of PyPI, as the build's own recipe lays it out."""
    site = folder / "venv" / "lib" / f"python{OWN}" / "site-packages"
    wheels([requirement, "numpy"], site)
    (folder / "venv" / "bin").mkdir()
    (folder / "venv" / "bin" / "python").symlink_to(f"/usr/bin/python{OWN}")
    (folder / "venv" / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion_info = {OWN}\n"
    )
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY venv /opt/venv\n")
    tag = f"envbuild-test:{requirement.replace('==', '-')}"
    build(folder, tag)
    return tag


def wheel(headline: Path, component: str, contexts: dict[str, str], settings, folder: Path) -> dict:
    uv = uv_wheel()
    path, _ = download(settings, uv.url, uv.sha256, settings.cache_dir / "files")
    place = folder / "uv"
    place.mkdir()
    (place / "uv.whl").write_bytes(path.read_bytes())
    command = [
        "docker",
        "buildx",
        "build",
        "--progress=plain",
        "--target",
        f"wheel-{component}",
        "--output",
        f"type=local,dest={folder / 'out'}",
    ]
    for name, source in (contexts | {"uv-wheel": str(place)}).items():
        command += ["--build-context", f"{name}={source}"]
    before = hashlib.sha256((headline / "Dockerfile").read_bytes()).hexdigest()
    done = subprocess.run([*command, str(headline)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    assert hashlib.sha256((headline / "Dockerfile").read_bytes()).hexdigest() == before
    return json.loads((folder / "out" / "record.json").read_text())


def test_a_linter_and_buildkits_check_find_nothing(headline, engine, tmp_path):
    done = subprocess.run(
        [str(Path(sys.executable).with_name("hadolint")), str(headline / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    command = [
        "docker",
        "buildx",
        "build",
        "--check",
        "--build-context",
        f"base={tmp_path}",
        "--build-context",
        f"devel={tmp_path}",
        str(headline),
    ]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert "no warnings found" in checked.stdout + checked.stderr


def test_apex_compiles_with_its_extensions(headline, builder, engine, settings, tmp_path):
    """Needs a clone of apex under the setting `sources` where GitHub is out of reach."""
    from envbuild.errors import HostError
    from envbuild.lock.inputs import TreeInput
    from envbuild.lock.sources import SourceStore

    store = SourceStore(settings=settings)
    wanted = TreeInput(
        name="apex",
        url="https://github.com/NVIDIA/apex.git",
        commit="e74a67bba3ee679f778670e17edc21639008ae0a",
        submodules=(),
    )
    try:
        source = store.checkout(store.pin(wanted))
    except HostError as error:
        pytest.skip(str(error))
    (tmp_path / "torch").mkdir()
    torch = environment(engine, tmp_path / "torch", "torch==2.6.0")
    contexts = {"runtime": builder, "builder": builder, "torch": f"docker-image://{torch}", "src-apex": str(source)}
    try:
        record = wheel(headline, "apex", contexts, settings, tmp_path)
    finally:
        engine.image.remove(torch, force=True)
    assert {
        "amp_C",
        "fused_layer_norm_cuda",
        "fused_weight_gradient_mlp_cuda",
        "scaled_upper_triang_masked_softmax_cuda",
    } <= set(record["extensions"])
    assert "cuda_12.4" in record["nvcc"]


def test_transformer_engines_extension_compiles(headline, builder, engine, settings, tmp_path):
    files = files_of(settings, "transformer-engine-torch")
    sdist = next(f for f in files if f.filename.endswith("-2.6.0.post1.tar.gz"))
    path, _ = download(settings, sdist.url, sdist.sha256, settings.cache_dir / "files")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "torch").mkdir()
    torch = environment(engine, tmp_path / "torch", "torch==2.7.1")
    contexts = {
        "runtime": builder,
        "builder": builder,
        "torch": f"docker-image://{torch}",
        "src-te": str(tmp_path / "src"),
    }
    try:
        record = wheel(headline, "te", contexts, settings, tmp_path)
    finally:
        engine.image.remove(torch, force=True)
    assert record["extensions"] == ["transformer_engine_torch"]
