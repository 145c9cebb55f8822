"""A user's own stack on the CPU cell: its tree, step, environment and proof, in a real image."""

import subprocess
from pathlib import Path

import pytest
from command import Done, run

STACK = """
name = "mine"
title = "A tree of one script"
about = "What a user writes for their own repository."
source = "https://example.org/mine"
python = ["six"]

[repository]
name = "mine"
url = "https://example.invalid/mine.git"
commit = "{commit}"
path = "/workspace/mine"

[stated]
cuda = "cpu"

[environment]
MINE = "of the stack"

[[steps]]
name = "made"
run = "python train.py --make"
check = "test -s made.txt"

[[proof]]
name = "trains"
run = "python train.py"

[[proof]]
name = "kernels"
run = "exit 1"
gpu = true
"""
TRAIN = """import os, sys, six, torch
if "--make" in sys.argv:
    open("made.txt", "w").write("made\\n")
else:
    assert os.environ["MINE"] == "of the stack" and open("made.txt").read()
    print("loss", float(torch.ones(2).sum()))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the repository under `sources` and the stack's file."""
    folder = tmp_path_factory.mktemp("own")
    tree = folder / "sources" / "mine"
    tree.mkdir(parents=True)
    (tree / "train.py").write_text(TRAIN)
    git = ["git", "-C", tree, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (folder / "mine.toml").write_text(STACK.format(commit=commit))
    return folder


def image(place: Path) -> Done:
    env = {"ENVBUILD_SOURCES": str(place / "sources"), "ENVBUILD_CACHE_DIR": str(place / "cache")}
    return run("image", "--stack", str(place / "mine.toml"), "--tag", "envbuild-test:mine", "--json", env=env)


def test_a_users_own_stack_is_built_and_shows_that_it_is_right(engine, place):
    done = image(place)
    assert done.code == 0, done.err
    made = done.answer
    assert made["smoke"]["verdict"] == "passed"
    assert [(each["name"], each["outcome"]) for each in made["stack_proof"]] == [
        ("trains", "passed"),
        ("kernels", "unproven"),
    ]
    assert "the stack's proof kernels: it needs a GPU, and this host has none" in made["not_proven"]
    inside = ["docker", "run", "--rm", "envbuild-test:mine", "sh", "-c", "pwd; cat made.txt"]
    assert subprocess.run(inside, capture_output=True, text=True, check=True).stdout == "/workspace/mine\nmade\n"


def test_a_proof_that_fails_fails_the_image_though_nothing_is_built_again(engine, place):
    file = place / "mine.toml"
    file.write_text(file.read_text().replace('run = "python train.py"\n', 'run = "echo begun; echo no luck; exit 3"\n'))
    refused = image(place)
    assert refused.code == 7
    assert "the stack's proof 'trains' failed: exit 3: no luck" in refused.err
    ours = ("--filter=name=^envbuild-proof-", "--filter=label=io.envbuild.stack=mine")
    left = subprocess.run(["docker", "ps", "-aq", *ours], capture_output=True, text=True, check=True)
    assert not left.stdout
