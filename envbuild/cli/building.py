"""A build, shown as a part of what a command is at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.cli.output import note, printed
from envbuild.engine.details import Details

if TYPE_CHECKING:
    from envbuild.plan.plan import Plan
    from envbuild.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ShownBuild:
    """What takes a build's plan, the changes of its stages, and what they print."""

    planned: "Callable[[Plan], None]"
    change: Callable[[str, str], None]
    details: Details


def shown_build(settings: "Settings") -> ShownBuild:
    """Return what shows a build in the view of this command; it takes its estimates from the cache of the settings."""
    from envbuild.engine.parts import Times, parts_of

    work = printed.work
    if work is None:
        return ShownBuild(
            planned=lambda _: None, change=lambda stage, what: note(f"{stage}: {what}"), details=Details()
        )
    times = Times(settings)

    def planned(plan: "Plan") -> None:
        work.parts((part.name, part.title, times.seconds(part.key)) for part in parts_of(plan))

    return ShownBuild(planned=planned, change=work.change, details=work)


class TestCount:
    """Counts the tests of a run of smoke tests in the view of this command; takes the suite's events as they come."""

    def __init__(self) -> None:
        self._done = self._total = 0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take an event."""
        if event["event"] == "collected":
            self._total = event["total"] if isinstance(event.get("total"), int) else 0
        elif event["event"] == "test":
            self._done += 1
        elif event["event"] == "log" and printed.work:
            printed.work.show_log(Path(event["path"]))
        if printed.work and self._total:
            printed.work.progress(min(self._done, self._total), self._total)
