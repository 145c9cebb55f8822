"""Start the suite: as a process of this host, or in a container."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.paths import data_dir
from envbuild.util.processes import end_group, guarded
from envbuild.verify.target import PYTHON_IN_IMAGE

if TYPE_CHECKING:
    from envbuild.engine.image import Image
    from envbuild.run.container import Access, Container
    from envbuild.run.runtime import Runtime
    from envbuild.settings import Settings

# What an environment may set for its own tests: with it the suite would run less than it says, or assert nothing.
_NOT_THE_SUITES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONOPTIMIZE")
_MARKED_S = 5.0
"""How long what is killed may take to end, seconds: a process that waits for a device ends late."""


@dataclass(kw_only=True)
class Started:
    """A suite that runs."""

    process: subprocess.Popen[str]
    remove: Callable[[], None]
    """Ends everything that belongs to the process, also what it started and left."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """How the suite is called."""

    pytest: Path
    """Folder of the pytest that it runs with."""
    expectation: Path
    arguments: Sequence[str]
    environment: Mapping[str, str]
    """Variables added to the suite's environment."""
    entry: str = "run.py"
    """The suite's file that runs."""


def only_gpus(gpus: "Access") -> dict[str, str]:
    """Return the variables that show a process of this host the GPUs `gpus` alone; nothing for `auto` and `all`.

    CUDA by itself counts the fastest GPU first: its numbers are nvidia-smi's by CUDA_DEVICE_ORDER alone.
    """
    if gpus == "none":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus[:1].isdecimal() else {}


def on_host(python: Path, call: Call, *, gpus: "Access" = "all") -> Started:
    """Start the suite with an interpreter of this host, which sees `gpus`."""
    suite = data_dir("smoke_tests")
    words = (python, suite / call.entry, "--expected", call.expectation, "--pytest", call.pytest, *call.arguments)
    own = {name: value for name, value in os.environ.items() if name not in _NOT_THE_SUITES}
    return start_here(
        [str(word) for word in words], {**own, **only_gpus(gpus), **call.environment, "PYTHONDONTWRITEBYTECODE": "1"}
    )


def start_here(command: Sequence[str], environment: Mapping[str, str], *, mark: str | None = None) -> Started:
    """Start a command as a process of this host, with `environment` and nothing else.

    Args:
        command: program and arguments.
        environment: the whole environment of the command.
        mark: a variable of it whose value no other run has: what inherited it ends with the run, in whatever session it is.

    Raises:
        FileNotFoundError: there is no such program.

    """
    process = subprocess.Popen(
        guarded(command, env=environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def remove() -> None:
        if process.poll() is None:
            # SIGINT lets the suite end its ranks; they also die with it, by the parent-death signal that each has set. A
            # shell's background job ignores SIGINT, and so does what it starts.
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            end_group(process, first=signal.SIGTERM if ignored else signal.SIGINT, patience=15.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what the suite left behind
            os.killpg(process.pid, signal.SIGKILL)
        if mark is not None:
            _end_marked(f"{mark}={environment[mark]}")

    return Started(process=process, remove=remove)


def _end_marked(variable: str) -> None:
    """Kill each process of this user that was started with `NAME=VALUE`: torchrun's workers lead sessions and outlive it."""
    wanted, end = os.fsencode(variable), time.monotonic() + _MARKED_S
    while time.monotonic() < end:
        found = False
        for number in (int(name) for name in os.listdir("/proc") if name.isdecimal()):  # noqa: PTH208 - names alone
            with contextlib.suppress(OSError):  # it ended, or is another user's
                if wanted in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                    os.kill(number, signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.05)  # one that was just being started is there the next time


def in_container(
    runtime: "Runtime",
    image: "Image",
    call: Call,
    held: contextlib.ExitStack,
    *,
    gpus: "Access",
    settings: "Settings",
    timeout_s: float,
) -> Started:
    """Start the suite in a container of `image`, which goes when `held` closes.

    Args:
        runtime: runs it.
        image: what runs.
        call: how the suite is called.
        held: takes the container.
        gpus: which of the machine's GPUs it gets; with `none` it has no network either.
        settings: say where this machine's facts are read.
        timeout_s: seconds after which the container may go, whatever became of this process.

    Raises:
        HostError: the runtime cannot make the container.

    """
    from envbuild.run.container import READ_COMPAT, Container, Mount

    container = Container(
        image=image.id,
        gpus=gpus,
        mounts=(
            Mount(source=data_dir("smoke_tests"), target="/smoke", read_only=True),
            Mount(source=call.pytest, target="/smoke-pytest", read_only=True),
            Mount(source=call.expectation, target="/smoke-expected.json", read_only=True),
        ),
        environment=tuple(
            f"{key}={value}"
            for key, value in {
                **dict.fromkeys(_NOT_THE_SUITES, ""),
                **call.environment,
                "PYTHONDONTWRITEBYTECODE": "1",
            }.items()
        ),
        # Two ranks on a CPU need no more than loopback, and a container without a network proves that nothing is fetched.
        network="none" if gpus == "none" else "host",
    )
    command = ["-c", READ_COMPAT + PYTHON_IN_IMAGE, "sh", f"/smoke/{call.entry}"]
    command += ["--expected", "/smoke-expected.json", "--pytest", "/smoke-pytest", *call.arguments]
    return start_guest(runtime, image, container, command, held, settings=settings, timeout_s=timeout_s)


def start_guest(
    runtime: "Runtime",
    image: "Image",
    container: "Container",
    command: Sequence[str],
    held: contextlib.ExitStack,
    *,
    settings: "Settings",
    timeout_s: float,
) -> Started:
    """Start `sh` with the arguments `command` in a container of `image`, which goes when `held` closes.

    Raises:
        HostError: the runtime cannot make the container.

    """
    from envbuild.host import facts

    made = runtime.guest("smoke", image, facts(settings), container, command, entrypoint="sh", seconds=timeout_s)
    guest = held.enter_context(made)
    process = subprocess.Popen(
        guarded(guest.line.command, env=guest.line.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=guest.line.environ,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def end() -> None:
        guest.remove()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.0 if process.poll() is not None else 1.0)
        end_group(process, first=signal.SIGTERM, patience=10.0)

    return Started(process=process, remove=end)
