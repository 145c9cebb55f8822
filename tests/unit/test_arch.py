"""The architecture of the host: what a GPU's name says of it, what the rules refuse, and what a cell is then."""

import json
from pathlib import Path

import pytest

from envbuild.doctor.diagnosis import diagnose
from envbuild.doctor.reach import cuda_reach
from envbuild.errors import LockError, NoCellError, UsageError
from envbuild.host import HostFacts
from envbuild.lock.archives import UBUNTU_PORTS, mirrors_of
from envbuild.lock.files import Locked
from envbuild.lock.inputs import inputs_of
from envbuild.lock.make import unlocked, uv_wheel
from envbuild.lock.model import Lock
from envbuild.lock.python import packages_of
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.plan.apptainer import definition
from envbuild.plan.dockerfile import bake, dockerfile
from envbuild.plan.plan import Plan, plan_of
from envbuild.plan.shell import script
from envbuild.settings import Settings
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
    refused = refusal(gpu="gh200", te=te)
    assert (
        "have no aarch64 wheel of transformer_engine_cu12 and transformer_engine_cu13; 2.16.0 and 2.17.1 have"
        in refused
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
        ({"gpu": "t4", "arch": "aarch64"}, "those for sm_75 are left out"),
        ({"gpu": "gb200", "base": "ngc-25.03"}, "read of their x86_64 images"),
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


def plan(**pins: str) -> Plan:
    matrix = load_matrix()
    return plan_of(matrix, Locked(lock=unlocked(matrix, inputs_of(matrix, cell(**pins))), pylocks={}))


@pytest.mark.parametrize("base", ["debian12-root", "nvidia-cuda-13.0.*-ubuntu24.04"])
def test_the_files_of_an_aarch64_cell_say_their_platform(base: str) -> None:
    made = plan(gpu="gh200", base=base)
    text = dockerfile(made)
    assert "\n# Platform linux/arm64: " in text
    outside = [
        line for line in text.splitlines() if line.startswith("FROM ") and line.endswith((" AS base", " AS devel"))
    ]
    assert outside
    assert all(line.startswith("FROM --platform=linux/arm64 ") for line in outside)
    assert {tuple(target["platforms"]) for target in json.loads(bake(made))["target"].values()} == {("linux/arm64",)}
    assert "\n# Platform linux/arm64: " in definition(made)
    assert '!= "Linux aarch64" ]' in script(made)
    assert "x86_64-unknown-linux" not in text
    assert made.lock.uv == uv_wheel("aarch64")
    assert "aarch64" in made.lock.uv.url


def test_the_files_of_an_x86_64_cell_state_no_platform() -> None:
    made = plan(gpu="h100", arch="x86_64")
    assert "platform" not in (dockerfile(made) + definition(made)).casefold().replace("sys_platform", "")
    assert "platforms" not in bake(made)
    assert '!= "Linux x86_64" ]' in script(made)
    assert made.lock.uv == uv_wheel()


def test_a_managed_python_is_of_the_architecture() -> None:
    pins = {"python": "3.12", "os": "debian12"}
    urls = {arch: plan(gpu="h100", arch=arch, **pins).lock.source("python") for arch in ("x86_64", "aarch64")}
    for arch, source in urls.items():
        assert source is not None
        assert f"-{arch}-unknown-linux-gnu" in source.url


def test_no_stage_of_two_architectures_has_one_key() -> None:
    one, other = plan(gpu="h100", torch="2.11.0+cu130"), plan(gpu="h100", torch="2.11.0+cu130", arch="aarch64")
    keys = {stage.name: stage.key for stage in one.stages}
    assert set(keys) == {stage.name for stage in other.stages}
    assert [stage.name for stage in other.stages if stage.key == keys[stage.name]] == []


def package(arch: str) -> dict[str, str]:
    return {"name": "make", "version": "4.3-4.1", "arch": arch, "sha256": "0" * 64, "filename": f"pool/make_{arch}.deb"}


@pytest.mark.parametrize(("gpu", "right", "wrong"), [("gh200", "arm64", "amd64"), ("h100", "amd64", "arm64")])
def test_a_lock_holds_os_packages_of_its_own_architecture_alone(gpu: str, right: str, wrong: str) -> None:
    stated = plan(gpu=gpu).lock.model_dump(mode="json")
    stated["os"][0]["packages"] = [package(right)]
    assert Lock.model_validate(stated).as_cell.arch == cell(gpu=gpu).arch
    stated["os"][0]["packages"] = [package(wrong)]
    with pytest.raises(ValueError, match=f"the lock pins make of {wrong}"):
        Lock.model_validate(stated)


def test_a_lock_of_an_unknown_architecture_is_refused() -> None:
    stated = plan(gpu="gh200").lock.model_dump(mode="json")
    stated["cell"]["arch"] = "riscv64"
    with pytest.raises(ValueError, match="the architecture riscv64"):
        Lock.model_validate(stated)


NAMES = {
    "x86": "ninja-1.13.2-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
    "arm": "ninja-1.13.2-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
    "both libcs": "ninja-1.13.2-py3-none-manylinux_2_17_aarch64.musllinux_1_1_aarch64.whl",
    "musl": "ninja-1.13.2-py3-none-musllinux_1_2_aarch64.whl",
    "any": "ninja-1.13.2-py3-none-any.whl",
}


def pylock(*kinds: str) -> str:
    wheels = "\n".join(
        f'[[packages.wheels]]\nurl = "https://example.org/{NAMES[kind]}"\nhashes = {{ sha256 = "{n:064x}" }}'
        for n, kind in enumerate(kinds, 1)
    )
    return f'lock-version = "1.0"\n[[packages]]\nname = "ninja"\nversion = "1.13.2"\n{wheels}\n'


def test_a_pylock_is_read_for_one_architecture() -> None:
    text = pylock(*NAMES)
    ends = {arch: {digest[-1] for digest in packages_of(text, arch)[0].hashes} for arch in ("x86_64", "aarch64")}
    assert ends == {"x86_64": {"1", "5"}, "aarch64": {"2", "3", "5"}}


def test_a_distribution_without_a_wheel_for_the_architecture_is_named() -> None:
    with pytest.raises(LockError, match=r"ninja 1\.13\.2 has no wheel for aarch64 Linux"):
        packages_of(pylock("x86", "musl"), "aarch64")


def test_ubuntu_keeps_arm64_in_an_archive_of_its_own(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path)
    assert mirrors_of(settings, "noble", "arm64") == (UBUNTU_PORTS, UBUNTU_PORTS)
    assert mirrors_of(settings, "noble") == ("http://archive.ubuntu.com/ubuntu", "http://security.ubuntu.com/ubuntu")
    assert mirrors_of(settings, "bookworm", "arm64") == mirrors_of(settings, "bookworm")
    own = settings.model_copy(update={"ubuntu_mirror": "http://mirror.example/ubuntu"})
    assert mirrors_of(own, "noble", "arm64") == ("http://mirror.example/ubuntu",) * 2


def test_doctor_judges_a_machine_by_its_own_processor() -> None:
    arm = HostFacts(arch="aarch64", os="Ubuntu 24.04", cores=72)
    assert {reach.cell.partition("-aarch64")[1] for reach in cuda_reach(load_matrix(), arm) if reach.cell} == {
        "-aarch64"
    }
    (system,) = (area for area in diagnose(arm) if area.name == "system")
    assert system.satisfied
    assert "not yet built or run" in system.findings[0].what
    (system,) = (area for area in diagnose(HostFacts(arch="ppc64le")) if area.name == "system")
    assert not system.satisfied


@pytest.mark.parametrize(
    "pins",
    [
        {"arch": "aarch64", "cuda": "cpu"},  # PyPI's older aarch64 wheels are CPU builds
        {"arch": "aarch64", "gpu": "l40s"},  # sm_89 runs the kernels for sm_80
        {"gpu": "gh200", "flash_attn_hopper": "3.0.0"},  # CUDA 13's own nvcc compiles it
    ],
)
def test_what_runs_on_aarch64_is_not_refused(pins):
    assert cell(**pins).versions["arch"] == "aarch64"
