"""What the arguments GOOD and BAD of `envbuild bisect` name: a cell."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.cli.axes import axis_names, keyword, request_from

if TYPE_CHECKING:
    from envbuild.matrix.cell import Cell
    from envbuild.matrix.load import Matrix
    from envbuild.settings import Settings


def cell_of(text: str, name: str, matrix: "Matrix", settings: "Settings") -> "Cell":
    """Return the cell that an argument names, and the flavor with it where that is not the default.

    Raises:
        UsageError: it names none.

    """
    from envbuild.errors import UsageError
    from envbuild.evidence.records import load_evidence
    from envbuild.evidence.refs import evidence_refs
    from envbuild.lock.files import read_lock
    from envbuild.matrix.cell import Cell
    from envbuild.paths import data_dir
    from envbuild.solver.solve import solve
    from envbuild.stacks.load import stack_names
    from envbuild.util.names import shown

    flags: dict[str, Any] | None = None
    # not Path.exists, which raises where the text is longer than a name can be
    is_there = os.path.exists(text)  # noqa: PTH110
    if "=" in text and not is_there:
        flags = _flags(text, name)
    elif text.partition("@")[0] in stack_names() or text.endswith(".toml"):
        flags = {"stack": text}
    if flags is not None:
        solved = solve(matrix, request_from(flags), evidence_refs()).cell
        hosts = {"driver", "board"} | ({"flavor"} if solved.versions.get("flavor") == "runtime" else set())
        kept = {axis: version for axis, version in solved.versions.items() if axis not in hosts}
        return _without_default_arch(Cell(versions=kept, commits=solved.commits))
    if is_there:
        lock = read_lock(Path(text)).lock
        more = {"flavor": lock.flavor} if lock.flavor != "runtime" else {}
        return Cell(versions={**lock.cell, **more}, commits=lock.commits)
    for folder in (settings.cache_dir / "locks", data_dir("matrices") / "locks"):
        for place in sorted(folder.glob("*/lock.json")):
            if place.parent.name.startswith(text) and (found := read_lock(place).lock.as_cell).id == text:
                return found
    for record in load_evidence(data_dir("matrices") / "evidence"):
        if record.cell_id == text:
            return Cell(versions={axis: str(version) for axis, version in record.cell.items() if version is not None})
    raise UsageError(
        f"{shown(text, 80)!r} is no lock, no stack and no id of a cell that has a lock or a record here",
        where=name,
        hint="name its versions: envbuild bisect 'cuda=13.0 te=2.11' 'cuda=13.0 te=2.12' -- TEST",
    )


def _without_default_arch(cell: "Cell") -> "Cell":
    from envbuild.matrix.cell import ARCHITECTURE, X86_64, Cell

    kept = {axis: version for axis, version in cell.versions.items() if (axis, version) != (ARCHITECTURE, X86_64)}
    return Cell(versions=kept, commits=cell.commits)


def _flags(text: str, name: str) -> dict[str, Any]:
    """Read `cuda=13.0 te=2.12`.

    Raises:
        UsageError: a word of it is no axis with a version.

    """
    from envbuild.errors import UsageError
    from envbuild.util.names import shown

    found: dict[str, Any] = {}
    for word in text.split():
        axis, equals, value = word.partition("=")
        if not equals or not value or (axis != "stack" and axis not in axis_names()):
            raise UsageError(
                f"{shown(word, 80)!r} is no axis with a version", where=name, hint="write one such as te=2.12"
            )
        if (key := "stack" if axis == "stack" else keyword(axis)) in found:
            raise UsageError(f"{axis} is named twice", where=name, hint=f"leave one of {axis}=… out")
        found[key] = value
    return found
