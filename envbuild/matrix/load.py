"""Reading `matrices/`: one pass, every mistake named with its file and key."""

import contextlib
import json
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from envbuild.errors import DataError
from envbuild.matrix.fleet import GPU, JOIN, fleet_by_version
from envbuild.matrix.headers import data_files, digest_of
from envbuild.matrix.model import FACTS, Axis, AxisFile, AxisName, PackagesFile, Release, Rule, RuleFile
from envbuild.paths import data_dir
from envbuild.util import compiled, keys
from envbuild.util.frozen import Frozen, field, replace
from envbuild.util.model import NoFacts, plain
from envbuild.util.toml import explain_validation, read_toml

RULES_FILE = "rules.toml"
PACKAGES_FILE = "packages.toml"


class Matrix(Frozen, eq=False):
    """Every axis, release and rule, and the digest of the files they came from; equal to itself alone."""

    axes: dict[AxisName, Axis]
    releases: dict[AxisName, tuple[Release, ...]]
    rules: tuple[Rule, ...]
    digest: str
    packages: PackagesFile = field(default_factory=PackagesFile.trusted)
    """Bounds on distributions that are no axis, and names on PyPI that belong to other projects."""

    @cached_property
    def _by_version(self) -> dict[tuple[AxisName, str], Release]:
        return {(axis, r.version): r for axis, releases in self.releases.items() for r in releases}

    def release(self, axis: AxisName, version: str) -> Release:
        """Return the release `version` of `axis`, a fleet of listed GPUs among them; KeyError when there is none."""
        found = self._by_version.get((axis, version)) or self._fleet(axis, version)
        if found is None:
            raise KeyError((axis, version))
        return found

    def has(self, axis: AxisName, version: str) -> bool:
        """Return whether `axis` lists `version`, or each GPU of it where it is a fleet."""
        return (axis, version) in self._by_version or self._fleet(axis, version) is not None

    def lists(self, axis: AxisName, version: str) -> bool:
        """Return whether a data file lists `version` of `axis`."""
        return (axis, version) in self._by_version

    def _fleet(self, axis: AxisName, version: str) -> Release | None:
        if axis != GPU or JOIN not in version:
            return None
        return fleet_by_version(version, lambda name: self._by_version.get((GPU, name)))


def _load_axis(path: Path) -> AxisFile:
    raw = read_toml(path)
    try:
        file = AxisFile.model_validate(raw)
        facts_type = FACTS.get(file.axis.name, NoFacts)
        releases = tuple(
            r.model_copy(update={"facts": facts_type.model_validate(r.facts or {})})
            if r.facts or facts_type is NoFacts
            else r
            for r in file.release
        )
        for release in releases:
            if release.facts is None:  # an axis whose facts have required fields says so here
                facts_type.model_validate({})
        releases = tuple(r if r.facts is not None else r.model_copy(update={"facts": facts_type()}) for r in releases)
    except ValueError as error:
        raise explain_validation(error, path) from error
    return file.model_copy(update={"release": releases})


def _cross_check(files: dict[Path, AxisFile], rules: list[tuple[Path, Rule]], packages: PackagesFile) -> None:
    axes = {file.axis.name: file.axis for file in files.values()}

    def known(names: Any, path: Path, what: str) -> None:
        for name in names:
            if name not in axes:
                raise DataError(
                    f"{what} names the axis {name!r}, which no file defines",
                    where=str(path),
                    hint="axes: " + ", ".join(sorted(axes)),
                )

    for path, file in files.items():
        seen: set[str] = set()
        for release in file.release:
            what = f"release {file.axis.name} {release.version}"
            for name in (release.version, *release.aliases):
                if name in seen:
                    raise DataError(
                        f"{what}: {name!r} is listed twice on this axis", where=str(path), hint="remove one of the two"
                    )
                seen.add(name)
            known([*release.needs, *release.with_, *release.without, *release.fixes], path, what)
            for name in release.fixes:
                if axes[name].use != "derived":
                    raise DataError(
                        f"{what} fixes {name}, which is not a derived axis",
                        where=str(path),
                        hint="state it under needs",
                    )
    for cap in packages.cap:
        known(cap.when, Path(PACKAGES_FILE), f"the cap on {cap.distribution}")
    ids: set[str] = set()
    for path, rule in rules:
        known(
            [*rule.when, *rule.needs, *rule.with_, *rule.without, *rule.same, *(a for alt in rule.any_of for a in alt)],
            path,
            f"rule {rule.id}",
        )
        if rule.id in ids:
            raise DataError(f"two rules are called {rule.id!r}", where=str(path), hint="rename one")
        ids.add(rule.id)


def load_matrix(folder: Path | None = None) -> Matrix:
    """Load every axis file and `rules.toml` of `folder` (the installation's own by default).

    Raises:
        DataError: a file is malformed, has no source, or contradicts another.

    """
    return _load(folder or data_dir("matrices"))


@cache
def _load(folder: Path) -> Matrix:
    """Return the matrix of `folder`: its compiled form where the same files were read before, else checked and compiled."""
    digest = digest_of(folder)
    key = keys.key_of(bytes.fromhex(digest))
    kept = compiled.read("matrix", key)
    if kept is not None:
        with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
            return _with_key(_from_plain(kept, f"sha256:{digest}"), key)
    bodies, digest = data_files(folder)
    key = keys.key_of(bytes.fromhex(digest))
    matrix = _checked(folder, bodies, f"sha256:{digest}")
    compiled.keep("matrix", key, _plain(matrix))
    return _with_key(matrix, key)


def _with_key(matrix: Matrix, key: str) -> Matrix:
    # no field: a copy with other rules is another matrix, and has no kept form
    vars(matrix)["_key"] = key
    return matrix


def kept_key(matrix: Matrix) -> str | None:
    """Return the key of the files that `load_matrix` read this very matrix from; None for one made otherwise."""
    found: str | None = vars(matrix).get("_key")
    return found


def without_wheels(matrix: Matrix) -> Matrix:
    """Return the matrix for a stack, whose repository takes the place of a wheel: no rule of it is about such a wheel."""
    found: Matrix | None = vars(matrix).get("_without_wheels")
    if found is None:
        found = replace(matrix, rules=tuple(rule for rule in matrix.rules if not rule.of_wheel))
        key = kept_key(matrix)
        if key is not None:
            _with_key(found, compiled.hash_of((key.encode(), b"without wheels")))
        vars(found)["_without_wheels"] = found
        vars(matrix)["_without_wheels"] = found
    return found


def _plain(matrix: Matrix) -> list[Any]:
    """Return the axes and packages and an index in one value, then each release and each rule."""
    return [
        {
            "axes": [plain(axis) for axis in matrix.axes.values()],
            "releases": {name: [release.version for release in each] for name, each in matrix.releases.items()},
            "packages": plain(matrix.packages),
        },
        *(plain(release) for each in matrix.releases.values() for release in each),
        *(plain(rule) for rule in matrix.rules),
    ]


def _from_plain(kept: list[bytes], digest: str) -> Matrix:
    head = json.loads(kept[0])
    lines = iter(kept[1:])
    by_version: dict[tuple[AxisName, str], Release] = {}
    releases = {}
    for name, versions in head["releases"].items():
        facts = FACTS.get(name, NoFacts)
        found = []
        for version in versions:
            by_version[name, version] = release = Release.from_plain(next(lines), facts=facts)
            found.append(release)
        releases[name] = tuple(found)
    matrix = Matrix(
        axes={axis["name"]: Axis.from_plain(axis) for axis in head["axes"]},
        releases=releases,
        rules=tuple(map(Rule.from_plain, lines)),
        digest=digest,
        packages=PackagesFile.from_plain(head["packages"]),
    )
    vars(matrix)["_by_version"] = by_version  # as the property would make it, which reads every release for that
    return matrix


def _checked(folder: Path, paths: Iterable[Path], digest: str) -> Matrix:
    files: dict[Path, AxisFile] = {}
    rules: list[tuple[Path, Rule]] = []
    packages = PackagesFile()
    for path in paths:
        if path.name == RULES_FILE:
            try:
                rules += [(path, rule) for rule in RuleFile.model_validate(read_toml(path)).rule]
            except ValueError as error:
                raise explain_validation(error, path) from error
        elif path.name == PACKAGES_FILE:
            try:
                packages = PackagesFile.model_validate(read_toml(path))
            except ValueError as error:
                raise explain_validation(error, path) from error
        else:
            files[path] = _load_axis(path)
            rules += [(path, rule) for rule in files[path].rule]
    if not files:
        raise DataError(
            "the matrix has no axis files", where=str(folder), hint="reinstall envbuild, or point at a matrices/ folder"
        )
    _cross_check(files, rules, packages)
    return Matrix(
        axes={f.axis.name: f.axis for f in files.values()},
        releases={f.axis.name: f.release for f in files.values()},
        rules=tuple(rule for _, rule in rules),
        digest=digest,
        packages=packages,
    )
