"""An image's flavor is stated in addition to the cell: rules judge by it, and the cell stays the same."""

import json

import pytest
from click.testing import CliRunner

from envbuild.cli.axes import request_from
from envbuild.cli.cell_options import asked_from
from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.nearest import nearest
from envbuild.solver.solve import solve

OLD_DRIVER = {"axis_cuda": "12.6", "axis_te": "2.6", "axis_base": "nvidia-cuda-*", "axis_driver": "545.23.08"}


def request(**asked):
    return Request(pins=tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in asked.items()))


def flavor_of(**flags):
    lock = flags.pop("lock", None)
    return [pin.spec for pin in request_from(flags, lock=lock).pins if pin.axis == "flavor"]


@pytest.mark.parametrize("flags", [{}, {"axis_flavor": "runtime"}])
def test_a_driver_that_nvidia_cuda_refuses_starts_the_runtime_flavor(flags):
    solution = solve(load_matrix(), request_from({**OLD_DRIVER, **flags}))
    assert solution.cell.versions["base"] == "nvidia-cuda-12.6.3-ubuntu24.04"
    assert not any(rule.topic == "require-cuda" for rule in solution.rules)


def test_the_same_driver_is_refused_for_the_devel_flavor_with_a_hint():
    asked = request_from({**OLD_DRIVER, "axis_flavor": "devel"})
    with pytest.raises(NoCellError) as caught:
        solve(load_matrix(), asked)
    text = str(caught.value)
    assert (
        "starts from nvidia/cuda 12.6, whose NVIDIA_REQUIRE_CUDA refuses to start under a driver older than 560" in text
    )
    assert "--flavor runtime" in text
    assert {step.pin.axis for step in caught.value.conflict.steps if step.pin} >= {"flavor", "driver"}
    assert nearest(load_matrix(), asked)[0].changed == {"flavor": ("devel", "runtime")}
    newer = request_from({**OLD_DRIVER, "axis_flavor": "devel", "axis_driver": "560.35.05"})
    assert solve(load_matrix(), newer).cell.versions["flavor"] == "devel"


def test_the_flavor_is_no_part_of_a_cell():
    plain, devel = (solve(load_matrix(), request(cuda="12.6", te="2.6", **more)) for more in ({}, {"flavor": "devel"}))
    assert "flavor" not in plain.cell.versions
    assert devel.cell.versions["flavor"] == "devel"
    assert devel.cell.id == plain.cell.id
    assert devel.cell.digest == plain.cell.digest
    assert devel.cell.of_image.versions == plain.cell.versions
    assert "flavor" not in plain.left_out


def test_devel_chooses_a_base_that_holds_a_compiler():
    plain, devel = (solve(load_matrix(), request(cuda="13.0", te="2.12", **more)) for more in ({}, {"flavor": "devel"}))
    assert plain.cell.versions["base"].endswith("-root")
    assert devel.cell.versions["base"].startswith("nvidia-cuda-13.0")
    with pytest.raises(NoCellError, match="holds none"):
        solve(load_matrix(), request(cuda="13.0", te="2.12", flavor="devel", base="debian12-root"))


def test_a_flag_goes_before_the_lock_and_the_lock_before_the_stack():
    assert flavor_of() == []
    assert flavor_of(stack="llm-jp") == ["devel"]
    assert flavor_of(stack="llm-jp", axis_flavor="runtime") == ["runtime"]
    assert flavor_of(stack="llm-jp", lock={"cuda": "11.8", "flavor": "runtime"}) == ["runtime"]
    assert flavor_of(axis_flavor="devel", lock={"cuda": "11.8", "flavor": "runtime"}) == ["devel"]


@pytest.mark.parametrize(("flags", "flavor"), [({}, "runtime"), ({"axis_flavor": "devel"}, "devel")])
def test_what_is_built_has_the_flavor_that_was_asked(flags, flavor):
    asked = asked_from({"axis_cuda": "12.6", "axis_te": "2.6", **flags}, lock_file=None, sources=())
    assert asked.inputs.flavor == flavor
    assert "flavor" not in asked.inputs.cell.versions


def test_resolve_takes_it_and_a_wrong_one_is_named():
    from envbuild.cli.resolve import resolve

    done = CliRunner().invoke(resolve, ["--cuda", "12.6", "--flavor", "devel", "--json"], catch_exceptions=False)
    assert json.loads(done.stdout)["cell"]["flavor"] == "devel"
    with pytest.raises(UsageError, match="no release of flavor matches 'slim'"):
        CliRunner().invoke(resolve, ["--flavor", "slim"], catch_exceptions=False)


def test_what_is_not_in_a_cells_id_describes_a_host_or_a_use():
    matrix = load_matrix()
    host = [name for name, axis in matrix.axes.items() if axis.use == "host"]
    versions = dict.fromkeys(matrix.axes, "1")
    # the architecture is a host's, too, and decides every wheel: only the default is no part of the id (test_arch)
    assert set(versions) - set(Cell(versions=versions).of_image.versions) == set(host) - {"arch"}
