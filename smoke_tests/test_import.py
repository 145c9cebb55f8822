"""Level import: everything the lock lists is here, at its version, and loads."""

import importlib
import os
import subprocess

import pytest

from smokelib import installed
from smokelib.expectation import Expectation, normalise
from smokelib.te import flash_attention_3_lookup, load_failure

EXPECTED = Expectation.load()


def _load(name):
    """Import `name`, or fail with what is wrong in the words of who has to mend it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = str(error)
        if "undefined symbol" in text:
            pytest.fail(
                "{} was built against another torch or CUDA than is installed: {}".format(name, text), pytrace=False
            )
        if "cannot open shared object" in text:
            pytest.fail("{} needs a library that is not here: {}".format(name, text), pytrace=False)
        pytest.fail("{} does not import: {}".format(name, text), pytrace=False)
    except (OSError, RuntimeError) as error:  # a library loaded by hand, as Transformer Engine does
        pytest.fail("{} does not load: {}".format(name, load_failure(error)), pytrace=False)


def test_import_packages_equal_lock(expected, figure):
    """Every Python distribution of the lock is installed at the lock's version."""
    here = installed.distributions()
    missing = sorted(name for name in expected.packages if name not in here)
    other = [
        "{} is {}, the lock says {}".format(name, here[name], version)
        for name, version in sorted(expected.packages.items())
        if name in here and not installed.same_version(here[name], version)
    ]
    figure("distributions", len(expected.packages))
    assert not missing, "not installed: {}".format(", ".join(missing))
    assert not other, "; ".join(other)


@pytest.mark.parametrize("component", sorted(EXPECTED.components))
def test_import_component(component, expected):
    """The component's distribution is there and its modules import."""
    spec = expected.component(component)
    distribution = expected.distribution(component)
    if distribution and distribution != "torch" and spec.get("source") != "base":
        found = installed.version_of(distribution)
        assert found is not None, "{}: the distribution {} is not installed".format(component, distribution)
        # apex calls itself 0.1 whatever the commit, and a hopper build's release is its commit.
        if spec.get("version") and component not in ("apex", "flash-attn-hopper"):
            assert installed.of_release(found, spec["version"]), "{}: {} is {}, the lock says {}".format(
                component, distribution, found, spec["version"]
            )
    if component == "stack":
        assert os.path.isdir(spec["path"]), "the stack's repository is not at {}".format(spec["path"])
        assert any(name.endswith(".py") for name in os.listdir(spec["path"])), (
            "the stack's repository at {} holds no Python file".format(spec["path"])
        )
        if expected.lists("megatron"):
            core, version = _load("megatron.core"), str(expected.cell["megatron"])
            assert os.path.abspath(core.__file__).startswith(os.path.join(os.path.abspath(spec["path"]), "")), (
                "megatron.core comes from {}, not from the stack's repository".format(core.__file__)
            )
            assert installed.of_release(core.__version__, version), "megatron.core is {}, the lock says {}".format(
                core.__version__, version
            )
    for module in expected.modules(component):
        _load(module)


def test_import_torch_build(expected, figure):
    """torch is the build that the cell names: its version, its CUDA variant."""
    import torch

    figure("torch", torch.__version__)
    named = expected.component("torch").get("version") or expected.cell.get("torch")
    if named:
        assert installed.same_version(torch.__version__, str(named)), "torch is {}, the cell says {}".format(
            torch.__version__, named
        )
    if expected.is_cuda:
        wanted = ".".join(str(expected.cell["cuda"]).split(".")[:2])
        assert torch.version.cuda, "torch {} is a CPU build, the cell says CUDA {}".format(torch.__version__, wanted)
        have = ".".join(torch.version.cuda.split(".")[:2])
        assert have == wanted, "torch is built for CUDA {}, the cell says {}".format(have, wanted)
    else:
        assert not torch.version.cuda, "torch {} is a CUDA build, the cell says cpu".format(torch.__version__)


def test_import_apex_extensions(need):
    """Every extension that apex was built with loads; without them apex imports and its fused kernels are gone."""
    spec = need("apex")
    names = list(spec.get("extensions") or (["amp_C", "fused_layer_norm_cuda"] if spec.get("source") == "base" else []))
    assert names, "the lock lists apex without its extensions; nothing says what a right build holds"
    import torch  # noqa: F401  (the extensions link against torch's libraries)

    missing, broken = [], []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            missing.append(name)
        except ImportError as error:
            broken.append("{} ({})".format(name, error))
    if missing and len(missing) + len(broken) == len(names):
        pytest.fail(
            "apex was built without its CUDA extensions: none of {} is there, so FusedAdam and the fused norms cannot run; "
            "build it with APEX_CPP_EXT=1 APEX_CUDA_EXT=1 (or --cpp_ext --cuda_ext)".format(", ".join(names)),
            pytrace=False,
        )
    assert not missing, "apex lacks the extensions {}".format(", ".join(missing))
    assert not broken, "apex extensions do not load: {}".format("; ".join(broken))


def test_import_apex_is_nvidias(expected):
    """PyPI's apex is a web toolkit of the same name."""
    if installed.version_of("apex") is None:
        pytest.skip(
            "apex is not installed and the lock lists none"
            if not expected.lists("apex")
            else "apex is not installed; its own test says so"
        )
    module = _load("apex")
    assert hasattr(module, "optimizers") or os.path.isdir(
        os.path.join(os.path.dirname(module.__file__), "optimizers")
    ), "the distribution apex here is not NVIDIA's: {}".format(module.__file__)


def test_import_one_cudnn(need, expected, figure):
    """torch and Transformer Engine use one and the same cuDNN, also when torch used it first."""
    need("te")
    if not expected.is_cuda:
        pytest.skip("a CPU cell has no cuDNN")
    from smokelib.launch import run_ranks

    said = run_ranks("cudnn", 1, launcher="env", timeout=120)[0]
    assert not said["error"], "Transformer Engine does not load beside torch's cuDNN: {}".format(said["error"])
    figure("cuDNN", said["version"])
    assert len(said["folders"]) == 1, "two cuDNNs in one process, from {}: set CUDNN_HOME to torch's".format(
        " and ".join(said["folders"])
    )


def _flash_attention_limits():
    """Return the (lowest, highest) flash-attn 2 that the installed TE accepts, or None where TE does not say."""
    for name in (
        "transformer_engine.pytorch.attention.dot_product_attention.utils",
        "transformer_engine.pytorch.dot_product_attention.utils",
        "transformer_engine.pytorch.attention",
    ):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        limits = getattr(module, "FlashAttentionUtils", None)
        if limits is not None:
            return str(limits.version_required), str(limits.max_version)
        if hasattr(module, "_flash_attn_max_version"):
            return str(module._flash_attn_version_required), str(module._flash_attn_max_version)
    return None


def test_import_flash_attn_within_te_cap(need, figure):
    """A flash-attn outside the range that TE accepts is ignored by TE without an error."""
    need("te")
    found = installed.version_of("flash-attn")
    if found is None:
        pytest.skip("no flash-attn is installed")
    limits = _flash_attention_limits()
    assert limits is not None, "this Transformer Engine does not say which flash-attn it accepts"
    from packaging.version import Version

    te = installed.version_of("transformer-engine-torch") or installed.version_of("transformer-engine")
    figure("flash-attn", found)
    assert Version(found) <= Version(limits[1]), (
        "flash-attn {} is above {}, the newest that Transformer Engine {} accepts: TE would ignore it".format(
            found, limits[1], te
        )
    )
    assert Version(found) >= Version(limits[0]), (
        "flash-attn {} is below {}, the oldest that Transformer Engine {} accepts: TE would ignore it".format(
            found, limits[0], te
        )
    )


def test_import_flash_attn_hopper_where_te_looks(need, expected):
    """The hopper build is under the name, and with the module, that this TE looks up; elsewhere TE ignores it."""
    spec = need("flash-attn-hopper")
    need("te")
    distribution = normalise(spec.get("distribution", "flash-attn-3"))
    found = installed.version_of(distribution)
    assert found is not None, (
        "FA3 is absent: the lock lists flash-attn-hopper, and no distribution {} is installed".format(distribution)
    )
    looked_up = flash_attention_3_lookup()
    assert looked_up is not None, "this Transformer Engine looks for no FA3 at all"
    assert normalise(looked_up["distribution"]) == distribution, (
        "Transformer Engine looks for the distribution {}, what is installed is {}: TE would ignore it".format(
            looked_up["distribution"], distribution
        )
    )
    _load(looked_up["module"])


def test_import_megatron_helpers(need):
    """Megatron's compiled data helpers import: their build may fail in silence, and the first batch then fails."""
    need("megatron")
    _load("megatron.core.datasets.helpers_cpp")


def test_import_mpi(need):
    """mpirun is on the PATH and starts a process."""
    need("mpi")
    import shutil

    assert shutil.which("mpirun"), "the lock lists an MPI, and no mpirun is on the PATH"
    from smokelib.launch import run_ranks

    results = run_ranks("hello", 2, launcher="mpirun", timeout=60)
    assert [r["rank"] for r in results] == [0, 1]


def test_import_c_compiler(expected):
    """Triton compiles its launcher with the system's C compiler at run time."""
    import shutil

    if not expected.is_cuda:
        pytest.skip("a CPU cell compiles nothing at run time")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    assert compiler, "no C compiler is here: torch.compile and TE's Triton kernels fail at run time"
    version = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert version.returncode == 0, "{} does not run: {}".format(compiler, version.stdout)
