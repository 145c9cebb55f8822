"""Megatron-core from PyPI; a stack has the whole repository instead."""

from typing import Any

from envbuild.components.base import Component, Upstream, View
from envbuild.util.model import Model


class MegatronFacts(Model):
    pypi: str | None = None
    imports: tuple[str, ...] = ()
    """Distributions that it imports and does not ask for."""


_IMPORTS = ("psutil",)
"""What every release imports, none asks for, and a distributed checkpoint needs: without psutil the processes that write it
die, and the save waits for them for ever. Source: megatron/core/dist_checkpointing/strategies/filesystem_async.py of
core_v0.8.0 to core_v0.19.0."""


class Megatron(Component):
    """Megatron-core."""

    axis = "megatron"
    place = 50
    label = "mcore"
    tested_by_release = True
    facts = MegatronFacts
    distributions = ("megatron-core",)
    upstream = Upstream(distribution="megatron-core", repository="https://github.com/NVIDIA/Megatron-LM.git")

    def module(self, view: View) -> str:
        del view
        return "megatron.core"

    def requirements(self, view: View) -> tuple[str, ...]:
        if view.repository:
            return ()
        release = view.release("megatron")
        return (f"megatron-core=={release.facts.pypi or release.version}", *_IMPORTS, *release.facts.imports)

    def expected(self, view: View) -> dict[str, Any] | None:
        if view.repository:
            return None
        return {
            "distribution": "megatron-core",
            "version": view.versions["megatron"],
            "module": "megatron.core",
        }


component = Megatron()
