"""flash-attention 4: an axis of betas from PyPI, installed and not compiled, which Transformer Engine finds from 2.15 on."""

import pytest

from envbuild.errors import NoCellError
from envbuild.lock.inputs import inputs_of
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.solve import solve


@pytest.fixture(scope="module")
def matrix():
    return load_matrix()


def cell(matrix, **asked):
    pins = tuple(Pin(axis=axis.replace("_", "-"), spec=spec, origin=f"--{axis}") for axis, spec in asked.items())
    return solve(matrix, Request(pins=pins)).cell


def env(matrix, **asked):
    inputs = inputs_of(matrix, cell(matrix, **asked))
    assert "flash-attn-4" not in {wheel.axis for wheel in inputs.components}  # pure Python: nothing to compile
    return next(group.requirements for group in inputs.python if group.name == "env")


def test_it_is_in_no_cell_that_did_not_ask_for_it(matrix):
    for asked in ({}, {"gpu": "b200"}, {"te": "2.16"}):
        assert "flash-attn-4" not in cell(matrix, **asked).versions


@pytest.mark.parametrize(("te", "beta"), [("2.15", "4.0.0b8"), ("2.16", "4.0.0b11"), ("2.18", "4.0.0b11")])
def test_te_gets_the_beta_that_it_names(matrix, te, beta):
    found = cell(matrix, flash_attn_4="auto", te=te, gpu="b200")
    assert found.versions["flash-attn-4"] == beta
    assert f"fa4-{beta}" in found.id


def test_its_dsl_is_the_cudas_and_the_version_that_te_tests(matrix):
    on_13 = env(matrix, flash_attn_4="4.0.0b11", cuda="13.0")
    assert {"flash-attn-4[cu13]==4.0.0b11", "nvidia-cutlass-dsl[cu13]==4.4.2"} <= set(on_13)
    on_12 = env(matrix, flash_attn_4="4.0.0b11", cuda="12.8", gpu="h100")
    assert {"flash-attn-4==4.0.0b11", "nvidia-cutlass-dsl==4.4.2"} <= set(on_12)
    newest = env(matrix, flash_attn_4="4.0.0b36", cuda="13.0")
    assert "flash-attn-4[cu13]==4.0.0b36" in newest
    assert not any(line.startswith("nvidia-cutlass-dsl") for line in newest)  # its own floor says it


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ({"te": "2.14"}, "fa4-lookup-none"),
        ({"te": "2.16", "flash_attn_hopper": "auto"}, "fa4-behind-fa3"),
        ({"flash_attn": "2.8.3"}, "fa4-beside-fa2"),  # plain-words: allow beside - the id of a rule
        ({"gpu": "a100"}, "fa4-gpu"),
        ({"gpu": "rtx4090"}, "fa4-gpu"),
        ({"cuda": "11.8", "te": "none"}, "fa4-cuda"),
        ({"cuda": "cpu"}, "fa4-cuda"),
        ({"cuda": "12.8", "driver": "570.172.08"}, "fa4-driver-12"),
    ],
)
def test_where_it_would_not_work_or_be_ignored_it_is_refused(matrix, asked, rule):
    with pytest.raises(NoCellError) as error:
        cell(matrix, flash_attn_4="auto", **asked)
    assert rule in str(error.value)


@pytest.mark.parametrize(
    "asked",
    [
        {"flash_attn": "2.8.1", "te": "2.16"},
        {"cuda": "12.8", "driver": "575.57.08"},
        {"gpu": "rtx5090"},
        {"gpu": "h100", "te": "none"},
    ],
)
def test_where_it_works_there_is_a_cell(matrix, asked):
    assert cell(matrix, flash_attn_4="auto", **asked).versions["flash-attn-4"].startswith("4.0.0b")
