"""What `envbuild matrix check` finds, by planting each mistake in a sound matrix."""

import datetime as dt
from pathlib import Path

import pytest
from index_server import Index, wheel

from envbuild.curate.checks import check_matrix
from envbuild.errors import HostError
from envbuild.evidence.trials import Trial, add_trial
from envbuild.matrix.load import load_matrix
from envbuild.settings import Settings

AXIS = '[axis]\nname = "{name}"\ntitle = "{name}"\nabout = "."\nscheme = "{scheme}"\nuse = "{use}"\ndated = {dated}\n'
RELEASE = '[[release]]\nversion = "{version}"\nsource = "PyPI:x==1"\n{more}\n'
RULE = '[[rule]]\nid = "{id}"\nkind = "{kind}"\ntopic = "test"\n{body}\nwhy = "so it is"\nsource = "PyPI:x==1"\n'


class Folder:
    """A matrix of a few axes, to be written with one thing changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.axes = {
            "cuda": ("pep440", "always", "false", {"12.6": "", "13.0": ""}),
            "python": ("pep440", "always", "false", {"3.11": "", "3.12": "", "3.13": ""}),
            "cudnn": ("pep440", "derived", "false", {"9.10.2.21": "", "9.19.0.56": ""}),
            "nccl": ("pep440", "derived", "false", {"2.28.9": ""}),
            "torch": (
                "pep440",
                "always",
                "true",
                {
                    "2.8.0+cu126": self.torch(
                        "12.6", "2025-08-06", "9.10.2.21", "https://download.pytorch.org/whl/cu126"
                    ),
                    "2.11.0+cu130": self.torch("13.0", "2026-03-23", "9.19.0.56", "pypi"),
                },
            ),
            "te": ("pep440", "default", "true", {"2.12.0": 'date = 2026-02-21\nfacts = { pypi = "2.12.0" }'}),
            "flash-attn": ("pep440", "asked", "true", {}),
            "megatron": ("pep440", "asked", "true", {"0.19.2": 'date = 2026-09-18\nfacts = { pypi = "0.19.2" }'}),
            "deepspeed": ("pep440", "asked", "true", {}),
        }
        self.rules = [
            self.rule("te-cuda", when={"te": ">=2.0"}, needs={"cuda": ">=13.0"}),
            self.rule("torch-python", when={"torch": ">=2.9"}, needs={"python": "<3.13"}),
        ]

    @staticmethod
    def torch(cuda, date, cudnn, index):
        return (
            f'date = {date}\nneeds = {{ cuda = "{cuda}" }}\nfixes = {{ cudnn = "{cudnn}", nccl = "2.28.9" }}\n'
            f'facts = {{ index = "{index}", manylinux = "manylinux_2_28", toolkit = "13.0.2" }}'
        )

    @staticmethod
    def rule(rule_id, kind="requires", **parts):
        body = "\n".join(
            f"{key} = {{ " + ", ".join(f'{axis} = "{spec}"' for axis, spec in part.items()) + " }"
            for key, part in parts.items()
        )
        return RULE.format(id=rule_id, kind=kind, body=body)

    def release(self, axis, version, more):
        self.axes[axis][3][version] = more

    def load(self):
        for name, (scheme, use, dated, releases) in self.axes.items():
            text = AXIS.format(name=name, scheme=scheme, use=use, dated=dated)
            text += "".join(RELEASE.format(version=version, more=more) for version, more in releases.items())
            (self.path / f"{name}.toml").write_text(text)
        (self.path / "rules.toml").write_text("".join(self.rules))
        return load_matrix(self.path)

    def found(self, level="error"):
        return [f"{f.where}: {f.text}" for f in check_matrix(self.load(), online=False) if f.level == level]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_a_sound_matrix_has_no_findings(folder):
    assert folder.found("error") == []
    assert folder.found("warning") == []


def test_a_spec_that_matches_nothing(folder):
    folder.rules.append(folder.rule("typo", when={"torch": ">=29"}, needs={"cuda": ">=12.6"}))
    assert folder.found() == ["rule typo: when torch '>=29' matches no release"]


def test_a_release_that_needs_what_is_not_there(folder):
    folder.release("te", "2.13.0", 'date = 2026-03-23\nneeds = { cuda = "14.0" }\nfacts = { pypi = "2.13.0" }')
    assert folder.found() == ["te 2.13.0: needs cuda '14.0', which matches no release"]


def test_a_derived_value_that_is_not_listed(folder):
    folder.release("torch", "2.12.0+cu130", folder.torch("13.0", "2026-05-13", "9.20.0.48", "pypi"))
    assert folder.found("warning") == ["torch 2.12.0+cu130: fixes cudnn 9.20.0.48, which is not listed"]


def test_a_dated_axis_without_a_date(folder):
    folder.release("te", "2.13.0", 'facts = { pypi = "2.13.0" }')
    assert folder.found() == ["te 2.13.0: has no date, and this axis counts in the spread"]


def test_releases_out_of_order(folder):
    folder.release("te", "2.9.0", 'date = 2025-11-11\nfacts = { pypi = "2.9.0" }')
    assert folder.found("warning") == ["te 2.9.0: is after 2.12.0; releases go oldest first"]


def test_a_build_that_needs_another_cuda_than_its_label_says(folder):
    folder.release("torch", "2.12.0+cu130", folder.torch("12.6", "2026-05-13", "9.19.0.56", "pypi"))
    assert folder.found() == ["torch 2.12.0+cu130: is a build for CUDA 13.0 and needs cuda '12.6'"]


def test_evidence_that_is_not_there(folder):
    folder.rules.append(
        folder.rule("proven", when={"torch": "2.11.0"}, needs={"cuda": "13.0"}).replace(
            "PyPI:x==1", "evidence:no-such-run"
        )
    )
    assert "rule proven: rests on evidence:no-such-run, which is not there" in folder.found()


def test_records_next_to_another_matrix_count(folder):
    rule = folder.rule("proven", when={"torch": "2.11.0"}, needs={"cuda": "13.0"})
    folder.rules.append(rule.replace("PyPI:x==1", "evidence:20260101T000000Z"))

    def found():
        return [f.text for f in check_matrix(folder.load(), online=False, folder=folder.path) if f.level == "error"]

    assert found() == ["rests on evidence:20260101T000000Z, which is not there"]
    (folder.path / "evidence").mkdir()
    (folder.path / "evidence" / "20260101T000000Z-0123456789abcdef.json").touch()
    assert found() == []


def test_trials_next_to_another_matrix_count(folder):
    trial = Trial(
        date=dt.date(2026, 11, 23),
        kind="names",
        pair={"te": "2.12.0", "torch": "2.11.0"},
        verdict="passed",
        command="envbuild matrix try te=2.12.0 torch=2.11.0 --kind names",
        inputs="ab" * 32,
    ).sealed()
    rule = folder.rule("tried", when={"torch": "2.11.0"}, needs={"cuda": "13.0"})
    folder.rules.append(rule.replace("PyPI:x==1", f"trial:{trial.id}"))

    def found():
        return [f.text for f in check_matrix(folder.load(), online=False, folder=folder.path) if f.level == "error"]

    assert found() == [f"rests on trial:{trial.id}, which is not there"]
    add_trial(trial, folder.path / "trials")
    assert found() == []


def test_a_rule_that_can_never_apply(folder):
    folder.rules.append(folder.rule("never", when={"te": "2.12.0", "cuda": "12.6"}, needs={"python": "3.12"}))
    assert folder.found("note") == ["rule never: no cell that other rules allow has what it speaks of"]


def test_a_tested_with_rule_that_can_never_apply_is_worth_more(folder):
    folder.rules.append(folder.rule("never", kind="tested-with", when={"te": "2.12.0", "torch": "2.8.0"}))
    assert folder.found("warning") == ["rule never: no cell that other rules allow has what it speaks of"]


def test_a_rule_that_others_make_redundant(folder):
    folder.rules.append(folder.rule("again", when={"te": "2.12.0"}, needs={"cuda": ">=13.0"}))
    notes = folder.found("note")
    assert "rule again: refuses nothing that other rules and needs do not refuse too" in notes


def test_a_release_that_no_cell_can_hold(folder):
    folder.release("te", "2.13.0", 'date = 2026-03-23\nneeds = { python = "3.13" }\nfacts = { pypi = "2.13.0" }')
    folder.rules.append(folder.rule("torch-2.11", when={"cuda": "13.0"}, needs={"torch": "2.11.0"}))
    assert "te 2.13.0: is in no cell: rules and needs refuse all" in folder.found("note")


@pytest.fixture
def index():
    index = Index()
    requires = ["cuda-toolkit==13.0.2", "nvidia-cudnn-cu13==9.19.0.56", "nvidia-nccl-cu13==2.28.9"]
    tags = [f"cp{minor}-cp{minor}-manylinux_2_28_x86_64" for minor in (311, 312)]
    index.add("torch", "2.11.0", *(wheel("torch", "2.11.0", tag, requires) for tag in tags), day="2026-03-23")
    te = wheel("transformer-engine", "2.12.0", "py3-none-any", (), ">=3.10")
    index.add("transformer-engine", "2.12.0", te, day="2026-02-21")
    core = wheel("megatron-core", "0.19.2", "py3-none-any", ["torch>=2.6"], ">=3.11")
    index.add("megatron-core", "0.19.2", core, day="2026-09-18")
    for name in ("flash-attn", "deepspeed", "cuda-toolkit"):
        index.add(name, "1.0", wheel(name, "1.0", "py3-none-any"))
    return index


def online(folder, index):
    with index.served() as url:
        found = check_matrix(folder.load(), online=True, settings=Settings(index_url=url, cache_dir=Path("/nowhere")))
    return [f"{f.where}: {f.text}" for f in found if f.level != "note"]


def test_metadata_that_agrees(folder, index):
    assert online(folder, index) == []


def test_a_cudnn_that_the_wheel_does_not_pin(folder, index):
    folder.release("torch", "2.11.0+cu130", folder.torch("13.0", "2026-03-23", "9.10.2.21", "pypi"))
    assert online(folder, index) == ["torch 2.11.0+cu130: fixes cudnn 9.10.2.21; the wheel's metadata pins 9.19.0.56"]


def test_a_python_without_a_wheel(folder, index):
    folder.rules.pop()
    assert online(folder, index) == ["torch 2.11.0+cu130: has no wheel for Python 3.13"]


def test_a_date_that_is_not_the_upload_s(folder, index):
    folder.release("te", "2.12.0", 'date = 2026-01-27\nfacts = { pypi = "2.12.0" }')
    assert online(folder, index) == ["te 2.12.0: is dated 2026-01-27; its first upload was on 2026-02-21"]


def test_every_component_on_an_index_is_compared_with_it(folder, index):
    folder.axes["grouped-gemm"] = ("pep440", "asked", "true", {})
    for version, day in (("1.1.3", "2026-01-01"), ("1.1.4", "2026-01-03")):
        folder.release("grouped-gemm", version, f"date = {day}")
    index.add("nv-grouped-gemm", "1.1.4", ("nv_grouped_gemm-1.1.4.tar.gz", b"x"), day="2026-01-02")
    assert online(folder, index) == [
        "grouped-gemm 1.1.3: 1.1.3 is not on the index",
        "grouped-gemm 1.1.4: is dated 2026-01-03; its first upload was on 2026-01-02",
    ]


def test_a_python_that_metadata_forbids(folder, index):
    core = wheel("megatron-core", "0.19.2", "py3-none-any", (), ">=3.12")
    index.add("megatron-core", "0.19.2", core, day="2026-09-18")
    assert online(folder, index) == ["megatron 0.19.2: its metadata says Python >=3.12, and cells with 3.11 exist"]


def test_a_torch_that_metadata_forbids(folder, index):
    core = wheel("megatron-core", "0.19.2", "py3-none-any", ["torch>=2.9"])
    index.add("megatron-core", "0.19.2", core, day="2026-09-18")
    assert online(folder, index) == ["megatron 0.19.2: its metadata says torch >=2.9, and cells with 2.8.0+cu126 exist"]


def test_what_is_not_on_the_index(folder, index):
    folder.release("te", "2.13.0", 'date = 2026-03-23\nfacts = { pypi = "2.13.0" }')
    assert online(folder, index) == ["te 2.13.0: transformer-engine 2.13.0 is not on the index"]


def test_an_index_out_of_reach(folder):
    with pytest.raises(HostError, match="cannot be reached"):
        check_matrix(
            folder.load(),
            online=True,
            settings=Settings(index_url="http://127.0.0.1:9/simple", cache_dir=Path("/nowhere")),
        )
