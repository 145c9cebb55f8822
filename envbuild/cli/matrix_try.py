"""`envbuild matrix try` and `trials`: pairs of releases, tried with each other without a GPU or an image."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.output import emit, json_option, note, progress_options, show_notices, use_cache
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from envbuild.curate.trials.pairs import Pair
    from envbuild.curate.trials.run import Outcome

_KINDS = ("metadata", "names", "libraries", "headers", "sources")


@click.command("try")
@click.argument("axes", nargs=2, metavar="COMPONENT[=SPEC] OTHER[=SPEC]")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    help="Run only trials of this kind; repeat it for more. [default: all but sources]",
)
@click.option("--all", "every", is_flag=True, help="Try pairs that are in no cell, too.")
@click.option("--again", is_flag=True, help="Repeat trials that were made with the same files.")
@click.option("--list", "only_list", is_flag=True, help="List the pairs and their known results; try nothing.")
@click.option(
    "--tree",
    "trees",
    multiple=True,
    metavar="AXIS=PATH",
    help="Use this source tree for a component that is on no index.",
)
@click.option(
    "--clone",
    "clones",
    multiple=True,
    metavar="AXIS=PATH",
    help="A git repository of a component that no index has: each release is tried at its commit.",
)
@click.option(
    "--submodule",
    "submodules",
    multiple=True,
    metavar="NAME=PATH",
    help="A git repository of a submodule of such a component, by the last part of its path: cutlass=/git/cutlass.",
)
@click.option("--cpp-only", is_flag=True, help="With --kind sources: leave out .cu files, which take most of the time.")
@click.option(
    "--nvcc",
    "nvccs",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="An nvcc of this machine for .cu files, where torch is for its CUDA (11 or 12; PyPI has no nvcc of these).",
)
@click.option("--jobs", type=click.IntRange(1, 16), default=2, show_default=True, help="Resolutions at a time.")
@click.option(
    "--records",
    type=click.Path(file_okay=False, path_type=Path),
    help="Use this folder of trials. [default: this installation's]",
)
@json_option
@progress_options
def try_pairs(
    axes: tuple[str, ...],
    kinds: tuple[str, ...],
    every: bool,
    again: bool,
    only_list: bool,
    trees: tuple[str, ...],
    clones: tuple[str, ...],
    submodules: tuple[str, ...],
    cpp_only: bool,
    nvccs: tuple[Path, ...],
    jobs: int,
    records: Path | None,
    as_json: bool,
) -> None:
    """Try pairs of releases with each other, without a GPU or an image, and record the results.

    `envbuild matrix try te torch` tries each Transformer Engine with the last patch of each minor release of torch, and
    `envbuild matrix try all torch` each component:

    \b
    metadata   what both ask for, resolved together by uv for each Python
    names      each name that the component's Python imports is there
    libraries  each library that its binaries need is in the set
    headers    each of torch's headers that the component's C++ includes is in torch's wheel
    sources    each C++ file, type-checked by g++ against the headers of torch's and CUDA's wheels; each .cu file by
               nvcc's front end (CUDA 13, from PyPI; of older CUDA by --nvcc) or by clang

    A stopped run continues where it was. Exits with 0 whatever the results are.
    """  # noqa: D301 - click reads the character
    from envbuild.curate.trials.cuda import own_nvccs
    from envbuild.curate.trials.pairs import every_axes, pairs_of
    from envbuild.curate.trials.run import Runner
    from envbuild.errors import UsageError
    from envbuild.evidence.trials import trials_folder
    from envbuild.matrix.load import load_matrix
    from envbuild.settings import load_settings

    if nvccs and cpp_only:
        raise UsageError(
            "it reads .cu files, and --cpp-only leaves them out", where="--nvcc", hint="leave out one of the two"
        )
    matrix = load_matrix()
    asked = every_axes(matrix, axes)
    runner = Runner(
        matrix,
        show_notices(use_cache(load_settings())),
        records=records or trials_folder(),
        trees=_folders(trees, "--tree"),
        clones=_folders(clones, "--clone"),
        submodules=_folders(submodules, "--submodule"),
        jobs=jobs,
        again=again,
        cpp_only=cpp_only,
        nvccs=own_nvccs(nvccs),
    )
    pairs = [pair for each in asked for pair in pairs_of(runner.files, matrix, each, every=every)]
    if only_list:
        _list(pairs, runner.ledger.of, as_json=as_json)
        return
    chosen: Any = kinds or _KINDS[:4]
    outcome = runner.run(pairs, chosen, note=note)
    emit(_answer(outcome), as_json=as_json, human=lambda: outcome_text(outcome))


@click.command("trials")
@click.option("--held", is_flag=True, help="Count the pairs that are in a cell, and those of them that were tried.")
@click.option(
    "--cu-files", is_flag=True, help="Count the pairs whose sources passed, and those whose .cu files all did."
)
@json_option
def list_trials(held: bool, cu_files: bool, as_json: bool) -> None:
    """Count the recorded trials by pair of axes and kind; of each pair only the last one counts."""
    from envbuild.cli.show import table
    from envbuild.errors import UsageError

    if held and cu_files:
        raise UsageError("it is another table", where="--cu-files", hint="leave out --held")
    if held:
        _list_held(as_json=as_json)
        return
    if cu_files:
        _list_cu_files(as_json=as_json)
        return
    from envbuild.evidence.trials import committed_trials, counted

    found = counted(committed_trials())
    answer = {
        "trials": [
            {"component": c, "other": o, "kind": kind, "pairs": sum(counts.values()), **counts}
            for (c, o, kind), counts in found.items()
        ]
    }

    def human() -> str:
        rows: list[tuple[str, ...]] = [("component", "with", "kind", "pairs", "passed", "failed", "not decided")]
        rows += [(*key, str(sum(counts.values())), *map(str, counts.values())) for key, counts in found.items()]
        return table(rows, indent="")

    emit(answer, as_json=as_json, human=human)


def _list_held(*, as_json: bool) -> None:
    from envbuild.cli.show import table
    from envbuild.curate.trials.pairs import shares
    from envbuild.evidence.trials import History, committed_trials
    from envbuild.matrix.load import load_matrix

    found = list(shares(load_matrix(), History(committed_trials())))
    held, tried = sum(each.held for each in found), sum(each.tried for each in found)
    answer = {
        "held": held,
        "tried": tried,
        "pairs": [{k: getattr(each, k) for k in ("component", "other", "held", "tried", "failed")} for each in found],
    }

    def human() -> str:
        rows: list[tuple[str, ...]] = [("component", "with", "in a cell", "tried", "failed")]
        rows += [(e.component, e.other, str(e.held), str(e.tried), str(e.failed)) for e in found]
        return table(rows, indent="") + f"\n\n{tried} of {count_of(held, 'pair')} in a cell tried"

    emit(answer, as_json=as_json, human=human)


def _list_cu_files(*, as_json: bool) -> None:
    from envbuild.cli.show import table
    from envbuild.evidence.trials import committed_trials, cuda_counted

    found = cuda_counted(committed_trials())
    answer = {"sources": [{"component": c, "other": o, **count._asdict()} for (c, o), count in found.items()]}

    def human() -> str:
        rows: list[tuple[str, ...]] = [("component", "with", "passed", "all .cu files, too", "files")]
        rows += [(*key, *(f"{number:,}" for number in count)) for key, count in found.items()]
        return table(rows, indent="")

    emit(answer, as_json=as_json, human=human)


def _folders(texts: "Sequence[str]", option: str) -> dict[str, Path]:
    from envbuild.components import COMPONENTS
    from envbuild.errors import UsageError

    found = {}
    for text in texts:
        axis, _, path = text.partition("=")
        named = bool(axis) if option == "--submodule" else axis in COMPONENTS
        if not named or not Path(path).is_dir() or not path:
            what, example = ("submodule", "cutlass=/git") if option == "--submodule" else ("component", "apex=/src")
            raise UsageError(
                f"{text!r} names no {what} and folder",
                where=option,
                hint=f"such as {option} {example}/{example.partition('=')[0]}",
            )
        found[axis] = Path(path)
    return found


def _list(pairs: "Sequence[Pair]", known: Any, *, as_json: bool) -> None:
    from envbuild.cli.show import table

    rows: list[tuple[str, ...]] = [("pair", "in a cell", "known")]
    for pair in pairs:
        tried = known(pair.versions)
        rows.append((str(pair), "yes" if pair.pythons else "no", tried.describe() if tried else "not tried"))
    answer = {"pairs": [{"pair": pair.versions, "held": bool(pair.pythons)} for pair in pairs]}
    emit(answer, as_json=as_json, human=lambda: table(rows, indent=""))


def _answer(outcome: "Outcome") -> dict[str, Any]:
    return {
        "pairs": outcome.pairs,
        "held": outcome.held,
        "tried": outcome.complete,
        "nothing_to_try": outcome.unasked,
        "made": outcome.made,
        "kept": outcome.kept,
        "absent": outcome.absent,
        "kinds": {kind: dict(counts) for kind, counts in outcome.verdicts.items()},
        "contradictions": outcome.contradictions,
    }


def outcome_text(outcome: "Outcome") -> str:
    """Return what a run came to, as a table and lines."""
    from envbuild.cli.show import table

    rows: list[tuple[str, ...]] = [("kind", "tried", "passed", "failed", "not decided")]
    rows += [
        (kind, str(counts.total()), *(str(counts[v]) for v in ("passed", "failed", "undecided")))
        for kind, counts in outcome.verdicts.items()
    ]
    parts = [
        table(rows, indent=""),
        (
            f"\n{count_of(outcome.pairs, 'pair')}, {outcome.held} of them in some cell; {outcome.complete} tried, "
            f"{count_of(outcome.made, 'trial')} made now, {outcome.kept} known before"
        ),
    ]
    if outcome.unasked:
        parts.append(f"nothing to try of {count_of(outcome.unasked, 'pair')}: none of the kinds applies")
    if outcome.absent:
        parts.append(f"not on the index, so not tried: {', '.join(outcome.absent)}")
    if outcome.contradictions:
        parts += ["\na cell holds these, and a trial shows that they do not fit:", *outcome.contradictions]
    return "\n".join(parts)
