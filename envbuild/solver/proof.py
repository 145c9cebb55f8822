"""What records of runs prove of a cell: the four words, and the step of the order that ranks by them."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from envbuild.components import CHOICES, SOFTWARE
from envbuild.matrix.cell import ARCHITECTURE, NONE, X86_64
from envbuild.matrix.model import AxisName
from envbuild.solver.asked import ReadRequest, is_open_pin
from envbuild.solver.clauses import UNUSED
from envbuild.util.frozen import Frozen, field

if TYPE_CHECKING:
    from envbuild.solver.program import Program


class Proof(StrEnum):
    """The strongest true word on a cell, or on a component of it; the value is the word in JSON, `words` in text."""

    HERE = "run-on-this-gpu"
    """All smoke tests to a training step passed on the cell's GPU architecture (SM), host architecture, Python, MPI and
    OS, with every component compiled as the cell's lock compiles it."""
    ELSEWHERE = "run-elsewhere"
    """The same versions passed on a GPU, but something of the run was another: the SM, the host architecture, Python,
    MPI, the OS, how a component was compiled (switches, a torch of the host), or only a part of the tests ran."""
    TRIED = "tried"
    """Tried without a GPU: the smoke tests passed on a CPU, or a trial of these releases with each other passed."""
    STATED = "stated"
    """Nothing of it ran here: only upstream and the rules of the matrix state it."""

    @property
    def words(self) -> str:
        """The word as people read it."""
        return _WORDS[self]


_WORDS = {
    Proof.HERE: "run on this GPU",
    Proof.ELSEWHERE: "run elsewhere",
    Proof.TRIED: "tried without a GPU",
    Proof.STATED: "stated only",
}

Level = Literal["gpu", "cpu", "built"]
"""How far a run went, and on what: to a training step on a GPU or on a CPU, or less far (`built`)."""

_STEPS = ("run in part", Proof.TRIED.words, Proof.ELSEWHERE.words, Proof.HERE.words)
RANKS = (
    Proof.STATED.words,
    *(f"{step} ({where})" for step in _STEPS for where in ("on a bare host", "in an image")),
)
"""What the order compares, the weakest first, in words; a rank is the index.

Of what gives one word, an image that ran comes before an environment on a host: the product is the image, and a host adds
libraries and settings that no image has.
"""
_STEP_OF_LEVEL: Mapping[Level, int] = {"built": 0, "cpu": 1, "gpu": 2}
_HERE = _STEPS.index(Proof.HERE.words)


class EvidenceRef(Frozen):
    """One recorded proof: how far it went, the versions that it ran, and on what.

    It speaks for a cell when it names every software axis that the cell uses, in the cell's version. Where it has none
    of some that the request settled, it speaks for the rest of the cell: in part. It is "run on this GPU" only for a cell
    with its `place` and without what it `altered`.
    """

    id: str
    level: Level
    versions: Mapping[AxisName, str]
    place: Mapping[AxisName, str] = field(default_factory=dict)
    """The GPU, Python, MPI and so on that it ran on: axis -> version, or `none`."""
    altered: frozenset[AxisName] = frozenset()
    """The software that did not run as the lock makes it: adopted from the host, or compiled with other switches."""
    image: str | None = None
    """Digest of the image that ran; None where an environment on a host did."""

    def rank(self, *, here: bool) -> int:
        """Return what it proves of a cell that it speaks for, as an index of RANKS.

        Args:
            here: whether it ran on what the cell is for, as the cell's lock makes it.

        """
        return 2 * (_HERE if here else _STEP_OF_LEVEL[self.level]) + (2 if self.image else 1)


Masks = tuple[tuple[int, int], ...]


def _masks(asked: ReadRequest, ref: EvidenceRef, *, in_part: bool) -> Masks | None:
    """Return axis -> values for which `ref` speaks for a cell, or None when it speaks for none."""
    compiled = asked.compiled
    if not any(name in ref.versions for name in SOFTWARE):
        return None
    settled = {pin.axis for pin in asked.request.pins if not is_open_pin(pin)} if in_part else ()
    result = []
    for name in SOFTWARE:
        axis = compiled.number.get(name)
        if axis is None or (name in settled and name not in ref.versions):
            continue
        place = compiled.position[axis].get(ref.versions[name]) if name in ref.versions else None
        result.append((axis, UNUSED if place is None else UNUSED | 1 << place))
    return tuple(result)


def _masks_here(asked: ReadRequest, ref: EvidenceRef) -> tuple[Masks, ...]:
    """Return alternatives, each axis -> values: a cell that has all of one has what makes `ref` "run on this GPU" for it.

    A choice counts only where the run had the component that it is for, and for a cell that has it.
    """
    if ref.level != "gpu":
        return ()
    compiled = asked.compiled
    found = [tuple((axis, UNUSED) for name in sorted(ref.altered) if (axis := compiled.number.get(name)) is not None)]
    for name, version in ref.place.items():
        axis = compiled.number.get(name)
        component = CHOICES.get(name)
        if axis is None or (component is not None and component not in ref.versions):
            continue
        value = 0 if version == NONE else compiled.position[axis].get(version)
        # a cell that states no architecture is of x86_64
        unstated = UNUSED if (name, version) == (ARCHITECTURE, X86_64) else 0
        ways = [] if value is None else [(axis, 1 << value | unstated)]
        if component is not None and version != NONE and component in compiled.number:
            ways.append((compiled.number[component], UNUSED))
        found = [(*masks, way) for masks in found for way in ways]
    return tuple(found)


def _all_hold(masks: Masks, values: Sequence[int]) -> bool:
    return all(mask >> values[axis] & 1 for axis, mask in masks)


def rank_of(asked: ReadRequest, ref: EvidenceRef, values: Sequence[int], *, in_part: bool = False) -> int:
    """Return what `ref` proves of the cell of `values` (index per axis), as an index of RANKS; 0 is nothing.

    Args:
        asked: the request.
        ref: a record.
        values: an index per axis.
        in_part: also where it is without software that the request settled.

    """
    masks = _masks(asked, ref, in_part=in_part)
    if masks is None or not _all_hold(masks, values):
        return 0
    return ref.rank(here=any(_all_hold(here, values) for here in _masks_here(asked, ref)))


def ranked(asked: ReadRequest, evidence: Sequence[EvidenceRef], *, in_part: bool = False) -> list[tuple[int, Masks]]:
    """Return each rank that a record gives, with what a cell must have for it; the highest rank first, each once.

    Args:
        asked: the request.
        evidence: the records.
        in_part: also of records without software that the request settled.

    """
    found: set[tuple[int, Masks]] = set()
    for ref in evidence:
        masks = _masks(asked, ref, in_part=in_part)
        if masks is None:
            continue
        found.add((ref.rank(here=False), masks))
        found.update((ref.rank(here=True), masks + here) for here in _masks_here(asked, ref))
    return sorted(found, key=lambda one: (-one[0], one[1]))


def add_evidence(program: "Program", found: Sequence[tuple[int, Masks]], priority: int) -> None:
    """Add to `program` that a cell of a higher rank comes first, as minimisation of `priority`.

    Args:
        program: what clingo gets.
        found: what `ranked` returned.
        priority: of this step of the order.

    """
    wanted: dict[int, list[Masks]] = {}
    for rank, masks in found:
        wanted.setdefault(rank, []).append(masks)
    above: int | None = None
    literals = []
    for rank in range(len(RANKS) - 1, 0, -1):
        shown = []
        always = False
        for masks in wanted.get(rank, ()):
            parts = [program.inside(axis, mask) for axis, mask in masks]
            if any(part is None for part in parts):
                continue
            body = [part for part in parts if part]
            if body:
                shown.append(program.both(body))
            else:
                always = True
        if always:
            break
        if shown or above is not None:
            atom = program.backend.add_atom()
            for cause in [*shown, *([above] if above is not None else [])]:
                program.backend.add_rule([atom], [cause])
            literals.append((-atom, 1))
            above = atom
    program.minimize(priority, literals)
