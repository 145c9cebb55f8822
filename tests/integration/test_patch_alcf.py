"""The alcf-portable patch: the real helper chain, with MPICH's mpiexec, off Polaris; needs UPSTREAM_TREES."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from patch_support import the_patch, upstream_tree, venv

from envbuild.patches.apply import apply

PATCH = the_patch("alcf-portable")

# stands in for the training program: what it was given, and the status to end with
PROGRAM = """
import os, sys
names = ("PMI_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
data = sys.argv[sys.argv.index("--data-path") + 1]
print("GOT", *(os.environ.get(name) for name in names), data, sys.argv[-1], flush=True)
sys.exit(int(os.environ.get("STATUS", "0")))
"""

SETTINGS = {
    "NGPU_PER_HOST": "2",
    "DATA_PARENT": "/data",
    "DATA_TYPE": "mine_text_document",
    "MODEL_SIZE_KEY": "GPT125M",
    "SEQ_LEN": "128",
    "MPSIZE": "1",
    "SP_TYPE": "megatron",
    "ZERO_STAGE": "1",
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    tree = upstream_tree(PATCH)
    mpi = venv("mpich==5.0.2").parent

    def run(side, **environment):
        folder = tmp_path_factory.mktemp("alcf")
        shutil.copytree(tree / "ALCF", folder / "ALCF")
        (folder / "pretrain_gpt.py").write_text(PROGRAM)
        if side == "after":
            apply(folder, [PATCH])
        (folder / "hosts").write_text("localhost\n")
        settings = {key: value for key, value in {**SETTINGS, **environment}.items() if value is not None}
        settings.setdefault("HOSTFILE", str(folder / "hosts"))
        done = subprocess.run(
            ["bash", "ALCF/train-gpt3.sh", "--train-iters", "3"],
            cwd=folder,
            env={"PATH": f"{mpi}:{os.environ['PATH']}", "HOME": str(folder), **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        logs = [Path(line) for line in (folder / "logfiles").read_text().split()] if side == "after" else []
        got = [line for log in logs for line in log.read_text().splitlines() if line.startswith("GOT")]
        return done, sorted(got)

    return run


def test_presets_are_honoured(chain):
    done, got = chain("after", MASTER_ADDR="node0.example", MASTER_PORT="4242")
    assert done.returncode == 0, done.stdout + done.stderr
    assert got == [f"GOT {rank} node0.example 4242 2 /data/dataset/mine_text_document 3" for rank in (0, 1)]


def test_this_host_alone_without_presets(chain):
    done, got = chain("after", HOSTFILE="", NGPU_PER_HOST="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert got == [f"GOT 0 {os.uname().nodename} 20010 1 /data/dataset/mine_text_document 3"]


def test_the_jobs_status_is_the_scripts(chain):
    assert chain("after", STATUS="7")[0].returncode == 7


def test_no_data_is_reported(chain):
    with pytest.raises(FileNotFoundError, match="logfiles"):  # it ends before a log is named
        chain("after", DATA_PARENT=None)


def test_before_it_gave_up(chain):
    done, _ = chain("before")
    assert done.returncode == 1
    assert "Unable to determine DATA_PARENT" in done.stdout
