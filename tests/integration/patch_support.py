"""What the tests of the patches share: virtual environments and downloads that are kept, upstream trees, stand-ins.

TEST_PATCHES_CACHE names the folder that keeps them (by default one in the temporary folder). Packages come through pip
and its configuration; where PyPI's torch is the CUDA build, PIP_EXTRA_INDEX_URL names an index with the CPU build.

UPSTREAM_TREES names a folder that holds real checkouts, TARGET/ each (scripts/check_upstream_patches.py makes one). A test
that finds its target there runs on the real file too.
"""

import fcntl
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

from envbuild.patches.apply import apply
from envbuild.patches.manifest import Patch, load_patches
from envbuild.patches.tree import patched

REQUIREMENTS = (
    "torch==2.13.0",
    "numpy==2.4.6",
    "packaging==26.3",
    "einops==0.8.2",
    "sgd-sai==1.0.3",
    "pybind11==3.1.0",
)
WORDS = ("alpha", "beta", "gamma", "delta", "one", "two", "three")
PROBES = Path(__file__).parent / "probes"


def cache() -> Path:
    folder = Path(os.environ.get("TEST_PATCHES_CACHE") or Path(tempfile.gettempdir()) / "envbuild-test-cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def venv(*requirements: str) -> Path:
    """Return the Python of a virtual environment with these requirements; it is made once."""
    key = hashlib.sha256(f"{sys.version_info[:2]} {sorted(requirements)}".encode()).hexdigest()[:12]
    folder = cache() / f"venv-{key}"
    with (cache() / f"venv-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _run(sys.executable, "-m", "venv", "--clear", folder)
            _run(folder / "bin/python", "-m", "pip", "install", "-q", *requirements)
            (folder / "complete").touch()
    return folder / "bin/python"


def environment_of(python: Path, **more: str) -> dict[str, str]:
    """Return the environment of this process with the virtual environment of `python` in front."""
    return os.environ | {"PATH": f"{python.parent}:{os.environ['PATH']}"} | more


def image_variable(stack: str) -> str:
    """Return the name of the variable that says which image is the stack's own."""
    return f"IMAGE_{stack.upper().replace('-', '_')}"


def image_of(stack: str) -> str | None:
    """Return the tag of the stack's own image, where the environment names one."""
    return os.environ.get(image_variable(stack))


def in_image(
    image: str, *command: object, workdir: Path, folders: Iterable[Path], variables: Mapping[str, str]
) -> list[str]:
    """Return the command that runs this one in an image, which sees these folders at their own places."""
    front = ["docker", "run", "--rm", "--network=host", "--ipc=host", f"--workdir={workdir}"]
    front += [f"--volume={folder}:{folder}" for folder in folders]
    front += [f"--env={name}={value}" for name, value in variables.items()]
    return [*front, image, *map(str, command)]


def write_corpus(folder: Path) -> list[str]:
    """Write corpus.jsonl, vocab.json and merges.txt, a GPT-2 vocabulary of bytes; return the documents' texts."""
    texts = [" ".join(random.Random(number).choices(WORDS, k=60)) for number in range(100)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    # GPT-2's alphabet of bytes: those that print stand for themselves, the others for what follows 256
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = [*map(chr, printed), *(chr(256 + number) for number in range(256 - len(printed)))]
    (folder / "vocab.json").write_text(json.dumps({s: n for n, s in enumerate([*symbols, "<|endoftext|>", "al"])}))
    (folder / "merges.txt").write_text("#version: 0.2\na l\n")
    return texts


def sdist(python: Path, name: str, version: str, sha256: str) -> Path:
    """Return a source archive from the package index, verified by its hash; it is downloaded once."""
    place = cache() / f"{name.replace('-', '_')}-{version}.tar.gz"
    with (cache() / f"{name}-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            wanted = cache() / f"{name}-{version}.txt"
            wanted.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
            with tempfile.TemporaryDirectory() as folder:
                _run(
                    *(python, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--require-hashes"),
                    *("-d", folder, "-r", wanted),
                )
                (found,) = Path(folder).iterdir()
                place.write_bytes(found.read_bytes())
    assert hashlib.sha256(place.read_bytes()).hexdigest() == sha256
    return place


def megatron_core(python: Path, folder: Path) -> Path:
    """Unpack PyPI's source archive of megatron-core 0.12.3 in `folder`; return its root, whose megatron/core is that of the tag."""
    sha256 = "8e2ab35c5f3cff13b893f30ed79150c73e5d8e8569636fa41c0fcb6befa09b21"
    with tarfile.open(sdist(python, "megatron-core", "0.12.3", sha256)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "megatron_core-0.12.3"


def run_probe(python: Path, tree: Path, name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a probe on the Megatron-core of `tree`."""
    return subprocess.run(
        [str(python), "-P", str(PROBES / name), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def the_patch(name: str) -> Patch:
    return load_patches()[name]


def upstream_tree(patch: Patch) -> Path:
    """Return a real checkout of the patch's target, or skip."""
    root = os.environ.get("UPSTREAM_TREES")
    if not root or not (Path(root) / patch.target).is_dir():
        pytest.skip(f"UPSTREAM_TREES holds no {patch.target}")
    return Path(root) / patch.target


def patched_tree(folder: Path, *names: str) -> Path:
    """Return a copy of a real checkout in `folder`, with these patches applied, or skip."""
    patches = [the_patch(name) for name in names]
    tree = folder / "tree"
    shutil.copytree(upstream_tree(patches[0]), tree, ignore=shutil.ignore_patterns(".git"))
    apply(tree, patches)
    return tree


def real(patch: Patch) -> dict[str, tuple[str, str]]:
    """Return each file of the patch before and after it, from a real checkout."""
    tree = upstream_tree(patch)
    before = {file.path: (tree / file.path).read_bytes() for file in patch.files}
    return {path: (before[path].decode(), new.decode()) for path, new in patched(patch, before).items()}


def sides(kind: str, patch: Patch, path: str, between: Mapping[int, str]) -> tuple[str, str]:
    """Return a patched file before and after: the `real` one, or its `stand-in`."""
    return stand_in(patch, path, between) if kind == "stand-in" else real(patch)[path]


def write_sides(kind: str, patch: Patch, path: str, between: Mapping[int, str], *places: Path) -> None:
    """Write both `sides` of a patched file, the one before and the one after it."""
    for place, text in zip(places, sides(kind, patch, path, between), strict=True):
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)


def kernels(
    kind: str, patch: Patch, between: Mapping[int, str], folder: Path, code: str
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Write both sides of a module that loads kernels; return what runs `code`, given the folder of a side and more."""
    places = (folder / side / "kernels.py" for side in ("before", "after"))
    write_sides(kind, patch, patch.files[0].path, between, *places)
    python = venv(*REQUIREMENTS)

    def run(side: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-c", code, str(folder / side), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def toolkit_of(folder: Path, release: str, *, does: str = "") -> Path:
    """Make a toolkit whose nvcc states its release and does nothing but what `does` says in shell; return its folder."""
    nvcc = folder / f"cuda-{release}" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    nvcc.write_text(f'#!/bin/sh\n{does}\necho "Cuda compilation tools, release {release}, V{release}.85"\n')
    nvcc.chmod(0o755)
    return nvcc.parents[1]


def stand_in(patch: Patch, path: str, between: Mapping[int, str]) -> tuple[str, str]:
    """Return a stand-in for a patched file, before and after: the patch's own lines, and ours between them.

    `between[n]` comes before the n-th hunk, or behind the last one. So what is tested are the lines that the patch adds,
    in a file that is otherwise written for the test.
    """
    # our own diffs: each file is its two head lines and its hunks, and every line ends
    _, _, rest = patch.diff.decode().partition(f"--- a/{path}\n+++ b/{path}\n")
    hunks = re.split(r"^@@ .*\n", re.split(r"^--- a/", rest, maxsplit=1, flags=re.MULTILINE)[0], flags=re.MULTILINE)[1:]
    sides = []
    for gone in ("+", "-"):
        parts = []
        for number, hunk in enumerate(hunks):
            lines = [line[1:] for line in hunk.splitlines(keepends=True) if not line.startswith(gone)]
            parts += [between.get(number, ""), *lines]
        sides.append("".join([*parts, between.get(len(hunks), "")]))
    return sides[0], sides[1]
