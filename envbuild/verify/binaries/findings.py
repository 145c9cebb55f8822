"""The findings of a check of binaries."""

from dataclasses import dataclass
from typing import Literal

from envbuild.util.names import shown

_SHOWN = 20


@dataclass(frozen=True)
class BinaryFinding:
    """One thing that is not as it should be."""

    text: str
    defect: bool
    """False where it may be meant so, or where this look cannot decide."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one check."""

    name: str
    verdict: Literal["passed", "failed", "unproven"]
    text: str


def result(name: str, findings: list[BinaryFinding], good: str) -> Result:
    """Put the findings of one check together: a defect fails it, anything else leaves it unproven."""
    texts = dict.fromkeys(f.text for f in findings if f.defect) or dict.fromkeys(f.text for f in findings)
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    defect = any(f.defect for f in findings)
    return Result(
        name=name,
        verdict="failed" if defect else "unproven" if findings else "passed",
        text=shown("; ".join(list(texts)[:_SHOWN]) + more if texts else good, 20_000),
    )


def named(path: str) -> str:
    """Return a path for a message."""
    return f"/{shown(path)}"
