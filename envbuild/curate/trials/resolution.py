"""Trials of wheel metadata: what both releases of a pair ask for, resolved together for each Python."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.curate.trials.files import Files
from envbuild.errors import LockError
from envbuild.lock.inputs import SETUPTOOLS, PythonGroup
from envbuild.lock.python import resolve
from envbuild.matrix.cell import Cell
from envbuild.matrix.load import Matrix
from envbuild.matrix.packages import all_hold, caps_for

GLIBC = "2.39"
"""Of the newest OS that the matrix knows; a wheel for an older one fits it, too."""
_ASKED_BY_STACKS = {"torchaudio"}
"""Distributions that no component asks for: a bound on them is no part of a pair."""
_OF_TORCH = re.compile(r"nvidia-(cudnn|nccl)-cu\d+")


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What one resolution came to."""

    python: str
    packages: Mapping[str, tuple[str, tuple[str, ...]]]
    """Distribution -> version and hashes; empty where nothing satisfies the requirements."""
    why: str = ""
    """uv's derivation, in one line."""


def requirements_for(matrix: Matrix, pair: Mapping[str, str], requirements: Sequence[str]) -> tuple[str, ...]:
    """Return `requirements` with the bounds that the matrix puts on packages next to the pair, and setuptools."""
    found = caps_for(matrix, Cell(versions=dict(pair)))
    caps = (f"{cap.distribution}{cap.spec}" for cap in found if cap.distribution not in _ASKED_BY_STACKS)
    return tuple(dict.fromkeys((*requirements, SETUPTOOLS, *caps)))


def set_refused_by(matrix: Matrix, pair: Mapping[str, str], packages: Mapping[str, tuple[str, tuple[str, ...]]]) -> str:
    """Return which rule keeps the set of `packages` out of every cell, and why; empty where none does.

    A pair can be in cells with another build of torch than the index's, which has another cuDNN or NCCL. With the
    index's, only the rule is tried again.

    Args:
        matrix: the rules; those count that name nothing but the pair, and the cuDNN or NCCL that torch comes with.
        pair: versions by axis.
        packages: distribution -> version and hashes, as `Resolved` has them.

    """
    fixed = {m[1]: version for name, (version, _) in packages.items() if (m := _OF_TORCH.fullmatch(name))}
    for rule in matrix.rules:
        if rule.kind == "requires" and rule.when and all_hold(matrix, pair, rule.when):
            for axis in fixed.keys() & rule.needs.keys():
                if not all_hold(matrix, fixed, {axis: rule.needs[axis]}):
                    return (
                        f"the index's torch comes with {axis} {fixed[axis]}, which rule {rule.id} refuses: {rule.why}"
                    )
    return ""


def resolved(files: Files, requirements: Sequence[str], python: str) -> Resolved:
    """Resolve `requirements` for one Python on Linux and x86_64; the answer is kept in the cache.

    Raises:
        HostError: an index cannot be reached.

    """
    key = hashlib.sha256(json.dumps(["resolution", GLIBC, python, sorted(requirements)]).encode()).hexdigest()

    def make() -> dict[str, Any]:
        group = PythonGroup(name="env", requirements=tuple(requirements))
        try:
            _, found = resolve(files.settings, group, python=python, glibc=GLIBC)
        except LockError as error:
            return {"why": error.what.removeprefix("the env packages cannot be resolved: ")}
        return {"packages": {p.name: [p.version, list(p.hashes)] for p in found.packages}}

    answer = files.noted(key, make)
    packages = {name: (str(v), tuple(hashes)) for name, (v, hashes) in answer.get("packages", {}).items()}
    return Resolved(python=python, packages=packages, why=str(answer.get("why", "")))
