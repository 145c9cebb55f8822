"""Which cells and stacks a machine can run, and what its driver means for each."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from envbuild.errors import NoCellError, UsageError
from envbuild.host import Gpu, HostFacts
from envbuild.matrix.cell import ARCHITECTURE, DEBIAN_ARCH, X86_64, Pin, Request
from envbuild.matrix.driver import driver_verdict
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, GpuFacts, Release
from envbuild.matrix.spec import version_key
from envbuild.matrix.spelling import board_of
from envbuild.solver.asked import read_request
from envbuild.solver.proof import EvidenceRef
from envbuild.solver.search import solvable
from envbuild.solver.solve import solve
from envbuild.util.frozen import replace

CPU = "cpu"


@dataclass(frozen=True, kw_only=True)
class Reach:
    """One CUDA or stack on one kind of GPU of the machine."""

    name: str
    gpu: str | None
    """Release of the gpu axis, such as `sm_90`; None where the machine has no GPU, or the cell is for the CPU."""
    runs: bool
    """Whether a container of this cell starts and computes on this machine."""
    cell: str | None
    """Id of the cell that `resolve` gives; None when there is none."""
    verdict: str | None
    """The driver's verdict on the cell; None when no driver is known."""
    why: str
    source: str | None


def gpu_release(matrix: Matrix, gpu: Gpu) -> Release | None:
    """Return the gpu axis' release that a GPU belongs to: by its capability, else by its name (drivers before R510)."""
    for release in matrix.releases["gpu"]:
        facts = release.facts
        if not isinstance(facts, GpuFacts):
            continue
        if gpu.sm == facts.sm or (
            gpu.sm is None and any(_names(name, gpu.name) for name in (*facts.names, *facts.geforce))
        ):
            return release
    return None


def _names(listed: str, reported: str) -> bool:
    # "A100" is in "A100-SXM4-40GB" and "NVIDIA A100 80GB PCIe"; "L4" must not be found in "L40S".
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(listed)}(?![A-Za-z0-9])", reported, re.IGNORECASE) is not None


def cuda_reach(matrix: Matrix, host: HostFacts, evidence: Sequence[EvidenceRef] = ()) -> tuple[Reach, ...]:
    """Judge the cell that each CUDA release resolves to on this machine: the CPU cell first, then the newest CUDA.

    A CUDA for which no torch is built has no cell on any machine, and is left out.
    """
    found: list[Reach] = []
    for release in sorted(matrix.releases["cuda"], key=_newest_first):
        pin = Pin(axis="cuda", spec=release.version, origin="--cuda")
        asked = read_request(matrix, Request(pins=(pin,)))
        if solvable(asked.compiled, asked.compiled.domains(asked.pinned())):
            name = CPU if release.version == CPU else f"CUDA {release.version}"
            found += _judged(matrix, host, name, Request(pins=(pin,)), evidence, cpu=release.version == CPU)
    return tuple(found)


def _newest_first(release: Release) -> tuple[int, ...]:
    version = version_key(release.version)
    return tuple(-part for part in version.release) if version else (-sys.maxsize,)


def stack_reach(
    matrix: Matrix,
    host: HostFacts,
    stacks: Mapping[str, Mapping[AxisName, str]],
    evidence: Sequence[EvidenceRef] = (),
) -> tuple[Reach, ...]:
    """Judge the cell that each stack (its name, and its pins by axis) resolves to on this machine."""
    return tuple(
        found
        for name, axes in stacks.items()
        for found in _judged(
            matrix,
            host,
            name,
            Request(
                pins=tuple(Pin(axis=axis, spec=spec, origin=f"stack {name}") for axis, spec in axes.items()),
                repository=True,
            ),
            evidence,
            cpu=axes.get("cuda") == CPU,
        )
    )


def _judged(
    matrix: Matrix, host: HostFacts, name: str, request: Request, evidence: Sequence[EvidenceRef], *, cpu: bool
) -> Iterator[Reach]:
    if cpu or not host.gpus:
        yield _one(matrix, host, name, request, evidence, gpu=None, cpu=cpu)
        return
    # Each kind of GPU once; a consumer card is judged apart from the data-center card of the same architecture.
    seen: set[tuple[str, str | None]] = set()
    for gpu in host.gpus:
        release = gpu_release(matrix, gpu)
        board = "geforce" if gpu.geforce else board_of(release, gpu.name, matrix.releases["board"]) if release else None
        kind = (release.version if release else gpu.name, board)
        if kind in seen:
            continue
        seen.add(kind)
        if release is None:
            yield Reach(
                name=name, gpu=gpu.name, runs=False, cell=None, verdict=None,
                why=f"the matrix does not know {gpu.name}{f' (sm_{gpu.sm})' if gpu.sm else ''}", source=None,
            )  # fmt: skip
            continue
        origin = f"this machine's {gpu.name}"
        pinned = [*request.pins, Pin(axis="gpu", spec=release.version, origin=origin)]
        if board is not None:
            pinned.append(Pin(axis="board", spec=board, origin=origin))
        here = replace(request, pins=tuple(pinned))
        yield _one(matrix, host, name, here, evidence, gpu=release.version, cpu=False)


def _one(
    matrix: Matrix,
    host: HostFacts,
    name: str,
    request: Request,
    evidence: Sequence[EvidenceRef],
    *,
    gpu: str | None,
    cpu: bool,
) -> Reach:
    if host.arch in DEBIAN_ARCH and host.arch != X86_64:
        own = Pin(axis=ARCHITECTURE, spec=host.arch, origin="this machine")
        request = replace(request, pins=(*request.pins, own))
    try:
        cell = solve(matrix, request, evidence).cell
    except UsageError as error:  # what a stack asks for is no board of this machine
        return Reach(name=name, gpu=gpu, runs=False, cell=None, verdict=None, why=error.what, source=None)
    except NoCellError as error:
        last = error.conflict.steps[-1] if error.conflict else None
        return Reach(
            name=name, gpu=gpu, runs=False, cell=None, verdict=None,
            why=last.text if last else error.what, source=last.source if last else None,
        )  # fmt: skip
    if cpu:
        return Reach(
            name=name, gpu=None, runs=True, cell=cell.id, verdict=None, why="builds and runs here", source=None
        )
    # The driver that a stack's makers state is not this machine's.
    verdict = driver_verdict(matrix, cell, host.driver) if host.driver else None
    if verdict is None:
        return Reach(
            name=name, gpu=gpu, runs=False, cell=cell.id, verdict=None,
            why="builds here, and runs on a machine with a GPU", source=None,
        )  # fmt: skip
    return Reach(
        name=name,
        gpu=gpu,
        runs=bool(host.gpus) and verdict.verdict != "refused",
        cell=cell.id,
        verdict=verdict.verdict,
        why=verdict.why,
        source=verdict.source,
    )
