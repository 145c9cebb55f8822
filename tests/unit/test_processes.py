"""Commands that are followed line by line, and what is left of them when the reader is interrupted."""

import os
import time

import pytest

from envbuild.processes import followed

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
