"""scripts/ci from end to end: a cell is chosen, proven and pushed on one engine, and another one that shares the registry pulls it."""

import html
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import image_names

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--cuda cpu --torch 2.13.0 --python 3.11"


class Machine:
    """A checkout with its own cache, and an engine; it runs scripts as the steps of a workflow."""

    def __init__(self, folder: Path, checkout: Path, **environment: str) -> None:
        folder.mkdir()
        self.folder, self.checkout = folder, checkout
        self.summary = folder / "summary.md"
        self.env = os.environ | environment
        self.env |= {"PYTHONPATH": str(checkout), "ENVBUILD_CACHE_DIR": str(folder / "cache")}
        self.env |= {"GITHUB_STEP_SUMMARY": str(self.summary), "GITHUB_OUTPUT": str(folder / "outputs")}

    def step(self, *words: str, code: int = 0) -> dict[str, str]:
        """Run a script of scripts/ci; return its outputs."""
        (self.folder / "outputs").write_text("")
        script = self.checkout / "scripts" / "ci" / words[0]
        command = [sys.executable, script, *words[1:]] if script.suffix == ".py" else [script, *words[1:]]
        done = subprocess.run(
            command, cwd=self.checkout, capture_output=True, text=True, env=self.env, check=False, timeout=3600
        )
        assert done.returncode == code, done.stderr[-3000:]
        return dict(line.split("=", 1) for line in (self.folder / "outputs").read_text().splitlines())

    def choose(self) -> list[dict[str, str]]:
        outputs = self.step("choose.py", "--out", str(self.folder / "cells.json"), "--flags", FLAGS, "--shard", "1/1")
        found: list[dict[str, str]] = json.loads(outputs["matrix"])["include"]
        assert int(outputs["count"]) == len(found)
        return found

    def prove(self, cell: dict[str, str], name: str) -> dict[str, Any]:
        out = self.folder / "results" / name
        self.step("cell.py", "--id", cell["id"], "--args", cell["args"], "--stack", cell["stack"], "--out", str(out))
        result: dict[str, Any] = json.loads((out / "result.json").read_text())
        return result


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A clone without records, where every cell is unverified."""
    folder = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    git(folder, "rm", "-r", "--quiet", "matrices/evidence")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b.example", "commit", "--quiet", "-m", "No records")
    (folder / "matrices" / "evidence").mkdir(exist_ok=True)
    return folder


@pytest.fixture
def tidy(engine, registry):
    ours = ("envbuild-cell:", f"{registry}/ci-test")
    before = set(image_names(*ours))
    yield
    for tag in set(image_names(*ours)) - before:
        engine.image.remove(tag, force=True)


@pytest.mark.usefixtures("tidy")
def test_a_cell_goes_from_one_engine_through_the_registry_to_another(tmp_path, checkout, registry, second_engine):
    registry = f"{registry}/ci-test"
    one = Machine(tmp_path / "one", checkout, ENVBUILD_REGISTRY=registry)
    (cell,) = one.choose()
    assert (cell["args"], cell["stack"]) == (FLAGS, "")

    result = one.prove(cell, "cpu")
    assert (result["ended"], result["exit_code"], result["smoke"]["verdict"]) == ("passed", 0, "passed")
    assert result["image"]["origin"] == "built"
    assert len(result["evidence"]) == len(result["locks"]) == 1
    assert any(name.startswith("smoke-") for name in result["logs"])
    assert "**passed**, exit code 0" in one.summary.read_text()

    one.step("with-login", sys.executable, str(checkout / "scripts" / "ci" / "push.py"), cell["args"])
    assert one.choose() == []  # the registry holds it, by the key of the lock
    assert f"the registry has its image: {registry}:{cell['id']}-" in html.unescape(one.summary.read_text())

    words = ["--results", str(one.folder / "results"), "--cells", json.dumps({"include": [cell]})]
    outputs = one.step("collect.py", *words, "--branch", "evidence/1", "--body", str(tmp_path / "body.md"))
    assert outputs["records"] == "1"
    assert outputs["title"] == "Evidence of 1 runs (1 passed), 1 new locks"
    added = git(checkout, "diff", "--name-only", "HEAD~1").splitlines()
    assert f"matrices/evidence/{result['evidence'][0]}" in added
    assert f"matrices/locks/{result['locks'][0]}/lock.json" in added
    one.env["ENVBUILD_REGISTRY"] = ""
    assert one.choose() == []  # the record verifies it

    # A machine that has the merged branch and the registry's address alone.
    host = str(second_engine.client_config.host)
    two = Machine(tmp_path / "two", checkout, ENVBUILD_REGISTRY=registry, DOCKER_HOST=host)
    pulled = two.prove(cell, "cpu")
    assert pulled["image"]["origin"] == "pulled"
    assert pulled["image"]["digest"] == result["image"]["digest"]
    assert (pulled["ended"], pulled["locks"], len(pulled["evidence"])) == ("passed", [], 1)
    assert pulled["seconds"] < result["seconds"]
