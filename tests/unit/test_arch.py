"""The architecture of the host: what a GPU's name says of it, what the rules refuse, and what a cell is then."""

import pytest

from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.solver.nearest import nearest
from envbuild.solver.solve import solve


def request(**pins: str) -> Request:
    return Request(
        pins=tuple(Pin(axis=axis.replace("_", "-"), spec=spec, origin=f"--{axis}") for axis, spec in pins.items())
    )


def cell(**pins: str) -> Cell:
    return solve(load_matrix(), request(**pins)).cell


def refusal(**pins: str) -> str:
    with pytest.raises(NoCellError) as caught:
        cell(**pins)
    return str(caught.value)


@pytest.mark.parametrize(
    "gpu", ["gh200", "GH200", "NVIDIA GH200 480GB", "gb200", "gb300", "GB10", "dgx-spark", "sm_121", "thor", "sm_110"]
)
def test_boards_with_an_arm_processor_make_an_aarch64_cell(gpu: str) -> None:
    found = cell(gpu=gpu)
    assert found.arch == "aarch64"
    assert "-aarch64-" in found.id


@pytest.mark.parametrize("gpu", ["h100", "sm_90", "b200", "sm_100", "rtx5090", "hopper"])
def test_other_boards_stay_x86_64_and_the_cell_does_not_name_it(gpu: str) -> None:
    found = cell(gpu=gpu)
    assert found.arch == "x86_64"
    assert "arch" not in found.versions


def test_stating_x86_64_is_the_same_cell_as_stating_nothing() -> None:
    plain, stated = cell(gpu="h100"), cell(gpu="h100", arch="amd64")
    assert stated.versions["arch"] == "x86_64"
    assert stated.id == plain.id
    assert stated.of_image == plain.of_image


def test_another_architecture_is_another_cell() -> None:
    assert cell(gpu="h100", arch="arm64").of_image.versions["arch"] == "aarch64"
    assert cell(gpu="h100", arch="arm64").digest != cell(gpu="h100").digest


@pytest.mark.parametrize("arch", ["auto", "aarch64", "arm64"])
def test_the_board_agrees_with_an_architecture_that_is_right_or_open(arch: str) -> None:
    assert cell(gpu="gh200", arch=arch).arch == "aarch64"


@pytest.mark.parametrize("gpu", ["gh200", "sm_121"])
def test_an_arm_board_in_an_x86_64_machine_is_refused(gpu: str) -> None:
    with pytest.raises(UsageError, match=r"aarch64.*--arch.*x86_64"):
        cell(gpu=gpu, arch="x86_64")


@pytest.mark.parametrize("te", ["2.16.1", "2.17.0"])
def test_transformer_engine_without_an_aarch64_core_wheel_is_refused_by_name(te: str) -> None:
    said = refusal(gpu="gh200", te=te)
    assert (
        "have no aarch64 wheel of transformer_engine_cu12 and transformer_engine_cu13; 2.16.0 and 2.17.1 have" in said
    )
    assert cell(gpu="h100", te=te).versions["te"] == te


@pytest.mark.parametrize("te", ["2.16.0", "2.17.1"])
def test_its_neighbours_have_one(te: str) -> None:
    assert cell(gpu="gh200", te=te).versions["te"] == te


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"gpu": "gh200", "cuda": "12.6"}, "torch has CUDA wheels for aarch64 on PyPI from 2.11.0"),
        ({"gpu": "gh200", "torch": "2.10"}, "PyPI's older ones are CPU builds"),
        ({"gpu": "t4", "arch": "aarch64"}, "those for sm_75 and sm_86 are left out"),
        ({"gpu": "gb200", "base": "ngc-25.03"}, "read of their x86_64 images"),
        ({"gpu": "gh200", "flash_attn_hopper": "3.0.0"}, "aarch64 archives (linux-sbsa) are not listed"),
        ({"gpu": "gh200", "base": "nvidia-cuda-*-ubuntu20.04"}, "arm64 images of Ubuntu 22.04 and 24.04"),
        ({"gpu": "thor", "te": "auto"}, "leaves sm_110 (Thor) out"),
    ],
)
def test_what_has_no_files_for_aarch64_is_named(pins: dict[str, str], words: str) -> None:
    assert words in refusal(**pins)


def test_the_nearest_cells_keep_the_processor() -> None:
    found = nearest(load_matrix(), request(gpu="gh200", te="2.17.0"))
    assert found
    for near in found:
        assert near.cell.arch == "aarch64"
        assert "arch" not in near.changed


def test_torch_for_aarch64_comes_from_pypi() -> None:
    matrix = load_matrix()
    (rule,) = (rule for rule in matrix.rules if rule.id == "arch-torch")
    assert {matrix.release("torch", version).facts.index for version in rule.needs["torch"]} == {"pypi"}


def test_every_python_that_uv_manages_has_an_aarch64_build() -> None:
    for release in load_matrix().releases["python"]:
        facts = release.facts
        if facts is None or facts.managed is None:
            continue
        assert facts.aarch64 is not None
        assert facts.aarch64.managed == facts.managed.replace("x86_64", "aarch64")
        assert facts.aarch64.sha256 != facts.sha256


def test_what_the_rules_refuse_for_flash_attention_3_is_what_takes_archives() -> None:
    for release in load_matrix().releases["flash-attn-hopper"]:
        archives = getattr(release.facts, "archives", None)
        if archives:
            assert "aarch64 archives" in refusal(gpu="gh200", flash_attn_hopper=release.version), release.version
