"""Requests that were once answered wrong, each by the flags that a user would write, and what holds beyond them."""

import itertools

import pytest
from small_matrix import best_cell

from envbuild.components import COMPONENTS as COMPONENTS_OF
from envbuild.errors import NoCellError, UsageError
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.driver import driver_verdict
from envbuild.matrix.load import load_matrix
from envbuild.matrix.packages import caps_for
from envbuild.matrix.spec import version_key
from envbuild.matrix.view import CellView
from envbuild.solver.solve import solve

HARDWARE = {"gpu", "driver", "board"}


@pytest.fixture(scope="module")
def matrix():
    return load_matrix()


def request(flags):
    words = flags.split()
    pairs = zip(words[::2], words[1::2], strict=True)
    return Request(pins=tuple(Pin(axis=flag.removeprefix("--"), spec=spec, origin=flag) for flag, spec in pairs))


def cell(matrix, flags):
    return solve(matrix, request(flags)).cell.versions


REFUSED = {
    # flags: a rule that must stand in the conflict
    "--te 2.17 --torch 2.10": "te-torch-2.11",
    "--te 2.18 --torch 2.10 --cuda 13.0": "te-torch-2.11",
    "--te 2.19 --torch 2.9": "te-torch-2.11",
    "--te 1.9 --torch 2.9": "te-onnx",
    "--te 1.13 --torch 2.10": "te-onnx",
    "--deepspeed 0.18.9 --torch 2.14": "deepspeed-cxx20",
    "--deepspeed 0.8.3 --torch 2.1": "deepspeed-cxx17",
    "--deepspeed 0.18.9 --torch 2.3": "deepspeed-custom-op",
    "--deepspeed 0.18.9 --torch 1.13": "deepspeed-custom-op",
    "--megatron 0.9.0 --torch 2.0": "mcore-torch-2.1",
    "--deepspeed 0.8.3 --torch 2.3": "deepspeed-cxx17",
    "--flash-attn-4 4.0.0b36 --torch 2.2": "fa4-torch-2.3",
    "--flash-attn-4 4.0.0b8 --torch 2.1": "fa4-torch-2.3",
    "--flash-attn-hopper 27f501d --torch 2.14 --te none": "fa3-cxx20",
    "--flash-attn-hopper 3.0.0b1.post20250814 --torch 2.15 --te none": "fa3-*",
    "--flash-attn auto --torch 2.14": "cxx-fa2-torch-2.14",
    "--apex 23.11 --torch 2.0": "apex-torch-2.1",
    "--apex 22.03 --torch 2.0": "apex-six",
    "--apex 22.03 --torch 2.1": "apex-six",
    "--megatron 0.15 --python 3.13": "mcore-numpy-python",
    "--megatron 0.14 --python 3.13": "mcore-numpy-python",
    "--megatron 0.12.3 --python 3.12": "mcore-wheel-python-0.8",
    "--megatron 0.8 --python 3.9": "mcore-wheel-python-0.8",
    "--megatron 0.13 --base ngc-25.03": "mcore-wheel-python-0.8",
    "--megatron 0.19 --python 3.14": "mcore-wheel-python-0.14",
    "--megatron 0.10 --arch aarch64": "mcore-wheel-aarch64",
    "--te 2.0 --cuda 12.6 --base debian12-root": "te-git-needs-nvcc",
    "--flash-attn 2.6.3 --gpu b200 --te none": "fa2-blackwell",
    "--flash-attn 2.6.3 --gpu b200": "fa2-blackwell",
    "--flash-attn 2.7.1.post4 --gpu rtx5090 --te none": "fa2-blackwell",
    "--te 1.13 --gpu b200": "te-blackwell-1",
    "--te 1.9 --gpu b300 --apex none": "te-blackwell-1",
    "--torch 2.12 --cuda 13.0 --flavor devel": "cudnn-9.20-devel",
    "--torch 2.13 --cuda 13.2 --flavor devel": "cudnn-9.20-devel",
    "--flash-attn 2.8.3 --torch 2.1": "fa2-torch-2.2",
    "--flash-attn 2.7.4.post1 --torch 2.0": "fa2-torch-2.2",
    "--flash-attn 2.7.4.post1 --cuda 11.6": "fa2-cuda-11.7",
    "--driver 550 --gpu b200": "driver-gpu-blackwell",
    "--driver 565 --gpu rtx5090": "driver-gpu-blackwell",
    "--driver 590 --gpu v100": "driver-gpu-volta",
    "--driver 470.256.02 --gpu h100": "driver-gpu-hopper",
    "--driver 515.65.01 --gpu l4": "driver-gpu-ada",
    "--driver 450.80.02 --gpu rtx3090": "driver-gpu-ga102",
    "--apex 25.09 --cuda 13.0": "apex-cuda-13",
}


@pytest.mark.parametrize(("flags", "rule"), REFUSED.items())
def test_refused(matrix, flags, rule):
    with pytest.raises(NoCellError) as caught:
        solve(matrix, request(flags))
    found = {step.rule for step in caught.value.conflict.steps if step.rule}
    assert any(name == rule or (rule.endswith("*") and name.startswith(rule[:-1])) for name in found), caught.value


FOUND = {
    # flags: what the cell must hold; a value that ends in * is a prefix
    "--te 2.17 --torch 2.11": {"torch": "2.11*"},
    "--te 2.20 --torch 2.10": {"te": "2.20.2"},
    "--te 1.13 --torch 2.8": {"torch": "2.8*"},
    "--deepspeed 0.19 --torch 2.14": {"deepspeed": "0.19.8"},
    "--deepspeed 0.18.9 --torch 2.4": {"deepspeed": "0.18.9", "torch": "2.4*"},
    "--deepspeed 0.18.2 --torch 2.3": {"deepspeed": "0.18.2"},
    "--deepspeed 0.19.8 --torch 2.3": {"deepspeed": "0.19.8"},
    "--apex 23.10 --torch 2.0": {"apex": "23.10"},
    "--apex 22.03 --torch 1.13": {"apex": "22.03"},
    "--megatron 0.16 --python 3.13": {"python": "3.13"},
    "--megatron 0.13.1 --cuda 12.6 --te 2.6": {"python": "3.10", "os": "ubuntu22.04"},
    "--megatron 0.11 --arch aarch64": {"python": "3.11"},
    "--te 2.0 --cuda 12.6": {"base": "nvidia-cuda-12.6*"},
    "--flash-attn 2.7.3 --gpu b200 --te none": {"flash-attn": "2.7.3"},
    "--torch 2.12 --cuda 13.0": {"cudnn": "9.20.0.48", "base": "debian12-root"},
    "--torch 2.8 --cuda 12.8 --gpu v100": {"torch": "2.8.0+cu128"},
    "--torch 2.8 --cuda 12.9 --gpu v100": {"torch": "2.8.0+cu129"},
    "--torch 2.11.0+cu128": {"cudnn": "9.19.0.56"},
    "--flash-attn 2.7.3 --torch 2.1": {"flash-attn": "2.7.3"},
    "--flash-attn 2.8.3 --torch 2.2": {"torch": "2.2*"},
    "--flash-attn 2.5.8 --cuda 11.6": {"flash-attn": "2.5.8", "base": "nvidia-cuda-11.6.2*"},
    "--flash-attn 2.6.3 --cuda 11.7": {"flash-attn": "2.6.3", "base": "nvidia-cuda-11.7.1*"},
    "--apex 23.05 --cuda 11.7": {"base": "nvidia-cuda-11.7.1*"},
    "--gpu l40s --cuda 11.7 --te none --apex none": {"torch": "2.0.1+cu117"},
    "--gpu l40s --cuda 11.6": {"torch": "1.13.1+cu116"},
    "--torch 2.9 --cuda 12.9": {"torch": "2.9*+cu129"},
    "--torch 2.10 --cuda 12.9": {"torch": "2.10.0+cu129"},
    "--torch 2.11 --cuda 12.9": {"torch": "2.11.0+cu129"},
    "--torch 2.12 --cuda 12.9": {"torch": "2.12.1+cu129"},
    "--torch 2.13 --cuda 12.9": {"torch": "2.13.0+cu129"},
    "--driver 535 --cuda cpu": {"torch": "*+cpu"},
    "--driver 580.95.05 --gpu v100": {"gpu": "sm_70"},
    "--driver 570 --gpu b200": {"gpu": "sm_100"},
    "--flash-attn-hopper 3.0.0": {"flash-attn-hopper": "3.0.0"},
    "--flash-attn-hopper ==3.0.0": {"flash-attn-hopper": "3.0.0"},
    "--apex 25.09": {"apex": "25.09"},
    "--apex ==25.09": {"apex": "25.09"},
    "--apex 24.04": {"apex": "24.04"},
    "--cuda 11.8": {"torch": "2.6.0+cu118"},
    "--torch 2.2 --cuda 11.8": {"torch": "2.2.2+cu118"},
    "--torch 2.7": {"torch": "2.7.1+cu126", "te": "2.5.0"},
    "--te 2.0 --cuda 12.6 --gpu a100": {"torch": "2.7.1+cu126"},
}


@pytest.mark.parametrize(("flags", "wanted"), FOUND.items())
def test_found(matrix, flags, wanted):
    versions = cell(matrix, flags)
    for axis, text in wanted.items():
        begin, star, end = text.partition("*")
        found = versions[axis]
        assert found == text if not star else found.startswith(begin) and found.endswith(end), (axis, found)


CAPS = {
    # flags: a bound that the lock of Python packages must get
    "--deepspeed 0.8.3 --torch 2.0": ("pydantic", "<2"),
    "--deepspeed 0.8.0 --torch 1.13": ("pydantic", "<2"),
    "--deepspeed 0.14.2 --torch 2.3": ("numpy", "<2"),
    "--megatron 0.15": ("setuptools", ">=80"),
    "--megatron 0.14": ("setuptools", "<80"),
    "--megatron 0.16": ("setuptools", "<80"),
}


@pytest.mark.parametrize(("flags", "bound"), CAPS.items())
def test_bound(matrix, flags, bound):
    caps = {(cap.distribution, cap.spec) for cap in caps_for(matrix, solve(matrix, request(flags)).cell)}
    assert bound in caps


def test_bounds_of_one_cell_leave_a_version(matrix):
    flags = [f"--megatron 0.{minor}" for minor in range(8, 20)]
    flags += [f"--deepspeed {r.version}" for r in matrix.releases["deepspeed"] if r.version != "0.5.1"]
    for asked in flags:
        bounds = {}
        for cap in caps_for(matrix, solve(matrix, request(asked)).cell):
            bounds.setdefault(cap.distribution, set()).add(cap.spec)
        assert {"<80", ">=80"} - bounds.get("setuptools", set()), asked
        assert {"<2", ">=2"} - bounds.get("pydantic", set()), asked


def test_no_cell_needs_numpy_1_on_a_python_that_has_none(matrix):
    # NumPy 1's last wheels, of 1.26.4, are for CPython 3.12 and older
    bounded = [cap for cap in matrix.packages.cap if (cap.distribution, cap.spec) == ("numpy", "<2")]
    assert len(bounded) >= 3
    for cap in bounded:
        ((axis, spec),) = cap.when.items()
        for release in matrix.releases[axis]:
            if "ngc" in release.version or release.date is None:
                continue
            for python in ("3.13", "3.14"):
                cell = best_cell(matrix, request(f"--{axis} {release.version} --python {python}"))
                caps = () if cell is None else caps_for(matrix, cell)
                assert all(c.spec != "<2" or c.distribution != "numpy" for c in caps), spec


def test_te_without_a_core_wheel_is_compiled_by_an_nvcc(matrix):
    tried = 0
    for release in matrix.releases["te"]:
        if release.commit is None:
            continue
        for major in {"12", "13"} - set(release.facts.core):
            asked = f"--te {release.version} --cuda >={major}.0,<{int(major) + 1} --nvcc none"
            with pytest.raises(NoCellError):
                solve(matrix, request(asked))
            tried += 1
    assert tried >= 10


def test_te_from_git_is_refused_where_there_is_no_nvcc(matrix):
    def wheel(flags):
        chosen = solve(matrix, request(flags)).cell
        return COMPONENTS_OF["te"].wheel(CellView(matrix=matrix, cell=chosen, sources={"te": "git"}))

    with pytest.raises(UsageError, match="no nvcc"):
        wheel("--cuda 12.8 --te 2.8 --base debian12-root")
    assert wheel("--cuda 12.6 --te 2.6").nvcc
    assert wheel("--cuda 13.0 --te 2.12 --base debian12-root").nvcc


@pytest.mark.parametrize(
    ("te", "rule"), [("1.13", "te-kernels-need-nvcc"), ("2.3", "te-kernels-need-nvcc"), ("2.6", "te-setup-needs-nvcc")]
)
def test_te_before_2_8_is_refused_where_there_is_no_nvcc(matrix, te, rule):
    """TE 2.6 on a Debian root was accepted, and its setup.py ended with an UnboundLocalError."""
    with pytest.raises(NoCellError) as refused:
        solve(matrix, request(f"--cuda 12 --te {te} --os debian12"))
    assert rule in {step.rule for step in refused.value.conflict.steps}
    assert "nvcc" in solve(matrix, request(f"--cuda 12 --te {te}")).cell.versions
    assert "nvcc" not in solve(matrix, request("--cuda 12 --te 2.8 --os debian12")).cell.versions


def test_a_rule_on_hardware_does_not_hang_on_a_component_that_may_be_left_out(matrix):
    """A rule on a GPU or a driver names at most one component that may be missing in a cell.

    With two, leaving one out would lift the bound on the other, and no GPU is kinder to flash-attention for want of TE.
    """
    optional = {name for name in COMPONENTS_OF if matrix.axes[name].use in {"asked", "default"}}
    assert {"te", "apex", "flash-attn", "flash-attn-hopper", "megatron", "deepspeed"} <= optional
    for rule in matrix.rules:
        if not rule.refuses:
            continue
        # one that has to be there (`with`) cannot be left out
        named = {*rule.when, *rule.needs, *rule.without, *rule.same, *itertools.chain(*rule.any_of)}
        if named & HARDWARE:
            assert len(named & optional) <= 1, rule.id


def test_cuda_13_5_is_a_release_of_pypi_and_no_torch_is_built_for_it(matrix):
    assert "pypi-13.5.0" in {r.version for r in matrix.releases["toolchain"]}
    assert matrix.release("cuda", "13.5").source == "PyPI:cuda-toolkit==13.5.0"
    with pytest.raises(NoCellError, match=r"cuda 13\.5"):
        solve(matrix, request("--cuda 13.5"))


SPELLED = {
    "gpu": {
        "H100": "sm_90", "NVIDIA H100 80GB HBM3": "sm_90", "sm_90a": "sm_90", "9.0": "sm_90", "90": "sm_90",
        "SM90": "sm_90", "compute_100f": "sm_100", "12.0": "sm_120", "Tesla V100-SXM2-32GB": "sm_70",
        "A100-SXM4-80GB": "sm_80", "NVIDIA GeForce RTX 4090 Laptop GPU": "sm_89", "rtx 4070 super": "sm_89",
        "RTX-3060": "sm_86", "GTX 1660 Ti": "sm_75", "Quadro RTX 6000": "sm_75", "RTX 6000 Ada Generation": "sm_89",
        "RTX PRO 6000 Blackwell Server Edition": "sm_120", "rtx5060ti": "sm_120", "RTX A5000": "sm_86",
        "NVIDIA TITAN RTX": "sm_75", "NVIDIA RTX A1000": "sm_86", "RTX A1000 Laptop GPU": "sm_86", "rtx-a400": "sm_86",
        "NVIDIA RTX PRO 3000 Blackwell Generation Laptop GPU": "sm_120", "RTX PRO 500 Blackwell": "sm_120",
    },
    "te": {"v2.6": "2.6.0", "release_v2.12": "2.12.0"},
    "megatron": {"core_v0.12.3": "0.12.3"},
    "cuda": {"cu126": "12.6", "cuda12.6": "12.6", "CUDA 13.0": "13.0", "cu118": "11.8"},
    "python": {"py312": "3.12", "cp310": "3.10"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("axis", "text", "wanted"),
    [(axis, text, found) for axis, texts in SPELLED.items() for text, found in texts.items()],
)
def test_a_spelling_is_understood(matrix, axis, text, wanted):
    solution = solve(matrix, Request(pins=(Pin(axis=axis, spec=text, origin=f"--{axis}"),)))
    assert solution.cell.versions[axis] == wanted


@pytest.mark.parametrize(
    ("axis", "text"), [("gpu", "sm_91"), ("gpu", "9.1"), ("gpu", "rtx"), ("te", "w2.6"), ("cuda", "cu12")]
)
def test_a_spelling_of_nothing_is_refused_as_it_was_written(matrix, axis, text):
    with pytest.raises(UsageError, match=text):
        solve(matrix, Request(pins=(Pin(axis=axis, spec=text, origin=f"--{axis}"),)))


def test_each_board_is_named_once_and_geforce_boards_are_known_as_such(matrix):
    from envbuild.matrix.spelling import board_key, is_geforce

    keys = {}
    for release in matrix.releases["gpu"]:
        for name in {board_key(n) for n in (*release.aliases, *release.facts.names, *release.facts.geforce)}:
            assert keys.setdefault(name, release.version) == release.version, name
    boards = [name for r in matrix.releases["gpu"] for name in r.facts.geforce]
    assert all(name.startswith(("GeForce", "TITAN")) for name in boards)
    for series in ("RTX 20", "RTX 30", "RTX 40", "RTX 50"):
        assert sum(series in name for name in boards) >= 4, series
    ada = matrix.release("gpu", "sm_89")
    assert is_geforce(ada, "NVIDIA GeForce RTX 4080 SUPER")
    assert not is_geforce(ada, "RTX 4000 Ada")


def test_the_driver_rules_of_gpus_and_the_facts_that_verdicts_rest_on_say_the_same(matrix):
    bounds = {}
    for rule in matrix.rules:
        if rule.topic == "driver-gpu":
            gpus = rule.when["gpu"]
            for gpu in (gpus,) if isinstance(gpus, str) else gpus:
                bounds.setdefault(gpu, set()).add(rule.needs["driver"])
    for release in matrix.releases["gpu"]:
        facts, stated = release.facts, bounds.get(release.version, set())
        assert facts.first_driver is not None
        # drivers before 440 start no CUDA of the matrix
        assert (f">={facts.first_driver}" in stated) == (int(facts.first_driver) > 440), release.version
        assert (facts.last_driver is not None) == any(spec.startswith("<") for spec in stated), release.version
        if facts.last_driver:
            assert f"<{int(facts.last_driver) + 1}" in stated
        everywhere = facts.open_modules and not facts.open_modules_on
        assert bool(everywhere) == (version_key(facts.sm) >= version_key("100")), release.version


@pytest.mark.parametrize(
    ("flags", "driver", "verdict", "words"),
    [
        ("--gpu b200", "550.54.15", "refused", "570"),
        ("--gpu b200", "570.172.08", "full", "open kernel modules"),
        ("--gpu gh200", "580.95.05", "full", "GH200 needs the driver of NVIDIA's open kernel modules"),
        ("--gpu v100", "590.44.01", "refused", "580 is the last"),
        ("--gpu h100 --cuda 12.6", "515.65.01", "refused", "520"),
        ("--cuda cpu", "535.54.03", "full", "no driver"),
    ],
)
def test_a_verdict_is_of_the_gpu_too(matrix, flags, driver, verdict, words):
    found = driver_verdict(matrix, solve(matrix, request(flags)).cell, driver)
    assert found.verdict == verdict
    assert words in found.why


@pytest.mark.parametrize("prefer", ["proven", "newest"])
@pytest.mark.parametrize("flags", ["--driver 535 --gpu h100", "--driver 550.54.15 --gpu a100", "--driver 575.57.08"])
def test_a_cell_that_starts_comes_before_one_that_needs_compat(matrix, flags, prefer):
    solution = solve(matrix, Request(pins=request(flags).pins, prefer=prefer))
    assert solution.cell.versions["cuda"].startswith("12.")
    assert driver_verdict(matrix, solution.cell).verdict in {"full", "minor-version"}


def test_compat_is_taken_where_nothing_else_is_left(matrix):
    solution = solve(matrix, request("--driver 535 --gpu h100 --cuda 13.0"))
    assert driver_verdict(matrix, solution.cell).verdict == "needs-compat"
    assert solution.score.compat == 1


def test_the_reason_for_a_component_left_out_is_its_own(matrix):
    reason = solve(matrix, request("--cuda 11.8")).left_out["te"]
    assert reason.startswith("TE 2 needs CUDA 12.1.")
    assert reason.endswith("So no cell has both cuda 11.8 and te.")
    for flags in ("--torch 2.0", "--torch 1.13", "--cuda 11.7"):
        assert solve(matrix, request(flags)).left_out["te"].startswith("TE 2 needs CUDA 12.1."), flags
    for name in ("te", "apex"):
        assert "cell without a GPU" in solve(matrix, request("--gpu none")).left_out[name]
    for flags in ("--cuda 11.8", "--gpu none", "--cuda 11.7", "--torch 2.0"):
        assert not any("ngc" in why for why in solve(matrix, request(flags)).left_out.values()), flags


def test_within_a_minor_release_the_last_patch_unless_something_speaks_for_another(matrix):
    """Every minor of torch that has patches, on its own and with each CUDA: 2.7.1 and not 2.7.0."""
    newest = {}
    for release in matrix.releases["torch"]:
        version = version_key(release.version)
        if release.date and not version.is_prerelease:
            newest.setdefault((version.major, version.minor, version.local), []).append(release.version)
    for (major, minor, local), versions in newest.items():
        if len(versions) < 2 or local == "cpu":
            continue
        cuda = f"{local[2:-1]}.{local[-1]}"
        solution = solve(matrix, request(f"--torch {major}.{minor} --cuda {cuda}"))
        if any("torch" in rule.when and "te" in rule.when for rule in solution.tested_with):
            continue  # a lock of Megatron-LM names the patch
        assert solution.cell.versions["torch"] == versions[-1]
