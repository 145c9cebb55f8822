"""The result of one check of an audit, and of the whole audit."""

from dataclasses import dataclass
from typing import Any, Literal

from envbuild.errors import AuditError
from envbuild.util.names import shown
from envbuild.util.text import count_of

_FAULTS_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at. `unproven` is what this machine cannot decide."""

    name: str
    verdict: Literal["passed", "failed", "unproven"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found."""

    image: str
    digest: str
    """Of what was looked at: the tag may name another image by now."""
    checks: tuple[Check, ...]
    facts: dict[str, Any]

    @property
    def defects(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(c for c in self.checks if c.verdict == "failed")

    def raise_for_defects(self) -> None:
        """Raise AuditError naming every defect, unless there is none."""
        if self.defects:
            lines = "".join(f"\n  - {c.name}: {c.text}" for c in self.defects)
            raise AuditError(
                f"the image has {count_of(len(self.defects), 'defect')}{lines}",
                where=f"{self.image} ({self.digest})",
                hint="it is not what its lock says; build it again",
            )

    def as_json(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        return {
            "image": self.image,
            "digest": self.digest,
            "defects": len(self.defects),
            "checks": [{"name": c.name, "verdict": c.verdict, "text": c.text} for c in self.checks],
            "size": {"bytes": self.facts.get("bytes"), "installed_bytes": self.facts.get("installed_bytes")},
        }


def verdict_of(name: str, faults: list[str], good: str) -> Check:
    """Return the check `name`: failed with its faults, the first of them at least, or passed with the words `good`."""
    more = f"; and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
    text = "; ".join(faults[:_FAULTS_SHOWN]) + more if faults else good
    return Check(name=name, verdict="failed" if faults else "passed", text=shown(text, 20_000))
