"""The headline cell's own Dockerfile, byte for byte, with what is out of reach replaced by --build-context.

A trixie root with Debian's CUDA 12.4 stands in for nvidia/cuda, and PyPI's torch for the cu126 index: apex against torch
2.6.0+cu124 (nvcc and torch agree, as apex demands), Transformer Engine against torch 2.7.1+cu126: its extension from PyPI's sdist,
and all of it from git with its submodules.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from root_support import build_image, debian_tar

from envbuild.components.base import Tree
from envbuild.errors import HostError
from envbuild.lock.index import files_of
from envbuild.lock.make import uv_wheel
from envbuild.lock.python import uv_executable
from envbuild.lock.sources import SourceStore
from envbuild.net.download import download
from envbuild.settings import load_settings

HEADLINE = ("--cuda", "12.6", "--te", "2.6", "--gpu", "h100", "--flash-attn-hopper", "auto")
PYTHON = "3.12"  # where the headline looks for its Python
OWN = "3.13"  # what trixie has instead

ROOT = f"""FROM scratch
ADD rootfs.tar /
RUN sed -i 's/ main$/ main contrib non-free/' /etc/apt/sources.list && apt-get -q update \
 && DEBIAN_FRONTEND=noninteractive apt-get -qy --no-install-recommends install python3 python3-dev g++ git make ccache nvidia-cuda-toolkit \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin \
 && ln -s python{OWN} /usr/bin/python{PYTHON} \
 && mkdir -p /usr/local/cuda/bin && ln -s /usr/bin/nvcc /usr/local/cuda/bin/nvcc \
 && echo 'INCLUDES += -I/usr/local/cuda/include' >> /etc/nvcc.profile \
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
    """The rendered Dockerfile in its own folder."""
    return rendered(tmp_path_factory.mktemp("headline"))


def rendered(folder: Path, *more: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "render", *HEADLINE, *more, "--unlocked"],
        capture_output=True,
        text=True,
        check=True,
    )
    (folder / "Dockerfile").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def builder(engine, tmp_path_factory) -> str:
    """A builder image with Debian's nvcc 12.4 and the build tools."""
    folder = tmp_path_factory.mktemp("builder")
    debian_tar("trixie", folder, epoch=1754697600)
    (folder / "Dockerfile").write_text(ROOT)
    build_image(folder, "envbuild-test:trixie-cuda")
    tools = tmp_path_factory.mktemp("tools")
    (tools / "Dockerfile").write_text(BUILDER)
    wheels(["setuptools<82", "wheel", "ninja", "packaging", "psutil", "einops", "cmake", "pybind11"], tools / "tools")
    build_image(tools, "envbuild-test:headline-builder")
    yield "docker-image://envbuild-test:headline-builder"
    engine.image.remove(["envbuild-test:headline-builder", "envbuild-test:trixie-cuda"], force=True)


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
    build_image(folder, tag)
    return tag


def checkout(settings, wanted: Tree) -> Path:
    """The pinned tree with its submodules, or a skip where neither its upstream nor a clone is at hand."""
    store = SourceStore(settings=settings)
    try:
        return store.checkout(store.pin(wanted))
    except HostError as error:
        pytest.skip(str(error))


@pytest.fixture
def wheel(builder, engine, settings, tmp_path) -> Callable[[Path, str, Path, str], dict]:
    """Compile a component's stage of a Dockerfile from a source, against a torch of PyPI; return the wheel's record."""

    def compiled(dockerfile: Path, component: str, source: Path, requirement: str) -> dict:
        (tmp_path / "torch").mkdir()
        torch = environment(engine, tmp_path / "torch", requirement)
        contexts = {"runtime": builder, "builder": builder, "torch": f"docker-image://{torch}"}
        try:
            return wheel_of(dockerfile, component, contexts | {f"src-{component}": str(source)}, settings, tmp_path)
        finally:
            engine.image.remove(torch, force=True)

    return compiled


def wheel_of(headline: Path, component: str, contexts: dict[str, str], settings, folder: Path) -> dict:
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


def test_apex_compiles_with_its_extensions(headline, wheel, settings):
    """Needs a clone of apex under the setting `sources` where GitHub is out of reach."""
    wanted = Tree(
        name="apex",
        url="https://github.com/NVIDIA/apex.git",
        commit="e74a67bba3ee679f778670e17edc21639008ae0a",
        submodules=(),
    )
    record = wheel(headline, "apex", checkout(settings, wanted), "torch==2.6.0")
    assert {
        "amp_C",
        "fused_layer_norm_cuda",
        "fused_weight_gradient_mlp_cuda",
        "scaled_upper_triang_masked_softmax_cuda",
    } <= set(record["extensions"])
    assert "cuda_12.4" in record["nvcc"]


def test_transformer_engines_extension_compiles(headline, wheel, settings, tmp_path):
    files = files_of(settings, "transformer-engine-torch")
    sdist = next(f for f in files if f.filename.endswith("-2.6.0.post1.tar.gz"))
    path, _ = download(settings, sdist.url, sdist.sha256, settings.cache_dir / "files")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / path.name).write_bytes(path.read_bytes())
    record = wheel(headline, "te", tmp_path / "src", "torch==2.7.1")
    assert record["extensions"] == ["transformer_engine_torch"]


def test_transformer_engine_compiles_from_git_with_its_submodules(wheel, settings, tmp_path):
    """Its core library too. Needs clones of TransformerEngine, cudnn-frontend and googletest where GitHub is out of reach."""
    wanted = Tree(
        name="te",
        url="https://github.com/NVIDIA/TransformerEngine.git",
        commit="c90a720765bc01ebb5ba1f70a7ce2d16b2e46d77",
    )
    source = checkout(settings, wanted)
    (tmp_path / "dockerfile").mkdir()
    from_git = rendered(tmp_path / "dockerfile", "--source", "te=git")
    assert f"{wanted.url}#{wanted.commit}" in (from_git / "Dockerfile").read_text()
    record = wheel(from_git, "te", source, "torch==2.7.1")
    assert set(record["extensions"]) == {"libtransformer_engine", "transformer_engine_torch"}
    assert record["wheel"].startswith("transformer_engine-2.6.0")
    assert "cuda_12.4" in record["nvcc"]
