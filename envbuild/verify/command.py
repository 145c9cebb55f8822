"""Run a user's own command in an image, or in an environment of this host, and report what each of its ranks did.

The command runs as `envbuild run` would run it. For this one run a folder with a `sitecustomize.py` is put in front of its
PYTHONPATH, which notes what its Python processes do; `dockerfiles/watch` has it. Nothing of it stays in the image.
"""

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from envbuild.engine import apptainer
from envbuild.errors import HostError, SmokeError, UsageError
from envbuild.paths import data_dir
from envbuild.util.logs import new_log
from envbuild.util.names import shown
from envbuild.util.scratch import scratch
from envbuild.util.text import count_of
from envbuild.verify.follow import follow
from envbuild.verify.start import Started, only_gpus, start_guest, start_here
from envbuild.verify.watched import Fabric, RankReport, read_ranks

if TYPE_CHECKING:
    from envbuild.run.container import Access, Mount
    from envbuild.settings import Settings

_HOOK, _OUT = "/envbuild-watch", "/envbuild-watched"
# What Docker's and podman's commands print of a container that does not start.
_NOT_THERE = re.compile(
    r"could not select device driver|unresolvable CDI devices|nvidia-container-cli"
    r"|^Error response from daemon|^Error: (?:OCI runtime|unable to start container)|^Cannot connect to the Docker daemon"
    r"|^error during connect"
)
_TAIL = 20

Verdict = Literal["passed", "failed", "hung", "interrupted"]


def _not_started(code: int | None, tail: Sequence[str]) -> bool:
    """Return whether the runtime's own words say that the container did not start."""
    if code == apptainer.OWN_FAILURE and tail and apptainer.fatal(tail[-1]) is not None:
        return True
    return bool(code) and any(_NOT_THERE.search(line) for line in tail)


@dataclass(frozen=True, kw_only=True)
class CommandRequest:
    """What runs, where, and for how long."""

    command: tuple[str, ...]
    image: str | None
    """The image; None for this host."""
    steps: int
    """Steps of the optimizer after which each rank ends."""
    timeout_s: float
    gpus: "Access" = "auto"
    mounts: tuple["Mount", ...] = ()
    environment: tuple[str, ...] = ()
    """`NAME=VALUE`, or `NAME` for this process' own value."""
    workdir: str | None = None


@dataclass(frozen=True, kw_only=True)
class CommandReport:
    """What a run of a command showed."""

    command: tuple[str, ...]
    where: Mapping[str, Any]
    """`{"kind": "image", "reference", "digest", "runtime"}` or `{"kind": "host"}`."""
    code: int | None
    """The command's exit code; None where it was ended."""
    verdict: Verdict
    reason: str
    ranks: tuple[RankReport, ...]
    unread: tuple[str, ...]
    """What the processes left and what could not be read of it."""
    tail: tuple[str, ...]
    """The last lines that it printed."""
    seconds: float
    log: str

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "command": list(self.command),
            "where": dict(self.where),
            "exit_code": self.code,
            "verdict": self.verdict,
            "reason": self.reason,
            "ranks": [rank.as_json() for rank in self.ranks],
            "unread": list(self.unread),
            "seconds": self.seconds,
            "log": self.log,
        }

    def raise_for_verdict(self) -> None:
        """Raise what the verdict calls for.

        Raises:
            SmokeError: the command failed or hung, no rank was seen, or one uses sockets past InfiniBand or EFA.
            HostError: the container did not start, for want of this machine's GPUs or for another reason of the engine's.
            KeyboardInterrupt: somebody interrupted it.

        """
        if self.verdict == "passed":
            return
        if self.verdict == "interrupted":
            raise KeyboardInterrupt
        where = str(self.where.get("reference", "this host"))
        if _not_started(self.code, self.tail):
            raise HostError(self.reason, where=where, hint="`envbuild doctor` shows what this host can run")
        raise SmokeError(self.reason, where=where, hint=f"everything it printed is in {self.log}")


@dataclass(kw_only=True)
class _Heard:
    """Takes the command's output."""

    show: Callable[[str], None]
    broken: str | None = None
    timed_out: bool = False
    interrupted: bool = False
    ended: bool = False
    tail: list[str] = field(default_factory=list)
    place: str = "in the command"

    def line(self, text: str) -> None:
        clean = shown(text.rstrip("\r\n").replace("\t", "    "), 2000)
        if clean.strip():
            self.tail = [*self.tail[1 - _TAIL :], clean]
        self.show(clean)


def run_command(
    request: CommandRequest, settings: "Settings", *, show: Callable[[str], None] = lambda _: None
) -> CommandReport:
    """Run a command for some steps and return the report on its ranks, whatever the verdict.

    Args:
        request: what runs.
        settings: say where the engine and the cache are.
        show: takes each line that the command prints, control characters escaped.

    Raises:
        HostError: no engine, no such image, or the container cannot be made.
        UsageError: there is no such program on this host.

    """
    from envbuild.host import facts

    heard = _Heard(show=show)
    with scratch("watch") as own, contextlib.ExitStack() as held:
        hook, out = own / "hook", own / "out"
        # a copy: Python writes byte code next to it
        shutil.copytree(data_dir("dockerfiles") / "watch", hook, ignore=shutil.ignore_patterns("__pycache__"))
        out.mkdir()
        own.chmod(0o755)
        out.chmod(0o777)  # the image's user writes there, whoever that is
        began = time.monotonic()
        where, started = _started(request, settings, hook, out, held)
        with new_log(settings.cache_dir / "logs", "command", "run") as kept:
            code = follow(started, heard, kept, request.timeout_s)
        seconds = round(time.monotonic() - began, 1)
        fabric = Fabric(adapters={nic.name: (nic.link_layer, nic.active) for nic in facts(settings).infiniband})
        ranks, unread = read_ranks(out, fabric)
    verdict, reason = _verdict(heard, code, ranks, request)
    return CommandReport(
        command=request.command,
        where=where,
        code=code,
        verdict=verdict,
        reason=reason,
        ranks=tuple(ranks),
        unread=tuple(unread),
        tail=tuple(heard.tail),
        seconds=seconds,
        log=kept.name,
    )


def run_test(
    image: str,
    command: Sequence[str],
    settings: "Settings",
    *,
    timeout_s: float,
    mounts: tuple["Mount", ...] = (),
    environment: tuple[str, ...] = (),
    gpus: "Access" = "auto",
    show: Callable[[str], None] = lambda _: None,
) -> tuple[int, str]:
    """Run a command in an image as `envbuild run` would, and return its exit code and its last line.

    Raises:
        HostError: no engine, no such image, no such GPU, one for another processor, or the container cannot be made.
        SmokeError: it did not end in time, or printed too much.
        KeyboardInterrupt: somebody interrupted it.

    """
    from envbuild.run.container import READ_COMPAT, Container
    from envbuild.run.runtime import runtime_for

    heard = _Heard(show=show)
    runtime = runtime_for(settings, image)
    found = runtime.look_up(image)
    runtime.require_runnable(found)
    container = Container(image=found.id, gpus=gpus, mounts=mounts, environment=environment, init=True)
    words = ["-c", READ_COMPAT + 'exec "$@"', "sh", *command]
    with contextlib.ExitStack() as held:
        started = start_guest(runtime, found, container, words, held, settings=settings, timeout_s=timeout_s)
        with new_log(settings.cache_dir / "logs", "bisect", "run") as kept:
            code = follow(started, heard, kept, timeout_s)
    last = heard.tail[-1] if heard.tail else "it printed nothing"
    if heard.interrupted:
        raise KeyboardInterrupt
    if code is None:
        what = heard.broken or f"the test did not end within {timeout_s:.0f} s: {last}"
        raise SmokeError(what, where=image, hint=f"everything it printed is in {kept.name}")
    if _not_started(code, heard.tail):
        raise HostError(last, where=image, hint="`envbuild doctor` shows what this host can run")
    return code, last


def _started(
    request: CommandRequest, settings: "Settings", hook: Path, out: Path, held: contextlib.ExitStack
) -> tuple[dict[str, Any], Started]:
    """Start the command; return where it runs, for the report."""
    from envbuild.host import facts
    from envbuild.run.container import ON_PYTHONPATH, READ_COMPAT, Container, Mount, wanted_gpus
    from envbuild.run.runtime import runtime_for

    watch = {"ENVBUILD_WATCH_STEPS": str(request.steps)}
    if request.image is None:
        stated = [item.partition("=") for item in request.environment]
        environment = {
            **os.environ,
            **{name: value for name, equals, value in stated if equals},
            **only_gpus(request.gpus),
            **watch,
        }
        environment["ENVBUILD_WATCH_OUT"] = str(out)
        if request.gpus != "auto":
            wanted_gpus(facts(settings), request.gpus)
        words = ["sh", "-c", ON_PYTHONPATH, str(hook), *request.command]
        if request.workdir and not os.path.isdir(request.workdir):  # noqa: PTH112 - a name that is too long is none, too
            raise UsageError(
                f"{shown(request.workdir)} is no folder of this host", where="--workdir", hint="name one that is there"
            )
        if request.workdir:
            words = ["sh", "-c", 'cd "$0" && exec "$@"', request.workdir, *words]
        try:
            return {"kind": "host"}, start_here(words, environment, mark="ENVBUILD_WATCH_OUT")
        except FileNotFoundError:
            raise UsageError("this host has no sh", where=request.command[0]) from None
    runtime = runtime_for(settings, request.image)
    image = runtime.look_up(request.image)
    runtime.require_runnable(image)
    container = Container(
        image=image.id,
        gpus=request.gpus,
        mounts=(
            *request.mounts,
            Mount(source=hook, target=_HOOK, read_only=True),
            Mount(source=out, target=_OUT),
        ),
        environment=(
            *request.environment,
            *(f"{name}={value}" for name, value in {**watch, "ENVBUILD_WATCH_OUT": _OUT}.items()),
        ),
        workdir=request.workdir,
        init=True,
    )
    command = ["-c", READ_COMPAT + ON_PYTHONPATH, _HOOK, *request.command]
    where = {
        "kind": "image",
        "reference": request.image,
        "digest": image.digest,
        "runtime": runtime.describe(),
    }
    started = start_guest(runtime, image, container, command, held, settings=settings, timeout_s=request.timeout_s)
    return where, started


def _verdict(
    heard: _Heard, code: int | None, ranks: Sequence[RankReport], request: CommandRequest
) -> tuple[Verdict, str]:
    last = heard.tail[-1] if heard.tail else "it printed nothing"
    if heard.interrupted:
        return "interrupted", "interrupted"
    if heard.broken:
        return "failed", heard.broken
    if heard.timed_out:
        seen = count_of(max(rank.steps for rank in ranks), "step") if ranks else "no rank"
        return "hung", f"the command did not end within {request.timeout_s:.0f} s: {seen} seen; {last}"
    if code is None or code != 0:
        return "failed", f"the command ended with exit code {code}: {last}"
    if not ranks:
        return "failed", (
            "no process of the command imported torch where it could be seen: a command that sets PYTHONPATH for itself, "
            "or runs Python with -I, -E or -S, hides it"
        )
    past = [rank for rank in ranks if rank.sockets]
    if past:
        which = "rank " + ", ".join(str(rank.rank) for rank in past[:8]) + (" and more" if len(past) > 8 else "")
        return "failed", f"{which}: {past[0].sockets}"
    return "passed", ""
