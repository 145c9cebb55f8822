"""What a run of the suite printed so far, and the verdict that follows from it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from envbuild.engine import apptainer
from envbuild.evidence.report import Outcome, Verdict
from envbuild.util.names import shown
from envbuild.util.text import count_of
from envbuild.verify.events import MARK, read_event

_TESTS = 20_000
"""Tests of one run that are kept; the suite has fewer than 100."""
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Cannot allocate memory|ENOMEM", re.IGNORECASE)
# What Docker, podman and NVIDIA's hook say when a container cannot start.
_ENGINE_SAYS = (
    (r"unsatisfied condition: (cuda|driver)", "the driver is too old for this image"),
    (r"could not select device driver", "containers cannot see this machine's GPUs"),
    (r"nvidia-container-cli: initialization error|nvml error", "the driver does not answer"),
    (r"unresolvable CDI devices|failed to inject CDI", "containers cannot see this machine's GPUs"),
    (r"no space left on device|disk quota exceeded", "the disk is full"),
    (r"(?:^|\| )(?-i:Error response from daemon|error during connect)", "the engine starts no container"),
    (r"(?:^|\| )(?-i:Cannot connect to the Docker daemon)", "the engine does not answer"),
    (r"(?:^|\| )(?-i:Error: (?:OCI runtime|unable to start container))", "the engine starts no container"),
)


class Collected:
    """What the suite reported."""

    def __init__(self, progress: Callable[[Mapping[str, Any]], None], *, for_cuda: bool = False) -> None:
        self.progress = progress
        self.for_cuda = for_cuda
        self.start: dict[str, Any] = {}
        self.launchers: list[str] = []
        self.tests: list[Outcome] = []
        self.running: str | None = None
        self.ended = False
        self.end_code: int | None = None
        self.timed_out = False
        self.interrupted = False
        self.refused: str | None = None
        self.broken: str | None = None
        self.unread = 0
        """Lines that say that they are events, and cannot be read."""
        self.tail: list[str] = []

    def line(self, text: str) -> None:
        event = read_event(text)
        if event is None:
            if text.startswith(MARK):
                self.unread += 1
            elif text.strip():
                self.tail = [*self.tail[-19:], shown(text.rstrip(), 2000)]
            return
        if len(self.tests) >= _TESTS:
            return
        match event["event"]:
            case "collected":
                self.start = event
            case "begin":
                self.running = event["id"]
            case "test":
                self.running = None
                self.launchers = event.get("launchers", self.launchers)
                self.tests.append(
                    Outcome(**{name: event[name] for name in Outcome.__dataclass_fields__ if name in event})
                )
            case "verdict":
                self.start.setdefault("machine", event.get("machine", {}))
                # A CPU build of torch in a cell for CUDA is a fault of the environment, whatever the host has.
                if event["kind"] == "torch-broken" or (event["kind"] == "no-cuda-build" and self.for_cuda):
                    self.broken = event["what"]
                else:
                    self.refused = event["what"]
            case "end":
                self.ended = True
                self.end_code = event.get("code")
            case _:
                return
        self.progress(event)

    def judge(self, code: int | None, timeout_s: float) -> tuple[Verdict, str]:
        """Return the verdict and its reason, the exit code of the suite or the engine being `code`."""
        if self.refused:
            return "host", self.refused
        if self.broken:
            return "failed", self.broken
        if self.interrupted:
            return "interrupted", f"interrupted {self.place}"
        if self.timed_out and not self.ended:
            return "hung", f"{self.running or 'the suite'} did not end within {timeout_s:.0f} s"
        failed = [test for test in self.tests if test.outcome == "failed"]
        if self.unread and (self.ended or failed):  # a test that failed may be among them
            return "failed", f"{count_of(self.unread, 'event')} of the suite cannot be read {self.place}"
        if not self.ended:
            return self._died(code)
        if not failed:
            # One that reported its end and then could not exit is judged by what it reported.
            code = self.end_code if code is None else code
            if code == 0 and any(test.outcome == "passed" for test in self.tests):
                return "passed", ""
            if code == 0 and self.tests:
                return "failed", f"no test ran: all {len(self.tests)} were skipped"
            if self.tests:
                return self._died(code)
            return "failed", f"no test ran (exit code {code}): {self.tail[-1] if self.tail else ''}"
        first = failed[0]
        text = f"{first.id}: {first.reason.partition(chr(10))[0]}"
        if len(failed) > 1:
            text += f" (and {len(failed) - 1} more)"
        if all(_OUT_OF_MEMORY.search(test.reason) for test in failed):
            return "host", f"out of memory in {text}"
        return "failed", text

    @property
    def place(self) -> str:
        """Where the suite is, as the end of a sentence."""
        if self.running:
            return f"in {self.running}"
        return f"after {self.tests[-1].id}" if self.tests else "before its first test"

    def _died(self, code: int | None) -> tuple[Verdict, str]:
        text = " | ".join(self.tail)
        if code == apptainer.OWN_FAILURE and not self.start and (cause := apptainer.fatal("\n".join(self.tail))):
            return "host", f"Apptainer starts no container: {cause}"
        for pattern, what in _ENGINE_SAYS:
            if re.search(pattern, text, re.IGNORECASE):
                return "host", f"{what}: {self.tail[-1]}"
        at = self.place
        if code in {137, -9}:
            return "host", f"the suite was killed {at}: the usual cause is memory exhausted"
        names = {139: "segmentation fault", -11: "segmentation fault", 134: "abort", -6: "abort"}
        why = f" ({names[code]})" if code in names else ""
        return (
            "failed",
            f"the suite died {at} with exit code {code}{why}: {self.tail[-1] if self.tail else 'no output'}",
        )
