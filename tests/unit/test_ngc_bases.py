"""NVIDIA's PyTorch images as bases: every month since 24.01, and each holds what its notes and its configuration say."""

import pytest

from envbuild.lock.inputs import inputs_of
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.solve import solve

# NVIDIA published no 25.07.
MONTHS = {
    *(f"24.{month:02}" for month in range(1, 13)),
    *(f"25.{month:02}" for month in range(1, 13) if month != 7),
    *(f"26.{month:02}" for month in range(1, 10)),
}

# Read apart from the matrix: tag, torch, CUDA, Python, OS, and what the image has of nvcc, cuDNN and NCCL (None: no source says).
HOLDS = [
    ("24.01", "2.2.0a0+81ea7a4", "12.3", "3.10", "ubuntu22.04", "12.3.2", "8.9.7.29", "2.19.4"),
    ("24.03", "2.3.0a0+40ec155e58", "12.4", "3.10", "ubuntu22.04", "12.4.0", "9.0.0.306", None),
    ("24.07", "2.4.0a0+3bcc3cddb5", "12.5", "3.10", "ubuntu22.04", "12.5.1", "9.2.1.18", "2.22.3"),
    ("24.10", "2.5.0a0+e000cf0ad9", "12.6", "3.10", "ubuntu22.04", "12.6.2", None, None),
    ("24.11", "2.6.0a0+df5bbc0", "12.6", "3.12", "ubuntu24.04", "12.6.3", None, None),
    ("24.12", "2.6.0a0+df5bbc09d1", "12.6", "3.12", "ubuntu24.04", "12.6.3", None, None),
    ("25.01", "2.6.0a0+ecf3bae40a", "12.8", "3.12", "ubuntu24.04", "12.8.0", "9.7.0.66", "2.25.1"),
    ("25.02", "2.7.0a0+ecf3bae40a", "12.8", "3.12", "ubuntu24.04", "12.8.0", "9.7.1.26", "2.25.1"),
    ("25.03", "2.7.0a0+7c8ec84dab", "12.8", "3.12", "ubuntu24.04", "12.8.1", "9.8.0", None),
    ("25.05", "2.8.0a0+5228986c39", "12.9", "3.12", "ubuntu24.04", "12.9.0", "9.10.1", "2.26.5"),
    ("25.06", "2.8.0a0+5228986c39", "12.9", "3.12", "ubuntu24.04", "12.9.1", None, "2.27.3"),
    ("25.08", "2.8.0a0+34c6371d24", "13.0", "3.12", "ubuntu24.04", "13.0.0", "9.12.0", "2.27.7"),
    ("25.10", "2.9.0a0+145a3a7bda", "13.0", "3.12", "ubuntu24.04", "13.0.2", "9.14.0.64", "2.27.7"),
    ("25.12", "2.10.0a0+b4e4ee81d3", "13.1", "3.12", "ubuntu24.04", "13.1.0", "9.17.0.29", "2.28.9"),
    ("26.03", "2.11.0a0+a6c236b9fd1", "13.2", "3.12", "ubuntu24.04", "13.2.0", "9.20.0.48", "2.29.7"),
    ("26.07", "2.13.0a0+9186a08b2c", "13.3", "3.12", "ubuntu24.04", "13.3.1", "9.24.0.43", "2.30.7"),
    ("26.09", "2.14.0a0+b2c75dd062", "13.4", "3.12", "ubuntu24.04", "13.4.1", "9.26.0", "2.31.2"),
]


@pytest.fixture(scope="module")
def matrix():
    return load_matrix()


def cell(matrix, **asked):
    pins = tuple(Pin(axis=axis, spec=spec, origin=f"--{axis}") for axis, spec in asked.items())
    return solve(matrix, Request(pins=pins)).cell


def bases(matrix):
    return {r.version.removeprefix("ngc-"): r for r in matrix.releases["base"] if r.version.startswith("ngc-")}


def test_every_month_since_24_01_is_a_base(matrix):
    assert {tag for tag in bases(matrix) if tag >= "24.01"} == MONTHS


@pytest.mark.parametrize(
    ("tag", "torch", "cuda", "python", "os", "nvcc", "cudnn", "nccl"), HOLDS, ids=[row[0] for row in HOLDS]
)
def test_an_image_holds_what_its_notes_say(matrix, tag, torch, cuda, python, os, nvcc, cudnn, nccl):
    versions = cell(matrix, base=f"ngc-{tag}").versions
    assert (versions["torch"], versions["cuda"]) == (torch, cuda)
    assert (versions["python"], versions["os"]) == (python, os)
    assert (versions["te"], versions["apex"]) == ("ngc", "ngc")
    assert (versions.get("nvcc"), versions.get("cudnn"), versions.get("nccl")) == (nvcc, cudnn, nccl)


def test_base_torch_and_rule_of_an_image_say_the_same(matrix):
    rules = {rule.when["base"]: rule for rule in matrix.rules if rule.topic == "ngc-fixed"}
    for tag, release in bases(matrix).items():
        torch = matrix.release("torch", rules[f"ngc-{tag}"].needs["torch"])
        assert f"ngc-{tag}" in torch.needs["base"]
        assert release.facts.builder == release.facts.runtime == f"nvcr.io/nvidia/pytorch:{tag}-py3"
        assert release.asked  # nothing prefers it by itself


def test_an_image_without_a_digest_gives_the_inputs_of_a_lock(matrix):
    for tag in MONTHS:
        inputs = inputs_of(matrix, cell(matrix, base=f"ngc-{tag}"))
        assert {(image.stage, image.reference, image.digest) for image in inputs.images} == {
            (stage, f"nvcr.io/nvidia/pytorch:{tag}-py3", None) for stage in ("base", "devel")
        }
        assert "torch" in inputs.provided
