"""The action: the words of its input reach envbuild as they are, and its answer is the step's output."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
_SPEC = importlib.util.spec_from_file_location("action", ROOT / "scripts" / "ci" / "action.py")
assert _SPEC
assert _SPEC.loader
action = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(action)
SHOW = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]


def answer_of(output: Path) -> str:
    head, *lines, mark = output.read_text().splitlines()
    assert head == f"answer<<{mark}"
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("resolve --cuda cpu", ["resolve", "--cuda", "cpu", "--json"]),
        ("image --json\n  --te '>=2.6, <2.8'", ["image", "--json", "--te", ">=2.6, <2.8"]),
        ("smoke x -- sh -c '$(id); `id` --json'", ["smoke", "x", "--json", "--", "sh", "-c", "$(id); `id` --json"]),
        ("run x --json -- true", ["run", "x", "--json", "--", "true"]),
    ],
)
def test_the_words_are_those_of_the_input(tmp_path, args, words):
    assert action.run(SHOW, args, tmp_path / "output") == 0
    assert json.loads(answer_of(tmp_path / "output")) == words


@pytest.mark.parametrize(
    "args", ["run x -- sh --json", "launch x --hostfile h -- a.py", "dev x tree", "--version", "run --dry-run x"]
)
def test_what_starts_something_or_has_no_json_gets_no_flag(tmp_path, capfd, args):
    assert action.run(SHOW, args, tmp_path / "output") == 0
    assert json.loads(capfd.readouterr().out) == args.split()
    assert not (tmp_path / "output").exists()


def test_the_exit_code_of_what_was_started_is_that_of_the_step(tmp_path, capfd):
    killed = [sys.executable, "-c", "import os, sys; os.write(1, b'\\xff'); os.kill(os.getpid(), 9)"]
    assert action.run(killed, "run x", tmp_path / "output") == 137
    assert action.run([sys.executable, "-c", "raise SystemExit(3)"], "run x", tmp_path / "output") == 3
    assert action.run([sys.executable, "-m", "envbuild"], "--version", None) == 0
    assert "envbuild" in capfd.readouterr().out


@pytest.mark.parametrize("args", ["", "  ", "image 'x"])
def test_an_input_without_a_command_is_an_error(args, capsys):
    assert action.run(SHOW, args, None) == 2
    assert "the input `args`" in capsys.readouterr().err


def test_the_answer_and_the_exit_code_are_envbuilds(tmp_path):
    envbuild = [sys.executable, "-m", "envbuild"]
    assert action.run(envbuild, "resolve --cuda cpu", tmp_path / "good") == 0
    assert json.loads(answer_of(tmp_path / "good"))
    assert action.run(envbuild, "resolve --cuda 12.6 --te 0.1", tmp_path / "bad") in {2, 3}


def test_a_lines_of_the_answer_end_no_output(tmp_path):
    text = "a\\nend-0\\nother<<x\\n1\\nx"
    assert action.run([sys.executable, "-c", f"print('{text}')"], "resolve", tmp_path / "output") == 0
    assert answer_of(tmp_path / "output") == text.replace("\\n", "\n")


def test_the_action_calls_the_script_and_writes_no_input_into_a_shell():
    (step,) = yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"]
    assert "${{" not in step["run"]
    assert step["run"].endswith('/scripts/ci/action.py"')
    assert step["env"] == {"ACTION_ARGS": "${{ inputs.args }}"}
