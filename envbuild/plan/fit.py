"""Whether a lock holds what its cell is made of: it may come from somebody else, or from another envbuild."""

from envbuild.errors import LockError
from envbuild.lock.inputs import Inputs
from envbuild.lock.model import COMPAT, FileSource, GitSource, Lock
from envbuild.matrix.load import Matrix


def _unfit(lock: Lock, what: str) -> LockError:
    return LockError(
        f"the lock does not fit its cell: {what}",
        where=f"lock {lock.digest[:19]}",
        hint="build with the envbuild that made the lock, or lock again: envbuild lock with the same flags",
    )


def require_known(matrix: Matrix, lock: Lock) -> None:
    """Raise LockError where the cell has a release that the matrix does not list."""
    for axis, version in lock.cell.items():
        if axis not in matrix.axes:
            raise _unfit(lock, f"the matrix has no axis {axis}")
        if not matrix.has(axis, version) and not matrix.axes[axis].open:
            raise _unfit(lock, f"the matrix lists no {axis} {version}")
        known = matrix.release(axis, version).commit if matrix.has(axis, version) else None
        if known and lock.commits.get(axis, known) != known:
            raise _unfit(lock, f"{axis} {version} is the commit {known}, the lock has {lock.commits[axis]}")


def require_inputs(lock: Lock, inputs: Inputs) -> None:
    """Raise LockError where the lock has not what the build of its cell takes."""
    compiled = tuple(c.axis for c in inputs.components)
    if lock.components != compiled:
        raise _unfit(
            lock, f"it compiles {', '.join(lock.components) or 'nothing'}, the cell {', '.join(compiled) or 'nothing'}"
        )
    if {i.stage for i in lock.images} != {i.stage for i in inputs.images}:
        raise _unfit(lock, "it starts from other base images")
    if (lock.root.suite if lock.root else None) != inputs.root_suite:
        raise _unfit(lock, f"its root is {lock.root.suite if lock.root else 'none'}, the cell's is {inputs.root_suite}")
    for group in inputs.python:
        if group.requirements and lock.python_set(group.name) is None:
            raise _unfit(lock, f"it has no {group.name} packages")
    for wanted in inputs.trees:
        source = lock.source(wanted.name)
        if not isinstance(source, GitSource) or source.commit != wanted.commit:
            found = source.commit if isinstance(source, GitSource) else "none"
            raise _unfit(lock, f"the source of {wanted.name} is at {wanted.commit}, the lock has {found}")
    for name in (*(s.name for s in inputs.sdists), *(f.name for f in inputs.files)):
        if not isinstance(lock.source(name), FileSource):
            raise _unfit(lock, f"it has no source of {name}")
    if lock.source(COMPAT) is not None and inputs.compat is None:
        raise _unfit(lock, f"it has {COMPAT}, and none is known for CUDA {lock.cell['cuda']}")
