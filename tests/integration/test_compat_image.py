"""An image with cuda-compat on the real engine, with a package and drivers that are made up: which libcuda a process gets."""

import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import run
from root_support import build_image

pytestmark = pytest.mark.timeout(900)

FOLDER = "/usr/local/cuda-13.0/compat"
HOST = "/usr/lib/x86_64-linux-gnu"
OLD, NEW = "535.104.05", "580.178.04"
PROBE = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*version)(void) = library ? (int (*)(void))dlsym(library, "version") : 0;
    return printf("%d\n", version ? version() : 0) < 0;
}
"""


def compiled(folder: Path, name: str, source: str, *options: str) -> Path:
    (folder / "source.c").write_text(source)
    command = ["gcc", "-o", str(folder / name), str(folder / "source.c"), *options]
    subprocess.run(command, check=True, capture_output=True)
    return folder / name


def libcuda(folder: Path, name: str, version: int) -> Path:
    source = f"int version(void) {{ return {version}; }}\n"
    return compiled(folder, name, source, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")


@pytest.fixture(scope="module")
def image(engine, debian_root, tmp_path_factory) -> Iterator[str]:
    """The rendered stage `image` on a plain root, with a planted package."""
    folder = tmp_path_factory.mktemp("compat")
    tree, root = folder / "tree", folder / "root"
    (tree / FOLDER[1:]).mkdir(parents=True)
    libcuda(tree / FOLDER[1:], "libcuda.so.580.95.05", 13000)
    (tree / FOLDER[1:] / "source.c").unlink()
    (tree / FOLDER[1:] / "libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    (tree / "DEBIAN").mkdir()
    control = "Package: cuda-compat-13-0\nVersion: 580.95.05-1\nArchitecture: amd64\nMaintainer: x <x@example.org>\n"
    (tree / "DEBIAN/control").write_text(f"{control}Description: planted\n")
    (folder / "deb").mkdir()
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", str(tree), str(folder / "deb/compat.deb")],
        check=True,
        capture_output=True,
    )
    root.mkdir()
    (root / "rootfs.tar").write_bytes(debian_root.path.read_bytes())
    compiled(root, "probe", PROBE)
    (root / "python").write_text("#!/bin/sh\n")  # which byte-compiles nothing, as nothing here starts Python
    copies = "COPY probe /probe\nCOPY --chmod=755 python /usr/bin/python3.11\n"
    (root / "Dockerfile").write_text(f"FROM scratch\nADD rootfs.tar /\n{copies}RUN mkdir -p /opt/envbuild\n")
    base = build_image(root, f"envbuild-test:compat-{uuid.uuid4().hex[:8]}")
    rendered = run("render", "--cuda", "13.0", "--gpu", "h100", "--driver", OLD, "--unlocked")
    assert rendered.code == 0, rendered.err
    (folder / "uv").mkdir()
    (folder / "uv/uv").touch()  # the image's uv, which nothing starts here
    (folder / "build").mkdir()
    (folder / "build/Dockerfile").write_text(rendered.out)
    made = build_image(
        folder / "build", f"envbuild-test:compat-{uuid.uuid4().hex[:8]}", "--target", "image", "--load",
        "--build-context", f"env=docker-image://{base}", "--build-context", f"src-cuda-compat={folder / 'deb'}",
        "--build-context", f"uv={folder / 'uv'}",
    )  # fmt: skip
    yield made
    for name in (made, base):
        engine.image.remove(name, force=True)


@pytest.fixture
def mounts(tmp_path):
    """Flags that give a container a driver as the container toolkit does: its libcuda, by version and by soname."""
    library = libcuda(tmp_path, "libcuda", 12020)

    def of(driver: str) -> list[str]:
        names = (f"libcuda.so.{driver}", "libcuda.so.1")
        return [word for name in names for word in ("--volume", f"{library}:{HOST}/{name}:ro")]

    return of


def output_of(*command: str) -> str:
    return subprocess.run(["docker", *command], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


@pytest.mark.parametrize(("driver", "version"), [(OLD, "13000"), (NEW, "12020")])
def test_every_way_of_starting_gets_the_right_libcuda(image, mounts, driver, version):
    flags = mounts(driver)
    assert output_of("run", "--rm", *flags, image, "/probe") == version
    assert output_of("run", "--rm", "--user", "1000", "--read-only", *flags, image, "/probe") == version
    text = "if [ -f /opt/envbuild/cuda-compat.sh ]; then . /opt/envbuild/cuda-compat.sh; fi; /probe"
    assert output_of("run", "--rm", "--entrypoint", "sh", *flags, image, "-c", text) == version
    container = output_of("run", "--detach", *flags, image, "sleep", "300")
    try:
        assert output_of("exec", container, "sh", "-c", "sleep 1; /probe") == version
    finally:
        output_of("rm", "--force", container)


def test_without_a_driver_and_by_the_users_word(image, mounts):
    assert output_of("run", "--rm", image, "/probe") == "0"
    assert output_of("run", "--rm", "--env", "ENVBUILD_CUDA_COMPAT=on", *mounts(NEW), image, "/probe") == "13000"
    assert output_of("run", "--rm", "--env", "ENVBUILD_CUDA_COMPAT=off", *mounts(OLD), image, "/probe") == "12020"
    assert output_of("run", "--rm", image, "sh", "-c", "exit 0") == ""
