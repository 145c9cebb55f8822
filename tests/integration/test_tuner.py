"""The stack's command for aibooster's tuner, with a command of a moment in the place of the training."""

import shlex
import sqlite3
import subprocess

import pytest
from patch_support import venv

from envbuild.stacks.load import load_stack

pytestmark = pytest.mark.full


def test_the_tuner_runs_the_command_once_a_trial(tmp_path):
    (use,) = (use for use in load_stack("llama3-70b").uses if use.name == "tune")
    program, flag, code = shlex.split(use.run)
    assert (program, flag) == ("python", "-c")
    training = "torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size %d ..."
    assert training in code
    code = code.replace(training, "echo size %d").replace("/tmp/tune", str(tmp_path / "tune"))
    done = subprocess.run([venv("aibooster==0.5.0"), "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = sorted((tmp_path / "tune").rglob("trial_*.txt"))
    assert len(logs) >= 6
    assert {log.read_text().split()[-1] for log in logs} <= {"1", "2", "4"}
    (study,) = (tmp_path / "tune").rglob("*.db")
    with sqlite3.connect(study) as database:
        assert database.execute("select count(*) from trials where state = 'COMPLETE'").fetchone()[0] >= 6
