"""What a release consists of, as far as an index or a folder has it: wheels, sdists, a source tree."""

import email.parser
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from envbuild.components import AXIS_OF_DISTRIBUTION, COMPONENTS
from envbuild.components.base import Component
from envbuild.curate.trials.files import Files
from envbuild.curate.wheels import metadata_of, parse_metadata
from envbuild.errors import EnvbuildError
from envbuild.lock.index import IndexFile
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, Release
from envbuild.matrix.spec import public_version
from envbuild.matrix.view import CellView
from envbuild.solver.solve import solve
from envbuild.util.bounded import read_text

TORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One release of one axis."""

    axis: AxisName
    version: str
    """As the matrix spells it, without a variant."""
    wheels: tuple[IndexFile, ...] = ()
    sdists: tuple[IndexFile, ...] = ()
    tree: Path | None = None
    commit: str | None = None
    """Of which `tree` is a copy; None where it is a folder of somebody's own."""
    requirements: tuple[str, ...] = ()
    """What installs it: its wheels by version, and what its sdists ask for."""
    asks: tuple[str, ...] = ()
    """What its wheels and sdists require, except itself."""
    entry: str | None = None
    """The module that a program imports."""

    @cached_property
    def identity(self) -> tuple[str, ...]:
        """Names and hashes of its files."""
        files = (f"{file.filename} {file.sha256}" for file in (*self.wheels, *self.sdists))
        if self.tree is None:
            return tuple(files)
        return (*files, f"commit {self.commit}" if self.commit else hash_of_tree(self.tree))


def hash_of_tree(folder: Path) -> str:
    """Return the sha256 over the paths and contents of the regular files below `folder`, those of .git aside."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_file() and not path.is_symlink() and relative.parts[0] != ".git":
            with path.open("rb") as file:
                digest.update(f"{relative}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def plain(version: str) -> str:
    """Return a release's version without its variant; one that PEP 440 does not know as it is."""
    return version.partition("+")[0] if public_version(version) is not None else version


def on_index(release: Release) -> str:
    """Return the version under which the index has `release`."""
    stated = getattr(release.facts, "pypi", None)
    return stated if isinstance(stated, str) else plain(release.version)


def cuda_major(files: Files, torch: str) -> str:
    """Return the CUDA major, such as `12`, that the index's torch of this version is built for.

    Raises:
        EnvbuildError: the index has no such torch.

    """
    wheel = files.wheel(TORCH, torch)
    if wheel is None:
        return ""
    names = " ".join(requires_of(files, wheel))
    match = re.search(r"nvidia-[a-z-]+-cu(\d\d)\b|cuda-toolkit\[[^]]*\]==(\d\d)\.", names)
    return (match[1] or match[2]) if match else ""


def requires_of(files: Files, wheel: IndexFile) -> list[str]:
    """Return what the METADATA of `wheel` asks for, extras aside."""
    found: list[str] = files.note(
        wheel, "requires", lambda: [str(r) for r in metadata_of(files.settings, wheel).requires]
    )
    return found


def find(
    files: Files,
    matrix: Matrix,
    axis: AxisName,
    version: str,
    *,
    cuda: str,
    trees: Mapping[AxisName, Path],
    clones: Mapping[AxisName, Path],
    submodules: Mapping[str, Path],
) -> Subject | None:
    """Return the release, or None where neither the index, `trees` nor `clones` has it.

    Args:
        files: the index.
        matrix: states the release.
        axis: its axis.
        version: its version, without a variant.
        cuda: CUDA major for which a distribution per CUDA version is taken; empty for all of them.
        trees: source trees by axis, taken as they are.
        clones: git repositories by axis, from which the release's commit is taken.
        submodules: git repositories of submodules, by the last part of their paths.

    Raises:
        HostError: the index cannot be reached.
        LockError: a file of it cannot be read.

    """
    component = COMPONENTS[axis]
    release = next(r for r in matrix.releases[axis] if plain(r.version) == version)
    if axis in trees or (axis in clones and release.commit):
        module, below = _entry(matrix, axis, release)
        commit = None if axis in trees else release.commit
        tree = files.checkout(clones[axis], commit, submodules) if commit else trees[axis]
        known_by = " with ".join((commit, *sorted(submodules))) if commit else None
        return Subject(axis=axis, version=version, tree=tree / below, commit=known_by, entry=module)
    listed = on_index(release)
    wheels, sdists, requirements, asks = [], [], [], []
    for name in (*component.distributions, *_variants(files, component, listed, cuda)):
        wheel = files.wheel(name, listed)
        if wheel is not None:
            wheels.append(wheel)
            requirements.append(f"{name}=={listed}")
            asks += _of_others(requires_of(files, wheel))
        elif sdist := files.sdist(name, listed):
            sdists.append(sdist)
            requirements += _asked(files, sdist)
            asks += _asked(files, sdist)
    if not wheels and not sdists:
        return None
    return Subject(
        axis=axis,
        version=version,
        wheels=tuple(wheels),
        sdists=tuple(sdists),
        requirements=tuple(dict.fromkeys(requirements)),
        asks=tuple(dict.fromkeys(asks)),
        entry=_entry(matrix, axis, release)[0],
    )


def _variants(files: Files, component: Component, version: str, cuda: str) -> list[str]:
    found = []
    for stem in component.variants:
        majors = (cuda,) if cuda else ("11", "12", "13", "14")
        names = [f"{stem}{major}" for major in majors if files.of_version(f"{stem}{major}", version)]
        if cuda and not names:  # its other build shows the same Python
            names = [f"{stem}{m}" for m in ("12", "13") if files.of_version(f"{stem}{m}", version)][:1]
        found += names
    return found


def fits_cuda(subject: Subject, cuda: str) -> bool:
    """Return whether the wheels of `subject` are for the CUDA major `cuda`, where their names say one."""
    stated = {m[1] for wheel in subject.wheels if (m := re.search(r"_cu(\d\d)-", wheel.filename))}
    return not stated or cuda in stated


def _asked(files: Files, sdist: IndexFile) -> list[str]:
    """Return what an sdist asks for, without what is a component itself: those come as the matrix says."""
    source = files.source(sdist)
    lines: list[str] = []
    try:
        metadata = parse_metadata(read_text(source / "PKG-INFO"))
        lines = [str(requirement) for requirement in metadata.requires]
        stated = email.parser.HeaderParser().parsestr(read_text(source / "PKG-INFO")).get_all("Requires-Dist")
        if stated is None:
            found = sorted(source.glob("*.egg-info/requires.txt"))
            lines = read_text(found[0]).partition("[")[0].split("\n") if found else []
    except OSError:
        return []
    return _of_others(filter(None, map(str.strip, lines)))


def _of_others(lines: Iterable[str]) -> list[str]:
    """Return the requirements that are no component, but for torch."""
    kept = []
    for line in lines:
        try:
            name = canonicalize_name(Requirement(line).name)
        except InvalidRequirement:
            continue
        variant = any(name.startswith(stem) for each in COMPONENTS.values() for stem in each.variants)
        if not variant and (name not in AXIS_OF_DISTRIBUTION or name == TORCH):
            kept.append(line)
    return kept


def _entry(matrix: Matrix, axis: AxisName, release: Release) -> tuple[str | None, str]:
    """Return the module that the matrix' own checks import, and the folder of setup.py, asked of any cell with the release."""
    try:
        pin = Pin(axis=axis, spec=release.version, origin="a trial")
        view = CellView(matrix=matrix, cell=solve(matrix, Request(pins=(pin,))).cell)
        component = COMPONENTS[axis]
        module = component.module(view)
        wheel = component.wheel(view) if component.needs_commit or not module else None
    except EnvbuildError:
        return None, "."
    return module or (wheel.module if wheel else None), wheel.folder if wheel else "."


def newest_patches(files: Files, matrix: Matrix, axis: AxisName) -> tuple[str, ...]:
    """Return the last patch of each minor release of `axis` that the matrix lists and the index has, oldest first."""
    found: dict[tuple[int, ...], Version] = {}
    there = files.versions(COMPONENTS[axis].distributions[0])
    for release in matrix.releases[axis]:
        version = public_version(release.version)
        if version is not None and not version.is_prerelease and version in there:
            minor = version.release[:2]
            found[minor] = max(version, found.get(minor, version))
    return tuple(str(version) for _, version in sorted(found.items()))
