"""Checks of the matrix beyond its loading: dead references, and rules that cannot apply.

Loading refuses what is malformed or has no source. What is found here is well-formed and still wrong, or worth a look.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from envbuild.components import COMPONENTS
from envbuild.components.torch import TorchFacts
from envbuild.curate.findings import Level, MatrixFinding
from envbuild.curate.index_checks import check_index
from envbuild.curate.reach import Reach
from envbuild.evidence.trials import committed_trials, load_trials
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Axis, AxisName, Release, Rule, Source, Spec
from envbuild.matrix.spec import matches, version_key
from envbuild.paths import data_dir
from envbuild.settings import Settings


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
        found += check_index(matrix, settings)
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


def _dead(matrix: Matrix) -> Iterator[MatrixFinding]:
    reach = Reach(matrix)
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
        elif rule.refuses and not reach.refuses(rule):
            yield MatrixFinding(
                level="note", where=where, text="refuses nothing that other rules and needs do not refuse too"
            )
    for axis, releases in matrix.releases.items():
        number = compiled.number[axis]
        for release in releases:
            if not reach.any_cell({number: 1 << compiled.position[number][release.version]}):
                text = "is in no cell: rules and needs refuse all"
                yield MatrixFinding(level="note", where=f"{axis} {release.version}", text=text)
