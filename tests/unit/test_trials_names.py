"""What a release's Python asks of another, and whether that has it: read from sources, never imported."""

import pytest

from envbuild.curate.trials.imports import judged, needs_of
from envbuild.curate.trials.modules import Library, names_of
from envbuild.curate.trials.names import Consumer, try_names

TORCH = {
    "torch/__init__.py": """
import sys
from typing import TYPE_CHECKING
from torch._C import *
from ._tensor import Tensor
from torch._ops import ops
from torch import nn as nn
if TYPE_CHECKING:
    from torch._C._functions import *
    from torch.types import Declared
for name in dir(_C):
    globals()[name] = getattr(_C, name)
sys.modules.setdefault(f"{__name__}.ops", ops)
""",
    "torch/_C.cpython-311-x86_64-linux-gnu.so": "",
    "torch/_C/__init__.pyi": "float16: int\ndef empty(): ...\n",
    "torch/_C/_functions.pyi": "def mean(): ...\n",
    "torch/_tensor.py": "class Tensor: ...\n",
    "torch/_ops.py": "ops = object()\n",
    "torch/types.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor\nNumber = int\n",
    "torch/nn/__init__.py": "from .modules import *\nfrom . import functional\n",
    "torch/nn/functional.py": "def gelu(): ...\n",
    "torch/nn/modules/__init__.py": "from .linear import Linear, _hidden\n__all__ = ['Linear', '_listed']\n_listed = 1\n",
    "torch/nn/modules/linear.py": "class Linear: ...\nclass _hidden: ...\n",
    "torch/onnx/__init__.py": "def export(): ...\ndef gone(): ...\ndel gone\n",
    "torch/utils/lazy.py": "def __getattr__(name):\n    if name == 'Known':\n        return 1\n    raise AttributeError(name)\n",
    "torch/utils/broken.py": "def (:\n",
    "torch/plain/inner.py": "x = 1\n",
    "torch/dtypes.py": "def _add(kind):\n    from torch import dtypes\n    setattr(dtypes, kind.__name__, kind)\n",
    "torch/filled.py": "def _add(kind):\n    setattr(filled, kind.__name__, kind)\n",
    "torch/filled.pyi": "class Kind: ...\n",
    "torch/newer.py": "def _add(kind):\n    setattr(newer, kind.__name__, kind)\n",
    "torch/newer.pyi": "x: int\nclass Kind(A[(]):\n    inner: int\ntype B[T = int] = T\n",
    "torch/cuda/__init__.py": "def is_available(): ...\n",
    "torch/multiprocessing/__init__.py": "from multiprocessing import *\n",
    "torch/share/data.json": "",
    "torch/listed.py": "for item in ['_first', 'second']:\n    globals()[item] = getattr(x, item)\n",
}


@pytest.fixture
def torch():
    return Library(TORCH, TORCH.__getitem__)


@pytest.mark.parametrize(
    ("module", "name", "answer"),
    [
        ("torch", "Tensor", "yes"),
        ("torch", "nn", "yes"),
        ("torch", "float16", "yes"),  # through `from torch._C import *`, which a stub describes
        ("torch", "mean", "yes"),  # made while it runs, and declared for type checkers
        ("torch", "Declared", "yes"),
        ("torch.newer", "Kind", "yes"),  # in a stub of a newer syntax
        ("torch.newer", "inner", "unknown"),
        ("torch.cuda", "FloatTensor", "yes"),
        ("torch.cuda", "GoneTensor", "no"),
        ("torch.multiprocessing", "Process", "yes"),  # of Python's own library
        ("torch.multiprocessing", "Gone", "unknown"),
        ("torch.listed", "_first", "yes"),
        ("torch.filled", "Kind", "yes"),  # made while it runs, and declared in its stub
        ("torch.filled", "Other", "unknown"),
        ("torch.listed", "third", "unknown"),
        ("torch", "whatever", "unknown"),  # it writes to globals()
        ("torch.nn", "Linear", "yes"),
        ("torch.nn", "_listed", "yes"),  # by __all__
        ("torch.nn", "_hidden", "no"),
        ("torch.nn", "functional", "yes"),
        ("torch.nn", "Missing", "no"),
        ("torch.nn.functional", "gelu", "yes"),
        ("torch.nn.functional", "swish", "no"),
        ("torch.types", "Number", "yes"),
        ("torch.types", "Tensor", "no"),  # for type checkers alone, and the module makes nothing while it runs
        ("torch.onnx", "export", "yes"),
        ("torch.onnx", "gone", "no"),
        ("torch.onnx", "_type_utils", "no"),
        ("torch.onnx._type_utils", "JitScalarType", "no"),
        ("torch.utils.lazy", "Known", "yes"),
        ("torch.utils.lazy", "Other", "unknown"),
        ("torch.dtypes", "UInt32", "unknown"),  # filled by a function that something else calls
        ("torch.utils.broken", "x", "unknown"),
        ("torch.utils", "lazy", "yes"),
        ("torch.plain", "inner", "yes"),
        ("torch.plain", "other", "no"),
        ("torch._C", "empty", "yes"),
        ("torch._C", "hidden_in_the_binary", "unknown"),
        ("torch._C._functions", "mean", "yes"),
        ("torch._C._onnx", "TensorProtoDataType", "unknown"),  # a compiled module may hold others
        ("torch.ops", "aten", "yes"),
    ],
)
def test_a_library_answers_for_each_name(torch, module, name, answer):
    assert torch.has(module, name) == answer


def test_star_imports_in_a_circle_end():
    files = {"a/__init__.py": "from .b import *\n", "a/b.py": "from a import *\n"}
    assert Library(files, files.__getitem__).has("a", "x") == "unknown"


def test_the_names_of_a_module_are_those_behind_any_condition():
    names = names_of(
        "try:\n    import x.y as z\nexcept ImportError:\n    z = None\nif 1:\n    class C: ...\n"
        "with open('f') as f:\n    a, (b, *c) = 1, (2, 3)\nfor d in (): pass\ndef e():\n    global g\n    h = 1\n",
        "m",
        is_package=False,
    )
    assert names.bound == {"z", "C", "f", "a", "b", "c", "d", "e", "g"}
    assert not names.open


def states(source, missing=("torch.gone",)):
    """Return `name: state` for what `source` asks of torch; all but `missing` is there."""

    def has(need):
        if need.module.partition(".")[0] != "torch":
            return None
        return "no" if str(need).startswith(missing) else "yes"

    return {str(need): state for need, state in judged(needs_of(source, "pkg.mod", is_package=False), has)}


@pytest.mark.parametrize(
    ("source", "state"),
    [
        ("import torch.gone", "missing"),
        ("from torch.gone import x", "missing"),
        ("from torch import gone", "missing"),
        ("import torch\nx = torch.gone", "missing"),
        ("import torch as t\nclass C(t.gone): ...", "missing"),
        ("import torch\n@torch.gone\ndef f(): ...", "missing"),
        ("import torch\ndef f(x: torch.gone): ...", "missing"),
        ("from __future__ import annotations\nimport torch\ndef f(x: torch.gone): ...", None),
        ("import torch\ndef f(): return torch.gone", None),
        ("def f():\n    from torch import gone", "late"),
        ("try:\n    from torch import gone\nexcept ImportError:\n    gone = None", "guarded"),
        ("try:\n    from torch import gone\nexcept (ModuleNotFoundError, KeyError):\n    pass", "guarded"),
        ("try:\n    from torch import gone\nexcept:\n    pass", "guarded"),
        ("try:\n    from torch import gone\nexcept KeyError:\n    pass", "missing"),
        ("try:\n    from torch import gone\nexcept ImportError as e:\n    raise RuntimeError from e", "missing"),
        ("try:\n    from torch import gone\nfinally:\n    pass", "missing"),
        ("try:\n    from torch.x import y\nexcept ImportError:\n    from torch import gone", None),
        ("import torch\ntry:\n    x = torch.gone\nexcept AttributeError:\n    x = 1", "guarded"),
        ("import torch\ntry:\n    x = torch.gone\nexcept ImportError:\n    x = 1", "missing"),
        ("import torch\nif torch_version() >= (2, 9):\n    from torch import gone", "guarded"),
        ("import torch\nx = torch.gone if new else None", "guarded"),
        ("import torch\nx = hasattr(torch, 'gone') and torch.gone", "guarded"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import gone", None),
        ("if __name__ == '__main__':\n    from torch import gone", None),
        ("import contextlib\nwith contextlib.suppress(ImportError):\n    from torch import gone", "guarded"),
    ],
)
def test_what_is_missing_counts_by_where_it_stands(source, state):
    assert states(source).get("torch.gone", states(source).get("torch.gone.x")) == state


def test_what_is_unknown_behind_a_guard_decides_nothing():
    def has(need):
        return "unknown"

    source = (
        "try:\n    import torch.a\nexcept ImportError:\n    import torch.b\nif x:\n    import torch.c\nimport torch.d\n"
    )
    found = {str(need): state for need, state in judged(needs_of(source, "m", is_package=False), has)}
    assert found == {"torch.a": "guarded", "torch.b": "guarded", "torch.c": "guarded", "torch.d": "unknown"}


def test_where_the_first_try_fails_its_handler_is_looked_at():
    source = "try:\n    from torch import gone\nexcept ImportError:\n    from torch import gone_too"
    assert states(source) == {"torch.gone": "guarded", "torch.gone_too": "missing"}


def test_a_relative_import_is_of_its_own_package():
    source = "from . import a\nfrom .b import c\nfrom ..torch import d\n"
    needs = [str(item) for item in needs_of(source, "pkg.sub.mod", is_package=False)]
    assert needs == ["pkg.sub.a", "pkg.sub.b.c", "pkg.torch.d"]
    assert [str(item) for item in needs_of("from .b import c", "pkg.sub", is_package=True)] == ["pkg.sub.b.c"]


def consumer(**files):
    made = Consumer()
    for path, text in files.items():
        made.add(path.replace("__", "/").replace("/init", "/__init__") + ".py", text)
    return made


def test_only_what_the_entry_leads_to_fails(torch):
    made = consumer(
        pkg__init="from .core import run\n",
        pkg__core="from torch.nn import Linear, Gone\n",
        pkg__extra="from torch.onnx import _type_utils\n",
        setup="from torch.utils.cpp_extension import BuildExtension\n",
    )
    found = try_names(made, entry="pkg", libraries={"torch": torch}, of="torch")
    assert found.missing == (
        "pkg/core.py:1: torch.nn.Gone",
        "setup.py:1: torch.utils.cpp_extension.BuildExtension",
    )
    assert found.doubtful == (
        "pkg/extra.py:1: torch.onnx._type_utils is missing, and importing pkg does not lead there",
    )
    assert found.counts == {"present": 1, "missing": 3}


@pytest.mark.parametrize(
    ("elsewhere", "decided"),
    [
        ("", True),
        ("from .deadly import x\n", True),
        ("from .dead import old\n", False),
        ("def f():\n    from . import dead\n", False),
        ("try:\n    import pkg.dead.old\nexcept ImportError:\n    pass\n", False),
    ],
)
def test_what_no_torch_can_import_decides_nothing_where_nobody_imports_it(torch, elsewhere, decided):
    made = consumer(
        pkg__init="",
        pkg__extra=elsewhere,
        pkg__deadly="x = 1\n",
        pkg__dead__init="from . import old\n",
        pkg__dead__old="from torch.nn import Gone\n",
    )
    found = try_names(made, entry="pkg", libraries={"torch": torch}, of="torch", unimportable=("pkg.dead",))
    assert found.counts["missing"] == 1
    assert not found.missing
    assert bool(found.doubtful) is not decided


def test_what_the_entry_leads_to_fails_whatever_is_stated(torch):
    made = consumer(pkg__init="from torch.nn import Gone\n")
    found = try_names(made, entry="pkg", libraries={"torch": torch}, of="torch", unimportable=("pkg",))
    assert found.missing


def test_what_a_function_imports_counts_where_the_entry_leads_to_the_function(torch):
    text = "def f():\n    from torch.onnx import _type_utils\nfrom torch import whatever\n"
    made = consumer(pkg__init="from . import core\n", pkg__core=text, pkg__extra=text)
    found = try_names(made, entry="pkg", libraries={"torch": torch}, of="torch")
    assert found.missing == ()
    assert found.doubtful == (
        "pkg/core.py:2: torch.onnx._type_utils is missing, and imported when a function is called",
        "pkg/core.py:3: torch.whatever is in no source that can be read",
    )


def test_a_guarded_import_of_its_own_is_no_way_in(torch):
    made = consumer(
        pkg__init="try:\n    from . import extra\nexcept ImportError:\n    extra = None\n",
        pkg__extra="from torch.onnx import _type_utils\n",
    )
    found = try_names(made, entry="pkg", libraries={"torch": torch}, of="torch")
    assert not found.missing
    assert len(found.doubtful) == 1


def test_what_imports_the_other_component_in_the_open_is_a_way_in():
    files = {"transformer_engine/__init__.py": "", "transformer_engine/pytorch.py": "class Linear: ...\n"}
    te = Library(files, files.__getitem__)
    made = consumer(pkg__init="", pkg__te="from transformer_engine.pytorch import Linear, Gone\n")
    found = try_names(made, entry="pkg", libraries={"transformer_engine": te}, of="transformer_engine")
    assert found.missing == ("pkg/te.py:1: transformer_engine.pytorch.Gone",)


def test_a_file_that_is_no_python_is_counted():
    made = consumer(pkg__init="", pkg__template="def {name}(: ...\n")
    assert made.unread == ["pkg/template.py"]


@pytest.mark.parametrize(
    ("entry", "missing"),
    [("api", True), ("mine.api", True), ("other", False), ("mine.other", False), ("mine", True)],
)
def test_an_entry_that_the_setup_installs_under_another_name_is_found(torch, entry, missing):
    consumer = Consumer()
    consumer.add("api.py", "from torch.nn import Gone\n")
    consumer.add("other.py", "import torch\n")
    found = try_names(consumer, entry=entry, libraries={"torch": torch}, of="torch")
    assert bool(found.missing) is missing


def test_how_much_is_asked_of_the_other_is_counted(torch):
    consumer = Consumer()
    consumer.add("a.py", "import numpy\nimport torch\nfrom torch import nn\n")
    libraries = {"torch": torch}
    assert try_names(consumer, entry=None, libraries=libraries, of="torch").asked == 2
    assert try_names(consumer, entry=None, libraries=libraries, of="transformer_engine").asked == 0
