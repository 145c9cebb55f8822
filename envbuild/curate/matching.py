"""The cells whose ids match patterns: the best cell of every combination of cuda, torch and te that fits together."""

import fnmatch
import shlex
from collections.abc import Iterator, Mapping, Sequence

from envbuild.curate.coverage import AXES, Verification, newest_first
from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.proof import EvidenceRef
from envbuild.solver.solve import solve
from envbuild.util.frozen import replace
from envbuild.util.names import shown
from envbuild.util.text import count_of

_SOME = 5


def cells_matching(
    matrix: Matrix,
    within: Request,
    patterns: Sequence[str],
    *,
    skip: Sequence[str] = (),
    stack: str | None = None,
    evidence: Sequence[EvidenceRef] = (),
) -> tuple[list[tuple[Verification, dict[AxisName, str]]], list[Verification]]:
    """Return the cells whose ids match a pattern, the newest first, with the versions that name each; and those skipped.

    Args:
        matrix: where to look.
        within: what every cell must satisfy, the pins of a stack included.
        patterns: patterns of the shell's kind over whole ids, such as `cu13*-te2.1[0-2]*`.
        skip: the same, of cells to leave out.
        stack: the stack whose pins are in `within`.
        evidence: what the solver ranks by.

    Raises:
        UsageError: a pattern is empty, or matches no cell; or a pin names an unknown axis or matches no release.
        NoCellError: no cell satisfies `within`, or every one that matches is skipped.

    """
    for pattern in (*patterns, *skip):
        if not pattern.strip():
            raise UsageError("a pattern is empty", where="--matrix", hint="write one such as 'cu13*-te2.1[0-2]*'")
    found: dict[str, tuple[Verification, dict[AxisName, str]]] = {}
    for versions in sorted(_combinations(matrix, within), key=newest_first):
        pins = tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in versions.items())
        try:
            cell = solve(matrix, replace(within, pins=(*within.pins, *pins)), evidence).cell
        except NoCellError:
            continue
        stated = (*pins, *(pin for pin in within.pins if pin.axis not in versions and pin.origin.startswith("--")))
        words = ["--stack", stack] if stack else []
        words += [word for pin in stated for word in (f"--{pin.axis}", pin.spec)]
        words += ["--prefer", within.prefer] if within.prefer != "proven" else []
        verification = Verification(cell=cell, args=shlex.join(words), stack=stack, why="")
        found.setdefault(cell.id, (verification, versions))
    if not found:
        raise NoCellError("no cell fits the other flags", hint="`envbuild explain` with them says why")
    for flag, each in (("--matrix", patterns), ("--skip", skip)):
        for pattern in each:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in found):
                some = ", ".join(list(found)[:_SOME])
                raise UsageError(
                    f"no cell matches {shown(pattern, 80)!r}",
                    where=flag,
                    hint=f"{count_of(len(found), 'cell fits', 'cells fit')} the other flags, such as {some}",
                )
    taken = {name: each for name, each in found.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
    skipped = [name for name in taken if any(fnmatch.fnmatchcase(name, p) for p in skip)]
    left = [each for name, each in taken.items() if name not in skipped]
    if not left:
        raise NoCellError("--skip leaves out every cell that --matrix names", where=", ".join(skip))
    return left, [taken[name][0] for name in skipped]


def _combinations(matrix: Matrix, within: Request) -> Iterator[dict[AxisName, str]]:
    """Yield the versions of cuda, torch and te that fit together; without te where none goes with cuda and torch."""
    with_te: set[tuple[str, ...]] = set()
    for versions in enumerate_cells(matrix, AXES, within.pins, repository=within.repository):
        with_te.add(tuple(versions[axis] for axis in AXES[:2]))
        yield dict(_in_order(versions))
    for versions in enumerate_cells(matrix, AXES[:2], within.pins, repository=within.repository):
        if tuple(versions[axis] for axis in AXES[:2]) not in with_te:
            yield dict(_in_order(versions))


def _in_order(versions: Mapping[AxisName, str]) -> Iterator[tuple[AxisName, str]]:
    for axis in AXES:
        if axis in versions:
            yield axis, versions[axis]
