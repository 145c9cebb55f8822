"""How a pair is tried: a way for each kind of trial, from what the index says and what lies in the files."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.components import AXIS_OF_DISTRIBUTION, COMPONENTS
from envbuild.curate.trials.cuda import FrontEnd, OwnNvcc, front_end, require_reads
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.headers import UMBRELLA, required_standard, try_headers
from envbuild.curate.trials.known import Known
from envbuild.curate.trials.libraries import is_library, needed_of, provided_by, try_libraries
from envbuild.curate.trials.modules import Library
from envbuild.curate.trials.names import ROOTS, Consumer, library_of, lines, read_consumer, try_names
from envbuild.curate.trials.pairs import Pair
from envbuild.curate.trials.precompiled import Precompiled
from envbuild.curate.trials.resolution import Resolved, requirements_for, resolved
from envbuild.curate.trials.sources import SourcesFound, compile_with, cuda_tools, include_folders, try_sources
from envbuild.curate.trials.subject import TORCH, Subject, fits_cuda
from envbuild.evidence.trials import Kind, Verdict
from envbuild.lock.index import IndexFile
from envbuild.matrix.load import Matrix

_BEST_PYTHON = "3.12"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one trial came to, before it is a record."""

    verdict: Verdict
    first: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    pythons: Mapping[str, Verdict] = field(default_factory=dict)


def usual(pythons: Sequence[str]) -> tuple[str, ...]:
    """Return the one Python that shows what there is to see, of those of a pair; none where there are none."""
    return (_BEST_PYTHON,) if _BEST_PYTHON in pythons else tuple(pythons[-1:])


class Ways:
    """The ways to try a pair. What is read of a release for one pair is kept for the next.

    Args:
        matrix: the releases.
        files: the files of the index.
        jobs: resolutions that run at a time.
        cpp_only: whether .cu files are left out.
        nvccs: nvccs of this machine, for the CUDA of which PyPI has none.

    """

    def __init__(
        self, matrix: Matrix, files: Files, *, jobs: int, cpp_only: bool = False, nvccs: Sequence[OwnNvcc] = ()
    ) -> None:
        self.matrix = matrix
        self.files = files
        self.jobs = jobs
        self.cpp_only = cpp_only
        self.nvccs = {nvcc.major: nvcc for nvcc in nvccs}
        """By CUDA's major version."""
        self.precompiled = Precompiled(compile_with)
        """Torch's precompiled headers; sources are tried within its `with` block."""
        self._known = Known()
        self._consumer: tuple[Subject, Consumer] | None = None
        self._libraries: dict[tuple[str, ...], Library] = {}

    def result(
        self,
        kind: Kind,
        pair: Pair,
        component: Subject,
        other: Subject,
        cuda: str,
        requirements: Sequence[str],
        pythons: Sequence[str],
        *,
        cpp_passed: bool = False,
    ) -> Result | None:
        """Try a pair in one way; None where that way does not apply to it.

        Args:
            kind: which way.
            pair: the pair.
            component: the releases of the component that are tried.
            other: what it is tried with.
            cuda: CUDA's major version that the index's torch is built for; empty where the pair has no torch.
            requirements: what is installed together.
            pythons: the Pythons to try it on.
            cpp_passed: whether a trial of sources without .cu files has passed: then those alone are left.

        Raises:
            LockError: a file of the index cannot be read, or is not what the index states.
            HostError: it cannot be downloaded, or a compiler did not end.

        """
        if kind == "metadata":
            return self._metadata(component, requirements, pythons)
        if kind == "names":
            asks = requirements_for(self.matrix, pair.versions, _asks_along(component, other))
            oldest = min(pythons, key=lambda python: int(python.partition(".")[2]), default="")
            return self._names(component, other, self.set_of(asks, pythons), oldest)
        if kind == "libraries":
            return self._shared(component, other, cuda, requirements, pythons)
        if other.axis != TORCH or COMPONENTS[component.axis].host_sources is None or not self._folders(component):
            return None
        if kind == "headers":
            return self._headers(component, other)
        return self._compiled(component, requirements, pythons, self.nvccs.get(cuda), cpp_passed=cpp_passed)

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

    def set_of(self, requirements: Sequence[str], pythons: Sequence[str]) -> Resolved | None:
        """Return the set that one Python gets, the usual one first; None when no Python gets one."""
        for python in (*usual(pythons), *pythons):
            found = resolved(self.files, requirements, python)
            if found.packages:
                return found
        return None

    def _names(self, component: Subject, other: Subject, found: Resolved | None, python: str) -> Result | None:
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
        dead = COMPONENTS[component.axis].unimportable
        names = try_names(consumer, entry=component.entry, libraries=libraries, of=of, unimportable=dead, python=python)
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
        found = self.set_of(requirements, pythons)
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

    def _compiled(
        self,
        component: Subject,
        requirements: Sequence[str],
        pythons: Sequence[str],
        nvcc: OwnNvcc | None,
        *,
        cpp_passed: bool,
    ) -> Result | None:
        sources = COMPONENTS[component.axis].host_sources
        found = self.set_of(requirements, pythons)
        if sources is None:
            return None
        if found is None:
            return Result(verdict="undecided", first="no Python gets a set of packages")
        wheels = self._with_tools(found)
        torch = next(wheel for wheel in wheels if wheel.filename.startswith("torch-"))
        includes = include_folders(self.files, wheels)
        if self.cpp_only:
            cuda = None
        elif nvcc is None:
            cuda = front_end(self.files, wheels, includes)
        else:
            folders = include_folders(self.files, self._with_tools(found, nvcc.release))
            cuda = FrontEnd("nvcc", nvcc.program, tuple(folders))
            require_reads(cuda)
        for folder in self._folders(component):
            checked = try_sources(
                self.files,
                folder,
                sources,
                torch=torch,
                includes=includes,
                precompiled=self.precompiled,
                cuda=replace(cuda, root=folder, known=self._known) if cuda else None,
                cpp_passed=cpp_passed,
            )
            if checked is not None:
                return _of_sources(checked)
        return None

    def _with_tools(self, found: Resolved, nvcc: str = "") -> list[IndexFile]:
        """Return the wheels of a set and of the rest of CUDA's headers, of this release of nvcc where one is named."""
        wheels = self._wheels_of(found)
        asked = cuda_tools({name: version for name, (version, _) in found.packages.items()}, nvcc)
        tools = self._wheels_of(resolved(self.files, asked, found.python)) if asked else []
        instead = {tool.filename.partition("-")[0] for tool in tools} if nvcc else set()
        return [wheel for wheel in wheels if wheel.filename.partition("-")[0] not in instead] + tools


def _of_sources(checked: SourcesFound) -> Result | None:
    """Return what the files came to; None where not one was looked at, as where all are .cu files that are left out."""
    if not checked.units and not checked.cuda_by:
        return None
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
    # C++ files that passed have passed, whatever a front end makes of .cu files: the counts say how many it decided
    undecided = checked.undecided or (() if checked.units else checked.cuda_undecided)
    if undecided:
        return Result(verdict="undecided", first=undecided[0], counts=counts)
    return Result(verdict="passed", first=next(iter(checked.cuda_undecided), ""), counts=counts)


def _asks_along(component: Subject, other: Subject) -> tuple[str, ...]:
    """Return what decides the versions of NumPy and the others that names are asked of, the pair itself aside.

    A release of a component is resolved once, and not again for each torch: torch counts with what it asks of these.
    """
    along = [line for line in component.asks if canonicalize_name(Requirement(line).name) != TORCH]
    return (*along, *(line for line in other.asks if canonicalize_name(Requirement(line).name) in ROOTS))
