"""Running targets: bounded in time and memory, repeatable from a seed, failures kept as small inputs.

Input number N of a target depends on the seed, the target's name and N alone: neither on the number of processes nor on
the machine.
"""

import contextlib
import hashlib
import json
import mmap
import multiprocessing
import os
import random
import resource
import signal
import struct
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fuzz.mutate import LONGEST, mutated
from tests.fuzz.targets import TARGETS, Target, forget, scratch

SLOWEST_S = 2.0
"""Seconds of the processor that one input may take; waiting for other processes does not count."""
GROWTH_MIB = 500
"""What the process may grow by, at one input or over a whole share."""
_ADDRESS_SPACE = 4 << 30
"""Beyond this an allocation fails, so that a reader that eats memory does not take the machine with it."""
SHARE = 5_000
"""Executions of one process."""
_MOST_KEPT = 40
"""Failures of a share that are kept one by one; a reader that fails always is not run for hours."""


class HangError(BaseException):
    """An input that takes too long; no reader catches it."""


@dataclass(kw_only=True)
class Failure:
    """One way to fail, and the smallest input seen for it."""

    target: str
    kind: str
    """The exception's name, or `hang`, `growth`, `crash`."""
    place: str
    """The innermost function of envbuild that it came through."""
    text: str
    data: bytes
    number: int
    count: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes two failures one."""
        return (self.target, self.kind, self.place)

    @property
    def name(self) -> str:
        """The name of its files."""
        digest = hashlib.sha256("\0".join(self.key).encode()).hexdigest()[:8]
        return f"{self.target}-{self.kind}-{self.place.replace(':', '-').replace('<', '').replace('>', '')}-{digest}"


@dataclass(kw_only=True)
class Result:
    """What a share, or all shares of a target, came to."""

    target: str
    executions: int = 0
    accepted: int = 0
    slowest_s: float = 0.0
    slowest: int = 0
    """Number of the input that took that long."""
    growth_mib: float = 0.0
    failures: dict[tuple[str, str, str], Failure] = field(default_factory=dict)

    def add(self, other: "Result") -> None:
        """Take in what another share of the same target came to."""
        self.executions += other.executions
        self.accepted += other.accepted
        self.took(other.slowest_s, other.slowest)
        self.growth_mib = max(self.growth_mib, other.growth_mib)
        for failure in other.failures.values():
            self.fail(failure)

    def took(self, seconds: float, number: int) -> None:
        """Take in how long input `number` took."""
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, number

    def fail(self, failure: Failure) -> None:
        """Take in a failure; of two that are one the smaller input stays."""
        known = self.failures.get(failure.key)
        if known is None:
            self.failures[failure.key] = failure
            return
        known.count += failure.count
        if len(failure.data) < len(known.data):
            known.data, known.number, known.text = failure.data, failure.number, failure.text

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            "target": self.target,
            "executions": self.executions,
            "accepted": self.accepted,
            "failures": [
                {
                    "kind": f.kind,
                    "place": f.place,
                    "count": f.count,
                    "number": f.number,
                    "text": f.text.splitlines()[-1:],
                }
                for f in self.failures.values()
            ],
            "slowest_s": round(self.slowest_s, 3),
            "slowest": self.slowest,
            "growth_mib": round(self.growth_mib, 1),
        }


def input_of(target: Target, inputs: list[tuple[str, bytes]], seed: int, number: int) -> bytes:
    """Return input `number`; the first ones are the seeds themselves."""
    if number < len(inputs):
        return inputs[number][1]
    generator = random.Random(f"{seed} {target.name} {number}")
    form, chosen = generator.choice(inputs)
    kind, _, body = chosen.partition(b"\n")
    others = [other.partition(b"\n")[2] for _, other in inputs]
    return kind + b"\n" + mutated(generator, form, body, others, target.words)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _hang(*_: Any) -> None:
    raise HangError


@contextlib.contextmanager
def _timed() -> Iterator[None]:
    """Make SIGPROF a `HangError`."""
    before = signal.signal(signal.SIGPROF, _hang)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/envbuild/" in f.filename and "/tests/" not in f.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].name}"


def _text(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-25)
    return "".join(lines)[-6000:].encode("utf-8", "backslashreplace").decode()


def outcome(target: Target, data: bytes) -> tuple[bool, float, BaseException | None]:
    """Run one input; return whether it was accepted, its seconds of the processor, and what it raised."""
    began = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, SLOWEST_S, 0.5)
        try:
            accepted = target(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except (Exception, HangError) as error:  # noqa: BLE001 - what it is decides the caller
        return False, time.process_time() - began, error
    return accepted, time.process_time() - began, None


def _smaller(target: Target, data: bytes, kind: type[BaseException], place: str) -> bytes:
    """Return a part of `data` that fails in the same way."""
    head, line, body = data.partition(b"\n")
    left = 8 if kind is HangError else 300
    size = max(1, len(body) // 2)
    while size and left:
        at = 0
        while at < len(body) and left:
            left -= 1
            shorter = body[:at] + body[at + size :]
            _, _, error = outcome(target, head + line + shorter)
            if error is not None and type(error) is kind and _place(error) == place:
                body = shorter
            else:
                at += size
        size //= 2
    return head + line + body


def execute(
    target: Target, *, seed: int, first: int, runs: int, until: float, tick: Any = None, minimise: bool = True
) -> Result:
    """Run inputs `first` to `first + runs` in this process, or fewer once `until` (of time.monotonic) has come."""
    result = Result(target=target.name)
    inputs = target.inputs
    with _timed():
        for _, each in inputs[:50]:  # what loads once is no growth
            outcome(target, each)
        base = peak = _peak_mib()
        for number in range(first, first + runs):
            if time.monotonic() > until or len(result.failures) >= _MOST_KEPT:
                break
            data = input_of(target, inputs, seed, number)
            if tick is not None:
                tick(number, data)
            accepted, seconds, error = outcome(target, data)
            if isinstance(error, HangError):  # once more: the first may have loaded something
                accepted, seconds, error = outcome(target, data)
            result.executions += 1
            result.accepted += accepted
            result.took(seconds, number)
            now = _peak_mib()
            failure: Failure | None = None
            if error is not None:
                place = _place(error) if not isinstance(error, HangError) else "input"
                kind = "hang" if isinstance(error, HangError) else type(error).__name__
                failure = Failure(
                    target=target.name, kind=kind, place=_place(error), text=_text(error), data=data, number=number
                )
                if minimise and failure.key not in result.failures:
                    failure.data = _smaller(target, data, type(error), place if place != "input" else _place(error))
            elif now - peak > GROWTH_MIB or (now - base > GROWTH_MIB >= peak - base):
                text = f"{now - peak:.0f} MiB at this input, {now - base:.0f} MiB in all"
                failure = Failure(
                    target=target.name, kind="growth", place="process", text=text, data=data, number=number
                )
            if failure is not None:
                result.fail(failure)
                now = max(now, _peak_mib())
            peak = now
        result.growth_mib = peak - base
    return result


# -- processes --------------------------------------------------------------------------------------------------------

_HEAD = struct.Struct("qqd")


def _child(pipe: Connection, shared: mmap.mmap, target: Target, work: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    scratch.cache_clear()  # the parent's folder is not this process's
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, used + _ADDRESS_SPACE))

    def tick(number: int, data: bytes) -> None:
        shared[_HEAD.size : _HEAD.size + len(data)] = data
        shared[: _HEAD.size] = _HEAD.pack(number, len(data), time.monotonic())

    try:
        pipe.send(execute(target, **work, tick=tick))
    except BaseException as error:  # noqa: BLE001 - the parent reports
        pipe.send("".join(traceback.format_exception(error)))
    finally:
        forget()
        os._exit(0)


class _Worker:
    def __init__(self, target: Target, work: dict[str, Any]) -> None:
        self.target, self.work = target, work
        context = multiprocessing.get_context("fork")
        self.shared = mmap.mmap(-1, _HEAD.size + LONGEST + 4096)
        self.shared[: _HEAD.size] = _HEAD.pack(-1, 0, time.monotonic() + 60)
        self.pipe, theirs = context.Pipe(duplex=False)
        sys.stdout.flush()
        self.process = context.Process(target=_child, args=(theirs, self.shared, target, work))
        self.process.start()
        theirs.close()

    def stuck(self) -> bool:
        return time.monotonic() - _HEAD.unpack(self.shared[: _HEAD.size])[2] > self.target.wall

    def result(self) -> Result:
        """Return what the process came to; one that died or had to be killed failed at the input that it had."""
        kind = "hang" if self.process.is_alive() and not self.pipe.poll() else "crash"
        answer: Any = None
        if self.pipe.poll():
            with contextlib.suppress(EOFError):
                answer = self.pipe.recv()
        if answer is None:
            self.process.kill()
        self.process.join()
        if isinstance(answer, Result):
            return answer
        number, size, _ = _HEAD.unpack(self.shared[: _HEAD.size])
        data = bytes(self.shared[_HEAD.size : _HEAD.size + size])
        text = answer or f"the process ended with {self.process.exitcode}"
        result = Result(target=self.target.name, executions=max(0, number - self.work["first"] + 1))
        result.fail(Failure(target=self.target.name, kind=kind, place="process", text=text, data=data, number=number))
        return result


def shares(targets: list[Target], runs: int) -> list[tuple[Target, int, int]]:
    """Return (target, first input, number of inputs) of each process; the targets take turns, so that each gets some."""
    whole = sum(target.share for target in targets)
    found: list[tuple[int, Target, int, int]] = []
    for target in targets:
        mine = max(1, round(runs * target.share / whole))
        found += [(turn, target, first, min(SHARE, mine - first)) for turn, first in enumerate(range(0, mine, SHARE))]
    found.sort(key=lambda each: (each[0], -each[1].share))
    return [(target, first, count) for _, target, first, count in found]


def fuzz(targets: list[Target], *, runs: int, seconds: float, seed: int, jobs: int, say: Any = None) -> list[Result]:
    """Run `runs` inputs over all targets, in `jobs` processes and at most `seconds`; return a result per target."""
    results = {target.name: Result(target=target.name) for target in targets}
    until = time.monotonic() + seconds
    waiting = shares(targets, runs)
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                target, first, count = waiting.pop(0)
                if len(results[target.name].failures) < _MOST_KEPT and time.monotonic() < until:
                    running.append(_Worker(target, {"seed": seed, "first": first, "runs": count, "until": until}))
            ready = wait([each.pipe for each in running], timeout=1.0) if running else []
            for worker in list(running):
                if worker.pipe in ready or worker.stuck():
                    running.remove(worker)
                    results[worker.target.name].add(worker.result())
                    if say is not None:
                        say(sum(each.executions for each in results.values()))
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()
    return list(results.values())


def keep(results: list[Result], folder: Path) -> list[Path]:
    """Write each failure's input, and what it raised, below `folder`; return the inputs' paths."""
    kept = []
    for result in results:
        for failure in result.failures.values():
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{failure.name}.input"
            path.write_bytes(failure.data)
            path.with_suffix(".txt").write_text(f"input {failure.number}, {failure.count} times\n{failure.text}\n")
            kept.append(path)
    return kept


def table(results: list[Result]) -> str:
    """Return the results as aligned text."""
    rows = [("target", "executions", "accepted", "failures", "slowest", "growth")]
    rows += [
        (
            r.target,
            f"{r.executions:,}",
            f"{100 * r.accepted / max(1, r.executions):.0f} %",
            str(len(r.failures)),
            f"{r.slowest_s:.2f} s",
            f"{r.growth_mib:.0f} MiB",
        )
        for r in results
    ]
    rows.append(
        (
            "all",
            f"{sum(r.executions for r in results):,}",
            "",
            str(sum(len(r.failures) for r in results)),
            f"{max(r.slowest_s for r in results):.2f} s",
            f"{max(r.growth_mib for r in results):.0f} MiB",
        )
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def replay(path: Path) -> None:
    """Run the input kept at `path`; what it raises is raised."""
    name = path.name.partition("-")[0]
    try:
        TARGETS[name](path.read_bytes())
    finally:
        forget()


def as_json(results: list[Result], seed: int) -> str:
    """Return the results as one JSON object."""
    return json.dumps({"seed": seed, "targets": [result.as_json() for result in results]}, indent=2)
