"""A host of a launch that goes silent, and one whose container ends."""

import io
import os
import subprocess
import time
from pathlib import Path

import pytest
from recorded import BARE

from envbuild.errors import HostError, UsageError
from envbuild.run.container import Container
from envbuild.run.launch import Job, LaunchStep, Node, beats, plan_launch, run_launch, supervise
from envbuild.settings import Settings


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(beats.time, "monotonic", lambda: now[0])
    return now


def test_a_silent_host_is_named_once_and_again_when_it_answers(clock: list[float]) -> None:
    notes: list[str] = []
    heard = beats.Beats(["node1", "node2"], notes.append)
    heard.look()
    clock[0] += 100
    heard.look()
    assert notes == []  # a container that has not started yet is not silent
    for name in ("node1", "node2"):
        heard.listen(io.StringIO("beat\n"), name)
    heard.close()
    clock[0] += beats.SILENT_SECONDS - 0.5
    heard.look()
    assert notes == []
    heard.listen(io.StringIO("srun: a warning\nnode1\n"))  # as Slurm's step writes it
    heard.close()
    clock[0] += 1
    heard.look()
    heard.look()
    assert notes == ["node2 has not answered for 7 s: the host or its network is down"]
    heard.listen(io.StringIO("beat\n"), "node2")
    heard.close()
    heard.look()
    assert notes[1:] == ["node2 answers again"]


def run_with(keeper: str, heard: "beats.Beats", start: str = "sleep 30") -> int:
    """Run a job of one host whose keeper and whose ranks are these shell texts."""
    notes: list[str] = []
    keepers = [LaunchStep(node="node2", command=("sh", "-c", keeper), about="")]
    with supervise._keepers(keepers, heard) as processes:
        guard = supervise._Guard(keepers, processes, heard)
        steps = [LaunchStep(node="node2", command=("sh", "-c", start), about="")]
        return supervise._run_together(steps, guard, notes.append)


def test_a_container_that_ends_is_named_and_ends_the_job() -> None:
    began = time.monotonic()
    with pytest.raises(HostError, match="its container ended") as caught:
        run_with("sleep 0.3", beats.Beats(["node2"], print))
    assert caught.value.where == "node2"
    assert time.monotonic() - began < 10


def test_ranks_that_end_with_their_container_do_not_hide_it() -> None:
    with pytest.raises(HostError, match="its container ended"):
        run_with("sleep 0.5", beats.Beats(["node2"], print), start="exit 137")


def test_the_exit_code_of_ranks_that_failed() -> None:
    assert run_with(beats.BEATING, beats.Beats(["node2"], print), start="exit 7") == 7


def test_a_host_that_is_silent_for_long_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LOST_SECONDS", 0.5)
    with pytest.raises(HostError, match="has not answered for") as caught:
        run_with("echo beat; cat > /dev/null", beats.Beats(["node2"], print))
    assert caught.value.where == "node2"


def test_bytes_that_are_no_text_do_not_end_the_listening(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "LOST_SECONDS", 1.5)
    keeper = r"echo beat; sleep 0.2; printf '\377\376\n'; "
    keeper += "while echo beat; do sleep 0.1; done & beats=$!; cat > /dev/null; kill $beats"
    assert run_with(keeper, beats.Beats(["node2"], print), start="sleep 3; exit 7") == 7


def test_a_line_without_an_end_is_read_in_pieces() -> None:
    heard = beats.Beats(["node2"], print)
    reading, writing = os.pipe()
    heard.listen(os.fdopen(reading, encoding="utf-8", errors="replace"), "node2")
    try:
        os.write(writing, b"x" * 10000)
        end = time.monotonic() + 5
        while not heard.silent(-1) and time.monotonic() < end:
            time.sleep(0.01)
        assert heard.silent(-1) == ["node2"]  # it was heard
    finally:
        os.close(writing)
        heard.close()


def test_a_set_up_that_does_not_end_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "START_SECONDS", 1)
    step = LaunchStep(node="node2", command=("sh", "-c", "exec sleep 6"), about="")
    with subprocess.Popen(["sleep", "60"], text=True) as keeper:
        try:
            with pytest.raises(HostError, match="did not get ready within 1 s") as caught:
                supervise._set_up(step, "", keeper)
        finally:
            keeper.kill()
    assert caught.value.where == "node2"


APPTAINER = """\
\x1b[34mINFO:   \x1b[0m gocryptfs not found, will not be able to use gocryptfs
WARNING: something else
\x1b[31mFATAL:  \x1b[0m container creation failed: squashfuse_ll exited: fuse: failed to open /dev/fuse: Permission denied
"""


@pytest.mark.parametrize(
    ("printed", "why", "hint"),
    [
        (APPTAINER, "container creation failed: squashfuse_ll exited: fuse: ", "a sandbox takes none"),
        ("docker: no such image\n\nRun 'docker run --help'\n", "docker: no such image", "docker info"),
        ("INFO:    Instance stats will not be available\n", "INFO:    Instance stats will not be", "docker info"),
        ("\n", "no message", "docker info"),
    ],
)
def test_a_container_that_does_not_start_says_why(printed: str, why: str, hint: str) -> None:
    step = LaunchStep(node="node2", command=("false",), about="")
    with subprocess.Popen(["sh", "-c", 'printf %s "$0" >&2', printed], text=True, stderr=subprocess.PIPE) as keeper:
        keeper.wait()
        with pytest.raises(HostError) as caught:
            supervise._set_up(step, "", keeper)
    assert caught.value.what.startswith(f"no container could be started: {why}")
    assert hint in caught.value.hint


FAKES = {
    "docker": """\
if [ "$1" = run ]; then
    for word; do :; done
    exec sh -c "$word"
fi
cat > /dev/null
if [ -e "$STATE" ]; then printf '\\377: no space left\\n' >&2; exit 1; fi
touch "$STATE"
printf '\\377\\nssh-ed25519 AAAA\\n'
""",
    "ssh-keygen": """\
[ -z "${NO_KEY:-}" ] || { echo 'Saving the key failed: no space left' >&2; exit 1; }
for word; do :; done
echo private > "$word"
echo public > "$word.pub"
""",
}


@pytest.fixture
def with_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Return a job with logins on this host alone, whose engine takes the first script and no other."""
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path / "state"))
    container = Container(image="img", gpus="none")
    return Job(
        nodes=(Node(name="127.0.0.1", slots=1),), launcher="mpirun", container=container, script=("t.py",), name="job"
    )


def test_a_container_that_takes_no_public_keys_is_named(with_fakes: Job) -> None:
    with pytest.raises(HostError, match=r"takes no public keys of the others: .*no space left") as caught:
        run_launch(with_fakes, BARE.facts(), Settings(cache_dir=Path("/nowhere")))
    assert caught.value.where == "127.0.0.1"


def test_a_key_that_cannot_be_made_says_why(with_fakes: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_KEY", "1")
    with pytest.raises(HostError, match=r"no key could be made: .*no space left"):
        run_launch(with_fakes, BARE.facts(), Settings(cache_dir=Path("/nowhere")))


def test_beats_end_with_their_input() -> None:
    with subprocess.Popen(["sh", "-c", beats.BEATING], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"beat\n"
        process.stdin.close()
        assert process.wait(10) >= 0
        assert process.stdout.read() == b""


@pytest.fixture
def sandbox(tmp_path: Path) -> str:
    (tmp_path / "image" / ".singularity.d").mkdir(parents=True)
    return str(tmp_path / "image")


def instance(sandbox: str, launcher: str = "torchrun") -> list[str]:
    nodes = (Node(name="127.0.0.1", slots=1), Node(name="127.0.0.2", slots=1))
    container = Container(image=sandbox, gpus="none")
    job = Job(nodes=nodes, launcher=launcher, container=container, script=("train.py",), name="job")
    plan, _ = plan_launch(job, BARE.facts(), Settings(cache_dir=Path("/nowhere")))
    return list(plan.keepers[0].command)


def test_an_instance_leaves_nothing_on_the_host(tmp_path: Path, sandbox: str) -> None:
    """Its home, /tmp, keys and values are the job's, and go with it: the second job of a host finds none of the first."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "own").mkdir()
    fake = tmp_path / "bin" / "apptainer"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "" >> "$LOG"\n')
    fake.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LOG": str(tmp_path / "log"), "TMPDIR": str(tmp_path / "own"),
    }  # fmt: skip
    with subprocess.Popen(
        instance(sandbox), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout.readline() == "beat\n"
        start = (tmp_path / "log").read_text().splitlines()
        assert start[:2] == ["instance", "start"]
        kept = Path(start[start.index("--bind") + 1].partition("/run:")[0])
        home = Path(start[start.index("--home") + 1].partition(":")[0])
        assert home.is_relative_to(tmp_path / "own")
        assert kept.stat().st_mode & 0o777 == 0o700
        if os.access("/dev/shm", os.W_OK):
            assert kept.is_relative_to("/dev/shm")
        process.stdin.close()
        process.wait(10)
    assert "instance\nstop\n" in (tmp_path / "log").read_text()
    assert not kept.exists()
    assert list((tmp_path / "own").iterdir()) == []


def test_logins_between_instances_take_another_user_than_root(sandbox: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for user, refused in ((0, True), (1000, False)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        for launcher in ("mpirun", "deepspeed"):
            if refused:
                with pytest.raises(UsageError, match="rights that root gives up"):
                    instance(sandbox, launcher)
            else:
                assert instance(sandbox, launcher)
