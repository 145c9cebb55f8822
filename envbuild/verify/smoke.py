"""Run the smoke suite in a container or on the bare host, follow it, and turn its output into one report.

The suite (`smoke_tests/run.py`) speaks on stdout in lines `@smoke {json}`; it is mounted read-only, and so is a pinned
pytest, so that an image holds nothing its lock does not list.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.errors import HostError, UsageError
from envbuild.evidence.report import Device, Level, SmokeReport
from envbuild.util.logs import new_log
from envbuild.util.names import shown
from envbuild.util.scratch import scratch
from envbuild.util.text import count_of
from envbuild.verify.collected import Collected
from envbuild.verify.expectation import default_device, for_cuda
from envbuild.verify.follow import follow
from envbuild.verify.start import Call, Started, in_container, on_host
from envbuild.verify.suite import entry_of, pinned_pytest, suite_of
from envbuild.verify.target import HostTarget, ImageTarget, Seen, look

if TYPE_CHECKING:
    from envbuild.run.container import Access
    from envbuild.settings import Settings

_PYTEST_RAN_NOTHING = (4, 5)  # a usage error; nothing collected


@dataclass(frozen=True, kw_only=True)
class SmokeRequest:
    """What is to run, where, and how far."""

    target: HostTarget | ImageTarget
    expected: Mapping[str, Any]
    """What the lock says the target holds (the file `ENVBUILD_EXPECTED` of the suite)."""
    level: Level
    """How far to go."""
    nproc: int = 0
    """Ranks; 0 is every GPU, two ranks on a CPU, every slot of `nodes`."""
    nodes: Path | None = None
    """A hostfile, to start ranks on several hosts as well."""
    seed: int | None = None
    """Of every random number; a fresh one by default."""
    timeout_s: float = 3600.0
    """Seconds for the whole run; the suite's launches have their own, shorter limits."""
    device: Device | None = None
    """`cpu` runs on CPUs what runs there even for a CUDA cell; by default the cell decides."""
    gpus: "Access" = "all"
    """Which of the machine's GPUs a run on GPUs sees: `all`, or numbers like `0,1`."""
    keyword: str | None = None
    """Only tests whose names match, as pytest's `-k`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the suite's environment."""


def run_smoke(
    request: SmokeRequest,
    settings: "Settings",
    *,
    progress: Callable[[Mapping[str, Any]], None] = lambda _: None,
    seen: Seen | None = None,
) -> SmokeReport:
    """Run the suite as `request` says and return its report, whatever the verdict; an interrupt is one.

    Args:
        request: what to run, where, and how far.
        settings: say where the engine, the caches and the indexes are.
        progress: called with every event of the suite as it comes, and first with the path of the log.
        seen: what `look` returned, when the caller has looked already.

    Raises:
        HostError: no engine, no such image, no such GPU, no pytest to mount.
        UsageError: `nodes` with an image (its containers on other hosts are `envbuild launch`'s business), or `gpus` by number
            for a run on the CPU.
        SmokeError: the image has no Python that runs.

    """
    _check_nodes(request)
    expected, device = request.expected, request.device or default_device(request.expected, request.level)
    _check_gpus(request, device, settings)
    seen = seen or look(request.target, settings)
    pytest = pinned_pytest(seen.python, settings)
    collected = Collected(progress, for_cuda=for_cuda(expected))
    code: int | None = None
    with scratch("smoke") as own, contextlib.ExitStack() as held:
        expectation = own / "expected.json"
        expectation.write_text(json.dumps(expected), encoding="utf-8")
        expectation.chmod(0o644)
        own.chmod(0o755)
        began, moment = time.monotonic(), datetime.now(UTC)
        suite = suite_of(expected.get("cell", {}), request.level.value, moment)  # of the files that run now
        call = Call(
            pytest=pytest,
            expectation=expectation,
            entry=entry_of(request.level.value),
            arguments=_arguments(request, device),
            environment=request.environment,
        )
        started: Started | None = None
        try:
            if isinstance(request.target, HostTarget):
                started = on_host(request.target.python, call, gpus=request.gpus)
            else:
                assert seen.image and seen.runtime  # noqa: PT018, S101 - a look at an image has both
                started = in_container(
                    seen.runtime,
                    seen.image,
                    call,
                    held,
                    gpus=request.gpus if device == "cuda" else "none",
                    settings=settings,
                    timeout_s=request.timeout_s,
                )
        except HostError as error:  # a verdict about this host, to be kept as evidence like any other
            collected.refused = f"{error.what}{': ' + error.hint if error.hint else ''}"
        subject = hashlib.sha256(json.dumps(seen.stated, sort_keys=True, default=str).encode()).hexdigest()[:8]
        with new_log(settings.cache_dir / "logs", "smoke", subject) as kept:
            progress({"event": "log", "path": kept.name})
            if started:
                code = follow(started, collected, kept, request.timeout_s)
    if request.keyword and code in _PYTEST_RAN_NOTHING and not collected.tests:
        raise UsageError(
            f"no test has such a name: {collected.tail[-1] if collected.tail else 'pytest printed nothing'}",
            where=f"-k {request.keyword!r}",
            hint="give a part of a test's name, or several with `and`, `or` and `not`",
        )
    verdict, reason = collected.judge(code, request.timeout_s)
    start = collected.start
    return SmokeReport(
        target=_target(seen, start),
        cell_id=shown(str(expected.get("cell_id", ""))),
        cell=dict(expected.get("cell", {})),
        lock_digest=expected.get("lock_digest"),
        level=request.level.value,
        device=device,
        nproc=int(start.get("nproc", request.nproc)),
        verdict=verdict,
        reason=reason,
        suite=suite,
        seed=start.get("seed"),
        machine=start.get("machine", {}),
        launchers=collected.launchers,
        tests=tuple(collected.tests),
        seconds=round(time.monotonic() - began, 1),
        log=kept.name,
    )


def _check_nodes(request: SmokeRequest) -> None:
    """Refuse hosts that the target or the number of ranks does not fit, before anything starts."""
    from envbuild.run.launch import read_hostfile

    if request.nodes is None:
        return
    where = f"--nodes {request.nodes}"
    if isinstance(request.target, ImageTarget):
        raise UsageError(
            "--nodes starts ranks by ssh on the bare hosts, not in containers",
            where=where,
            hint="run `envbuild smoke --host --nodes …` inside the environment, or `envbuild launch TAG --hostfile …`",
        )
    slots = sum(node.slots for node in read_hostfile(request.nodes, default_slots=1))
    if request.nproc > slots:
        raise HostError(
            f"{count_of(request.nproc, 'rank was', 'ranks were')} asked for, the hosts have {count_of(slots, 'slot')}",
            where=where,
            hint="ask for fewer with --nproc, or name more hosts or slots",
        )


def _check_gpus(request: SmokeRequest, device: Device, settings: "Settings") -> None:
    """Refuse GPUs by number where the run sees none, or where this machine does not have them."""
    from envbuild.host import facts
    from envbuild.run.container import wanted_gpus

    if request.gpus == "all":
        return
    if device == "cpu":
        raise UsageError(
            "this run is on the CPU and sees no GPU", where=f"--gpus {request.gpus}", hint="leave out --gpus"
        )
    wanted_gpus(facts(settings), request.gpus)


def _arguments(request: SmokeRequest, device: Device) -> list[str]:
    arguments = ["--level", request.level.value, "--device", device, "--nproc", str(request.nproc)]
    arguments += ["-k", request.keyword] if request.keyword else []
    arguments += ["--nodes", str(request.nodes.absolute())] if request.nodes else []
    arguments += ["--seed", str(request.seed)] if request.seed is not None else []
    return arguments


def _target(seen: Seen, start: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the report says of the target."""
    machine = start.get("machine", {})
    more = {"os": machine.get("os"), "python": machine.get("python")} if seen.stated["kind"] == "host" else {}
    return {**seen.stated, **more}
