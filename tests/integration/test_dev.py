"""`envbuild dev` on a stack with a C++ helper: an edit runs at once, and only an edit of the sources compiles."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
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


LOADED = r"""for process in /proc/[0-9]*; do
    tr '\0' ' ' <$process/cmdline | grep -Eq 'python[0-9.]* (-u )?train\.py' && grep -q "$0" $process/maps && exit 0
done
exit 1"""


class Watching:
    """`envbuild dev --watch` in the background, and what it has printed."""

    def __init__(self, place: Path, *command: str) -> None:
        tree = str(place / "sources" / "mine")
        words = ["dev", TAG, tree, "--watch", "--stack", str(place / "mine.toml"), "--", *command]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "envbuild", *words],
            env=os.environ | {"ENVBUILD_CACHE_DIR": str(place / "cache")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        self.seen: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))

    def until(self, text: str, seconds: float = 120.0) -> str:
        """Wait for a line that holds `text`; return it."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self.seen.append(self.lines.get(timeout=left))
                if text in self.seen[-1]:
                    return self.seen[-1]
        pytest.fail(f"no {text!r} in:\n" + "\n".join(self.seen))

    def waiting(self, loaded: str = "python") -> None:
        """Wait until the next run waits in its container, in a Python that runs the script and has loaded a library."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            for name in containers():
                look = ["docker", "exec", name, "sh", "-c", LOADED, loaded]
                if subprocess.run(look, capture_output=True, check=False).returncode == 0:
                    return
            time.sleep(0.2)
        pytest.fail("no run waits:\n" + "\n".join(self.seen))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


def containers() -> list[str]:
    """Names of the containers of `dev --watch`, also of those that have ended."""
    listed = subprocess.run(
        ["docker", "ps", "--all", "--filter", "name=envbuild-dev-", "--format", "{{.Names}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.split()


@pytest.fixture
def watching(place):
    """Start `dev --watch`; what the test changed in the tree is undone."""
    tree = place / "sources" / "mine"
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.suffix in {".py", ".cpp"}}
    started: list[Watching] = []

    def start(*command: str) -> Watching:
        started.append(Watching(place, *command))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.stop()
        each.process.stdin.close()
        each.process.stdout.close()
    for path, body in before.items():
        path.write_bytes(body)
    assert not containers()


LATE = """import sys, time
early = {name: name in sys.modules for name in ("torch", "helpers")}
import torch
from helpers import counting

print("early", early, "loss", float(torch.ones(4).sum() * counting.twice(1)), flush=True)
"""


def test_watch_runs_again_after_an_edit_with_the_packages_imported_before_it(place, watching):
    tree = place / "sources" / "mine"
    (tree / "train.py").write_text(LATE)
    run = watching("torchrun", "--nproc-per-node", "1", "train.py")
    assert "'torch': False" in run.until("early")
    run.until("exit code 0")
    run.waiting("libtorch_python")
    assert not any("loss 16.0" in line for line in run.seen)
    (tree / "train.py").write_text(LATE.replace("ones(4)", "ones(8)"))
    assert run.until("early") == "early {'torch': True, 'helpers': False} loss 16.0"
    run.until("exit code 0")
    (tree / "helpers" / "counting.cpp").write_text(HELPER.replace("2 * number", "5 * number"))
    run.until(".so compiled")
    assert run.until("early").endswith("loss 40.0")
    run.until("exit code 0")
    (tree / "helpers" / "counting.cpp").write_text("no C++\n")
    run.until("the step helpers does not compile the tree")
    (tree / "helpers" / "counting.cpp").write_text(HELPER)
    assert run.until("early").endswith("loss 16.0")
    run.until("exit code 0")
    run.process.stdin.write("\n")
    run.process.stdin.flush()
    run.until("Enter was pressed")
    assert run.until("early").endswith("loss 16.0")
    assert run.stop() == 130


def test_an_edit_stops_a_run_that_has_not_ended(place, watching):
    tree = place / "sources" / "mine"
    (tree / "train.py").write_text('import time\nprint("began", flush=True)\ntime.sleep(600)\n')
    run = watching("python", "train.py")
    run.until("began")
    (tree / "train.py").write_text('print("second", flush=True)\n')
    run.until("train.py changed: stopped, and run again")
    run.until("second")
    run.until("exit code 0")
    assert len(containers()) <= 1


def test_a_command_of_a_shell_is_not_started_before_the_edit(place, watching):
    tree = place / "sources" / "mine"
    (tree / "train.py").write_text("print('one', flush=True)\n")
    run = watching("sh", "-c", "echo shell; python train.py")
    run.until("exit code 0")
    time.sleep(3)
    assert not containers()
    (tree / "train.py").write_text("print('two', flush=True)\n")
    run.until("shell")
    run.until("two")


def test_nothing_is_left_of_a_watch_that_was_killed(place, watching):
    (place / "sources" / "mine" / "train.py").write_text("print('one', flush=True)\n")
    run = watching("python", "train.py")
    run.until("exit code 0")
    run.waiting()
    run.process.kill()
    run.process.wait()
    assert dev(place, "python", "train.py").out == "one\n"
    again = watching("python", "train.py")  # making a container removes those whose maker is gone
    again.until("exit code 0")
    again.waiting()
    assert len(containers()) == 1
