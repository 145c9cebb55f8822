"""`jupyter = true` of a stack: what the lock asks for, what the image gets, what an editor is told."""

import json
from pathlib import Path

import pytest
from cell_inputs import complete, inputs_for_stack
from click.testing import CliRunner

from envbuild.cli import cli
from envbuild.matrix.load import load_matrix
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import Plan, plan_of
from envbuild.stacks.load import load_stack
from envbuild.stacks.model import Stack
from envbuild.stacks.parts import digest_of

STACK = """
name = "mine"
title = "A tree"
about = "What a user writes."
source = "https://example.org/mine"
{more}

[repository]
name = "mine"
url = "https://example.invalid/mine.git"
commit = "0123456789012345678901234567890123456789"
path = "{path}"

[stated]
cuda = "cpu"
"""
CONFIG = "/etc/jupyter/jupyter_server_config.json"


def stack(folder: Path, more: str, path: str = "/workspace/mine") -> Stack:
    file = folder / "mine.toml"
    file.write_text(STACK.format(more=more, path=path))
    return load_stack(str(file))


def planned(chosen: Stack) -> Plan:
    return plan_of(load_matrix(), complete(inputs_for_stack(chosen)), chosen)


def asked(chosen: Stack) -> list[str]:
    found = next(group for group in inputs_for_stack(chosen).python if group.name == "env")
    return [line for line in found.requirements if line.startswith("jupyter")]


def test_jupyterlab_is_locked_with_the_other_packages(tmp_path):
    assert asked(stack(tmp_path, "jupyter = true")) == ["jupyterlab"]
    assert asked(stack(tmp_path, 'jupyter = true\npython = ["JupyterLab<4.5"]')) == []  # its own line decides
    assert asked(stack(tmp_path, "")) == []


def test_a_stack_without_it_keeps_its_digest(tmp_path):
    plain = stack(tmp_path, "")
    assert digest_of(stack(tmp_path, "jupyter = false")) == digest_of(plain)
    assert digest_of(plain) == "58bdbd8a1f8982538cce385479184be3ff39073f0b08ca9cb394d18ba39c28fe"
    assert digest_of(stack(tmp_path, "jupyter = true")) != digest_of(plain)


def test_the_image_holds_the_servers_settings(tmp_path):
    plan = planned(stack(tmp_path, "jupyter = true"))
    server = json.loads(plan.lists["image/jupyter_server_config.json"])["ServerApp"]
    assert server == {"allow_root": True, "ip": "127.0.0.1", "open_browser": False}  # and no token: it makes one itself
    assert f"/run/envbuild/image/jupyter_server_config.json /layer{CONFIG}" in dockerfile(plan)
    assert CONFIG not in dockerfile(planned(stack(tmp_path, "")))


def test_an_editor_forwards_its_port(tmp_path):
    stack(tmp_path, "jupyter = true")
    line = ["render", "--stack", str(tmp_path / "mine.toml"), "--unlocked", "--format", "devcontainer"]
    found = json.loads(CliRunner().invoke(cli, line, catch_exceptions=False).stdout)
    assert found["forwardPorts"] == [8888]
    assert "ms-toolsai.jupyter" in found["customizations"]["vscode"]["extensions"]
    stack(tmp_path, "")
    found = json.loads(CliRunner().invoke(cli, line, catch_exceptions=False).stdout)
    assert "forwardPorts" not in found
    assert found["customizations"]["vscode"]["extensions"] == ["ms-python.python"]


@pytest.mark.parametrize(("path", "made"), [("/workspace/mine", True), ("/opt/mine", True), ("/workspace", False)])
def test_the_workspace_is_for_all_but_where_it_is_the_repository(tmp_path, path, made):
    plan = planned(stack(tmp_path, "", path))
    assert ("install -d -m 1777 /layer/workspace " in dockerfile(plan)) is made
