"""The matrix that ships: complete, consistent, quick to load, and right about what people ask most."""

import re
import time
import tomllib

import pytest

from envbuild.curate.checks import check_matrix
from envbuild.curate.schema import as_text, schemas
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import _load, load_matrix
from envbuild.matrix.packages import caps_for, impostors
from envbuild.matrix.spec import matches, version_key
from envbuild.paths import data_dir
from envbuild.solver.solve import solve

TOPICS = {
    "abi", "apex-cuda13", "cpu-build", "cxx-standard", "deepspeed-cuda13", "deepspeed-torch", "driver-compat", "driver-floor",
    "fa3-lookup", "flavor-devel", "fused-rope", "gcc-cuda", "glibc-manylinux", "gpu-arch-cuda", "gpu-arch-torch", "megatron-te",
    "megatron-torch", "ngc-fixed", "nvcc-equals-torch", "python-range", "require-cuda", "root-base-needs-pypi-toolchain",
    "sm90a-hopper", "te-cuda-floor", "te-cudnn-floor", "te-flash-attn-cap",
}  # fmt: skip


@pytest.fixture(scope="module")
def matrix():
    return load_matrix()


def cell(matrix, **asked):
    pins = tuple(Pin(axis=axis.replace("_", "-"), spec=spec, origin=f"--{axis}") for axis, spec in asked.items())
    return solve(matrix, Request(pins=pins)).cell


def test_nothing_is_wrong_with_it(matrix):
    found = [str(finding) for finding in check_matrix(matrix, online=False) if finding.level != "note"]
    assert found == []


def test_every_class_of_rule_is_there(matrix):
    assert {rule.topic for rule in matrix.rules} >= TOPICS


def test_a_rule_says_why_in_one_plain_sentence(matrix):
    for rule in matrix.rules:
        assert 20 <= len(rule.why) <= 240, rule.id
        assert not rule.why.endswith("."), rule.id  # whoever prints it puts the stop
        assert not re.search(r"\b[Tt]his (torch|CUDA|release|version)", rule.why), rule.id  # it names the releases


def test_the_driver_rules_and_the_facts_that_verdicts_rest_on_say_the_same(matrix):
    floors = {rule.when["cuda"]: rule for rule in matrix.rules if rule.topic == "driver-floor"}
    for release in matrix.releases["cuda"]:
        facts = release.facts
        if facts.compat_branches:
            newer, branches = floors[release.version].any_of
            assert newer == {"driver": f">={facts.driver_minor}"}, release.version
            assert branches == {"driver": facts.compat_branches}, release.version
        elif facts.driver_minor:
            rule = next(
                r for cuda, r in floors.items() if release.version in ([cuda] if isinstance(cuda, str) else cuda)
            )
            assert rule.needs == {"driver": f">={facts.driver_minor}"}, release.version


def test_it_loads_in_60_ms():
    took = []
    for _ in range(5):
        _load.cache_clear()
        begun = time.process_time()  # a busy machine gives this test less of the clock
        load_matrix()
        took.append(time.process_time() - begun)
    assert min(took) < 0.06


def test_torch_1_13_to_2_15_with_their_variants(matrix):
    public = {version_key(r.version).base_version for r in matrix.releases["torch"] if "a0" not in r.version}
    minors = {tuple(map(int, version.split(".")[:2])) for version in public}
    assert minors == {(1, 13)} | {(2, minor) for minor in range(16)}
    for version in public:
        variants = {
            r.version.partition("+")[2] for r in matrix.releases["torch"] if r.version.startswith(f"{version}+")
        }
        assert "cpu" in variants
        assert any(variant.startswith("cu") for variant in variants)


def test_every_torch_build_has_one_abi(matrix):
    def spoken_of(rule, release):
        cuda = rule.when.get("cuda", release.needs["cuda"])
        allowed = (cuda,) if isinstance(cuda, str) else cuda
        return matches(matrix.axes["torch"], rule.when["torch"], release) and release.needs["cuda"] in allowed

    rules = [rule for rule in matrix.rules if rule.topic == "abi" and "torch" in rule.when]
    for release in matrix.releases["torch"]:
        if "base" not in release.needs:  # an image's own is ruled by its base
            ruled = [rule.needs["abi"] for rule in rules if spoken_of(rule, release)]
            assert len(ruled) == 1, (release.version, ruled)


def test_a_cuda_build_has_a_cudnn(matrix):
    for release in matrix.releases["torch"]:
        if "+cu" in release.version:
            assert "cudnn" in release.fixes, release.version


def test_commits_are_whole_and_where_they_must_be(matrix):
    for axis in ("apex", "flash-attn-hopper"):
        for release in matrix.releases[axis]:
            assert release.commit or release.version == "ngc"
    assert matrix.release("apex", "25.08").commit == "e74a67bba3ee679f778670e17edc21639008ae0a"
    assert matrix.release("te", "2.6.0").commit == "c90a720765bc01ebb5ba1f70a7ce2d16b2e46d77"
    assert matrix.release("megatron", "0.12.3").commit == "3ea68ad6042cc1204386ae9364358f7c4de1bc37"


def test_cuda_12_6_and_te_2_6(matrix):
    versions = cell(matrix, cuda="12.6", te="2.6").versions
    assert versions["torch"] == "2.8.0+cu126"
    assert versions["apex"] == "25.08"
    assert versions["python"] == "3.12"
    assert versions["base"] == "nvidia-cuda-12.6.3-ubuntu24.04"


def test_the_flash_attention_3_that_te_names(matrix):
    found = cell(matrix, cuda="12.6", te="2.6", gpu="h100", flash_attn_hopper="auto")
    assert found.commits["flash-attn-hopper"].startswith("27f501d")
    assert found.versions["base"] == "nvidia-cuda-12.6.3-ubuntu24.04"
    assert found.versions["apex"] == "25.08"


def test_cuda_13_0_and_te_2_12(matrix):
    versions = cell(matrix, cuda="13.0", te="2.12").versions
    assert versions["torch"] == "2.11.0+cu130"
    assert versions["base"] == "debian12-root"
    assert versions["python"] == "3.11"
    assert versions["apex"] == "25.09.post20251222"  # the tag 25.09 does not build with CUDA 13
    assert versions["toolchain"].startswith("pypi-")


def test_cpu(matrix):
    versions = cell(matrix, cuda="cpu").versions
    assert versions["base"] == "debian12-root"
    assert versions["python"] == "3.11"
    assert versions["torch"].endswith("+cpu")
    assert not {"te", "apex", "gpu", "nvcc", "toolchain", "cudnn", "nccl"} & set(versions)


def test_nothing_is_taken_from_ngc_unasked(matrix):
    for asked in ({}, {"cuda": "13.0"}, {"torch": "2.8"}, {"cuda": "12.9"}):
        assert not cell(matrix, **asked).versions["base"].startswith("ngc-")


def test_caps_follow_the_cell(matrix):
    def held(**asked):
        return {(cap.distribution, cap.spec) for cap in caps_for(matrix, cell(matrix, **asked))}

    assert ("numpy", "<2") in held(megatron="0.12.3", te="2.6", cuda="12.6")
    assert ("transformers", ">=4.31,<5") in held(megatron="0.12.3", te="2.6", cuda="12.6")
    assert ("setuptools", "<82") in held(torch="2.11.0+cu130")
    assert ("pydantic", "<2") in held(deepspeed="0.10.0", torch="2.0.1", te="none")
    assert held(torch="2.8.0+cu126", te="2.6") == {("torchaudio", "<2.11")}


def test_impostors(matrix):
    assert set(impostors(matrix)) == {"apex", "ezpz", "flash-attn-3"}


@pytest.mark.parametrize("name", sorted(schemas()))
def test_published_schemas_are_current(name):
    published = data_dir("matrices").parent / "docs" / "schema" / f"{name}.schema.json"
    assert published.read_text("utf-8") == as_text(schemas()[name]), "run `envbuild matrix schema --write docs/schema`"


def test_every_file_names_its_schema():
    folder = data_dir("matrices")
    for path in folder.glob("*.toml"):
        kind = path.stem if path.stem in {"rules", "packages"} else "axis"
        assert path.read_text("utf-8").startswith(f"#:schema ../docs/schema/{kind}.schema.json\n"), path.name
        tomllib.loads(path.read_text("utf-8"))
