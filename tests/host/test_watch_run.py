"""A watched command on this host: what it leaves running ends with it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from envbuild.settings import Settings
from envbuild.verify.command import CommandRequest, run_command

# As torchrun does it: the worker leads a session, and nobody hands it a signal.
LEAVES = """
import pathlib, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(float(sys.argv[2]))
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("seconds", "verdict"), [(600, "hung"), (0, "failed")])
def test_a_worker_in_its_own_session_ends_with_the_command(tmp_path: Path, seconds: int, verdict: str) -> None:
    note = tmp_path / "pid"
    request = CommandRequest(
        command=(sys.executable, "-c", LEAVES, str(note), str(seconds)), image=None, steps=1, timeout_s=4.0
    )
    report = run_command(request, Settings(cache_dir=tmp_path / "cache"))
    pid, end = int(note.read_text()), time.monotonic() + 2
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.02)
    left = runs(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert (report.verdict, left) == (verdict, False)
