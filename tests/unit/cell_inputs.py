"""Locks made up for tests: every input of a real cell, each with a hash that follows from its name."""

import hashlib
from functools import cache

from packaging.utils import canonicalize_name

from envbuild.components import COMPONENTS
from envbuild.lock.files import Locked
from envbuild.lock.inputs import Inputs, inputs_of
from envbuild.lock.make import unlocked
from envbuild.lock.model import Lock, OsPackage, PythonPackage, PythonSet
from envbuild.matrix.cell import Cell, Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.plan.plan import Plan, plan_of
from envbuild.solver.solve import solve
from envbuild.stacks.model import Stack


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def inputs_for(**axes: str) -> Inputs:
    """Resolve `axes` (flash_attn for flash-attn) and return the cell's inputs."""
    pins = tuple(Pin(axis=a.replace("_", "-"), spec=s, origin=f"--{a}") for a, s in axes.items())
    matrix = load_matrix()
    return inputs_of(matrix, solve(matrix, Request(pins=pins)).cell)


def inputs_for_stack(stack: Stack) -> Inputs:
    """Resolve a stack as it is and return its cell's inputs."""
    pins = tuple(Pin(axis=axis, spec=spec, origin=f"stack {stack.name}") for axis, spec in stack.axes.items())
    matrix = load_matrix()
    return inputs_of(matrix, solve(matrix, Request(pins=pins, repository=True)).cell, stack=stack, flavor=stack.flavor)


def whole_cell() -> Cell:
    """Return a cell with a version on the axis of every component, whose id is longer than a tag can be."""
    cell = inputs_for(cuda="12.6", te="2.6.0", gpu="90").cell
    long = {axis: "10.12.1" for axis, component in COMPONENTS.items() if component.label}
    return Cell(versions={**long, **cell.versions}, commits=cell.commits)


def complete(inputs: Inputs, *, overrides: dict[str, str] | None = None) -> Locked:
    """Pin every input of `inputs` to a made-up hash; `overrides` gives a package another version."""
    bare = unlocked(load_matrix(), inputs)
    versions = overrides or {}

    def os_package(name: str) -> OsPackage:
        version = versions.get(name, "1.0")
        return OsPackage(
            name=name, version=version, sha256=sha(f"{name}={version}"), filename=f"pool/{name}_{version}.deb"
        )

    def python_package(requirement: str) -> PythonPackage:
        name, _, version = requirement.partition("==")
        name = name.split("[")[0].split("<")[0].split(">")[0]
        version = versions.get(name, version or "1.0")
        name = canonicalize_name(name)
        return PythonPackage(name=name, version=version, hashes=(sha(f"{name}=={version}"),))

    lock = Lock.model_validate(
        bare.model_dump()
        | {
            "missing": (),
            "images": tuple(i.model_copy(update={"digest": f"sha256:{sha(i.reference)}"}) for i in bare.images),
            "root": bare.root.model_copy(update={"packages": (os_package("libc6"),)}) if bare.root else None,
            "os": tuple(s.model_copy(update={"packages": tuple(os_package(n) for n in s.wanted)}) for s in bare.os),
            "python": tuple(
                s.model_copy(
                    update={"packages": tuple({p.name: p for p in map(python_package, s.requirements)}.values())}
                )
                for s in bare.python
            ),
            "sources": tuple(s.model_copy(update={"tree": sha(s.commit)[:40]}) for s in bare.sources),
            "files": tuple(f.model_copy(update={"sha256": sha(f.url)}) for f in bare.files),
        }
    )
    return Locked(lock=lock, pylocks={s.name: pylock(s) for s in lock.python if s.packages})


def pylock(python_set: PythonSet) -> str:
    """Return a set as a pylock whose every package has one wheel."""
    entries = [
        f'[[packages]]\nname = "{p.name}"\nversion = "{p.version}"\n'
        f'wheels = [{{url = "https://x.example/{p.name}-{p.version}-py3-none-any.whl", hashes = {{sha256 = "{p.hashes[0]}"}}}}]\n'
        for p in python_set.packages
    ]
    return "\n".join(['lock-version = "1.0"\n', *entries])


def plan_for(overrides: dict[str, str] | None = None, **axes: str) -> Plan:
    return plan_of(load_matrix(), complete(inputs_for(**axes), overrides=overrides))


def keys(plan: Plan) -> dict[str, str]:
    return {stage.name: stage.key for stage in plan.stages}


def changed(one: Plan, other: Plan) -> set[str]:
    """Return the stages of either plan whose key differs."""
    a, b = keys(one), keys(other)
    return {name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
