"""The best published cell for a request: the solver's own order, among what a catalogue holds."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from envbuild.catalog.model import Entry
from envbuild.matrix.cell import ARCHITECTURE, NONE, X86_64, Cell, Pin, Request
from envbuild.matrix.fleet import gpus_in
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.solver.asked import ReadRequest, read_request
from envbuild.solver.clauses import UNUSED
from envbuild.solver.order import Score, best_values, score_of
from envbuild.solver.proof import RANKS, EvidenceRef

_FLAVOR, _GPU, _DRIVER = "flavor", "gpu", "driver"
_NEWEST = ("compat", "defaults_out", "age", "untested_undated_pairs", "preference")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the machine that will run the image has, where it is known."""

    gpus: frozenset[str] = frozenset()
    """Releases of the gpu axis, such as `sm_90`."""
    driver: str | None = None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked of a published image."""

    request: Request
    stack: str | None = None
    stack_digest: str | None = None
    te_source: str | None = None
    """Where Transformer Engine's source comes from; None for either."""
    machine: Machine = Machine()


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A published image that fits."""

    entry: Entry
    cell: Cell
    score: Score

    @property
    def proof(self) -> str:
        """What this installation's records prove of the cell, in words."""
        return RANKS[-self.score.evidence]


@dataclass(frozen=True, kw_only=True)
class Near:
    """A published image that does not fit, and what keeps it out: axis -> what was asked (nothing: empty), what it has."""

    entry: Entry
    differs: Mapping[AxisName, tuple[str, str]]


def offers(
    matrix: Matrix, wanted: Wanted, entries: Sequence[Entry], evidence: Sequence[EvidenceRef]
) -> tuple[Offer, ...]:
    """Return the published images that fit, the best first.

    An entry fits where the matrix has a cell with its versions that satisfies the request and, for the machine's GPUs and
    driver, every rule. One whose versions this installation's matrix does not have does not fit: its rules are not known
    here. Of two with the same cell the newer one comes first.

    Raises:
        UsageError: a pin names an unknown axis, or matches no release.

    """
    plain, on_gpu = _asked(matrix, wanted)
    of_fleets: dict[str, tuple[ReadRequest, ReadRequest]] = {}
    found = []
    for entry in entries:
        if (entry.stack, entry.stack_digest) != (wanted.stack, wanted.stack_digest):
            continue
        if wanted.te_source not in {None, entry.te_source}:
            continue
        if _is_of_other_gpu(wanted, entry):
            continue
        asked = on_gpu if _GPU in entry.cell else plain
        if len(gpus_in(entry.cell)) > 1 and not _names(wanted, _GPU):
            fleet = entry.cell[_GPU]
            if not matrix.has(_GPU, fleet):
                continue
            if fleet not in of_fleets:
                of_fleets[fleet] = _asked(matrix, wanted, fleet)
            asked = of_fleets[fleet][1]
        domains = _domains(asked, entry)
        values = None if domains is None else best_values(asked, evidence, domains)
        if values is None:
            continue
        cell = asked.compiled.cell(values)
        score = score_of(asked, evidence, values)
        if cell.id != entry.id or (score.compat and not entry.compat):
            continue
        found.append(Offer(entry=entry, cell=cell, score=score))
    newest = wanted.request.prefer == "newest"
    found.sort(key=lambda offer: offer.entry.added, reverse=True)
    found.sort(key=lambda offer: _rank(offer.score, newest=newest))
    return tuple(found)


def _rank(score: Score, *, newest: bool) -> tuple[object, ...]:
    return tuple(getattr(score, name) for name in _NEWEST) if newest else astuple(score)


def _names(wanted: Wanted, axis: str) -> bool:
    return any(pin.axis == axis for pin in wanted.request.pins)


def _is_of_other_gpu(wanted: Wanted, entry: Entry) -> bool:
    """Return whether the machine has other GPUs alone, and the request names none."""
    gpus = gpus_in(entry.cell)
    return (
        bool(gpus) and bool(wanted.machine.gpus) and not _names(wanted, _GPU) and wanted.machine.gpus.isdisjoint(gpus)
    )


def _asked(matrix: Matrix, wanted: Wanted, fleet: str = "") -> tuple[ReadRequest, ReadRequest]:
    """Return the request as it is, and with the machine's driver, which says nothing of an image for the CPU.

    With the release of a `fleet` the axis gpu holds that, too; a request that names no GPU takes it like any other.
    """
    request, driver = wanted.request, wanted.machine.driver
    if fleet:
        pin = Pin(axis=_GPU, spec=fleet, origin="the catalogue")
        request = replace(request, pins=(*request.pins, pin))
    plain = read_request(matrix, request)
    if driver is None or _names(wanted, _DRIVER):
        return plain, plain
    pin = Pin(axis=_DRIVER, spec=driver, origin="this machine's driver")
    return plain, read_request(matrix, replace(request, pins=(*request.pins, pin)))


def _domains(asked: ReadRequest, entry: Entry) -> list[int] | None:
    """Return what the axes may be: the entry's versions, where the request allows them; None where it does not."""
    compiled = asked.compiled
    if any(name not in compiled.number for name in entry.cell):
        return None
    domains = compiled.domains(asked.pinned())
    for i, axis in enumerate(compiled.axes):
        mask = _mask(asked, entry, i)
        if mask is None:
            continue
        if axis.use == "host" and domains[i] == UNUSED and mask & UNUSED:
            continue  # not asked about, and the entry has what is there without being asked for
        # an axis that is taken only when asked for is not asked for
        domains[i] &= mask
        if not domains[i]:
            return None
    return domains


def _mask(asked: ReadRequest, entry: Entry, axis: int) -> int | None:
    """Return which values of an axis are the entry's; None for what is the host's alone."""
    compiled = asked.compiled
    name = compiled.names[axis]
    version: str
    if name == _FLAVOR:
        version, default = entry.flavor, "runtime"
    elif name == ARCHITECTURE:
        version, default = entry.cell.get(name, X86_64), X86_64
    elif compiled.axes[axis].use == "host":
        return None
    else:
        version, default = entry.cell.get(name, NONE), NONE
    mask = UNUSED if version == default else 0
    if version != NONE:
        place = compiled.position[axis].get(version)
        mask |= 0 if place is None else 1 << place
    return mask


def nearest_published(matrix: Matrix, wanted: Wanted, entries: Sequence[Entry], *, count: int = 3) -> tuple[Near, ...]:
    """Return the published images that differ from the request on the fewest axes: those that it names, and what an image has more.

    Of two that differ on as many, the one with the fewer releases between comes first.

    Raises:
        UsageError: as `offers`.

    """
    plain, _ = _asked(matrix, wanted)
    compiled = plain.compiled
    pinned = plain.pinned()
    specs: dict[str, list[str]] = {}
    for pin in wanted.request.pins:
        specs.setdefault(pin.axis, []).append(pin.spec)
    found = []
    for entry in entries:
        away = 0
        differs: dict[AxisName, tuple[str, str]] = {}
        for axis, mask in pinned.items():
            own = _mask(plain, entry, axis)
            name = compiled.names[axis]
            if own is not None and not own & mask:
                has = entry.flavor if name == _FLAVOR else entry.cell.get(name, NONE)
                differs[name] = (" and ".join(specs.get(name, [])), has)
                away += _releases_between(own & ~UNUSED, mask & ~UNUSED, len(compiled.position[axis]))
        for name, version in entry.cell.items():
            place = compiled.number.get(name)
            if place is not None and compiled.axes[place].use == "asked" and place not in pinned:
                differs[name] = ("", version)
        if _is_of_other_gpu(wanted, entry):
            differs[_GPU] = (", ".join(sorted(wanted.machine.gpus)), entry.cell[_GPU])
        if entry.stack != wanted.stack:
            differs["stack"] = (wanted.stack or NONE, entry.stack or NONE)
        found.append((len(differs), away, entry.id, Near(entry=entry, differs=differs)))
    found.sort(key=lambda each: each[:3])
    return tuple(near for *_, near in found[:count])


def _releases_between(one: int, other: int, most: int) -> int:
    """Return how many releases lie between the nearest two of two masks; `most` where one has none."""
    places = [[i for i in range(mask.bit_length()) if mask >> i & 1] for mask in (one, other)]
    return min((abs(a - b) for a in places[0] for b in places[1]), default=most)
