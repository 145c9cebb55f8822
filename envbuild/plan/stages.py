"""The stages that make an image, each with a key over exactly the inputs that can change its result."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from envbuild.components.base import TEMPLATES
from envbuild.components.mpi import MpiFacts
from envbuild.lock.inputs import Inputs
from envbuild.lock.model import COMPAT, FileSource, GitSource, Lock, PythonSet
from envbuild.matrix.cell import ARCHITECTURE
from envbuild.stacks.model import Stack
from envbuild.stacks.parts import patches_of, tools_of
from envbuild.util.frozen import Frozen

LAYER = "python-layer"
"""The recipe of a layer of packages; a plan without layers does not hold it."""

# OS packages that decide what a compiler writes; an upgrade of any other leaves compiled wheels as they are.
_COMPILER_PACKAGES = ("binutils", "cpp-", "gcc-", "g++-", "libc6", "libgcc-", "libstdc++-", "linux-libc-dev")
# Build tools that decide what goes into a wheel.
_WHEEL_TOOLS = ("setuptools", "wheel", "ninja", "cmake", "pybind11", "packaging")


class Stage(Frozen):
    """One stage of the build.

    `inputs` holds everything that can change the stage's result, and nothing else; `key` is their hash. A compiled
    stage names its inputs one by one; the others take the keys of the stages below them.
    """

    name: str
    title: str
    inputs: Mapping[str, Any]

    @cached_property
    def text(self) -> str:
        """The stage's name and inputs as JSON: what the key is the sha256 of."""
        return json.dumps({"stage": self.name, "inputs": self.inputs}, sort_keys=True, separators=(",", ":"))

    @cached_property
    def key(self) -> str:
        """sha256 (hex) over the stage's inputs."""
        return digest_of(self.text)


def digest_of(text: str) -> str:
    """Return sha256 (hex) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _set_inputs(python_set: PythonSet | None) -> Any:
    if python_set is None:
        return None
    if python_set.packages:
        return {p.name: [p.version, *p.hashes] for p in python_set.packages}
    return sorted(python_set.requirements)


def _source_inputs(source: GitSource | FileSource | None) -> Any:
    if isinstance(source, GitSource):
        return [source.tree or source.commit, [[s.path, s.commit] for s in source.submodules if s.used]]
    return (source.sha256 or source.url) if source else None


def stages_of(
    lock: Lock,
    inputs: Inputs,
    recipes: Mapping[str, str],
    carried: Mapping[str, str],
    *,
    placed: Sequence[tuple[str, str]],
    mpi: MpiFacts | None,
) -> tuple[Stage, ...]:
    """Return the stages in the order of the build.

    Args:
        lock: what every stage takes.
        inputs: what the cell is made of.
        recipes: the scripts that run inside the build, by name.
        carried: the files, variables and labels of the image that come from the plan itself.
        placed: module and file of what is imported elsewhere than it is installed.
        mpi: the MPI that the build compiles.

    """
    stages: dict[str, Stage] = {}

    def add(name: str, title: str, **values: Any) -> Stage:
        stages[name] = Stage(name=name, title=title, inputs=values)
        return stages[name]

    def os_inputs(name: str) -> Any:
        found = next((s for s in lock.os if s.name == name), None)
        if found is None:
            return None
        pinned = (*found.packages, *found.renewed)
        return {p.name: [p.version, p.sha256] for p in pinned} if pinned else sorted(found.wanted)

    def image_inputs(stage: str) -> Any:
        return next((i.digest or i.reference for i in lock.images if i.stage == stage), None)

    cell = lock.cell
    root = lock.root
    # one reference, digest or version may stand for files of several architectures
    arch = {ARCHITECTURE: cell[ARCHITECTURE]} if ARCHITECTURE in cell else {}
    base = add(
        "base",
        "base system",
        image=image_inputs("base"),
        suite=[root.suite, root.epoch] if root else None,
        packages={p.name: [p.version, p.sha256] for p in root.packages} if root else None,
        **arch,
    )
    os_recipe = digest_of(recipes["os-install"])
    runtime = add(
        "runtime",
        "OS packages",
        base=base.key,
        packages=os_inputs("runtime"),
        recipe=os_recipe,
        python=cell["python"],
        managed=_source_inputs(lock.source("python")),
    )
    python_recipe = digest_of(recipes["python-install"] + recipes["compile-pyc"] + recipes.get(LAYER, ""))
    torch = add(
        "torch",
        f"torch {cell['torch']}",
        runtime=runtime.key,
        packages=_set_inputs(lock.python_set("torch")),
        recipe=python_recipe,
        uv=lock.uv.sha256,
    )
    built = []
    torch_build = _torch_build(lock)
    compiled_mpi = (
        [mpi.url, mpi.sha256, mpi.prefix, list(mpi.configure), digest_of(recipes["build-native"])] if mpi else None
    )
    for component in inputs.components:
        source = _source_inputs(lock.source(component.axis))
        wheel = add(
            f"wheel-{component.axis}",
            f"{component.axis} {component.version}",
            source=source,
            environment=dict(component.environment),
            settings=list(component.config_settings),
            folder=component.folder,
            torch=torch_build,
            python=cell["python"],
            nvcc=_toolkit(lock) if component.nvcc else _headers(lock),
            compiler=_compiler(lock),
            tools=_tools(lock, component.tools),
            recipe=digest_of(recipes["build-wheel"]),
            **arch,
            **(
                {"sm": [",".join(component.only_sms), digest_of(recipes[component.recipe])]}
                if component.only_sms
                else {}
            ),
            **({"templates": digest_of(recipes[TEMPLATES])} if component.templates else {}),
            **({"mpi": compiled_mpi or cell["mpi"]} if component.mpi else {}),
            **(
                {"downloads": [_source_inputs(lock.source(n)) for n in component.downloads]}
                if component.downloads
                else {}
            ),
        )
        built.append(wheel.key)
    env = add(
        "env",
        "Python environment",
        torch=torch.key,
        packages=_set_inputs(lock.python_set("env")),
        wheels=built,
        recipe=python_recipe,
        constraints=digest_of(recipes["constraints"]),
        **({"mpi": compiled_mpi} if compiled_mpi else {}),
        **({"placed": [list(pair) for pair in placed]} if placed else {}),
    )
    stack = _stack_stages(add, lock, inputs.stack, env) if inputs.stack else None
    add(
        "image",
        "image",
        env=env.key,
        **({"stack": stack.key} if stack else {}),
        lock=lock.digest,
        flavor=lock.flavor,
        **({COMPAT: digest_of(recipes[COMPAT])} if inputs.compat else {}),
        carried={name: digest_of(text) for name, text in carried.items()},
    )
    return tuple(stages.values())


def _stack_stages(add: Callable[..., Stage], lock: Lock, stack: Stack, env: Stage) -> Stage:
    """Add the stages of the training repository. None of the compiled wheels depends on them."""
    repository = stack.repository
    tree = add(
        f"tree-{repository.name}",
        f"{repository.name} at {repository.commit[:12]}",
        source=_source_inputs(lock.source(repository.name)),
        subdirectory=repository.subdirectory,
        patches=[patch.digest for patch in patches_of(stack)],
    )
    steps = [s for s in stack.steps if s.compiles]
    compiled = None
    if steps:
        compiled = add(
            f"compiled-{repository.name}",
            f"what {repository.name} compiles",
            tree=tree.key,
            steps=[s.model_dump(mode="json", exclude={"check"}) for s in steps],
            env=env.key,
            environment=dict(stack.environment),
            nvcc=_toolkit(lock),
            compiler=_compiler(lock),
        )
    return add(
        "stack",
        f"stack {stack.name}",
        env=env.key,
        tree=tree.key,
        compiled=compiled.key if compiled else None,
        path=repository.path,
        steps=[s.model_dump(mode="json") for s in stack.steps],
        environment=dict(stack.environment),
        **({"tools": tools_of(stack)} if stack.tools else {}),
    )


def _torch_build(lock: Lock) -> Any:
    found = lock.python_set("torch")
    package = next((p for p in found.packages if p.name == "torch"), None) if found else None
    return [package.version, *package.hashes] if package else lock.cell["torch"]


def _toolkit(lock: Lock) -> Any:
    image = next((i.digest or i.reference for i in lock.images if i.stage == "devel"), None)
    return image or _set_inputs(lock.python_set("toolchain"))


def _headers(lock: Lock) -> Any:
    """Return what a g++-only build reads of CUDA: the toolkit's version, not its every package."""
    return [lock.cell.get("nvcc"), lock.cell.get("toolchain"), _toolkit(lock)]


def _compiler(lock: Lock) -> Any:
    packages = [p for s in lock.os for p in s.packages] + list(lock.root.packages if lock.root else ())
    chosen = {p.name: p.version for p in packages if p.name.startswith(_COMPILER_PACKAGES)}
    return chosen or [lock.cell["os"], lock.cell.get("gcc")]


def _tools(lock: Lock, wanted: Iterable[str] = ()) -> Any:
    """Return what builds a wheel; `wanted` are the requirements of one component beyond what every one takes."""
    found = lock.python_set("tools")
    if found is None or not found.packages:
        return sorted(found.requirements) if found else None
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    names = {*_WHEEL_TOOLS, *(canonicalize_name(Requirement(each).name) for each in wanted)}
    return {p.name: p.version for p in found.packages if p.name in names}
