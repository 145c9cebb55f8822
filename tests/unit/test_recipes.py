"""`envbuild check`: recipes in the style of the five stacks' guides, and one that contradicts nothing."""

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from envbuild.cli.check import check
from envbuild.errors import DataError
from envbuild.matrix.load import load_matrix
from envbuild.recipes.catalog import findings_catalog, variables
from envbuild.recipes.check import check_recipe
from envbuild.recipes.read import read_recipe

RECIPES = Path(__file__).parent.parent / "data" / "recipes"

# recipe -> (line, rule) of everything that is wrong in it
EXPECTED = {
    "megatron-gpt3.sh": [
        (4, "recipe-driver-below-cuda"),
        (4, "recipe-stated-twice"),
        (8, "recipe-path-other-cuda"),
        (11, "nvcc-is-cuda"),
        (11, "nvcc-is-cuda"),
        (11, "recipe-unpinned-package"),
        (12, "recipe-unpinned-source"),
        (16, "te-cuda-2.x"),
        (16, "te-cuda-2.x"),
        (17, "recipe-unpinned-source"),
    ],
    "llama3-70b.Dockerfile": [
        (7, "recipe-unread-variable"),
        (8, "recipe-unread-variable"),
        (11, "recipe-unpinned-package"),
        (15, "recipe-unread-variable"),
        (15, "recipe-unread-variable"),
        (17, "fa3-lookup-fa3"),
        (19, "recipe-impostor"),
        (20, "recipe-key-in-image"),
        (22, "recipe-cpus-per-rank"),
    ],
    "llm-jp.sh": [
        (6, "recipe-unpinned-source"),
        (8, "recipe-unpinned-package"),
        (11, "apex-torch-2.1"),
        (13, "recipe-user-path"),
    ],
    "gpt2-3d.Dockerfile": [
        (2, "deepspeed-torch-2"),
        (3, "recipe-unpinned-source"),
        (4, "recipe-hostfile-in-image"),
        (5, "recipe-key-in-image"),
        (6, "gpu-cuda-sm90"),
        (10, "recipe-local-rank-flag"),
    ],
    "alcf-requirements.txt": [
        (5, "fa2-torch-2.2"),
        (6, "recipe-impostor"),
        (7, "recipe-impostor"),
        (9, "recipe-unpinned-source"),
        (11, "te-cuda-2.x"),
        (11, "te-torch-2.1"),
    ],
    "axes.toml": [
        (5, "te-core-cu13"),
        (6, "apex-cuda-13"),
        (7, "gpu-cuda-sm70"),
        (8, "fa2-ampere"),
        (8, "te-flash-attn-2.6"),
    ],
    "clean.Dockerfile": [],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_finds_exactly_what_is_wrong(name):
    done = CliRunner().invoke(check, [str(RECIPES / name), "--json"], standalone_mode=False)
    answer = json.loads(done.stdout)
    assert [(f["line"], f["rule"]) for f in answer["findings"]] == EXPECTED[name]
    assert done.return_value == (4 if EXPECTED[name] else 0)
    assert not answer["unknown"]
    known = {rule.id for rule in load_matrix().rules} | set(findings_catalog())
    for finding in answer["findings"]:
        assert finding["rule"] in known
        assert finding["line"] in finding["lines"]
        assert all(finding[key] for key in ("why", "source", "todo"))


def test_every_recipe_is_expected():
    assert {path.name for path in RECIPES.iterdir()} == set(EXPECTED)


def _findings(tmp_path, name, text):
    matrix = load_matrix()
    path = tmp_path / name
    path.write_text(text)
    return [(f.line, f.rule) for f in check_recipe(matrix, read_recipe(matrix, path)).findings]


def _statements(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return [(s.line, s.axis, s.spec) for s in read_recipe(load_matrix(), path).statements]


def test_lines_of_a_long_command_are_its_own(tmp_path):
    text = (
        "FROM ubuntu:22.04\nRUN apt-get update \\\n && apt-get install -y python3.10-dev \\\n      cuda-toolkit-12-6\n"
    )
    assert _statements(tmp_path, "Dockerfile", text) == [
        (1, "os", "ubuntu22.04"),
        (3, "python", "3.10"),
        (4, "nvcc", "12.6"),
    ]


def test_variables_are_put_in(tmp_path):
    text = "TORCH=2.8.0\npip install torch==${TORCH} --index-url https://download.pytorch.org/whl/cu126\n"
    assert _statements(tmp_path, "install.sh", text) == [(2, "torch", "2.8.0"), (2, "cuda", "12.6")]


@pytest.mark.parametrize(
    ("text", "axis", "spec"),
    [
        ("pip install git+https://github.com/NVIDIA/TransformerEngine.git@v2.6", "te", "2.6"),
        ("pip install 'te @ git+https://github.com/NVIDIA/TransformerEngine@c90a7207'", "te", "c90a7207"),
        ("git clone -b core_v0.12.3 https://github.com/NVIDIA/Megatron-LM.git", "megatron", "0.12.3"),
        ("git clone https://github.com/NVIDIA/apex && cd apex && git reset --hard e74a67bb", "apex", "e74a67bb"),
        ("git clone https://github.com/NVIDIA/apex /opt/apex\ngit -C /opt/apex checkout 25.08", "apex", "25.08"),
        ("pip install git+https://github.com/Dao-AILab/flash-attention@27f501d#subdirectory=hopper", "flash-attn-hopper", "27f501d"),
        ("conda install -y pytorch-cuda=12.1 -c nvidia", "cuda", "12.1"),
        ("conda install -c nvidia/label/cuda-12.6.3 cuda-toolkit", "nvcc", "12.6.3"),
        ("mamba install -y nvidia/label/cuda-12.6.3::cuda-nvcc", "nvcc", "12.6.3"),
        ("conda install -c nvidia/label/cuda-12.6.3 cuda-nvcc=12.4", "nvcc", "12.4"),
        ("conda install -c nvidia/label/cuda-12.6.3 cuda-toolkit -c nvidia/label/cuda-12.6.3", "nvcc", "12.6.3"),
        ("dnf install -y cuda-toolkit-12-6", "nvcc", "12.6"),
        ("dnf install -y cuda-toolkit-12-6-12.6.3-1.x86_64", "nvcc", "12.6"),
        ("dnf install -y cuda-nvcc-12-6.x86_64", "nvcc", "12.6"),
        ("dnf install -y python3.12-devel", "python", "3.12"),
        ("sudo yum install -y openmpi-devel", "mpi", "openmpi"),
        ("# needs CUDA 12.4 or newer", "cuda", ">=12.4"),
        ("# driver 550.54.14", "driver", "550.54.14"),
        ("uv pip install 'deepspeed==0.10.0'", "deepspeed", "0.10.0"),
    ],
)  # fmt: skip
def test_reads(tmp_path, text, axis, spec):
    assert (axis, spec) in [(a, s) for _, a, s in _statements(tmp_path, "x.sh", text)]
    assert not [rule for _, rule in _findings(tmp_path, "x.sh", text)]


@pytest.mark.parametrize(
    "text",
    [
        "conda install -c nvidia/label/cuda-12.6.3 cudnn",
        "conda install -c nvidia/label/cuda-12.6.3 conda-forge::cuda-nvcc",
        "conda search -c nvidia/label/cuda-12.6.3 cuda-nvcc",
        "conda remove -c nvidia/label/cuda-12.6.3 cuda-nvcc",
        "conda install -c nvidia/label/cuda-12.6.3 -c nvidia/label/cuda-12.4.1 cuda-toolkit",
    ],
)
def test_a_channel_alone_states_no_toolkit(tmp_path, text):
    assert _statements(tmp_path, "x.sh", text) == []


@pytest.mark.parametrize(
    "toolkit", ["dnf install -y cuda-toolkit-12-4", "conda install -y -c nvidia/label/cuda-12.4.1 cuda-toolkit"]
)
def test_a_toolkit_of_another_cuda_than_torch(tmp_path, toolkit):
    text = f"{toolkit}\npip install torch==2.7.1 --index-url https://download.pytorch.org/whl/cu118\n"
    assert _findings(tmp_path, "x.sh", f"{text}python setup.py install\n") == [(2, "nvcc-is-cuda")]
    assert _findings(tmp_path, "x.sh", text) == []  # nothing starts the toolkit's compiler
    # torch warns at another minor, and compiles
    text = f"{toolkit}\npip install torch==2.8.0 --index-url https://download.pytorch.org/whl/cu126\n"
    assert _findings(tmp_path, "x.sh", text) == []


def test_prose_is_not_taken_for_a_statement(tmp_path):
    assert (
        _statements(tmp_path, "x.sh", "# CUDA 11.8 was tried and failed\n# see CUDA 13's notes\necho CUDA 12.4\n") == []
    )


def test_three_that_fit_in_pairs_and_not_together(tmp_path):
    # TE 2.6 goes with 0.12.3, and 0.12.3 with apex-free cells of older TE: the three need apex's fused RoPE
    text = '[axes]\nmegatron = "0.12.3"\nte = "2.6"\napex = "none"\n'
    assert (2, "fused-rope-mcore-0.12") in {(2, r) for _, r in _findings(tmp_path, "cell.toml", text)}


def test_toolkit_variables_of_a_base_without_toolkit(tmp_path):
    text = "FROM nvidia/cuda:12.6.3-runtime-ubuntu24.04\nENV CUDA_HOME=/usr/local/cuda\n"
    assert _findings(tmp_path, "Dockerfile", text) == [(2, "recipe-toolkit-variable")]
    assert _findings(tmp_path, "Dockerfile", text.replace("runtime", "cudnn-devel")) == []


def test_stack_file_is_a_recipe():
    matrix = load_matrix()
    stacks = Path(__file__).parents[2] / "matrices" / "stacks"
    for path in stacks.glob("*.toml"):
        assert not check_recipe(matrix, read_recipe(matrix, path)).findings, path.name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"cuda = \n", "is not TOML"),
        ("a.toml", b'colour = "red"\n', "colour is not an axis"),
        ("a.toml", b"axes = 3\n", "axes is not a table"),
        ("a.toml", b'axes = "x"\n', "axes is not a table"),
        ("a.toml", b'environment = "x"\n', "environment is not a table"),
        ("a.sh", b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_bad_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_recipe(load_matrix(), path)


def test_unknown_version_is_reported_and_not_judged(tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_text("torch==99.0\n")
    done = CliRunner().invoke(check, [str(path)], standalone_mode=False)
    assert done.return_value == 0
    assert "the matrix lists no torch 99.0; not checked" in done.stderr


def test_variables_are_read_or_say_what_is():
    assert all(v.read_by or v.instead for v in variables().values())
    assert all(v.instead in variables() for v in variables().values() if v.instead)


def rules_in(folder: Path, text: str) -> list[str]:
    (folder / "Dockerfile").write_text(text)
    matrix = load_matrix()
    return sorted(f.rule for f in check_recipe(matrix, read_recipe(matrix, folder / "Dockerfile")).findings)


PIP = "pip install torch==2.8.0 --index-url https://download.pytorch.org/whl/cu126 && python setup.py install"


@pytest.mark.parametrize(
    ("line", "compiles"),
    [
        ("RUN python setup.py install", True), ("RUN cd ext && python3 setup_cuda.py bdist_wheel -d .", True),
        ("RUN pip install flash-attn --no-build-isolation", True), ("RUN pip install --no-build-isolation .", True),
        ("RUN pip install flash_attn==2.8.3", True), ("RUN pip install deepspeed==0.17.5", True),
        ("ENV TORCH_CUDA_ARCH_LIST=9.0", True), ("RUN MAX_JOBS=8 pip install .", True),
        ("RUN pip install apex@git+https://github.com/NVIDIA/apex@25.08", True),
        ("RUN pip install came-pytorch deepspeed -i https://mirrors.example.org/simple/", True),
        ("RUN pip install flash_attn-2.7.4.post1+cu12torch2.5cxx11abiFALSE-cp310-cp310-linux_x86_64.whl", False),
        ("RUN true", False), ("RUN pip install transformers accelerate datasets", False),
        ("RUN pip install /workspace/optimum[tests]", False), ("RUN pip install -e .", False),
        ("CMD nvidia-smi", False), ("RUN echo python setup.py install", False),
        ("RUN pip uninstall -y flash-attn", False), ("# python setup.py install", False),
    ],
)  # fmt: skip
def test_an_nvcc_contradicts_a_torch_only_where_something_is_compiled(tmp_path, line, compiles):
    """The image's toolkit lies idle next to wheels: each has its own CUDA libraries."""
    text = f"FROM nvidia/cuda:11.7.1-cudnn8-devel-ubuntu22.04\nRUN pip install torch torchvision\n{line}\n"
    assert ("nvcc-is-cuda" in rules_in(tmp_path, text)) is compiles


@pytest.mark.parametrize(
    "run",
    [
        f"RUN {PIP}\n",
        f"RUN <<EOF\n# with its index\n{PIP}\nEOF\n",
        f"RUN --mount=type=cache,target=/root/.cache bash -ex <<-'END'\n\tset -u\n\t{PIP}\n\tEND\n",
    ],
)
def test_a_here_document_of_run_is_read_as_run_is(tmp_path, run):
    assert rules_in(tmp_path, f"FROM nvidia/cuda:13.0.1-devel-ubuntu24.04\n{run}") == ["nvcc-is-cuda"]


@pytest.mark.parametrize("before", ["cat <<<yes", "python3 -c 'print(1 <<n)'", "cat <<EOF"])
def test_what_is_no_here_document_swallows_nothing(tmp_path, before):
    text = f"FROM nvidia/cuda:13.0.1-devel-ubuntu24.04\nRUN {before}\nRUN {PIP}\n"
    assert rules_in(tmp_path, text) == ["nvcc-is-cuda"]


@pytest.mark.parametrize("instruction", ["COPY <<EOF /notes", "RUN cat >/notes <<EOF", "RUN python3 <<EOF"])
def test_other_here_documents_are_left_alone(tmp_path, instruction):
    text = f"FROM nvidia/cuda:13.0.1-devel-ubuntu24.04\n{instruction}\n{PIP}\nEOF\nRUN true\n"
    assert rules_in(tmp_path, text) == []


STAGE = "FROM nvidia/cuda:11.8.0-devel-ubuntu22.04 AS old\n"
LAST = "FROM nvidia/cuda:12.6.3-devel-ubuntu22.04\nRUN pip install torch==2.8.0+cu126\n"


def test_a_stage_that_the_last_one_does_not_need_contradicts_nothing(tmp_path):
    assert rules_in(tmp_path, STAGE + LAST) == []
    wrong = f"{STAGE}RUN {PIP}\n"
    assert rules_in(tmp_path, wrong + LAST) == []
    for use in ("COPY --from=old /x /x\n", "COPY --from=0 /x /x\n", "RUN --mount=type=bind,from=old,target=/x true\n"):
        assert "nvcc-is-cuda" in rules_in(tmp_path, wrong + LAST + use)
        assert rules_in(tmp_path, STAGE + LAST + use) == []  # what is copied is no statement of the image


@pytest.mark.parametrize("given", ["ARG BASE=cuda", "ARG BASE"])
def test_a_stage_that_an_argument_names_is_needed(tmp_path, given):
    text = f"{given}\nFROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda\nRUN {PIP}\nFROM ${{BASE}} AS final\n"
    assert rules_in(tmp_path, text) == ["nvcc-is-cuda"]


def test_an_instruction_without_arguments_is_skipped(tmp_path):
    assert _findings(tmp_path, "Dockerfile", "FROM\n\nRUN\nENV\nWORKDIR\nADD\n") == []


@pytest.mark.parametrize(
    ("image", "stated"),
    [
        ("nvidia/cuda:11.8.0-cudnn8-devel-ubuntu22.04@sha256:aaaa", [("os", "ubuntu22.04"), ("nvcc", "11.8.0")]),
        ("nvcr.io/nvidia/pytorch:25.03-py3@sha256:aaaa", [("base", "ngc-25.03")]),
        ("nvidia/cuda:${CUDA:-11.8.0}-devel-ubuntu22.04", [("os", "ubuntu22.04"), ("nvcc", "11.8.0")]),
    ],
)
def test_base_images(tmp_path, image, stated):
    found = _statements(tmp_path, "Dockerfile", f"ARG CUDA\nfrom {image}\n")
    assert [(axis, spec) for _, axis, spec in found] == stated


def test_an_image_of_an_empty_name_is_no_image(tmp_path):
    assert _statements(tmp_path, "Dockerfile", "ARG BASE=\nFROM ${BASE}\nRUN pip install torch==2.8.0\n") == [
        (3, "torch", "2.8.0")
    ]


def test_instructions_in_lower_case(tmp_path):
    text = "from ubuntu:22.04\ncopy id_rsa /root/.ssh/\nrun pip install apex\nenv NVTE_CUDA_INCLUDE_PATH=/x\n"
    assert _findings(tmp_path, "Dockerfile", text) == [
        (2, "recipe-key-in-image"),
        (3, "recipe-impostor"),
        (4, "recipe-unread-variable"),
    ]


def test_a_byte_order_mark_hides_nothing(tmp_path):
    assert _findings(tmp_path, "requirements.txt", "\ufeffapex\n") == [(1, "recipe-impostor")]


@pytest.mark.parametrize(
    ("line", "axis", "spec"),
    [
        ("transformer_engine[pytorch] >= 2.6, < 2.7  # the newest", "te", "<2.7,>=2.6"),
        ("deepspeed>= 0.10, <0.13", "deepspeed", "<0.13,>=0.10"),
        ("torch == 2.8.0 --hash=sha256:aa --hash=sha256:bb", "torch", "2.8.0"),
        ("flash-attn == 2.8.3 \\", "flash-attn", "2.8.3"),
    ],
)
def test_requirements_with_blanks(tmp_path, line, axis, spec):
    assert _statements(tmp_path, "requirements.txt", f"{line}\n") == [(1, axis, spec)]


def test_requirements_under_markers(tmp_path):
    old, new = 'torch==2.0.1 ; python_version<"3.9"\n', 'torch==2.8.0 ; python_version>="3.9"\n'
    assert _findings(tmp_path, "requirements.txt", old + new) == []
    assert _findings(tmp_path, "requirements.txt", old + new + "torch==2.7.0\n") == [
        (3, "recipe-stated-twice"),
        (3, "recipe-stated-twice"),
    ]
    text = f"# Python 3.12\npip install '{old.strip()}' && pip install '{new.strip()}'\n"
    assert _findings(tmp_path, "x.sh", text) == []
    for marker in ("sys_platform=='win32'", "sys_platform~='win32'"):
        assert _findings(tmp_path, "requirements.txt", f"torch==2.0.1; {marker}\ntorch==2.8.0\n") == []


def test_lines_after_a_comment_in_a_command(tmp_path):
    text = "FROM ubuntu:22.04\nRUN pip install \\\n  # both ours\n  apex \\\n  ezpz\n"
    assert _findings(tmp_path, "Dockerfile", text) == [(4, "recipe-impostor"), (5, "recipe-impostor")]


@pytest.mark.parametrize(
    "run",
    [
        "/opt/venv/bin/pip install apex",
        '"$VENV/bin/pip3" --no-cache-dir install apex',
        'bash -c "pip install apex"',
        "/bin/bash -lc 'true && python -m pip install apex'",
        '["pip", "install", "apex"]',
        '["sh", "-c", "pip install apex"]',
    ],
)
def test_ways_to_call_pip(tmp_path, run):
    assert _findings(tmp_path, "Dockerfile", f"FROM ubuntu:22.04\nRUN {run}\n") == [(2, "recipe-impostor")]


def test_what_is_only_printed_installs_nothing(tmp_path):
    assert _findings(tmp_path, "x.sh", 'echo pip install apex\necho "first; pip install apex"\n') == []


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("git checkout tags/v2.6", "2.6"),
        ("git checkout refs/tags/v2.6", "2.6"),
        ("git checkout -b local c90a7207", "c90a7207"),
        ("git switch -c local c90a7207", "c90a7207"),
        ("git fetch --depth 1 origin c90a7207; git checkout FETCH_HEAD", "c90a7207"),
        ("git checkout v2.6; git checkout -- setup.py; git reset --hard HEAD", "2.6"),
    ],
)
def test_refs_that_pin(tmp_path, text, spec):
    text = f"git clone https://github.com/NVIDIA/TransformerEngine\ncd TransformerEngine\n{text}\n"
    assert [(a, s) for _, a, s in _statements(tmp_path, "x.sh", text)] == [("te", spec)]
    assert _findings(tmp_path, "x.sh", text) == []


@pytest.mark.parametrize(
    "text",
    [
        "RUN pip install git+ssh://git@github.com/NVIDIA/apex",
        "RUN pip install https://github.com/NVIDIA/apex/archive/master.zip",
        "RUN pip install 'apex @ https://github.com/NVIDIA/apex/archive/refs/heads/main.tar.gz'",
        "RUN pip install https://github.com/NVIDIA/apex/archive/HEAD.zip",
        "ADD https://github.com/NVIDIA/apex.git /opt/apex",
        "ADD --keep-git-dir=true https://github.com/NVIDIA/apex.git#master /opt/apex",
        "RUN git clone https://github.com/NVIDIA/apex && cd apex && git checkout -b local",
    ],
)
def test_sources_at_no_commit(tmp_path, text):
    assert _findings(tmp_path, "Dockerfile", f"FROM ubuntu:22.04\n{text}\n") == [(2, "recipe-unpinned-source")]


@pytest.mark.parametrize(
    "text",
    [
        "RUN pip install https://github.com/NVIDIA/apex/archive/refs/tags/25.08.zip",
        "RUN pip install git+ssh://git@github.com/NVIDIA/apex@25.08",
        "ADD https://github.com/NVIDIA/apex.git#25.08 /opt/apex",
        "ADD --keep-git-dir=true https://github.com/NVIDIA/apex.git /opt/a\nRUN cd /opt/a && git checkout 25.08",
    ],
)
def test_sources_at_a_tag(tmp_path, text):
    text = f"FROM ubuntu:22.04\n{text}\n"
    assert ("apex", "25.08") in [(a, s) for _, a, s in _statements(tmp_path, "Dockerfile", text)]
    assert _findings(tmp_path, "Dockerfile", text) == []


FA3 = "https://github.com/Dao-AILab/flash-attention"
TE = "https://github.com/NVIDIA/TransformerEngine"
APEX = "https://github.com/NVIDIA/apex"
INERT = "af314d400663fe895199b0586a9f1f718b1d7b79"


@pytest.mark.parametrize(
    "build",
    [
        f"RUN git clone {FA3} /opt/fa\nWORKDIR /opt/fa\nRUN git checkout {INERT}\nWORKDIR hopper\nRUN python setup.py install\n",
        f"WORKDIR /opt/fa\nRUN git clone {FA3} . && git checkout {INERT}\nWORKDIR /opt/fa/hopper\nRUN pip install .\n",
        f"RUN git clone {FA3} && git -C flash-attention checkout {INERT}\nRUN pip install ./flash-attention/hopper\n",
    ],
)
def test_the_hopper_build_is_found_in_its_folder(tmp_path, build):
    text = f"FROM nvidia/cuda:12.6.3-devel-ubuntu24.04\n{build}RUN pip install transformer_engine==2.6.0.post1\n"
    assert rules_in(tmp_path, text) == ["fa3-lookup-fa3"]


def test_a_checkout_belongs_to_the_clone_of_its_folder(tmp_path):
    text = (
        f"FROM ubuntu:22.04\nWORKDIR /opt\nRUN git clone https://github.com/NVIDIA/apex && git clone {FA3}\n"
        f"WORKDIR /opt/apex\nRUN git checkout 25.08\nWORKDIR ../flash-attention\nRUN git checkout {INERT}\n"
    )
    assert _findings(tmp_path, "Dockerfile", text) == []
    assert ("apex", "25.08") in [(a, s) for _, a, s in _statements(tmp_path, "Dockerfile", text)]


@pytest.mark.parametrize(
    "line",
    [
        "export CUDA_HOME=/usr/local/cuda-11",
        "echo 'export PATH=/usr/local/cuda-11.8/bin:$PATH' >> ~/.bashrc",
        'echo "PATH=/usr/local/cuda-11.8/bin:$PATH" >/etc/environment',
        "echo export PATH=/usr/local/cuda-11/bin:\\$PATH >> /etc/profile.d/cuda.sh",
    ],
)
def test_another_cuda_by_its_folder(tmp_path, line):
    assert _findings(tmp_path, "x.sh", f"# CUDA 12.6\n{line}\n") == [(2, "recipe-path-other-cuda")]


def test_another_cuda_by_its_module(tmp_path):
    assert _findings(tmp_path, "x.sh", "# CUDA 12.6\nmodule load gcc/12 cuda/11.8\n") == [(2, "recipe-stated-twice")]
    assert _findings(tmp_path, "x.sh", "# CUDA 12.6\nmodule unload cuda/11.8\n") == []


def test_environment_and_requirements_of_a_toml(tmp_path):
    text = (
        'python = [\n  "apex",\n  "ezpz",\n]\n[environment]\ncuda = "x"\nPATH = "/usr/local/cuda-11.8/bin"\n'
        'NVTE_CUDA_INCLUDE_PATH = "/x"\n'
    )
    wrong = [
        (2, "recipe-impostor"),
        (3, "recipe-impostor"),
        (7, "recipe-path-other-cuda"),
        (8, "recipe-unread-variable"),
    ]
    assert _findings(tmp_path, "x.toml", text + '[axes]\ncuda = "12.6"\n') == wrong
    assert _statements(tmp_path, "x.toml", text + '[axes]\ncuda = "12.6"\n')[0] == (10, "cuda", "12.6")
    top = _findings(tmp_path, "x.toml", 'cuda = "12.6"\n' + text)
    assert top == [(line + 1, rule) for line, rule in wrong]


def test_a_stack_of_ones_own_is_found_out(tmp_path):
    text = (Path(__file__).parents[2] / "matrices" / "stacks" / "gpt2-3d.toml").read_text()
    text = re.sub(r"(?m)^python = \[", 'python = [\n    "apex",', text, count=1)
    assert [rule for _, rule in _findings(tmp_path, "own.toml", text)] == ["recipe-impostor"]


def test_stages_that_are_not_built_on_one_another(tmp_path):
    text = (
        "FROM nvidia/cuda:12.6.3-devel-ubuntu22.04 AS build\nENV CUDA_HOME=/usr/local/cuda\n"
        "FROM nvidia/cuda:12.8.1-runtime-ubuntu24.04 AS base\n{}FROM base\nCOPY --from=build /x /x\n{}"
    )
    assert _findings(tmp_path, "Dockerfile", text.format("", "")) == []
    assert _findings(tmp_path, "Dockerfile", text.format("", "ENV CUDA_HOME=/x\n")) == [(6, "recipe-toolkit-variable")]
    twice = text.format("RUN pip install torch==2.8.0\n", "RUN pip install torch==2.7.0\n")
    assert _findings(tmp_path, "Dockerfile", twice) == [(7, "recipe-stated-twice")]


@pytest.mark.parametrize(
    ("cuda", "commit", "fetches"),
    [
        ("12.6.3", "27f501dbe011f4371bff938fe7e09311ab3002fa", True),
        ("12.9.1", "e2743ab5b3803bb672b16437ba98a3b1d4576c50", True),
        ("12.8.1", "27f501dbe011f4371bff938fe7e09311ab3002fa", False),
        ("13.0.2", "e2743ab5b3803bb672b16437ba98a3b1d4576c50", False),
        ("12.6.3", "b7d29fb3b79f0b78b1c369a52aaa6628dabfb0d7", False),
    ],
)
def test_a_build_that_downloads_its_own_compiler_is_reported(tmp_path, cuda, commit, fetches) -> None:
    text = f"""FROM nvidia/cuda:{cuda}-cudnn-devel-ubuntu24.04
RUN git clone https://github.com/Dao-AILab/flash-attention.git && cd flash-attention && git checkout {commit} \\
    && cd hopper && python3 setup.py install
"""
    found = [rule for _, rule in _findings(tmp_path, "Dockerfile", text)]
    assert ("recipe-build-fetches" in found) == fetches
    copied = text.replace("RUN git", "COPY nvcc /root/.flashattn/nvidia/nvcc/\nRUN git", 1)
    assert "recipe-build-fetches" not in [rule for _, rule in _findings(tmp_path, "Dockerfile", copied)]


RUNTIME = "FROM nvidia/cuda:12.6.3-runtime-ubuntu24.04\n"


@pytest.mark.parametrize(
    "install",
    [
        "RUN apt-get update && apt-get install -y cuda-toolkit",
        "RUN apt-get install -y cuda",
        "RUN apt-get install -y nvidia-cuda-toolkit",
        "RUN apt-get install -y cuda-toolkit-12-6=12.6.3-1",
        "RUN conda install -y -c nvidia cuda-toolkit",
        "RUN mamba install -y nvidia::cuda-nvcc",
        "RUN sh cuda_12.6.3_560.35.05_linux.run --silent --toolkit",
        'RUN pip install "cuda-toolkit[nvcc]==12.6.3"',
        "COPY --from=nvidia/cuda:12.6.3-devel-ubuntu24.04 /usr/local/cuda /usr/local/cuda",
        "COPY --from=nvidia/cuda:12.6.3-devel-ubuntu24.04 /usr/local/cuda-12.6 /usr/local/cuda-12.6",
    ],
)
def test_a_toolkit_that_the_recipe_installs(tmp_path, install):
    home = "ENV CUDA_HOME=/usr/local/cuda\n"
    assert _findings(tmp_path, "Dockerfile", f"{RUNTIME}{install}\n{home}") == []
    assert _findings(tmp_path, "Dockerfile", f"{RUNTIME}{home}{install}\n") == []


@pytest.mark.parametrize("install", ["apt-get install -y cuda-drivers", "sh cuda_12.6.3_560.35.05_linux.run --driver"])
def test_a_driver_is_no_toolkit(tmp_path, install):
    text = f"{RUNTIME}RUN {install}\nENV CUDA_HOME=/usr/local/cuda\n"
    assert _findings(tmp_path, "Dockerfile", text) == [(3, "recipe-toolkit-variable")]


@pytest.mark.parametrize("image", ["ubuntu:24.04", "debian:12", "python:3.12", "nvidia/cuda:${TAG}"])
def test_whether_another_image_holds_a_toolkit_is_not_known(tmp_path, image):
    assert _findings(tmp_path, "Dockerfile", f"FROM {image}\nENV CUDA_HOME=/usr/local/cuda\n") == []


@pytest.mark.parametrize("install", ["apt-get install -y cuda-toolkit=12.6.3-1", "./cuda_12.6.3_560.35.05_linux.run"])
def test_the_release_of_an_installed_toolkit(tmp_path, install):
    assert [s[1] for s in _statements(tmp_path, "x.sh", install)] == ["nvcc"]
    assert _statements(tmp_path, "x.sh", "wget https://x/cuda_12.6.3_560.35.05_linux.run\n") == []


CU118, CU126 = (f"https://download.pytorch.org/whl/cu{cuda}" for cuda in (118, 126))


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("requirements.txt", "{te}\ntorch==2.7.1\n--index-url {cu118}\n", [(2, "te-cuda-2.x")]),
        ("requirements.txt", "--index-url={cu118}\ntorch==2.7.1\n{te}\n", [(3, "te-cuda-2.x")]),
        ("requirements.txt", "--extra-index-url {cu126}\ntorch\n{te}\n", [(2, "recipe-unpinned-package")]),
        ("requirements.txt", "--extra-index-url {cu126}\n--extra-index-url {cu118}\ntorch==2.7.1\n{te}\n", []),
        ("x.sh", "export PIP_INDEX_URL={cu118}\npip install torch==2.7.1 {te}\n", [(2, "te-cuda-2.x")]),
        ("x.sh", "PIP_EXTRA_INDEX_URL={cu118} pip install torch==2.7.1 {te}\n", [(1, "te-cuda-2.x")]),
        ("x.sh", "PIP_INDEX_URL={cu118} pip install wheel\npip install torch==2.7.1 {te}\n", []),
        ("x.sh", "export PIP_INDEX_URL={cu118}\npip install torch==2.7.1 {te} -i {cu126}\n", []),
        ("Dockerfile", "FROM a\nENV PIP_INDEX_URL={cu118}\nRUN pip install torch==2.7.1 {te}\n", [(3, "te-cuda-2.x")]),
        ("Dockerfile", "FROM a\nRUN export PIP_INDEX_URL={cu118}\nRUN pip install torch==2.7.1 {te}\n", []),
    ],
)
def test_indexes_that_are_named_elsewhere(tmp_path, name, text, found):
    te = "transformer_engine[pytorch]==2.6.0"
    assert _findings(tmp_path, name, text.format(cu118=CU118, cu126=CU126, te=te)) == found


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("make.sh", "cat > Dockerfile <<EOF\nFROM ubuntu:24.04\nEOF\n", "shell"),
        ("make.bash", "FROM=x\n", "shell"),
        ("make", "#!/bin/sh\ncat > Dockerfile <<EOF\nFROM ubuntu:24.04\nEOF\n", "shell"),
        ("make", "cat > Dockerfile <<EOF\nFROM ubuntu:24.04\nEOF\n", "shell"),
        ("image", "# syntax=docker/dockerfile:1\n\nARG A=1\nfrom --platform=linux/amd64 ubuntu:24.04 as x\n", "dockerfile"),
        ("train.Dockerfile", "from ubuntu:24.04\n", "dockerfile"),
        ("train.dockerfile", "# nothing yet\n", "dockerfile"),
        ("constraints.txt", "# pins\ntorch==2.8.0 \\\n  --hash=sha256:aa\nnumpy<2 ; python_version>='3.9'\n", "requirements"),
        ("reqs.txt", "-r base.txt\n--extra-index-url https://x/cu126\n./here\ngit+https://github.com/NVIDIA/apex@25.08\n", "requirements"),
        ("base.TXT", "torch\n", "requirements"),
        ("guide.txt", "pip install torch\ncd x && make\n", "shell"),
        ("x.sbatch", "#SBATCH -N 2\nsrun x\n", "shell"),
    ],
)  # fmt: skip
def test_kinds(tmp_path, name, text, kind):
    path = tmp_path / name
    path.write_text(text)
    assert read_recipe(load_matrix(), path).kind == kind


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("x.sh", "true\n", "read as a shell script: no contradiction found\n"),
        ("Dockerfile", "FROM x\n", "read as a Dockerfile: no contradiction found\n"),
        ("reqs.txt", "apex\n", "read as a requirements file\n"),
        ("x.toml", 'cuda = "12.6"\n', "read as a TOML of axes: no contradiction found\n"),
    ],
)
def test_the_kind_is_printed(tmp_path, name, text, kind):
    path = tmp_path / name
    path.write_text(text)
    done = CliRunner().invoke(check, [str(path)], standalone_mode=False)
    assert done.stdout.startswith(f"{path}: {kind}")


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("x.sh", "docker run --gpus all \\\n  --network host \\\n  -p 6000:6000 image\n", (3, "recipe-port-with-host-network")),
        ("Dockerfile", "FROM a\nRUN apt-get update \\\n # keys\n && ssh-keygen -A \\\n && true\n", (4, "recipe-key-in-image")),
        ("Dockerfile", "FROM a\ncopy train.py \\\n  hostfile /job/\n", (3, "recipe-hostfile-in-image")),
    ],
)  # fmt: skip
def test_patterns_over_several_lines(tmp_path, name, text, found):
    assert _findings(tmp_path, name, text) == [found]


@pytest.mark.parametrize(
    "text",
    [
        'docker run --network host \\\n  image bash -c "mkdir -p /logs"\n',
        "docker run --network host image && \\\n  ssh -p 22 host\n",
        "docker run --gpus all image\ndocker run --network host image\n",
    ],
)
def test_p_of_another_command_is_no_port(tmp_path, text):
    assert _findings(tmp_path, "x.sh", text) == []


@pytest.mark.parametrize(
    ("name", "text", "unknown"),
    [
        ("x.sh", "pip install torch==2.8.0+cpu\n", []),
        ("requirements.txt", "--index-url https://download.pytorch.org/whl/cpu\ntorch==2.8.0\n", []),
        ("Dockerfile", "FROM nvidia/cuda:10.2-devel-ubuntu18.04\n", ["nvcc"]),
    ],
)
def test_one_statement_is_not_stated_twice(tmp_path, name, text, unknown):
    path = tmp_path / name
    path.write_text(text)
    report = check_recipe(load_matrix(), read_recipe(load_matrix(), path))
    assert report.findings == ()
    assert [s.axis for s in report.unknown] == unknown


@pytest.mark.parametrize("image", ["ubuntu:24.04", "debian:12", "nvidia/cuda:12.6.3-runtime-ubuntu24.04"])
def test_the_os_of_an_image_without_toolkit_is_argued_with_by_nothing(tmp_path, image):
    text = f"FROM {image}\nRUN pip install torch==2.3.1+cu121 --find-links https://download.pytorch.org/whl/cu121\n"
    assert _findings(tmp_path, "Dockerfile", text) == []


DRIVER = 'gpu = "h100"\ndriver = "{}"\ncuda = "13.0"\ntorch = "2.11.0+cu130"\n'


def test_a_driver_below_the_stated_cuda(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(DRIVER.format("550.54"))
    (finding,) = check_recipe(load_matrix(), read_recipe(load_matrix(), path)).findings
    assert (finding.line, finding.lines, finding.rule) == (2, (2, 3, 4), "recipe-driver-below-cuda")
    assert finding.todo == "a driver of at least 580, or install cuda-compat-13-0 on data-center boards"
    assert _findings(tmp_path, "x.toml", DRIVER.format("580.65.06")) == []
    # what a rule refuses is reported once
    assert [rule for _, rule in _findings(tmp_path, "x.toml", DRIVER.format("520.61.05"))] == ["driver-floor-13.0"] * 2
    assert _findings(tmp_path, "x.toml", 'driver = "400.1"\ncuda = "12.6"\n') == [(1, "recipe-driver-below-cuda")]


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("# driver 550.54.14\npip install torch==2.11.0\n", True),
        ("# driver 550.54.14\npip install torch==2.11.0+cu126\n", False),
        ("# driver 550.54.14\npip install torch==2.11.0 -i https://download.pytorch.org/whl/cu126\n", False),
        ("# driver 550.54.14\npip install torch==2.11.0\napt-get install -y cuda-compat-13-0\n", False),
        ("# driver 550.54.14\npip install torch==2.11.0\napt-get install -y cuda-compat-12-8\n", True),
        ("# driver 550.54.14\npip install torch==2.11.0\n# no cuda-compat-13-0\n", True),
    ],
)
def test_a_driver_and_cuda_compat(tmp_path, text, reported):
    assert _findings(tmp_path, "x.sh", text) == ([(1, "recipe-driver-below-cuda")] if reported else [])


def test_the_image_of_a_cuda_has_its_cuda_compat(tmp_path):
    text = "FROM nvidia/cuda:{}-devel-ubuntu24.04\n# driver 550.54.14\nRUN pip install torch==2.11.0+cu130\n"
    assert _findings(tmp_path, "Dockerfile", text.format("13.0.1")) == []
    assert (2, "recipe-driver-below-cuda") in _findings(tmp_path, "Dockerfile", text.format("12.8.1"))


@pytest.mark.parametrize(
    ("ref", "found"),
    [
        ("v2.27.3-1", []),
        ("v1.9.1-aws", []),
        ("${COMMIT}", []),
        ("$COMMIT", []),
        ("v2-main", [(1, "recipe-unpinned-source")]),
    ],
)
def test_refs_of_other_makers(tmp_path, ref, found):
    assert _findings(tmp_path, "x.sh", f"git clone -b {ref} https://github.com/NVIDIA/nccl\n") == found


def test_a_tag_with_a_suffix_is_not_taken_for_the_release(tmp_path):
    assert _statements(tmp_path, "x.sh", "git clone -b v2.6-aws https://github.com/NVIDIA/TransformerEngine\n") == []


PLACED = "flash_attn_interface.py $SITE/flash_attn_3/"


@pytest.mark.parametrize(
    ("te", "place", "reported"),
    [
        ("2.6.0", "true", True),
        ("2.6.0", "echo 1  \\\n # cp flash_attn_interface.py flash_attn_3/\n", True),
        ("2.6.0", f"cp {PLACED}", False),
        ("2.6.0", "wget -P $SITE/flash_attn_3 https://x/hopper/flash_attn_interface.py", False),
        ("2.15.0", "true", False),
    ],
)
def test_flash_attention_3_has_to_be_where_te_imports_it(tmp_path, te, place, reported):
    text = (
        f"git clone {FA3} && cd flash-attention/hopper\ngit checkout 27f501dbe011f4371bff938fe7e09311ab3002fa\n"
        f"python setup.py install\n{place}\npip install transformer_engine[pytorch]=={te}\n"
    )
    assert _findings(tmp_path, "x.sh", text) == ([(2, "recipe-fa3-not-placed")] if reported else [])


CPU = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("x.sh", f"pip install torch==2.7.1 -i {CPU}\npip install flash-attn==2.8.1\n", [(2, "cpu-without-flash-attn")]),
        ("x.sh", "pip install torch==2.7.1+cpu transformer_engine[pytorch]==2.6.0\n", [(1, "cpu-without-te")]),
        ("x.toml", 'cuda = "cpu"\nte = "2.6"\n', [(2, "cpu-without-te")]),
        ("x.sh", f"# driver 550\npip install torch==2.7.1 -i {CPU}\n", []),
        ("Dockerfile", "FROM nvidia/cuda:12.6.3-devel-ubuntu22.04\nRUN pip install torch==2.7.1+cpu\n", []),
    ],
)  # fmt: skip
def test_a_cpu_build_of_torch(tmp_path, name, text, found):
    assert _findings(tmp_path, name, text) == found


@pytest.mark.parametrize(
    "tag", ["11.7.1-cudnn8-devel-ubuntu22.04", "11.6.2-devel-ubuntu20.04", "11.7.1-devel-ubuntu20.04"]
)
def test_an_image_that_envbuild_has_no_base_for_contradicts_nothing(tmp_path, tag):
    assert _findings(tmp_path, "Dockerfile", f"FROM nvidia/cuda:{tag}\nRUN pip install torch==1.13.1\n") == []


@pytest.mark.parametrize(
    ("tag", "run"),
    [
        ("24.12", "pip install --no-build-isolation flash-attn==2.7.4.post1"),
        ("25.03", "pip install --no-build-isolation flash-attn==2.7.4.post1"),
        ("26.02", "pip install --no-build-isolation flash-attn==2.7.4.post1"),
        ("25.03", "git clone https://github.com/NVIDIA/apex && cd apex && git checkout 25.08 && pip install ."),
        ("25.03", "pip install --no-build-isolation git+https://github.com/NVIDIA/TransformerEngine.git@v2.2"),
        ("20.03", "pip install --no-build-isolation git+https://github.com/NVIDIA/apex@22.03"),
    ],
)
def test_what_is_built_again_in_an_ngc_image(tmp_path, tag, run):
    assert _findings(tmp_path, "Dockerfile", f"FROM nvcr.io/nvidia/pytorch:{tag}-py3\nRUN {run}\n") == []


def test_another_torch_in_an_ngc_image_is_reported(tmp_path):
    text = "FROM nvcr.io/nvidia/pytorch:25.03-py3\nRUN pip install torch==2.7.1\n"
    assert _findings(tmp_path, "Dockerfile", text) == [(2, "ngc-25.03")]


@pytest.mark.parametrize(
    ("cuda", "torch", "te"),
    [("13.0.1", "2.9.0", "2.8"), ("11.8.0", "2.3.1", "1.9")],
)
def test_transformer_engine_from_source_needs_no_core_wheel(tmp_path, cuda, torch, te):
    index = f"https://download.pytorch.org/whl/cu{''.join(cuda.split('.')[:2])}"
    text = f"FROM nvidia/cuda:{cuda}-devel-ubuntu22.04\nRUN pip install torch=={torch} -i {index}\nRUN {{}}\n"
    clone = f"git clone -b v{te} https://github.com/NVIDIA/TransformerEngine && pip install ./TransformerEngine"
    url = f"pip install git+https://github.com/NVIDIA/TransformerEngine@v{te}"
    for source in (clone, url):
        assert _findings(tmp_path, "Dockerfile", text.format(source)) == []
    wheel = text.format(f"pip install transformer_engine[pytorch]=={te}.0")
    assert {rule for _, rule in _findings(tmp_path, "Dockerfile", wheel)} <= {"te-core-cu12", "te-core-cu13"}
    assert _findings(tmp_path, "Dockerfile", wheel)


@pytest.mark.parametrize(
    "line",
    [
        "pip install --no-binary flash-attn flash-attn==2.8.1",
        "pip install --only-binary torch torch==2.8.0",
        "uv pip install --no-build-isolation-package flash-attn --upgrade-package torch -P torch flash-attn==2.8.1",
        "uv pip install --reinstall-package torch -p 3.12 torch==2.8.0",
    ],
)
def test_the_value_of_an_option_is_no_requirement(tmp_path, line):
    assert _findings(tmp_path, "x.sh", f"{line}\n") == []


def test_options_of_a_requirements_file(tmp_path):
    text = "flash-attn==2.8.1 --no-binary torch\n--no-binary flash-attn\n--only-binary torch\n"
    assert _findings(tmp_path, "requirements.txt", text) == []
    text = f"--extra-index-url \\\n  {CU118}\ntorch==2.7.1\ntransformer-engine==2.6.0\n"
    assert _findings(tmp_path, "requirements.txt", text) == [(4, "te-cuda-2.x")]


@pytest.mark.parametrize(
    ("again", "newest"),
    [
        ("torch torchvision", False),
        ("--no-cache-dir torch", False),
        ("-U torch", True),
        ("-qU torch", True),
        ("--upgrade torch", True),
        ("--force-reinstall torch", True),
        ("-P torch torch", True),
        ("-P torchvision torch", False),
    ],
)
def test_pip_leaves_an_installed_torch_alone(tmp_path, again, newest):
    text = f"pip install torch==2.6.0 --index-url https://download.pytorch.org/whl/cu124\npip install {again}\n"
    rules = [rule for _, rule in _findings(tmp_path, "x.sh", text)]
    assert ("recipe-unpinned-package" in rules) == newest
    assert ("recipe-stated-twice" in rules) == newest


def test_pip_leaves_the_torch_of_an_ngc_image_alone(tmp_path):
    assert _findings(tmp_path, "Dockerfile", "FROM nvcr.io/nvidia/pytorch:25.03-py3\nRUN pip install torch\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install torch==2.8.0  # not cu118; pip install apex would be wrong",
        "cd x  # don't; pip install ezpz",
        "pip install torch==2.8.0 #apex",
        "true;# pip install apex",
    ],
)
def test_a_trailing_comment_is_no_command(tmp_path, line):
    assert _findings(tmp_path, "x.sh", f"{line}\n") == []
    assert _findings(tmp_path, "Dockerfile", f"FROM ubuntu:24.04\nRUN {line}\n") == []


def test_what_looks_like_a_comment(tmp_path):
    text = 'echo "a # b" && pip install apex\necho $# ${#x} a#b; pip install ezpz\n'
    assert _findings(tmp_path, "x.sh", text) == [(1, "recipe-impostor"), (2, "recipe-impostor")]


OLD_TORCH, NEW_TORCH = f"pip install torch==2.0.1 -i {CU118}", f"pip install torch==2.8.0 -i {CU126}"


@pytest.mark.parametrize(
    "text",
    [
        f'if [ "$CUDA" = 11 ]; then\n  {OLD_TORCH}\nelse\n  {NEW_TORCH}\nfi\n',
        f"if a; then {OLD_TORCH}; elif b; then {NEW_TORCH}; fi\n",
        f'case "$CUDA" in\n  11.8) {OLD_TORCH} ;;\n  12.6|*)\n    {NEW_TORCH}\n    ;;\nesac\n',
        f"{NEW_TORCH} || {OLD_TORCH}\n",
        f"{NEW_TORCH} && pip check \\\n  || {OLD_TORCH}\n",
        f"bash -c '{NEW_TORCH}' || bash -c '{OLD_TORCH}'\n",
        f"{OLD_TORCH}\npip uninstall -y torch\n{NEW_TORCH}\n",
        f"conda create -n a python=3.10 -y\nconda activate a\n{OLD_TORCH}\nconda create -n b python=3.12\n{NEW_TORCH}\n",
        f"conda activate a\n{OLD_TORCH}\nconda activate b\n{NEW_TORCH}\n",
        "module load cuda/11.8\nmodule purge\nmodule load cuda/12.6\n",
        "module load cuda/11.8 gcc\nmodule unload cuda\nml cuda/12.6\n",
        "ml cuda/11.8\nmodule swap cuda cuda/12.6\n",
    ],
)
def test_what_does_not_hold_together(tmp_path, text):
    assert _findings(tmp_path, "x.sh", text) == []


@pytest.mark.parametrize(
    "text",
    [
        f"if a; then\n  true\nfi\n{OLD_TORCH}\n{NEW_TORCH}\n",
        f"if a; then\n  {OLD_TORCH}\n  {NEW_TORCH}\nfi\n",
        f"true || false; {OLD_TORCH}\n{NEW_TORCH}\n",
        f"{OLD_TORCH}\npip uninstall -y apex\n{NEW_TORCH}\n",
        f"conda create -n a python=3.10 -y\nconda activate a\n{OLD_TORCH}\n{NEW_TORCH}\n",
        "module load cuda/11.8\nmodule unload gcc\nmodule load cuda/12.6\n",
        "module load cudatoolkit-standalone/11.8.0\nml cuda/12.6\n",
    ],
)
def test_what_does(tmp_path, text):
    assert "recipe-stated-twice" in [rule for _, rule in _findings(tmp_path, "x.sh", text)]


def test_what_an_arm_of_a_choice_sets_is_not_guessed_at(tmp_path):
    text = "CU=cu118\nif a; then\n  CU=cu126\nfi\npip install torch==2.8.0 -i https://download.pytorch.org/whl/$CU\n"
    assert _statements(tmp_path, "x.sh", text) == [(5, "torch", "2.8.0")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("usage() {\n  cat <<EOF\nUsage: $0\n  Don't run\n  pip install apex\nEOF\n}\n", []),
        ("cat > job.sbatch <<'EOF'\npip install apex\nEOF\npip install ezpz\n", [(4, "recipe-impostor")]),
        ('echo "\nTo finish:\n  pip install apex\n"\npip install ezpz\n', [(5, "recipe-impostor")]),
        ("bash <<EOF\ntrue\npip install apex\nEOF\n", [(3, "recipe-impostor")]),
        ("sudo bash -s <<-'EOF'\n\tpip install apex\n\tEOF\n", [(2, "recipe-impostor")]),
        ("bash -c '\n  pip install ezpz\n'\n", [(2, "recipe-impostor")]),
        ("# CUDA 12.6\ncat >> ~/.bashrc <<'EOF'\nexport CUDA_HOME=/usr/local/cuda-11.8\nEOF\n", [(3, "recipe-path-other-cuda")]),
        ("cat <<nowhere\npip install apex\n", [(2, "recipe-impostor")]),
        ("echo 'First,\npip install apex\nisn t hard.'\n", []),
    ],
)  # fmt: skip
def test_text_in_a_script_is_no_command(tmp_path, text, found):
    assert _findings(tmp_path, "x.sh", text) == found


def test_a_here_document_in_a_script_of_run(tmp_path):
    text = "FROM ubuntu:24.04\nRUN <<EOF\ncat > /x.sh <<XX\npip install apex\nXX\npip install ezpz\nEOF\nRUN pip install apex\n"
    assert _findings(tmp_path, "Dockerfile", text) == [(6, "recipe-impostor"), (8, "recipe-impostor")]


@pytest.mark.parametrize(
    "line",
    [
        "docker run -d --gpus all --network host --ipc host my/image:1 /usr/sbin/sshd -D -p 53412",
        "docker run --rm --network=host img torchrun --nproc 8 -p 3 x.py",
        "docker run --net host -e PORT=1 image bash -lc 'ssh -p 22 x'",
        "sudo apt-get remove -y nvidia-docker2 && sudo apt-get install -y nvidia-container-toolkit",
        "apt-get install -y nvidia-container-toolkit  # replaces nvidia-docker2",
        'echo "nvidia-docker2 is no longer needed"',
    ],
)
def test_what_only_looks_wrong_in_a_script(tmp_path, line):
    assert _findings(tmp_path, "x.sh", f"{line}\n") == []


@pytest.mark.parametrize(
    "line",
    [
        "docker run -it --rm -v /a:/b --network host -p 8888:8888 image",
        "docker run -p 22:22 --gpus '\"device=0\"' --net=host image",
    ],
)
def test_a_port_with_host_networking(tmp_path, line):
    assert _findings(tmp_path, "x.sh", f"{line}\n") == [(1, "recipe-port-with-host-network")]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("RUN ssh-keygen -R github.com", None),
        ("RUN echo 'ssh-keygen -A' >> /entrypoint.sh", None),
        ("RUN true # ssh-keygen -A", None),
        ("RUN --mount=type=ssh ssh-keygen -A", "recipe-key-in-image"),
        ("RUN apt-get update && ssh-keygen -t rsa", "recipe-key-in-image"),
        ("RUN <<EOF\nssh-keygen -A\nEOF", "recipe-key-in-image"),
        ("COPY id_ed25519.pub /root/.ssh/", None),
        ("COPY docs/authorized_keys.md /docs/", None),
        ('COPY ["keys/id_rsa", "/root/.ssh/"]', "recipe-key-in-image"),
        ("COPY make_hostfile.sh /usr/local/bin/", None),
        ("COPY scripts/gen_hostfile.py hostfile.example /opt/", None),
        ("COPY conf/my_hostfile /job/", "recipe-hostfile-in-image"),
    ],
)
def test_what_belongs_into_no_image(tmp_path, line, rule):
    found = [rule for _, rule in _findings(tmp_path, "Dockerfile", f"FROM ubuntu:24.04\n{line}\n")]
    assert found == ([rule] if rule else [])


def test_patterns_leave_out_stages_that_are_not_needed(tmp_path):
    text = "FROM ubuntu:24.04 AS unused\nCOPY id_rsa /root/.ssh/id_rsa\nFROM ubuntu:24.04\nRUN true\n"
    assert _findings(tmp_path, "Dockerfile", text) == []


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        (("git clone https://github.com/NVIDIA/TransformerEngine\ngit clone -b 25.08 https://github.com/NVIDIA/apex\n"
         "cd TransformerEngine\ngit checkout v2.6\n"), [("te", "2.6"), ("apex", "25.08")]),
        (f"git clone {TE} >/dev/null 2>&1 && cd TransformerEngine && git checkout v2.6", [("te", "2.6")]),
        (f"git clone {TE} 2> /dev/null\ncd TransformerEngine\ngit checkout v2.6 &> log", [("te", "2.6")]),
        (f"git clone {TE} & git clone -b 25.08 {APEX} & wait\ncd TransformerEngine && git checkout v2.6", [("te", "2.6"), ("apex", "25.08")]),
        ("pip install torch==2.8.0 2> apex.txt > python3.12", [("torch", "2.8.0")]),
        ("pip install 'torch==2.8.0' \"flash-attn>=2.1\" &> /tmp/log &", [("torch", "2.8.0"), ("flash-attn", ">=2.1")]),
        (f"git clone -o up -c a=b --filter blob:none {TE} && cd TransformerEngine && git checkout v2.6", [("te", "2.6")]),
        (f"git clone {TE} && mv TransformerEngine /opt/te && cd /opt/te && git checkout v2.6", [("te", "2.6")]),
        (f"git clone {TE}; git clone -b 25.08 {APEX}; cd -P -- Transformer*; git checkout v2.6", [("te", "2.6"), ("apex", "25.08")]),
        (f"git clone {TE}; git clone -b 25.08 {APEX}; cd TransformerEngine; cd /tmp/x; cd -; git checkout v2.6", [("te", "2.6"), ("apex", "25.08")]),
        (f"git clone {TE}; git clone -b 25.08 {APEX}; cd TransformerEngine; pushd /tmp/x; popd; git checkout v2.6", [("te", "2.6"), ("apex", "25.08")]),
        (f"git clone {TE}; git clone -b 25.08 {APEX}; git --git-dir=TransformerEngine/.git --work-tree=TransformerEngine checkout v2.6", [("te", "2.6"), ("apex", "25.08")]),
        (f"git clone -b v2.7.4.post1 {FA3}\ncd ../scripts\ngit checkout v1.0\n", [("flash-attn", "2.7.4.post1")]),
        (f"git clone {FA3} $SRC/fa\ncd $FA\ngit checkout v2.7.4.post1\n", [("flash-attn", "2.7.4.post1")]),
        (f"git clone -b v2.7.4.post1 {FA3}\ncd flash-attention/csrc/cutlass\ngit checkout v3.6.0\n", [("flash-attn", "2.7.4.post1")]),
        (("git clone -b v2.6 https://github.com/NVIDIA/TransformerEngine\ngit init apex && cd apex\n"
         "git remote add origin https://github.com/NVIDIA/apex\ngit fetch --depth 1 origin e74a67bb\ngit checkout FETCH_HEAD\n"),
         [("te", "2.6"), ("apex", "e74a67bb")]),
        ("git clone --revision=e74a67bb https://github.com/NVIDIA/apex\n", [("apex", "e74a67bb")]),
        ("git clone --revision e74a67bb https://github.com/NVIDIA/apex\n", [("apex", "e74a67bb")]),
        ("git -c http.sslVerify=false clone -b 25.08 https://github.com/NVIDIA/apex\n", [("apex", "25.08")]),
        (f"git clone -b v2.8.3 {FA3} && cd flash-attention/csrc/layer_norm && pip install .\n", []),
        (f"git clone -b v2.8.3 {FA3} && cd flash-attention && pip install . && pip install ./csrc/layer_norm\n", [("flash-attn", "2.8.3")]),
        (f"pip install git+{FA3}@v2.8.3#subdirectory=csrc/layer_norm\n", []),
        ("git clone -b 24.04.01 https://github.com/ROCm/apex\npip install git+https://github.com/ROCm/TransformerEngine@v2.6\n", []),
    ],
)  # fmt: skip
def test_what_a_pin_is_of(tmp_path, text, stated):
    assert [(axis, spec) for _, axis, spec in _statements(tmp_path, "x.sh", text)] == stated
    assert _findings(tmp_path, "x.sh", text) == []


def test_a_branch_that_looks_like_a_tag(tmp_path):
    text = "git clone https://github.com/NVIDIA/apex && cd apex && git checkout 22.04-dev\n"
    assert _findings(tmp_path, "x.sh", text) == [(1, "recipe-unpinned-source")]


@pytest.mark.parametrize(
    ("text", "torch"),
    [
        ("ARG TORCH=2.0.1\nFROM ubuntu:22.04\n", "2.8.0"),
        ("ARG TORCH=2.0.1\nFROM ubuntu:22.04\nARG TORCH\n", "2.0.1"),
        ("FROM ubuntu:22.04 AS a\nARG TORCH=2.0.1\nFROM ubuntu:22.04\nARG TORCH\n", "2.8.0"),
        ("FROM ubuntu:22.04 AS a\nARG TORCH=2.0.1\nFROM a\n", "2.0.1"),
    ],
)
def test_where_an_argument_holds(tmp_path, text, torch):
    found = _statements(tmp_path, "Dockerfile", f"{text}RUN pip install torch==${{TORCH:-2.8.0}}\n")
    assert [spec for _, axis, spec in found if axis == "torch"] == [torch]


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ("export NVCC_PREPEND_FLAGS='-ccbin /usr/bin/g++-11'", []),
        ("export CC=gcc-11 CXX=g++-11", []),
        ("CUDAHOSTCXX=/usr/bin/g++-11 pip install .", []),
        ("update-alternatives --install /usr/bin/gcc gcc /usr/bin/gcc-11 100", []),
        ("export CC=gcc-13", [(2, "gcc-cuda-11.8")]),
        ("true", []),
    ],
)
def test_the_compiler_that_is_chosen(tmp_path, chosen, found):
    text = f"# CUDA 11.8\nsudo apt-get install -y gcc-11 g++-11 gcc-13 g++-13\n{chosen}\n"
    assert _findings(tmp_path, "x.sh", text) == found


@pytest.mark.parametrize(("name", "reported"), [("OLD_CUDA", False), ("CPATH", True), ("CUDA_ROOT", True)])
def test_which_variables_are_search_paths(tmp_path, name, reported):
    text = f"# CUDA 12.6\nexport {name}=/usr/local/cuda-11.8\n"
    assert _findings(tmp_path, "x.sh", text) == ([(2, "recipe-path-other-cuda")] if reported else [])


@pytest.mark.parametrize("stated", ["# CUDA >= 12.4", "# CUDA >=12.4.1, Python 3.10.12", "# CUDA 12.4.1"])
def test_a_comment_with_a_comparison_or_an_update(tmp_path, stated):
    text = f"{stated}\nexport CUDA_HOME=/usr/local/cuda-11.8\n"
    assert _findings(tmp_path, "x.sh", text) == [(2, "recipe-path-other-cuda")]


def test_two_cudas_are_compared_where_no_cell_has_one(tmp_path):
    text = "FROM nvidia/cuda:12.2.2-devel-ubuntu22.04\nENV CUDA_HOME=/usr/local/cuda-{}\n"
    assert _findings(tmp_path, "Dockerfile", text.format("11.8")) == [(2, "recipe-path-other-cuda")]
    assert _findings(tmp_path, "Dockerfile", text.format("12.2")) == []


def test_every_line_of_an_equal_statement_is_reported(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text("# CUDA 12.6\n" + "export CUDA_HOME=/usr/local/cuda-11.8\n" * 2)
    (finding,) = check_recipe(load_matrix(), read_recipe(load_matrix(), path)).findings
    assert finding.lines == (1, 2, 3)
    assert "nvcc 11.8 (lines 2, 3)" in finding.why
    text = f"# CUDA 11.8\npip install torch==2.0.1 -i {CU118}\nexport CUDA_HOME=/usr/local/cuda-12.6\n"
    assert _findings(tmp_path, "x.sh", text).count((3, "recipe-path-other-cuda")) == 1


@pytest.mark.parametrize(
    ("line", "axis", "spec"),
    [
        ("sudo -E apt-get install -y cuda-toolkit-11-8", "nvcc", "11.8"),
        ("sudo -u root apt-get install -y cuda-toolkit-11-8", "nvcc", "11.8"),
        ("micromamba install python=3.10", "python", "3.10"),
        ("module load cudatoolkit-standalone/11.8.0", "nvcc", "11.8.0"),
        ("pyenv install -s 3.8.10", "python", "3.8"),
        ("uv pip install torch==2.8.0 --torch-backend=cu126", "cuda", "12.6"),
        ("uv pip install --torch-backend cu126 torch==2.8.0", "cuda", "12.6"),
    ],
)
def test_reads_other_tools(tmp_path, line, axis, spec):
    assert (1, axis, spec) in _statements(tmp_path, "x.sh", f"{line}\n")


def test_lines_are_those_of_whole_words(tmp_path):
    text = f"FROM ubuntu:22.04\nRUN pip install \\\n  torchvision==0.22.1 \\\n  --index-url {CU126} \\\n  torch\n"
    assert _findings(tmp_path, "Dockerfile", text) == [(5, "recipe-unpinned-package")]
    text = (
        "FROM ubuntu:22.04\nRUN mkdir -p /opt/apex && \\\n  cd /opt && \\\n  git clone https://github.com/NVIDIA/apex\n"
    )
    assert _findings(tmp_path, "Dockerfile", text) == [(4, "recipe-unpinned-source")]
    assert _findings(tmp_path, "x.sh", "echo a\x0cb\u2028c\npip install apex\n") == [(2, "recipe-impostor")]


@pytest.mark.parametrize(
    "text",
    ['\naxes.cuda = "12.6"\naxes.torch = "2.0.1+cu118"\n', '\n\naxes = { cuda = "12.6", torch = "2.0.1+cu118" }\n'],
)
def test_lines_of_dotted_and_inline_keys(tmp_path, text):
    assert _findings(tmp_path, "x.toml", text) == [(3, "release")]


@pytest.mark.parametrize(
    "text",
    [
        "FROM x\nRUN pip install \\\n" + "".join(f"  p{n}==1.{n} \\\n" for n in range(5000)) + "  last\n",
        "FROM x\nRUN echo " + "x" * 1_000_000 + "\n",
        "FROM x\nRUN true; " + "a; " * 5_000 + "\n",
        "FROM x\nENV A=" + "/home/x/" * 20_000 + "\n",
    ],
)
def test_a_long_command_does_not_take_the_square_of_its_length(tmp_path, text):
    begun = time.process_time()
    assert _findings(tmp_path, "Dockerfile", text) == []
    assert time.process_time() - begun < 10


def test_a_here_document_without_a_command_is_understood(tmp_path):
    text = f"FROM nvidia/cuda:13.0.1-devel-ubuntu24.04\nRUN <<-'END'\n\tset -e\n\t{PIP}\n\tEND\nRUN true\n"
    assert _findings(tmp_path, "Dockerfile", text) == [(4, "nvcc-is-cuda")]
    path = tmp_path / "Dockerfile"
    assert check_recipe(load_matrix(), read_recipe(load_matrix(), path)).not_understood == ()


@pytest.mark.parametrize(
    ("base", "lines", "found"),
    [
        # nothing is compiled: Megatron-core's wheel starts no nvcc
        (
            "12.1.1-cudnn8-devel-ubuntu22.04",
            ["pip install torch==2.6.0+cu124", "pip install megatron-core==0.15.3"],
            [],
        ),
        # apex compares the minor, too
        (
            "12.4.1-cudnn-devel-ubuntu22.04",
            ["pip install torch==2.7.1+cu128", "{apex}"],
            [(3, "apex-nvcc-equals-torch")],
        ),
        ("12.4.1-cudnn-devel-ubuntu22.04", ["pip install torch==2.6.0+cu124", "{apex}"], []),
        # no torch is built for CUDA 12.3, and its major is 12 all the same
        (
            "12.3.2-cudnn9-devel-ubuntu22.04",
            ["pip install torch==2.6.0+cu118", "pip install flash-attn==2.7.4.post1 --no-build-isolation"],
            [(2, "nvcc-is-cuda")],
        ),
        (
            "12.3.2-cudnn9-devel-ubuntu22.04",
            ["pip install torch==2.6.0+cu124", "pip install flash-attn==2.7.4.post1 --no-build-isolation"],
            [],
        ),
    ],
)
def test_a_toolkit_is_compared_as_what_is_compiled_compares_it(tmp_path, base, lines, found):
    apex = (
        "git clone -b 25.04 https://github.com/NVIDIA/apex && cd apex && pip install --no-build-isolation "
        '--config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" ./'
    )
    runs = "".join(f"RUN {line.format(apex=apex)}\n" for line in lines)
    assert _findings(tmp_path, "Dockerfile", f"FROM nvidia/cuda:{base}\n{runs}") == found
