"""The parts of a build that a person counts, and how long each took when it was last made from the same inputs."""

import hashlib
import math
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from envbuild.plan.plan import Plan
from envbuild.settings import Settings

_KEY = re.compile(r"[0-9a-f]{64}")
_LONGEST_S = 30 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a build: its name, what people call it, and a key (sha256, hex) over all that it is made from."""

    name: str
    title: str
    key: str


def parts_of(plan: Plan) -> tuple[Part, ...]:
    """Return the parts of a build in their order: the plan's stages, the export and the load.

    The Dockerfile has more stages than these: lists, recipes, tools. They take no time to speak of, or belong to a part.
    """
    stages = tuple(Part(name=s.name, title=s.title, key=s.key) for s in plan.stages)
    after = (("export", "export"), ("load", "load into the engine"))
    return stages + tuple(
        Part(name=name, title=title, key=hashlib.sha256(f"{name} {plan.key}".encode()).hexdigest())
        for name, title in after
    )


class Times:
    """How long parts took on this machine, by their keys. What cannot be read or written counts as not known."""

    def __init__(self, settings: Settings) -> None:
        self._folder: Path = settings.cache_dir / "times"

    def seconds(self, key: str) -> float | None:
        """Return how long the part with this key took, or None."""
        if not _KEY.fullmatch(key):
            return None
        try:
            with (self._folder / key).open("rb") as file:
                found = float(file.read(64))
        except (OSError, ValueError):
            return None
        return found if math.isfinite(found) and 0 < found < _LONGEST_S else None

    def keep(self, key: str, seconds: float) -> None:
        """Keep how long the part with this key took."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part = self._folder / f".{key}-{secrets.token_hex(4)}"
            part.write_text(f"{seconds:.1f}\n", encoding="ascii")
            part.replace(self._folder / key)
        except OSError:  # an estimate is not worth a build
            return
