"""What render, lock and image have in common: flags -> cell -> inputs -> lock."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from envbuild.cli import declared as click
from envbuild.cli.axes import axis_options, request_from
from envbuild.errors import UsageError
from envbuild.util.frozen import Frozen
from envbuild.util.names import Digest, checked, shown

if TYPE_CHECKING:
    from envbuild.lock.inputs import Inputs
    from envbuild.matrix.load import Matrix
    from envbuild.settings import Settings
    from envbuild.solver.solve import Solution
    from envbuild.stacks.model import Stack


class ResolvedRequest(Frozen):
    """A request, resolved: the cell and what it is made of."""

    matrix: "Matrix"
    solution: "Solution"
    inputs: "Inputs"
    stack: "Stack | None"

    @cached_property
    def settings(self) -> "Settings":
        """The settings of this machine, read when they are first asked for: a render without a lock needs none."""
        from envbuild.settings import load_settings

        return load_settings()


def cell_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the axis flags, `--source` and `--lock` to a command; `asked_from` reads them."""
    for option in (
        click.option(
            "--lock",
            "lock_file",
            type=click.Path(exists=True, path_type=Path),
            help="Use this lock (its folder or lock.json).",
        ),
        click.option(
            "--source",
            "sources",
            multiple=True,
            metavar="te=git|te=pypi",
            help="Take Transformer Engine's source from git or from PyPI. [default: te=pypi]",
        ),
        axis_options,
    ):
        command = option(command)
    return command


digest_option = click.option(
    "--digest",
    metavar="sha256:…",
    help="Refuse an image with any other digest.",
)


def parse_digest(text: str | None) -> str | None:
    """Check the value of `--digest`.

    Raises:
        UsageError: it is no digest.

    """
    if text is None:
        return None
    try:
        return checked(Digest, text)
    except ValueError:
        raise UsageError(
            f"{shown(text)!r} is not a digest", where="--digest", hint="write sha256: and its 64 digits in lower case"
        ) from None


def asked_from(flags: dict[str, Any], *, lock_file: Path | None, sources: tuple[str, ...]) -> ResolvedRequest:
    """Resolve the flags to a cell and its inputs.

    Raises:
        UsageError: a flag is wrong.
        NoCellError: no cell satisfies the request.

    """
    from envbuild.evidence.refs import evidence_refs
    from envbuild.lock.inputs import inputs_of
    from envbuild.lock.model import COMPAT
    from envbuild.matrix.load import load_matrix
    from envbuild.solver.solve import solve
    from envbuild.stacks.load import load_stack, stack_of_lock

    matrix = load_matrix()
    pinned = None
    if lock_file is not None:
        from envbuild.lock.files import read_lock

        pinned = read_lock(lock_file).lock
    request = request_from(flags, lock=pinned.pins if pinned else None, repository=bool(pinned and pinned.stack))
    stack: Stack | None = None
    if flags.get("stack") is not None:
        stack = load_stack(flags["stack"])
    elif pinned and pinned.stack:
        stack = stack_of_lock(pinned.stack, None)
    solution = solve(matrix, request, evidence_refs())
    flavor: Any = solution.cell.versions.get("flavor", "runtime")
    te_source = te_source_of(sources) or (pinned.te_source if pinned else None)
    # a lock with cuda-compat is for every host; that one without it is for this driver is checked with the rest
    compat = True if pinned and pinned.source(COMPAT) else None
    inputs = inputs_of(matrix, solution.cell, stack=stack, flavor=flavor, te_source=te_source, compat=compat)
    return ResolvedRequest(matrix=matrix, solution=solution, inputs=inputs, stack=stack)


def te_source_of(sources: tuple[str, ...]) -> Literal["pypi", "git"] | None:
    """Return where `--source` says that Transformer Engine's source comes from, or None where it says nothing.

    Raises:
        UsageError: it names another source.

    """
    chosen: Literal["pypi", "git"] | None = None
    for text in sources:
        if text == "te=git":
            chosen = "git"
        elif text == "te=pypi":
            chosen = "pypi"
        else:
            raise UsageError(
                f"{text!r} is not a source",
                where="--source",
                hint="te=pypi (the default) or te=git; every other component has one source",
            )
    return chosen
