"""Progress of a build on stderr: one line per stage on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from envbuild.cli.output import marked
from envbuild.cli.output import note as print_note


class StageDisplay:
    """Shows which stages run; `change` is what the engine calls."""

    def __init__(self, titles: dict[str, str]) -> None:
        self._titles = titles
        self._begun: dict[str, float] = {}
        self._live: Any = None
        self._tasks: dict[str, Any] = {}
        self._printed: set[tuple[str, str]] = set()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._live = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[state]}"),
                console=Console(stderr=True),
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, text: str) -> None:
        """Print one line next to the stages."""
        if self._live is not None:
            self._live.console.print(f"[dim]{marked(text)}")
        else:
            print_note(f"  {text}")

    def change(self, stage: str, what: str) -> None:
        """Take a change of `stage`: started, done, cached or kept."""
        title = self._titles.get(stage, stage)
        if self._live is not None:
            if stage not in self._tasks:
                self._tasks[stage] = self._live.add_task(marked(title), total=1, state="")
            done = what != "started"
            self._live.update(
                self._tasks[stage],
                completed=1 if done else 0,
                state={"cached": "from cache", "kept": "kept wheel"}.get(what, ""),
            )
            return
        if what == "started":
            self._begun.setdefault(stage, time.monotonic())
        if (stage, what) in self._printed:
            return
        self._printed.add((stage, what))
        took = f" ({time.monotonic() - self._begun[stage]:.0f} s)" if what == "done" and stage in self._begun else ""
        print_note(f"  {title}: {what}{took}")


def table(rows: list[tuple[str, ...]], indent: str = "  ") -> str:
    """Return `rows` as aligned columns."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
