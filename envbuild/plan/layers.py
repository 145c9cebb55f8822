"""Which of an image's layers hold which Python packages.

A large distribution has a separate layer. It is installed alone, so the layer's bytes follow from its wheel and its Python,
whatever else an image holds. Images that share the wheel share the layer, in a registry and on a machine that pulls.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Literal

from envbuild.lock.model import Lock, PythonPackage, PythonSet
from envbuild.util.frozen import Frozen

REST = "rest"
"""The layer of a set that holds its small distributions."""

# A lock does not state sizes, and an index need not. These are over 10 MB, or change with another release of one that is.
_LARGE = (
    "flash-attn*",
    "ml-dtypes",
    "numpy",
    "nvidia-*",
    "onnx",
    "opencv-*",
    "pandas",
    "pyarrow",
    "pytorch-triton*",
    "scipy",
    "sympy",
    "torch",
    "torchaudio",
    "torchvision",
    "transformer-engine*",
    "transformers",
    "triton*",
)
# NVIDIA's wheels below 4 MB.
_SMALL = ("nvidia-cuda-runtime*", "nvidia-cufile*", "nvidia-nvtx*", "nvidia-ml-py")


class Layer(Frozen):
    """A layer of Python packages.

    Attributes:
        of: the set of the lock that they are of.
        name: the distribution, or `REST`.
        requirements: what the layer holds, a hash-checked line each.

    """

    of: Literal["torch", "env"]
    name: str
    requirements: str

    @property
    def stage(self) -> str:
        """The stage that makes it."""
        return f"{self.of}-{self.name}"


def layers_of(lock: Lock, compiled: Collection[str]) -> tuple[Layer, ...]:
    """Return the layers of the locked packages; none where a distribution cannot be installed without the others.

    Args:
        lock: its sets `torch` and `env`.
        compiled: the distributions that the build compiles.

    """
    sets = [found for name in ("torch", "env") if (found := lock.python_set(name)) is not None]
    names = [p.name for s in sets for p in s.packages] + list(compiled)
    unlocked = any(s.requirements and not s.packages for s in sets)
    if unlocked or not sets or not sets[0].packages or len(set(names)) < len(names):
        return ()  # what an index answers, or what replaces another one, is only known when all are installed together
    return tuple(layer for s in sets for layer in _layers(s))


def _layers(python_set: PythonSet) -> list[Layer]:
    from envbuild.lock.python import requirements_text

    large = [p for p in python_set.packages if _is_large(p)]
    groups = {p.name: [p] for p in large} | {REST: [p for p in python_set.packages if p not in large]}
    of: Literal["torch", "env"] = "torch" if python_set.name == "torch" else "env"
    return [
        Layer(
            of=of, name=name, requirements=requirements_text(python_set.model_copy(update={"packages": tuple(group)}))
        )
        for name, group in groups.items()
        if group or of == "torch"  # whose rest holds what the environment itself consists of
    ]


def _is_large(package: PythonPackage) -> bool:
    return any(fnmatchcase(package.name, p) for p in _LARGE) and not any(fnmatchcase(package.name, p) for p in _SMALL)
