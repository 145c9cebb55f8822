"""Requests that an engineer found answered wrong: what was accepted and cannot be, what was refused and runs, and the reasons."""

import json
import re

import pytest
from asking import resolved

from envbuild.errors import NoCellError, UsageError


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--gpu b300 --driver 570", "driver-gpu-blackwell-ultra"),
        ("--gpu gb300 --driver 570", "driver-gpu-blackwell-ultra"),
        ("--gpu NVIDIA_B300_SXM6_AC --driver 575.57.08", "driver-gpu-blackwell-ultra"),
        ("--gpu h200 --driver 550.54.15", "driver-board-h200"),
        ("--gpu h200 --driver 555.42.02", "driver-board-h200"),
        ("--gpu h200-nvl --driver 550.163.01", "driver-board-h200-nvl"),
        ("--gpu h20 --driver 535.129.03", "driver-board-h20"),
        ("--gpu h20 --driver 545.29.06", "driver-board-h20"),
        ("--gpu l20 --driver 545.29.06", "driver-board-l20-l2"),
        ("--gpu l40s --driver 535.54.03", "driver-board-l40s"),
        ("--gpu l4 --driver 525.60.13", "driver-board-l4"),
        ("--gpu h800 --driver 525.60.13", "driver-board-h800"),
        ("--gpu l40 --driver 525.60.13", "driver-board-l40"),
        ("--gpu gb200 --driver 570.86.15", "driver-board-gb200"),
        ("--gpu rtx-pro-6000-server --driver 575.51.03", "driver-board-rtx-pro-6000-server"),
        ("--gpu NVIDIA_GH200_480GB --driver 535.54.03", "driver-board-gh200"),
        ("--gpu h20-3e --driver 535.183.06", "driver-board-h20-3e"),
        ("--gpu h100-nvl --driver 525", "driver-board-h100-nvl"),
        ("--gpu rtx5090d --driver 570.172.08 --cuda 13.0", "driver-compat-sm120"),
        ("--gpu v100 --torch 2.11.0+cu129 --te none", "torch-arch-2.11-cu129"),
        ("--te 2.6 --python 3.9", "te-python-2.5"),
        ("--cuda 13.0 --flash-attn 2.7.2.post1 --torch 2.12", "fa2-cutlass-cuda-13"),
        ("--os ubuntu24.04 --mpi mpich", "mpich-ubuntu24.04"),
        ("--cuda 13.0 --torch 2.9.1 --os debian12 --toolchain pypi-13.0.3", "toolchain-torch-cu130-13.0.0"),
        ("--deepspeed 0.16.9 --base ngc-20.03", "deepspeed-python-0.15"),
        ("--cuda cpu --torch 2.5 --arch aarch64 --python 3.13", "arch-torch-2.5-python"),
        ("--te 2.0 --python 3.9", "te-python-2.0"),
        ("--te 1.10 --python 3.8", "te-python-1.9"),
        ("--megatron 0.11 --te 2.2 --apex none", "fused-rope-mcore-0.10"),
        ("--megatron 0.19 --mamba-ssm auto", "mamba-ssm-megatron"),
        ("--megatron 0.19 --grouped-gemm auto", "grouped-gemm-megatron-0.17"),
        ("--deepspeed 0.5.1 --python 3.10", "deepspeed-python-0.5"),
        ("--deepspeed 0.19.8 --python 3.8", "deepspeed-python-0.19"),
        ("--flash-attn-hopper 3.0.0.post20260815 --python 3.9 --te none", "fa3-python-3.10"),
        ("--flash-attn-hopper 3.0.0b1.post20250621 --python 3.8 --te none", "fa3-python-3.9"),
        ("--te 1.12 --flash-attn-hopper 3.0.0b1.post20240916", "fa3-te-1.12"),
        ("--te 1.11 --flash-attn-hopper 3.0.0b1.post20240725", "fa3-te-1.11"),
        ("--te 2.14 --gpu rtx5090 --torch 2.10 --cuda 12.8", "te-fused-sm120"),
        ("--gpu gb10 --driver 575", "driver-gpu-gb10"),
        ("--os ubuntu18.04 --torch 2.6 --cuda 11.8 --apex auto", "cxx17-gcc"),
        ("--base ngc-25.03 --megatron 0.19.0", "mcore-ngc-0.16"),
        ("--apex 23.05 --python 3.12", "apex-pip-python"),
        ("--apex 24.11 --torch 2.6", "apex-torch-2.6"),
        ("--apex 23.05 --torch 2.8", "apex-torch-2.6"),
        ("--driver 390", "driver-floor-11"),
        ("--base ngc-25.01 --gpu v100", "ngc-gpu-25"),
        ("--base ngc-25.03 --gpu v100", "ngc-gpu-25"),
        ("--base ngc-24.12 --gpu b200", "ngc-gpu-24"),
        ("--gpu h200 --driver 535", "driver-board-h200"),
        ("--gpu gh200 --driver 525", "driver-board-gh200"),
        ("--gpu l40s --driver 525", "driver-board-l40s"),
        ("--gpu rtx-pro-6000-server --driver 570", "driver-board-rtx-pro-6000-server"),
        ("--gpu a4000 --driver 535 --cuda 13.0", "driver-workstation-13"),
        ("--gpu a4000,h100 --driver 535 --cuda 13.0", "driver-workstation-13"),
        ("--gpu rtxpro6000 --driver 575 --cuda 13.0", "driver-compat-sm120"),
        ("--gpu sm_120 --driver 575 --cuda 13.0", "driver-compat-sm120"),
        ("--driver 440.33", "driver-floor-11"),
    ],
)
def test_what_cannot_be_is_refused(words: str, rule: str) -> None:
    with pytest.raises(NoCellError) as refused:
        resolved(words)
    assert rule in str(refused.value)


@pytest.mark.parametrize(
    ("words", "cell"),
    [
        ("--gpu b300 --driver 580", r"cu130-.*-sm103-"),
        ("--gpu h200 --driver 550", r"cu12.*-sm90-"),  # a release of the branch that has it in its list
        ("--gpu h20 --driver 535", r"cu12.*-sm90-"),
        ("--gpu l4 --driver 525.105.17", r"cu12.*-sm89-"),
        ("--gpu l4 --driver 530", r"cu12.*-sm89-"),
        ("--gpu v100 --torch 2.9.1+cu129 --te none", r"cu129-.*-sm70-"),
        ("--megatron 0.9 --te 2.3 --apex none", r"te2\.3\.0-mcore0\.9\.0-"),
        ("--megatron 0.19 --mamba-ssm auto --causal-conv1d auto", r"mcore0\.19"),
        ("--te 2.14 --gpu rtx5090 --torch 2.10 --cuda 12.8 --flash-attn 2.8.3", r"te2\.14.*fa2\.8\.3-sm120-"),
        ("--gpu b200 --driver 570", r"cu12.*-sm100-"),
        ("--base ngc-25.11 --megatron 0.16.1", r"-tengc-apexngc-mcore0\.16\.1-"),
        ("--base ngc-26.06 --megatron 0.19.0", r"-tengc-apexngc-mcore0\.19\.0-"),
        ("--apex 23.05 --torch 2.5", r"-py310-torch2\.5\.1-.*apex23\.05"),
        ("--driver 390 --cuda cpu", r"^cpu-"),
        ("--cuda cpu --driver auto", r"^cpu-"),
        ("--driver R535", r"^cu12"),
        ("--base ngc-24.12 --gpu v100", "^cu126-.*-sm70-"),
        ("--base ngc-25.01 --gpu b200", "^cu128-.*-sm100-"),
        ("--base ngc-24.12 --flash-attn auto", "-fa2"),
        ("--base ngc-25.03 --flash-attn auto", "-fa2"),
        ("--gpu h200 --driver 550", "-sm90-"),
        ("--gpu sm_90 --driver 535", "-sm90-"),
        ("--gpu rtxpro6000 --driver 570", "^cu128-.*-sm120-"),
        ("--gpu rtx-pro-6000-server --driver 575 --cuda 13.0", "^cu130-.*-sm120-"),
        ("--gpu a4000 --driver 535", "^cu12.*-sm86-"),
        ("--gpu a4000 --driver 535 --cuda 13.0 --board data-center", "^cu130-.*-sm86-"),
        ("--gpu a40 --driver 535 --cuda 13.0", "^cu130-.*-sm86-"),
        ("--torch 2.8+cu128", r"cu128-.*-torch2\.8\.0-"),
        ("--torch 2.13+cpu", r"^cpu-.*torch2\.13"),
        ("--gpu A10G", "-sm86-"),
        ("--gpu L20", "-sm89-"),
        ("--gpu A100X", "-sm80-"),
    ],
)
def test_what_runs_is_not_refused(words: str, cell: str) -> None:
    assert re.search(cell, resolved(words).partition("\n")[0])


@pytest.mark.parametrize(
    "words",
    [
        "--gpu rtx4090 --board data-center",
        "--gpu h100 --board geforce",
        "--gpu h100,rtx4090 --board geforce",
        "--gpu h100 --board workstation",
        "--gpu rtx4090 --board workstation",
        "--gpu l40s --board h200",
        "--gpu rtx4090 --board l40s",
    ],
)
def test_a_board_that_a_gpu_does_not_have(words: str) -> None:
    with pytest.raises(UsageError, match="board, which --board asks for"):
        resolved(words)


def test_the_verdict_says_what_an_architecture_is_taken_for() -> None:
    taken = "sm_86 is taken for one; --gpu BOARD says which it is"
    assert taken in resolved("--gpu sm_86 --driver 535 --cuda 13.0")
    assert taken not in resolved("--gpu a40 --driver 535 --cuda 13.0")


def test_a_board_without_a_driver_changes_no_cell() -> None:
    same = {resolved(f"--gpu {gpu}").partition("\n")[0] for gpu in ("h100", "h200", "sm_90")}
    assert len(same) == 1
    assert "board" not in resolved("--gpu h200").partition("driver ")[0]


def test_what_a_board_implies_is_asked_for_by_its_name_once() -> None:
    lines = [line.split() for line in resolved("--gpu gh200 --driver 580").splitlines()]
    assert ["board", "gh200", "asked", "for", "(--gpu", "gh200)"] in lines
    assert ["arch", "aarch64", "asked", "for", "(--gpu", "gh200)"] in lines


def test_what_is_known_of_aarch64_wheels_is_not_called_unknown() -> None:
    """PyTorch's index has them for several releases of CUDA; what is in them is what no source says."""
    with pytest.raises(NoCellError) as refused:
        resolved("--torch 2.8+cu128 --gpu gh200")
    assert "PyTorch's own index has more, for CUDA 12.6 to 13.2, which are not listed here" in str(refused.value)


def test_grace_hopper_needs_the_open_kernel_modules_and_other_hopper_boards_do_not() -> None:
    assert "GH200 needs the driver of NVIDIA's open kernel modules" in resolved("--gpu gh200 --driver 580")
    assert "open kernel modules" not in resolved("--gpu h100 --driver 580")


def test_a_component_that_ranks_lower_is_not_called_impossible() -> None:
    """Transformer Engine would need cuda-compat with this driver, and a cell that starts by itself comes first."""
    assert "left out   te: cells that have it rank lower with this driver; --te auto gives one" in resolved(
        "--gpu a100 --driver 470"
    )
    assert re.search(r"^cu1\d\d-.*-te[12]\.", resolved("--gpu a100 --driver 470 --te auto"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--gpu P100", "it is a Pascal GPU"),
        ("--gpu sm_52", "it is a Maxwell GPU"),
        ("--gpu k80", "it is a Kepler GPU"),
        ("--gpu agx-orin", "it is a Jetson Orin"),
        ("--gpu ampere", "Ampere is sm_80"),
        ("--cuda 12.6.0", "`--nvcc 12.6.0` asks for an update of it"),
        ("--driver 12.6", "12.6 is not a driver version"),
        ("--python 3.12.3", "Python is named by major.minor"),
        ("--torch latest", "`--torch auto --prefer newest` takes the newest that fits"),
    ],
)
def test_what_the_matrix_does_not_have_is_answered_with_the_reason(words, text) -> None:
    with pytest.raises(UsageError) as refused:
        resolved(words)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--base nvcr.io/nvidia/pytorch:25.03-py3", ["base", "ngc-25.03"]),
        ("--base 25.03-py3", ["base", "ngc-25.03"]),
        ("--base 25.03", ["base", "ngc-25.03"]),
        ("--os 22.04", ["os", "ubuntu22.04"]),
        ("--os ubuntu2404", ["os", "ubuntu24.04"]),
        ("--gpu gb200_nvl72 --driver 580", ["gpu", "sm_100"]),
        ("--gpu H20-3e", ["gpu", "sm_90"]),
    ],
)
def test_images_and_boards_are_understood_as_others_write_them(words, line) -> None:
    assert line in [each.split()[:2] for each in resolved(words).splitlines()]


def test_the_driver_of_an_ngc_image_is_judged_by_the_cuda_of_that_image() -> None:
    assert "570.86.15: full; CUDA 12.8.0" in resolved("--base ngc-25.01 --gpu h100 --driver 570.86.15")


def test_a_step_names_all_that_its_rule_leaves() -> None:
    with pytest.raises(NoCellError) as refused:
        resolved("--gpu h100 --cuda 12.1 --os ubuntu24.04")
    assert "That leaves nvcc 12.1.0 and 12.1.1." in str(refused.value)


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (
            "--megatron 0.9 --te 2.3 --apex none",
            ["fused-rope-mcore-0.8", "mcore-without-apex", "mcore-weights-only", "mcore-dist-checkpoint-0.11"],
        ),
        ("--megatron 0.9 --te 1.13 --torch 2.5 --apex auto", []),
        ("--te 2.12 --gpu h100 --flash-attn-hopper 3.0.0", ["flash-attention-3-behind-cudnn", "fa3-context-parallel"]),
        ("--te 2.12 --gpu h100 --flash-attn-hopper 3.0.0b1.post20251021", ["flash-attention-3-behind-cudnn"]),
        ("--te 2.6 --gpu a100 --flash-attn auto", []),
        ("--te 2.6 --gpu h100 --flash-attn auto", ["flash-attention-behind-cudnn"]),
        ("--te 2.6 --gpu h100 --flash-attn-hopper 3.0.0", ["flash-attention-3-behind-cudnn", "fa3-context-parallel"]),
        (
            "--te 2.14 --gpu h100 --flash-attn-hopper 3.0.0b1.post20251021",
            ["flash-attention-3-behind-cudnn", "fa3-context-parallel-2.14"],
        ),
        ("--te 1.13 --gpu h100 --flash-attn auto", ["flash-attention-behind-cudnn-1.x"]),
        ("--te 2.15 --gpu h100 --flash-attn-4 auto", ["flash-attention-4-behind-cudnn"]),
        (
            "--megatron 0.9 --te 2.3 --apex 25.09.post20260114",
            ["fused-rope-mcore-0.8-apex", "mcore-weights-only", "mcore-dist-checkpoint-0.11"],
        ),
        (
            "--megatron 0.11 --torch 2.8 --te 2.2 --apex 25.05",
            ["mcore-weights-only-0.11", "mcore-dist-checkpoint-0.11"],
        ),
        ("--megatron 0.11 --torch 2.6 --te 2.1 --apex 25.05", ["mcore-weights-only-0.11"]),
        ("--megatron 0.12.3 --torch 2.8 --te 2.6 --apex 25.08", ["mcore-dist-checkpoint"]),
        ("--megatron 0.12.3 --torch 2.7 --te 2.6 --apex 25.08", []),
        ("--megatron 0.13 --torch 2.8 --te 2.6 --apex 25.08", []),
        ("--deepspeed 0.15.4 --torch 2.8", ["deepspeed-weights-only", "deepspeed-ops-need-nvcc"]),
        ("--deepspeed 0.16.9 --flavor runtime", ["deepspeed-ops-in-runtime"]),
        ("--deepspeed 0.16.9 --flavor devel --base nvidia-cuda-*", []),
        ("--deepspeed 0.16.9 --base ngc-25.03", []),
        ("--base ngc-25.04 --flash-attn auto --gpu h100", ["ngc-te-flash-attn"]),
    ],
)
def test_what_a_cell_does_without_saying_so_is_noted(words, notes) -> None:
    answer = json.loads(resolved(f"{words} --json"))
    assert [note["rule"] for note in answer["notes"]] == notes
    text = resolved(words)
    assert all(f"note       {note['text']} ({note['source']})" in text for note in answer["notes"])


def test_two_rules_that_refuse_have_both_their_sources() -> None:
    with pytest.raises(NoCellError) as refused:
        resolved("--te >=2.2,<2.7 --python 3.9")
    step = refused.value.conflict.steps[-1]
    assert step.source.count("NVIDIA/TransformerEngine@") == 2
    assert "(rule te-python-2" in step.text


def test_a_gpu_of_a_fleet_that_the_matrix_does_not_have_is_answered_with_the_reason() -> None:
    with pytest.raises(UsageError, match="'p100' in 'p100,h100' names no GPU of the matrix: it is a Pascal GPU"):
        resolved("--gpu p100,h100")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            "--os ubuntu20.04 --gpu h100 --cuda 12.6 --python 3.8",
            "That leaves torch 1.13.0+cpu to 2.15.0+cu132, with gaps (46",
        ),
        ("--torch 2.15 --deepspeed 0.18 --te none", "So no cell has both"),
    ],
)
def test_a_range_with_gaps_is_not_printed_as_one_without(words, text) -> None:
    with pytest.raises(NoCellError) as refused:
        resolved(words)
    assert text in str(refused.value)
