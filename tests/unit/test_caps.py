"""Bounds on numpy, pydantic, setuptools, wheel and others: what a cell gets, and that its lock is resolved under them."""

import pytest
from cell_inputs import inputs_for
from packaging.requirements import Requirement

from envbuild.components import COMPONENTS
from envbuild.errors import NoCellError
from envbuild.lock.inputs import inputs_of
from envbuild.lock.make import _caps
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.solve import solve

WATCHED = {"numpy", "pydantic", "setuptools", "wheel", "cuda-bindings"}
AUDIO = [({"torch": "2.10.0+cu130"}, {"torchaudio<2.11"}), ({"torch": "2.11.0+cu130"}, set())]

# What was asked, and all bounds that the lock's resolution gets on the distributions watched.
GETS = [
    ({"torch": "2.1.2"}, {"numpy<2", "setuptools<70", "wheel!=0.46.0,!=0.46.1"}),
    ({"torch": "2.2.2"}, {"numpy<2"}),
    ({"torch": "2.3.1"}, set()),
    ({"torch": "2.10.0+cu130"}, set()),
    ({"torch": "2.11.0+cu130"}, {"setuptools<82"}),
    ({"torch": "2.12.1+cu130"}, {"setuptools<82"}),
    ({"torch": "2.13.0+cu130"}, {"setuptools>=77.0.3"}),
    ({"torch": "2.14.1+cu130"}, {"setuptools>=77.0.3"}),
    ({"megatron": "0.8.0", "torch": "2.8.0"}, {"numpy<2", "setuptools<70"}),
    ({"megatron": "0.12.3", "torch": "2.8.0"}, {"numpy<2"}),
    ({"megatron": "0.14.0", "torch": "2.8.0"}, {"numpy<2", "setuptools<80"}),
    ({"megatron": "0.15.3", "torch": "2.9.0"}, {"numpy<2", "setuptools>=80"}),
    ({"megatron": "0.16.1", "torch": "2.10.0"}, {"setuptools<80"}),
    ({"megatron": "0.19.0", "torch": "2.13.0"}, {"setuptools>=77.0.3", "setuptools>=80"}),
    ({"deepspeed": "0.8.3", "torch": "2.0.1"}, {"numpy<2", "pydantic<2", "setuptools<70", "wheel!=0.46.0,!=0.46.1"}),
    ({"deepspeed": "0.10.3", "torch": "2.3.1"}, {"numpy<2", "pydantic<2"}),
    ({"deepspeed": "0.14.2", "torch": "2.3.1"}, {"numpy<2"}),
    ({"deepspeed": "0.14.5", "torch": "2.3.1"}, set()),
    ({"deepspeed": "0.16.9", "torch": "2.8.0"}, {"pydantic>=2"}),
    ({"flash-attn-4": "4.0.0b11", "torch": "2.12.1"}, {"cuda-bindings<13.5", "setuptools<82"}),
    ({"flash-attn-4": "4.0.0b36", "torch": "2.12.1"}, {"setuptools<82"}),
]


@pytest.fixture(scope="module")
def matrix():
    return load_matrix()


def cell(matrix, asked):
    return solve(
        matrix, Request(pins=tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in asked.items()))
    ).cell


@pytest.mark.parametrize(("asked", "bounds"), GETS, ids=[" ".join(map(" ".join, asked.items())) for asked, _ in GETS])
def test_what_a_cell_gets(matrix, asked, bounds):
    lines = _caps(matrix, inputs_of(matrix, cell(matrix, asked)), compiling=False)
    assert {line for line in lines if Requirement(line).name in WATCHED} == bounds


@pytest.mark.parametrize(("asked", "bounds"), AUDIO)
def test_torchaudio_is_held_where_its_newest_asks_for_no_torch(matrix, asked, bounds):
    lines = _caps(matrix, inputs_of(matrix, cell(matrix, asked)), compiling=False)
    assert {line for line in lines if Requirement(line).name == "torchaudio"} == bounds


def test_build_tools_are_held_to_what_takes_part_in_a_compile(matrix):
    """Megatron compiles nothing, so that its bound on setuptools does not move the tools, and with them every wheel's key."""
    inputs = inputs_of(matrix, cell(matrix, {"megatron": "0.14.0", "torch": "2.8.0", "gpu": "h100"}))
    assert not [line for line in _caps(matrix, inputs, compiling=True) if line.startswith("setuptools")]
    old = inputs_of(matrix, cell(matrix, {"torch": "2.1.2", "gpu": "h100"}))
    assert {"setuptools<70", "wheel!=0.46.0,!=0.46.1"} <= set(_caps(matrix, old, compiling=True))


def test_no_cell_has_bounds_that_exclude_each_other(matrix):
    """setuptools alone is bounded from both sides; a probe for each pair of releases that may meet."""
    met = 0
    for megatron in matrix.releases["megatron"]:
        for torch in ("2.8.0", "2.11.0", "2.13.0", "2.14.1"):
            try:
                lines = _caps(
                    matrix,
                    inputs_of(matrix, cell(matrix, {"megatron": megatron.version, "torch": torch})),
                    compiling=False,
                )
            except NoCellError:
                continue
            met += 1
            specs = [Requirement(line).specifier for line in lines if Requirement(line).name == "setuptools"]
            probes = ("69.5.1", "75.8.0", "79.0.1", "80.9.0", "81.0.0")
            assert any(all(spec.contains(probe) for spec in specs) for probe in probes), (megatron.version, torch)
    assert met > 40


def test_megatron_0_8_has_the_setuptools_that_it_imports(matrix):
    def env(version):
        inputs = inputs_of(matrix, cell(matrix, {"megatron": version, "python": "3.11"}))
        return next(group.requirements for group in inputs.python if group.name == "env")

    assert {"megatron-core==0.8.0", "setuptools"} <= set(env("0.8.0"))
    assert "setuptools" not in env("0.9.0")


def test_megatron_has_the_psutil_that_a_distributed_checkpoint_needs(matrix):
    for version in ("0.8.0", "0.12.3", "0.16.1"):
        inputs = inputs_of(matrix, cell(matrix, {"megatron": version, "python": "3.11"}))
        env = next(group.requirements for group in inputs.python if group.name == "env")
        assert "psutil" in env, version


@pytest.mark.parametrize(
    ("axes", "asked"),
    [
        ({"torch": "2.5", "te": "none", "apex": "none", "python": "3.11", "cuda": "12.4"}, True),
        ({"torch": "2.7", "te": "none", "apex": "none"}, False),
        ({"torch": "2.5", "cuda": "cpu"}, False),
        ({"deepspeed": "0.16.9", "torch": "2.8", "te": "none", "apex": "none"}, True),
    ],
)
def test_setuptools_is_there_where_triton_or_deepspeed_imports_it(axes, asked) -> None:
    """A fused operation ended in `No module named 'setuptools'`: torch asks for it on some versions of Python alone."""
    inputs = inputs_for(**axes)
    stated = [line for group in inputs.python if group.name == "env" for line in group.requirements]
    stated += [line for wheel in inputs.components for line in COMPONENTS[wheel.axis].runtime]
    assert ("setuptools" in stated) is asked
