"""What a constraint matches on a whole axis at once: the answers of `spec.matches`, by bisection instead of one by one.

A matrix states many constraints on axes of many releases; testing each pair would grow with their product.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from envbuild.matrix.fleet import Fleet
from envbuild.matrix.model import Axis, Release, Spec
from envbuild.matrix.spec import is_commit, matches, names_of, public_version, specifiers

if TYPE_CHECKING:
    from packaging.specifiers import Specifier, SpecifierSet
    from packaging.version import Version


class AxisMasks:
    """The releases of one axis, indexed for constraints; a mask has the bits of their places in `values`."""

    def __init__(
        self,
        axis: Axis,
        values: Sequence[Release | None],
        known: tuple[dict[str, int], dict[str, int]] | None = None,
    ) -> None:
        self._axis = axis
        self._values = values
        self._all = (1 << len(values)) - 2
        self._named: dict[str, int] = {}
        self._kept: dict[str, int] = {}
        self._versions: list[Version] = []
        self._upto: list[int] = []
        places = {release.version: place for place, release in enumerate(values) if release is not None}
        # the bit of a fleet -> those of its GPUs
        self._fleets = {
            1 << place: sum(1 << places[member.version] for member in release.facts.members)
            for place, release in enumerate(values)
            if release is not None and isinstance(release.facts, Fleet)
        }
        if known is None:
            self._index()
        else:  # the index is made for the first text that is not among them
            self._named, self._kept = known

    @property
    def known(self) -> tuple[dict[str, int], dict[str, int]]:
        """The masks of names, and those of the texts that were asked for."""
        return self._named, self._kept

    def _index(self) -> None:
        axis, values, self._named = self._axis, self._values, {}
        by_version: dict[Version, int] = {}
        for place, release in enumerate(values):
            if release is None:
                continue
            bit = 1 << place
            for name in names_of(release):
                self._named[name] = self._named.get(name, 0) | bit
            version = public_version(release.version) if axis.scheme == "pep440" else None
            if version is not None:
                by_version[version] = by_version.get(version, 0) | bit
        self._versions = sorted(by_version)
        # what the first n versions cover together
        self._upto = [0]
        for version in self._versions:
            self._upto.append(self._upto[-1] | by_version[version])

    def mask(self, spec: Spec) -> int:
        """Return the releases that `spec` matches; a fleet where it matches each of its GPUs."""
        found = self._plain(spec)
        return self._with_fleets(found, spec, every=True) if self._fleets else found

    def touched(self, spec: Spec) -> int:
        """Return the releases that `spec` matches; a fleet where it matches one of its GPUs or more."""
        found = self._plain(spec)
        return self._with_fleets(found, spec, every=False) if self._fleets else found

    def _plain(self, spec: Spec) -> int:
        return self._text(spec) if isinstance(spec, str) else union_of(map(self._text, spec))

    def _with_fleets(self, found: int, spec: Spec, *, every: bool) -> int:
        for own, members in self._fleets.items():
            named = any(
                text == "any" or self._named.get(text, 0) & own for text in ((spec,) if isinstance(spec, str) else spec)
            )
            matched = found & members
            found = found | own if named or (matched == members if every else matched) else found & ~own
        return found

    def named(self, text: str) -> int:
        """Return the releases that are called `text`, by version, alias or their version on PyPI."""
        return self._named.get(text, 0)

    def _text(self, text: str) -> int:
        found = self._kept.get(text)
        if found is None:
            found = self._kept[text] = self._matching(text)
        return found

    def _matching(self, text: str) -> int:
        if text == "any":
            return self._all
        if self._axis.scheme == "name" or is_commit(text):
            if self._axis.scheme == "name" and not is_commit(text) and not set(text) & set("*?[!"):
                return self._named.get(text, 0)
            return union_of(
                1 << i for i, r in enumerate(self._values) if r is not None and matches(self._axis, text, r)
            )
        found = self._named.get(text, 0)
        if "+" in text:
            return found
        from packaging.specifiers import InvalidSpecifier

        if not self._upto:
            self._index()
        try:
            for part in text.split("||"):
                found |= self._set(specifiers(part.strip()))
        except InvalidSpecifier:
            return self._named.get(text, 0)
        return found

    def _set(self, wanted: "SpecifierSet") -> int:
        found = self._upto[-1]
        for one in wanted:
            found &= self._one(one)
        return found

    def _between(self, low: int, high: int) -> int:
        return self._upto[max(low, high)] & ~self._upto[low]

    def _one(self, wanted: "Specifier") -> int:
        from packaging.version import Version

        versions = self._versions
        sign, text = str(wanted.operator), str(wanted.version)
        if sign in {"==", "!="} and text.endswith(".*"):
            found = self._prefix(Version(text[:-2]), wanted)
            return found if sign == "==" else self._upto[-1] & ~found
        if sign == "===":
            return self._tried(wanted, range(len(versions)))
        version = Version(text)
        left, right = bisect_left(versions, version), bisect_right(versions, version)
        match sign:
            case "==":
                return self._between(left, right)
            case "!=":
                return self._upto[-1] & ~self._between(left, right)
            case ">=":
                return self._between(left, len(versions))
            case "<=":
                return self._between(0, right)
            case "~=":
                upper = Version(f"{version.epoch}!{_bumped(version.release[:-1])}.dev0")
                return self._between(left, bisect_left(versions, upper))
        # < and > leave out pre- and post-releases of the very version they name: those are asked one by one
        first = bisect_left(versions, Version(f"{version.epoch}!{_dotted(version.release)}.dev0"))
        end = bisect_left(versions, Version(f"{version.epoch}!{_dotted((*version.release, 0))}.1.dev0"))
        near = self._tried(wanted, range(first, max(first, end)))
        outside = self._between(0, first) if sign == "<" else self._between(max(first, end), len(versions))
        return near | outside

    def _prefix(self, prefix: "Version", wanted: "Specifier") -> int:
        from packaging.specifiers import Specifier
        from packaging.version import Version

        if prefix.is_prerelease or prefix.is_postrelease:
            equal = Specifier(f"=={wanted.version}", prereleases=True)
            return self._tried(equal, range(len(self._versions)))
        low = Version(f"{prefix.epoch}!{_dotted(prefix.release)}.dev0")
        high = Version(f"{prefix.epoch}!{_bumped(prefix.release)}.dev0")
        return self._between(bisect_left(self._versions, low), bisect_left(self._versions, high))

    def _tried(self, wanted: "Specifier", places: range) -> int:
        found = 0
        for place in places:
            if wanted.contains(self._versions[place], prereleases=True):
                found |= self._between(place, place + 1)
        return found


def union_of(masks: Iterable[int]) -> int:
    """Return the union of sets, each a mask of bits."""
    found = 0
    for mask in masks:
        found |= mask
    return found


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _bumped(release: tuple[int, ...]) -> str:
    return _dotted((*release[:-1], release[-1] + 1))
