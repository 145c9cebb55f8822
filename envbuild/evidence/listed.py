"""The word of proof for what a table lists: one release, or a combination of versions that cells hold.

A cell has one word (`claims`). A row of a table stands for every cell that has its versions, so it has the strongest word
that a run, or trials of its components with each other, give such a cell.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from envbuild.components import CHOICES, COMPONENTS, SOFTWARE
from envbuild.evidence.claims import tried_word
from envbuild.evidence.place import PLACE, parts, place_of, proof_of
from envbuild.evidence.records import Evidence
from envbuild.evidence.trials import Ledger, Tried, same_release
from envbuild.matrix.cell import ARCHITECTURE, NONE, X86_64
from envbuild.matrix.fleet import GPU, gpus_in
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Axis, AxisName
from envbuild.solver.proof import Proof
from envbuild.util.frozen import Frozen

if TYPE_CHECKING:
    from envbuild.solver.asked import ReadRequest

_STRENGTH = (Proof.STATED, Proof.TRIED, Proof.ELSEWHERE, Proof.HERE)


class Listed(Frozen):
    """What is known of one row of a table."""

    proof: Proof
    gpus: tuple[str, ...] = ()
    """The GPUs of the runs that give the word; nothing where no run on a GPU does."""
    record: str | None = None
    """Id of the newest of these runs."""
    read: tuple[str, ...] = ()
    """What trials that give the word read in the place of a row's version: `torch 2.10.0+cu128`."""

    @property
    def text(self) -> str:
        """The word, and on which GPUs it ran, or what was tried: `run on this GPU (sm_90)`."""
        more = self.gpus or ((f"with {', '.join(self.read)}",) if self.read else ())
        return f"{self.proof.words} ({', '.join(more)})" if more else self.proof.words

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values; the names are those of `resolve --json`."""
        return {
            "claim": self.proof.value,
            "text": self.text,
            "gpus": list(self.gpus),
            "record": self.record,
            "tried_with": list(self.read),
        }


class _Kept:
    """A ledger that is asked the same many times."""

    def __init__(self, trials: Ledger) -> None:
        self._trials = trials
        self._known: dict[tuple[tuple[AxisName, str], ...], Tried | None] = {}

    def of(self, versions: Mapping[AxisName, str]) -> Tried | None:
        key = tuple(sorted(versions.items()))
        if key not in self._known:
            self._known[key] = self._trials.of(versions)
        return self._known[key]


class Listing:
    """The words of rows, looked up in the records and the trials.

    Args:
        matrix: whose axes the rows name.
        records: every record.
        trials: the ledger of trials.
        allowed: what the other axes of a row may be, axis -> versions, `none` for "not in use"; anything by default.

    """

    def __init__(
        self,
        matrix: Matrix,
        records: Iterable[Evidence],
        trials: Ledger,
        allowed: Mapping[AxisName, Collection[str]] | None = None,
    ) -> None:
        self._matrix, self._trials, self._pairs = matrix, trials, _Kept(trials)
        # as for a component of a cell: a run of some tests alone, or below a training step, gives no word
        runs = [r for r in records if r.passed and not parts(r)]
        runs.sort(key=lambda record: record.date)
        self._runs = [(record, place_of(record)) for record in runs]
        self._allowed = dict(allowed or {})
        self._every = (1 << len(self._runs)) - 1
        self._found: dict[tuple[object, ...], Listed] = {}
        self._tried: dict[tuple[tuple[AxisName, str], ...], Listed] = {}
        self._speaking: dict[tuple[AxisName, str], int] = {}

    def of(self, versions: Mapping[AxisName, str]) -> Listed:
        """Return what is known of the cells with these versions, axis -> version."""
        # there may be a million rows, and few differ in what decides
        speaking = self._every
        components = []
        for axis, version in versions.items():
            speaking &= self._naming(axis, version)
            if axis in COMPONENTS and COMPONENTS[axis].ran:  # trials speak of no other
                components.append((axis, version))
        tried = tuple(components)
        if tried not in self._tried:
            self._tried[tried] = self._word_of_trials(dict(tried))
        if not speaking:
            return self._tried[tried]
        key = (speaking, *versions.items())
        if key not in self._found:
            self._found[key] = self._of(versions, speaking, self._tried[tried])
        return self._found[key]

    def _of(self, versions: Mapping[AxisName, str], speaking: int, tried: Listed) -> Listed:
        wanted = {**self._allowed, **{axis: (version,) for axis, version in versions.items()}}
        best = tried
        gpus: set[str] = set()
        for number, (record, place) in enumerate(self._runs):
            if not speaking >> number & 1:
                continue
            word = self._word(record, place, wanted)
            if word is None or _STRENGTH.index(word) < _STRENGTH.index(best.proof) or word is Proof.STATED:
                continue
            if word is not best.proof:
                gpus.clear()
            if place[GPU] != NONE:
                gpus.add(place[GPU])
            best = Listed(proof=word, gpus=tuple(sorted(gpus)), record=record.id)
        return best

    def _naming(self, axis: AxisName, version: str) -> int:
        """Return the runs, as bits, that can speak for a version: of software and what is under it, those that had it."""
        known = self._speaking.get((axis, version))
        if known is None:
            known = self._every
            if axis not in PLACE and is_spoken_of(self._matrix.axes[axis]):
                has = (str(run.cell.get(axis) or NONE) == version for run, _ in self._runs)
                known = sum(1 << n for n, found in enumerate(has) if found)
            self._speaking[axis, version] = known
        return known

    def _word(
        self, record: Evidence, place: Mapping[AxisName, str], wanted: Mapping[AxisName, Collection[str]]
    ) -> Proof | None:
        """Return what a run gives the cells that have what is wanted; None where it speaks for none of them."""
        versions = {axis: version for axis, version in record.cell.items() if version and axis not in place}
        versions |= {axis: version for axis, version in place.items() if version != NONE}
        moved = False
        for axis, among in wanted.items():
            ran = place.get(axis) or str(record.cell.get(axis) or NONE)
            if ran in among:
                continue
            if axis not in place:
                if is_spoken_of(self._matrix.axes[axis]):
                    return None
                continue
            moved = True
            versions[axis] = next(iter(among))
        if moved and not any(axis in SOFTWARE and NONE not in among for axis, among in wanted.items()):
            return None  # that other software ran on another machine says nothing of this one
        fleet = gpus_in(versions)
        words = [proof_of(record, {**versions, GPU: gpu}) for gpu in fleet] or [proof_of(record, versions)]
        return min(words, key=_STRENGTH.index)

    def _word_of_trials(self, components: Mapping[AxisName, str]) -> Listed:
        if len(components) != 1:
            word, read = tried_word(components, self._pairs)
            return Listed(proof=word, read=read if word is Proof.TRIED else ())
        ((axis, version),) = components.items()
        passed = any(
            other not in self._allowed or any(same_release(other, tried, each) for each in self._allowed[other])
            for other, tried in self._trials.passed_with(axis, version)
        )
        return Listed(proof=Proof.TRIED if passed else Proof.STATED)


def allowed_by(asked: "ReadRequest") -> dict[AxisName, tuple[str, ...]]:
    """Return what each axis that a request constrains may be, `none` for "not in use".

    A cell is of x86_64 and without a choice of kernels unless asked.
    """
    compiled = asked.compiled
    found: dict[AxisName, tuple[str, ...]] = {ARCHITECTURE: (X86_64,), **dict.fromkeys(CHOICES, (NONE,))}
    for axis, mask in asked.pinned().items():
        left = (release for value, release in enumerate(compiled.values[axis]) if mask >> value & 1)
        found[compiled.names[axis]] = tuple(NONE if release is None else release.version for release in left)
    return found


def is_spoken_of(axis: Axis) -> bool:
    """Return whether runs speak of an axis: not of the driver, the board and the flavor, which stand next to a cell."""
    return axis.use != "host" or axis.name == ARCHITECTURE
