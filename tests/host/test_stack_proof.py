"""The commands of a stack's proof: what runs where, and what a failure says. `docker` is a script that notes its words."""

import os
from pathlib import Path

import pytest

from envbuild.errors import SmokeError
from envbuild.settings import Settings
from envbuild.stacks.model import Use
from envbuild.verify import stack_proof

PROOF = (
    Use(name="imports", run="echo imported"),
    Use(name="kernels", run="echo trained", gpu=True),
    Use(name="broken", run="echo first; echo 'no module'; exit 3"),
)


ENGINE = """#!/bin/sh
echo "$@" >>{log}
case $1 in
image) echo '[{{"Id": "sha256:{id}", "Config": null}}]' ;;
create)
    while [ "$1" != -- ]; do shift; done
    shift 2
    printf '%s' "$2" >{made}
    ;;
start) exec sh {made} ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a `docker` on the PATH that runs what a container was made for, here; return its log."""
    log = tmp_path / "log"
    program = tmp_path / "docker"
    program.write_text(ENGINE.format(log=log, made=tmp_path / "made", id="0" * 64))
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
    calls = engine.read_text().splitlines()
    made = [line for line in calls if line.startswith("create ")]
    assert len(made) == 2
    assert all("--name envbuild-proof-" in line and "--network none" in line for line in made)
    assert all(f"-- sha256:{'0' * 64} -c" in line for line in made)  # not the tag, which may move
    assert len([line for line in calls if line.startswith("rm --force --volumes envbuild-proof-")]) == 2
    with pytest.raises(SmokeError, match="the stack's proof 'broken' failed: exit 3: no module"):
        stack_proof.raise_for(shown, "an-image")
    stack_proof.raise_for(shown[:2], "an-image")


def test_a_command_that_never_ends_is_ended(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_proof, "LIMIT_S", 1)
    (shown,) = stack_proof.show(
        Settings(cache_dir=engine.parent), "an-image", (Use(name="stuck", run="sleep 60"),), "cpu"
    )
    assert (shown.outcome, shown.reason) == ("failed", "it did not end within 1 s: it printed nothing")
