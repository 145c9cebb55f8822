"""The result of one run of the smoke tests."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

from envbuild.errors import HostError, SmokeError
from envbuild.util.frozen import Frozen, field


class Level(StrEnum):
    """How far to go; each level includes those before it."""

    IMPORT = "import"
    KERNELS = "kernels"
    STEP = "step"
    DISTRIBUTED = "distributed"
    BENCH = "bench"
    TRAIN = "train"


Device = Literal["cpu", "cuda"]


Verdict = Literal["passed", "failed", "hung", "host", "interrupted"]


class Outcome(Frozen):
    """How one test ended."""

    id: str
    level: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    reason: str = ""
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tables: Sequence[Mapping[str, Any]] = ()


class SmokeReport(Frozen):
    """One run of the suite."""

    target: Mapping[str, Any]
    """`{"kind": "image", "reference", "digest"}` or `{"kind": "host", "os", "python"}`."""
    cell_id: str
    cell: Mapping[str, Any]
    lock_digest: str | None
    level: str
    device: str
    nproc: int
    verdict: Verdict
    reason: str
    """Why the run did not pass; empty when it did."""
    suite: str
    """Hash of the suite's files."""
    seed: int | None
    machine: Mapping[str, Any]
    launchers: Sequence[str]
    tests: Sequence[Outcome]
    seconds: float
    log: str
    """Path of everything that the suite printed."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of tests by outcome."""
        found = {"passed": 0, "failed": 0, "skipped": 0}
        for test in self.tests:
            found[test.outcome] += 1
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        from dataclasses import asdict

        return {**asdict(self), "counts": self.counts}

    def raise_for_verdict(self) -> None:
        """Raise what the verdict calls for.

        Raises:
            SmokeError: a test failed or hung.
            HostError: this host cannot run what was asked: no GPU, too few, a driver too old, memory exhausted.
            KeyboardInterrupt: somebody interrupted it.

        """
        if self.verdict == "passed":
            return
        if self.verdict == "host":
            raise HostError(
                self.reason, where=where_of(self.target), hint="`envbuild doctor` shows what this host can run"
            )
        if self.verdict == "interrupted":
            raise KeyboardInterrupt
        raise SmokeError(self.reason, where=where_of(self.target), hint=f"everything it printed is in {self.log}")


def where_of(target: Mapping[str, Any]) -> str:
    """Return the image or host that ran, for a message."""
    if target["kind"] == "image":
        return f"{target['reference']} ({target['digest']})" if target.get("digest") else str(target["reference"])
    return f"this host, {target.get('interpreter')}"
