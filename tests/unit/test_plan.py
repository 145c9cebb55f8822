"""Stage keys: exactly the inputs that can change a stage's result, and no other."""

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from cell_inputs import changed, complete, inputs_for, inputs_for_stack, keys, plan_for

from envbuild.components import COMPONENTS
from envbuild.components.apex import Apex
from envbuild.errors import NoCellError, UsageError
from envbuild.lock.inputs import inputs_of
from envbuild.lock.make import _caps, _Maker
from envbuild.lock.model import Missing
from envbuild.matrix.load import load_matrix
from envbuild.paths import data_dir
from envbuild.plan import plan as planning
from envbuild.plan.dockerfile import bake, dockerfile
from envbuild.plan.plan import plan_of
from envbuild.plan.shell import script
from envbuild.settings import Settings
from envbuild.stacks.load import load_stack

BASE = {
    "cuda": "13.0",
    "te": "2.12",
    "torch": "2.11.0",
    "apex": "25.09.post20251222",
    "python": "3.11",
    "os": "debian12",
    "base": "debian12-root",
}
HEADLINE = {"cuda": "12.6", "te": "2.6", "gpu": "h100", "flash-attn-hopper": "auto"}
WHEELS = {"wheel-te", "wheel-apex"}
AFTER_WHEELS = {"env", "compiled-megatron-lm", "stack", "image"}  # of a stack that compiles helpers


def plan(**changes):
    return plan_for(**{k: v for k, v in (BASE | changes).items() if v is not None})


# axis -> another value (and what must move with it), the stages that must change, and those that must not.
AXES = {
    "cuda": (
        {"cuda": "12.6", "te": "2.12", "torch": "2.11.0", "base": None, "os": None, "python": None, "apex": "25.08"},
        {"torch", "wheel-te", "wheel-apex"},
        set(),
    ),
    "te": ({"te": "2.11"}, {"wheel-te", "env", "image"}, {"base", "runtime", "torch", "wheel-apex"}),
    "apex": ({"apex": "25.09.post20260708"}, {"wheel-apex", "env", "image"}, {"base", "runtime", "torch", "wheel-te"}),
    "torch": ({"torch": "2.12.0"}, {"torch", "wheel-te", "wheel-apex", "env"}, {"base", "runtime"}),
    "gpu": ({"gpu": "a100"}, {"wheel-apex", "image"}, {"base", "runtime", "torch", "wheel-te"}),
    "os": (
        {"os": "debian13", "base": "debian13-root", "python": "3.13"},
        {"base", "runtime", "torch", "wheel-te", "wheel-apex"},
        set(),
    ),
    # PyPI's toolchain follows from torch's own pins; the other way is the base's nvcc.
    "toolchain": ({"toolchain": "base", "base": None, "os": None, "python": None}, {"wheel-apex", "wheel-te"}, set()),
    "megatron": ({"megatron": "auto"}, {"env", "image"}, {"base", "runtime", "torch", *WHEELS}),
    "deepspeed": ({"deepspeed": "auto"}, {"env", "image"}, {"base", "runtime", "torch", *WHEELS}),
    # TE before 2.15 never looks for it. It is pure Python: no wheel is built.
    "flash-attn-4": (
        {"flash-attn-4": "auto", "te": "2.15"},
        {"env", "image"},
        {"base", "runtime", "torch", "wheel-apex"},
    ),
    "mpi": ({"mpi": "openmpi"}, {"runtime"}, {"base"}),
    "fa3-kernels": (
        {"flash-attn-hopper": "auto", "fa3-kernels": "training-64-128"},
        {"wheel-flash-attn-hopper", "env"},
        {"base", "runtime", "torch", *WHEELS},
    ),
    "base": (
        {"base": "nvidia-cuda-13.0.2-ubuntu24.04", "os": None, "python": None},
        {"base", "runtime", "wheel-apex"},
        set(),
    ),
    "python": (
        {"python": "3.12", "os": "ubuntu24.04", "base": "nvidia-cuda-13.0.2-ubuntu24.04"},
        {"torch", "wheel-te", "wheel-apex"},
        set(),
    ),
}
# Whatever component else may be asked for is one more wheel, and nothing of what was there.
AXES |= {
    axis: ({axis: "auto"}, {f"wheel-{axis}", "env"}, {"base", "runtime", "torch", *WHEELS})
    for axis in COMPONENTS
    if axis not in AXES
}


@pytest.mark.parametrize("axis", sorted(AXES))
def test_every_axis_changes_the_build(axis):
    changes, must, must_not = AXES[axis]
    if axis == "mpi":
        changes = {"mpi": load_matrix().releases["mpi"][0].version}
    before, after = plan(), plan(**changes)
    moved = changed(before, after)
    assert must <= moved
    assert not must_not & moved
    assert dockerfile(before) != dockerfile(after)


def test_every_axis_of_the_matrix_is_covered_derived_or_the_hosts():
    matrix = load_matrix()
    rest = {a.name for a in matrix.axes.values() if a.use not in {"derived", "host"}} - set(AXES)
    assert rest == {"abi"}, f"axes that no test changes: {rest}"
    with pytest.raises(NoCellError):  # rules derive it from torch's build
        plan(abi="pre-cxx11")


def test_derived_axes_are_fixed_by_another():
    matrix = load_matrix()
    fixed = {name for releases in matrix.releases.values() for r in releases for name in r.fixes}
    derived = {a.name for a in matrix.axes.values() if a.use == "derived"}
    assert derived <= fixed


def test_a_driver_is_a_fact_of_the_host_and_changes_no_stage():
    assert keys(plan()) == keys(plan(driver="580.95.05"))


def test_an_unrelated_os_package_leaves_compiled_wheels_alone():
    inputs = inputs_for(**BASE)
    before = plan_of(load_matrix(), complete(inputs))
    after = plan_of(load_matrix(), complete(inputs, overrides={"git": "2.0"}))
    assert not WHEELS & changed(before, after)
    compiler = plan_of(load_matrix(), complete(inputs, overrides={"g++": "13"}))
    libc = plan_of(load_matrix(), complete(inputs, overrides={"libc6": "2.99"}))
    assert changed(before, libc) >= WHEELS
    assert keys(compiler)["runtime"] == keys(before)["runtime"]


def test_an_unrelated_python_package_leaves_compiled_wheels_alone():
    inputs = inputs_for(**BASE)
    before, after = (plan_of(load_matrix(), complete(inputs, overrides=o)) for o in ({}, {"numpy": "9.9"}))
    assert changed(before, after) == {"torch", "env", "image"}


def test_the_date_of_a_lock_changes_the_image_alone():
    inputs = inputs_for(**BASE)
    one = complete(inputs)
    other = type(one)(lock=one.lock.model_copy(update={"epoch": one.lock.epoch + 86400}), pylocks={})
    assert changed(plan_of(load_matrix(), one), plan_of(load_matrix(), other)) == {"image"}


def test_the_same_lock_renders_the_same_bytes():
    assert dockerfile(plan()) == dockerfile(plan())
    assert bake(plan()) == bake(plan())


def test_the_headline_names_its_inputs():
    text = dockerfile(plan_for(**HEADLINE))
    assert "FROM docker.io/nvidia/cuda:12.6.3-cudnn-devel-ubuntu24.04@sha256:" in text
    assert "FROM docker.io/library/ubuntu:24.04@sha256:" in text
    assert "NVIDIA/apex.git#e74a67bb" in text
    assert "Dao-AILab/flash-attention.git#27f501d" in text
    assert "torch==2.8.0+cu126 --hash=sha256:" in text
    assert "download.pytorch.org/whl/cu126" in text
    assert "flash_attn_3/flash_attn_interface.py" in text
    assert 'TORCH_CUDA_ARCH_LIST="9.0"' in text
    assert "--build-option=--cpp_ext --build-option=--cuda_ext" in text
    assert "UNLOCKED" not in text


def test_every_external_input_is_a_stage_of_its_own():
    plan_ = plan_for(**HEADLINE)
    text = dockerfile(plan_)
    for name in plan_.external:
        assert f" AS {name}\n" in text, name


def test_the_toolchain_never_reaches_the_image():
    text = dockerfile(plan_for(**BASE))
    final = text[text.index("FROM torch AS env") :]
    assert "from=builder" not in final
    assert "/opt/toolchain" not in final
    assert "/opt/tools" not in final


def test_what_the_image_carries_is_part_of_its_key():
    plan_ = plan()
    again = plan_of(load_matrix(), complete(inputs_for(**BASE)))
    assert plan_.key == again.key
    carried = plan_.stage("image").inputs["carried"]
    assert {"lock/lock.json", "lock/expected.json", "PATH", "io.envbuild.lock"} <= set(carried)


def test_a_python_that_the_os_has_not_is_uvs_managed_build_by_hash():
    text = dockerfile(plan_for(cuda="13.0", te="2.12", python="3.12", base="debian12-root"))
    assert "FROM scratch AS src-python\nADD --checksum=sha256:" in text
    assert "ENVBUILD_PYTHON=/opt/python/bin/python3.12" in text


def test_a_python_that_neither_os_nor_uv_gives_is_refused_when_resolving():
    releases = load_matrix().releases
    lone = [r.version for r in releases["python"] if r.facts.managed is None]
    own = {r.facts.python: r.version for r in releases["os"]}
    assert lone
    for version in lone:
        for system in {"debian12", "debian13", "ubuntu24.04", "ubuntu22.04"} - {own.get(version)}:
            with pytest.raises(NoCellError):
                inputs_for(cuda="cpu", python=version, os=system)


def test_what_megatron_requires_changes_no_build_tool():
    plain = inputs_for(cuda="13.0", te="2.12", torch="2.11")
    with_megatron = inputs_for(cuda="13.0", te="2.12", torch="2.11", megatron="0.16")
    matrix = load_matrix()
    assert "setuptools<80" in _caps(matrix, with_megatron, compiling=False)
    assert _caps(matrix, with_megatron, compiling=True) == _caps(matrix, plain, compiling=True)


def test_a_release_whose_commit_nobody_knows_cannot_come_from_git():
    matrix = load_matrix()
    unknown = next(r.version for r in matrix.releases["te"] if r.commit is None and r.facts.pypi)
    cell = inputs_for(te=unknown, apex="none").cell
    with pytest.raises(UsageError, match="no commit of te"):
        inputs_of(matrix, cell, te_source="git")


@pytest.mark.parametrize(
    ("te", "cuda_home"),
    [("2.10", "/opt/venv/lib/python3.11/site-packages/nvidia/cu13"), ("2.11", None), ("2.12", None)],
)
def test_a_te_that_does_not_know_cuda_13s_packages_gets_the_place_of_their_libraries(te, cuda_home):
    pinned = {"cuda": "13.0", "torch": "2.11", "te": te, "os": "debian12"}
    assert plan_for(**pinned).environment.get("CUDA_HOME") == cuda_home


def test_what_a_replaced_stage_alone_needs_may_be_missing():
    lock = complete(inputs_for()).lock
    image = Missing(what="digest of x (base)", host="docker.io", stages=("base",))
    builder = Missing(what="tools packages: ninja", host="pypi.org", stages=("builder",))
    both = Missing(what="OS packages on noble: gcc", host="archive.ubuntu.com", stages=("base", "devel"))
    always = Missing(what="env packages: six", host="pypi.org")
    still_missing = lock.model_copy(update={"missing": (image, builder, both, always)}).still_missing
    assert still_missing() == (image, builder, both, always)
    assert still_missing(("base",)) == (builder, both, always)
    assert still_missing(("base", "devel")) == (builder, always)
    assert still_missing(("runtime", "builder")) == (always,)  # what is made on a base does without it


def llama3_70b(**overrides: str) -> planning.Plan:
    stack = load_stack("llama3-70b")
    return plan_of(load_matrix(), complete(inputs_for_stack(stack), overrides=overrides), stack)


def test_how_mpi_is_configured_is_part_of_what_is_built_on_it(monkeypatch):
    before, found = llama3_70b(), planning._compiled_mpi
    more = lambda *cell: found(*cell).model_copy(update={"configure": ("--enable-debug",)})  # noqa: E731
    monkeypatch.setattr(planning, "_compiled_mpi", more)
    assert changed(before, llama3_70b()) == {"wheel-mpi4py", *AFTER_WHEELS}


def test_where_a_module_is_placed_is_part_of_the_environment(monkeypatch):
    before = llama3_70b()
    monkeypatch.setattr(planning, "_placed", lambda *_: ())
    assert changed(before, llama3_70b()) == AFTER_WHEELS


def test_a_builds_own_tools_are_part_of_its_wheel_alone():
    assert changed(llama3_70b(), llama3_70b(cython="3.1")) == {"wheel-mpi4py", *AFTER_WHEELS}


def test_a_te_that_pypi_does_not_have_comes_from_git():
    matrix = load_matrix()
    cell = inputs_for(te="2.0").cell
    made = inputs_of(matrix, cell)
    assert made.te_source == "git"
    assert [t.name for t in made.trees][:1] == ["te"]
    with pytest.raises(UsageError, match=r"PyPI has no Transformer Engine 2\.0\.0"):
        inputs_of(matrix, cell, te_source="pypi")
    assert inputs_of(matrix, inputs_for(te="2.1").cell).te_source == "pypi"


def fa3(cuda: str, release: str = "auto", **more: str) -> planning.Plan:
    return plan_for(cuda=cuda, gpu="h100", flash_attn_hopper=release, apex="none", **more)


@pytest.mark.parametrize(("cuda", "fetches"), [("12.6", True), ("12.9", True), ("12.8", False), ("13.0", False)])
def test_what_flash_attention_3_would_fetch_as_it_builds_is_locked_and_given_to_it(cuda, fetches):
    made = fa3(cuda)
    text = dockerfile(made)
    stages = [name for name in made.external if name.startswith("src-flash-attn-hopper-")]
    assert stages == (["src-flash-attn-hopper-nvcc", "src-flash-attn-hopper-ptxas"] if fetches else [])
    for name in stages:
        place = f"/run/envbuild/downloads/.flashattn/nvidia/{name.rsplit('-', 1)[-1]}"
        assert f"--mount=type=bind,from={name},target={place} " in text
    assert ('FLASH_ATTENTION_HOME="/tmp/envbuild-downloads"' in text) == fetches
    assert text.count("developer.download.nvidia.com/compute/cuda/redist") == (4 if fetches else 0)  # the lock, too


def test_another_compiler_for_flash_attention_3_is_another_wheel(monkeypatch):
    before, found = fa3("12.6"), inputs_for(cuda="12.6", gpu="h100", flash_attn_hopper="auto", apex="none")
    files = tuple(f.model_copy(update={"url": f.url.replace("12.8.93", "12.8.61")}) for f in found.files)
    after = plan_of(load_matrix(), complete(dataclasses.replace(found, files=files)))
    assert changed(before, after) == {"wheel-flash-attn-hopper", "env", "image"}


def test_a_download_whose_hash_nobody_states_leaves_the_lock_incomplete():
    matrix, inputs = load_matrix(), inputs_for(cuda="12.4", gpu="h100", flash_attn_hopper="89c5a7dd", te="none")
    (file,) = [f for f in inputs.files if f.name.startswith("flash-attn-hopper-")]
    maker = _Maker(Settings(cache_dir=Path("/nowhere")), matrix, inputs, lambda _: None, 0)
    assert maker._file(file) == file
    (missing,) = maker.missing
    assert missing.host == "anaconda.org"
    assert missing.stages == ("src-flash-attn-hopper-nvcc",)


def test_what_is_compiled_sees_no_network():
    runs = [line for line in dockerfile(llama3_70b()).splitlines() if line.startswith("RUN ")]
    kinds = ("build-wheel", "build-native", "patch-tree", "step-", "check-")
    compiles = [line for line in runs if any(f"source=/{kind}" in line for kind in kinds)]
    assert len(compiles) == 5 + 4
    assert all(line.startswith("RUN --network=none ") for line in compiles)


def test_a_wheel_for_one_sm_alone_is_compiled_through_its_recipe_and_others_hold_none_of_it(monkeypatch):
    before = plan()
    assert "build-for-sm" not in dockerfile(before) + script(before)
    whole = Apex.wheel
    monkeypatch.setattr(Apex, "wheel", lambda self, view: dataclasses.replace(whole(self, view), only_sms=("90",)))
    after = plan()
    assert changed(before, after) == {"wheel-apex", "env", "image"}
    stage = dockerfile(after).partition("AS build-apex\n")[2].partition("\nFROM ")[0]
    assert "--mount=type=bind,from=recipe,source=/build-for-sm,target=/run/envbuild/recipe/build-for-sm " in stage
    assert "\nsh /run/envbuild/recipe/build-for-sm 90 apex " in stage
    assert "    recipe build-for-sm 90 apex " in script(after)
    other = dockerfile(after).partition("AS build-te\n")[2].partition("\nFROM ")[0]
    assert "\nsh /run/envbuild/recipe/build-wheel te " in other


def test_what_may_hold_nothing_but_templates_is_compiled_through_the_recipe_for_it():
    made = plan(cuda="13.0", flash_attn="auto", flash_attn_hopper="auto", grouped_gemm="auto", causal_conv1d="auto")
    text, bare = dockerfile(made), script(made)
    scripts = {"flash-attn": "build-wheel", "flash-attn-hopper": "build-wheel", "causal-conv1d": "build-for-sm 90"}
    for axis, wheel in scripts.items():
        stage = text.partition(f"AS build-{axis}\n")[2].partition("\nFROM ")[0]
        mount = "--mount=type=bind,from=recipe,source=/build-templates,target=/run/envbuild/recipe/build-templates "
        assert mount in stage
        assert f"sh /run/envbuild/recipe/build-templates {wheel} {axis} " in stage
        assert f"    recipe build-templates {wheel} {axis} " in bare
    # each file of these has its own function, and their kept wheels stay what they are
    for axis in ("apex", "grouped-gemm"):
        stage = text.partition(f"AS build-{axis}\n")[2].partition("\nFROM ")[0]
        assert "build-templates" not in stage
        assert f"sh /run/envbuild/recipe/build-wheel {axis} " in stage
    assert "build-templates" not in dockerfile(plan()) + script(plan())


_FOR_89 = ["-gencode", "arch=compute_89,code=sm_89"]
_FOR_80_AND_100 = [
    *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_100,code=sm_100"),
    *("-gencode", "arch=compute_100,code=compute_100"),
]


@pytest.mark.parametrize(
    ("name", "sms", "given"), [("build-for-sm", "89", _FOR_89), ("build-for-sms", "80,100", _FOR_80_AND_100)]
)
@pytest.mark.parametrize("ccache", [True, False])
def test_the_recipes_for_sms_give_nvcc_those_and_every_other_argument(tmp_path, name, sms, given, ccache):
    recipe = (data_dir("dockerfiles") / "recipe" / name).read_text()
    lists = "-gencode arch=compute_75,code=sm_75 -gencode=arch=compute_80,code=sm_80 --generate-code arch=compute_90,code=sm_90"
    programs = {
        "bin/nvcc": 'printf "%s\\n" "$@"',
        "ccache": '[ "${1##*/}" = nvcc ] && exec "$@"',
        # as torch's extension builder runs nvcc, a shell splitting what PYTORCH_NVCC holds
        "uv": f'echo "$*"; $PYTORCH_NVCC -O3 {lists} "-DX=a b" -c x.cu',
        # what the recipe does before it runs uv
        "build-wheel": ('export PYTORCH_NVCC="$TOP/ccache $CUDA_HOME/bin/nvcc"\n' if ccache else "")
        + 'echo "$*"\n"$ENVBUILD_UV" build --wheel',
        name: recipe.replace("/tmp/", f"{tmp_path}/tmp/"),
    }
    for program, text in programs.items():
        (tmp_path / program).parent.mkdir(exist_ok=True)
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    top = str(tmp_path)
    env = {"PATH": os.environ["PATH"], "TOP": top, "CUDA_HOME": top, "ENVBUILD_UV": f"{top}/uv"}
    command = ["sh", f"{top}/{name}", sms, "some-wheel", "its_cuda"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    compiled = ["-O3", "-DX=a b", "-c", "x.cu", *given]
    assert done.stdout.splitlines() == ["some-wheel its_cuda", "build --wheel", *compiled]


def test_what_a_repository_compiles_sees_the_mpi_that_was_compiled():
    stage = dockerfile(llama3_70b()).partition("AS compiled-megatron-lm\n")[2].partition("\nFROM ")[0]
    assert "--mount=type=bind,from=mpi,target=/opt/openmpi " in stage
    assert 'PATH="/opt/venv/bin:/opt/openmpi/bin:$PATH"' in stage


def test_mpich_on_ubuntu_22_04_lets_processes_fork():
    matrix = load_matrix()
    alcf = load_stack("alcf")
    assert plan_of(matrix, complete(inputs_for_stack(alcf)), alcf).environment["RDMAV_FORK_SAFE"] == "1"
    for cell in ({"mpi": "mpich"}, {"mpi": "openmpi", "os": "ubuntu22.04", "base": None, "python": "3.10"}):
        made = plan(**cell)
        assert made.cell.versions["mpi"] == cell["mpi"]
        assert "RDMAV_FORK_SAFE" not in made.environment
    systems = {release.version for release in matrix.releases["os"]}
    assert all(set(mpi.facts.environment) <= systems for mpi in matrix.releases["mpi"])
