"""Commands that are followed line by line, and what is left of them when the reader is interrupted."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from envbuild.util import maker, processes
from envbuild.util.maker import Maker
from envbuild.util.processes import ProcessResult, bounded, followed, guarded, streamed

# Says a line, then works until it is asked to end, which takes it longer than Python waits on Ctrl-C by itself (0.25 s).
SLOW_TO_END = """
trap 'sleep 1; echo more than a pipe holds; head -c 200000 /dev/zero | tr "\\0" x; echo; touch ended; exit 1' TERM
echo ready
while :; do sleep 0.05; done
"""


def follow(script: str, tmp_path, feed, patience: float = 30.0) -> int:
    return followed(["sh", "-c", f"exec >&2; {script}"], cwd=tmp_path, env=os.environ, feed=feed, patience=patience)


def test_every_line_is_handed_over_and_the_exit_code_returned(tmp_path):
    lines: list[str] = []
    assert follow("echo one; echo two; exit 3", tmp_path, lines.append) == 3
    assert lines == ["one\n", "two\n"]


@pytest.mark.parametrize("by", [KeyboardInterrupt, ValueError])
def test_an_interrupt_waits_until_the_command_has_ended(tmp_path, by):
    def feed(line: str) -> None:
        raise by

    with pytest.raises(by):
        follow(SLOW_TO_END, tmp_path, feed)
    assert (tmp_path / "ended").exists()


def test_a_command_that_will_not_end_is_killed_with_what_it_started(tmp_path):
    def feed(line: str) -> None:
        raise KeyboardInterrupt

    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        follow("trap '' TERM; (sleep 1; touch outlived) & echo ready; wait; sleep 60", tmp_path, feed, patience=0.2)
    assert time.monotonic() - begun < 5
    time.sleep(1.2)
    assert not (tmp_path / "outlived").exists()


def test_a_command_that_ends_at_once_is_read_to_its_end_in_silence(tmp_path, monkeypatch):
    """Its pipe was closed before somebody read on, and that one's traceback was printed."""
    failed = []
    monkeypatch.setattr("threading.excepthook", failed.append)

    class Late(threading.Thread):
        def run(self) -> None:
            time.sleep(0.1)
            super().run()

    def feed(line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("threading.Thread", Late)
    with pytest.raises(KeyboardInterrupt):
        follow("echo ready", tmp_path, feed)
    time.sleep(0.3)
    assert failed == []


def test_stdout_is_handed_over_where_it_is_asked_for(tmp_path):
    lines: list[str] = []
    command = ["sh", "-c", "echo out; echo err >&2"]
    assert followed(command, feed=lines.append, stdout=True) == 0
    assert sorted(lines) == ["err\n", "out\n"]
    lines.clear()
    assert followed(command, feed=lines.append) == 0
    assert lines == ["err\n"]


def test_a_line_without_an_end_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "_LINE", 1000)
    lines: list[str] = []
    assert followed(["sh", "-c", "head -c 5000 /dev/zero | tr '\\0' x"], feed=lines.append, stdout=True) == 0
    assert [len(line) for line in lines] == [1000] * 5


# --- within bounds ------------------------------------------------------------------------------------


def test_what_a_command_says_is_returned_with_its_code():
    ran = bounded(["sh", "-c", "cat; echo worse >&2; exit 3"], seconds=10, limit=100, stdin=b"fed")
    assert ran == ProcessResult(code=3, out=b"fed", err=b"worse\n")


@pytest.mark.parametrize("where", ["", ">&2"])
def test_endless_output_is_cut_and_the_command_ended(where):
    begun = time.monotonic()
    ran = bounded(["sh", "-c", f"exec yes {where}"], seconds=60, limit=1_000_000)
    assert ran.fault == "printed more than 1,000,000 bytes"
    assert ran.code == -9
    assert len(ran.out) < 2_000_000
    assert len(ran.err) <= 1 << 16
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "script", ["trap '' TERM INT HUP; sleep 60", "exec >&- 2>&-; sleep 60", "sleep 60 & exit 0", "yes | (sleep 60)"]
)
def test_what_never_ends_is_ended_in_time(script):
    begun = time.monotonic()
    ran = bounded(["sh", "-c", script], seconds=0.5, limit=100)
    assert ran.fault == "did not end within 0.5 s"
    assert time.monotonic() - begun < 5


def test_what_a_command_left_behind_is_ended_too(tmp_path):
    ran = bounded(["sh", "-c", f"sleep 60 & echo $! >{tmp_path}/left"], seconds=0.5, limit=100)
    assert ran.fault == "did not end within 0.5 s"
    left = int((tmp_path / "left").read_text())
    deadline = time.monotonic() + 5
    while maker._started(left) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert maker._started(left) is None


def test_a_command_that_reads_nothing_holds_up_nothing():
    assert bounded(["true"], seconds=10, limit=10, stdin=b"x" * 60_000).code == 0


def test_a_stream_is_read_to_its_end_and_a_bad_end_is_reported():
    with streamed(["sh", "-c", "head -c 3000000 /dev/zero"], seconds=20) as stream:
        count = 0
        while piece := stream.read(700_000):
            count += len(piece)
    assert count == 3_000_000

    def read_all() -> None:
        with streamed(["sh", "-c", "echo x; echo no disk >&2; exit 3"], seconds=20) as stream:
            while stream.read(100):
                pass

    with pytest.raises(subprocess.CalledProcessError) as caught:
        read_all()
    assert (caught.value.returncode, caught.value.stderr) == (3, b"no disk\n")


def test_a_stream_is_fed_while_it_is_read():
    """More than two pipes hold goes through: nobody waits for the other one."""
    left = [b"x" * 1_000_000] * 5
    with streamed(["cat"], seconds=20, stdin=lambda count: left.pop()[:count] if left else b"") as stream:
        count = 0
        while piece := stream.read(1 << 20):
            count += len(piece)
    assert count == 5_000_000


@pytest.mark.parametrize("script", ["exit 3", "head -c 10 >/dev/null; exit 3"])
def test_a_feed_that_nobody_takes_ends_with_the_command(script):
    with (
        pytest.raises(subprocess.CalledProcessError),
        streamed(["sh", "-c", script], seconds=20, stdin=lambda count: b"x" * count) as stream,
    ):
        assert stream.read(100) == b""


class DamagedError(Exception):
    """What a reader says of bytes that it cannot read."""


def read_one(script: str) -> None:
    """Read a line, and find it damaged."""
    with streamed(["sh", "-c", script], seconds=20, damaged=(DamagedError,)) as stream:
        stream.read(100)
        raise DamagedError


def test_what_a_command_that_failed_did_not_write_is_its_failure():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        read_one("echo half; echo no disk >&2; exit 3")
    assert (caught.value.returncode, caught.value.stderr) == (3, b"no disk\n")
    assert isinstance(caught.value.__cause__, DamagedError)


@pytest.mark.parametrize("script", ["echo all", "echo first; sleep 0.2; echo more; exec sleep 60"])
def test_what_is_damaged_by_itself_stays_so(script):
    begun = time.monotonic()
    with pytest.raises(DamagedError):
        read_one(script)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("script", ["exec yes", "trap '' TERM; sleep 60"])
def test_a_stream_that_is_left_is_ended(script, tmp_path):
    begun = time.monotonic()
    with streamed(["sh", "-c", f"echo $$ >{tmp_path}/pid; echo first; {script}"], seconds=60) as stream:
        assert stream.read(3) == b"fir"
        if "sleep" in script:
            stream._deadline = 0
            assert stream.read(100) == b"st\n"
            with pytest.raises(TimeoutError, match="did not end within 60 s"):
                stream.read(100)
            stream._rest = b"x"  # so that leaving the block looks for no more
    assert time.monotonic() - begun < 10
    pid = int((tmp_path / "pid").read_text())
    while maker._started(pid) is not None:  # SIGKILL has been sent, and the kernel takes its time
        assert time.monotonic() - begun < 10
        time.sleep(0.01)


HELD_BACK = """
import os, signal, sys
from envbuild.util.processes import uninterrupted
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.default_int_handler)
try:
    with uninterrupted():
        with uninterrupted():
            os.kill(os.getpid(), int(sys.argv[1]))
            os.kill(os.getpid(), signal.SIGINT)
        print("done")
    print("never")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_until_the_steps_are_done(number):
    done = subprocess.run(
        [sys.executable, "-c", HELD_BACK, str(int(number))], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["done", "interrupted"], "")


def test_a_maker_is_known_by_more_than_its_number():
    here = Maker.here(seconds=60)
    assert Maker.parse(str(here)) == here
    assert not here.gone
    assert replace(here, started=here.started - 1).gone  # another process had this number
    assert replace(here, until=1).gone
    for elsewhere in (replace(here, boot="0" * 12, pid=1 << 30), replace(here, space=1, pid=1 << 30)):
        assert not elsewhere.gone
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert replace(here, pid=ended.pid).gone
    for text in ("", "x", f"{here}-1", str(here).upper() + "G", "a" * 100_000, str(here).replace("-", "_")):
        assert Maker.parse(text) is None


# --- a killed parent ------------------------------------------------------------------------------------

PARENT = """
import sys
from envbuild.util.processes import followed, guarded
followed(["sh", "-c", sys.argv[1]], feed=lambda line: print(line, end="", flush=True), patience=float(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("script", "patience"),
    [
        ("trap 'touch ended; exit' TERM; echo ready >&2; exec 2>&-; while :; do sleep 0.05; done", 30.0),
        ("trap '' TERM; echo ready >&2; while :; do sleep 0.05; touch alive; done", 0.3),
        ("(trap '' TERM; while :; do sleep 0.05; touch alive; done) & echo ready >&2; wait", 0.3),
    ],
    ids=["asked", "will not", "what it started"],
)
def test_what_a_killed_process_had_started_ends_too(tmp_path, script, patience):
    command = [sys.executable, "-c", PARENT, script, str(patience)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
    end = time.monotonic() + 10
    while works_in(tmp_path):
        assert time.monotonic() < end, works_in(tmp_path)
        time.sleep(0.05)
    assert (tmp_path / "ended").exists() == (patience > 1)


def works_in(folder) -> list[str]:
    """Return the processes whose working folder is this one."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (place / "cwd").readlink() == folder and (place / "cmdline").read_bytes():
                found.append((place / "cmdline").read_text())
    return found


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -KILL $$", -9), ("kill -SEGV $$", -11)])
def test_the_end_of_a_guarded_command_is_its_own(script, code):
    assert subprocess.run(guarded(["sh", "-c", script]), check=False).returncode == code


def test_a_guarded_command_gets_pipes_as_a_shell_would_give_them():
    """Python ignores SIGPIPE: a command that inherits that writes on to a closed pipe."""
    done = subprocess.run(guarded(["sh", "-c", "yes | head -n 1"]), capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("y\n", "")


def test_a_program_that_is_missing_is_missing_at_once():
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        guarded(["no-such-program"])


def test_a_guard_whose_parent_is_dead_already_starts_nothing(tmp_path):
    command = guarded(["touch", str(tmp_path / "started")])
    command[4] = "1"  # another parent than the one that it will have
    assert subprocess.run(command, check=False).returncode != 0
    assert not (tmp_path / "started").exists()
