"""A second reading of the matrix' semantics: try every combination, check each statement one by one.

Slow and plain on purpose, and it shares nothing with the solver but the data model and `matches`.
"""

import datetime as dt
import itertools
from dataclasses import replace

from envbuild.matrix.model import Release
from envbuild.matrix.spec import matches, version_key

LEVELS = {"here": 4, "gpu": 3, "cpu": 2, "built": 1}
"""Within each, a run on a bare host is one rank below one of an image."""
SOFTWARE = ["cuda", "torch", "te", "apex", "flash-attn", "flash-attn-hopper", "megatron", "deepspeed"]


def same_key(version):
    parsed = version_key(version)
    return (parsed.major, parsed.minor) if parsed else version


def named_by(rule):
    """Return every axis that a rule speaks of."""
    spoken = (*rule.when, *rule.needs, *rule.with_, *rule.without, *rule.same, *itertools.chain(*rule.any_of))
    return {*spoken, *filter(None, [rule.component])}


class Naive:
    """Every cell of a matrix, found by trying all combinations."""

    def __init__(self, matrix, host_driver=None):
        if host_driver:
            axis, version = host_driver
            extra = Release(version=version, source="run:test")
            matrix = replace(matrix, releases={**matrix.releases, axis: (*matrix.releases[axis], extra)})
        self.matrix = matrix
        self._releases = {(axis, r.version): r for axis, rs in matrix.releases.items() for r in rs}
        self._matching = {}
        self._scores = {}
        order = [n for n, a in matrix.axes.items() if a.use != "derived"]
        # each rule with the last axis that it speaks of, or None where one of them is derived: then it can be judged
        self._judged = {axis: [] for axis in (*order, None)}
        for rule in matrix.rules:
            if rule.kind in {"requires", "inert"}:
                spoken = named_by(rule)
                self._judged[None if spoken - set(order) else max(spoken, key=order.index)].append(rule)
        self.cells = list(self._search({}, order))
        self._values = {axis: {cell[axis] for cell in self.cells} for axis in matrix.axes}

    # --- what a single statement means ---

    def versions(self, axis, spec):
        key = (axis, spec)
        if key not in self._matching:
            known = list(self.matrix.releases.get(axis, ()))
            # a derived axis may be given values that it does not list
            for releases in self.matrix.releases.values():
                for release in releases:
                    value = release.fixes.get(axis)
                    if value and all(value != r.version for r in known):
                        known.append(Release(version=value, source=release.source))
            self._matching[key] = {r.version for r in known if matches(self.matrix.axes[axis], spec, r)}
        return self._matching[key]

    def fits(self, cell, axis, spec):
        """A constraint on an axis holds where the axis is not in use, or its version matches."""
        return cell[axis] is None or cell[axis] in self.versions(axis, spec)

    def release(self, axis, version):
        return self._releases[axis, version]

    def release_holds(self, cell, release):
        return (
            all(self.fits(cell, axis, spec) for axis, spec in release.needs.items())
            and all(cell[axis] is not None for axis in release.with_)
            and all(cell[axis] is None for axis in release.without)
        )

    def applies(self, cell, rule):
        if rule.component and cell[rule.component] is None:
            return False
        if rule.kind == "note" and any(cell[axis] is not None for axis in rule.without):
            return False
        return all(
            cell[axis] is not None and cell[axis] in self.versions(axis, spec) for axis, spec in rule.when.items()
        )

    def counts(self, cell, rule):
        """A tested-with rule counts for later patches of what it names, too, but where it names a release of Megatron."""
        if "megatron" in rule.when:
            return self.applies(cell, rule)
        return all(self.is_patch(axis, cell[axis], self.versions(axis, spec)) for axis, spec in rule.when.items())

    def is_patch(self, axis, version, tested):
        if version is None or version in tested:
            return version is not None
        if not self.matrix.axes[axis].dated or not (mine := version_key(version)):
            return False
        alike = {r.version for r in self.undated_patches(axis, self.release(axis, version))}
        return any(
            (other := version_key(each)) and each in alike and other.local == mine.local and other < mine
            for each in tested
        )

    def rule_holds(self, cell, rule):
        if rule.kind in {"tested-with", "note"} or not self.applies(cell, rule):
            return True
        if not all(self.fits(cell, axis, spec) for axis, spec in rule.needs.items()):
            return False
        if rule.any_of and not any(
            all(self.fits(cell, axis, spec) for axis, spec in alternative.items()) for alternative in rule.any_of
        ):
            return False
        if any(cell[axis] is None for axis in rule.with_) or any(cell[axis] is not None for axis in rule.without):
            return False
        return len({same_key(cell[axis]) for axis in rule.same if cell[axis] is not None}) <= 1

    # --- all cells ---

    def _search(self, partial, left):
        if left:
            axis, *rest = left
            options = [r.version for r in self.matrix.releases[axis]]
            if self.matrix.axes[axis].use != "always":
                options.append(None)
            for version in options:
                now = {**partial, axis: version}
                if self._may_go_on(now, axis):
                    yield from self._search(now, rest)
            return
        cell = dict(partial)
        chosen = [self.release(axis, v) for axis, v in partial.items() if v is not None]
        for axis, definition in self.matrix.axes.items():
            if definition.use == "derived":
                given = {r.fixes[axis] for r in chosen if axis in r.fixes}
                if len(given) > 1:
                    return
                cell[axis] = given.pop() if given else None
        if all(self.release_holds(cell, r) for r in chosen):
            derived = [
                self.release(axis, cell[axis])
                for axis, definition in self.matrix.axes.items()
                if definition.use == "derived"
                and cell[axis] is not None
                and any(r.version == cell[axis] for r in self.matrix.releases[axis])
            ]
            if all(self.release_holds(cell, r) for r in derived) and all(
                self.rule_holds(cell, rule) for rule in self._judged[None]
            ):
                yield cell

    def _may_go_on(self, partial, axis):
        """Give up early where the choice for `axis` and those before it exclude each other."""
        chosen = {other: self.release(other, version) for other, version in partial.items() if version is not None}
        one = chosen.get(axis)
        needs = [(other, spec) for other, spec in one.needs.items() if other in partial] if one else []
        needs += [(axis, release.needs[axis]) for release in chosen.values() if axis in release.needs]
        return all(self.fits(partial, other, spec) for other, spec in needs) and all(
            self.rule_holds(partial, rule) for rule in self._judged[axis]
        )

    # --- a request ---

    def answers(self, pins, free=(), named=None):
        """Return the cells that satisfy `pins`; the axes of `free` may have any value, and `named` may name releases."""
        pinned = {pin.axis for pin in pins} | set(free)
        axes = self.matrix.axes
        unused = [axis for axis, one in axes.items() if one.use in {"asked", "host"} and axis not in pinned]
        # a pin speaks of one value, so it is read once for each value and not for each cell
        held = [
            (pin.axis, {value for value in self._values[pin.axis] if self.pin_holds({pin.axis: value}, pin)})
            for pin in pins
        ]
        unnamed = self.unnamed(pins if named is None else named)
        return [
            cell
            for cell in self.cells
            if all(cell[axis] in values for axis, values in held)
            and all(cell[axis] is None for axis in unused)
            and all(cell[axis] != version for axis, version in unnamed)
        ]

    def unnamed(self, pins):
        """Return the releases marked `asked` that no pin names: none spells its version or a glob for it."""
        found = []
        for axis, releases in self.matrix.releases.items():
            texts = [pin.spec for pin in pins if pin.axis == axis and pin.spec[0] not in "<>=!~"]
            globs = [t for t in texts if "*" in t and self.matrix.axes[axis].scheme == "name"]
            found += [
                (axis, release.version)
                for release in releases
                if release.asked
                and release.version not in texts
                and not any(release.version in self.versions(axis, t) for t in globs)
            ]
        return found

    def pin_holds(self, cell, pin):
        value = cell[pin.axis]
        if pin.spec == "none":
            return value is None
        if pin.spec in {"auto", "any"}:
            return value is not None
        definition = self.matrix.axes[pin.axis]
        listed = {r.version for r in self.matrix.releases[pin.axis]}
        if definition.open and version_key(pin.spec) and pin.spec in listed and self.is_host(pin):
            return value == pin.spec
        called = {v for v in self.versions(pin.axis, pin.spec) if pin.spec in self.names(pin.axis, v)}
        return value is not None and value in (called or self.versions(pin.axis, pin.spec))

    def names(self, axis, version):
        release = next((r for r in self.matrix.releases.get(axis, ()) if r.version == version), None)
        return {version} if release is None else {version, *release.aliases, getattr(release.facts, "pypi", None)}

    def is_host(self, pin):
        # the release that the request itself added
        return self.release(pin.axis, pin.spec).source == "run:test"

    def rank(self, axis, version):
        """0 is the best release of an axis."""
        definition = self.matrix.axes[axis]
        order = list(self.matrix.releases[axis])
        if definition.dated:
            order = sorted(order, key=lambda r: r.date or dt.date.min)
        elif definition.open:
            order = sorted(order, key=lambda r: version_key(r.version))
        elif definition.scheme == "name":
            order.reverse()
        order.reverse()
        names = [r.version for r in order]
        return len(names) if version is None else names.index(version)

    def score(self, cell, pins, evidence, prefer):
        key = tuple(cell[axis] for axis in self.matrix.axes)
        if key not in self._scores:
            self._scores[key] = self._fixed_score(cell)
        compat, out, pairs, spread, untagged, age, others, preference = self._scores[key]
        if prefer == "newest":
            return (compat, out, age, others, *preference)
        settled = {pin.axis for pin in pins if pin.spec not in {"auto", "any"}}
        whole, in_part = (
            max(
                (
                    2 * LEVELS["here" if self.is_here(cell, ref) else ref.level] - (ref.image is None)
                    for ref in evidence
                    if self.speaks_for(cell, ref, missing)
                ),
                default=0,
            )
            for missing in (set(), settled)
        )
        return (compat, out, -whole, pairs, -in_part, spread, untagged, age, others, *preference)

    def speaks_for(self, cell, ref, may_miss):
        software = [axis for axis in SOFTWARE if axis in self.matrix.axes]
        if not any(axis in ref.versions for axis in SOFTWARE):
            return False
        for axis in software:
            if cell[axis] is None:
                continue
            if axis in ref.versions:
                if ref.versions[axis] != cell[axis]:
                    return False
            elif axis not in may_miss:
                return False
        return True

    def is_here(self, cell, ref):
        """Whether the run was on a GPU, on what the cell is for, with nothing of the cell made otherwise."""
        if ref.level != "gpu" or any(cell.get(axis) is not None for axis in ref.altered):
            return False
        return all((cell[a] or "none") == version for a, version in ref.place.items() if a in self.matrix.axes)

    def needs_compat(self, cell):
        if cell.get("driver") is None or cell.get("cuda") is None:
            return False
        floor = getattr(self.release("cuda", cell["cuda"]).facts, "driver_minor", None)
        return floor is not None and version_key(cell["driver"]) < version_key(floor)

    def patches(self, axis, release):
        return [r for r in self.undated_patches(axis, release) if r.date]

    def undated_patches(self, axis, release):
        """The releases of one minor, a release that is no final one by itself."""

        def key(r):
            version = version_key(r.version)
            if version is None or version.pre or version.dev is not None or version.post is not None:
                return r.version
            return version.release[0], (*version.release, 0)[1]

        return [r for r in self.matrix.releases[axis] if key(r) == key(release)]

    def _fixed_score(self, cell):
        axes = self.matrix.axes
        pairs = set()
        for rule in self.matrix.rules:
            if rule.kind == "tested-with" and self.counts(cell, rule):
                counted = [a for a in rule.when if axes[a].use not in {"derived", "host"}]
                pairs |= {frozenset(pair) for pair in itertools.combinations(counted, 2)}
        with_date = sum(any(axes[a].dated for a in pair) for pair in pairs)
        dated = [self.release(a, cell[a]) for a in axes if axes[a].dated and cell[a] is not None]
        months = [
            max(12 * r.date.year + r.date.month for r in self.patches(axis, release))
            for axis, release in ((a, self.release(a, cell[a])) for a in axes if axes[a].dated and cell[a] is not None)
            if release.date
        ]
        age = 0
        for axis, definition in axes.items():
            listed = [r.date for r in self.matrix.releases[axis] if r.date]
            if definition.dated and listed:
                own = self.release(axis, cell[axis]).date if cell[axis] is not None else None
                age += (max(listed) - (own or min(listed))).days
        order = [a for a in axes if axes[a].dated] + [a for a in axes if not axes[a].dated]
        return (
            self.needs_compat(cell),
            sum(definition.use == "default" and cell[a] is None for a, definition in axes.items()),
            -with_date,
            max(months) - min(months) if months else 0,
            sum(".post" in r.version and len(r.version.rpartition(".post")[2]) == 8 for r in dated),
            age,
            -(len(pairs) - with_date),
            tuple(self.rank(a, cell[a]) for a in order if axes[a].use != "derived"),
        )
