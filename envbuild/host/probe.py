"""How facts of a machine are read: commands with a time limit, small files, names in a folder."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROBE_SECONDS = 15
"""Time limit of one command. nvidia-smi takes seconds per GPU when no persistence daemon keeps the driver loaded."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a command did."""

    code: int
    out: str
    err: str = ""


class Probe(Protocol):
    """How facts are collected: the machine itself, or a recording of one."""

    def run(self, *command: str) -> ProbeResult | None:
        """Return what the command did; None when there is no such command or it ran out of time."""

    def read(self, path: str) -> str | None:
        """Return a small file's text, or None."""

    def entries(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in a folder; none when there is no such folder."""


class LocalProbe:
    """The machine that this process runs on."""

    def run(self, *command: str) -> ProbeResult | None:
        """Run the command with the time limit, in the C locale."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except (OSError, ValueError):
            return None
        try:
            out, err = process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            # Killed with its children and hardly waited for: what hangs on a dead file server ends when that answers.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            return None
        return ProbeResult(code=process.returncode, out=out, err=err)

    def read(self, path: str) -> str | None:
        """Read the file as UTF-8."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def entries(self, path: str) -> tuple[str, ...]:
        """List the folder."""
        try:
            return tuple(sorted(os.listdir(path)))  # noqa: PTH208 - names, not paths
        except OSError:
            return ()
