"""What a command is at, on stderr: a live view on a terminal, lines elsewhere, JSON for programs.

A command notes what it does next, a build hands on its stages, a run of tests its tests. Whoever waits sees a line at least
every half minute, whatever happens.
"""

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from envbuild.cli.quantities import about, amount_text, duration
from envbuild.engine.details import Amount, Details, part_of
from envbuild.util.patterns import pattern
from envbuild.util.text import for_people, outgoing

Mode = Literal["live", "plain", "json", "quiet"]

SILENCE_S = 25.0
"""Seconds without a line after which one is printed: less than the half minute that is promised."""
_LIVE_AFTER_S = 0.7
_REDRAWN_S = 0.2
_AMOUNT_S = 1.0

_EXPORT = "export"
_TITLES = {"builder": "compilers and build tools", "contexts": "inputs copied to the builder"}
"""What takes long in a build, and is no part that is counted."""

_WORDS = {
    "done": "done",
    "cached": "from cache",
    "kept": "kept from an earlier build",
    "failed": "failed",
    "stopped": "stopped",
}


@dataclass
class Running:
    """A part of a build that runs."""

    title: str
    begun: float
    """On the clock of the view."""
    estimate: float | None = None
    """Seconds that it took when it was last made from the same inputs."""
    line: str = ""
    amount: Amount | None = None
    shown: float = 0.0
    helper: bool = False
    """Whether it is a stage that ends at once as a rule: lists, recipes, tools."""


@dataclass
class State:
    """All that a view shows."""

    begun: float
    activity: str = ""
    activity_begun: float = 0.0
    activity_amount: Amount | None = None
    parts: dict[str, tuple[str, float | None]] = field(default_factory=dict)
    """Title and estimate of each part that is counted, by name."""
    running: dict[str, Running] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)

    def left(self, now: float) -> float | None:
        """Return the seconds that the build still takes by earlier runs, or None where a part was never made before."""
        total = 0.0
        for name, (_, estimate) in self.parts.items():
            if name in self.finished:
                continue
            if estimate is None:
                return None
            passed = now - self.running[name].begun if name in self.running else 0.0
            total += max(0.0, estimate - passed)
        return total


class View(Protocol):
    """One way to show it."""

    def show_line(self, text: str, style: str) -> None:
        """Show a line that stays."""

    def event(self, name: str, values: Mapping[str, Any], text: str, style: str) -> None:
        """Show what happened: its values for programs, its text for people; a text that is empty is not for them."""

    def tick(self, state: State, now: float) -> None:
        """Show where the work is, now and then."""

    def close(self) -> None:
        """Leave nothing behind but the lines that stay."""


class Work(Details):
    """What a command is at."""

    def __init__(self, mode: Mode, *, verbose: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.mode: Mode = mode
        self._verbose, self._clock = verbose, clock
        self._state = State(begun=clock())
        self._state.activity_begun = self._state.begun
        self._lock, self._ended, self._wake = threading.RLock(), threading.Event(), threading.Event()
        self._view: View = _Quiet()
        if mode == "json":
            self._view = _Json(self._state, clock)
        elif mode != "quiet":
            self._view = _Plain(clock, begins=mode == "plain")
        self._drawing = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if self.mode != "quiet":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the view away; what comes later is printed line by line."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._wake.set()
        with self._lock:
            drawing = self._drawing
        if not drawing:
            return  # nothing to take away, and no reason to load more
        from envbuild.util.processes import uninterrupted

        with uninterrupted():  # a second Ctrl-C would leave half a view
            self._thread.join()
            with self._lock, contextlib.suppress(OSError):  # a terminal that went away must not cost the answer
                self._view.close()
                self._view = _Plain(self._clock)

    def _run(self) -> None:
        if self.mode == "live":
            self._wake.wait(_LIVE_AFTER_S)
            with self._lock:
                if self._ended.is_set():
                    return
                self._drawing = True
            from envbuild.cli.live import Live

            with self._lock:
                self._view = Live()
        with contextlib.suppress(OSError, ValueError):  # a terminal that went away, a stream that was closed
            while not self._ended.wait(_REDRAWN_S if self.mode == "live" else 1.0):
                with self._lock:
                    self._view.tick(self._state, self._clock())

    # -- what the command says

    def note(self, text: str, style: str = "") -> None:
        """Take a line of advice, or about what is done next."""
        with self._lock:
            self._begin(text)
            self._state.activity_amount = None
            self._view.show_line(text, style)

    def show_line(self, text: str, style: str = "") -> None:
        """Take a line that says nothing of what comes next."""
        with self._lock:
            self._view.show_line(text, style)

    def activity(self, text: str) -> None:
        """Take what is done now, without a line that stays."""
        with self._lock:
            self._begin(text)

    def _begin(self, activity: str) -> None:
        self._state.activity = for_people(activity).partition("\n")[0]
        self._state.activity_begun = self._clock()

    def progress(self, done: int, total: int) -> None:
        """Take how many of the tests are done."""
        with self._lock:
            self._state.activity_amount = Amount(done=done, total=total, unit="tests")

    # -- what a build says

    def parts(self, parts: Iterable[tuple[str, str, float | None]]) -> None:
        """Take the parts of a build: name, title, and the seconds that each took before, where that is known."""
        with self._lock:
            self._state.parts = {name: (title, estimate) for name, title, estimate in parts}
        self._wake.set()  # a build takes long

    def log(self, path: Path) -> None:
        """Take the path of a log, which is there when a build begins."""
        with self._lock:
            self._begin("preparing inputs")
            self.show_log(path)

    def show_log(self, path: Path) -> None:
        """Show the path of a log."""
        with self._lock:
            self._view.event("log", {"path": str(path)}, f"log: {path}", "")

    def change(self, stage: str, what: str) -> None:
        """Take what became of a stage of the Dockerfile: started, done, cached, kept, failed, stopped."""
        with self._lock:
            self._change(stage, part_of(stage), what)

    def _change(self, stage: str, name: str, what: str) -> None:
        state, now = self._state, self._clock()
        counted = name in state.parts
        title, estimate = state.parts.get(name, (_TITLES.get(name, name), None))
        if name == _EXPORT and counted:  # all before it are there: one in which there was nothing to do was never named
            before = itertools.takewhile(lambda each: each != name, state.parts)
            state.finished.update(each for each in before if each not in state.running)
        if what == "started":
            if name not in state.running and name not in state.finished:
                helper = not counted and name not in _TITLES
                state.running[name] = Running(title=title, begun=now, estimate=estimate, helper=helper)
                self._ended_or_begun(name, title, what, counted, 0.0)
            return
        if what in {"done", "cached"} and (stage != name or name in state.finished):
            return  # a wheel is compiled in one stage and lies in another, which ends the part
        running = state.running.pop(name, None)
        if counted and what not in {"failed", "stopped"}:
            state.finished.add(name)
        self._ended_or_begun(name, title, what, counted, now - running.begun if running else 0.0)

    def _ended_or_begun(self, name: str, title: str, what: str, counted: bool, seconds: float) -> None:
        state = self._state
        values: dict[str, Any] = {"stage": name, "title": title, "state": what, "seconds": round(seconds, 1)}
        values |= {"done": len(state.finished), "total": len(state.parts)}
        text, style = "", {"failed": "bold red", "stopped": "yellow", "done": "green"}.get(what, "dim")
        slow = name in _TITLES and (what == "started" or seconds >= 1)
        if counted or slow or what in {"failed", "stopped"}:
            took = f" ({duration(seconds)})" if seconds >= 0.5 or what == "done" else ""
            ended = name in state.finished
            count = f"{len(state.finished)} of {len(state.parts)}  " if ended else ""
            text = f"{count}{title}: {_WORDS.get(what, what)}{took}"
        self._view.event("stage", values, text, style)

    def line(self, stage: str, text: str) -> None:
        """Take a line that a stage printed."""
        with self._lock:
            name = part_of(stage)
            if (running := self._state.running.get(name)) and says_something(text):
                running.line = text
            if self._verbose:
                self._view.event("line", {"stage": name, "text": text}, f"[{name}] {text}", "dim")

    def amount(self, stage: str, amount: Amount) -> None:
        """Take how far a stage is."""
        with self._lock:
            name, now = part_of(stage), self._clock()
            running = self._state.running.get(name)
            if running is None:
                return
            running.amount = amount
            if now - running.shown >= _AMOUNT_S:
                running.shown = now
                values = {"stage": name, "done": amount.done, "total": amount.total or None, "unit": amount.unit}
                self._view.event("amount", values, "", "")


class _Quiet:
    """Shows nothing."""

    def show_line(self, text: str, style: str) -> None:
        """Drop it."""

    def event(self, name: str, values: Mapping[str, Any], text: str, style: str) -> None:
        """Drop it."""

    def tick(self, state: State, now: float) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Leave nothing behind."""


class _Plain:
    """Prints lines; after a while of silence, one about what goes on."""

    def __init__(self, clock: Callable[[], float], *, begins: bool = True) -> None:
        self._clock, self._last, self._begins = clock, clock(), begins

    def show_line(self, text: str, style: str) -> None:
        """Print it."""
        del style
        self._last = self._clock()
        print(for_people(text), file=sys.stderr, flush=True)

    def event(self, name: str, values: Mapping[str, Any], text: str, style: str) -> None:
        """Print the text of it."""
        if text and (self._begins or name != "stage" or values.get("state") != "started"):
            self.show_line(f"  {text}", style)

    def tick(self, state: State, now: float) -> None:
        """Print what goes on where nothing was printed for a while."""
        if now - self._last >= SILENCE_S:
            self.show_line("  " + "; ".join(going_on(state, now)), "")

    def close(self) -> None:
        """Leave everything behind."""


class _Json:
    """Prints one JSON object a line."""

    def __init__(self, state: State, clock: Callable[[], float]) -> None:
        self._state, self._clock, self._last = state, clock, clock()

    def show_line(self, text: str, style: str) -> None:
        """Print it as a note."""
        self.event("note", {"text": text}, text, style)

    def event(self, name: str, values: Mapping[str, Any], text: str, style: str) -> None:
        """Print it."""
        del text, style
        self._last = self._clock()
        found = {"event": name, "at": round(self._last - self._state.begun, 1), **values}
        print(json.dumps(outgoing(found), default=str), file=sys.stderr, flush=True)

    def tick(self, state: State, now: float) -> None:
        """Print what goes on where nothing was printed for a while."""
        if now - self._last >= SILENCE_S:
            running = [
                {"stage": name, "seconds": round(now - each.begun, 1), "line": each.line}
                for name, each in state.running.items()
            ]
            values = {"activity": state.activity, "running": running, "done": len(state.finished)}
            self.event("working", {**values, "total": len(state.parts)}, "", "")

    def close(self) -> None:
        """Leave everything behind."""


_QUOTED = pattern(r"[ \t]+(?:[0-9]+[ \t]+)?\|(?:[ \t]|$)")


def says_something(line: str) -> bool:
    """Return whether a line that a program printed is of use to a person.

    A compiler's mark below a line (`      ^~~~~`), the line of code that it quotes (`   42 |   int x;`) and a rule of dashes do not.
    """
    return any(map(str.isalnum, line)) and _QUOTED.match(line) is None


def going_on(state: State, now: float) -> Sequence[str]:
    """Return what runs, in words, a line each."""
    found = []
    for each in state.running.values():
        parts = [f"{duration(now - each.begun)} so far", *_remaining(each, now)]
        if each.amount:
            parts.append(amount_text(each.amount))
        found.append(f"{each.title}: {', '.join(parts)}" + (f": {each.line[:200]}" if each.line else ""))
    if found:
        return found
    amount = f" ({amount_text(state.activity_amount)})" if state.activity_amount else ""
    return [f"{state.activity or 'still working'}{amount}: {duration(now - state.activity_begun)} so far"]


def _remaining(running: Running, now: float) -> list[str]:
    if running.estimate is None:
        return []
    left = running.estimate - (now - running.begun)
    return [about(left)] if left > 0 else ["longer than last time"]
