"""The Apptainer rendering: it names the image of the plan and refuses that of another lock."""

import re
import subprocess
import sys

from cell_inputs import complete, inputs_for, inputs_for_stack, plan_for

from envbuild.lock.files import Locked
from envbuild.lock.make import unlocked
from envbuild.matrix.load import load_matrix
from envbuild.plan.apptainer import definition
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import plan_of
from envbuild.stacks.load import load_stack


def sections(text):
    return dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.DOTALL | re.MULTILINE))


def test_it_converts_the_image_of_the_plan():
    plan = plan_for(cuda="cpu")
    text = definition(plan)
    assert f"docker save envbuild:{plan.cell.id} -o {plan.cell.id}.tar" in text
    assert f"\nBootstrap: docker-archive\nFrom: {plan.cell.id}.tar\n" in text
    assert plan.lock.digest in text.splitlines()[1]
    environment = sections(text)["environment"]
    for name, value in plan.environment.items():
        assert f'export {name}="{value}"' in environment


def test_container_tools_variables_stay_out():
    text = definition(plan_for(cuda="13.0", te="2.12", torch="2.11.0"))
    assert "NVTE_CUDA_INCLUDE_DIR" in text
    assert "NVIDIA_" not in sections(text)["environment"]


def test_a_value_is_a_value_to_the_shell_that_reads_it():
    stack = load_stack("llama3-70b")
    odd = {"A": "x`id`y", "B": "/data:$PATH", "C": 'a"b\\c', "NVIDIA_TF32_OVERRIDE": "0"}
    stack = stack.model_copy(update={"environment": odd})
    matrix = load_matrix()
    plan = plan_of(matrix, Locked(lock=unlocked(matrix, inputs_for_stack(stack)), pylocks={}), stack)
    lines = [line for line in sections(definition(plan))["environment"].splitlines() if "export" in line]
    show = "\n".join(f'printf "%s\\0" "${name}"' for name in odd)
    done = subprocess.run(["sh", "-c", "\n".join([*lines, show])], capture_output=True, text=True, check=True)
    assert done.stdout.split("\0")[:-1] == list(odd.values())
    # and to the Dockerfile, which takes no backquote for anything
    assert 'B="/data:\\$PATH"' in dockerfile(plan)


def test_another_lock_is_another_definition():
    inputs = inputs_for(cuda="cpu")
    one, other = (definition(plan_of(load_matrix(), complete(inputs, overrides=o))) for o in ({}, {"numpy": "2.0"}))
    assert one != other


def test_its_test_refuses_the_image_of_another_lock(tmp_path):
    """The body of %test runs on what it finds in the image, and says both digests."""
    plan = plan_for(cuda="cpu")
    body = re.search(r"<<'envbuild_end'\n(.*?)envbuild_end", sections(definition(plan))["test"], re.DOTALL)[1]
    expected = tmp_path / "expected.json"
    expected.write_text('{"lock_digest": "sha256:00", "packages": {}, "components": {}}')
    done = subprocess.run(
        [sys.executable, "-c", body.replace("/opt/envbuild/expected.json", str(expected))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert f"the image of lock sha256:00, this definition is for {plan.lock.digest}" in done.stderr


def test_unlocked_says_so_in_its_first_lines():
    matrix = load_matrix()
    plan = plan_of(matrix, Locked(lock=unlocked(matrix, inputs_for(cuda="cpu")), pylocks={}))
    assert any(line.startswith("# UNLOCKED") for line in definition(plan).splitlines()[:3])
