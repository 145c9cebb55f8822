"""Within a minor release the last patch is taken, where an earlier patch is what was tested with the rest."""

import re

import pytest
from asking import resolved


@pytest.mark.parametrize(
    ("words", "cell"),
    [
        ("--torch 2.9", "cu128-.*-torch2.9.1-te2.9.0-"),
        ("--te 2.9 --cuda 12.8", "cu128-.*-torch2.9.1-te2.9.0-"),
        ("--te 2.14", "-torch2.11.0-te2.14.1-"),
        ("--torch 2.13", "-torch2.13.0-te2.16.1-"),
        # asked for, it is that patch
        ("--torch 2.9.0", "-torch2.9.0-te2.9.0-"),
        # what a release of Megatron itself locks
        ("--megatron 0.15.3", "-torch2.9.0-te2.9.0-"),
        ("--megatron 0.17.0", "-torch2.11.0-te2.14.0-"),
        ("--megatron 0.17.1", "-torch2.12.0-te2.14.1-"),
        # no other minor release
        ("--cuda 13.0 --te 2.12", "-torch2.11.0-te2.12.0-"),
        ("--cuda 12.6 --te 2.6", "-te2.6.0-"),
        # Transformer Engine 2.16.1 has no core wheel for aarch64
        ("--torch 2.13 --arch aarch64", "-torch2.13.0-te2.16.0-"),
    ],
)
def test_the_last_patch_that_nothing_speaks_against(words, cell) -> None:
    assert re.search(cell, resolved(words).partition("\n")[0])


def test_the_reason_names_the_patches_that_were_tested() -> None:
    line = next(line for line in resolved("--torch 2.9").splitlines() if line.startswith("  te "))
    assert "tested together in earlier patches: cuda 12.8, te 2.9, torch 2.9.0 (mcore-0.15.3-lock)" in line
    assert "tested together with te" not in resolved("--torch 2.9")
