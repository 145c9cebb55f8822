"""The shell rendering for real: a CPU cell from a lock, with one component compiled, on this host."""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from envbuild.components.base import Wheel
from envbuild.lock.files import Locked
from envbuild.lock.inputs import PythonGroup, inputs_of
from envbuild.lock.make import unlocked
from envbuild.lock.model import FileSource, GitSource
from envbuild.lock.python import resolve, uv_executable
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.plan.plan import Plan, Stage, plan_of
from envbuild.plan.shell import script
from envbuild.settings import load_settings
from envbuild.solver.solve import solve
from envbuild.stacks.model import Stack

TORCH = "2.13.0+cpu"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

SETUP = "from setuptools import Extension, setup\nsetup(name='tiny', version='1.0', ext_modules=[Extension('tiny', ['tiny.c'])])\n"
TINY = """#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", 0, -1, 0};
PyMODINIT_FUNC PyInit_tiny(void) { return PyModule_Create(&module); }
"""


def sdist(folder: Path, code: str) -> Path:
    path = folder / "tiny-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, text in (("setup.py", SETUP), ("tiny.c", code)):
            info = tarfile.TarInfo(f"tiny-1.0/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    sdist(folder, TINY)
    return folder


@pytest.fixture(scope="module")
def plan(sources) -> Plan:
    """A CPU cell whose Python side is locked for real, with a component of one C file."""
    matrix, settings = load_matrix(), load_settings()
    pins = {"cuda": "cpu", "torch": TORCH, "python": PYTHON}
    request = Request(pins=tuple(Pin(axis=a, spec=s, origin=f"--{a}") for a, s in pins.items()))
    inputs = inputs_of(matrix, solve(matrix, request).cell)
    tools = PythonGroup(name="tools", requirements=("setuptools<82", "wheel"))
    groups = [g for g in inputs.python if g.requirements] + [tools]
    sets = tuple(resolve(settings, g, python=PYTHON, glibc=inputs.cell.versions["glibc"])[1] for g in groups)
    archive = sources / "tiny-1.0.tar.gz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    source = FileSource(name="tiny", url="https://upstream.invalid/tiny-1.0.tar.gz", sha256=digest)
    lock = unlocked(matrix, inputs).model_copy(update={"missing": (), "python": sets, "files": (source,)})
    made = plan_of(matrix, Locked(lock=lock, pylocks={}))
    component = Wheel(axis="tiny", distribution="tiny", module="tiny", extensions=("tiny",), job_gib=0.5, version="1.0")
    stage = Stage(name="wheel-tiny", title="tiny", inputs={"source": digest})
    return dataclasses.replace(made, components=(component,), stages=(*made.stages, stage))


@pytest.fixture(scope="module")
def run(plan, sources, tmp_path_factory):
    """Run the script into a prefix and return what it printed."""
    place = tmp_path_factory.mktemp("shell")
    settings = load_settings()
    links = [Path(p) for p in settings.find_links if Path(p).is_dir()]

    def call(prefix: str, *args: str, uv: bool = True, text: str | None = None, **env: str):
        file = place / "cell.sh"
        file.write_text(text or script(plan))
        wheels = ("--wheels", str(links[0])) if links and "--wheels" not in args else ()
        given = os.environ | {
            "ENVBUILD_PREFIX": str(place / prefix),
            "ENVBUILD_PYTHON": sys.executable,
            "ENVBUILD_SOURCES": str(sources),
        }
        given |= {"ENVBUILD_UV": uv_executable()} if uv else {"PATH": "/usr/local/bin:/usr/bin:/bin"}
        done = subprocess.run(
            ["sh", file, *args, *wheels], env=given | env, capture_output=True, text=True, check=False, cwd=place
        )
        return done, place / prefix

    yield call
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def made(run) -> Path:
    """The prefix of a finished run."""
    done, prefix = run("own")
    assert done.returncode == 0, done.stderr
    assert f". {prefix}/envbuild/activate.sh" in done.stdout
    return prefix


def python(prefix: Path, code: str) -> str:
    activated = f'. {prefix}/envbuild/activate.sh && exec python -c "$1"'
    done = subprocess.run(["sh", "-c", activated, "sh", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_environment_is_what_the_lock_lists(made, plan):
    code = "import torch, tiny; print(torch.__version__, torch.ones(2).sum().item(), tiny.__file__)"
    found = python(made, code).split()
    assert found[:2] == [TORCH, "2.0"]
    assert found[2].startswith(f"{made}/venv/")
    listed = "import json; from importlib import metadata as m; print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
    names = {name.lower().replace("_", "-"): version for name, version in json.loads(python(made, listed)).items()}
    assert names == {"tiny": "1.0"} | {p.name: p.version for p in plan.lock.python_set("torch").packages}
    record = json.loads((made / "envbuild" / "record.json").read_text())
    assert record["built"]["tiny"]["extensions"] == ["tiny"]
    assert record["adopted"] is None
    assert json.loads((made / "envbuild" / "expected.json").read_text())["lock_digest"] == plan.lock.digest


def test_a_second_run_repeats_nothing(made, run):
    before = sorted((p, p.stat().st_mtime_ns) for p in (made / "venv").rglob("*.py"))
    done, _ = run("own", "--offline")
    assert done.returncode == 0, done.stderr
    assert "0 steps ran, 4 were there" in done.stderr
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (made / "venv").rglob("*.py"))


def test_a_torch_of_the_host_is_adopted_and_recorded_without_uv(made, run, tmp_path):
    """The first run's environment is a host that has torch; pip does what uv did."""
    done, prefix = run("adopting", "--adopt-torch", str(made / "venv/bin/python"), uv=False)
    assert done.returncode == 0, done.stderr
    assert "no uv, so pip" in done.stderr
    found = python(prefix, "import torch, numpy, tiny; print(torch.__file__, numpy.__file__, tiny.__file__)").split()
    assert [Path(p).is_relative_to(made) for p in found] == [True, True, False]
    # The host's torchrun would start the host's Python, which has no tiny.
    (tmp_path / "rank.py").write_text("import os, tiny; print('rank', os.environ['RANK'], 'has', tiny.__name__)\n")
    launched = f"import subprocess; subprocess.run(['torchrun', '--standalone', '{tmp_path}/rank.py'], check=True)"
    assert python(prefix, launched) == "rank 0 has tiny"
    expected = json.loads((prefix / "envbuild" / "expected.json").read_text())
    assert expected["adopted"]["torch"] == TORCH
    assert expected["packages"]["torch"] == TORCH
    assert json.loads((prefix / "envbuild" / "record.json").read_text())["adopted"]["torch"] == TORCH
    # What was compiled here serves another prefix on the same torch.
    again, other = run(
        "other", "--adopt-torch", str(made / "venv/bin/python"), "--wheels", str(prefix / "envbuild/built"), "--offline"
    )
    assert again.returncode == 0, again.stderr
    assert "compiled before" in (other / "envbuild/logs/wheel-tiny.log").read_text()


def test_a_stack_is_fetched_compiled_and_checked_below_the_prefix(made, run, plan, tmp_path):
    """The image's paths in a stack's steps and environment become the prefix's; a failing check fails the run."""
    toy = tmp_path / "toy"
    toy.mkdir()
    (toy / "half.c").write_text("int half(int x) { return x / 2; }\n")

    def git(*args: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(
            ["git", *identity, *args], cwd=toy, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "1")
    commit, tree = git("rev-parse", "HEAD"), git("rev-parse", "HEAD^{tree}")
    stack = Stack.model_validate(
        {
            "name": "toy", "title": "Toy", "about": "Toy", "source": "https://upstream.invalid/toy",
            "repository": {"name": "toy", "url": "https://upstream.invalid/toy.git", "commit": commit, "path": "/workspace/toy"},
            "stated": {},
            "environment": {"TOY_HOME": "/workspace/toy"},
            "steps": [
                {"name": "half", "run": "gcc -shared -fPIC -o half.so half.c", "compiles": True, "keep": ["half.so"]},
                {"name": "loads", "check": "python -c \"import ctypes, os, torch; assert ctypes.CDLL(os.environ['TOY_HOME'] + '/half.so').half(6) == 3; assert '/opt/venv' not in torch.__path__[0]\""},
            ],
        }
    )  # fmt: skip
    lock = plan.lock.model_copy(
        update={"sources": (GitSource(name="toy", url=stack.repository.url, commit=commit, tree=tree),), "stack": "toy"}
    )
    inputs = inputs_of(load_matrix(), lock.as_cell, stack=stack)
    assert any(t.name == "toy" for t in inputs.trees)
    whole = plan_of(load_matrix(), Locked(lock=lock, pylocks={}), stack)
    adopt = ("--adopt-torch", str(made / "venv/bin/python"))
    done, prefix = run("stack", *adopt, text=script(whole), ENVBUILD_SOURCES=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert python(prefix, "import os; print(os.environ['TOY_HOME'])") == f"{prefix}/toy"
    assert not (prefix / "toy" / ".git").exists()
    again, _ = run("stack", *adopt, text=script(whole), ENVBUILD_SOURCES=str(tmp_path))
    assert "stack toy: there" in again.stderr
    broken = (
        script(whole).replace(".half(6) == 3", ".half(6) == 4").replace("stack_key=$(key_of ", "stack_key=$(key_of x ")
    )
    done, _ = run("stack", *adopt, text=broken, ENVBUILD_SOURCES=str(tmp_path))
    assert done.returncode == 5
    assert "AssertionError" in done.stderr


def test_another_torch_is_refused_with_both_versions(made, run, plan):
    other = script(plan).replace(f"look {TORCH} ", "look 2.12.1+cpu ")
    done, prefix = run("refused", "--adopt-torch", str(made / "venv/bin/python"), text=other)
    assert done.returncode == 4
    assert f"is {TORCH}, the lock says 2.12.1+cpu" in done.stderr
    assert not (prefix / "venv").exists()


def test_a_changed_source_is_refused(made, run, tmp_path):
    sdist(tmp_path, TINY + "\n")
    done, _ = run("changed", "--adopt-torch", str(made / "venv/bin/python"), ENVBUILD_SOURCES=str(tmp_path))
    assert done.returncode == 4
    assert "is not what the lock names" in done.stderr


def test_a_failed_compile_names_its_log_and_the_next_run_goes_on(made, run, plan, tmp_path):
    broken = sdist(tmp_path, TINY.replace("return", "retrun"))
    digest = hashlib.sha256(broken.read_bytes()).hexdigest()
    text = script(plan).replace(plan.lock.files[0].sha256, digest)
    adopt = ("--adopt-torch", str(made / "venv/bin/python"))
    done, prefix = run("broken", *adopt, text=text, ENVBUILD_SOURCES=str(tmp_path))
    assert done.returncode == 5
    assert "retrun" in done.stderr
    assert f"the whole log is in {prefix}/envbuild/logs/wheel-tiny.log" in done.stderr
    done, _ = run("broken", *adopt)
    assert done.returncode == 0, done.stderr
    assert "build tools: there" in done.stderr
