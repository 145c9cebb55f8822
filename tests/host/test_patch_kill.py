"""Killing `apply` and `undo` at any moment: the next run finds the tree wholly before or wholly after, and nothing else."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from envbuild.patches.apply import apply, check, undo
from envbuild.patches.manifest import Patch, PatchedFile, Revision, Upstream, blob_id
from envbuild.patches.replace import alone, replace

FILES = 6
OLD = "".join(f"line {number}\n" for number in range(20))
NEW = OLD.replace("line 10\n", "line ten\n")

# Forks for every line that it reads, so that a kill hits the work and not the imports.
FORKS = """
import importlib.util, os, pathlib, sys
spec = importlib.util.spec_from_file_location("kill", sys.argv[1])
kill = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kill)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        what, tree, *given = line.split()
        getattr(kill, what)(pathlib.Path(tree), *given)
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def path_of(number):
    return f"{'sub/' if number % 2 else ''}f{number}.txt"


def the_patch():
    body = "@@ -9,4 +9,4 @@\n line 8\n line 9\n-line 10\n+line ten\n line 11\n"
    paths = [path_of(number) for number in range(FILES)]
    return Patch(
        name="one",
        target="demo",
        repo="https://example.org/demo",
        revisions=(Revision(name="v1", commit="12" * 20),),
        files=tuple(PatchedFile(path=p, pre=blob_id(OLD.encode()), post=blob_id(NEW.encode())) for p in paths),
        diff="".join(f"--- a/{p}\n+++ b/{p}\n{body}" for p in paths).encode(),
        stacks=(),
        upstream=Upstream(ref="main", path="x", fixed_when_present="x", state="needed", seen="12" * 20),
        **dict.fromkeys(("what", "why", "issue", "proof", "expires"), "x"),
    )


def back_and_forth(tree):
    """Apply and undo until killed."""
    while True:
        apply(tree, [the_patch()])
        undo(tree, [the_patch()])


def replace_back_and_forth(tree):
    """Replace the files until killed; no git runs, so that a kill hits the replacing."""
    now = OLD if (tree / path_of(0)).read_text() == OLD else NEW
    while True:
        then = NEW if now == OLD else OLD
        paths = [path_of(number) for number in range(FILES)]
        with alone(tree):
            replace(tree, dict.fromkeys(paths, (now.encode(), 0o644)), dict.fromkeys(paths, then.encode()))
        now = then


def killed_at(tree, event):
    """Apply or undo, whichever it takes, and be killed at the given one of the changes to the tree."""
    patch, seen = the_patch(), 0
    what = apply if (tree / path_of(0)).read_text() == OLD else undo

    def count(name, arguments):
        nonlocal seen
        opened = name == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
        if name in {"os.rename", "os.remove", "os.chmod"} or opened:
            seen += "envbuild-" in str(arguments[0]) or name == "os.chmod"
            if seen == int(event):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    what(tree, [patch])


@pytest.fixture
def forks():
    command = [sys.executable, "-c", FORKS, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    for number in range(FILES):
        (root / path_of(number)).write_text(OLD)
    return root


def contents(tree):
    return {str(path.relative_to(tree)): path.read_text() for path in tree.rglob("*") if path.is_file()}


def assert_whole(tree, patch):
    """One check settles the tree: all files are of one state, and nothing else is there."""
    state = check(tree, [patch])[0].state
    text = {"applies": OLD, "applied": NEW}[state]
    assert contents(tree) == {path_of(number): text for number in range(FILES)}
    return state


def start(forks, *words):
    forks.stdin.write(" ".join(map(str, words)) + "\n")
    forks.stdin.flush()
    return int(forks.stdout.readline())


@pytest.mark.parametrize(("work", "longest_s"), [("replace_back_and_forth", 0.02), ("back_and_forth", 0.25)])
def test_killed_after_any_time(forks, tree, work, longest_s):
    patch, chance, broken, states = the_patch(), random.Random(7), 0, set()
    for number in range(300):
        if number >= 60 and states == {"applies", "applied"}:
            break
        if number and not number % 60:
            longest_s *= 3  # a busy machine takes longer to come so far
        pid = start(forks, work, tree)
        time.sleep(chance.uniform(0, longest_s))
        os.kill(pid, signal.SIGKILL)
        assert int(forks.stdout.readline()) == -signal.SIGKILL
        found = contents(tree)
        broken += len(found) > FILES or len(set(found.values())) > 1
        states.add(assert_whole(tree, patch))
    assert states == {"applies", "applied"}
    if work == "replace_back_and_forth":
        assert broken > 5  # so that the kills came in the middle


def test_killed_at_every_change_of_the_tree(forks, tree):
    patch, mixed, event, states = the_patch(), 0, 0, set()
    while True:
        event += 1
        start(forks, "killed_at", tree, event)
        if int(forks.stdout.readline()) == 0:
            break
        found = contents(tree)
        mixed += len({text for path, text in found.items() if "envbuild" not in path}) > 1
        states.add(assert_whole(tree, patch))
    assert states == {"applies", "applied"}
    assert mixed >= FILES - 1
    assert event > 4 * FILES
