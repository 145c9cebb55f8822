"""Whatever is asked renders, or is refused in words: no request ends in an exception of Python's own."""

import random

import pytest

from envbuild.errors import EnvbuildError
from envbuild.lock.files import Locked
from envbuild.lock.inputs import inputs_of
from envbuild.lock.make import unlocked
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.plan.dockerfile import bake, dockerfile
from envbuild.plan.plan import plan_of
from envbuild.solver.solve import solve


def random_request(chance: random.Random) -> Request:
    matrix = load_matrix()
    axes = [name for name, axis in matrix.axes.items() if axis.use != "derived"]
    chosen = chance.sample(axes, chance.randint(1, 3))
    specs = {a: chance.choice(["auto", "none", *[chance.choice(matrix.releases[a]).version] * 4]) for a in chosen}
    return Request(pins=tuple(Pin(axis=a, spec=s, origin=f"--{a}") for a, s in specs.items()))


@pytest.mark.parametrize("seed", range(4))
def test_a_request_renders_or_is_refused(seed):
    chance = random.Random(seed)
    matrix, rendered = load_matrix(), 0
    for _ in range(50):
        request = random_request(chance)
        try:
            cell = solve(matrix, request).cell
            flavor = cell.versions.get("flavor", "runtime")
            inputs = inputs_of(matrix, cell, flavor=flavor, te_source=chance.choice([None, "git"]))
            plan = plan_of(matrix, Locked(lock=unlocked(matrix, inputs), pylocks={}))
        except EnvbuildError as error:
            assert error.what, request  # noqa: PT017
            continue
        assert dockerfile(plan).startswith("# envbuild: ")
        assert bake(plan)
        rendered += 1
    assert rendered > 20
