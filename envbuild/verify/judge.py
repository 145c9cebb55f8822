"""What the probe found inside an image, compared with its lock."""

from typing import Any

from envbuild.util.names import shown
from envbuild.util.text import count_of
from envbuild.verify.checks import Check, verdict_of

# What comes only with the driver: on a machine without one, a module that needs it fails to load for that reason alone.
_DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_SIZE_LIMIT = 1.05
# Where NVIDIA's images and ours have the CUDA toolkit.
_TOOLKIT = "/usr/local/cuda"


def judge(facts: dict[str, Any]) -> tuple[Check, ...]:
    """Hold what the probe found against what the lock says."""
    expected = facts["expected"]
    return (
        _packages(facts, expected),
        _torch(facts, expected),
        *_imports(facts),
        *_built(facts, expected),
        *([_toolchain(facts)] if expected["flavor"] == "runtime" else []),
        _one_cuda(facts, expected),
        *([_headers(facts)] if "te" in expected["components"] and expected["cell"]["cuda"] != "cpu" else []),
        _leftovers(facts),
        _size(facts),
    )


def _packages(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    if not expected["packages"]:
        return Check(name="packages", verdict="unproven", text="the image was built without a lock")
    found = facts["distributions"]
    own = {c["distribution"].lower().replace("_", "-") for c in expected["components"].values() if "distribution" in c}
    faults = [
        f"{shown(name)} is {shown(found.get(name, 'missing'))}, the lock says {shown(version)}"
        for name, version in expected["packages"].items()
        if not _same(found.get(name), version)
    ]
    faults += [
        f"{shown(name)} {shown(found[name])} is not in the lock"
        for name in found
        if name not in expected["packages"] and name not in own and name not in facts["distributions_of_base"]
    ]
    return verdict_of(
        "packages",
        faults,
        f"{count_of(len(expected['packages']), 'distribution')}, each at its locked version, and no other{_of_base(facts)}",
    )


def _of_base(facts: dict[str, Any]) -> str:
    count = len(facts["distributions_of_base"])
    return f" but {count} of the base image" if count else ""


def _same(found: str | None, locked: str) -> bool:
    return found is not None and (found == locked or found.split("+")[0] == locked)


def _torch(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    torch, cuda = facts["torch"], expected["cell"]["cuda"]
    if "error" in torch:
        return Check(name="torch", verdict="failed", text=f"torch does not import: {shown(torch['error'])}")
    wanted = None if cuda == "cpu" else cuda
    faults = (
        []
        if torch["cuda"] == wanted
        else [
            f"torch {shown(str(torch['version']))} was built for CUDA {shown(str(torch['cuda']))}, the cell says {cuda}"
        ]
    )
    return verdict_of("torch", faults, f"torch {torch['version']}, CUDA {torch['cuda'] or 'none'}")


def _imports(facts: dict[str, Any]) -> list[Check]:
    checks = []
    for key, error in facts["imports"].items():
        name = f"import {shown(key.split(':')[1])}"
        if error is None:
            checks.append(Check(name=name, verdict="passed", text="imports without a GPU"))
        elif any(library in error for library in _DRIVER_LIBRARIES):
            text = f"needs the driver's library: {shown(error)}"
            checks.append(Check(name=name, verdict="unproven", text=text))
        elif "[Errno 30]" in error:
            text = f"writes a file as it is imported, which the audit does not let it: {shown(error)}"
            checks.append(Check(name=name, verdict="unproven", text=text))
        else:
            checks.append(Check(name=name, verdict="failed", text=shown(error)))
    return checks


def _built(facts: dict[str, Any], expected: dict[str, Any]) -> list[Check]:
    checks = []
    for axis, component in expected["components"].items():
        wanted = component.get("extensions")
        if not wanted:
            continue
        record = facts["built"].get(axis)
        if record is None:
            checks.append(
                Check(name=f"{axis} wheel", verdict="failed", text="the image carries no record of its build")
            )
            continue
        absent = sorted(set(wanted) - set(record["extensions"]))
        faults = [f"built without {shown(', '.join(absent))}"] if absent else []
        checks.append(
            verdict_of(
                f"{axis} wheel",
                faults,
                f"{count_of(len(record['extensions']), 'extension module')}, sha256 {shown(record['sha256'][:16])}…",
            )
        )
    return checks


def _toolchain(facts: dict[str, Any]) -> Check:
    return verdict_of(
        "no compiler", [f"{shown(path)} is a CUDA compiler" for path in facts["compilers"]], "no nvcc, cicc or cudafe++"
    )


def _headers(facts: dict[str, Any]) -> Check:
    found = facts["cuda_headers"]
    without = "Transformer Engine compiles kernels as it runs, and finds no cuda_runtime.h"
    return verdict_of("CUDA headers", [] if found else [without], f"in {found}")


def _one_cuda(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    found, cuda = facts["cuda_runtimes"], expected["cell"]["cuda"]
    if cuda == "cpu":
        return verdict_of("no CUDA", [f"{shown(path)} in a CPU image" for path in found], "no CUDA runtime library")
    # A toolkit in addition to torch is meant to be there where the image keeps its compiler; it has the cell's CUDA or is wrong.
    toolkit = [path for path in found if path.startswith(_TOOLKIT) and expected["flavor"] == "devel"]
    others = [path for path in found if path not in toolkit]
    faults = [f"{shown(path)} is not of CUDA {cuda}" for path in toolkit if not _has_version(path, cuda)]
    if len(others) > 1 or not found:
        faults.append(f"{len(others)} CUDA runtimes: {', '.join(others)}" if others else "no CUDA runtime")
    return verdict_of("one CUDA", faults, ", ".join(found))


def _has_version(path: str, cuda: str) -> bool:
    return path.rpartition("libcudart.so.")[2].startswith(f"{cuda}.")


def _leftovers(facts: dict[str, Any]) -> Check:
    faults = (
        [
            f"{count_of(facts['caches_total'], 'file')} of caches or build trees, such as {', '.join(facts['caches'][:3])}"
        ]
        if facts["caches"]
        else []
    )
    return verdict_of("nothing left over", faults, "no package cache, no build tree")


def _size(facts: dict[str, Any]) -> Check:
    if facts["distributions_of_base"]:
        text = f"{facts['bytes'] / 2**30:.2f} GiB on disk; it is not known how much of it is left over from the base image's maker"
        return Check(name="size", verdict="unproven", text=text)
    ratio = facts["bytes"] / max(1, facts["installed_bytes"])
    text = f"{facts['bytes'] / 2**30:.2f} GiB on disk, {ratio:.3f} times the installed packages"
    return Check(name="size", verdict="passed" if ratio <= _SIZE_LIMIT else "failed", text=text)
