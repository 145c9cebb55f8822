"""The ledger of trials: which trials two releases had with each other without a GPU, and their results.

One file per component in `matrices/trials`, a record a line. Records are added and never changed: each carries the hash of the
rest of its line.
"""

import contextlib
import copy
import datetime as dt
import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from envbuild.errors import DataError, HostError
from envbuild.evidence.kept import key_of_files
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import public_version
from envbuild.paths import data_dir
from envbuild.util import compiled
from envbuild.util.bounded import read_text
from envbuild.util.frozen import Frozen
from envbuild.util.model import AfterValidator, Field, Model, model_validator
from envbuild.util.names import Line, SafeName, Sha256, Version, shown

Kind = Literal["metadata", "names", "libraries", "headers", "sources"]
Verdict = Literal["passed", "failed", "undecided"]
KINDS: tuple[Kind, ...] = ("metadata", "names", "libraries", "headers", "sources")


def _two(pair: dict[str, str]) -> dict[str, str]:
    if len(pair) != 2:
        raise ValueError("a trial is of two releases")
    return pair


class Trial(Model):
    """One trial."""

    id: str = Field(default="", pattern=r"^([0-9a-f]{16})?$")
    """The first digits of the sha256 over the rest; a rule cites it as `trial:ID`."""
    date: dt.date
    kind: Kind
    pair: Annotated[dict[SafeName, Version], AfterValidator(_two)]
    """Axis -> version without a variant; first the component, then what it was tried with."""
    verdict: Verdict
    first: Line = ""
    """The first line of what is wrong, or could not be decided; of a trial that passed, of what it left out."""
    counts: dict[SafeName, int] = {}
    pythons: dict[SafeName, Literal["passed", "failed"]] = {}
    """Of a trial that differs by Python: what each came to."""
    command: Line
    inputs: Sha256
    """Over names and hashes of the files that were read, and the version of what reads them."""

    @model_validator(mode="after")
    def _says_why(self) -> Self:
        if self.verdict != "passed" and not self.first:
            raise ValueError("a trial that did not pass needs a reason")
        return self

    def sealed(self) -> "Trial":
        """Return it with its id."""
        return self.model_copy(update={"id": _id(_as_json(self))})


def _as_json(trial: Trial) -> dict[str, Any]:
    return trial.model_dump(mode="json", exclude_defaults=True)


def _id(record: Mapping[str, Any]) -> str:
    body = {key: value for key, value in record.items() if key != "id"}
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _line(trial: Trial) -> str:
    return json.dumps(_as_json(trial), separators=(",", ":"), ensure_ascii=False)


def trials_folder() -> Path:
    """Return where this installation has its trials."""
    return data_dir("matrices") / "trials"


def read_trials(path: Path) -> tuple[Trial, ...]:
    """Read one file of the ledger, oldest first.

    Raises:
        DataError: a line is no record, or was edited.

    """
    from pydantic import ValidationError

    found = []
    number = 0
    try:
        for number, line in enumerate(read_text(path).splitlines(), 1):
            raw = json.loads(line)
            trial = Trial.model_validate(raw)
            if trial.id != _id(raw):
                raise DataError(
                    "this trial was edited after it was written",
                    where=f"{path}:{number}",
                    hint="restore the line from version control; `envbuild matrix try` adds a new one",
                )
            found.append(trial)
    except RecursionError:
        problem = "it is nested too deeply"
    except OSError as error:
        problem = error.strerror or str(error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError as error:
        problem = str(error)
    else:
        return tuple(found)
    raise DataError(f"this trial does not load: {shown(problem)}", where=f"{path}:{number}", hint="restore the file")


def load_trials(folder: Path) -> tuple[Trial, ...]:
    """Read every file of `folder`; none when there is no such folder.

    Raises:
        DataError: a line is no record, or was edited.

    """
    return tuple(trial for path in sorted(folder.glob("*.jsonl")) for trial in read_trials(path))


@cache
def committed_trials() -> tuple[Trial, ...]:
    """Return the trials of this installation, read once.

    Raises:
        DataError: one was edited.

    """
    return load_trials(trials_folder())


def add_trial(trial: Trial, folder: Path) -> Trial:
    """Append a record to the file of its component and return it with its id.

    Raises:
        HostError: the file cannot be written.

    """
    import fcntl

    trial = trial.sealed()
    path = folder / f"{next(iter(trial.pair))}.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            before = os.fstat(file.fileno()).st_size
            line = (_line(trial) + "\n").encode()
            written = 0
            try:
                # one write: a run that is killed leaves whole lines
                written = os.write(file.fileno(), line)
                os.fsync(file.fileno())
            finally:
                if written < len(line):
                    os.ftruncate(file.fileno(), before)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 - it gets the message of the others
    except OSError as error:
        raise HostError(f"the trial cannot be written: {error.strerror}", where=str(path)) from None
    return trial


class Last(Frozen):
    """What counts of the last trial of a kind for the word on its two releases."""

    id: str
    kind: Kind
    verdict: Verdict
    first: str


class Tried(Frozen):
    """What the newest trials say of two releases."""

    verdict: Verdict
    trials: tuple[Last, ...]
    """By kind, as `KINDS` has them."""
    read: Mapping[AxisName, str]
    """What the trials read in the place of what was asked about, with its build: `torch: 2.12.1+cu130` for 2.12.0+cu126."""

    def describe(self) -> str:
        """Return it in words: `tried: metadata and names passed`, or `tried with torch 2.12.1+cu130: …`."""
        parts = []
        for verdict, word in (("failed", "failed"), ("undecided", "not decided"), ("passed", "passed")):
            kinds = [trial.kind for trial in self.trials if trial.verdict == verdict]
            if kinds:
                parts.append(f"{', '.join(kinds)} {word}")
        wrong = next((trial for trial in self.trials if trial.verdict == "failed"), None)
        read = ", ".join(f"{axis} {version}" for axis, version in self.read.items())
        tried = f"tried with {read}" if read else "tried"
        return f"{tried}: {'; '.join(parts)}" + (f" ({wrong.first})" if wrong else "")


def same_release(axis: AxisName, tried: str, version: str) -> bool:
    """Return whether a trial with `tried` speaks for `version`: of torch, one patch of a minor release for the others."""
    if axis != "torch":
        return tried == version.partition("+")[0]
    texts = tried.partition("+")[0].split("."), version.partition("+")[0].split(".")
    if all(part.isdecimal() and part.isascii() for parts in texts for part in parts):  # the usual case, without PEP 440
        first, second = ([*map(int, parts)][:2] for parts in texts)
        return first == second
    one, other = public_version(tried), public_version(version)
    if one is None or other is None or other.is_prerelease:  # an image's own build is no release
        return False
    return one.release[:2] == other.release[:2]


def _last(trials: Iterable[Trial]) -> dict[tuple[object, ...], Trial]:
    """Return the last trial of each pair and kind."""
    return {(*trial.pair.items(), trial.kind): trial for trial in trials}


def counted(trials: Iterable[Trial]) -> dict[tuple[AxisName, AxisName, Kind], dict[Verdict, int]]:
    """Return per component, what it was tried with and kind how the last trial of each pair ended."""
    last = _last(trials)
    found: dict[tuple[AxisName, AxisName, Kind], dict[Verdict, int]] = {}
    for trial in sorted(last.values(), key=lambda each: (*each.pair, KINDS.index(each.kind))):
        component, other = trial.pair
        counts = found.setdefault((component, other, trial.kind), {"passed": 0, "failed": 0, "undecided": 0})
        counts[trial.verdict] += 1
    return found


class CudaCount(NamedTuple):
    """What trials of sources that passed came to for .cu files."""

    passed: int
    """Pairs of releases whose component has such files."""
    all_cu_files_passed: int
    """Those of which each file was looked at, and passed."""
    cu_files: int
    """Files that passed, over all pairs."""


def cuda_counted(trials: Iterable[Trial]) -> dict[tuple[AxisName, AxisName], CudaCount]:
    """Return per component and what it was tried with what the last trial of each pair says of its .cu files.

    Pairs whose last trial of sources did not pass are left out.
    """
    by_axes: dict[tuple[AxisName, AxisName], list[tuple[int, int]]] = {}
    for trial in _last(trials).values():
        every = trial.counts.get("cuda_files", 0)
        if trial.kind == "sources" and trial.verdict == "passed" and every:
            component, other = trial.pair
            seen = sum(number for name, number in trial.counts.items() if name.startswith("cuda_by_"))
            by_axes.setdefault((component, other), []).append((seen, every))
    return {
        axes: CudaCount(
            passed=len(files),
            all_cu_files_passed=sum(seen == every for seen, every in files),
            cu_files=sum(seen for seen, _ in files),
        )
        for axes, files in sorted(by_axes.items())
    }


_Pair = tuple[dict[AxisName, str], dict[Kind, tuple[str, Verdict, str]]]
"""Two releases, and of each kind the last trial's id, verdict and first line."""


class Ledger:
    """What trials came to, by pair.

    Args:
        trials: as `load_trials` returns them; a later one of the same kind counts, an earlier one does not.

    """

    def __init__(self, trials: Iterable[Trial]) -> None:
        by_pair: dict[tuple[tuple[str, str], ...], _Pair] = {}
        for trial in trials:
            pair = by_pair.setdefault(tuple(trial.pair.items()), (dict(trial.pair), {}))
            pair[1][trial.kind] = (trial.id, trial.verdict, trial.first)
        self._by_axes: dict[frozenset[str], list[_Pair]] = {}
        for each in by_pair.values():
            self._by_axes.setdefault(frozenset(each[0]), []).append(each)
        self._by_version: dict[frozenset[str], dict[str, list[_Pair]]] = {}
        """The same by the version of the axis that comes first where torch is last."""
        self._lines: dict[frozenset[str], bytes] = {}
        self.build_of: Callable[[str], str] = str
        """The build of torch that a trial of a version read; the version itself where `with_builds` was not asked."""

    def with_builds(self, build_of: Callable[[str], str]) -> "Ledger":
        """Return the same ledger, which knows which build of torch a trial read: `2.12.1` -> `2.12.1+cu130`.

        Trials read the index's torch, and a record states its version alone.
        """
        known = copy.copy(self)
        known.build_of = build_of
        return known

    @classmethod
    def kept(cls, lines: list[bytes]) -> "Ledger":
        """Return a ledger from its compiled form, `plain`; what is known of two axes is read when it is asked for."""
        made = cls(())
        made._lines = dict(zip(map(frozenset, json.loads(lines[0])), lines[1:], strict=True))
        return made

    def plain(self) -> list[Any]:
        """Return what `kept` makes it from again: the pairs of axes, then what is known of each."""
        return [[sorted(axes) for axes in self._by_axes], *self._by_axes.values()]

    def _of_axes(self, axes: frozenset[str]) -> list[_Pair]:
        if axes in self._lines:
            self._by_axes[axes] = json.loads(self._lines.pop(axes))
        return self._by_axes.get(axes, [])

    def of(self, versions: Mapping[AxisName, str]) -> Tried | None:
        """Return what is known of two releases, as a cell states them; None where they were not tried."""
        # torch last: it alone takes more than a comparison
        (axis, version), (other, wanted) = sorted(versions.items(), key=lambda item: (item[0] == "torch", item[0]))
        axes = frozenset(versions)
        if axes not in self._by_version:
            by_version = self._by_version.setdefault(axes, {})
            for each in self._of_axes(axes):
                by_version.setdefault(each[0][axis], []).append(each)
        for known, kinds in self._by_version[axes].get(version.partition("+")[0], ()):
            if same_release(other, known[other], wanted):
                trials = tuple(
                    Last(kind=kind, id=kinds[kind][0], verdict=kinds[kind][1], first=kinds[kind][2])
                    for kind in KINDS
                    if kind in kinds
                )
                verdicts = [trial.verdict for trial in trials]
                worst = next(v for v in ("failed", "undecided", "passed") if v in verdicts)
                read = self._read(known, versions)
                return Tried(verdict=worst, trials=trials, read=read)
        return None

    def _read(self, known: Mapping[AxisName, str], versions: Mapping[AxisName, str]) -> dict[AxisName, str]:
        """Return what trials of `known` read that is another release or build than that of `versions`."""
        torch = known.get("torch")
        if torch is None:
            return {}
        read = self.build_of(torch)
        asked = versions["torch"]
        # a build that is not known is none that differs
        return {} if read == (asked if "+" in read else asked.partition("+")[0]) else {"torch": read}

    def passed_with(self, axis: AxisName, version: str) -> Iterator[tuple[AxisName, str]]:
        """Yield the releases, axis and version, whose trials with this one all passed."""
        for axes in sorted({*self._by_axes, *self._lines}, key=sorted):
            if axis not in axes:
                continue
            for known, kinds in self._of_axes(axes):
                if same_release(axis, known[axis], version) and all(kind[1] == "passed" for kind in kinds.values()):
                    yield next((other, tried) for other, tried in known.items() if other != axis)


class History(Ledger):
    """A ledger that has the trials themselves, too."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        kept = tuple(trials)
        self._trials = _last(kept)
        super().__init__(kept)

    def trials(self) -> Iterable[Trial]:
        """Return the last trial of each pair and kind."""
        return self._trials.values()

    def last(self, pair: Mapping[str, str], kind: Kind) -> Trial | None:
        """Return the last trial of this kind of exactly these releases."""
        return self._trials.get((*pair.items(), kind))


@cache
def committed_ledger() -> Ledger:
    """Return the ledger of this installation's trials, from its compiled form where there is one.

    Raises:
        DataError: a trial was edited.

    """
    key = key_of_files(trials_folder(), ".jsonl")
    lines = compiled.read("ledger", key) if key else None
    if lines is not None:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return Ledger.kept(lines)
    ledger = Ledger(load_trials(trials_folder()))
    if key:
        compiled.keep("ledger", key, ledger.plain())
    return ledger
