"""A user's own command under `smoke`, with torch's CPU build: two ranks by gloo, in an environment and in an image."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patch_support import environment_of, venv

from envbuild.errors import SmokeError
from envbuild.run.container import Mount
from envbuild.settings import load_settings
from envbuild.verify.command import run_test

pytestmark = [pytest.mark.engine]

TRAIN = """
import os, torch, torch.distributed as dist, torch.nn.functional as F
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(100):
    x = torch.randn(2, 4, 16, 64)
    y = F.scaled_dot_product_attention(net(x), net(x), net(x), is_causal=True)
    y.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} \\x1b[31mred", flush=True)
"""


def smoke(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "envbuild", "smoke", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | variables)


@pytest.fixture(scope="module")
def python() -> Path:
    return venv("torch==2.13.0", "numpy==2.4.6")


def test_two_ranks_by_gloo(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    ran = smoke(
        *("--host", "--json", "--steps", 4, "--", "torchrun", "--nproc-per-node", 2, script),
        PATH=environment_of(python)["PATH"],
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert [(each["rank"], each["world"], each["steps"]) for each in answer["ranks"]] == [(0, 2, 4), (1, 2, 4)]
    for each in answer["ranks"]:
        assert each["attention"] == ["torch: flash for CPUs"]
        assert each["transport"]["backends"] == ["gloo"]
        assert each["profiled"]
        assert not each["problems"]
    assert Path(answer["log"]).is_file()


def test_what_the_command_prints_is_escaped_and_its_failure_is_one(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('\\x1b[2Jgone')\nraise SystemExit(3)\n")
    ran = smoke("--host", "--", python, script)
    assert ran.returncode == 7
    assert "\\x1b[2Jgone" in ran.stderr
    assert "\x1b" not in ran.stderr + ran.stdout
    assert "exit code 3" in ran.stderr


def test_a_command_without_torch_is_no_proof(python: Path) -> None:
    ran = smoke("--host", "--", python, "-c", "pass")
    assert ran.returncode == 7
    assert "imported torch" in ran.stderr


in_image = pytest.mark.skipif(
    not os.environ.get("SMOKE_COMMAND_IMAGE"), reason="SMOKE_COMMAND_IMAGE names no image of a CPU cell"
)


@in_image
def test_a_test_of_bisect_in_an_image(tmp_path: Path) -> None:
    image, settings = os.environ["SMOKE_COMMAND_IMAGE"], load_settings()
    (tmp_path / "file").write_text("seen\n")
    mounts = (Mount(source=tmp_path, target="/work", read_only=True),)
    words = ["sh", "-c", "cat /work/file; printf '%s \\033[2J\\n' \"$A\"; exit 3"]
    code, last = run_test(image, words, settings, timeout_s=300, mounts=mounts, environment=("A=b",))
    assert (code, last) == (3, "b \\x1b[2J")
    assert run_test(image, ["true"], settings, timeout_s=300)[0] == 0
    with pytest.raises(SmokeError, match="did not end within 5 s"):
        run_test(image, ["sleep", "600"], settings, timeout_s=5)


@in_image
def test_in_an_image(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    tmp_path.chmod(0o755)
    ran = smoke(
        *(os.environ["SMOKE_COMMAND_IMAGE"], "--json", "--steps", 4, "--mount", f"{tmp_path}:/work:ro"),
        *("--", "torchrun", "--nproc-per-node", 2, "/work/train.py"),
    )
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert [each["steps"] for each in answer["ranks"]] == [4, 4]
    assert answer["where"]["digest"].startswith("sha256:")
