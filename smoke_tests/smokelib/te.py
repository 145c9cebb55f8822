"""What Transformer Engine is here, read from the installed package itself; its insides moved between releases."""

import ast
import importlib.util
import os
from typing import Dict, Optional, Tuple


def _sources():
    spec = importlib.util.find_spec("transformer_engine")
    roots = list(spec.submodule_search_locations or []) if spec else []
    for root in roots:
        pytorch = os.path.join(root, "pytorch")
        for folder, _, files in os.walk(pytorch):
            if "attention" in folder:
                for name in files:
                    if name.endswith(".py"):
                        yield os.path.join(folder, name)
        if os.path.isfile(os.path.join(pytorch, "attention.py")):
            yield os.path.join(pytorch, "attention.py")


def flash_attention_3_lookup() -> Optional[Dict[str, str]]:
    """Return the distribution that this TE asks for FA3, and the module that it then imports; None when it asks for none.

    Read from TE's source: it does `get_pkg_version("flash-attn-3")` (or `flashattn-hopper`) and, if that is found,
    `from flash_attn_3.flash_attn_interface import flash_attn_func as flash_attn_func_v3`.
    """
    for path in _sources():
        with open(path, encoding="utf-8") as handle:
            text = handle.read()
        if "flash-attn-3" not in text and "flashattn-hopper" not in text:
            continue
        distribution, module = None, None
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                if node.args[0].value in ("flash-attn-3", "flashattn-hopper"):
                    distribution = str(node.args[0].value)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.endswith("flash_attn_interface"):
                if any((alias.asname or "").endswith("_v3") for alias in node.names):
                    module = node.module
        if distribution and module:
            return {"distribution": distribution, "module": module}
    return None


def autocast(te, recipe):
    """Return TE's low-precision context: `autocast` where there is one (2.8 on), else `fp8_autocast`."""
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def must_have_fp8_attention(
    capability: Tuple[int, int], head_dim: int, te: Tuple[int, ...], cudnn: Optional[int]
) -> bool:
    """Whether TE has a fused FP8 attention, forward and backward, for a causal mask in `sbhd`, sequences of 128 N.

    What `nvte_get_fused_attn_backend` asks for (transformer_engine/common/fused_attn/fused_attn.cpp of v1.9 to v2.14): on 9.0 head
    dimension 128 and cuDNN 9.2.1, on 10.x since TE 2.0 up to 128 and cuDNN 9.7; never cuDNN 9.10.0. Elsewhere it may lack.

    Args:
        capability: of the GPU. te: TE's version. cudnn: as torch tells it, 90201 for 9.2.1.

    """
    if cudnn is None or cudnn == 91000 or te < (1, 9):
        return False
    if capability == (9, 0):
        return head_dim == 128 and cudnn >= 90201
    return capability[0] == 10 and te >= (2, 0) and head_dim <= 128 and cudnn >= 90700


def load_failure(error: BaseException) -> str:
    """Return why TE does not load, in the words of who has to mend it."""
    text = "{}: {}".format(type(error).__name__, error)
    if "libcudnn" in text:
        text += (
            " (two cuDNNs: TE takes the system's before torch's; set CUDNN_HOME to the folder of torch's, {})".format(
                torch_cudnn_folder() or "nvidia/cudnn in site-packages"
            )
        )
    return text


def torch_cudnn_folder() -> Optional[str]:
    """Return the folder of the cuDNN that came with torch's wheels, or None where torch has none of its own."""
    spec = importlib.util.find_spec("nvidia")
    for root in list(spec.submodule_search_locations or []) if spec else []:
        if os.path.isdir(os.path.join(root, "cudnn", "lib")):
            return os.path.join(root, "cudnn")
    return None
