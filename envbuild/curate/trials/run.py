"""Trying pairs one after the other: what was tried with the same inputs is not tried again, and each result is kept at once."""

import datetime as dt
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from envbuild.components import COMPONENTS
from envbuild.curate.trials.cuda import OwnNvcc, clang_version
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.kinds import Result, Ways, usual
from envbuild.curate.trials.pairs import Pair
from envbuild.curate.trials.resolution import requirements_for, set_refused_by
from envbuild.curate.trials.sources import compiler_version
from envbuild.curate.trials.subject import TORCH, Subject, cuda_major, find
from envbuild.curate.wheels import Distribution, python_tags
from envbuild.errors import LockError
from envbuild.evidence.trials import KINDS, History, Kind, Trial, add_trial, load_trials
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.settings import Settings
from envbuild.util.names import shown

METHOD: Mapping[Kind, int] = {"metadata": 1, "names": 1, "libraries": 1, "headers": 1, "sources": 2}
"""Raised by whoever changes how a kind is tried: the older trials of it are then tried again."""
_NVCC_OPTION = re.compile(r" --nvcc nvcc-[0-9.]+\Z")
_CPP_ONLY = " --cpp-only"
_FIRST = 600
"""Characters of a first line that are kept."""


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
    unasked: int = 0
    """Pairs to which none of the kinds applies."""


class Runner:
    """Tries pairs.

    Args:
        matrix: the releases.
        settings: the index and the cache.
        records: the folder of the ledger.
        trees: source trees by axis, for what no index has.
        clones: git repositories by axis; of each release, its commit is taken.
        submodules: git repositories of their submodules, by the last part of the submodule's path.
        jobs: resolutions that run at a time.
        again: whether what was tried is tried again.
        cpp_only: whether trials of sources leave out .cu files. Those that were looked at before stay as they are.
        nvccs: nvccs of this machine, for the CUDA of which PyPI has none.

    """

    def __init__(
        self,
        matrix: Matrix,
        settings: Settings,
        *,
        records: Path,
        trees: Mapping[AxisName, Path] | None = None,
        clones: Mapping[AxisName, Path] | None = None,
        submodules: Mapping[str, Path] | None = None,
        jobs: int = 2,
        again: bool = False,
        cpp_only: bool = False,
        nvccs: Sequence[OwnNvcc] = (),
    ) -> None:
        self.matrix = matrix
        self.files = Files(settings)
        self.records = records
        self.trees = trees or {}
        self.clones = clones or {}
        self.submodules = submodules or {}
        self.again = again
        self.ledger = History(load_trials(records))
        self._subjects: dict[tuple[AxisName, str, str], Subject | None] = {}
        self.ways = Ways(matrix, self.files, jobs=jobs, cpp_only=cpp_only, nvccs=nvccs)

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
        with self.ways.precompiled:
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
        if not results:
            outcome.unasked += 1
            return "nothing to try"
        outcome.complete += 1
        return ", ".join(results)

    def _subject(self, axis: AxisName, version: str, cuda: str) -> Subject | None:
        key = (axis, version, cuda)
        if key not in self._subjects:
            self._subjects[key] = find(
                self.files,
                self.matrix,
                axis,
                version,
                cuda=cuda,
                trees=self.trees,
                clones=self.clones,
                submodules=self.submodules,
            )
        return self._subjects[key]

    def _trial(
        self, pair: Pair, kind: Kind, component: Subject, other: Subject, cuda: str, outcome: Outcome
    ) -> Trial | None:
        # where no cell holds a pair, one Python shows what there is to see
        pythons = pair.pythons or usual(self._pythons(component, other))
        requirements = requirements_for(self.matrix, pair.versions, (*component.requirements, *other.requirements))
        sources = COMPONENTS[component.axis].host_sources
        reads: tuple[str, ...] = (
            (sources.cxx_flags,) if kind in {"headers", "sources"} and sources and sources.cxx_flags else ()
        )
        if kind == "names":
            reads = COMPONENTS[component.axis].unimportable
        refused = ""
        if kind == "sources" and sources:
            found = self.ways.set_of(requirements, pythons) if pair.other == TORCH else None
            refused = set_refused_by(self.matrix, pair.versions, found.packages) if found else ""
            reads += (*sources.defines, *filter(None, (refused,)))
        shape = (METHOD[kind], kind, component.identity, other.identity, requirements)
        compiler, clang = (compiler_version(), clang_version()) if kind == "sources" else ("", "")

        def inputs_of(option: str, clang: str) -> str:
            compilers = (compiler, clang) if kind == "sources" else ()
            return _digest(*shape, *compilers, *reads, option or (pythons if kind == "metadata" else ()))

        nvcc = self.ways.nvccs.get(cuda) if kind == "sources" else None
        less = _CPP_ONLY if kind == "sources" and self.ways.cpp_only else ""
        option = less or (f" --nvcc nvcc-{nvcc.release}" if nvcc else "")
        inputs = inputs_of(option, "" if less else clang)
        known = self.ledger.last(pair.versions, kind)
        cpp_passed = False
        if known is not None and not self.again:
            # a trial whose C++ files were read as they would be now, whatever read .cu files
            options = ("", _CPP_ONLY, *_NVCC_OPTION.findall(known.command))
            alike = known.inputs in {inputs_of(each, by) for each in options for by in (clang, "")}
            if known.inputs == inputs or (alike and _is_enough(known, cpp_only=bool(less))):
                outcome.kept += 1
                return known
            cpp_passed = alike and known.verdict == "passed"
        ask = (kind, pair, component, other, cuda, requirements, pythons)
        try:
            result = None if refused else self.ways.result(*ask, cpp_passed=cpp_passed)
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
            command=f"envbuild matrix try {pair.component}={pair.version} {pair.other}={pair.with_} --kind {kind}{option}",
            inputs=inputs,
        )
        outcome.made += 1
        # twice on one day, with the same result: one record
        return known if known is not None and known.id == trial.sealed().id else add_trial(trial, self.records)

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


def _is_enough(known: Trial, *, cpp_only: bool) -> bool:
    """Return whether a trial that read the same C++ files says all that a new one would, which may be C++ files alone."""
    if cpp_only or not known.counts.get("cuda_files"):
        return True
    return bool(known.counts.get("cuda_by_nvcc"))  # what clang read, or nothing did, is read again


def _digest(*inputs: object) -> str:
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _contradictions(pair: Pair, trial: Trial) -> list[str]:
    """Return what a trial says against the matrix: a cell holds the pair, and the trial shows that it does not fit."""
    if not pair.pythons:
        return []
    if trial.kind == "metadata":
        failed = [python for python in pair.pythons if trial.pythons.get(python) == "failed"]
        return [f"{pair} on Python {', '.join(failed)}: {trial.first}"] if failed else []
    return [f"{pair}: {trial.first}"] if trial.verdict == "failed" else []
