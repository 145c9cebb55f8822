"""Conflicts that end at a release which is used only when it is named: the sentence names each that would do."""

import re

import pytest
from asking import resolved

from envbuild.errors import NoCellError
from envbuild.matrix.cell import Pin
from envbuild.matrix.load import load_matrix
from envbuild.solver.enumerate import enumerate_cells


def why(words: str) -> list[str]:
    with pytest.raises(NoCellError) as refused:
        resolved(words)
    assert refused.value.conflict is not None
    return [step.text for step in refused.value.conflict.steps]


@pytest.mark.parametrize("words", ["--te ngc", "--cuda 13.4", "--cuda 12.5", "--cuda 12.3", "--cudnn 9.17"])
def test_each_image_that_would_do_is_counted(words) -> None:
    flag, spec = words.split()
    pins = (Pin(axis=flag[2:], spec=spec, origin=flag), Pin(axis="base", spec="ngc-*", origin="--base"))
    images = {cell["base"] for cell in enumerate_cells(load_matrix(), ("base",), pins)}
    assert len(images) > 1
    sentence = next(text for text in why(words) if "used only when requested by name" in text)
    named = sentence.partition(" are used")[0]
    count = re.search(r"\((\d+) releases\)", named)
    if count:
        assert int(count[1]) == len(images)
    else:
        assert set(re.findall(r"ngc-[\d.]+", named)) == images
    assert re.search(r"\(--base ngc-[\d.]+ names the first\)", sentence)


def test_what_no_torch_includes_an_image_does() -> None:
    """cuDNN 9.17 is in two images, which were left, and nothing that was left was to include it."""
    step = next(text for text in why("--cudnn 9.17") if text.startswith("cudnn is there only"))
    assert "and no torch that is left does. That leaves base ngc-26.01 and ngc-25.12." in step


def test_many_sources_are_counted() -> None:
    with pytest.raises(NoCellError) as refused:
        resolved("--te ngc")
    assert re.search(r"\(NGC:pytorch:\S+; NGC:pytorch:\S+; NGC:pytorch:\S+; and \d+ more\)", str(refused.value))
