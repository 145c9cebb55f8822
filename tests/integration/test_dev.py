"""`envbuild dev` on a stack with a C++ helper: an edit runs at once, and only an edit of the sources compiles."""

import subprocess
from pathlib import Path

import pytest
from command import Done, run

STACK = """
name = "mine"
title = "A tree with a C++ helper"
about = "What a user writes for their own repository."
source = "https://example.org/mine"
python = ["pybind11", "six"]
system = ["g++", "make"]

[repository]
name = "mine"
url = "https://example.invalid/mine.git"
commit = "{commit}"
path = "/workspace/mine"

[stated]
cuda = "cpu"

[[steps]]
name = "helpers"
run = "make -C helpers"
compiles = true
keep = ["helpers/counting*.so"]
check = "python -c 'from helpers import counting; assert counting.twice(2) == 4'"
"""
TRAIN = """import torch
from helpers import counting

print("loss", float(torch.ones(4).sum() * counting.twice(1)))
"""
HELPER = """#include <pybind11/pybind11.h>
int twice(int number) { return 2 * number; }
PYBIND11_MODULE(counting, m) { m.def("twice", &twice); }
"""
MAKEFILE = """SUFFIX = $(shell python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
counting$(SUFFIX): counting.cpp
\tg++ -shared -fPIC -std=c++17 $(shell python -m pybind11 --includes) $< -o $@
"""
TAG = "envbuild-test:dev"


@pytest.fixture(scope="module")
def place(tmp_path_factory, engine) -> Path:
    """A folder with the repository under `sources`, the stack's file, and an image of both."""
    del engine
    folder = tmp_path_factory.mktemp("dev")
    tree = folder / "sources" / "mine"
    (tree / "helpers").mkdir(parents=True)
    for name, text in (
        ("train.py", TRAIN),
        ("requirements.txt", "six\nnumpy<1\n"),
        ("helpers/__init__.py", ""),
        ("helpers/counting.cpp", HELPER),
        ("helpers/Makefile", MAKEFILE),
    ):
        (tree / name).write_text(text)
    git = ["git", "-C", tree, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "mine.toml").write_text(STACK.format(commit=commit))
    env = {"ENVBUILD_SOURCES": str(folder / "sources"), "ENVBUILD_CACHE_DIR": str(folder / "cache")}
    made = run("image", "--stack", str(folder / "mine.toml"), "--tag", TAG, "--no-smoke", env=env)
    assert made.code == 0, made.err
    return folder


def dev(place: Path, *command: str) -> Done:
    env = {"ENVBUILD_CACHE_DIR": str(place / "cache")}
    tree = str(place / "sources" / "mine")
    return run("dev", TAG, tree, "--stack", str(place / "mine.toml"), *(["--", *command] if command else []), env=env)


def test_an_edit_is_in_the_next_run_and_only_an_edit_of_the_sources_compiles(place):
    tree = place / "sources" / "mine"
    first = dev(place, "python", "train.py")
    assert (first.code, first.out) == (0, "loss 8.0\n"), first.err
    assert "requirements.txt:2 asks for numpy<1, the image has numpy " in first.err
    assert ".so as in the image" in first.err
    (tree / "train.py").write_text(TRAIN.replace("4)", "8)"))
    second = dev(place, "python", "train.py")
    assert second.out == "loss 16.0\n"
    assert ".so" not in second.err
    (tree / "helpers" / "counting.cpp").write_text(HELPER.replace("2 * number", "3 * number"))
    third = dev(place, "python", "train.py")
    assert third.out == "loss 24.0\n"
    assert ".so compiled" in third.err
    (tree / "helpers" / "counting.cpp").write_text(HELPER)
    back = dev(place, "python", "train.py")
    assert back.out == "loss 16.0\n"
    assert ".so as compiled before" in back.err


def test_a_helper_that_does_not_compile_stops_the_run_with_what_the_compiler_says(place):
    source = place / "sources" / "mine" / "helpers" / "counting.cpp"
    source.write_text("no C++\n")
    refused = dev(place, "python", "train.py")
    source.write_text(HELPER)
    assert refused.code == 5
    assert "the step helpers does not compile the tree" in refused.err
    assert "loss" not in refused.out
