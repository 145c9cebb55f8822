"""Checks of the matrix against the index: uploads, wheels, and what package metadata says."""

from collections.abc import Iterator

from packaging.version import Version

from envbuild.components import COMPONENTS
from envbuild.components.te import TeFacts
from envbuild.components.te import component as te
from envbuild.components.torch import TorchFacts
from envbuild.components.torch import component as torch
from envbuild.curate.findings import MatrixFinding
from envbuild.curate.reach import Reach
from envbuild.curate.wheels import Distribution, Upload, distributions, metadata_of, python_tags, uploads
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, NvccFacts, Release
from envbuild.matrix.spec import matches
from envbuild.settings import Settings

_CHECKED_BY_THEIR_OWN = frozenset({te.axis, torch.axis})
"""Axes with several distributions, which have their own check."""
_MEGATRON_OWN = ("torch", "numpy")


def check_index(matrix: Matrix, settings: Settings) -> Iterator[MatrixFinding]:
    """Yield what the packages of the index of `settings` say against `matrix`.

    Raises:
        HostError: the index cannot be reached.

    """
    reach = Reach(matrix)

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


def _pair(reach: Reach, *asked: tuple[AxisName, Release]) -> bool:
    """Return whether some cell holds all of `asked`."""
    compiled = reach.compiled
    return reach.any_cell(
        {compiled.number[axis]: 1 << compiled.position[compiled.number[axis]][r.version] for axis, r in asked}
    )


def _pythons(matrix: Matrix, reach: Reach, axis: AxisName, release: Release) -> set[str]:
    return {p.version for p in matrix.releases["python"] if _pair(reach, (axis, release), ("python", p))}


def _requires_python(matrix: Matrix, reach: Reach, axis: AxisName, release: Release, stated: str | None) -> list[str]:
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
    matrix: Matrix, settings: Settings, listed: dict[Version, Distribution], reach: Reach
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
    matrix: Matrix, settings: Settings, listed: dict[Version, Distribution], reach: Reach
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
    matrix: Matrix, settings: Settings, axis: AxisName, name: str, listed: dict[Version, Distribution], reach: Reach
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
