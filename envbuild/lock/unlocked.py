"""A lock of names and versions alone: what `render --unlocked` renders, and where making a lock begins."""

import datetime as dt
from collections.abc import Callable
from typing import Any, TypeVar

from envbuild.lock.inputs import Inputs
from envbuild.lock.model import FileSource, GitSource, Lock, Missing, OsSet, PythonSet, Root
from envbuild.lock.sdists import sdist_url
from envbuild.matrix.cell import X86_64
from envbuild.matrix.load import Matrix
from envbuild.paths import data_dir
from envbuild.stacks.parts import digest_of
from envbuild.util.model import Model
from envbuild.util.toml import read_toml

_Part = TypeVar("_Part", bound=Model)


def _checked(kind: type[_Part], **values: Any) -> _Part:
    return kind(**values)


def _trusted(kind: type[_Part], **values: Any) -> _Part:
    return kind.trusted(**values)


def uv_wheel(arch: str = X86_64, made: Callable[..., FileSource] = _checked) -> FileSource:
    """Return the pinned uv wheel that installs inside the build on `arch`."""
    data = read_toml(data_dir("dockerfiles") / "uv.toml")
    data = data if arch == X86_64 else data[arch]
    return made(FileSource, name="uv", url=data["url"], sha256=data["sha256"])


def unlocked(matrix: Matrix, inputs: Inputs) -> Lock:
    """Return a lock that names every input and knows no hash but uv's; no network, no clock.

    What comes from the matrix was checked when that was loaded. Where a stack adds its own, all is checked as a lock is.
    """
    made: Callable[..., Any] = _checked if inputs.stack is not None else _trusted
    lock: Lock = made(
        Lock,
        cell=dict(inputs.cell.versions),
        commits=dict(inputs.cell.commits),
        matrix=matrix.digest,
        flavor=inputs.flavor,
        stack=inputs.stack.name if inputs.stack else None,
        stack_digest=digest_of(inputs.stack) if inputs.stack else None,
        te_source=inputs.te_source,
        components=tuple(c.axis for c in inputs.components),
        # The newest release in the cell: a date that follows from the data alone.
        epoch=_newest(matrix, inputs),
        uv=uv_wheel(inputs.cell.arch, made),
        images=inputs.images,
        root=made(Root, suite=inputs.root_suite, epoch=root_epoch(matrix, inputs)) if inputs.root_suite else None,
        os=(
            made(OsSet, name="runtime", wanted=inputs.os_runtime),
            made(OsSet, name="builder", wanted=inputs.os_builder),
        ),
        python=tuple(made(PythonSet, name=g.name, requirements=g.requirements, index=g.index) for g in inputs.python),
        sources=tuple(made(GitSource, name=t.name, url=t.url, commit=t.commit) for t in inputs.trees),
        files=(
            *(made(FileSource, name=s.name, url=sdist_url(s)) for s in inputs.sdists),
            *inputs.files,
            *_compat(matrix, inputs),
        ),
        missing=(made(Missing, what="everything but names and versions", host="-", why="rendered without a lock"),),
    )
    return lock


def _compat(matrix: Matrix, inputs: Inputs) -> tuple[FileSource, ...]:
    if inputs.compat is None:
        return ()
    from envbuild.lock.compat import likely_file

    return (likely_file(matrix, inputs.compat, inputs.cell.arch),)


def root_epoch(matrix: Matrix, inputs: Inputs) -> int:
    """Return the newest second of any file in a bootstrapped root: the release date of its suite."""
    released = matrix.release("os", inputs.cell.versions["os"]).date
    return _midnight(released) if released else 0


def _midnight(day: dt.date) -> int:
    return int(dt.datetime.combine(day, dt.time(), dt.UTC).timestamp())


def _newest(matrix: Matrix, inputs: Inputs) -> int:
    dates = [matrix.release(axis, v).date for axis, v in inputs.cell.versions.items() if matrix.has(axis, v)]
    newest = max((d for d in dates if d), default=dt.date(2020, 1, 1))
    return _midnight(newest)
