"""What the audit makes of what the probe found; tests/integration/test_image.py has real images."""

import os
import runpy
from dataclasses import dataclass

import pytest

from envbuild.engine.image import Image
from envbuild.errors import AuditError, HostError
from envbuild.paths import data_dir
from envbuild.settings import Settings
from envbuild.util.processes import bounded
from envbuild.verify import audit as audits
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


@dataclass
class Here:
    """A runtime whose containers are processes of this machine, which run `script` whatever they are asked to run."""

    script: str
    image: Image

    def look_up(self, reference, note):
        del reference, note
        return self.image

    def require_runnable(self, image):
        if image.platform == "linux/other":
            raise HostError("the image is for linux/other")

    def confined(self, purpose, image, command, *, entrypoint, seconds, limit, stdin=b""):
        del purpose, image, entrypoint
        return bounded(["sh", "-c", self.script, *command], seconds=seconds, limit=limit, stdin=stdin)


def failure(tmp_path, monkeypatch, script, *, platform="", **labels):
    image = Image(
        reference="mine:1", id="sha256:" + "a" * 64, digest="sha256:" + "a" * 64, size=1, labels=labels, volumes=(),
        environment=(), repo_digests=(), platform=platform,
    )  # fmt: skip
    monkeypatch.setattr(audits, "runtime_for", lambda *_: Here(script, image))
    with pytest.raises((AuditError, HostError)) as caught:
        audits.audit(Settings(cache_dir=tmp_path), "mine:1")
    return caught.value


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'exec: \"python\": not found' >&2; exit 127", 'does not run: exec: "python": not found (exit code 127)'),
        ("exit 139", "does not run: it printed nothing (exit code 139)"),
        ("echo no answer", "cannot be read"),
    ],
)
def test_an_image_that_does_not_start_says_what_it_printed_and_what_to_do(tmp_path, monkeypatch, script, says):
    ours = failure(tmp_path, monkeypatch, script, **{"io.envbuild.cell": "cpu"})
    assert says in ours.what
    assert "envbuild run mine:1 -- python -V" in ours.hint
    assert "only images that envbuild built" not in ours.hint  # envbuild built it
    other = failure(tmp_path, monkeypatch, script, maintainer="somebody")
    assert says in other.what
    assert "it has no label of envbuild" in other.hint


def test_an_image_for_another_processor_is_not_started(tmp_path, monkeypatch):
    assert failure(tmp_path, monkeypatch, "exit 1", platform="linux/other").what == "the image is for linux/other"
