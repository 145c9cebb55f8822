"""BuildKit's progress stream (rawjson): which stages ran, how long, what they printed, how far each is.

What a step prints is a stranger's, and a line may be anything: what is no event is kept as text, a field of another type
counts as absent, and a character that a terminal would act on is written as its escape.
"""

import base64
import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from envbuild.engine.details import Amount, Details
from envbuild.settings import redact
from envbuild.util.names import shown
from envbuild.util.text import plain

_STAGE = re.compile(r"^\[(?P<stage>[a-z][a-z0-9-]*)(?: +(?P<step>\d{1,6})/(?P<of>\d{1,6}))?\] (?P<what>.*)$", re.DOTALL)
# What buildx hands to the builder: the folder of a context.
_CONTEXT = re.compile(r"^\[(?:context [a-z][a-z0-9-]*|internal)\] load (?:from client|build context)")
CONTEXTS = "contexts"
"""What stands for a stage while folders are copied to the builder; it is none, and has no time in `Watch.stages`."""

# How ninja numbers the steps of a compile.
_NINJA = re.compile(r"^\s*\[(\d{1,6})/(\d{1,6})\]\s")
# How BuildKit's errors say that another one ended this step.
_CANCELLED = re.compile(r"context cancell?ed\s*$")
# What no build fails of: a cache of another builder that is missing, damaged, or cannot be written.
_CACHE = re.compile(r"(?P<way>im|ex)porting cache ")
_NOISE = re.compile(r"^(?:Get|Hit|Ign|Selecting|Preparing|Unpacking|Setting up|Processing)\b|^\s*\+ ")


# Docker up to 28 asks the exporter into its store for an unpacking that rewritten times rule out, whatever the build asked
# for. BuildKit refuses at the very end: the image is complete then, and has its name.
_STORED = 'exporter option "rewrite-timestamp" conflicts with "unpack"'

# Bytes of a line after which no more are waited for.
_LONG = 4096

# Characters of a line, and lines of errors, that are kept.
_LINE = 10_000
_ERRORS = 100

# Of what is transferred for one stage: parts that are added up, and bytes that are believed.
_PARTS = 500
_MOST_BYTES = 1 << 50


def _clean(line: str) -> str:
    """Return a line without what a terminal would act on and without a login; tabs stay."""
    line = line.rstrip()[:_LINE]
    if "@" in line:
        line = redact(line)
    return line if line.isprintable() else "\t".join(shown(part, _LINE) for part in plain(line).split("\t"))


def _dicts(event: dict[str, Any], key: str) -> list[dict[str, Any]]:
    found = event.get(key)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _text(entry: dict[str, Any], key: str) -> str:
    found = entry.get(key)
    return found if isinstance(found, str) else ""


@dataclass
class _Steps:
    """The steps of one stage, as they come and go."""

    running: set[str] = field(default_factory=set)
    ran: bool = False
    last_ended: bool = False
    """Whether the step that makes the stage's result has ended."""
    state: str = ""
    """What was last handed on: started, done, cached, failed, stopped."""


@dataclass
class StageTime:
    """One stage as it ran: seconds of wall time, and whether every step came from the cache."""

    name: str
    seconds: float = 0.0
    executed: int = 0
    cached: int = 0


@dataclass
class Watch:
    """Follows one build.

    Attributes:
        log: takes every line that a step prints.
        on_change: takes the name of a stage and what became of it: `started`, then once `done` (a step ran), `cached` (none
            did), `failed`, or `stopped` (another stage failed, or the build was interrupted).
        details: takes each line, and how far a stage is.
        exports: whether this run of the builder exports the image, and no part of it.

    """

    log: TextIO
    on_change: Callable[[str, str], None] | None = None
    details: Details = field(default_factory=Details)
    exports: bool = True
    stages: dict[str, StageTime] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _shown: dict[str, str] = field(default_factory=dict)
    _open: dict[str, str] = field(default_factory=dict)
    _steps: dict[str, _Steps] = field(default_factory=dict)
    _bytes: dict[str, dict[tuple[str, str], tuple[int, int]]] = field(default_factory=dict)
    _tails: dict[str, list[str]] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _cache_errors: list[str] = field(default_factory=list)
    _unended: dict[tuple[str, int], bytes] = field(default_factory=dict)
    failed: str | None = None
    stored: bool = False
    """Whether the build ended with an image that is in the engine's store and not unpacked."""

    def feed(self, line: str) -> None:
        """Take one line of the stream; a line that is no JSON is buildx's own message."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):  # a number of 5000 digits is a ValueError, too
            event = None
        if not isinstance(event, dict):
            if line.strip() and not (self.stored and _STORED in line):
                self.log.write(_clean(line) + "\n")
                if line.startswith("ERROR"):
                    self._err(line.strip())
            return
        vertexes = [vertex for vertex in _dicts(event, "vertexes") if _text(vertex, "digest")]
        named = [(vertex, *self._name(vertex)) for vertex in vertexes]
        for entry in _dicts(event, "logs"):  # a step's last words come with its end
            self._log(entry)
        for entry in _dicts(event, "statuses"):
            self._status(entry)
        for vertex, stage, last in named:
            self._vertex(vertex, stage, last=last)

    def _name(self, vertex: dict[str, Any]) -> tuple[str, bool]:
        """Return the stage of a step, empty where it is of none, and whether it makes the stage's result."""
        name = _text(vertex, "name")
        match = _STAGE.match(name)
        stage = match["stage"] if match else ("export" if name.startswith("exporting to ") else "")
        self._names[vertex["digest"]] = stage or _clean(name)
        self._shown[vertex["digest"]] = CONTEXTS if _CONTEXT.match(name) else "" if stage == "internal" else stage
        return stage, match is None or match["step"] == match["of"]

    def _vertex(self, vertex: dict[str, Any], stage: str, *, last: bool) -> None:
        digest, error = vertex["digest"], vertex.get("error")
        if stage == "export" and error == _STORED:
            self.stored, error = True, None
        if error and (match := _CACHE.match(_text(vertex, "name"))):
            why = _clean(str(error)[:_LINE].splitlines()[0])
            self.log.write(f"[{self._names[digest]}] {why}\n")
            if not (match["way"] == "im" and why.endswith(": not found")):  # nobody has left one yet
                self._cache_errors.append(f"the build cache is not {match['way']}ported: {why}")
            error = None
        if vertex.get("completed") or error:
            self._ended.add(digest)
            self._end_lines(digest)
        stopped = bool(error) and _CANCELLED.search(str(error)[-100:]) is not None
        if error:
            if not stopped:
                self.failed = self.failed or digest
            lines = [_clean(line) for line in str(error)[:_LINE].splitlines() if line.strip()]
            self.log.write(f"[{self._names[digest]}] ERROR " + "\n".join(lines) + "\n")
            self._err("\n".join(lines))
        if self._shown[digest] == CONTEXTS:
            self._context(vertex)
        if not stage or stage == "internal":
            return
        record = self.stages.setdefault(stage, StageTime(name=stage))
        steps = self._steps.setdefault(stage, _Steps())
        started, completed = _text(vertex, "started"), _text(vertex, "completed")
        if started and not completed and digest not in self._open:
            self._open[digest] = started
            steps.running.add(digest)
            if not vertex.get("cached"):
                self._report(stage, "started")
        if completed and (digest in self._open or vertex.get("cached")):
            begun = self._open.pop(digest, started or completed)
            steps.running.discard(digest)
            steps.last_ended |= last
            if vertex.get("cached"):
                record.cached += 1
            else:
                steps.ran = True
                record.executed += 1
                record.seconds += _between(begun, completed)
        if error:
            self._report(stage, "stopped" if stopped else "failed")
        elif completed and steps.last_ended and not steps.running:
            self._report(stage, "done" if steps.ran else "cached")

    def _context(self, vertex: dict[str, Any]) -> None:
        steps, digest = self._steps.setdefault(CONTEXTS, _Steps(ran=True)), vertex["digest"]
        completed = vertex.get("completed") or vertex.get("error")
        if _text(vertex, "started") and not completed:
            steps.running.add(digest)
            self._report(CONTEXTS, "started")
        elif completed and digest in steps.running:
            steps.running.discard(digest)
            if not steps.running:
                self._report(CONTEXTS, "done")

    def take_cache_errors(self) -> tuple[str, ...]:
        """Return why a cache in a registry was not used or not written, each reason once; no build fails of it."""
        found = tuple(dict.fromkeys(self._cache_errors))
        self._cache_errors.clear()
        return found

    def ended(self, *, well: bool) -> None:
        """Take the end of one run of the builder: what still ran is done, or was stopped."""
        for stage, steps in self._steps.items():
            if steps.state == "started":
                self._report(stage, "done" if well else "stopped")
            steps.running.clear()
            steps.last_ended, steps.ran = False, False
        self._open.clear()

    def _err(self, text: str) -> None:
        if len(self.errors) < _ERRORS:
            self.errors.append("\n".join(_clean(line) for line in text.splitlines()))

    def _report(self, stage: str, what: str) -> None:
        steps = self._steps[stage]
        again = what == "cached" and steps.state == "done"  # by a later run of the builder, from what this one made
        if again or steps.state in {what, "failed"} or (stage == "export" and not self.exports):
            return
        steps.state = what
        self._bytes.pop(stage, None)
        if self.on_change:
            self.on_change(stage, what)

    def _status(self, entry: dict[str, Any]) -> None:
        """Take how many bytes of something came or went: a context, a layer, an export."""
        vertex, name = _text(entry, "vertex"), _text(entry, "id")
        stage = self._shown.get(vertex, "")
        done, total = (value if isinstance(value, int) else 0 for value in (entry.get("current"), entry.get("total")))
        if stage == "export" and name and not entry.get("completed"):
            self.details.line(stage, _clean(name.partition(" with ")[0]))  # it counts no bytes
        if not stage or not name or not (0 < done < _MOST_BYTES) or not (0 <= total < _MOST_BYTES):
            return
        parts = self._bytes.setdefault(stage, {})
        if (vertex, name) in parts or len(parts) < _PARTS:
            parts[vertex, name] = done, total
        whole = sum(t for _, t in parts.values()) if all(t for _, t in parts.values()) else 0
        self.details.amount(stage, Amount(done=sum(d for d, _ in parts.values()), total=whole, unit="bytes"))

    def _log(self, entry: dict[str, Any]) -> None:
        # A program's writes come as they are, so a line may come in several pieces, and with the other stream's between them.
        stream = entry.get("stream", 1)
        key = (_text(entry, "vertex"), stream if isinstance(stream, int) else 1)
        try:
            data = self._unended.pop(key, b"") + base64.b64decode(_text(entry, "data"))
        except ValueError:
            return
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if key[0] in self._ended or len(data) - end > _LONG:
            end = len(data)
        if data[end:]:
            self._unended[key] = data[end:]
        self._lines(key[0], data[:end])

    def _end_lines(self, digest: str) -> None:
        for key in [key for key in self._unended if key[0] == digest]:
            self._lines(digest, self._unended.pop(key))

    def _lines(self, digest: str, data: bytes) -> None:
        stage = self._names.get(digest, "")
        tail = self._tails.setdefault(digest, [])
        for line in data.decode("utf-8", "replace").splitlines():
            if line.strip():
                line = _clean(line)  # noqa: PLW2901
                self.log.write(f"[{stage}] {line}\n")
                tail.append(line)
                self.details.line(stage, line)
                if (found := _NINJA.match(line)) and 0 < int(found[1]) <= int(found[2]):
                    self.details.amount(stage, Amount(done=int(found[1]), total=int(found[2]), unit="steps"))
        del tail[:-400]

    def failure(self) -> tuple[str, list[str]]:
        """Return the stage that failed and the lines of its output that matter: the first errors, then the end."""
        if self.failed is None:
            return "", self.errors[-3:]
        tail = self._tails.get(self.failed, [])
        marked = [
            line
            for line in tail
            if re.search(r"\b(?:error|Error|ERROR|fatal|FAILED|[Hh]ash mismatch|envbuild:)", line)
            and not _NOISE.match(line)
        ]
        chosen = list(dict.fromkeys([*marked[:6], *tail[-6:]]))
        return self._names.get(self.failed, ""), chosen or self.errors[-3:]

    def tail(self) -> str:
        """Return the end of what the stage that failed printed, and what the builder says of it."""
        lines = self._tails.get(self.failed, []) if self.failed is not None else []
        return "\n".join([*lines, *self.errors])

    def times(self) -> list[StageTime]:
        """Return the stages that took part, in the order in which they appeared."""
        return list(self.stages.values())


def _between(begun: str, ended: str) -> float:
    """Return the seconds between two times of the stream; 0 where one of them is none."""
    try:
        return max(0.0, (_time(ended) - _time(begun)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # of no known form; one with a zone and one without
        return 0.0


def _time(text: str) -> dt.datetime:
    # Nine digits of a second come; Python takes six.
    return dt.datetime.fromisoformat(re.sub(r"\.(\d{6})\d*", r".\1", text[:64]))


def follow(stream: TextIO, watch: Watch) -> Iterator[None]:
    """Feed `stream` to `watch` line by line."""
    for line in stream:
        watch.feed(line)
        yield
