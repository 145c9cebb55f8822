"""Trying pairs one after the other: what was tried with the same inputs is not tried again, and each result is kept at once."""

import datetime as dt
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.components import AXIS_OF_DISTRIBUTION, COMPONENTS
from envbuild.curate.trials.cuda import clang_version, front_end
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.headers import UMBRELLA, required_standard, try_headers
from envbuild.curate.trials.libraries import is_library, needed_of, provided_by, try_libraries
from envbuild.curate.trials.modules import Library
from envbuild.curate.trials.names import ROOTS, Consumer, library_of, lines, read_consumer, try_names
from envbuild.curate.trials.pairs import Pair
from envbuild.curate.trials.resolution import Resolved, requirements_for, resolved, set_refused_by
from envbuild.curate.trials.sources import SourcesFound, compiler_version, cuda_tools, include_folders, try_sources
from envbuild.curate.trials.subject import TORCH, Subject, cuda_major, find, fits_cuda
from envbuild.curate.wheels import Distribution, python_tags
from envbuild.errors import LockError
from envbuild.evidence.trials import KINDS, History, Kind, Trial, Verdict, add_trial, load_trials
from envbuild.lock.index import IndexFile
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.settings import Settings
from envbuild.util.names import shown

METHOD: Mapping[Kind, int] = {"metadata": 1, "names": 1, "libraries": 1, "headers": 1, "sources": 2}
"""Raised by whoever changes how a kind is tried: the older trials of it are then tried again."""
_BEST_PYTHON = "3.12"
_FIRST = 600
"""Characters of a first line that are kept."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one trial came to, before it is a record."""

    verdict: Verdict
    first: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    pythons: Mapping[str, Verdict] = field(default_factory=dict)


@dataclass(kw_only=True)
class Outcome:
    """What a run came to."""

    pairs: int = 0
    held: int = 0
    absent: list[str] = field(default_factory=list)
    """Releases that neither the index nor a tree has."""
    made: int = 0
    kept: int = 0
    """Trials that were there already, with the same inputs."""
    verdicts: dict[Kind, Counter[str]] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    """Pairs that some cell holds, and that a trial shows not to fit."""
    complete: int = 0
    """Pairs that were tried in every kind that applies to them."""


class Runner:
    """Tries pairs.

    Args:
        matrix: the releases.
        settings: the index and the cache.
        records: the folder of the ledger.
        trees: source trees by axis, for what no index has.
        clones: git repositories by axis; of each release, its commit is taken.
        jobs: resolutions that run at a time.
        again: whether what was tried is tried again.

    """

    def __init__(
        self,
        matrix: Matrix,
        settings: Settings,
        *,
        records: Path,
        trees: Mapping[AxisName, Path] | None = None,
        clones: Mapping[AxisName, Path] | None = None,
        jobs: int = 2,
        again: bool = False,
    ) -> None:
        self.matrix = matrix
        self.files = Files(settings)
        self.records = records
        self.trees = trees or {}
        self.clones = clones or {}
        self.jobs = jobs
        self.again = again
        self.ledger = History(load_trials(records))
        self._subjects: dict[tuple[AxisName, str, str], Subject | None] = {}
        self._consumer: tuple[Subject, Consumer] | None = None
        self._libraries: dict[tuple[str, ...], Library] = {}

    def run(
        self,
        pairs: Sequence[Pair],
        kinds: Sequence[Kind] = KINDS,
        *,
        note: Callable[[str], None] = lambda _: None,
    ) -> Outcome:
        """Try each of `pairs` and return what that came to.

        Raises:
            HostError: an index cannot be reached, or a record cannot be written. What was tried until then is kept.

        """
        outcome = Outcome(pairs=len(pairs), held=sum(bool(pair.pythons) for pair in pairs))
        for number, pair in enumerate(pairs, 1):
            results = self._pair(pair, kinds, outcome)
            note(f"[{number}/{len(pairs)}] {pair}: {results}")
        return outcome

    def _pair(self, pair: Pair, kinds: Sequence[Kind], outcome: Outcome) -> str:
        cuda = cuda_major(self.files, pair.with_) if pair.other == TORCH else ""
        component = self._subject(pair.component, pair.version, cuda)
        other = self._subject(pair.other, pair.with_, cuda)
        for axis, version, subject in (
            (pair.component, pair.version, component),
            (pair.other, pair.with_, other),
        ):
            if subject is None and f"{axis} {version}" not in outcome.absent:
                outcome.absent.append(f"{axis} {version}")
        if component is None or other is None:
            return "not on the index"
        results = []
        for kind in kinds:
            trial = self._trial(pair, kind, component, other, cuda, outcome)
            if trial is None:
                continue
            outcome.verdicts.setdefault(kind, Counter())[trial.verdict] += 1
            results.append(f"{kind} {trial.verdict}" + (f" ({trial.first[:160]})" if trial.verdict != "passed" else ""))
            outcome.contradictions += _contradictions(pair, trial)
        outcome.complete += 1
        return ", ".join(results) or "nothing to try"

    def _subject(self, axis: AxisName, version: str, cuda: str) -> Subject | None:
        key = (axis, version, cuda)
        if key not in self._subjects:
            self._subjects[key] = find(
                self.files, self.matrix, axis, version, cuda=cuda, trees=self.trees, clones=self.clones
            )
        return self._subjects[key]

    def _trial(
        self, pair: Pair, kind: Kind, component: Subject, other: Subject, cuda: str, outcome: Outcome
    ) -> Trial | None:
        # where no cell holds a pair, one Python shows what there is to see
        pythons = pair.pythons or self._usual(self._pythons(component, other))
        requirements = requirements_for(self.matrix, pair.versions, (*component.requirements, *other.requirements))
        compiler = (compiler_version(), clang_version()) if kind == "sources" else ()
        sources = COMPONENTS[component.axis].host_sources
        reads: tuple[str, ...] = (
            (sources.cxx_flags,) if kind in {"headers", "sources"} and sources and sources.cxx_flags else ()
        )
        refused = ""
        if kind == "sources" and sources:
            found = self._set(requirements, pythons) if pair.other == TORCH else None
            refused = set_refused_by(self.matrix, pair.versions, found.packages) if found else ""
            reads += (*sources.defines, *filter(None, (refused,)))
        shape = (METHOD[kind], kind, component.identity, other.identity, requirements, *compiler, *reads)
        inputs = hashlib.sha256(json.dumps([*shape, pythons if kind == "metadata" else ()]).encode()).hexdigest()
        known = self.ledger.last(pair.versions, kind)
        if known is not None and known.inputs == inputs and not self.again:
            outcome.kept += 1
            return known
        try:
            result = None if refused else self._result(kind, pair, component, other, cuda, requirements, pythons)
        except LockError as error:
            refused = error.what
        if refused:
            result = Result(verdict="undecided", first=refused)
        if result is None:
            return None
        trial = Trial(
            date=dt.datetime.now(dt.UTC).date(),
            kind=kind,
            pair=pair.versions,
            verdict=result.verdict,
            first=shown(" ".join(result.first.split()), _FIRST),
            counts=dict(result.counts),
            pythons={p: v for p, v in result.pythons.items() if v != "undecided"},
            command=f"envbuild matrix try {pair.component}={pair.version} {pair.other}={pair.with_} --kind {kind}",
            inputs=inputs,
        )
        outcome.made += 1
        return add_trial(trial, self.records)

    @staticmethod
    def _usual(pythons: Sequence[str]) -> tuple[str, ...]:
        return (_BEST_PYTHON,) if _BEST_PYTHON in pythons else tuple(pythons[-1:])

    def _pythons(self, component: Subject, other: Subject) -> tuple[str, ...]:
        """Return the Pythons that the wheels of a pair are for, of those that the matrix has."""
        found = [release.version for release in self.matrix.releases["python"]]
        for subject in (component, other):
            for wheel in subject.wheels:
                name, version = wheel.filename.split("-")[:2]
                every = self.files.wheels(name, version)
                tags = python_tags(Distribution(name=name, version=Version(version), files=every))
                found = [python for python in found if not tags or python in tags]
        return tuple(found)

    def _result(
        self,
        kind: Kind,
        pair: Pair,
        component: Subject,
        other: Subject,
        cuda: str,
        requirements: Sequence[str],
        pythons: Sequence[str],
    ) -> Result | None:
        if kind == "metadata":
            return self._metadata(component, requirements, pythons)
        if kind == "names":
            asks = requirements_for(self.matrix, pair.versions, _asks_along(component, other))
            return self._names(component, other, self._set(asks, pythons))
        if kind == "libraries":
            return self._shared(component, other, cuda, requirements, pythons)
        if other.axis != TORCH or COMPONENTS[component.axis].host_sources is None or not self._folders(component):
            return None
        if kind == "headers":
            return self._headers(component, other)
        return self._compiled(component, requirements, pythons)

    def _metadata(self, component: Subject, requirements: Sequence[str], pythons: Sequence[str]) -> Result | None:
        if component.tree is not None:
            return None  # what it asks for is not known before it is built
        if not pythons:
            return Result(verdict="failed", first="the wheels of the two are for no Python in common")
        # uv waits for the index most of the time
        with ThreadPoolExecutor(self.jobs) as pool:
            every = list(pool.map(partial(resolved, self.files, requirements), pythons))
        failed = [each for each in every if not each.packages]
        each: dict[str, Verdict] = {r.python: "passed" if r.packages else "failed" for r in every}
        first = f"Python {failed[0].python}: {failed[0].why}" if failed else ""
        verdict: Verdict = "failed" if len(failed) == len(every) else "passed"
        counts = {"pythons": len(every), "failed": len(failed)}
        return Result(verdict=verdict, first=first, counts=counts, pythons=each)

    def _set(self, requirements: Sequence[str], pythons: Sequence[str]) -> Resolved | None:
        """Return the set that one Python gets, the usual one first; None when no Python gets one."""
        for python in (*self._usual(pythons), *pythons):
            found = resolved(self.files, requirements, python)
            if found.packages:
                return found
        return None

    def _names(self, component: Subject, other: Subject, found: Resolved | None) -> Result | None:
        if self._consumer is None or self._consumer[0] is not component:
            self._consumer = (component, read_consumer(self.files, component))
        consumer = self._consumer[1]
        mine = self._library(other)
        libraries = dict.fromkeys(mine.roots & ROOTS, mine)
        for name, (version, _) in (found.packages if found else {}).items():
            if name in ROOTS and name not in libraries and name not in AXIS_OF_DISTRIBUTION:
                wheel = self.files.wheel(name, version, found.python if found else None)
                if wheel is not None:
                    libraries[name] = self._library(
                        Subject(axis=name, version=version, wheels=(wheel,)),
                    )
        of = TORCH if other.axis == TORCH else next(iter(sorted(mine.roots & ROOTS)), other.axis)
        names = try_names(consumer, entry=component.entry, libraries=libraries, of=of)
        if not names.asked:
            return None
        first = next(lines(names), "")
        verdict: Verdict = "failed" if names.missing else "undecided" if names.doubtful else "passed"
        counts: dict[str, int] = {str(state): number for state, number in names.counts.items()}
        counts |= {"files": len(consumer.modules), "unread": len(consumer.unread)}
        return Result(verdict=verdict, first=first, counts={k: v for k, v in counts.items() if v})

    def _library(self, subject: Subject) -> Library:
        if subject.identity not in self._libraries:
            self._libraries[subject.identity] = library_of(self.files, subject)
        return self._libraries[subject.identity]

    def _shared(
        self, component: Subject, other: Subject, cuda: str, requirements: Sequence[str], pythons: Sequence[str]
    ) -> Result | None:
        wheels = [w for w in component.wheels if any(is_library(path) for path in self.files.paths(w))]
        if not wheels:
            return None
        if cuda and not fits_cuda(component, cuda):
            built = f"{component.axis} {component.version} has no wheel for CUDA {cuda}"
            text = f"the index's {other.axis} {other.version} is built for CUDA {cuda}, and {built}"
            return Result(verdict="undecided", first=text)
        found = self._set(requirements, pythons)
        if found is None:
            return Result(verdict="undecided", first="no Python gets a set of packages")
        needed = {path: names for wheel in wheels for path, names in needed_of(self.files, wheel).items()}
        every = self._wheels_of(found)
        libraries = try_libraries(needed, provided_by(self.files, every))
        counts = {"binaries": libraries.binaries, "needed": libraries.needed, "missing": len(libraries.missing)}
        if libraries.missing:
            return Result(verdict="failed", first=libraries.missing[0], counts=counts)
        return Result(verdict="passed", counts=counts)

    def _wheels_of(self, found: Resolved) -> list[IndexFile]:
        every = (self.files.by_hash(name, hashes) for name, (_, hashes) in found.packages.items())
        return [wheel for wheel in every if wheel is not None]

    def _folders(self, subject: Subject) -> list[Path]:
        """Return where the sources of `subject` lie."""
        return [subject.tree] if subject.tree else [self.files.source(sdist) for sdist in subject.sdists]

    def _headers(self, component: Subject, torch: Subject) -> Result | None:
        sources = COMPONENTS[component.axis].host_sources
        if sources is None or not torch.wheels:
            return None
        paths = frozenset(self.files.paths(torch.wheels[0]))
        umbrella = f"torch/include/{UMBRELLA}"
        text = self.files.text(torch.wheels[0], umbrella) if umbrella in paths else ""
        required = required_standard(text)
        every = [
            try_headers(folder, sources, paths, required, torch=torch.version) for folder in self._folders(component)
        ]
        missing = [line for each in every for line in each.missing]
        counts = {
            "files": sum(each.files for each in every),
            "present": sum(each.present for each in every),
            "guarded": sum(each.guarded for each in every),
            "missing": len(missing),
        }
        if not counts["files"]:
            return None
        return Result(verdict="failed" if missing else "passed", first=missing[0] if missing else "", counts=counts)

    def _compiled(self, component: Subject, requirements: Sequence[str], pythons: Sequence[str]) -> Result | None:
        sources = COMPONENTS[component.axis].host_sources
        found = self._set(requirements, pythons)
        if sources is None:
            return None
        if found is None:
            return Result(verdict="undecided", first="no Python gets a set of packages")
        tools = cuda_tools({name: version for name, (version, _) in found.packages.items()})
        wheels = self._wheels_of(found)
        if tools:
            wheels += self._wheels_of(resolved(self.files, tools, found.python))
        torch = next(wheel for wheel in wheels if wheel.filename.startswith("torch-"))
        includes = include_folders(self.files, wheels)
        cuda = front_end(self.files, wheels, includes)
        for folder in self._folders(component):
            checked = try_sources(self.files, folder, sources, torch=torch, includes=includes, cuda=cuda)
            if checked is not None:
                return _of_sources(checked)
        return None


def _of_sources(checked: SourcesFound) -> Result:
    counts = {
        "units": checked.units,
        "failed": len(checked.failed),
        "standard": checked.standard,
        "cuda_files": checked.cuda_files,
    }
    if checked.cuda_by:
        counts[f"cuda_by_{checked.cuda_by}"] = checked.cuda_checked
    if checked.failed:
        return Result(verdict="failed", first=checked.failed[0], counts=counts)
    if checked.undecided:
        return Result(verdict="undecided", first=checked.undecided[0], counts=counts)
    return Result(verdict="passed", counts=counts)


def _asks_along(component: Subject, other: Subject) -> tuple[str, ...]:
    """Return what decides the versions of NumPy and the others that names are asked of, the pair itself aside.

    A release of a component is resolved once, and not again for each torch: torch counts with what it asks of these.
    """
    along = [line for line in component.asks if canonicalize_name(Requirement(line).name) != TORCH]
    return (*along, *(line for line in other.asks if canonicalize_name(Requirement(line).name) in ROOTS))


def _contradictions(pair: Pair, trial: Trial) -> list[str]:
    """Return what a trial says against the matrix: a cell holds the pair, and the trial shows that it does not fit."""
    if not pair.pythons:
        return []
    if trial.kind == "metadata":
        failed = [python for python in pair.pythons if trial.pythons.get(python) == "failed"]
        return [f"{pair} on Python {', '.join(failed)}: {trial.first}"] if failed else []
    return [f"{pair}: {trial.first}"] if trial.verdict == "failed" else []
