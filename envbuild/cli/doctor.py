"""`envbuild doctor`: what a machine has, what is missing and how to fix it, and which cells and stacks it can run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.output import emit, json_option, progress_options, show_notices

if TYPE_CHECKING:
    from envbuild.doctor.diagnosis import Area
    from envbuild.doctor.reach import Reach
    from envbuild.settings import Settings

_MARKS = {"ok": "ok  ", "warn": "warn", "absent": "-   ", "lack": "FIX "}  # plain-words: allow lack - a status in JSON


@click.command()
@click.option(
    "--remote-facts",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Report on another machine, from the output of `envbuild doctor --json` there.",
)
@click.option(
    "--require", metavar="AREA,…", help="Exit with 8 when one of these is not ready: engine, gpu, toolkit, disk, …"
)
@json_option
@progress_options
def doctor(remote_facts: Path | None, require: str | None, as_json: bool) -> None:
    """Show what this machine has, what is missing and how to fix it, and which cells and stacks it can run.

    Exits with 0 whatever it finds; with --require, exits with 8 when one of the named areas is not ready.
    """
    from envbuild.doctor.diagnosis import MISSING, diagnose
    from envbuild.doctor.reach import cuda_reach, stack_reach
    from envbuild.errors import HostError
    from envbuild.evidence.refs import evidence_refs
    from envbuild.host import facts, read_facts
    from envbuild.matrix.load import load_matrix
    from envbuild.settings import load_settings
    from envbuild.stacks.load import load_stack, stack_names

    wanted = _required(require)
    settings = None if remote_facts else show_notices(load_settings())
    host = read_facts(remote_facts) if remote_facts else facts(settings, every=True)
    matrix = load_matrix()
    by_podman = settings is not None and settings.engine == "podman"
    areas = diagnose(host, settings.gpu_access if settings else "auto", podman=by_podman)
    evidence = evidence_refs()
    cells = cuda_reach(matrix, host, evidence)
    stacks = stack_reach(matrix, host, {name: load_stack(name).axes for name in stack_names()}, evidence)
    emit(
        {
            "host": host.model_dump(mode="json"),
            "settings": _settings_answer(settings) if settings else None,
            "areas": {area.name: _area_answer(area) for area in areas},
            "cells": [_reach_answer(reach) for reach in cells],
            "stacks": [_reach_answer(reach) for reach in stacks],
            "matrix": matrix.digest,
        },
        as_json=as_json,
        human=lambda: _report(areas, cells, stacks, settings),
    )
    if by_podman and "engine" in wanted:
        wanted.add("podman")
    not_ready = [area for area in areas if area.name in wanted and not area.satisfied]
    if not_ready:
        found = [finding for area in not_ready for finding in area.findings if finding.status in {MISSING, "absent"}]
        raise HostError(
            "; ".join(finding.what for finding in found),
            where="--require " + ",".join(area.name for area in not_ready),
            hint="; ".join(fix for finding in found for fix in finding.fix) or None,
        )


def _required(text: str | None) -> set[str]:
    from envbuild.doctor.diagnosis import AREAS
    from envbuild.errors import UsageError

    names = {name.strip() for name in (text or "").split(",") if name.strip()}
    unknown = sorted(names - set(AREAS))
    if unknown:
        raise UsageError(f"there is no area {unknown[0]!r}", where="--require", hint=f"areas: {', '.join(AREAS)}")
    return names


def _area_answer(area: "Area") -> dict[str, Any]:
    return {
        "status": area.status,
        # plain-words: allow mend - a field of the JSON answer
        "findings": [{"status": f.status, "what": f.what, "mend": list(f.fix)} for f in area.findings],
    }


def _reach_answer(reach: "Reach") -> dict[str, Any]:
    return {
        "name": reach.name,
        "gpu": reach.gpu,
        "runs": reach.runs,
        "cell": reach.cell,
        "driver_verdict": reach.verdict,
        "why": reach.why,
        "source": reach.source,
    }


def _settings_answer(settings: "Settings") -> dict[str, Any]:
    return {key: {"value": value, "origin": settings.origin(key)} for key, value in settings.redacted().items()}


def _report(
    areas: "Sequence[Area]", cells: "Sequence[Reach]", stacks: "Sequence[Reach]", settings: "Settings | None"
) -> str:
    lines = []
    for area in areas:
        for finding in area.findings:
            lines.append(f"{_MARKS[finding.status]}  {area.name:<10}  {finding.what}")
            lines += [f"      {'':<10}    to do: {fix}" for fix in finding.fix]
    for title, rows in (("cells that this machine can run, by CUDA", cells), ("stacks", stacks)):
        if rows:
            lines += ["", title, *_rows(rows)]
    if settings is not None:
        set_here = [key for key in settings.redacted() if settings.origin(key) != "default"]
        lines += [
            "",
            "settings, each with what set it (all others are the defaults)" if set_here else "settings: all defaults",
        ]
        lines += [f"  {key} = {settings.redacted()[key]}  (from {settings.origin(key)})" for key in set_here]
    return "\n".join(lines)


def _rows(rows: "Sequence[Reach]") -> list[str]:
    several = len({reach.gpu for reach in rows if reach.gpu}) > 1
    lines = []
    for reach in rows:
        name = f"{reach.name} on {reach.gpu}" if several and reach.gpu else reach.name
        state = "refused" if reach.cell is None else reach.verdict or ("runs" if reach.runs else "builds")
        lines.append(f"  {name:<14}  {state:<13}  {reach.cell or '-'}")
        if state not in {"full", "runs", "builds"}:
            lines.append(f"  {'':<14}  {'':<13}  {reach.why}")
    return lines
