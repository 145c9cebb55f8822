"""The browsable matrix: every combination of cuda, torch and te with its verdict, as one HTML file without a network.

What is written follows from the data alone (no clock, no host), so that the same matrix gives the same page; the reader's
browser works out how long ago a proof was.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.curate.page_proof import proof_by_gpu
from envbuild.curate.page_published import PublishedImage
from envbuild.curate.page_reasons import Reasons, pins_of
from envbuild.errors import NoCellError
from envbuild.evidence.claims import tried_word
from envbuild.evidence.pairs import standing_of_pairs
from envbuild.evidence.records import Evidence
from envbuild.evidence.standing import Suite, standing_for, summaries, summary
from envbuild.evidence.trials import Ledger
from envbuild.matrix.cell import NONE, Cell, Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, BaseFacts, CudaFacts, Release, Spec
from envbuild.matrix.spec import matches
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.proof import EvidenceRef, Proof
from envbuild.solver.solve import Solution, solve
from envbuild.stacks.model import Stack

# What the panel shows of a cell, in this order.
_SHOWN = ("apex", "python", "gpu", "base", "toolchain", "nvcc", "cudnn", "nccl", "os", "gcc", "abi")
_CPU = "cpu"


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
    with this te (`together`), `standing`, `tried` (the word that trials alone give it), `pairs` (text, `tried`, `stated` or
    `neither`, and its verdict), `on` (GPU -> Pythons, as bits), `no_gpu` and `no_python` (number -> reason)."""
    reasons: tuple[tuple[Mapping[str, str], ...], ...]
    """Why there is no cell: steps of `text`, `rule` and `source`."""
    gpus: tuple[Release, ...]
    pythons: tuple[str, ...]
    images: tuple[Mapping[str, str], ...]
    """The combinations that come ready in an NGC image."""
    stacks: tuple[Mapping[str, Any], ...]
    evidence: tuple[Evidence, ...]
    proof: tuple[Mapping[str, str], ...] = ()
    """What ran on which board, as `proof_by_gpu` returns it."""
    published: tuple[PublishedImage, ...] = ()

    @property
    def combinations(self) -> frozenset[tuple[str, str, str]]:
        """The CUDA, torch and Transformer Engine of every combination that has a cell."""
        return frozenset((cell["cuda"], cell["torch"], cell["te"]) for cell in self.cells)

    @property
    def torch(self) -> tuple[str, ...]:
        """The torch versions of the tables, without their variants, the newest first."""
        columns = {torch.partition("+")[0] for grid in self.grids for torch in grid.torch}
        known = {release.version.partition("+")[0]: None for release in reversed(self.matrix.releases["torch"])}
        return tuple(version for version in known if version in columns)

    @property
    def te(self) -> frozenset[str]:
        """The Transformer Engines of the tables."""
        return frozenset(te for grid in self.grids for te in grid.te)

    @property
    def words(self) -> Mapping[str, str]:
        """The four words of what was proven: as JSON has them -> as people read them."""
        return {proof.value: proof.words for proof in Proof}


def build_page(
    matrix: Matrix,
    *,
    stacks: Sequence[Stack] = (),
    records: Sequence[Evidence] = (),
    evidence: Sequence[EvidenceRef] = (),
    suite: Suite | None = None,
    trials: Ledger | None = None,
    published: Sequence[PublishedImage] = (),
    note: Callable[[str], None] = lambda _: None,
) -> Page:
    """Work out what the page shows.

    Args:
        matrix: the data; it must have the axes cuda, torch, te, gpu and python.
        stacks: shown with the cell that each resolves to.
        records: evidence, as `load_evidence` returns it.
        evidence: the same as the solver ranks by it.
        suite: hash of today's smoke suite, or what gives it for a cell; a proof of another suite is shown as stale.
        trials: the ledger of trials; a cell that never ran is shown as tried where it says so.
        published: images that a registry holds, shown with the command that pulls each.
        note: called with how far it is: this takes some seconds.

    """
    own = {axis: tuple(r for r in matrix.releases[axis] if not _of_image(matrix, r)) for axis in ("torch", "te")}
    pythons = tuple(r.version for r in matrix.releases["python"])
    gpus = matrix.releases["gpu"]
    where = _where(matrix, gpus, pythons)
    reasons = Reasons(matrix=matrix)
    cells: list[Mapping[str, Any]] = []
    ledger = trials or Ledger(())

    def entry(cuda: str, torch: str, te: str) -> int:
        pins = {"cuda": cuda, "torch": torch, "te": te}
        on = where.get((cuda, torch, te))
        if on is None:
            return -1 - reasons.of(pins)
        solution = solve(matrix, Request(pins=pins_of(pins)), evidence)
        everywhere = 0
        for mask in on.values():
            everywhere |= mask
        cells.append(
            {
                **pins,
                "id": solution.cell.id,
                "versions": {a: solution.cell.versions[a] for a in _SHOWN if a in solution.cell.versions},
                "rules": [rule.id for rule in (*solution.rules, *solution.tested_with, *solution.notes)],
                "together": [r.id for r in solution.tested_with if {"torch", "te"} <= r.when.keys()],
                "standing": summaries(records, pins, solution.cell.versions, suite),
                "tried": tried_word(solution.cell.versions, ledger)[0].value,
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
        proof=proof_by_gpu(records, suite),
        published=tuple(published),
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
    parts = [
        f"driver {driver} for every feature of {toolkit}" for toolkit, driver in list(facts.driver_full.items())[-1:]
    ]
    if facts.driver_minor:
        parts.append(f"{facts.driver_minor} by minor-version compatibility")
    if facts.compat_branches:
        branches = ", ".join(facts.compat_branches)
        word = "branches" if len(facts.compat_branches) > 1 else "branch"
        parts.append(f"driver {word} {branches} with cuda-compat, on data-center GPUs")
    return "; ".join(parts)


def _images(matrix: Matrix) -> tuple[Mapping[str, str], ...]:
    """Return one row per NGC image, with what is in it; newest first."""
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
        solution = solve(matrix, Request(pins=pins_of(stack.axes), repository=True), evidence)
    except NoCellError as error:
        why = error.what
    cell = solution.cell.id if solution else None
    return {
        "stack": stack,
        "cell": cell,
        "versions": dict(solution.cell.versions) if solution else {},
        "why": why,
        "standing": _standing(solution.cell, records, suite) if solution else None,
    }


def _standing(cell: Cell, records: Sequence[Evidence], suite: Suite | None) -> Mapping[str, str]:
    own = [record for record in records if record.cell_id == cell.id]
    return summary(standing_for(own, cell.versions, suite=suite), cell.id, cell.versions)
