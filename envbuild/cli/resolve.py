"""`envbuild resolve` and `envbuild explain`: the cell of a request, and why that one or why none."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.cli import declared as click
from envbuild.cli.axes import axis_options, axis_order, request_from
from envbuild.cli.output import emit, json_option, progress_options

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime

    from envbuild.evidence.claims import Claim
    from envbuild.evidence.pairs import PairStanding
    from envbuild.lock.model import Lock
    from envbuild.matrix.cell import Request
    from envbuild.matrix.driver import DriverVerdict
    from envbuild.matrix.load import Matrix
    from envbuild.matrix.model import Rule
    from envbuild.solver.explain import Choice
    from envbuild.solver.solve import Solution

_lock_option = click.option(
    "--lock",
    "lock_file",
    type=click.Path(exists=True, path_type=Path),
    help="Start from the versions in this lock (its folder or lock.json); flags narrow it further.",
)


@click.command()
@axis_options
@_lock_option
@json_option
def resolve(lock_file: Path | None, as_json: bool, **flags: Any) -> None:
    """Choose a cell: versions that work together, proven ones first.

    A SPEC is a version or its beginning (12.6), a PEP 440 specifier (">=2.6,<2.8"), a commit, an alias (h100), `auto`
    for any version that fits, or `none`. Exits with 3 when no cell fits, and explains the conflict in numbered steps.
    """
    from envbuild.evidence.refs import evidence_refs
    from envbuild.matrix.driver import driver_verdict
    from envbuild.matrix.load import load_matrix
    from envbuild.solver.solve import solve

    matrix = load_matrix()
    lock = _lock(lock_file)
    solution = solve(matrix, _request(flags, lock), evidence_refs())
    if flags.get("stack") is not None:
        from envbuild.lock.inputs import inputs_of
        from envbuild.stacks.load import load_stack

        stack = load_stack(flags["stack"])  # reports here already what is wrong in it, not only when it is built
        flavor: Any = solution.cell.versions.get("flavor", "runtime")
        inputs_of(matrix, solution.cell, stack=stack, flavor=flavor)
    verdict = driver_verdict(matrix, solution.cell)
    claim = _claim(matrix, solution, lock)
    emit(
        _answer(solution, verdict, claim),
        as_json=as_json,
        human=lambda: _resolved_text(matrix, solution, verdict, claim),
    )


@click.command()
@axis_options
@_lock_option
@click.option("--nearest", "with_nearest", is_flag=True, help="When no cell fits, list the nearest ones that do.")
@json_option
@progress_options
def explain(lock_file: Path | None, with_nearest: bool, as_json: bool, **flags: Any) -> None:
    """Explain why each version was chosen and what the alternatives were, or why no cell fits, with sources."""
    from envbuild.errors import NoCellError
    from envbuild.evidence.pairs import standing_of_pairs, trials_of
    from envbuild.evidence.refs import evidence_refs
    from envbuild.matrix.driver import driver_verdict
    from envbuild.matrix.load import load_matrix
    from envbuild.solver.asked import read_request
    from envbuild.solver.explain import explain as choices_of
    from envbuild.solver.solve import solve

    matrix, evidence = load_matrix(), evidence_refs()
    lock = _lock(lock_file)
    request = _request(flags, lock)
    try:
        solution = solve(matrix, request, evidence)
    except NoCellError as error:
        if with_nearest and error.conflict is not None:
            error.hint = error.conflict.nearest_text()
        raise
    choices = choices_of(solution, evidence, asked=read_request(matrix, request))
    applied = (*solution.rules, *solution.tested_with)
    pairs = standing_of_pairs(matrix, solution.cell.versions, applied, trials_of(matrix))
    verdict = driver_verdict(matrix, solution.cell)
    claim = _claim(matrix, solution, lock)
    other = _by_other_recipe(claim, flags, lock_file)
    emit(
        {
            **_answer(solution, verdict, claim),
            "other_recipe": other,
            "choices": [_choice_answer(choice) for choice in choices],
            "pairs": [pair.as_json() for pair in pairs],
        },
        as_json=as_json,
        human=lambda: _explained(solution, choices, verdict, claim, pairs, other_recipe=other is True),
    )


def _lock(lock_file: Path | None) -> "Lock | None":
    if lock_file is None:
        return None
    from envbuild.lock.files import read_lock

    return read_lock(lock_file).lock


def _request(flags: dict[str, Any], lock: "Lock | None") -> "Request":
    return request_from(flags, lock=lock.pins, repository=bool(lock.stack)) if lock else request_from(flags)


def _rule_answer(rule: "Rule") -> dict[str, Any]:
    return {
        "rule": rule.id,
        "kind": rule.kind,
        "topic": rule.topic,
        "axes": sorted({*rule.when, *rule.needs, *rule.with_, *rule.without, *rule.same}),
        "text": rule.why,
        "source": rule.source,
    }


def _answer(solution: "Solution", verdict: "DriverVerdict | None", claim: "Claim") -> dict[str, Any]:
    return {
        "cell": dict(solution.cell.versions),
        "id": solution.cell.id,
        "arch": solution.cell.arch,
        "driver_verdict": verdict.verdict if verdict else None,
        "rules": [_rule_answer(rule) for rule in (*solution.rules, *solution.tested_with)],
        "notes": [_rule_answer(rule) for rule in solution.notes],
        "evidence": [
            {
                "id": ref.id,
                "level": ref.level,
                "image": ref.image,
                "versions": dict(ref.versions),
                "place": dict(ref.place),
            }
            for ref in solution.evidence
        ],
        "standing": claim.as_json(),
        "left_out": dict(solution.left_out),
        "matrix": solution.matrix_digest,
    }


def _choice_answer(choice: "Choice") -> dict[str, Any]:
    others = {"next_best": choice.next_best, "newest": choice.newest}
    return {
        "axis": choice.axis,
        "version": choice.version,
        "why": choice.why,
        "source": choice.source,
        **{
            key: {"version": other.version, "why": other.why, "source": other.source} if other else None
            for key, other in others.items()
        },
    }


def _sorted_axes(names: list[str]) -> list[str]:
    return sorted(names, key=axis_order)


def _table(rows: "Sequence[tuple[str, ...]]") -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]


def _verdict_line(verdict: "DriverVerdict | None") -> str:
    if verdict is None:
        return "driver     not given; --driver auto or --driver VERSION shows whether it runs this cell"
    return f"driver     {verdict.driver}: {verdict.verdict}; {verdict.why} ({verdict.source})"


def _claim(matrix: "Matrix", solution: "Solution", lock: "Lock | None") -> "Claim":
    """Return what is known of the cell. With a lock, a record of another one is stale."""
    from envbuild.evidence.claims import claim_of
    from envbuild.evidence.pairs import trials_of
    from envbuild.evidence.refs import committed_evidence

    def suite_of(axes: "Collection[str]", level: str, date: "datetime") -> str:
        from envbuild.verify.suite import suite_of as of

        return of(axes, level, date)

    return claim_of(
        solution.cell,
        solution.evidence,
        committed_evidence(),
        suite=suite_of,
        lock_digest=lock.digest if lock else None,
        trials=trials_of(matrix),
    )


_OTHER_RECIPE = "           that image was made by another recipe than this release's; what this release builds from the lock is another image"


def _by_other_recipe(claim: "Claim", flags: dict[str, Any], lock_file: Path | None) -> bool | None:
    """Return whether another recipe made the image that the claim rests on; None where it or its lock is not known.

    The recipe is the hash of the Dockerfile, which is rendered for it: some ten milliseconds, so that `resolve` leaves it out.
    """
    import contextlib

    from envbuild.errors import EnvbuildError

    content = claim.record.content if claim.record else None
    if content is None or content.recipe is None or claim.record is None:
        return None
    from envbuild.cli.cell_options import asked_from
    from envbuild.lock.files import read_lock
    from envbuild.lock.find import find_lock
    from envbuild.plan.dockerfile import recipe_digest
    from envbuild.plan.plan import plan_of

    with contextlib.suppress(EnvbuildError):
        asked = asked_from(flags, lock_file=lock_file, sources=())
        found = read_lock(lock_file) if lock_file else (find_lock(asked.settings, asked.inputs) or (None,))[0]
        if found is not None and found.lock.digest == claim.record.lock_digest:
            return content.recipe != recipe_digest(plan_of(asked.matrix, found, asked.stack))
    return None


def _why(solution: "Solution", claim: "Claim", name: str) -> str:
    """Return why an axis has its version, and what is known of it where it is software that runs."""
    component = claim.components.get(name)
    return f"{component.text}; {solution.reasons[name]}" if component else solution.reasons[name]


def _note_lines(solution: "Solution") -> list[str]:
    return [f"note       {rule.why} ({rule.source})" for rule in solution.notes]


def _left_out_lines(solution: "Solution") -> list[str]:
    from envbuild.solver.solve import NOT_ASKED

    unasked = [axis for axis, why in solution.left_out.items() if why == NOT_ASKED]
    lines = [f"left out   {axis}: {why}" for axis, why in solution.left_out.items() if why != NOT_ASKED]
    if unasked:
        lines.append(f"left out   {', '.join(unasked)}: {NOT_ASKED}")
    return lines


def _resolved_text(matrix: "Matrix", solution: "Solution", verdict: "DriverVerdict | None", claim: "Claim") -> str:
    versions = solution.cell.versions
    rows = []
    for name in _sorted_axes(list(versions)):
        release = matrix.release(name, versions[name]) if matrix.has(name, versions[name]) else None
        commit = f" ({release.commit[:8]})" if release and release.commit else ""
        rows.append((name, versions[name] + commit, _why(solution, claim, name)))
    return "\n".join(
        [
            solution.cell.id,
            "",
            *_table(rows),
            "",
            _verdict_line(verdict),
            f"evidence   {claim.text}",
            *_note_lines(solution),
            *_left_out_lines(solution),
        ]
    )


def _explained(
    solution: "Solution",
    choices: "tuple[Choice, ...]",
    verdict: "DriverVerdict | None",
    claim: "Claim",
    pairs: "Sequence[PairStanding]",
    *,
    other_recipe: bool,
) -> str:
    from envbuild.solver.order import ORDER_IN_WORDS

    prefer = solution.request.prefer
    order = ORDER_IN_WORDS[prefer].split(", then ")
    lines = [solution.cell.id, "", "cells are ordered by:", *(f"    {n}. {each}" for n, each in enumerate(order, 1))]
    by_axis = {choice.axis: choice for choice in choices}
    for name in _sorted_axes(list(by_axis)):
        choice = by_axis[name]
        lines += ["", f"{name} {choice.version}: {_why(solution, claim, name)}", f"    source: {choice.source}"]
        if choice.next_best:
            lines.append(f"    next best, {choice.next_best.version}: {choice.next_best.why}")
        if choice.newest:
            lines.append(f"    {choice.newest.version}: {choice.newest.why}")
            if choice.newest.source:
                lines.append(f"        ({choice.newest.source})")
    lines += ["", "rules that apply:"]
    lines += [
        f"    {rule.id} ({rule.kind}): {rule.why} ({rule.source})" for rule in (*solution.rules, *solution.tested_with)
    ]
    if pairs:
        lines += ["", "pairs of releases:", *(f"    {pair}" for pair in pairs)]
    lines += ["", _verdict_line(verdict), f"evidence   {claim.text}", *([_OTHER_RECIPE] if other_recipe else [])]
    return "\n".join([*lines, *_note_lines(solution), *_left_out_lines(solution)])
