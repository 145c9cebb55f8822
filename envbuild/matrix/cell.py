"""What is asked (Request) and what is chosen (Cell)."""

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Literal

from envbuild.components import COMPONENTS
from envbuild.matrix.fleet import GPU, label_of
from envbuild.matrix.model import AxisName
from envbuild.util.frozen import Frozen

NONE = "none"
"""The spec that leaves an axis out of the cell (`--te none`)."""
AUTO = "auto"
"""The spec that asks for an axis and leaves the choice to the solver (`--flash-attn-hopper auto`)."""


X86_64 = "x86_64"
"""The architecture of a cell that states none."""
ARCHITECTURE = "arch"
"""The axis of the host's architecture."""

DEBIAN_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's and Docker's name of each architecture."""

CELL_LABEL = "io.envbuild.cell"
"""Label of an image: the id of its cell."""
_NOT_IN_ID = frozenset({"board", "driver", "flavor"})
"""What is stated in addition to a cell, so that rules can check it, and is no part of the cell's id."""


class Pin(Frozen):
    """One axis as asked: the constraint and where it came from (`--cuda`, `stack llm-jp`)."""

    axis: AxisName
    spec: str
    origin: str


class Request(Frozen):
    """Everything asked of the solver; the same request and matrix give the same cell everywhere."""

    pins: tuple[Pin, ...] = ()
    prefer: Literal["proven", "newest"] = "proven"
    repository: bool = False
    """Whether a stack asks: its repository takes the place of Megatron-core's wheel, and no rule about that wheel holds."""


class Cell(Frozen):
    """One release on every axis in use, e.g. `{"cuda": "12.6", "torch": "2.8.0+cu126", ...}`."""

    versions: Mapping[AxisName, str]
    commits: Mapping[AxisName, str] = MappingProxyType({})
    """Full commits of the axes whose releases are commits."""

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over the versions of all that a cell is made of; the host's driver and board and the flavor are no part of that."""
        body = json.dumps({"versions": dict(self.of_image.versions), "commits": dict(self.commits)}, sort_keys=True)
        return hashlib.sha256(body.encode()).hexdigest()

    @cached_property
    def of_image(self) -> "Cell":
        """The cell without the host's driver and board, which must not change what is built, and the flavor, which inputs hold.

        Nor has it the architecture where that is x86_64: the same cell with the flag and without it is one.
        """
        kept = {
            axis: version
            for axis, version in self.versions.items()
            if axis not in _NOT_IN_ID and (axis, version) != (ARCHITECTURE, X86_64)
        }
        return self if len(kept) == len(self.versions) else Cell(versions=kept, commits=self.commits)

    @property
    def arch(self) -> str:
        """The architecture of the machines that it is for: `x86_64` or `aarch64`."""
        return self.versions.get(ARCHITECTURE, X86_64)

    @cached_property
    def id(self) -> str:
        """Readable name ending in a short digest, e.g. `cu126-py312-torch2.8.0-te2.6.0-apex25.08-sm90-3f9a21c7`."""
        v = self.versions
        parts = [
            "cpu" if v["cuda"] == "cpu" else "cu" + v["cuda"].replace(".", ""),
            "py" + v["python"].replace(".", ""),
        ]
        for axis, component in COMPONENTS.items():
            if axis in v and component.label:
                # without the variant, which the first part says; not normalised, 25.08 is apex' own spelling
                parts.append(component.label + v[axis].partition("+")[0])
        if GPU in v:
            parts.append(label_of(v[GPU]))
        if self.arch != X86_64:
            parts.append(self.arch)
        return "-".join([*parts, self.digest[:8]])
