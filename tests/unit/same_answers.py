"""The quick way to an answer against the thorough one: kept data and the search, against checked data and clingo.

Run all of it: python tests/unit/same_answers.py --requests 10000 --seed 1   (`make answers`)
"""

import argparse
import random
import sys
from pathlib import Path

from envbuild.errors import EnvbuildError
from envbuild.evidence.refs import evidence_refs
from envbuild.matrix import load
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import Matrix, load_matrix
from envbuild.paths import data_dir
from envbuild.solver import order
from envbuild.solver.asked import read_request
from envbuild.solver.order import goal_of
from envbuild.solver.propagation import propagate
from envbuild.solver.search import best
from envbuild.solver.solve import Solution, solve


def checked_matrix() -> Matrix:
    """Return this installation's matrix, read from its files and checked, whatever is kept of it."""
    folder = data_dir("matrices")
    return load._checked(folder, sorted(folder.glob("*.toml")), load_matrix().digest)


def random_request(matrix: Matrix, chance: random.Random) -> Request:
    axes = [name for name, axis in matrix.axes.items() if axis.use != "derived" and matrix.releases[name]]
    pins = []
    for axis in chance.sample(axes, chance.randint(0, 4)):
        version = chance.choice(matrix.releases[axis]).version
        short = ".".join(version.split("+")[0].split(".")[:2])
        spec = chance.choice([version, version, short, f">={short}", f"<={short}", "auto", "none"])
        pins.append(Pin(axis=axis, spec=spec, origin=f"--{axis}"))
    if chance.random() < 0.1:
        pins.append(
            Pin(
                axis="driver",
                spec=f"{chance.choice([470, 535, 560, 580])}.{chance.randint(1, 200)}.01",
                origin="--driver",
            )
        )
    return Request(
        pins=tuple({pin.axis: pin for pin in pins}.values()), prefer=chance.choice(["proven", "proven", "newest"])
    )


def answer_of(matrix: Matrix, request: Request) -> object:
    """Return all that a user could see of the answer to a request."""
    try:
        found: Solution = solve(matrix, request, evidence_refs())
    except EnvbuildError as error:
        return type(error).__name__, str(error)
    return (
        dict(found.cell.versions),
        dict(found.cell.commits),
        found.reasons,
        found.left_out,
        [rule.id for rule in (*found.rules, *found.tested_with, *found.notes)],
        [ref.id for ref in found.evidence],
        found.score,
        found.added,
    )


def compare(requests: int, seed: int) -> dict[str, int]:
    """Compare that many random requests; return how each was answered. Raises AssertionError at a difference."""
    kept, checked, chance = load_matrix(), checked_matrix(), random.Random(seed)
    counts = {"cell by the search": 0, "cell by clingo": 0, "refused": 0}
    search = order.best
    for _ in range(requests):
        request = random_request(kept, chance)
        answer = answer_of(kept, request)
        order.best = lambda *_: None
        try:
            thorough = answer_of(checked, request)
        finally:
            order.best = search
        assert answer == thorough, request
        if len(answer) == 2:
            counts["refused"] += 1
            continue
        asked = read_request(kept, request)
        domains = asked.compiled.domains(asked.pinned())
        assert propagate(asked.compiled, domains) is None
        decided = best(asked.compiled, goal_of(asked, evidence_refs(), domains), domains) is not None
        counts["cell by the search" if decided else "cell by clingo"] += 1
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    for how, count in compare(given.requests, given.seed).items():
        print(f"{how:20} {count}")
    print("every answer is the same")
