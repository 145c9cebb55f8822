"""What a command prints where the reader is gone, the disk is full, or the locale is another."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild import cli
from envbuild.cli import program


def envbuild(*words: str, stdout=subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "envbuild", *words]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=os.environ | environment, check=False)


@pytest.mark.parametrize("words", [("resolve", "--json"), ("resolve", "--cuda", "99", "--json")])
def test_a_full_disk_is_one_clear_message(words):
    with Path("/dev/full").open("wb") as full:
        done = envbuild(*words, stdout=full)
    assert done.returncode == 8
    assert done.stderr.decode().startswith("envbuild: error: the disk is full")
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("resolve", "--json"), ("resolve", "--cuda", "99", "--json")])
def test_a_reader_that_went_away_is_no_traceback(words):
    read, write = os.pipe()
    os.close(read)
    try:
        done = envbuild(*words, stdout=write)
    finally:
        os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


def test_what_is_rendered_does_not_depend_on_the_locale():
    words = ("render", "--unlocked", "--cuda", "cpu")
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    assert envbuild(*words, **ascii_alone).stdout == envbuild(*words).stdout != b""


def test_a_stdout_that_is_closed_changes_no_exit_code():
    command = ["sh", "-c", f"exec {sys.executable} -m envbuild resolve --cuda cpu >&-"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_a_name_that_is_no_utf_8_is_printed_as_it_is(tmp_path):
    place = os.fsencode(tmp_path) + b"/D\xff.txt"
    with open(place, "w") as file:  # noqa: PTH123 - a name in bytes
        file.write("FROM ubuntu:22.04\n")
    command = [sys.executable, "-m", "envbuild", "check", place]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"LC_ALL": "C.UTF-8"}, check=False)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_goes_away_interrupts_unless_under_nohup(monkeypatch, ignored):
    monkeypatch.setattr(program, "_run", lambda _: os.kill(os.getpid(), signal.SIGHUP))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        if ignored:
            cli.main([])
        else:
            with pytest.raises(KeyboardInterrupt):
                cli.main([])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
