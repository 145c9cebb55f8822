"""The live view of a command's work on a terminal: what runs, how far it is, and a line of the whole.

No line is as wide as the terminal, so none wraps; what has ended scrolls away above as an ordinary line.
"""

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.text import Text

from envbuild.cli.quantities import about, amount_text, duration
from envbuild.cli.work import Running, State
from envbuild.engine.details import Amount
from envbuild.util.text import for_people

_SPIN = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_SPIN = "|/-\\"
_WIDE = 80
"""Columns from which there is room for a bar."""
_ROOM = 4
"""Columns that stay free at the right: a terminal writes `^C` where the cursor is."""
_HELPER_S = 2.0
"""Seconds after which a stage that ends at once as a rule is worth a line."""
_WIDEST = 100
"""Columns that are used at most: an eye finds what belongs to a title next to it."""

Line = tuple[str, str]
"""A text and its style."""


def lines_of(state: State, now: float, *, width: int, height: int, unicode: bool = True) -> list[Line]:
    """Return the view, at most `height` - 1 lines of fewer than `width` columns each."""
    room = max(min(width - _ROOM, _WIDEST), 1)
    spin = _SPIN if unicode else _PLAIN_SPIN
    mark = spin[int(now * 5) % len(spin)]
    found: list[Line] = []
    most = max(1, height - 2)
    for running in state.running.values():
        if running.helper and now - running.begun < _HELPER_S:
            continue
        found.append((_head(running, now, mark, room, unicode=unicode), "bold"))
        if running.line:
            found.append((fitted(f"    {running.line.strip()}", room, unicode=unicode), "dim"))
    hidden = len(found) - (most - 1)
    if hidden > 0:
        found = found[: most - 1]
    found.append((fitted(_whole(state, now, mark, room), room, unicode=unicode), ""))
    return found


def _head(running: Running, now: float, mark: str, room: int, *, unicode: bool) -> str:
    """Return the line of a part that runs: its title on the left, how far it is on the right."""
    passed = now - running.begun
    right = []
    if running.amount:
        right.append(amount_text(running.amount))
        if room + _ROOM >= _WIDE and running.amount.total:
            right.append(bar(running.amount, 16, unicode=unicode))
    right.append(duration(passed))
    if running.estimate is not None and room >= 50:
        left = running.estimate - passed
        right.append(about(left) if left > 0 else "longer than last time")
    text = "  ".join(right)
    while len(right) > 1 and cell_len(text) + 16 > room:  # the title is worth more than the last of these
        right.pop()
        text = "  ".join(right)
    title = fitted(f" {mark} {running.title}", max(1, room - cell_len(text) - 2), unicode=unicode)
    gap = max(2, room - cell_len(title) - cell_len(text))
    return fitted(f"{title}{' ' * gap}{text}", room, unicode=unicode)


def _whole(state: State, now: float, mark: str, room: int) -> str:
    """Return the last line: of the build, or what else the command is at."""
    passed = duration(now - state.begun)
    if state.parts and (state.running or len(state.finished) < len(state.parts)):
        words = [f"{len(state.finished)} of {len(state.parts)}", passed]
        left = state.left(now)
        if left is not None and left > 0:
            words.append(about(left))
        if not state.running:
            while len(words) > 2 and cell_len(state.activity) + sum(map(len, words)) + 9 > room:
                words.pop()  # what is done now is worth more than an estimate
            end = "  " + ", ".join(words)
            return fitted(f" {mark} {state.activity or 'working'}", max(1, room - cell_len(end))) + end
        return "   " + ", ".join(words)
    amount = f"{amount_text(state.activity_amount)}, " if state.activity_amount else ""
    activity = state.activity or "working"
    end = f"  {amount}{duration(now - state.activity_begun)}"
    return fitted(f" {mark} {activity}", max(1, room - cell_len(end))) + end


def bar(amount: Amount, width: int, *, unicode: bool = True) -> str:
    """Return a bar of `width` columns."""
    full = min(width, width * amount.done // amount.total)
    return ("━" * full + "─" * (width - full)) if unicode else ("#" * full + "." * (width - full))


def fitted(text: str, room: int, *, unicode: bool = True) -> str:
    """Return `text` cut to `room` columns, an ellipsis at the cut; tabs become spaces."""
    text = text.expandtabs(4)
    if cell_len(text) <= room:
        return text
    end = "…" if unicode else "~"
    return set_cell_size(text, max(0, room - 1)).rstrip() + end


class Live:
    """Draws it with rich, which erases what it drew."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False)
        self._unicode = self.console.encoding.lower().startswith("utf")
        self._live = RichLive(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._started = False

    def show_line(self, text: str, style: str) -> None:
        """Print a line above the view."""
        self.console.print(Text(for_people(text), style=style), soft_wrap=True)

    def event(self, name: str, values: Mapping[str, Any], text: str, style: str) -> None:
        """Print what ended above the view; what begins is in it."""
        if not text or (name == "stage" and values.get("state") == "started"):
            return
        if name == "stage":
            ok, bad = ("✓", "✗") if self._unicode else ("+", "x")
            mark = {"failed": bad, "stopped": "-"}.get(str(values.get("state")), ok)
            text = fitted(f" {mark} {for_people(text)}", self.console.width - 1, unicode=self._unicode)
        self.show_line(text, style)

    def tick(self, state: State, now: float) -> None:
        """Draw it again."""
        if not self._started:
            self._live.start()
            self._started = True
        width, height = self.console.size
        drawn = lines_of(state, now, width=width, height=height, unicode=self._unicode)
        self._live.update(
            Group(*(Text(for_people(text), style=style, no_wrap=True, overflow="crop") for text, style in drawn)),
            refresh=True,
        )

    def close(self) -> None:
        """Erase it."""
        if self._started:
            self._live.stop()
