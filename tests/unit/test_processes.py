"""Commands that are followed line by line, and what is left of them when the reader is interrupted."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envbuild.processes import followed, guarded

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


def test_stdout_is_handed_over_where_it_is_asked_for(tmp_path):
    lines: list[str] = []
    command = ["sh", "-c", "echo out; echo err >&2"]
    assert followed(command, feed=lines.append, stdout=True) == 0
    assert sorted(lines) == ["err\n", "out\n"]
    lines.clear()
    assert followed(command, feed=lines.append) == 0
    assert lines == ["err\n"]


PARENT = """
import sys
from envbuild.processes import followed, guarded
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


def test_a_line_without_an_end_is_handed_over_in_pieces(tmp_path):
    sizes: list[int] = []
    assert follow("head -c 20000000 /dev/zero | tr '\\0' x", tmp_path, lambda line: sizes.append(len(line))) == 0
    assert sum(sizes) == 20_000_000
    assert max(sizes) <= 8_000_000
