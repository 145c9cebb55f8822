"""Processes that lead their own session, end with everything that they started or with who started them, and are read within bounds."""

import contextlib
import errno
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

_LINE = 1 << 20
"""Characters of one line; a longer one is handed over in pieces."""
_LAST = 1 << 16
"""Bytes that are kept of what a command says on stderr: its end."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Seconds that what was killed may take to end. One without a waiting parent stays in the group for longer, and does nothing.
_GROUP_S = 1.0
_GUARD = Path(__file__).with_name("guard.py")


def guarded(command: Sequence[str], *, patience: float = 30.0, env: Mapping[str, str] | None = None) -> list[str]:
    """Return `command` as one that ends when this process dies, however it dies.

    Started with `start_new_session=True`, everything of its session ends; else the command alone.

    Args:
        command: program and arguments.
        patience: how long it may take to end by SIGTERM, seconds.
        env: the environment that it will get; its PATH says where the program is.

    Raises:
        FileNotFoundError: there is no such program.

    """
    if shutil.which(command[0], path=(os.environ if env is None else env).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(patience), *command]


def end_group(
    process: "subprocess.Popen[bytes] | subprocess.Popen[str]", *, first: signal.Signals, patience: float
) -> None:
    """Send `first` to the group that `process` leads, and SIGKILL when that did not end it within `patience` seconds.

    Args:
        process: one that was started with `start_new_session=True`.
        first: what it takes as the request to clean up and go.
        patience: how long it may take for that, seconds.

    """
    for number, seconds in ((first, patience), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=seconds)
            break
    if number is signal.SIGKILL:
        _wait_for_group(process.pid)


def _wait_for_group(group: int) -> None:
    """Wait until no process of the group runs: a signal to all of them reaches some only after its leader has ended."""
    end = time.monotonic() + _GROUP_S
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.005)


def _drain(stream: IO[str]) -> None:
    with contextlib.suppress(OSError, ValueError):  # it is closed where somebody holds the pipe open
        while stream.read(65536):
            pass


def followed(
    command: Sequence[str],
    *,
    feed: Callable[[str], object],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: bool = False,
    patience: float = 30.0,
) -> int:
    """Run `command`, hand each line of its stderr to `feed` as it comes, and return the exit code.

    A line of more than 1 MiB comes in pieces.

    When `feed` raises or Ctrl-C comes, the command is asked to end by SIGTERM and nothing of it runs any more when this raises.
    It is asked as well when this process is killed.

    Args:
        command: program and arguments.
        feed: takes a line, its end included; one of more than 8 million characters comes in pieces.
        cwd: where it runs; here by default.
        env: its whole environment; this process's own by default.
        stdout: whether its stdout is fed, too, and not dropped.
        patience: how long the command may take to end, seconds.

    """
    with subprocess.Popen(
        guarded(command, patience=patience, env=env),
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if stdout else subprocess.DEVNULL,
        stderr=subprocess.STDOUT if stdout else subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        stream = process.stdout if stdout else process.stderr
        assert stream is not None  # noqa: S101 - it was requested
        try:
            for line in iter(lambda: stream.readline(_LINE), ""):
                feed(line)
        except BaseException:
            # Somebody reads on: a command whose pipe is full cannot end. On Ctrl-C the `with` alone would wait 0.25 s.
            reader = threading.Thread(target=_drain, args=(stream,), daemon=True)
            reader.start()
            end_group(process, first=signal.SIGTERM, patience=patience)
            reader.join(1.0)  # at the end of the pipe, which a process that left the group may hold open
            raise
    return process.returncode


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C, SIGTERM and SIGHUP until the block has ended: for a few quick steps that must not stop halfway.

    In a thread other than the main one it does nothing: Python hands no signal to those.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    # None is a handler that was not set from Python; an ignored signal stays ignored, in what is started here as well
    changed = {n: handler for n, handler in before.items() if handler is not None and handler is not signal.SIG_IGN}
    for number in changed:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """What a command printed, and how it ended."""

    code: int
    """Its exit code; negative where a signal ended it, as ours does when it goes out of bounds."""
    out: bytes
    """Its stdout."""
    err: bytes
    """The last 64 KiB of its stderr."""
    fault: str = ""
    """Which bound it broke, as the end of a sentence that starts with its name; empty when it kept them."""


def bounded(
    command: Sequence[str],
    *,
    seconds: float,
    limit: int,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
) -> ProcessResult:
    """Run `command`, feed it `stdin`, and read what it says until it ends or breaks a bound; then it is killed.

    Nothing of the command's own session runs any more when this returns or raises.

    Args:
        command: program and arguments.
        seconds: how long it may run.
        limit: bytes that it may write to stdout; stderr may have as many, of which the last 64 KiB are kept.
        stdin: what it reads, less than 64 KiB, so that a command which never reads holds up nothing.
        env: its whole environment; this process's own by default.

    Raises:
        OSError: there is no such program.

    """
    if len(stdin) >= 1 << 16:
        raise ValueError("more than a pipe holds")
    out, err = bytearray(), bytearray()
    with subprocess.Popen(
        guarded(command, env=env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    ) as process:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018, S101 - all were asked for
        fault = ""
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            deadline, counts = time.monotonic() + seconds, [0, 0]
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdout, selectors.EVENT_READ, 0)
                ready.register(process.stderr, selectors.EVENT_READ, 1)
                while ready.get_map() and not fault:
                    left = deadline - time.monotonic()
                    for key, _ in ready.select(max(0.0, left)):
                        piece = os.read(key.fd, 1 << 18)
                        if not piece:
                            ready.unregister(key.fileobj)
                            continue
                        counts[key.data] += len(piece)
                        if key.data:
                            err = (err + piece)[-_LAST:]
                        else:
                            out += piece
                        if counts[key.data] > limit:
                            fault = f"printed more than {limit:,} bytes"
                    if left <= 0:
                        fault = fault or f"did not end within {seconds:g} s"
            if not fault:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    fault = f"did not end within {seconds:g} s"
        finally:
            if process.returncode is None:  # not waited for: its number is still its group's
                end_group(process, first=signal.SIGKILL, patience=5.0)
    return ProcessResult(code=process.returncode, out=bytes(out), err=bytes(err), fault=fault)


class Stream:
    """What a command writes to stdout, read piece by piece until a moment."""

    def __init__(self, process: "subprocess.Popen[bytes]", seconds: float) -> None:
        assert process.stdout  # noqa: S101 - it was requested
        self._handle = process.stdout.fileno()
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._handle, selectors.EVENT_READ)
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._rest = memoryview(b"")

    def read(self, count: int) -> bytes:
        """Return the next bytes, at most `count`; none at the end.

        Raises:
            TimeoutError: the command did not write them in time.

        """
        if not self._rest:
            if not self._ready.select(max(0.0, self._deadline - time.monotonic())):
                raise TimeoutError(f"did not end within {self._seconds:g} s")
            self._rest = memoryview(os.read(self._handle, 1 << 20))
        piece, self._rest = self._rest[:count], self._rest[count:]
        return bytes(piece)

    def close(self) -> None:
        """Let the selector go."""
        self._ready.close()


@contextlib.contextmanager
def streamed(
    command: Sequence[str],
    *,
    seconds: float,
    stdin: Callable[[int], bytes] | None = None,
    damaged: tuple[type[Exception], ...] = (),
) -> Iterator[Stream]:
    """Run `command` and yield its stdout; when the block ends before it does, it is killed.

    Args:
        command: program and arguments.
        seconds: how long it may run.
        stdin: returns the next bytes that it reads, at most as many as asked for, and none at the end; called in a thread.
        damaged: what the block raises when it cannot read the output. Where the output ended there because the command
            ended badly, that is the cause: then this raises CalledProcessError instead.

    Raises:
        OSError: there is no such program.
        TimeoutError: it did not end within `seconds`.
        subprocess.CalledProcessError: the output was read to its end, and the command ended badly; `stderr` has its last
            64 KiB.

    """
    cause: Exception | None = None
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            guarded(command),
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        ) as process,
    ):
        stream = Stream(process, seconds)
        feeding = threading.Thread(target=_feed, args=(process, stdin), daemon=True)
        feeding.start()
        try:
            try:
                yield stream
            except damaged as error:
                if stream.read(1):
                    raise
                cause = error
            if not stream.read(1):
                process.wait(10.0)
        except subprocess.TimeoutExpired:
            raise TimeoutError("wrote everything and did not end") from None
        finally:
            stream.close()
            if process.returncode is None:
                end_group(process, first=signal.SIGKILL, patience=5.0)
                process.returncode = 0  # its end was ours
            feeding.join()  # there is no reader any more: what it writes fails
        if process.returncode:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _LAST))
            raise subprocess.CalledProcessError(process.returncode, command, stderr=errors.read()) from cause
    if cause is not None:
        raise cause


def _feed(process: "subprocess.Popen[bytes]", read: Callable[[int], bytes] | None) -> None:
    if read is None or process.stdin is None:
        return
    with contextlib.suppress(OSError, ValueError), process.stdin as pipe:
        while piece := read(1 << 20):
            pipe.write(piece)
