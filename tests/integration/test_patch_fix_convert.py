"""The fix-convert patch: the saver is spawned, and one that fails fails the command."""

import subprocess

import pytest
from patch_support import REQUIREMENTS, the_patch, venv, write_sides

PATCH = the_patch("fix-convert")
PATH = PATCH.files[0].path

# a converter of our own, around the patch's lines
BETWEEN = {
    0: "import argparse\n",
    1: """
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-type")
    parser.add_argument("--loader")
    parser.add_argument("--saver")
    parser.add_argument("--load-dir")
    parser.add_argument("--save-dir")
    parser.add_argument("--max-queue-size", type=int)
    parser.add_argument("--mode")
    args = parser.parse_args()
    loader, saver = (importlib.import_module(name) for name in (args.loader, args.saver))
""",
    3: """    loader.load_checkpoint(queue, args)
""",
    4: """if __name__ == "__main__":
    main()
""",
}

LOADER = """
import torch

def add_arguments(parser):
    parser.add_argument("--mode")

def load_checkpoint(queue, args):
    if args.mode == "loader":
        queue.put("exit")
        raise SystemExit(3)
    for number in range(40):
        queue.put({"name": number, "weight": torch.full((3, 3), float(number))})
    queue.put("done")
    print("loader is done", flush=True)
"""

SAVER = """
import multiprocessing
import os
import time
from pathlib import Path

def add_arguments(parser):
    pass

def save_checkpoint(queue, args):
    if args.mode == "before":
        raise RuntimeError("saver broke")
    total = 0.0
    while True:
        message = queue.get()
        if message == "exit":
            exit(1)
        if message == "done":
            break
        if args.mode == "during":
            raise RuntimeError("saver broke")
        if args.mode == "killed":
            os.kill(os.getpid(), 9)
        total += message["weight"].sum().item()
    if args.mode == "after":
        time.sleep(1)
        raise RuntimeError("saver broke")
    method = "spawn" if multiprocessing.get_start_method(allow_none=True) == "spawn" else "fork"
    Path(args.save_dir).write_text(f"{total} {method}")
"""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["stand-in", "real"])
def convert(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert")
    write_sides(request.param, PATCH, PATH, BETWEEN, folder / "before.py", folder / "after.py")
    (folder / "loader_ours.py").write_text(LOADER)
    (folder / "saver_ours.py").write_text(SAVER)
    python = venv(*REQUIREMENTS)

    def run(side, mode, seconds=120):
        out = folder / f"{side}-{mode}"
        flags = {"model-type": "GPT", "loader": "loader_ours", "saver": "saver_ours", "load-dir": ".", "save-dir": out}
        flags |= {"max-queue-size": 4, "mode": mode}
        command = [python, folder / f"{side}.py", *(f"--{key}={value}" for key, value in flags.items())]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=seconds)
        return done, out.read_text() if out.exists() else None

    return run


def test_a_conversion_goes_through_a_spawned_saver(convert):
    done, saved = convert("after", "whole")
    assert done.returncode == 0, done.stderr
    assert saved == f"{sum(range(40)) * 9.0} spawn"
    assert convert("before", "whole")[1] == f"{sum(range(40)) * 9.0} fork"


@pytest.mark.parametrize(("mode", "code"), [("before", 1), ("during", 1), ("killed", -9), ("after", 1)])
def test_a_failing_saver_fails_the_command(convert, mode, code):
    done, saved = convert("after", mode)
    assert done.returncode == 1
    assert f"Saver failed with exit code {code}." in done.stderr
    assert saved is None
    assert ("loader is done" in done.stdout) == (mode == "after")


def test_a_failing_loader_still_fails_the_command(convert):
    done, saved = convert("after", "loader")
    assert done.returncode in {1, 3}
    assert "exit code None" not in done.stderr
    assert saved is None


def test_before_a_failing_saver_passed_or_hung(convert):
    done, saved = convert("before", "after")
    assert (done.returncode, saved) == (0, None)
    with pytest.raises(subprocess.TimeoutExpired):
        convert("before", "before", seconds=8)
