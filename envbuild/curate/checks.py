"""Checks of the matrix beyond its loading: dead references, rules that cannot apply, and what package metadata says.

Loading refuses what is malformed or has no source. What is found here is well-formed and still wrong, or worth a look.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.version import Version

from envbuild.components import COMPONENTS
from envbuild.components.te import TeFacts
from envbuild.components.te import component as te
from envbuild.components.torch import TorchFacts
from envbuild.components.torch import component as torch
from envbuild.curate.wheels import Distribution, Upload, distributions, metadata_of, python_tags, uploads
from envbuild.evidence.trials import committed_trials, load_trials
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Axis, AxisName, NvccFacts, Release, Rule, Source, Spec
from envbuild.matrix.spec import matches, version_key
from envbuild.paths import data_dir
from envbuild.settings import Settings
from envbuild.solver.clauses import Cause, Clause, Clauses, compile_matrix
from envbuild.solver.search import solvable
from envbuild.util.frozen import replace

Level = Literal["error", "warning", "note"]

_CHECKED_BY_THEIR_OWN = frozenset({te.axis, torch.axis})
"""Axes with several distributions, which have their own check."""
_MEGATRON_OWN = ("torch", "numpy")


@dataclass(frozen=True, kw_only=True)
class MatrixFinding:
    """One thing found: `error` is wrong, `warning` probably is, `note` is for whoever tends the data."""

    level: Level
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.text}"


def check_matrix(
    matrix: Matrix, *, online: bool, settings: Settings | None = None, folder: Path | None = None
) -> list[MatrixFinding]:
    """Return what is wrong with `matrix`, worst first.

    Args:
        matrix: as loaded; malformed data has been refused before.
        online: also compare with the metadata of the packages on the index of `settings` (minutes).
        settings: where the index is; required when online.
        folder: where the matrix lies, where that is another place; its records and trials count next to the installation's.

    Raises:
        HostError: the index cannot be reached.

    """
    found = [*_references(matrix), *_releases(matrix), *_evidence_sources(matrix, folder), *_dead(matrix)]
    if online:
        if settings is None:
            raise ValueError("an online check needs settings")
        found += _online(matrix, settings)
    order = {"error": 0, "warning": 1, "note": 2}
    return sorted(found, key=lambda finding: (order[finding.level], finding.where, finding.text))


def _matching(axis: Axis, releases: Sequence[Release], spec: Spec) -> int:
    return sum(matches(axis, spec, release) for release in releases)


def _demands(rule: Rule) -> Iterator[tuple[str, AxisName, Spec]]:
    for axis, spec in rule.when.items():
        yield "when", axis, spec
    for axis, spec in rule.needs.items():
        yield "needs", axis, spec
    for alternative in rule.any_of:
        for axis, spec in alternative.items():
            yield "any_of", axis, spec


def _references(matrix: Matrix) -> Iterator[MatrixFinding]:
    """Specs that match no release: a typing mistake, or a release that went."""

    def dead(axis: AxisName, spec: Spec) -> bool:
        return not matrix.axes[axis].open and not _matching(matrix.axes[axis], matrix.releases[axis], spec)

    for rule in matrix.rules:
        for part, axis, spec in _demands(rule):
            if dead(axis, spec):
                yield MatrixFinding(
                    level="error", where=f"rule {rule.id}", text=f"{part} {axis} {spec!r} matches no release"
                )
            elif not isinstance(spec, str):
                for text in spec:
                    if dead(axis, text):
                        message = f"{part} {axis}: the alternative {text!r} matches no release"
                        yield MatrixFinding(level="warning", where=f"rule {rule.id}", text=message)
    for axis, releases in matrix.releases.items():
        for release in releases:
            where = f"{axis} {release.version}"
            for other, spec in release.needs.items():
                if dead(other, spec):
                    yield MatrixFinding(
                        level="error", where=where, text=f"needs {other} {spec!r}, which matches no release"
                    )
            for other, value in release.fixes.items():
                if not matrix.has(other, value):
                    yield MatrixFinding(
                        level="warning", where=where, text=f"fixes {other} {value}, which is not listed"
                    )
    for cap in matrix.packages.cap:
        for axis, spec in cap.when.items():
            if dead(axis, spec):
                where = f"cap {cap.distribution}{cap.spec}"
                yield MatrixFinding(level="error", where=where, text=f"when {axis} {spec!r} matches no release")


def _releases(matrix: Matrix) -> Iterator[MatrixFinding]:
    for name, axis in matrix.axes.items():
        before: Version | None = None
        for release in matrix.releases[name]:
            where = f"{name} {release.version}"
            # what is in an image has the image's date, and is never compared with others
            version = version_key(release.version)
            if axis.dated and release.date is None and version is not None:
                yield MatrixFinding(level="error", where=where, text="has no date, and this axis counts in the spread")
            if release.commit is None and version is not None and name in COMPONENTS and COMPONENTS[name].needs_commit:
                yield MatrixFinding(level="error", where=where, text="has no commit, and comes from git only")
            if axis.scheme == "pep440" and version is not None:
                if before is not None and version < before:
                    yield MatrixFinding(
                        level="warning", where=where, text=f"is after {before}; releases go oldest first"
                    )
                before = version
            if isinstance(release.facts, TorchFacts) and "+cu" in release.version:
                variant = release.version.rpartition("+cu")[2]
                stated = f"{variant[:-1]}.{variant[-1]}"
                if release.needs.get("cuda") != stated:
                    text = f"is a build for CUDA {stated} and needs cuda {release.needs.get('cuda')!r}"
                    yield MatrixFinding(level="error", where=where, text=text)


def _evidence_sources(matrix: Matrix, folder: Path | None) -> Iterator[MatrixFinding]:
    places = (data_dir("matrices"), *([folder] if folder else []))
    tried = {trial.id for trial in committed_trials()}
    tried |= {trial.id for trial in load_trials(folder / "trials")} if folder else set()
    names = {path.name for place in places for path in (place / "evidence").glob("*")}

    def missing(source: Source) -> bool:
        kind, _, name = source.partition(":")
        if kind == "trial":
            return name not in tried
        return kind == "evidence" and not any(each.startswith(name) for each in names)

    stated = [(f"rule {rule.id}", rule.source) for rule in matrix.rules]
    stated += [(f"{axis} {each.version}", each.source) for axis, some in matrix.releases.items() for each in some]
    for where, source in stated:
        if missing(source):
            yield MatrixFinding(level="error", where=where, text=f"rests on {source}, which is not there")


class _Reach:
    """Whether cells exist, asked of the compiled matrix with every release free to be chosen."""

    def __init__(self, matrix: Matrix) -> None:
        compiled = compile_matrix(matrix)
        self.compiled: Clauses = compiled.unguarded

    def any_cell(self, masks: dict[int, int], compiled: Clauses | None = None) -> bool:
        compiled = compiled or self.compiled
        return solvable(compiled, compiled.domains(masks))

    def without(self, rule: Rule) -> tuple[Clauses, list[Clause]]:
        """Return the clauses less those of `rule`, and those."""
        own = [clause for clause in self.compiled.clauses if clause.cause.rule is rule]
        rest = tuple(
            clause
            if clause.cause.rule is not rule
            else Clause(((clause.literals[0][0], self.compiled.full[clause.literals[0][0]]),), Cause(kind="rule"))
            for clause in self.compiled.clauses
        )
        return replace(self.compiled, clauses=rest), own

    def refuses(self, rule: Rule) -> bool:
        """Return whether some cell is refused by `rule` and by nothing else."""
        rest, own = self.without(rule)
        for clause in own:
            # a clause is broken where every one of its axes has a value outside its mask
            masks: dict[int, int] = {}
            for axis, mask in clause.literals:
                masks[axis] = masks.get(axis, self.compiled.full[axis]) & ~mask & self.compiled.full[axis]
            if all(masks.values()) and self.any_cell(masks, rest):
                return True
        return False

    def applies(self, rule: Rule) -> bool:
        """Return whether some cell, refused by nothing else, has what `rule` speaks of."""
        rest, _ = self.without(rule)
        number = self.compiled.number
        masks = {number[axis]: self.compiled.mask(number[axis], spec) for axis, spec in rule.when.items()}
        if rule.component is not None and number[rule.component] not in masks:
            masks[number[rule.component]] = self.compiled.real[number[rule.component]]
        return all(masks.values()) and self.any_cell(masks, rest)


def _dead(matrix: Matrix) -> Iterator[MatrixFinding]:
    reach = _Reach(matrix)
    compiled = reach.compiled
    # a host's facts name values that are not listed, so their rules are judged by their specs alone
    hosts = {name for name, axis in matrix.axes.items() if axis.open}
    for rule in matrix.rules:
        if hosts & {axis for _, axis, _ in _demands(rule)}:
            continue
        where = f"rule {rule.id}"
        if not reach.applies(rule):
            level: Level = "warning" if rule.kind == "tested-with" else "note"
            yield MatrixFinding(level=level, where=where, text="no cell that other rules allow has what it speaks of")
        elif rule.kind != "tested-with" and not reach.refuses(rule):
            yield MatrixFinding(
                level="note", where=where, text="refuses nothing that other rules and needs do not refuse too"
            )
    for axis, releases in matrix.releases.items():
        number = compiled.number[axis]
        for release in releases:
            if not reach.any_cell({number: 1 << compiled.position[number][release.version]}):
                text = "is in no cell: rules and needs refuse all"
                yield MatrixFinding(level="note", where=f"{axis} {release.version}", text=text)


def _online(matrix: Matrix, settings: Settings) -> Iterator[MatrixFinding]:
    reach = _Reach(matrix)

    yield from _check_torch(matrix, settings, distributions(settings, "torch"), reach)
    yield from _check_te(matrix, settings, distributions(settings, "transformer-engine"), reach)
    for axis, component in COMPONENTS.items():
        name = component.upstream.distribution
        if name is not None and axis in matrix.axes and axis not in _CHECKED_BY_THEIR_OWN:
            known = [Version(getattr(r.facts, "pypi", None) or r.version) for r in matrix.releases[axis]]
            listed = distributions(settings, name, prereleases=any(version.is_prerelease for version in known))
            yield from _check_listed(matrix, settings, axis, name, listed, reach)
    listed = distributions(settings, "cuda-toolkit")
    for release in matrix.releases.get("nvcc", ()):
        if isinstance(release.facts, NvccFacts) and release.facts.pypi and Version(release.facts.pypi) not in listed:
            text = f"cuda-toolkit {release.facts.pypi} is not on the index"
            yield MatrixFinding(level="error", where=f"nvcc {release.version}", text=text)


def _date(where: str, release: Release, upload: Upload | None) -> Iterator[MatrixFinding]:
    day = upload.day if upload else None
    if day is not None and release.date is not None and day != release.date:
        yield MatrixFinding(
            level="warning", where=where, text=f"is dated {release.date}; its first upload was on {day}"
        )


def _pair(reach: _Reach, *asked: tuple[AxisName, Release]) -> bool:
    """Return whether some cell holds all of `asked`."""
    compiled = reach.compiled
    return reach.any_cell(
        {compiled.number[axis]: 1 << compiled.position[compiled.number[axis]][r.version] for axis, r in asked}
    )


def _pythons(matrix: Matrix, reach: _Reach, axis: AxisName, release: Release) -> set[str]:
    return {p.version for p in matrix.releases["python"] if _pair(reach, (axis, release), ("python", p))}


def _requires_python(matrix: Matrix, reach: _Reach, axis: AxisName, release: Release, stated: str | None) -> list[str]:
    """Return the Python versions that the matrix allows with `release` and its Requires-Python does not."""
    if not stated:
        return []
    python = matrix.axes["python"]
    allowed = _pythons(matrix, reach, axis, release)
    # Requires-Python may name a patch (>=3.8.0); a minor satisfies it when its newest patch does
    return sorted(
        p.version
        for p in matrix.releases["python"]
        if p.version in allowed and not matches(python, stated.replace(" ", ""), _patched(p))
    )


def _patched(python: Release) -> Release:
    return python.model_copy(update={"version": f"{python.version}.99"})


def _check_torch(
    matrix: Matrix, settings: Settings, listed: dict[Version, Distribution], reach: _Reach
) -> Iterator[MatrixFinding]:
    days = uploads(settings, "torch")
    for release in matrix.releases["torch"]:
        facts = release.facts
        if not isinstance(facts, TorchFacts) or facts.index != "pypi":
            continue
        where = f"torch {release.version}"
        public = Version(Version(release.version).public)
        found = listed.get(public)
        if found is None or not found.wheels:
            yield MatrixFinding(level="error", where=where, text="is not on the index")
            continue
        yield from _date(where, release, days.get(public))
        missing = _pythons(matrix, reach, "torch", release) - python_tags(found)
        if missing:
            yield MatrixFinding(
                level="error", where=where, text=f"has no wheel for Python {', '.join(sorted(missing))}"
            )
        if facts.manylinux and facts.manylinux not in found.wheels[0].filename:
            text = f"says {facts.manylinux}; the wheel is {found.wheels[0].filename}"
            yield MatrixFinding(level="error", where=where, text=text)
        metadata = metadata_of(settings, found.wheels[-1])
        for axis in ("cudnn", "nccl"):
            pinned = metadata.pin(f"nvidia-{axis}-cu")
            if pinned is not None and pinned != release.fixes.get(axis):
                text = f"fixes {axis} {release.fixes.get(axis)}; the wheel's metadata pins {pinned}"
                yield MatrixFinding(level="error", where=where, text=text)
        toolkit = metadata.pin("cuda-toolkit")
        if toolkit is not None and toolkit != facts.toolkit:
            text = f"says toolkit {facts.toolkit}; the wheel's metadata pins {toolkit}"
            yield MatrixFinding(level="error", where=where, text=text)


def _check_te(
    matrix: Matrix, settings: Settings, listed: dict[Version, Distribution], reach: _Reach
) -> Iterator[MatrixFinding]:
    days = uploads(settings, "transformer-engine")
    cores: dict[str, dict[Version, Distribution]] = {}
    for release in matrix.releases["te"]:
        facts = release.facts
        if not isinstance(facts, TeFacts) or facts.pypi is None:
            continue
        where = f"te {release.version}"
        version = Version(facts.pypi)
        if version not in listed:
            yield MatrixFinding(level="error", where=where, text=f"transformer-engine {facts.pypi} is not on the index")
            continue
        # the matrix dates a release by its first upload, not by that of a .post
        yield from _date(where, release, days.get(Version(release.version)) or days.get(version))
        if not listed[version].wheels:
            yield MatrixFinding(
                level="error", where=where, text=f"transformer-engine {facts.pypi} has no wheel on the index"
            )
            continue
        metadata = metadata_of(settings, listed[version].wheels[0])
        refused = _requires_python(matrix, reach, "te", release, metadata.requires_python)
        if refused:
            text = f"its metadata says Python {metadata.requires_python}, and cells with {', '.join(refused)} exist"
            yield MatrixFinding(level="error", where=where, text=text)
        for core in facts.core.values():
            if core not in cores:
                cores[core] = distributions(settings, core)
            if version not in cores[core]:
                yield MatrixFinding(level="error", where=where, text=f"{core} {facts.pypi} is not on the index")


def _check_listed(
    matrix: Matrix, settings: Settings, axis: AxisName, name: str, listed: dict[Version, Distribution], reach: _Reach
) -> Iterator[MatrixFinding]:
    days = uploads(settings, name)
    for release in matrix.releases[axis]:
        text = getattr(release.facts, "pypi", release.version)
        if text is None:
            continue
        where, version = f"{axis} {release.version}", Version(text)
        if version not in listed:
            yield MatrixFinding(level="error", where=where, text=f"{text} is not on the index")
            continue
        yield from _date(where, release, days.get(version))
        if not listed[version].wheels:
            continue  # an sdist's requirements are known only once it is built
        metadata = metadata_of(settings, listed[version].wheels[0])
        refused = _requires_python(matrix, reach, axis, release, metadata.requires_python)
        if refused:
            message = f"its metadata says Python {metadata.requires_python}, and cells with {', '.join(refused)} exist"
            yield MatrixFinding(level="error", where=where, text=message)
        for requirement in metadata.requires:
            if requirement.name == "torch" and requirement.specifier:
                allowed = [
                    torch.version
                    for torch in matrix.releases["torch"]
                    if not matches(matrix.axes["torch"], str(requirement.specifier), torch)
                    and _pair(reach, (axis, release), ("torch", torch))
                ]
                if allowed:
                    message = f"its metadata says torch {requirement.specifier}, and cells with {allowed[-1]} exist"
                    yield MatrixFinding(level="error", where=where, text=message)
            elif requirement.name in _MEGATRON_OWN and requirement.specifier and not _capped(matrix, axis, release):
                message = f"its metadata says {requirement.name} {requirement.specifier}, and no cap says so"
                yield MatrixFinding(level="warning", where=where, text=message)


def _capped(matrix: Matrix, axis: AxisName, release: Release) -> bool:
    return any(
        axis in cap.when and matches(matrix.axes[axis], cap.when[axis], release)
        for cap in matrix.packages.cap
        if cap.distribution == "numpy"
    )
