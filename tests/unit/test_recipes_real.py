"""What real recipes need: wheels, companions, several toolkits, other files; and verdicts on real recipes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from envbuild.cli.check import check
from envbuild.errors import DataError, UsageError
from envbuild.matrix.load import load_matrix
from envbuild.recipes.check import check_recipe
from envbuild.recipes.read import read_recipe

ROOT = Path(__file__).parents[2]
WHEEL = "https://x/flash_attn-2.7.3+cu12torch2.6cxx11abiTRUE-cp310-cp310-linux_x86_64.whl"


def _report(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return check_recipe(load_matrix(), read_recipe(load_matrix(), tmp_path / name))


def _stated(tmp_path, name, text):
    return [(s.line, s.axis, s.spec) for s in _report(tmp_path, name, text).statements]


def _rules(tmp_path, name, text):
    return [(f.line, f.rule) for f in _report(tmp_path, name, text).findings]


def test_the_verdicts_are_places_and_no_text():
    data = json.loads((ROOT / "tests" / "data" / "recipe_verdicts.json").read_text())
    for each in data["verdicts"]:
        assert set(each) == {"repository", "commit", "path", "line", "rule", "verdict", "by_text", "set"}
        assert re.fullmatch(r"[0-9a-f]{40}", each["commit"])
        assert each["verdict"] in {"right", "wrong", "missed", "corrected", "withdrawn"}
        assert each["set"] in data["sets"]


def test_findings_on_real_recipes_are_right_and_find_most():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from judge_recipes import VERDICTS, again, count
    finally:
        sys.path.pop(0)
    verdicts = json.loads(VERDICTS.read_text())["verdicts"]
    counts = count([each for each in verdicts if each["set"] == "tuned"])
    assert counts["findings"] >= 20
    assert counts["right"] / counts["findings"] >= 19 / 20
    assert counts["contradictions"] >= 13
    assert counts["found"] / counts["contradictions"] >= 10 / 13
    if folder := os.environ.get("TEST_RECIPES"):
        assert again(Path(folder), verdicts) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.sh", f"pip install {WHEEL}\n"),
        ("requirements.txt", f"{WHEEL}\n"),
        ("requirements.txt", f"flash-attn @ {WHEEL}\n"),
        ("x.sh", f"pip install {WHEEL.rpartition('/')[2].replace('+', '%2B')}\n"),
        ("environment.yml", f"dependencies:\n- pip:\n  - {WHEEL}\n"),
        ("pyproject.toml", f'[project]\ndependencies = ["flash-attn @ {WHEEL}"]\n'),
    ],
)
def test_a_wheel_states_four_versions(tmp_path, name, text):
    stated = [(axis, spec) for _, axis, spec in _stated(tmp_path, name, text)]
    assert stated == [("flash-attn", "2.7.3"), ("python", "3.10"), ("torch", "2.6"), ("cuda", ">=12,<13")]
    assert _rules(tmp_path, name, text) == []


def test_a_wheel_of_another_torch(tmp_path):
    assert _rules(tmp_path, "requirements.txt", f"torch==2.8.0\n{WHEEL}\n") == [(2, "recipe-stated-twice")]


def test_a_wheels_url_holds_where_its_marker_does(tmp_path):
    text = (
        'https://x/torch-2.1.2+cpu-cp310-cp310-linux_x86_64.whl#sha256=0 ; platform_machine == "x86_64"\n'
        'https://x/torch-2.3.0-cp310-cp310-manylinux_2_17_aarch64.whl#sha256=0 ; platform_machine == "aarch64"\n'
    )
    assert _rules(tmp_path, "requirements.txt", text) == []
    both = text.replace('aarch64"', 'x86_64"')
    assert _rules(tmp_path, "requirements.txt", both) == [(2, "recipe-stated-twice")]


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("conda install cuda=12.4", [(1, "nvcc", "12.4")]),
        ("conda install -y cuda-toolkit=12.4.1 python=3.11", [(1, "nvcc", "12.4.1"), (1, "python", "3.11")]),
        ("conda install pytorch==1.12.1 cudatoolkit=11.3", [(1, "torch", "1.12.1"), (1, "cuda", "11.3")]),
        ("conda install cudatoolkit=11.3", []),
        ("pip install nvidia-cudnn-cu12==9.1.0.70", [(1, "cudnn", "9.1.0.70")]),
        ("pip install torchvision==0.21.0", [(1, "torch", "2.6")]),
        ("export TORCH_CUDA_ARCH_LIST='8.0;9.0+PTX'", [(1, "gpu", "sm_80"), (1, "gpu", "sm_90")]),
        ("CU=12.4.1\npip install torch==2.6.0 -i https://download.pytorch.org/whl/cu$(echo $CU)\n", [(2, "torch", "2.6.0")]),
        ("V=2.6.0+cu124; pip install torch==${V%%+*}", [(1, "torch", "2.6.0")]),
        ("V=12.4; pip install torch==2.6.0 --index-url https://download.pytorch.org/whl/cu${V//./}", [(1, "torch", "2.6.0"), (1, "cuda", "12.4")]),
        ("conda run -n x pip install torch==2.6.0", [(1, "torch", "2.6.0")]),
        ("pip install torch>=2.6", [(1, "torch", ">=2.6")]),
    ],
)  # fmt: skip
def test_reads(tmp_path, text, stated):
    assert _stated(tmp_path, "x.sh", text) == stated


DEVEL = "FROM nvidia/cuda:12.4.1-devel-ubuntu22.04\n"


@pytest.mark.parametrize(
    "text",
    [
        f"{DEVEL}RUN apt-get install -y cuda-toolkit-11-8 cuda-toolkit-12-8\n",
        f"{DEVEL}RUN apt-get install -y python3.10 python3.12-dev\n",
        f"{DEVEL}RUN pip install torch==2.5.1 && pip uninstall -y torch && pip install torch==2.6.0\n",
        f"{DEVEL}RUN pip install flash-attn-3 --index-url https://download.pytorch.org/whl/flash-attn-3\n",
        f"{DEVEL}RUN pip install torch==${{VERSION}}\nRUN pip install torch==2.6.0\n",
        f"{DEVEL}RUN pip install --target /a torch==2.6.0\nRUN pip install --target /b torch==2.7.0\n",
        f"{DEVEL}RUN TORCH_CUDA_ARCH_LIST='8.0;9.0' make\nRUN TORCH_CUDA_ARCH_LIST=9.0 make\n",
        f'{DEVEL}ARG C=124\nRUN if [ "$C" = "118" ]; then pip install torch==2.7.1+cu118; fi\n',
        (
            f'{DEVEL}ARG C\nRUN if [ "$C" = "a" ]; then pip install torch==2.7.1; fi\n'
            'RUN if [ "$C" = "b" ]; then pip install torch==2.6.0; fi\n'
        ),
        (
            f'{DEVEL}ARG P\nRUN if [ "$P" = "arm64" ]; then pip install torch==2.8.0; fi\n'
            'RUN if [ "$P" != "arm64" ]; then pip install torch==2.6.0; fi\n'
        ),
        f'{DEVEL}ARG P=arm64\nRUN pip install torch==2.8.0\nRUN [ "$P" != "arm64" ] && pip install torch==2.6.0\n',
        f"{DEVEL}RUN pip install torch==2.6.0+maker3.0 torchvision==0.15.1+maker3.0 torchaudio==2.4.1+maker3.0\n",
        "FROM pytorch/pytorch:2.4.0-cuda12.4-cudnn9-devel\nRUN pip install torch==2.6.0\n",
        "FROM nvcr.io/nvidia/pytorch:25.03-py3\nRUN pip uninstall -y torch && pip install torch==2.6.0\n",
    ],
)
def test_what_is_no_contradiction(tmp_path, text):
    assert [rule for _, rule in _rules(tmp_path, "Dockerfile", text)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"{DEVEL}ENV TORCH_CUDA_ARCH_LIST='8.0;9.0;10.0'\n", [(2, "gpu-cuda-sm100")]),
        (f"{DEVEL}RUN apt-get install -y cuda-toolkit-12-8\nENV PATH=/usr/local/cuda-11.8/bin\n", [(3, "recipe-path-other-cuda")]),
        (f"{DEVEL}RUN pip install torch==2.6.0 torchvision==0.20.0\n", [(2, "recipe-stated-twice")]),
        (f"{DEVEL}RUN pip install torch==2.6.0+cu124 torchvision==0.20.0+cu124\n", [(2, "recipe-stated-twice")]),
        (
            (
                f'{DEVEL}ARG P\nRUN if [ "$P" != "a" ]; then pip install torch==2.7.1; fi\n'
                'RUN if [ "$P" != "b" ]; then pip install torch==2.6.0; fi\n'
            ),
            [(4, "recipe-stated-twice")],
        ),
        (f"{DEVEL}RUN pip install flash-attn==2.5.3\nRUN pip install flash-attn==2.5.4\n", [(3, "recipe-stated-twice")]),
    ],
)  # fmt: skip
def test_what_is(tmp_path, text, found):
    assert _rules(tmp_path, "Dockerfile", text) == found


OLD = "pip install torch==2.0.1 --index-url https://download.pytorch.org/whl/cu118"
NEW = "pip install torch==2.8.0 --index-url https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(
    "text",
    [
        f"{OLD}\nif wanted; then\n  {NEW}\nfi\n",  # takes the place of what is there
        f"if wanted; then\n  {OLD}\nfi\nif other; then\n  {NEW}\nfi\n",
        f"if wanted; then\n  {OLD}\nfi\nif other; then\n  pip install transformer-engine==2.6.0\nfi\n",
        f"case $1 in\n  a) {OLD};;\nesac\ncase $2 in\n  b) {NEW};;\nesac\n",
        f"[ -f x ] && {OLD}\n[ -f y ] && {NEW}\n",
        f"command -v a && {OLD}\ngrep -q b c && {NEW}\n",
        f"{OLD}\npip install -U torch==2.8.0 --index-url https://download.pytorch.org/whl/cu126\n",
        f"{OLD}\npip install --force-reinstall torch==2.8.0 torchvision==0.23.0\n",
        "pip install torchvision==0.15.2\npip install -U torch==2.8.0 torchvision==0.23.0\n",
        f"# CUDA 11.8\n{OLD}\n# CUDA 12.6\n",
        "export CUDA_HOME=/usr/local/cuda-11.8\nmake\nexport CUDA_HOME=/usr/local/cuda-12.6\nmake\n",
        "export TORCH_CUDA_ARCH_LIST=9.0\nmake\nexport TORCH_CUDA_ARCH_LIST=8.9\nmake\n",
        "pip wheel -w a torch==2.0.1\npip wheel -w b torch==2.8.0\n",
        f"source x/bin/activate\n{OLD}\ndeactivate\n{NEW}\n",
    ],
)
def test_what_need_not_hold_together(tmp_path, text):
    unpinned = {"recipe-unpinned-package", "recipe-unpinned-source"}
    assert [rule for _, rule in _rules(tmp_path, "x.sh", text) if rule not in unpinned] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"if wanted; then\n  {OLD}\n  pip install transformer-engine==2.6.0\nfi\n", "te-cuda-2.x"),
        (f"if wanted; then\n  {OLD}\n  {NEW}\nfi\n", "recipe-stated-twice"),
        (f"{OLD}\nif wanted; then\n  pip install transformer-engine==2.6.0\nfi\n", "te-cuda-2.x"),
        (f"if wanted; then\n  {OLD}\n  if more; then\n    pip install transformer-engine==2.6.0\n  fi\nfi\n", "te-cuda-2.x"),
        (f"{OLD}\nif wanted; then\n  pip install -U torch==2.8.0\nfi\npip install transformer-engine==2.6.0\n", "te-cuda-2.x"),
        ("export CUDA_HOME=/usr/local/cuda-11.8\nexport PATH=/usr/local/cuda-12.6/bin:$PATH\n", "recipe-path-other-cuda"),
        ("# CUDA 12.6\nexport CUDA_HOME=/usr/local/cuda-11.8\n", "recipe-path-other-cuda"),
    ],
)  # fmt: skip
def test_what_is_known_to_hold_together(tmp_path, text, found):
    assert found in [rule for _, rule in _rules(tmp_path, "x.sh", text)]


@pytest.mark.parametrize(
    ("python", "found"),
    [(">=3.9,<3.13", set()), (">=3.9,<3.14", {"torch-python-2.4.1"}), ("==3.12.*", set()), (">=3.13", {"torch-python-2.4.1"})],
)  # fmt: skip
def test_a_marker_holds_for_a_python_that_the_project_admits(tmp_path, python, found):
    text = (
        f'[project]\nrequires-python = "{python}"\ndependencies = ["numpy"]\n[project.optional-dependencies]\nx = [\n'
        "  \"torch==2.4.0 ; python_version == '3.13'\",\n"
        f"  \"flash-attn @ {WHEEL.replace('cp310', 'cp313')} ; python_version == '3.13'\",\n]\n"
    ).replace("torch2.6", "torch2.4")
    assert {rule for _, rule in _rules(tmp_path, "pyproject.toml", text)} == found


def test_megatron_core_asks_for_a_transformer_engine_in_its_extra_alone(tmp_path):
    text = '[project]\ndependencies = ["megatron-core{}==0.14.0"]\n[project.optional-dependencies]\nte = ["transformer-engine==2.5.0"]\n'
    assert _rules(tmp_path, "pyproject.toml", text.format("")) == []
    assert _rules(tmp_path, "pyproject.toml", text.format("[dev]")) == [(4, "mcore-te-0.14")]


def test_a_marker_of_poetry(tmp_path):
    text = (
        '[tool.poetry.dependencies]\npython = "^3.10"\ntorch = {version = "2.6.0", markers = "sys_platform == \'linux\'"}\n'
        'torchvision = {version = "0.17.0", markers = "sys_platform == \'darwin\'"}\n'
    )
    assert _rules(tmp_path, "pyproject.toml", text) == []
    assert _rules(tmp_path, "pyproject.toml", text.replace("darwin", "linux")) == [(4, "recipe-stated-twice")]


def test_an_environment_of_conda(tmp_path):
    text = "name: x\nchannels: [nvidia]\ndependencies:\n- python=3.10\n- pytorch=2.0.1\n- pip:\n  - torchvision==0.22.0\n  - apex\n"
    assert _rules(tmp_path, "environment.yml", text) == [(7, "recipe-stated-twice"), (8, "recipe-impostor")]


def test_a_pyproject(tmp_path):
    text = (
        '[build-system]\nrequires = ["torch==2.1.0"]\n[project]\nrequires-python = ">=3.10"\n'
        'dependencies = [\n  "torch==2.8.0",\n]\n[project.optional-dependencies]\n'
        f'fa = [\n  "flash-attn @ {WHEEL}",\n]\na = ["deepspeed==0.16.4"]\nb = ["deepspeed==0.17.0"]\n'
    )
    assert _rules(tmp_path, "pyproject.toml", text) == [(10, "recipe-stated-twice")]


@pytest.mark.parametrize(
    ("name", "text"),
    [("notes.md", "pip install apex\n"), ("compose.yml", "services: {}\n"), ("x.py", "import os\n"), ("x", "hello\n")],
)
def test_a_kind_that_is_not_known_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="the kind of the recipe is not known"):
        read_recipe(load_matrix(), tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("x.sh", "if then\n", 1),
        ("Dockerfile", "FROM a\nRUN true\nNOSUCH thing\n", 3),
        ("requirements.txt", "torch==2.6.0\ntorch === = 3\n", 2),
        ("Dockerfile", "FROM a\nRUN pip install torch==${VERSION}\n", 2),
    ],
)
def test_what_is_not_understood_is_reported_and_not_called_clean(tmp_path, name, text, line):
    path = tmp_path / name
    path.write_text(text)
    done = CliRunner().invoke(check, [str(path)], standalone_mode=False)
    assert f"not understood, line {line}: " in done.stderr
    assert "but 1 line was not understood" in done.stdout
    assert json.loads(CliRunner().invoke(check, [str(path), "--json"], standalone_mode=False).stdout)["not_understood"]


def test_several_files_and_folders(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "requirements.txt").write_text("apex\n")
    (tmp_path / "a" / "notes.md").write_text("pip install apex\n")
    (tmp_path / "b.sh").write_text("true\n")
    done = CliRunner().invoke(check, [str(tmp_path / "a"), str(tmp_path / "b.sh"), "--json"], standalone_mode=False)
    answer = json.loads(done.stdout)
    assert [(Path(each["file"]).name, len(each["findings"])) for each in answer["files"]] == [
        ("requirements.txt", 1),
        ("b.sh", 0),
    ]
    assert done.return_value == 4


def test_standard_input_is_read():
    done = subprocess.run(
        [sys.executable, "-m", "envbuild", "check", "-", "--as", "requirements"],
        input="apex\n",
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 4
    assert done.stdout.startswith("-: read as a requirements file\n-:1: recipe-impostor")


def test_a_rule_is_ignored(tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text("apex\n")
    done = CliRunner().invoke(check, [str(path), "--ignore", "recipe-impostor"], standalone_mode=False)
    assert done.return_value == 0
    with pytest.raises(UsageError, match="no rule 'nosuch'"):
        CliRunner().invoke(check, [str(path), "--ignore", "nosuch"], standalone_mode=False, catch_exceptions=False)


def test_formats(tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text("torch==2.8.0\napex\n")
    done = CliRunner().invoke(check, [str(path), "--format", "github"], standalone_mode=False)
    assert re.match(rf"::error file={re.escape(str(path))},line=2,title=recipe-impostor::", done.stdout)
    done = CliRunner().invoke(check, [str(path), "--format", "sarif"], standalone_mode=False)
    run = json.loads(done.stdout)["runs"][0]
    assert [(r["ruleId"], r["locations"][0]["physicalLocation"]["region"]) for r in run["results"]] == [
        ("recipe-impostor", {"startLine": 2})
    ]


def test_a_file_name_is_quoted_in_an_annotation(tmp_path):
    path = tmp_path / "requirements,x%.txt"
    path.write_text("apex\n")
    done = CliRunner().invoke(check, [str(path), "--format", "github"], standalone_mode=False)
    assert "requirements%2Cx%25.txt,line=1," in done.stdout
