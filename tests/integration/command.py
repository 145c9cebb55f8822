"""Running envbuild as a user does, and interrupting it; what an engine holds, asked in one command."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        return json.loads(self.out)


def run(*args: str, env: dict[str, str] | None = None, timeout: float | None = 1500) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", *args],
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        start_new_session=True,  # what hangs up its process group shows as an exit code here, and ends no test run
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Done(code=done.returncode, out=done.stdout, err=done.stderr)


def interrupted(*args: str, env: dict[str, str], stage: str, seconds: float, by: signal.Signals = signal.SIGINT) -> str:
    """Press Ctrl-C, or send `by`, `seconds` after `stage` has started; return what the command says from then on."""
    with subprocess.Popen(
        [sys.executable, "-m", "envbuild", *args],
        env=os.environ | env,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    ) as process:
        for line in process.stderr:
            if stage in line and "started" in line:
                time.sleep(seconds)
                process.send_signal(by)
                break
        rest = process.stderr.read()
    assert process.wait(60) == 130, rest
    assert "Traceback" not in rest
    return rest


def volumes() -> set[str]:
    """The engine's volumes."""
    listed = subprocess.run(["docker", "volume", "ls", "--quiet"], capture_output=True, text=True, check=True)
    return set(listed.stdout.split())


def new_volumes(before: set[str]) -> set[str]:
    """What came since `before` and stays: another test's container may have volumes for a while."""
    end = time.monotonic() + 20
    while (left := volumes() - before) and time.monotonic() < end:
        time.sleep(0.5)
    return left


def image_names(*prefixes: str) -> list[str]:
    """The names, REPOSITORY:TAG, of the engine's images that begin with one of `prefixes`.

    One command lists them. `engine.image.list()` asks for each image after the list, and fails where another test
    removed one in between.
    """
    words = ["docker", "image", "ls", "--format={{.Repository}}:{{.Tag}}"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if name.startswith(prefixes)]
