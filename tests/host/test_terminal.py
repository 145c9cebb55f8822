"""The live view on a terminal: a pseudo-terminal of 60 columns, whose screen is followed."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from rich.cells import cell_len

ROOT = Path(__file__).parents[2]
STREAM = ROOT / "tests" / "data" / "buildkit" / "cpu.jsonl"

CHILD = """
import fcntl, io, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pathlib import Path
from envbuild.cli import output
from envbuild.cli.work import Work
from envbuild.engine.progress import Watch
from envbuild import cli
import click

titles = [("base", "base system", 3.0), ("runtime", "OS packages", None), ("torch", "torch 2.13.0+cpu", 30.0),
          ("env", "Python environment " + "with a long title " * 5, 1.0), ("image", "image", 1.0)]

@click.command()
@output.progress_options
def build():
    work = output.printed.work
    work.parts(titles)
    watch = Watch(log=io.StringIO(), on_change=work.change, details=work)
    for line in Path(sys.argv[1]).read_text().splitlines():
        watch.feed(line)
        time.sleep(0.03)
        if "torch" in watch.stages and not watch.stages["torch"].executed:
            work.line("torch", "a line that is much longer than any terminal is wide \\u4e2d\\u6587 " * 5)
    try:
        if sys.argv[2] == "wait":
            work.change("load", "started")
            time.sleep(60)
    finally:
        watch.ended(well=False)

cli.COMMANDS["build"] = "build"
cli.cli.add_command(build)
cli.LazyGroup.get_command = lambda self, ctx, name: build
cli.main(["build"])
"""


class Screen:
    """What a terminal shows; it notes where a line would wrap."""

    def __init__(self, width):
        self.width, self.lines, self.row, self.column = width, [""], 0, 0
        self.wrapped, self.cursor = [], True

    def feed(self, text):
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part.startswith("\x1b["):
                self._control(part)
            else:
                line = self.lines[self.row]
                line = line[: self.column].ljust(self.column) + part + line[self.column + len(part) :]
                self.lines[self.row], self.column = line, self.column + len(part)
                if cell_len(line) >= self.width:
                    self.wrapped.append(line)

    def _control(self, part):
        if part.endswith("A"):
            self.row = max(0, self.row - int(part[2:-1] or 1))
        elif part == "\x1b[2K":
            self.lines[self.row] = ""
        elif part in {"\x1b[?25l", "\x1b[?25h"}:
            self.cursor = part.endswith("h")
        else:
            assert part.endswith("m"), part

    @property
    def shown(self):
        return [line.rstrip() for line in self.lines if line.strip()]


@contextlib.contextmanager
def running(*words, width=60, height=20):
    """Run the child on its own terminal; yield it, and what reads its output so far."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in {"COLUMNS", "LINES", "NO_COLOR"}}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(STREAM), *words],
        stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    output = bytearray()

    def read(until):
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            try:
                piece = os.read(mine, 65536)
            except OSError:  # its end is closed
                break
            output.extend(piece)
            if until and until in output:
                break
        return output.decode("utf-8", "replace")

    try:
        yield process, read, mine
    finally:
        process.kill()
        process.wait()
        os.close(mine)


def test_the_narrow_view_never_wraps_and_leaves_nothing_behind():
    with running("end") as (process, read, _):
        text = read(None)
        process.wait(30)
    screen = Screen(60)
    screen.feed(text)
    assert "━" not in text  # no room for a bar
    assert re.search(r"torch 2.13.0\+cpu .*about \d+ s left", text)
    assert "[2K" in text  # it was drawn live
    assert screen.wrapped == []
    assert screen.cursor
    assert all(re.match(r" [✓✗-] ", line) for line in screen.shown), screen.shown
    assert any("3 of 5  torch 2.13.0+cpu: done" in line for line in screen.shown)


def test_a_wide_view_has_bytes_and_the_same_lines():
    with running("end", width=120) as (_, read, _):
        text = read(None)
    screen = Screen(120)
    screen.feed(text)
    assert screen.wrapped == []
    assert re.search(r"inputs copied to the builder +\d+ MB", text)


def test_an_interrupt_takes_the_view_away():
    with running("wait") as (process, read, terminal):
        read(b"load")
        time.sleep(0.5)
        os.write(terminal, b"\x03")
        text = read(None)
        assert process.wait(30) == 130
    screen = Screen(60)
    screen.feed(text)
    assert screen.cursor
    assert [line for line in screen.wrapped if not line.startswith("envbuild: ")] == []
    assert screen.shown[-1].startswith("envbuild: interrupted")
    assert not any(mark in line for line in screen.shown for mark in "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏")


def test_a_terminal_that_goes_away_ends_the_command_and_no_traceback():
    with running("wait") as (process, read, _):
        read(b"load")
        process.send_signal(signal.SIGHUP)
        text = read(None)
        assert process.wait(30) == 130
    assert "Traceback" not in text
