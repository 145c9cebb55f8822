"""`run` and `launch` on the real engine: two "hosts" are two loopback addresses, each with its own container and sshd."""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from root_support import debian_tar

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

TAG = f"envbuild-test-launch:{os.getpid()}"
OURS = f"org.example.launch={os.getpid()}"  # a label of that image, and so of its containers
SECRET = "a b'c\"$HOME"
SCRIPT = """\
import hashlib, os, subprocess, sys, time
folder = "/run/envbuild"
seen = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MY_TOKEN")}
seen["container"] = hashlib.sha256(open(f"{folder}/host_key.pub", "rb").read()).hexdigest()
if sys.argv[1] == "pdsh" and seen["RANK"] == "0":
    seen["pdsh"] = subprocess.run(
        ["pdsh", "-R", "ssh", "-N", "-w", "127.0.0.1,127.0.0.2", "printf '%s\\\\n' \\"$MY_TOKEN\\""],
        capture_output=True, text=True,
    ).stdout
print(repr(seen), flush=True)
time.sleep(60 if sys.argv[1] == "sleep" else 0)
sys.exit(7 if sys.argv[1] == "fail" and seen["RANK"] == "3" else 0)
"""


def containers() -> list[str]:
    """Return the containers of this file's image."""
    command = ["docker", "ps", "--all", f"--filter=label={OURS}", "--format", "{{.Names}}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module")
def image(engine, tmp_path_factory, epoch) -> Iterator[str]:
    """A Debian root with an sshd, Open MPI and pdsh."""
    folder = tmp_path_factory.mktemp("launch")
    packages = ("openssh-server", "openssh-client", "openmpi-bin", "pdsh", "python3-minimal")
    root = debian_tar("bookworm", folder, *packages, epoch=epoch)
    subprocess.run(["docker", "import", f"--change=LABEL {OURS}", root.path, TAG], check=True, capture_output=True)
    root.path.unlink()
    yield TAG
    engine.image.remove(TAG, force=True)


Envbuild = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(image, tmp_path) -> Iterator[Envbuild]:
    """Start `envbuild launch` with the script over two loopback hosts."""
    (tmp_path / "t.py").write_text(SCRIPT)
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=2\n127.0.0.2 slots=2\n")

    begun = []

    def begin(*words: str, image: str = image) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "envbuild", "launch", image, "--hostfile", str(tmp_path / "hostfile")),
                *(
                    "--launcher",
                    "mpirun",
                    "--mount",
                    f"{tmp_path}:/work",
                    "--env",
                    "MY_TOKEN",
                    "--",
                    "/work/t.py",
                    *words,
                ),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"MY_TOKEN": SECRET},
        )
        begun.append(process)
        return process

    yield begin
    for process in begun:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_ranks_run_in_a_container_per_host_and_log_in_with_the_environment(start) -> None:
    process = start("pdsh")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    seen = sorted(
        (ast.literal_eval(line) for line in out.splitlines() if line.startswith("{")), key=lambda row: row["RANK"]
    )
    assert [(row["RANK"], row["LOCAL_RANK"]) for row in seen] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
    assert {(row["WORLD_SIZE"], row["MASTER_ADDR"], row["MASTER_PORT"]) for row in seen} == {
        ("4", "127.0.0.1", "29500")
    }
    assert {row["MY_TOKEN"] for row in seen} == {SECRET}
    assert seen[0]["container"] == seen[1]["container"] != seen[2]["container"] == seen[3]["container"]
    # A login, which starts with an empty environment, has the variable too: that is how deepspeed starts its ranks.
    assert seen[0]["pdsh"] == f"{SECRET}\n" * 2
    assert containers() == []


def test_the_exit_code_is_the_scripts(start) -> None:
    process = start("fail")
    _, err = process.communicate(timeout=100)
    assert process.returncode == 7, err
    assert containers() == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_container_outlives_the_launch(start, how) -> None:
    process = start("sleep")
    # All four ranks have started when four lines are out.
    for _ in range(4):
        assert process.stdout.readline()
    assert len(containers()) == 2
    process.send_signal(how)
    process.wait(60)
    for _ in range(100):
        if not containers():
            break
        time.sleep(0.2)
    assert containers() == []


def test_an_image_without_an_sshd_is_named(start, debian_root, engine) -> None:
    tag = f"envbuild-test-plain:{os.getpid()}"
    subprocess.run(["docker", "import", debian_root.path, tag], check=True, capture_output=True)
    try:
        process = start("x", image=tag)
        _, err = process.communicate(timeout=100)
    finally:
        engine.image.remove(tag, force=True)
    assert process.returncode == 8
    assert "sshd is missing in the image" in err
    assert "openssh-server" in err
    assert containers() == []


def run(*words: str | Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "envbuild", "run", *words], capture_output=True, text=True, check=False
    )


def test_run_passes_output_exit_code_and_mounts(image, tmp_path) -> None:
    (tmp_path / "in").write_text("from the host")
    ran = run(
        image, "--mount", f"{tmp_path}:/data:ro", "--workdir", "/data", "--", "sh", "-c", "cat in; touch x || exit 3"
    )
    assert (ran.returncode, ran.stdout) == (3, "from the host")
    assert "Read-only" in ran.stderr


def test_run_without_the_image_says_how_to_get_it(engine) -> None:
    ran = run("envbuild-no-such-image:none", "--", "true")
    assert ran.returncode == 8
    assert "there is no image envbuild-no-such-image:none here" in ran.stderr
    assert "envbuild pull" in ran.stderr
