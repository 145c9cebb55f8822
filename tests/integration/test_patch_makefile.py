"""The makefile patch: `make` builds an extension that the running Python imports."""

import shutil
import subprocess

import pytest
from patch_support import REQUIREMENTS, environment_of, sides, the_patch, venv

PATCH = the_patch("makefile")
PATH = PATCH.files[0].path

BETWEEN = {
    0: """CXXFLAGS += -O0 -shared -std=c++17 -fPIC
CPPFLAGS += $(shell python3 -m pybind11 --includes)
""",
    1: """default: $(LIBNAME)$(LIBEXT)

%$(LIBEXT): %.cpp
\t$(CXX) $(CXXFLAGS) $(CPPFLAGS) $< -o $@
""",
}

# a module without pybind11's templates, which take half a minute to compile; real Megatron is compiled in its image
HELPERS = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "helpers", "", -1, methods};
PyMODINIT_FUNC PyInit_helpers() { return PyModule_Create(&module); }
"""

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not (shutil.which("make") and shutil.which("g++")), reason="needs make and g++"),
]


@pytest.fixture(scope="module", params=["stand-in", "real"])
def make(request, tmp_path_factory):
    before_and_after = sides(request.param, PATCH, PATH, BETWEEN)
    python = venv(*REQUIREMENTS)
    environment = environment_of(python, HOME="/nonexistent")

    def run(side):
        folder = tmp_path_factory.mktemp("make")
        (folder / "Makefile").write_text(before_and_after[side])
        (folder / "helpers.cpp").write_text(HELPERS)
        subprocess.run(["make"], cwd=folder, env=environment, check=True, capture_output=True)
        code = "import helpers; print(helpers.answer(), helpers.__file__)"
        command = ["python3", "-c", code]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    return run


def test_the_extension_is_the_running_pythons(make):
    done = make(1)
    assert done.stdout.startswith("42 "), done.stderr
    suffix = subprocess.run(
        [venv(*REQUIREMENTS), "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().endswith(f"helpers{suffix.stdout.strip()}")


def test_before_make_succeeded_and_nothing_could_be_imported(make):
    assert "No module named 'helpers'" in make(0).stderr
