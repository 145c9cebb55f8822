"""What the audit makes of what the probe found; tests/integration/test_image.py has real images."""

import os
import runpy

import pytest

from envbuild.paths import data_dir
from envbuild.verify.judge import judge

PIP, TOOLKIT = "/opt/venv/lib/python3.10/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12", "/usr/local/cuda-12.6/"


def verdicts(*, flavor: str = "runtime", components: tuple[str, ...] = (), **facts) -> dict[str, tuple[str, str]]:
    found = {
        "expected": {
            "packages": {"six": "1.17.0"},
            "components": {name: {} for name in components},
            "flavor": flavor,
            "cell": {"cuda": "12.6", "base": "nvidia-cuda-12.6.3-ubuntu22.04"},
        },
        "distributions": {"six": "1.17.0"},
        "distributions_of_base": [],
        "torch": {"version": "2.8.0", "cuda": "12.6"},
        "imports": {},
        "built": {},
        "compilers": [],
        "cuda_runtimes": [PIP],
        "caches": [],
        "caches_total": 0,
        "bytes": 100,
        "installed_bytes": 100,
    }
    return {check.name: (check.verdict, check.text) for check in judge(found | facts)}


def test_a_sound_image_has_no_defect():
    assert {verdict for verdict, _ in verdicts().values()} == {"passed"}


@pytest.mark.parametrize(
    ("flavor", "runtimes", "fault"),
    [
        ("devel", [PIP, f"{TOOLKIT}lib64/libcudart.so.12.6.77"], None),
        ("devel", [f"{TOOLKIT}lib64/libcudart.so.12.6.77"], None),
        ("devel", [PIP, f"{TOOLKIT}lib64/libcudart.so.12.4.127"], "libcudart.so.12.4.127 is not of CUDA 12.6"),
        ("devel", [PIP, PIP + "x"], "2 CUDA runtimes"),
        ("runtime", [PIP, f"{TOOLKIT}lib64/libcudart.so.12.6.77"], "2 CUDA runtimes"),
        ("runtime", ["/opt/venv/lib/python3.10/site-packages/torch/lib/libcudart-d0da41ae.so.11.0"], None),
        ("runtime", [], "no CUDA runtime"),
    ],
)
def test_a_toolkit_next_to_torch_belongs_to_a_devel_image_and_has_its_cuda(flavor, runtimes, fault):
    verdict, text = verdicts(flavor=flavor, cuda_runtimes=runtimes)["one CUDA"]
    assert verdict == ("failed" if fault else "passed")
    assert not fault or fault in text


@pytest.mark.parametrize(("found", "verdict"), [("/opt/venv/include", "passed"), (None, "failed")])
def test_transformer_engine_finds_the_headers_of_cuda(found, verdict):
    assert verdicts(components=("te",), cuda_headers=found)["CUDA headers"][0] == verdict
    assert "CUDA headers" not in verdicts(components=("apex",), cuda_headers=found)


def test_the_probe_looks_for_the_headers_where_transformer_engine_does(tmp_path, monkeypatch):
    find = runpy.run_path(str(data_dir("dockerfiles") / "recipe" / "image-probe"))["cuda_headers"]
    for name in ("NVTE_CUDA_INCLUDE_DIR", "CUDA_HOME", "CUDA_DIR"):
        monkeypatch.delenv(name, raising=False)
    is_file = os.path.isfile  # this machine may itself have a toolkit
    monkeypatch.setattr(os.path, "isfile", lambda path: not path.startswith("/usr/local/") and is_file(path))
    monkeypatch.setenv("NVTE_CUDA_INCLUDE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    (tmp_path / "cuda" / "include").mkdir(parents=True)
    assert find() is None
    (tmp_path / "cuda" / "include" / "cuda_runtime.h").touch()
    assert find() == str(tmp_path / "cuda" / "include")
    (tmp_path / "cuda_runtime.h").touch()
    assert find() == str(tmp_path)


def test_what_is_in_the_base_image_is_neither_foreign_nor_measured():
    provided = {"distributions": {"six": "1.17.0", "numpy": "1.19.2"}, "bytes": 200}
    assert "numpy 1.19.2 is not in the lock" in verdicts(**provided)["packages"][1]
    of_base = verdicts(**provided, distributions_of_base=["numpy"])
    assert of_base["packages"] == (
        "passed",
        "1 distribution, each at its locked version, and no other but 1 of the base image",
    )
    assert of_base["size"][0] == "unproven"


def test_a_locked_distribution_is_the_environments_own_at_its_version():
    assert (
        "six is 1.16.0, the lock says 1.17.0"
        in verdicts(distributions={"six": "1.16.0"}, distributions_of_base=["six"])["packages"][1]
    )
