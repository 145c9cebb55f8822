"""What NVIDIA's libraries in this process say of themselves: a file that was put in the place of another keeps its name."""

import ctypes
import os
import re
from typing import Dict, Iterable, Optional, Tuple

SINCE = "2026-11-25T22:40:00Z"

_LIBRARIES = ("cublas", "cublasLt", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cusparseLt", "nccl")
# The wheels are named nvidia-cublas (CUDA 13) or nvidia-cublas-cu12; cuBLAS's and cuSPARSE's light libraries have wheels of
# their own or lie in their big brother's.
_WHEELS = {"cublasLt": "cublas", "cusparseLt": "cusparselt"}
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ \S+ +(/.+)$")


def loaded(lines: Iterable[str]) -> Dict[str, str]:
    """Return the short name of each of these libraries by its path, from the lines of /proc/PID/maps; two may have one name."""
    found: Dict[str, str] = {}
    for line in lines:
        mapped = _MAPPED.match(line.rstrip("\n"))
        file = re.match(r"lib(\w+)\.so(\.\d+)*$", os.path.basename(mapped.group(1))) if mapped else None
        if file and file.group(1) in _LIBRARIES:
            found[mapped.group(1)] = file.group(1)
    return found


def stated(name: str, path: str) -> Optional[Tuple[int, ...]]:
    """Ask a loaded library for its version, (13, 1, 0); None where it has no call for that.

    The calls are cublasGetProperty and its like, and ncclGetVersion. Seen with PyPI's wheels of CUDA 11.7, 12.1, 12.6 and
    13.0: the numbers are the first three of the wheel's version.
    """
    library = ctypes.CDLL(path)
    number = ctypes.c_int(-1)
    if name == "nccl":
        if library.ncclGetVersion(ctypes.byref(number)) != 0:
            return None
        code = number.value
        return (code // 10000, code // 100 % 100, code % 100) if code >= 10000 else (code // 1000, code // 100 % 10, code % 100)
    ask = getattr(library, name + "GetProperty", None)
    parts = []
    for part in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL of library_types.h
        if ask is None or ask(part, ctypes.byref(number)) != 0:
            return None
        parts.append(number.value)
    return tuple(parts)


def locked(name: str, packages: Dict[str, str]) -> Optional[str]:
    """Return the version that the lock gives the wheel of a library; None where it lists none."""
    wheel = "nvidia-" + _WHEELS.get(name, name)
    return next((packages[each] for each in packages if re.match(wheel + r"(-cu\d+)?$", each)), None)


def release(version: str) -> Tuple[int, ...]:
    """Return the first three numbers of a wheel's version: (13, 1, 0) of 13.1.0.3, (2, 26, 2) of 2.26.2.post1."""
    numbers = [int(part) for part in re.match(r"[\d.]*", version).group().split(".") if part][:3]
    return tuple(numbers + [0] * (3 - len(numbers)))
