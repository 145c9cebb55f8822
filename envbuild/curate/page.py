"""The browsable matrix: every combination of cuda, torch and te with its verdict, as one HTML file without a network.

What is written follows from the data alone (no clock, no host), so that the same matrix gives the same page; the reader's
browser works out how long ago a proof was.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.components import COMPONENTS
from envbuild.curate.links import source_url
from envbuild.errors import HostError, NoCellError
from envbuild.evidence.pairs import standing_of_pairs
from envbuild.evidence.records import Evidence, Standing, Suite, evidence_for
from envbuild.evidence.trials import Ledger, Trial
from envbuild.matrix.cell import NONE, Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, BaseFacts, CudaFacts, GpuFacts, Release, Rule, Spec
from envbuild.matrix.spec import matches, public_version
from envbuild.solver.asked import Asked, read_request
from envbuild.solver.conflict import explain_conflict
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.order import EvidenceRef
from envbuild.solver.program import solvable
from envbuild.solver.solve import Solution, solve
from envbuild.stacks import Stack

_ASSETS = Path(__file__).with_name("page_assets")
# What the panel shows of a cell, in this order.
_SHOWN = ("apex", "python", "gpu", "base", "toolchain", "nvcc", "cudnn", "nccl", "os", "gcc", "abi")
# What a stack's entry shows of its cell, in this order.
_SHOWN_OF_STACKS = ("cuda", *COMPONENTS, "python", "gpu", "base")
# Pairs of pins that may never go together, the most general first: what is said of CUDA 13 and TE 2.8 holds for every torch.
_TELLING = (
    ("cuda", "te"),
    ("cuda", "gpu"),
    ("te", "gpu"),
    ("torch", "python"),
    ("te", "python"),
    ("torch", "te"),
    ("torch", "gpu"),
    ("cuda", "python"),
)
_CPU = "cpu"
_BEST_FIRST = ("verified", "stale", "failed", "never")


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The combinations of one CUDA: a row per Transformer Engine, a column per torch built for this CUDA."""

    cuda: str
    driver: str
    source: str
    torch: tuple[str, ...]
    te: tuple[str, ...]
    """`none` is an image without Transformer Engine."""
    entries: tuple[tuple[int, ...], ...]
    """Per row and column: n >= 0 is `cells[n]`, n < 0 is `reasons[-1 - n]`."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Everything that the page shows."""

    matrix: Matrix
    grids: tuple[Grid, ...]
    cells: tuple[Mapping[str, Any], ...]
    """One per combination that has a cell: `id`, `versions`, `rules` and those of them by which somebody tested this torch
    with this te (`together`), `standing`, `pairs` (text, `tried`, `stated` or `neither`, and its verdict), `on` (GPU -> Pythons, as bits), `no_gpu` and `no_python` (number -> reason)."""
    reasons: tuple[tuple[Mapping[str, str], ...], ...]
    """Why there is no cell: steps of `text`, `rule` and `source`."""
    gpus: tuple[Release, ...]
    pythons: tuple[str, ...]
    images: tuple[Mapping[str, str], ...]
    """The combinations that come ready in an NGC image."""
    stacks: tuple[Mapping[str, Any], ...]
    evidence: tuple[Evidence, ...]


@dataclass
class _Reasons:
    """Why requests have no cell, each distinct reason once.

    Two pins that never go together say more than a longer derivation, and explain every combination that holds them: some
    hundred conflicts stand for several thousand combinations.
    """

    matrix: Matrix
    steps: list[tuple[Mapping[str, str], ...]] = field(default_factory=list)
    known: dict[frozenset[tuple[AxisName, str]], int | None] = field(default_factory=dict)

    def of(self, pins: Mapping[AxisName, str]) -> int:
        """Return the number of the reason why `pins` have no cell: the first of one step that two of them give, else the shortest."""
        found = []
        for one, other in _TELLING:
            if one in pins and other in pins:
                number = self._reason(((one, pins[one]), (other, pins[other])))
                if number is not None:
                    if len(self.steps[number]) == 1:
                        return number
                    found.append(number)
        if found:
            return min(found, key=lambda number: len(self.steps[number]))
        whole = self._reason(tuple(sorted(pins.items())))
        assert whole is not None  # noqa: S101  # asked only for what has no cell
        return whole

    def _reason(self, items: Sequence[tuple[AxisName, str]]) -> int | None:
        key = frozenset(items)
        if key not in self.known:
            asked = read_request(self.matrix, Request(pins=_pins(dict(items))))
            self.known[key] = None if solvable(*asked.of(asked.request.pins)) else self._explained(asked)
        return self.known[key]

    def _explained(self, asked: Asked) -> int:
        conflict = explain_conflict(asked, first_only=True)
        steps = tuple(
            {"text": step.text, "rule": step.rule, "source": step.source} for step in conflict.steps if step.pin is None
        )
        if steps not in self.steps:
            self.steps.append(steps)
        return self.steps.index(steps)


def _pins(versions: Mapping[AxisName, str]) -> tuple[Pin, ...]:
    return tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in versions.items())


def build_page(
    matrix: Matrix,
    *,
    stacks: Sequence[Stack] = (),
    records: Sequence[Evidence] = (),
    evidence: Sequence[EvidenceRef] = (),
    trials: Iterable[Trial] = (),
    suite: Suite | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Page:
    """Work out what the page shows.

    Args:
        matrix: the data; it must have the axes cuda, torch, te, gpu and python.
        stacks: shown with the cell that each resolves to.
        records: evidence, as `load_evidence` returns it.
        evidence: the same as the solver ranks by it.
        trials: what was tried of pairs of releases.
        suite: hash of today's smoke suite, or what gives it for a cell; a proof of another suite is shown as stale.
        note: told how far it is: this takes some seconds.

    """
    own = {axis: tuple(r for r in matrix.releases[axis] if not _of_image(matrix, r)) for axis in ("torch", "te")}
    pythons = tuple(r.version for r in matrix.releases["python"])
    gpus = matrix.releases["gpu"]
    where = _where(matrix, gpus, pythons)
    reasons = _Reasons(matrix=matrix)
    cells: list[Mapping[str, Any]] = []
    ledger = Ledger(trials)

    def entry(cuda: str, torch: str, te: str) -> int:
        pins = {"cuda": cuda, "torch": torch, "te": te}
        on = where.get((cuda, torch, te))
        if on is None:
            return -1 - reasons.of(pins)
        solution = solve(matrix, Request(pins=_pins(pins)), evidence)
        everywhere = 0
        for mask in on.values():
            everywhere |= mask
        cells.append(
            {
                **pins,
                "id": solution.cell.id,
                "versions": {a: solution.cell.versions[a] for a in _SHOWN if a in solution.cell.versions},
                "rules": [rule.id for rule in (*solution.rules, *solution.tested_with)],
                "together": [r.id for r in solution.tested_with if {"torch", "te"} <= r.when.keys()],
                "standing": _standings(records, pins, suite),
                "pairs": [
                    [str(pair), pair.known, pair.verdict or ""]
                    for pair in standing_of_pairs(
                        matrix, solution.cell.versions, (*solution.rules, *solution.tested_with), ledger
                    )
                ],
                "on": on,
                "no_gpu": {}
                if cuda == _CPU
                else {n: reasons.of({**pins, "gpu": g.version}) for n, g in enumerate(gpus) if n not in on},
                "no_python": {
                    n: reasons.of({**pins, "python": p}) for n, p in enumerate(pythons) if not everywhere >> n & 1
                },
            }
        )
        return len(cells) - 1

    grids = []
    newest_first = matrix.releases["cuda"][::-1]
    for cuda in sorted(newest_first, key=lambda release: release.version == _CPU):  # the CPU build last
        columns = [r.version for r in reversed(own["torch"]) if _built_for(matrix, r, cuda)]
        if not columns:
            continue
        note(f"working out CUDA {cuda.version}")
        rows = [NONE] if cuda.version == _CPU else [*(r.version for r in reversed(own["te"])), NONE]
        grids.append(
            Grid(
                cuda=cuda.version,
                driver=_driver(cuda),
                source=cuda.source,
                torch=tuple(columns),
                te=tuple(rows),
                entries=tuple(tuple(entry(cuda.version, torch, te) for torch in columns) for te in rows),
            )
        )
    return Page(
        matrix=matrix,
        grids=tuple(grids),
        cells=tuple(cells),
        reasons=tuple(reasons.steps),
        gpus=gpus,
        pythons=pythons,
        images=_images(matrix),
        stacks=tuple(_stack(matrix, stack, records, evidence, suite) for stack in stacks),
        evidence=tuple(reversed(records)),
    )


def _of_image(matrix: Matrix, release: Release) -> bool:
    """Return whether `release` comes with an NGC image and with nothing else."""
    spec = release.needs.get("base")
    if spec is None:
        return False
    kinds = {b.facts.kind for b in matrix.releases["base"] if _is(matrix, "base", spec, b) and _has_kind(b)}
    return kinds == {"ngc"}


def _has_kind(base: Release) -> bool:
    return isinstance(base.facts, BaseFacts)


def _is(matrix: Matrix, axis: AxisName, spec: Spec, release: Release) -> bool:
    return matches(matrix.axes[axis], spec, release)


def _built_for(matrix: Matrix, torch: Release, cuda: Release) -> bool:
    spec = torch.needs.get("cuda")
    return spec is not None and _is(matrix, "cuda", spec, cuda)


def _where(
    matrix: Matrix, gpus: Sequence[Release], pythons: Sequence[str]
) -> dict[tuple[str, str, str], dict[int, int]]:
    """Return for each combination of cuda, torch and te that has a cell: GPU (-1: none) -> bits of its Pythons."""
    gpu_number = {release.version: n for n, release in enumerate(gpus)}
    bit = {version: 1 << n for n, version in enumerate(pythons)}
    without_te = Pin(axis="te", spec=NONE, origin="the page")
    on_cpu = (without_te, Pin(axis="cuda", spec=_CPU, origin="the page"))
    axes = ("cuda", "torch", "gpu", "python")
    found: dict[tuple[str, str, str], dict[int, int]] = {}
    for each in itertools.chain(
        enumerate_cells(matrix, (*axes, "te")),
        enumerate_cells(matrix, axes, (without_te,)),
        enumerate_cells(matrix, ("cuda", "torch", "python"), on_cpu) if matrix.has("cuda", _CPU) else (),
    ):
        on = found.setdefault((each["cuda"], each["torch"], each.get("te", NONE)), {})
        gpu = gpu_number[each["gpu"]] if "gpu" in each else -1
        on[gpu] = on.get(gpu, 0) | bit[each["python"]]
    return found


def _driver(cuda: Release) -> str:
    facts = cuda.facts
    if not isinstance(facts, CudaFacts) or cuda.version == _CPU:
        return "no driver needed"
    said = [
        f"driver {driver} for every feature of {toolkit}" for toolkit, driver in list(facts.driver_full.items())[-1:]
    ]
    if facts.driver_minor:
        said.append(f"{facts.driver_minor} by minor-version compatibility")
    if facts.compat_branches:
        branches = ", ".join(facts.compat_branches)
        word = "branches" if len(facts.compat_branches) > 1 else "branch"
        said.append(f"driver {word} {branches} with cuda-compat, on data-center GPUs")
    return "; ".join(said)


def _standings(records: Iterable[Evidence], pins: Mapping[AxisName, str], suite: Suite | None) -> list[dict[str, str]]:
    """Return what the records say of the cells with these versions, the best first; nothing when none was ever run."""
    ids = sorted(
        {r.cell_id for r in records if all((r.cell.get(axis) or NONE) == version for axis, version in pins.items())}
    )
    found = [(cell_id, evidence_for(records, cell_id=cell_id, suite=suite)) for cell_id in ids]
    told = [_standing(standing, cell_id) for cell_id, standing in found if standing.record is not None]
    return sorted(told, key=lambda each: (_BEST_FIRST.index(each["status"]), each["where"] == "CPU", each["cell"]))


def _standing(standing: Standing, cell_id: str) -> dict[str, str]:
    record = standing.record
    if record is None:
        return {"status": standing.status, "cell": cell_id}
    reason = record.reason.partition("\n")[0]
    # What the page calls stale is a proof; a failed run stays one when it is stale.
    level = "" if record.to_step else f"level {record.level} alone"
    why = [standing.why_stale, *((level, record.caveat) if record.passed else (reason,))]
    return {
        "status": standing.status if record.passed else "failed",
        "cell": cell_id,
        "where": record.where,
        "date": record.date.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "why": "; ".join(each for each in why if each),
        "record": record.id,
    }


def _images(matrix: Matrix) -> tuple[Mapping[str, str], ...]:
    """Return an NGC image a row, with what it brings; newest first."""
    rows: dict[str, dict[str, set[str]]] = {}
    named = [r.version for r in matrix.releases["base"] if isinstance(r.facts, BaseFacts) and r.facts.kind == "ngc"]
    axes = ("base", "cuda", "torch", "python")
    for name in named:
        for each in enumerate_cells(matrix, axes, (Pin(axis="base", spec=name, origin="the page"),)):
            row = rows.setdefault(name, {axis: set() for axis in axes})
            for axis, version in each.items():
                row[axis].add(version)
    return tuple(
        {axis: ", ".join(sorted(found)) for axis, found in rows[name].items()}
        | {"source": matrix.release("base", name).source}
        for name in sorted(rows, reverse=True)
    )


def _stack(
    matrix: Matrix, stack: Stack, records: Sequence[Evidence], evidence: Sequence[EvidenceRef], suite: Suite | None
) -> Mapping[str, Any]:
    solution: Solution | None = None
    why = ""
    try:
        solution = solve(matrix, Request(pins=_pins(stack.axes)), evidence)
    except NoCellError as error:
        why = error.what
    cell = solution.cell.id if solution else None
    return {
        "stack": stack,
        "cell": cell,
        "versions": dict(solution.cell.versions) if solution else {},
        "why": why,
        "standing": _standing(evidence_for(records, cell_id=cell, suite=suite), cell) if cell else None,
    }


def page_data(page: Page) -> dict[str, Any]:
    """Return what the page's script works on: cells and reasons, by number."""
    rule_ids = [rule.id for rule in page.matrix.rules]
    number = {rule_id: n for n, rule_id in enumerate(rule_ids)}
    return {
        "rules": [[rule.id, rule.kind, rule.why] for rule in page.matrix.rules],
        "gpus": [[gpu.version, _gpu_names(gpu)] for gpu in page.gpus],
        "pythons": page.pythons,
        "cells": [
            {**cell, **{key: [number[rule_id] for rule_id in cell[key]] for key in ("rules", "together")}}
            for cell in page.cells
        ],
        "reasons": [[{**step, "source": _linked(step["source"])} for step in steps] for steps in page.reasons],
    }


def _linked(sources: str) -> list[tuple[str, str | None]]:
    """Return each of several sources, which a conflict joins with semicolons, with its address."""
    return [(source, source_url(source)) for source in sources.split("; ") if source]


def _gpu_names(gpu: Release) -> str:
    return ", ".join(gpu.facts.names) if isinstance(gpu.facts, GpuFacts) else ""


def render_page(page: Page) -> str:
    """Return the page as HTML: styles, script and data inside, nothing fetched."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters |= {"source_url": source_url, "spec": _spec_text, "public": _public}
    environment.globals |= {"demand": _demand, "gpu_names": _gpu_names, "stack_axes": _SHOWN_OF_STACKS}
    data = json.dumps(page_data(page), separators=(",", ":"), ensure_ascii=False)
    return environment.get_template("page.html.j2").render(
        page=page,
        # inside a script element only an end tag would end it
        data=data.replace("</", "<\\/"),
        style=(_ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(_ASSETS / "page.js").read_text(encoding="utf-8"),
        possible=sum(n >= 0 for grid in page.grids for row in grid.entries for n in row),
    )


def _public(version: str) -> str:
    """Return a version without its variant, which the CUDA above the table says."""
    public = public_version(version)
    return str(public) if public is not None else version


def _spec_text(spec: Spec) -> str:
    return spec if isinstance(spec, str) else " or ".join(spec)


def _demand(rule: Rule) -> tuple[str, str]:
    """Return when a rule applies and what it then demands, in short."""
    when = ", ".join(f"{axis} {_spec_text(spec)}" for axis, spec in rule.when.items())
    then = [f"{axis} {_spec_text(spec)}" for axis, spec in rule.needs.items()]
    then += [" and ".join(f"{axis} {_spec_text(spec)}" for axis, spec in each.items()) for each in rule.any_of]
    then += [f"{axis} in use" for axis in rule.with_]
    then += [f"no {axis}" for axis in rule.without]
    if rule.same:
        then.append(f"one major.minor of {' and '.join(rule.same)}")
    return (f"{rule.component}: {when}" if rule.component else when), (" or " if rule.any_of else " and ").join(then)


def page_path(folder: Path) -> Path:
    """Make `folder` where it does not exist and return the path of the page in it.

    Raises:
        HostError: it cannot be made.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder / "index.html"


def write_page(text: str, path: Path) -> None:
    """Write the page to `path`, whole or not at all.

    Raises:
        HostError: it cannot be written.

    """
    try:
        part = path.with_name(".index.html.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> HostError:
    return HostError(
        f"the page cannot be written: {error.strerror}", where=str(path), hint="name a folder that you may write to"
    )
