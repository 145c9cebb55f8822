"""What the solver costs: one request, a conflict, an enumeration, and the same on a matrix ten times as large.

Run: python benchmarks/bench_solve.py [--json]
"""

import argparse
import contextlib
import datetime as dt
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from envbuild.errors import EnvbuildError, NoCellError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix, load_matrix
from envbuild.matrix.spec import version_key
from envbuild.solver.clauses import compile_matrix
from envbuild.solver.enumerate import enumerate_cells
from envbuild.solver.solve import solve

TYPICAL = [
    {"cuda": "12.6", "te": "2.6"},
    {"cuda": "13.0", "te": "2.12"},
    {"gpu": "h100", "flash-attn-hopper": "auto"},
    {"te": "2.6"},
    {},
    {"cuda": "12.6", "te": "2.6", "gpu": "h100", "driver": "560.35.05", "python": "3.12"},
    {"torch": "2.8", "flash-attn": "auto"},
    {"megatron": "0.14"},
    {"gpu": "b200", "driver": "580.95.05"},
    {"cuda": "cpu"},
    {"base": "debian12-root"},
    {"deepspeed": "auto", "torch": ">=2.6,<2.9"},
]
CONFLICTS = [
    {"te": "2.6", "flash-attn-hopper": "af314d40"},
    {"torch": "1.13", "te": "2.6"},
    {"driver": "470.256.02", "cuda": "13.0"},
    {"gpu": "b200", "cuda": "12.4"},
    {"gpu": "v100", "cuda": "13.0"},
    {"cuda": "12.6", "python": "3.15"},
    {"te": "2.6", "flash-attn": ">=2.8.3", "gpu": "h100", "python": "3.12"},
    {"base": "debian12-root", "cuda": "12.6", "apex": "auto"},
]


def request_of(pins: dict[str, str], prefer: str = "proven") -> Request:
    return Request(pins=tuple(Pin(axis=a, spec=s, origin=f"--{a}") for a, s in pins.items()), prefer=prefer)  # type: ignore[arg-type]


def timed(work: Callable[[], Any], repeat: int = 5) -> float:
    """Return the median time of `work` in milliseconds."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def attempt(matrix: Matrix, pins: dict[str, str]) -> None:
    with contextlib.suppress(NoCellError):
        solve(matrix, request_of(pins))


def random_pins(matrix: Matrix, generator: random.Random) -> dict[str, str]:
    axes = [n for n, a in matrix.axes.items() if a.use != "derived"]
    return {
        axis: generator.choice(matrix.releases[axis]).version
        for axis in generator.sample(axes, generator.randint(1, 4))
        if matrix.releases[axis]
    }


def enlarged(matrix: Matrix, times: int) -> Matrix:
    """Return a matrix with `times` the releases on every axis, and as many rules, related as the real ones are.

    Copy n of a version lives in epoch n, copy n of a name has a suffix, and what a copy states speaks of copies of the
    same number.
    """
    compiled = compile_matrix(matrix)

    def copied(axis: str, version: str, n: int) -> str:
        if not n:
            return version
        return f"{n}!{version}" if version_key(version) and matrix.axes[axis].scheme == "pep440" else f"{version}.{n}"

    def text(axis: str, spec: str, n: int) -> str:
        if any(spec in (r.version, *r.aliases) for r in matrix.releases[axis]):
            return copied(axis, spec, n)
        if re.match(r"[0-9a-f]{7,40}$", spec):
            return "nothing" if n else spec  # only the first copy has commits
        parts = (re.sub(r"(?<![\w.+])(?=\d)", f"{n}!", part) for part in spec.split("||"))
        bare = (f"=={part}.*" if part[0].isdigit() else part for part in parts)
        return "||".join(f"{part},>={n}!0.dev0,<{n + 1}!0.dev0" for part in bare)

    def constraint(axis: str, spec: str | tuple[str, ...], n: int) -> str | tuple[str, ...]:
        if spec == "any" or matrix.axes[axis].scheme == "name":
            mask = compiled.mask(compiled.number[axis], spec)
            values = compiled.values[compiled.number[axis]]
            return tuple(copied(axis, r.version, n) for i, r in enumerate(values) if r is not None and mask >> i & 1)
        return text(axis, spec, n) if isinstance(spec, str) else tuple(text(axis, part, n) for part in spec)

    def constraints(stated: Mapping[str, str | tuple[str, ...]], n: int) -> dict[str, str | tuple[str, ...]]:
        return {axis: constraint(axis, spec, n) for axis, spec in stated.items()}

    return Matrix(
        axes=matrix.axes,
        releases={
            axis: tuple(
                r.model_copy(
                    update={
                        "version": copied(axis, r.version, n),
                        "aliases": () if n else r.aliases,
                        "commit": None if n else r.commit,
                        "date": r.date + dt.timedelta(days=400 * n) if r.date else None,
                        "needs": constraints(r.needs, n),
                        "fixes": {a: copied(a, v, n) for a, v in r.fixes.items()},
                    }
                )
                for n in range(times)
                for r in releases
            )
            for axis, releases in matrix.releases.items()
        },
        rules=tuple(
            rule.model_copy(
                update={
                    "id": f"{rule.id}-{n}" if n else rule.id,
                    "when": constraints(rule.when, n),
                    "needs": constraints(rule.needs, n),
                    "any_of": tuple(constraints(alternative, n) for alternative in rule.any_of),
                }
            )
            for n in range(times)
            for rule in matrix.rules
        ),
        digest=f"{matrix.digest}x{times}",
    )


def measure(matrix: Matrix, *, full: bool) -> dict[str, Any]:
    start = time.perf_counter()
    compile_matrix(matrix)
    figures: dict[str, Any] = {"compile_ms": round((time.perf_counter() - start) * 1e3, 1)}
    generator = random.Random(1)
    requests = [pins for pins in TYPICAL if all(a in matrix.axes for a in pins)]
    solves = [timed(lambda pins=pins: attempt(matrix, pins)) for pins in requests]  # type: ignore[misc]
    figures["solve_ms"] = {"median": round(statistics.median(solves), 1), "max": round(max(solves), 1)}
    mixed = []
    for _ in range(60 if full else 20):
        pins = random_pins(matrix, generator)
        try:
            mixed.append(timed(lambda pins=pins: attempt(matrix, pins), repeat=1))  # type: ignore[misc]
        except EnvbuildError:
            continue
    figures["random_request_ms"] = {"median": round(statistics.median(mixed), 1), "max": round(max(mixed), 1)}
    conflicts = [timed(lambda pins=pins: attempt(matrix, pins), repeat=3) for pins in CONFLICTS]  # type: ignore[misc]
    figures["conflict_ms"] = {"median": round(statistics.median(conflicts), 1), "max": round(max(conflicts), 1)}
    return figures


def growth(matrix: Matrix, large: Matrix, requests: list[dict[str, str]]) -> dict[str, float]:
    """Return how many times longer `requests` take on `large`.

    By the best of five times each, in turn, so that what else the machine does meanwhile weighs on neither side.
    """
    ratios = []
    for pins in requests:
        best = dict.fromkeys(("small", "large"), float("inf"))
        for _ in range(5):
            for which, each in (("small", matrix), ("large", large)):
                start = time.perf_counter()
                attempt(each, pins)
                best[which] = min(best[which], time.perf_counter() - start)
        ratios.append(best["large"] / best["small"])
    return {"median": round(statistics.median(ratios), 1), "max": round(max(ratios), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    start = time.perf_counter()
    matrix = load_matrix()
    answer: dict[str, Any] = {
        "load_ms": round((time.perf_counter() - start) * 1e3, 1),
        "releases": sum(map(len, matrix.releases.values())),
        "rules": len(matrix.rules),
        "matrix": measure(matrix, full=True),
    }
    start = time.perf_counter()
    count = sum(1 for _ in enumerate_cells(matrix, ["cuda", "torch", "te", "python", "gpu"]))
    answer["enumerate"] = {"cells": count, "seconds": round(time.perf_counter() - start, 2)}
    large = enlarged(matrix, 10)
    answer["ten_times"] = measure(large, full=False)
    answer["growth"] = {"solve": growth(matrix, large, TYPICAL), "conflict": growth(matrix, large, CONFLICTS)}
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return
    for key, value in answer.items():
        print(f"{key:12} {value}")


if __name__ == "__main__":
    main()
