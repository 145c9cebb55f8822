"""NVIDIA_REQUIRE_CUDA: the drivers that an image starts on, as the container toolkit reads them."""

import pytest
from cell_inputs import plan_for

from envbuild.matrix.driver import Compat, required_driver
from envbuild.matrix.load import load_matrix
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import Plan

NAME = "NVIDIA_REQUIRE_CUDA"


def starts(requirement: str, driver: str) -> bool:
    """Evaluate a requirement as the toolkit does: numbers compared one by one, as far as both versions go."""

    def holds(condition: str) -> bool:
        sign = ">=" if ">=" in condition else "<"
        name, _, version = condition.partition(sign)
        assert name == "driver"
        pairs = list(zip(map(int, driver.split(".")), map(int, version.split(".")), strict=False))
        have, want = [a for a, _ in pairs], [b for _, b in pairs]
        return have >= want if sign == ">=" else have < want

    return any(all(map(holds, word.split(","))) for word in requirement.split())


@pytest.mark.parametrize(
    ("axes", "refused", "started"),
    [
        ({"cuda": "12.6", "gpu": "h100"}, ("520.61.05", "525.60.11", "470.256.02"), ("525.60.13", "535.54.03", "580.65.06")),
        ({"cuda": "13.0", "gpu": "h100"}, ("535.183.01", "575.57.08"), ("580.65.06", "590.44.01")),
        ({"cuda": "12.8", "gpu": "b200"}, ("525.60.13", "565.57.01"), ("570.86.10", "580.65.06")),
        ({"cuda": "12.8", "gpu": "a100,b200"}, ("525.60.11",), ("525.60.13", "570.86.10")),
    ],
)  # fmt: skip
def test_an_image_states_the_lowest_driver_that_starts_it(axes, refused, started):
    plan = plan_for(**axes)
    stated = plan.environment[NAME]
    assert f'{NAME}="{stated}"' in dockerfile(plan)
    assert [d for d in (*refused, *started) if starts(stated, d)] == list(started)


@pytest.mark.parametrize(
    "axes",
    [
        {"cuda": "cpu"},
        {"base": "ngc-25.03", "te": "auto", "apex": "none"},  # NVIDIA's images state their own
    ],
)
def test_no_requirement_where_there_is_none_or_the_base_has_one(axes):
    assert NAME not in plan_for(**axes).environment


def test_cuda_compat_lets_the_branches_start_that_it_extends():
    plan: Plan = plan_for(cuda="12.6", gpu="a100")
    compat = Compat(cuda="12.6", branch="560", branches=("418", "470"), floor="525.60.13")
    stated = required_driver(load_matrix(), plan.cell, compat)
    assert stated == "driver>=525.60.13 driver>=470,driver<471"  # the branch 418 knows no A100
    known = {driver: starts(stated, driver) for driver in ("418.226.00", "470.256.02", "515.105.01", "525.60.13")}
    assert known == {"418.226.00": False, "470.256.02": True, "515.105.01": False, "525.60.13": True}
