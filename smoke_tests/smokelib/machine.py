"""What this machine is, and whether it can run what was asked: the verdicts that are about the host, not the image."""

import ctypes
import os
import platform
import re
from typing import Any, Dict, Optional

from smokelib.counts import count_of


def driver_version() -> Optional[str]:
    """Return the NVIDIA driver's version, from NVML, else from /proc."""
    for name in ("libnvidia-ml.so.1", "libnvidia-ml.so"):
        try:
            nvml = ctypes.CDLL(name)
            buffer = ctypes.create_string_buffer(96)
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(buffer, 96) == 0:
                return buffer.value.decode()
        except (OSError, AttributeError):
            continue
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as handle:
            match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", handle.read())
            return match.group(1) if match else None
    except OSError:
        return None


def os_name() -> str:
    try:
        with open("/etc/os-release", encoding="utf-8") as handle:
            for line in handle:
                if line.startswith("PRETTY_NAME="):
                    return line.split("=", 1)[1].strip().strip('"')
    except OSError:
        pass
    return platform.system()


def describe() -> Dict[str, Any]:
    """Describe the machine without its name: GPUs, driver, operating system, Python and torch."""
    import torch

    info: Dict[str, Any] = {
        "os": os_name(),
        "arch": platform.machine(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "gpus": [],
    }
    try:
        info["cudnn"] = torch.backends.cudnn.version()
    except RuntimeError as error:  # headers and library of different versions
        info["cudnn"] = "error: {}".format(error)
    if torch.version.cuda:
        try:
            info["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        except (RuntimeError, AttributeError, TypeError):
            info["nccl"] = None
        if torch.cuda.is_available():
            for index in range(torch.cuda.device_count()):
                props = torch.cuda.get_device_properties(index)
                info["gpus"].append(
                    {
                        "name": props.name,
                        "sm": "{}{}".format(props.major, props.minor),
                        "memory_gib": round(props.total_memory / 2**30, 1),
                    }
                )
    return info


def verdict(info: Dict[str, Any], device: str, nproc: int) -> Optional[Dict[str, str]]:
    """Return why this host cannot run the tests on `device` with `nproc` ranks, or None when it can."""
    if device != "cuda":
        return None
    import torch

    if not torch.version.cuda:
        return {
            "kind": "no-cuda-build",
            "what": "torch {} is a CPU build, the tests were asked to run on GPUs".format(torch.__version__),
        }
    if not torch.cuda.is_available():
        if info["driver"] is None:
            return {"kind": "no-gpu", "what": "no NVIDIA GPU is visible here (no driver answers)"}
        try:
            torch.cuda.init()
            reason = "torch sees no device"
        except Exception as error:  # torch raises several types here, by version
            reason = str(error).strip().split("\n")[0]
        if "too old" in reason or "insufficient" in reason:
            return {
                "kind": "driver-too-old",
                "what": "driver {} is too old for torch {}: {}".format(info["driver"], torch.__version__, reason),
            }
        return {
            "kind": "no-gpu",
            "what": "driver {} is there but no GPU can be used: {}".format(info["driver"], reason),
        }
    if len(info["gpus"]) < nproc:
        return {
            "kind": "too-few-gpus",
            "what": "{} ranks were asked for, this host shows {}".format(nproc, count_of(len(info["gpus"]), "GPU")),
        }
    return None
