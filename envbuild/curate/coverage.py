"""The cells worth verifying: the documented ones, every stack, and a pairwise cover of cuda, torch and te.

Most failures of such an environment come from two components that do not go together. So instead of every combination,
every pair of minor releases that some cell holds is verified in at least one cell; the pairs decide the order, so that
any first part of the list covers the most it can. `rotation` says which share of it a day verifies.
"""

import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from envbuild.curate.rotation import Share, Verified, ordering
from envbuild.errors import NoCellError
from envbuild.matrix.cell import NONE, Cell, Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.matrix.spec import public_version, version_key
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.proof import EvidenceRef
from envbuild.solver.solve import solve
from envbuild.util.text import count_of

AXES = ("cuda", "torch", "te")
"""The axes whose pairs are covered."""

# What README and Makefile name: the default image, the one without a GPU, and the headline cell of the documentation.
_NAMED: tuple[Mapping[AxisName, str], ...] = (
    {"cuda": "13.0", "te": "2.12"},
    {"cuda": "cpu"},
    {"cuda": "12.6", "te": "2.6", "gpu": "h100", "flash-attn-hopper": "auto"},
)

Pair = tuple[AxisName, str, AxisName, str]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A cell to verify, and the flags that ask for it."""

    cell: Cell
    args: str
    """Flags of `resolve`, `lock` or `image`, safe to paste into a shell."""
    stack: str | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The cells to verify, the most important first, and how many pairs they cover."""

    cells: tuple[Verification, ...]
    pairs: int
    """Pairs of minor releases of cuda, torch and te that some cell holds."""
    covered: int
    """Those of them that `cells` hold."""
    left_out: tuple[tuple[Verification, str], ...] = ()
    """Cells that would be here, and why they need no run."""
    share: int | None = None
    """Pairs that belong to the share; None without one."""
    verified: int = 0
    """Pairs that recorded runs verified."""
    left: int = 0
    """Pairs, of the share where there is one, that `limit` left out."""


def cells_to_verify(
    matrix: Matrix,
    stacks: Mapping[str, Mapping[AxisName, str]],
    within: Request,
    *,
    stack: str | None = None,
    evidence: Sequence[EvidenceRef] = (),
    limit: int | None = None,
    share: Share | None = None,
    seed: int | None = None,
    verified: Verified | None = None,
    needless: Callable[[Verification], str | None] = lambda _: None,
) -> Coverage:
    """Return the cells to verify: named ones, stacks, then the pairwise cover; each cell once.

    Args:
        matrix: where to look.
        stacks: the pins of each stack, by its name.
        within: what every cell must satisfy besides; a stack or a named cell that cannot is left out.
        stack: one of `stacks`, when every cell is to hold it.
        evidence: what the solver ranks by.
        limit: at most so many cells.
        share: only the stacks, named cells and pairs of this share; its seed decides the order.
        seed: decides which of equal cells is taken; the newest without one. The share's counts where there is a share.
        verified: leave out the pairs that these runs verified.
        needless: why a cell needs no run, such as "the registry has its image", or None; asked before a cell counts
            towards `limit`. What it holds counts as covered.

    Raises:
        UsageError: a pin names an unknown axis, or matches no release.

    """
    found: dict[tuple[str | None, str], Verification] = {}  # a stack is no part of a cell's id
    left_out: dict[tuple[str | None, str], tuple[Verification, str]] = {}
    seed = share.seed if share else seed

    def stack_pins(name: str | None) -> tuple[Pin, ...]:
        return tuple(Pin(axis=a, spec=s, origin=f"stack {name}") for a, s in stacks[name].items()) if name else ()

    def add(own: Mapping[AxisName, str], why: str, name: str | None = stack) -> None:
        stated = tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in own.items())
        pins = (*stack_pins(name), *stated, *within.pins)
        request = Request(pins=pins, prefer=within.prefer, repository=name is not None)
        try:
            cell = solve(matrix, request, evidence).cell
        except NoCellError:
            return
        words = ["--stack", name] if name else []
        for pin in (*stated, *(pin for pin in within.pins if pin.axis not in own)):
            words += [f"--{pin.axis}", pin.spec]
        if within.prefer != "proven":
            words += ["--prefer", within.prefer]
        one = Verification(cell=cell, args=shlex.join(words), stack=name, why=why)
        if (name, cell.id) in found or (name, cell.id) in left_out:
            return
        reason = needless(one)
        if reason is None:
            found[name, cell.id] = one
        else:
            left_out[name, cell.id] = one, reason

    for name in [stack] if stack else sorted(stacks):
        if share is None or share.has("stack", name):
            add({}, f"the stack {name}", name)
    for named in _NAMED:
        if share is None or share.has("named", shlex.join(itertools.chain(*named.items()))):
            add(named, "named in the documentation")

    pins = (*stack_pins(stack), *within.pins)
    held = sorted(enumerate_cells(matrix, AXES, pins, repository=stack is not None), key=newest_first)
    if seed is not None:
        held.sort(key=lambda versions: ordering(seed, "cell", *itertools.chain(*sorted(versions.items()))))
    pairs_of = [_pairs(versions) for versions in held]
    every = frozenset[Pair]().union(*pairs_of)
    known = every & _in_cells(verified) if verified else frozenset[Pair]()
    mine = every if share is None else frozenset(pair for pair in every if share.has("pair", *pair))
    seen = [*found.values(), *(one for one, _ in left_out.values())]
    missing = (every - known).difference(*(_pairs(one.cell.versions) for one in seen))
    left = mine & missing
    while left and (limit is None or len(found) < limit):
        # Of equals the one that saves most for the other shares, then the first.
        best = max(range(len(held)), key=lambda i: (len(pairs_of[i] & left), len(pairs_of[i] & missing)))
        covered = pairs_of[best] & left
        add(held[best], f"{count_of(len(covered), 'pair')} that no cell before it holds")
        left -= covered
        missing -= pairs_of[best]
    cells = tuple(found.values())[:limit]
    covered = every.intersection(frozenset[Pair]().union(*(_pairs(v.cell.versions) for v in cells)))
    return Coverage(
        cells=cells,
        pairs=len(every),
        covered=len(covered),
        left_out=tuple(left_out.values()),
        share=len(mine) if share else None,
        verified=len(known),
        left=len(left),
    )


def _in_cells(verified: Verified) -> frozenset[Pair]:
    """Return the pairs that verified cells hold; a record spells an axis that is not used as null."""
    versions = (
        {axis: str(r.cell[axis]) for axis in AXES if r.cell.get(axis) not in {None, NONE}} for r in verified.records
    )
    return frozenset[Pair]().union(*map(_pairs, versions))


def _minor(version: str) -> str:
    parsed = public_version(version)
    return version if parsed is None else f"{parsed.major}.{parsed.minor}"


def _pairs(versions: Mapping[AxisName, str]) -> frozenset[Pair]:
    used = [(axis, _minor(versions[axis])) for axis in AXES if axis in versions]
    return frozenset((*one, *other) for one, other in itertools.combinations(used, 2))


def newest_first(versions: Mapping[AxisName, str]) -> tuple[object, ...]:
    """Return what sorts combinations of versions so that the newest cuda, torch and te come first."""
    key: list[object] = []
    for axis in (axis for axis in AXES if axis in versions):
        parsed = version_key(versions[axis])
        # names (cpu) come after every version
        key.append((0, tuple(-part for part in parsed.release), versions[axis]) if parsed else (1, (), versions[axis]))
    return tuple(key)
