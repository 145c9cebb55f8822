"""The expectation: what the lock says this environment holds, handed over as one JSON file."""

import json
import os
import re
from typing import Any, Dict, List, Optional

ENV_FILE = "ENVBUILD_EXPECTED"

# Modules that must import for a component, unless the expectation names its own.
MODULES = {
    "torch": ["torch"],
    "te": ["transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch"],
    "apex": ["apex", "apex.optimizers", "apex.normalization"],
    "flash-attn": ["flash_attn", "flash_attn_2_cuda"],
    "flash-attn-hopper": ["flash_attn_interface"],
    "megatron": ["megatron.core", "megatron.core.parallel_state"],
    "deepspeed": ["deepspeed"],
    "sgd-sai": ["sgd_sai"],
    "mpi": [],
}
DISTRIBUTIONS = {
    "torch": "torch",
    "te": "transformer-engine-torch",
    "apex": "apex",
    "flash-attn": "flash-attn",
    "flash-attn-hopper": "flash-attn-3",
    "megatron": "megatron-core",
    "deepspeed": "deepspeed",
    "sgd-sai": "sgd-sai",
}


def normalise(name: str) -> str:
    """Return a distribution name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


class Expectation:
    """The lock's side of every comparison."""

    def __init__(self, raw: Dict[str, Any]) -> None:
        self.raw = raw
        self.cell_id = str(raw.get("cell_id", "unknown"))
        self.cell: Dict[str, Any] = dict(raw.get("cell", {}))
        self.flavor = str(raw.get("flavor", "runtime"))
        self.packages = {normalise(k): str(v) for k, v in raw.get("packages", {}).items()}
        self.components: Dict[str, Dict[str, Any]] = dict(raw.get("components", {}))

    @classmethod
    def load(cls, path: Optional[str] = None) -> "Expectation":
        """Read the file that ENVBUILD_EXPECTED names."""
        path = path or os.environ.get(ENV_FILE)
        if not path:
            raise SystemExit("smoke: {} names no file: nothing says what to expect here".format(ENV_FILE))
        try:
            with open(path, encoding="utf-8") as handle:
                raw = json.load(handle)
        except (OSError, ValueError) as error:
            raise SystemExit("smoke: {} does not load: {}".format(path, error)) from None
        if not isinstance(raw, dict) or "components" not in raw or "packages" not in raw:
            raise SystemExit("smoke: {}: an expectation has the keys cell, packages and components".format(path))
        return cls(raw)

    def lists(self, component: str) -> bool:
        """Whether the lock lists a component: as one, as an axis of its cell, or as a plain package."""
        if component in self.components or self.cell.get(component) not in (None, "", "none"):
            return True
        return DISTRIBUTIONS.get(component) in self.packages

    def component(self, name: str) -> Dict[str, Any]:
        found = dict(self.components.get(name) or {})
        if name == "megatron" and "stack" in self.components:
            # A stack trains from its repository, which holds megatron.core.
            found = dict(self.components["stack"], **found)
        return found

    @property
    def paths(self) -> List[str]:
        """Folders that are to be on the module path, beside site-packages: a stack's repository."""
        path = (self.components.get("stack") or {}).get("path")
        return [str(path)] if path else []

    def modules(self, name: str) -> list:
        spec = self.component(name)
        if "modules" in spec:
            return list(spec["modules"])
        modules = list(MODULES.get(name, []))
        if spec.get("module"):
            modules = [spec["module"]] if name == "flash-attn-hopper" else modules + [spec["module"]]
        return modules

    def distribution(self, name: str) -> Optional[str]:
        found = self.component(name).get("distribution") or DISTRIBUTIONS.get(name)
        return normalise(found) if found else None

    @property
    def is_cuda(self) -> bool:
        """Whether the cell's torch is a CUDA build."""
        return str(self.cell.get("cuda", "cpu")).lower() not in ("cpu", "none", "")
