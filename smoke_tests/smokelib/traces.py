"""Which code ran: kernel names as the profiler sees them, libraries mapped into the process, the backend TE reports."""

import os
import re
import sys
from typing import Any, Callable, Dict, List, Optional

GEMM = r"(?i)gemm|nvjet|cutlass|xmma"  # kernels that multiply matrices


def kernel_names(function: Callable[[], Any]) -> List[str]:
    """Run `function` once under the profiler and return the names of the GPU kernels that it launched, in first-seen order."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
        function()
        torch.cuda.synchronize()
    names: List[str] = []
    for event in trace.events():
        if "cuda" in str(getattr(event, "device_type", "")).lower() and not event.name.startswith(("Memcpy", "Memset")):
            if event.name not in names:
                names.append(event.name)
    if not names:
        raise AssertionError("the profiler saw no GPU kernel, so the path taken cannot be asserted")
    return names


def matching(names: List[str], pattern: str) -> List[str]:
    return [name for name in names if re.search(pattern, name)]


def short(names: List[str], limit: int = 8) -> str:
    """Return kernel names fit for a message."""
    cut = [re.sub(r"^void ", "", name)[:80] for name in names[:limit]]
    return "; ".join(cut) + ("; … {} more".format(len(names) - limit) if len(names) > limit else "")


def assert_kernel(names: List[str], pattern: str, what: str) -> List[str]:
    """Assert that a kernel whose name matches `pattern` ran; `what` says which path that proves."""
    found = matching(names, pattern)
    assert found, "{}: no kernel named like /{}/ ran; instead: {}".format(what, pattern, short(names))
    return found


def attention_path(names: List[str]) -> str:
    """Name the path of attention by its kernels: flash-attention's, cuDNN's, or neither (softmax and GEMMs by themselves)."""
    if matching(names, r"FlashAttn(Fwd|Bwd)Sm\d+|flash_(fwd|bwd)|flash::"):
        if not matching(names, r"cudnn_generated|fort_native_sdpa"):
            return "flash"
    if matching(names, r"cudnn_generated.*(sdpa|fmha|attention|flash)|fort_native_sdpa|mha_(fprop|bprop|fwd|bwd)"):
        return "fused"
    return "unfused"


def attention_switches() -> str:
    """Return TE's switches of attention that this environment sets, as `NAME=value, …`."""
    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_FUSED_ATTN_BACKEND", "NVTE_DEBUG")
    return ", ".join("{}={}".format(name, os.environ[name]) for name in names if name in os.environ)


def loaded_libraries(pattern: str) -> List[str]:
    """Return the shared libraries mapped into this process whose path matches `pattern`."""
    with open("/proc/self/maps", encoding="utf-8") as handle:
        paths = {line.split(None, 5)[5].strip() for line in handle if len(line.split(None, 5)) == 6}
    return sorted(path for path in paths if re.search(pattern, path))


def te_reported_backend() -> Optional[Dict[str, Any]]:
    """Return the attention backend that TE last chose, or None where this TE keeps no such record.

    TE keeps it in a module dictionary `_attention_backends` (1.7 on); the module moved between releases.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and isinstance(getattr(module, "_attention_backends", None), dict):
            chosen = module._attention_backends
            if "use_fused_attention" not in chosen:
                continue
            if chosen.get("use_flash_attention"):
                kind, detail = "flash", chosen.get("flash_attention_backend")
            elif chosen.get("use_fused_attention"):
                kind, detail = "fused", chosen.get("fused_attention_backend")
            elif chosen.get("use_unfused_attention"):
                kind, detail = "unfused", None
            else:
                kind, detail = "none", None
            return {"kind": kind, "detail": None if detail is None else str(detail)}
    return None
