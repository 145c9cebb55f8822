"""Bad data files: each mistake is one DataError that names the file and the key."""

import re
from pathlib import Path

import pytest

from envbuild.components.torch import TorchFacts
from envbuild.errors import DataError, UsageError
from envbuild.matrix.load import load_matrix
from envbuild.matrix.model import Axis, Release
from envbuild.matrix.spec import check_spec, matches

CUDA = """
[axis]
name = "cuda"
title = "CUDA"
about = "The toolkit."
scheme = "pep440"
use = "always"

[[release]]
version = "12.6"
source = "https://docs.nvidia.com/cuda/"
facts = { driver_minor = "525.60.13" }
"""
TORCH = """
[axis]
name = "torch"
title = "PyTorch"
about = "Builds."
scheme = "pep440"
use = "always"
dated = true

[[release]]
version = "2.8.0+cu126"
date = 2025-08-06
source = "PyPI:torch==2.8.0"
needs = { cuda = "12.6" }
fixes = { cudnn = "9.10.2.21" }
facts = { index = "pypi" }
"""
CUDNN = """
[axis]
name = "cudnn"
title = "cuDNN"
about = "It comes with torch."
scheme = "pep440"
use = "derived"

[[release]]
version = "9.10.2.21"
source = "PyPI:torch==2.8.0"
"""
RULES = """
[[rule]]
id = "torch-cuda"
kind = "requires"
topic = "test"
when = { torch = ">=2.8" }
needs = { cuda = ">=12.6" }
why = "so it is"
source = "PyPI:torch==2.8.0"
"""
FILES = {"cuda.toml": CUDA, "torch.toml": TORCH, "cudnn.toml": CUDNN, "rules.toml": RULES}


@pytest.fixture
def folder(tmp_path):
    def write(**changed):
        for name, text in {**FILES, **{f"{key}.toml": value for key, value in changed.items()}}.items():
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def refused(folder: Path, *words: str) -> DataError:
    with pytest.raises(DataError) as caught:
        load_matrix(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert caught.value.where
    assert caught.value.hint
    return caught.value


def test_a_sound_matrix_loads(folder):
    matrix = load_matrix(folder())
    assert set(matrix.axes) == {"cuda", "torch", "cudnn"}
    assert matrix.release("torch", "2.8.0+cu126").facts == TorchFacts(index="pypi")
    assert matrix.rules[0].id == "torch-cuda"
    assert matrix.digest.startswith("sha256:")


def test_the_digest_covers_every_file(folder, tmp_path):
    before = load_matrix(folder()).digest
    other = tmp_path / "other"
    other.mkdir()
    for name, text in {**FILES, "rules.toml": RULES.replace("so it is", "so it was")}.items():
        (other / name).write_text(text)
    assert load_matrix(other).digest != before


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"torch": TORCH.replace("date =", "dated =")}, ["torch.toml", "release.0.dated"]),
        ({"torch": TORCH.replace('source = "PyPI:torch==2.8.0"\n', "")}, ["torch.toml", "release.0.source"]),
        ({"torch": TORCH.replace("PyPI:torch==2.8.0", "I think")}, ["torch.toml", "'I think' is not of a known form"]),
        ({"torch": TORCH.replace('index = "pypi"', 'indx = "pypi"')}, ["torch.toml", "indx"]),
        ({"torch": TORCH.replace("facts = { index", "x = { index")}, ["torch.toml"]),
        ({"torch": TORCH.replace('"always"', '"sometimes"')}, ["torch.toml", "axis.use"]),
        ({"torch": TORCH.replace("2025-08-06", '"a Wednesday"')}, ["torch.toml", "release.0.date"]),
        ({"torch": TORCH.replace("[[release]]", "[[release")}, ["torch.toml", "cannot be read"]),
        ({"torch": TORCH.replace("needs = { cuda", "needs = { cuba")}, ["torch.toml", "'cuba', which no file defines"]),
        ({"torch": TORCH.replace("fixes = { cudnn", "fixes = { cuda")}, ["torch.toml", "is not a derived axis"]),
        ({"torch": TORCH + TORCH[TORCH.index("[[release]]") :]}, ["torch.toml", "listed twice"]),
        ({"torch": TORCH + 'aliases = ["2.8.0+cu126"]\n'}, ["torch.toml", "listed twice"]),
        ({"torch": TORCH + 'commit = "2f1d"\n'}, ["torch.toml", "release.0.commit"]),
        ({"rules": RULES.replace('why = "so it is"\n', "")}, ["rules.toml", "rule.0.why"]),
        ({"rules": RULES.replace('source = "PyPI:torch==2.8.0"\n', "")}, ["rules.toml", "rule.0.source"]),
        ({"rules": RULES + RULES}, ["rules.toml", "two rules are called 'torch-cuda'"]),
        ({"rules": RULES.replace("needs", "with")}, ["rules.toml", "rule.0.with"]),
        ({"rules": RULES.replace("needs = { cuda", "needs = { gpu")}, ["rules.toml", "'gpu', which no file defines"]),
        ({"rules": RULES.replace('needs = { cuda = ">=12.6" }\n', "")}, ["rules.toml", "must require something"]),
        ({"rules": RULES.replace('"requires"', '"inert"')}, ["rules.toml", "`component` is only for kind inert"]),
        ({"rules": RULES.replace('"requires"', '"tested-with"')}, ["rules.toml", "names at least two axes"]),
        ({"rules": RULES.replace('"requires"', '"forbids"')}, ["rules.toml", "rule.0.kind"]),
        ({"rules": RULES.replace('"requires"', '"note"')}, ["rules.toml", "a note has `when`"]),
    ],
)
def test_each_mistake_is_one_clear_error(folder, changed, words):
    refused(folder(**changed), *words)


def test_a_folder_without_axes_says_so(tmp_path):
    refused(tmp_path, "no axis files")


def test_a_file_that_is_not_utf8_says_so(folder):
    where = folder()
    (where / "cuda.toml").write_bytes(CUDA.encode("utf-16"))
    refused(where, "cuda.toml", "cannot be read")


CAP = """
[[cap]]
distribution = "numpy"
spec = "<2"
when = { torch = "<2.3" }
why = "it is compiled against NumPy 1"
source = "pytorch/pytorch#132179"
"""


def test_caps_load(folder):
    assert load_matrix(folder(packages=CAP)).packages.cap[0].distribution == "numpy"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (CAP.replace("<2", "2 or less", 1), ["packages.toml", "not a PEP 440 specifier"]),
        (CAP.replace("torch", "touch", 1), ["packages.toml", "'touch', which no file defines"]),
        (CAP.replace('source = "pytorch/pytorch#132179"\n', ""), ["packages.toml", "cap.0.source"]),
        (CAP.replace('when = { torch = "<2.3" }', "when = {}"), ["packages.toml", "cap.0.when"]),
    ],
)
def test_bad_caps_do_not(folder, text, words):
    refused(folder(packages=text), *words)


@pytest.mark.parametrize(
    "source",
    [
        "https://docs.nvidia.com/cuda/",
        "NVIDIA/apex@25.08:setup.py",
        "NVIDIA/apex@4fcca776",
        "NVIDIA/apex#1748",
        "PyPI:torch==2.8.0",
        "Debian:bookworm/gcc",
        "NGC:pytorch:25.03-py3",
        "image:nvidia/cuda:12.6.3-base-ubuntu24.04",
        "evidence:cu126-py312",
        "run:ptxas --help, CUDA 13.0",
    ],
)
def test_forms_of_a_source(source):
    Release(version="1", source=source)


@pytest.mark.parametrize("source", ["", "somebody", "ftp://example.org/x", "NVIDIA/apex", "PyPI:", "run:", "see above"])
def test_what_is_no_source(source):
    with pytest.raises(ValueError, match=re.escape("is not of a known form")):
        Release(version="1", source=source)


def axis(scheme):
    return Axis(name="x", title="x", about="x", scheme=scheme, use="always")


def release(version, **more):
    return Release(version=version, source="PyPI:x==1", **more)


@pytest.mark.parametrize(
    ("spec", "version", "wanted"),
    [
        ("2.1", "2.1.0", True),
        ("2.1", "2.10.0", False),
        ("2.8.0", "2.8.0+cu126", True),
        ("2.8.0+cu126", "2.8.0+cu126", True),
        ("2.8.0+cu126", "2.8.0+cu128", False),
        (">=2.6,<2.8", "2.7.1", True),
        (">=2.6,<2.8", "2.8.0", False),
        ("2.6 || 2.8", "2.8.0", True),
        ("<=2.8.3", "2.8.3.post1", False),
        ("2.7", "2.7.0a0+7c8ec84dab", True),
        (">=2.0", "ngc", False),
        ("any", "ngc", True),
        (("2.1", "2.3"), "2.3.1", True),
    ],
)
def test_versions(spec, version, wanted):
    assert matches(axis("pep440"), spec, release(version)) is wanted


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [("ngc-25.03", True), ("ngc-*", True), ("!ngc-*", False), ("*-root", False), ("!*-root", True), ("ngc", False)],
)
def test_names(spec, wanted):
    assert matches(axis("name"), spec, release("ngc-25.03")) is wanted


def test_a_commit_is_matched_by_a_prefix_of_seven():
    commit = release("25.08", commit="e74a67bba3ee679f778670e17edc21639008ae0a")
    assert matches(axis("pep440"), "e74a67b", commit)
    assert not matches(axis("pep440"), "e74a67c", commit)


@pytest.mark.parametrize("text", ["about two", "12.6||", "||", ""])
def test_an_unreadable_spec_names_what_to_write(text):
    with pytest.raises(UsageError, match="is not a version and not a PEP 440 specifier") as caught:
        check_spec(axis("pep440"), text)
    assert "envbuild matrix x" in str(caught.value)
