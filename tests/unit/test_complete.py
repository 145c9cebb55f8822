"""What a shell completes."""

import subprocess
import sys

import pytest
from click.shell_completion import BashComplete

from envbuild.cli import cli
from envbuild.cli.axes import axis_names
from envbuild.cli.complete import values_of
from envbuild.matrix.load import load_matrix
from envbuild.matrix.spec import matches
from envbuild.stacks.load import stack_names


def completed(*words: str) -> list[str]:
    """Return what is offered for the last of `words`."""
    bash = BashComplete(cli, {}, "envbuild", "_ENVBUILD_COMPLETE")
    return [item.value for item in bash.get_completions(list(words[1:-1]), words[-1])]


def test_a_command_is_completed_from_its_first_letters():
    assert completed("envbuild", "re") == ["resolve", "render", "reproduce"]


@pytest.mark.parametrize("command", ["resolve", "image"])
def test_versions_are_completed_newest_first(command):
    te = completed("envbuild", command, "--te", "")
    assert te.index("2.12.0") < te.index("2.6.0") < te.index("1.9.0") < te.index("none")
    assert "2.6.0" in completed("envbuild", command, "--te", "2.6")
    assert not [version for version in completed("envbuild", command, "--te", "2.6") if not version.startswith("2.6")]


def test_stacks_gpus_and_cuda_are_completed():
    assert completed("envbuild", "image", "--stack", "") == sorted(stack_names())
    assert "h100" in completed("envbuild", "image", "--gpu", "H")
    cuda = completed("envbuild", "image", "--cuda", "")
    assert {"cpu", "12.6", "13.0"} <= set(cuda)
    assert completed("envbuild", "resolve", "--cuda", "12.6", "--torch", "2.8")[0].startswith("2.8")


def test_a_stack_of_ones_own_is_completed_as_a_file():
    assert completed("envbuild", "image", "--stack", "./my-st") == ["./my-st"]


def test_axes_are_completed_where_one_is_named():
    assert {"te", "torch", "toolchain"} <= set(completed("envbuild", "matrix", "t"))
    assert completed("envbuild", "matrix", "rules", "--axis", "te") == ["te"]
    assert "2.6.0" in completed("envbuild", "matrix", "te", "2.6")


def test_a_line_that_is_not_right_yet_is_completed_as_well():
    assert "--flavor" in completed("envbuild", "resolve", "--cuda", "12.6", "--cuda", "13.0", "--fla")


def test_what_is_offered_is_taken():
    matrix = load_matrix()
    for axis in sorted(axis_names()):
        offered = [value for value, _ in values_of(axis) if value not in {"auto", "none"}]
        assert offered, axis
        for value in offered:
            assert any(matches(matrix.axes[axis], value, release) for release in matrix.releases[axis]), (axis, value)


def test_completing_loads_neither_the_solver_nor_a_display():
    code = (
        "import sys, os\n"
        "os.environ |= {'_ENVBUILD_COMPLETE': 'bash_complete', 'COMP_WORDS': 'envbuild resolve --te ', 'COMP_CWORD': '3'}\n"
        "from envbuild import cli\n"
        "try: cli.main([])\nexcept SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "plain,2.6.0" in done.stdout.splitlines()
    loaded = set(done.stderr.split())
    assert not loaded & {"clingo", "envbuild.solver.solve", "envbuild.stacks.model", "rich"}
