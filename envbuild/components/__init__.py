"""The components: one module each, found by being here. Nothing outside this package decides by a component's name."""

import importlib
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from envbuild.components.base import Component, View

_NOT_COMPONENTS = ("__init__", "base")


def _found() -> Iterator[Component]:
    # not by pkgutil, which imports inspect: 7 ms
    for file in sorted(os.listdir(os.path.dirname(__file__))):  # noqa: PTH120, PTH208 - pathlib comes later, if at all
        name, dot, kind = file.partition(".")
        if (dot, kind) == (".", "py") and name not in _NOT_COMPONENTS:
            yield importlib.import_module(f"{__name__}.{name}").component


COMPONENTS: Mapping[str, Component] = MappingProxyType(
    {component.axis: component for component in sorted(_found(), key=lambda c: c.place)}
)
"""Every component by its axis, in their order."""

AXIS_OF_DISTRIBUTION: Mapping[str, str] = MappingProxyType(
    {name: component.axis for component in COMPONENTS.values() for name in component.distributions}
)
"""The distributions on PyPI that are an axis of the matrix: the cell decides their versions."""

SOFTWARE = ("cuda", *(component.axis for component in COMPONENTS.values() if component.ran))
"""The axes that evidence speaks of: the software that ran. The OS and the base under it rank by their listed preference alone."""

CHOICES: Mapping[str, str] = MappingProxyType(
    {axis: component.chooses for axis, component in COMPONENTS.items() if component.chooses}
)
"""The axes that are no software: choices of how a component is compiled -> that component."""


def absent(axis: str) -> str:
    """Return the word for a cell without an axis: `none`; without a choice, `all` of what could be left out is there."""
    return "all" if axis in CHOICES else "none"


def components_in(view: View) -> tuple[Component, ...]:
    """Return the components of a cell, in their order."""
    return tuple(component for component in COMPONENTS.values() if component.axis in view.versions)
