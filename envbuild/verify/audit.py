"""Image -> audit: what an image holds, held against its lock, without a GPU."""

import json
import subprocess
from dataclasses import dataclass
from typing import Any, Literal

from envbuild.engine.container import docker, last_words, require_image, require_started
from envbuild.engine.leftovers import mark
from envbuild.errors import AuditError
from envbuild.paths import data_dir
from envbuild.settings import Settings

_MARK = "envbuild-probe "
# What only the driver brings: on a machine without one, a module that needs it fails to load for that reason alone.
_DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_SIZE_LIMIT = 1.05
# Where NVIDIA's images and ours have the CUDA toolkit.
_TOOLKIT = "/usr/local/cuda"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at. `unproven` is what this machine cannot decide."""

    name: str
    verdict: Literal["passed", "failed", "unproven"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an audit found."""

    image: str
    checks: tuple[Check, ...]
    facts: dict[str, Any]

    @property
    def defects(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(c for c in self.checks if c.verdict == "failed")

    def raise_for_defects(self) -> None:
        """Raise AuditError naming every defect, unless there is none."""
        if self.defects:
            lines = "".join(f"\n  - {c.name}: {c.text}" for c in self.defects)
            raise AuditError(
                f"the image has {len(self.defects)} defects{lines}",
                where=self.image,
                hint="it is not what its lock says; build it again",
            )

    def as_json(self) -> dict[str, Any]:
        """Return the audit as JSON values."""
        return {
            "image": self.image,
            "defects": len(self.defects),
            "checks": [{"name": c.name, "verdict": c.verdict, "text": c.text} for c in self.checks],
            "size": {"bytes": self.facts.get("bytes"), "installed_bytes": self.facts.get("installed_bytes")},
        }


def audit(settings: Settings, image: str) -> Audit:
    """Look into `image` and hold it against the expectation that it carries.

    Raises:
        HostError: no engine, or no such image.
        AuditError: the image has no Python, or no expectation: it was not made by envbuild.

    """
    require_image(settings, image)
    probe = (data_dir("dockerfiles") / "recipe" / "image-probe").read_text(encoding="utf-8")
    command = [
        *docker(settings),
        "run",
        "--rm",
        "--label",
        mark(),
        "--interactive",
        "--pull",
        "never",
        "--network",
        "none",
        image,
        "python",
        "-",
    ]
    done = subprocess.run(command, input=probe, capture_output=True, text=True, errors="replace", check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if done.returncode or not lines:
        require_started(done.returncode, done.stderr, image)
        said = last_words(done.stderr)
        raise AuditError(
            "the image's Python does not run" + (f": {said}" if said else ""),
            where=image,
            hint="audit takes images that envbuild built",
        )
    facts: dict[str, Any] = json.loads(lines[-1].removeprefix(_MARK))
    if facts["expected"] is None:
        raise AuditError(
            "the image does not say what it is meant to hold",
            where=f"{image}: /opt/envbuild/expected.json",
            hint="audit takes images that envbuild built",
        )
    return Audit(image=image, checks=judge(facts), facts=facts)


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


def _verdict(name: str, faults: list[str], good: str) -> Check:
    return Check(name=name, verdict="failed" if faults else "passed", text="; ".join(faults) if faults else good)


def _packages(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    if not expected["packages"]:
        return Check(name="packages", verdict="unproven", text="the image was built without a lock")
    found = facts["distributions"]
    own = {c["distribution"].lower().replace("_", "-") for c in expected["components"].values() if "distribution" in c}
    faults = [
        f"{name} is {found.get(name, 'missing')}, the lock says {version}"
        for name, version in expected["packages"].items()
        if not _same(found.get(name), version)
    ]
    faults += [
        f"{name} {found[name]} is not in the lock"
        for name in found
        if name not in expected["packages"] and name not in own and name not in facts["distributions_of_base"]
    ]
    return _verdict(
        "packages",
        faults,
        f"{len(expected['packages'])} distributions, each at its locked version, and no other{_beside(facts)}",
    )


def _beside(facts: dict[str, Any]) -> str:
    count = len(facts["distributions_of_base"])
    return f" but {count} of the base image" if count else ""


def _same(found: str | None, locked: str) -> bool:
    return found is not None and (found == locked or found.split("+")[0] == locked)


def _torch(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    torch, cuda = facts["torch"], expected["cell"]["cuda"]
    if "error" in torch:
        return Check(name="torch", verdict="failed", text=f"torch does not import: {torch['error']}")
    wanted = None if cuda == "cpu" else cuda
    faults = (
        []
        if torch["cuda"] == wanted
        else [f"torch {torch['version']} was built for CUDA {torch['cuda']}, the cell says {cuda}"]
    )
    return _verdict("torch", faults, f"torch {torch['version']}, CUDA {torch['cuda'] or 'none'}")


def _imports(facts: dict[str, Any]) -> list[Check]:
    checks = []
    for name, error in facts["imports"].items():
        if error is None:
            checks.append(Check(name=f"import {name.split(':')[1]}", verdict="passed", text="imports without a GPU"))
        elif any(library in error for library in _DRIVER_LIBRARIES):
            checks.append(
                Check(
                    name=f"import {name.split(':')[1]}", verdict="unproven", text=f"needs the driver's library: {error}"
                )
            )
        else:
            checks.append(Check(name=f"import {name.split(':')[1]}", verdict="failed", text=error))
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
        lacking = sorted(set(wanted) - set(record["extensions"]))
        faults = [f"built without {', '.join(lacking)}"] if lacking else []
        checks.append(
            _verdict(
                f"{axis} wheel",
                faults,
                f"{len(record['extensions'])} extension modules, sha256 {record['sha256'][:16]}…",
            )
        )
    return checks


def _toolchain(facts: dict[str, Any]) -> Check:
    return _verdict(
        "no compiler", [f"{path} is a CUDA compiler" for path in facts["compilers"]], "no nvcc, cicc or cudafe++"
    )


def _headers(facts: dict[str, Any]) -> Check:
    found = facts["cuda_headers"]
    lacking = "Transformer Engine compiles kernels as it runs, and finds no cuda_runtime.h"
    return _verdict("CUDA headers", [] if found else [lacking], f"in {found}")


def _one_cuda(facts: dict[str, Any], expected: dict[str, Any]) -> Check:
    found, cuda = facts["cuda_runtimes"], expected["cell"]["cuda"]
    if cuda == "cpu":
        return _verdict("no CUDA", [f"{path} in a CPU image" for path in found], "no CUDA runtime library")
    # A toolkit beside torch is meant to be there where the image keeps its compiler; it has the cell's CUDA or is wrong.
    toolkit = [path for path in found if path.startswith(_TOOLKIT) and expected["flavor"] == "devel"]
    beside = [path for path in found if path not in toolkit]
    faults = [f"{path} is not of CUDA {cuda}" for path in toolkit if not _has_version(path, cuda)]
    if len(beside) > 1 or not found:
        faults.append(f"{len(beside)} CUDA runtimes: {', '.join(beside)}" if beside else "no CUDA runtime")
    return _verdict("one CUDA", faults, ", ".join(found))


def _has_version(path: str, cuda: str) -> bool:
    return path.rpartition("libcudart.so.")[2].startswith(f"{cuda}.")


def _leftovers(facts: dict[str, Any]) -> Check:
    faults = (
        [f"{facts['caches_total']} files of caches or build trees, such as {', '.join(facts['caches'][:3])}"]
        if facts["caches"]
        else []
    )
    return _verdict("nothing left over", faults, "no package cache, no build tree")


def _size(facts: dict[str, Any]) -> Check:
    if facts["distributions_of_base"]:
        text = (
            f"{facts['bytes'] / 2**30:.2f} GiB on disk; what of it the base image's maker left over is not told apart"
        )
        return Check(name="size", verdict="unproven", text=text)
    ratio = facts["bytes"] / max(1, facts["installed_bytes"])
    text = f"{facts['bytes'] / 2**30:.2f} GiB on disk, {ratio:.3f} times the installed packages"
    return Check(name="size", verdict="passed" if ratio <= _SIZE_LIMIT else "failed", text=text)
