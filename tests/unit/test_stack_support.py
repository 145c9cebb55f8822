"""The defects that the stand-ins of the stacks' images have: which they are, and that no other one passes."""

import base64
import hashlib
import json
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

from stack_support import DEFECTS, defects_of, image, torch_wheel

from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.fleet import gpus_in
from envbuild.matrix.load import load_matrix
from envbuild.solver.solve import solve
from envbuild.stacks.load import load_stack, stack_names
from envbuild.verify.binaries.elf import Binary
from envbuild.verify.binaries.examine import examine
from envbuild.verify.binaries.files import Files
from envbuild.verify.binaries.gpu_code import Code, GpuCode
from envbuild.verify.binaries.process import RootExpectation

# The cubins of PyPI's wheels, as `envbuild audit WHEEL` lists them; none of them holds PTX.
WHEELS = {
    "1.8.0": {"libtorch_cuda.so": "35 37 50 60 61 70"},
    "2.0.1": {"libtorch_cuda.so": "37 50 60 70 75 80 86", "libtorch_cuda_linalg.so": "37 50 60 70 80 86"},
    "2.8.0": {
        "libtorch_cuda.so": "70 75 80 86 89 90 90a 100 100a 120 120a",
        "libtorch_cuda_linalg.so": "50 60 70 80 86 90 100 120",
    },
}
SITE = {"1.8.0": "usr/local/lib/python3.8/dist-packages", "2.0.1": "opt/venv/lib/python3.10/site-packages"}


def cell_of(stack):
    pins = tuple(Pin(axis=a, spec=s, origin=f"stack {stack}") for a, s in load_stack(stack).axes.items())
    return solve(load_matrix(), Request(pins=pins, repository=True)).cell


def audit_of(stack, **more):
    """What the audit says of the torch of PyPI whose release the stack's cell names, and of other files."""
    versions = cell_of(stack).versions
    release = versions["torch"].partition("+")[0].removesuffix("a0")
    site = SITE.get(release, SITE["2.0.1"])
    files = Files()
    for name, sms in ({"_C.so": ""} | {f"lib/{name}": sms for name, sms in WHEELS[release].items()}).items():
        code = frozenset(Code(sm=int(sm.rstrip("a")), suffix=sm.lstrip("0123456789"), ptx=False) for sm in sms.split())
        gpu = GpuCode(containers={code: 1}) if code else None
        files.binaries[f"{site}/torch/{name}"] = Binary(kind="library", machine="x86-64", size=1 << 21, gpu=gpu)
    files.binaries |= {f"{site}/{name}": binary for name, binary in more.items()}
    sms = tuple(int(gpu.removeprefix("sm_")) for gpu in gpus_in(versions))
    checks = [asdict(each) for each in examine(files, RootExpectation(sms=sms))]
    return {"checks": checks, "defects": sum(check["verdict"] == "failed" for check in checks)}


@pytest.mark.parametrize("stack", stack_names())
def test_the_list_is_what_the_audit_finds_of_pypis_torch(stack):
    assert defects_of(audit_of(stack)) == DEFECTS.get(stack, {})


def test_the_list_names_stacks_alone():
    assert set(DEFECTS) <= set(stack_names())


@pytest.fixture
def envbuild(tmp_path, monkeypatch):
    """An `envbuild` that answers with this audit; the calls that it got."""
    (tmp_path / "envbuild").mkdir()
    monkeypatch.chdir(tmp_path)

    def answers(audit):
        answer = {"audit": audit, "not_proven": ["the image of this lock: base was replaced by docker-image://root"]}
        code = 6 if audit["defects"] else 0
        (tmp_path / "calls").write_text("")
        (tmp_path / "envbuild" / "__init__.py").touch()
        (tmp_path / "envbuild" / "__main__.py").write_text(
            f"import sys\nopen('calls', 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"if sys.argv[1] == 'image':\n    print({json.dumps(answer)!r})\n    sys.exit({code})\n"
        )
        return lambda: [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]

    return answers


@pytest.mark.parametrize(
    ("stack", "flags", "called"),
    [
        ("llm-jp", (), ["image", "smoke"]),  # `image` ran no smoke tests: the audit found a defect
        ("gpt2-3d", ("--no-smoke",), ["image"]),
        ("alcf", (), ["image"]),
    ],
)
def test_an_image_with_the_defects_of_its_stand_in_is_taken(envbuild, stack, flags, called):
    calls = envbuild(audit_of(stack))
    assert image(stack, Path("lock"), "root", *flags) == f"envbuild-test:{stack}"
    assert calls() == called


OTHER = Binary(kind="library", machine="x86-64", size=1, runpath=("/tmp/build",))
OLD = Binary(
    kind="library",
    machine="x86-64",
    size=1,
    gpu=GpuCode(containers={frozenset({Code(sm=70, suffix="", ptx=False)}): 1}),
    offered=frozenset({b"PyInit_fused"}),
)


@pytest.mark.parametrize("stack", ["llm-jp", "gpt2-3d", "alcf"])
@pytest.mark.parametrize("more", [{"other.so": OTHER}, {"fused.so": OLD}])
def test_any_other_defect_fails(envbuild, stack, more):
    audit = audit_of(stack, **more)
    assert audit["defects"] == len({*DEFECTS.get(stack, {}), "search paths" if "other.so" in more else "GPU code"})
    calls = envbuild(audit)
    with pytest.raises(AssertionError, match=next(iter(more))):
        image(stack, Path("lock"), "root", "--no-smoke")
    assert calls() == ["image"]


def test_a_defect_that_is_gone_fails(envbuild):
    calls = envbuild({"checks": [], "defects": 0})
    with pytest.raises(AssertionError):
        image("llm-jp", Path("lock"), "root", "--no-smoke")
    assert calls() == ["image"]


def test_a_wheel_that_states_another_version_has_the_hash_of_each_of_its_files(tmp_path, monkeypatch):
    files = {
        "torch/version.py": b"__version__ = '2.7.1'\ncuda: Optional[str] = '12.6'\n",
        "torch/_C.so": b"code",
        "torch-2.7.1.dist-info/METADATA": b"Name: torch\nVersion: 2.7.1\n",
        "torch-2.7.1.dist-info/RECORD": b"torch/version.py,sha256=old,1\n",
    }

    def download(*command):
        place = Path(command[command.index("--dest") + 1]) / "torch-2.7.1-cp312-cp312-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(place, "w") as out:
            for name, data in files.items():
                out.writestr(name, data)

    monkeypatch.setattr("stack_support.run", download)
    made = torch_wheel(tmp_path, "torch==2.7.1", "3.12", "2.7.1+cu126", "12.6", "_2_28")
    with zipfile.ZipFile(made) as held:
        inside = {name: held.read(name) for name in held.namelist()}
    info = "torch-2.7.1+cu126.dist-info"
    assert inside["torch/version.py"] == b"__version__ = '2.7.1+cu126'\ncuda: Optional[str] = '12.6'\n"
    assert b"\nVersion: 2.7.1+cu126\n" in inside[f"{info}/METADATA"]
    listed = {}
    for line in inside[f"{info}/RECORD"].decode().splitlines():
        name, digest, size = line.split(",")
        listed[name] = (digest, size)
    assert listed.pop(f"{info}/RECORD") == ("", "")
    assert listed == {
        name: ("sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("="), str(len(data)))
        for name, data in inside.items()
        if name != f"{info}/RECORD"
    }
