"""The commands of a stack's proof: what runs where, and what a failure says. `docker` is a script that notes its words."""

import os
from pathlib import Path

import pytest

from envbuild.errors import SmokeError
from envbuild.settings import Settings
from envbuild.stacks import Use
from envbuild.verify import stack_proof

PROOF = (
    Use(name="imports", run="echo imported"),
    Use(name="kernels", run="echo trained", gpu=True),
    Use(name="broken", run="echo first; echo 'no module'; exit 3"),
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `docker` on the PATH that runs what comes after the image's name, here; return its log."""
    log = tmp_path / "log"
    program = tmp_path / "docker"
    program.write_text(
        f'#!/bin/sh\necho "$@" >>{log}\n[ "$1" = run ] || exit 0\nwhile [ "$1" != an-image ]; do shift; done\nshift\nexec "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def test_each_command_runs_in_a_container_of_its_own(engine: Path) -> None:
    shown = stack_proof.show(Settings(cache_dir=engine.parent), "an-image", PROOF, "cpu")
    assert [(each.name, each.outcome, each.reason) for each in shown] == [
        ("imports", "passed", ""),
        ("kernels", "unproven", "it needs a GPU, and this host has none"),
        ("broken", "failed", "exit 3: no module"),
    ]
    runs = [line for line in engine.read_text().splitlines() if line.startswith("run ")]
    assert len(runs) == 2
    assert all("--rm" in line and "--network none" in line for line in runs)
    with pytest.raises(SmokeError, match="the stack's proof 'broken' failed: exit 3: no module"):
        stack_proof.raise_for(shown, "an-image")
    stack_proof.raise_for(shown[:2], "an-image")


def test_a_command_that_never_ends_is_ended(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_proof, "LIMIT_S", 1)
    (shown,) = stack_proof.show(
        Settings(cache_dir=engine.parent), "an-image", (Use(name="stuck", run="sleep 60"),), "cpu"
    )
    assert (shown.outcome, shown.reason) == ("failed", "not done within 1 s: it printed nothing")
