"""What a running build says of itself, for whoever shows it. It imports next to nothing: the command line loads it early."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How far a stage is."""

    done: int
    total: int
    """0 where nobody knows it."""
    unit: Literal["steps", "bytes", "tests"]


class Details:
    """Takes what a running stage prints and how far it is. This one shows nothing of it."""

    def line(self, stage: str, text: str) -> None:
        """Take a line that a stage printed, fit for a terminal."""

    def amount(self, stage: str, amount: Amount) -> None:
        """Take how far a stage is."""

    def log(self, path: Path) -> None:
        """Take the path of the log that is about to be written."""


def part_of(stage: str) -> str:
    """Return the part of a build that a stage of the Dockerfile belongs to: a wheel is compiled in another stage than it lies in."""
    if stage == "build-mpi":  # no wheel
        return "mpi"
    if stage.startswith("build-"):
        return f"wheel-{stage.removeprefix('build-')}"
    if stage == "os" or stage.startswith("os-"):
        return "runtime"
    first, of, _ = stage.partition("-")
    return first if of and first in {"torch", "env", "stack"} else stage
