"""What asking costs before anything is built: resolve, plan and render of the headline cell, in process and as a command.

Run: python benchmarks/bench_commands.py [--json] [--runs N]

Wall time on a machine that does other things says little; next to it is the CPU time of the same runs.
"""

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbuild.evidence.refs import evidence_refs
from envbuild.lock.files import Locked
from envbuild.lock.inputs import inputs_of
from envbuild.lock.make import unlocked
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import _load, load_matrix
from envbuild.matrix.spec import public_version, specifiers, version_key
from envbuild.plan.dockerfile import _templates, dockerfile
from envbuild.plan.plan import plan_of
from envbuild.solver.solve import solve

HEADLINE = {"cuda": "12.6", "te": "2.6", "gpu": "h100", "flash-attn-hopper": "auto"}
FLAGS = [word for axis, spec in HEADLINE.items() for word in (f"--{axis}", spec)]


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    target_ms: float | None
    wall_ms: float
    cpu_ms: float
    best_ms: float
    runs: int


def headline() -> str:
    matrix = load_matrix()
    request = Request(pins=tuple(Pin(axis=a, spec=s, origin=f"--{a}") for a, s in HEADLINE.items()))
    inputs = inputs_of(matrix, solve(matrix, request, evidence_refs()).cell)
    return dockerfile(plan_of(matrix, Locked(lock=unlocked(matrix, inputs), pylocks={})))


def forget() -> None:
    """Empty every cache of the process, so that the next run pays for the data files and the template again."""
    for cached in (_load, evidence_refs, _templates, version_key, public_version, specifiers):
        cached.cache_clear()


def in_process(name: str, target_ms: float | None, runs: int, before: Callable[[], None]) -> Figure:
    headline()
    walls, cpus = [], []
    for _ in range(runs):
        before()
        wall, cpu = time.perf_counter(), time.process_time()
        headline()
        walls.append((time.perf_counter() - wall) * 1e3)
        cpus.append((time.process_time() - cpu) * 1e3)
    return _figure(name, target_ms, walls, cpus)


def command(
    name: str, target_ms: float | None, runs: int, arguments: list[str], before: Callable[[], None] = lambda: None
) -> Figure:
    walls, cpus = [], []
    for _ in range(runs):
        before()
        used, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(arguments, stdout=subprocess.DEVNULL, check=True)
        walls.append((time.perf_counter() - wall) * 1e3)
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append((now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime) * 1e3)
    return _figure(name, target_ms, walls, cpus)


def _figure(name: str, target_ms: float | None, walls: list[float], cpus: list[float]) -> Figure:
    return Figure(
        name=name,
        target_ms=target_ms,
        wall_ms=round(statistics.median(walls), 1),
        cpu_ms=round(statistics.median(cpus), 1),
        best_ms=round(min(walls), 1),
        runs=len(walls),
    )


def drop_bytecode() -> None:
    """Remove envbuild's own byte code: the first command after an installation or an edit."""
    found = importlib.util.find_spec("envbuild")
    assert found is not None
    assert found.origin is not None
    for folder in Path(found.origin).parent.rglob("__pycache__"):
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    runs = arguments.runs
    envbuild = [sys.executable, "-m", "envbuild"]
    render = [*envbuild, "render", *FLAGS, "--unlocked"]
    figures = [
        in_process("resolve + plan + render, in process", 100, runs, lambda: None),
        in_process("the same, data files and template read again", None, runs, forget),
        command("envbuild render --unlocked, warm", 300, runs, render),
        command("the same, envbuild's byte code removed", None, max(3, runs // 3), render, drop_bytecode),
        command("envbuild resolve", 300, runs, [*envbuild, "resolve", *FLAGS]),
        command("envbuild --help", None, runs, [*envbuild, "--help"]),
        command("import envbuild.cli", None, runs, [sys.executable, "-c", "import envbuild.cli"]),
        command("the interpreter itself", None, runs, [sys.executable, "-c", "pass"]),
    ]
    load = os.getloadavg()[0]
    if arguments.json:
        answer = {"cores": os.cpu_count(), "load": round(load, 1), "figures": [vars(figure) for figure in figures]}
        print(json.dumps(answer, indent=2))
        return
    print(f"{os.cpu_count()} cores, load {load:.1f}, median of {runs} runs, milliseconds\n")
    print(f"{'':46}{'target':>8}{'wall':>9}{'CPU':>9}{'best wall':>11}")
    for figure in figures:
        target = f"{figure.target_ms:g}" if figure.target_ms else ""
        print(f"{figure.name:46}{target:>8}{figure.wall_ms:>9}{figure.cpu_ms:>9}{figure.best_ms:>11}")


if __name__ == "__main__":
    main()
