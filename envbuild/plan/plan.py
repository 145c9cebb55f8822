"""Lock -> plan: the stages that make the image, each with a key over exactly the inputs that can change its result."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from envbuild.components import components_in
from envbuild.components.base import View, Wheel
from envbuild.components.mpi import MpiFacts
from envbuild.errors import LockError
from envbuild.lock.inputs import Inputs, inputs_of
from envbuild.lock.make import Locked
from envbuild.lock.model import FileSource, GitSource, Lock, PythonSet
from envbuild.matrix.cell import Cell
from envbuild.matrix.load import Matrix
from envbuild.matrix.view import CellView
from envbuild.paths import data_dir
from envbuild.stacks import Stack, Step, patches_of, stack_names, tools_of

RECIPES = ("os-install", "python-install", "compile-pyc", "build-wheel", "build-native")
_FOR_ONE_SM = "build-for-sm"
"""The recipe of wheels that name `only_sm`; a plan without such a wheel does not hold it."""

# OS packages that decide what a compiler writes; an upgrade of any other leaves compiled wheels as they are.
_COMPILER_PACKAGES = ("binutils", "cpp-", "gcc-", "g++-", "libc6", "libgcc-", "libstdc++-", "linux-libc-dev")
# Build tools that decide what goes into a wheel.
_WHEEL_TOOLS = ("setuptools", "wheel", "ninja", "cmake", "pybind11", "packaging")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the build.

    `inputs` holds everything that can change the stage's result, and nothing else; `key` is their hash. A compiled
    stage names its inputs one by one; the others take the keys of the stages below them.
    """

    name: str
    title: str
    inputs: Mapping[str, Any]

    @cached_property
    def key(self) -> str:
        """sha256 (hex) over the stage's inputs."""
        body = json.dumps({"stage": self.name, "inputs": self.inputs}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(body.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that the renderers need: stages, recipes, lists and the image's metadata."""

    lock: Lock
    cell: Cell
    stack: Stack | None
    components: tuple[Wheel, ...]
    stages: tuple[Stage, ...]
    recipes: Mapping[str, str]
    lists: Mapping[str, str]
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    workdir: str
    python: str
    managed_python: bool
    placed: tuple[tuple[str, str], ...]
    mpi: MpiFacts | None
    """The MPI that the build compiles."""
    brought: tuple[str, ...]
    """Distributions that the base image brings; its Python's packages are then seen by the environment."""

    @cached_property
    def _by_name(self) -> dict[str, Stage]:
        return {s.name: s for s in self.stages}

    def stage(self, name: str) -> Stage:
        """Return the stage `name`."""
        return self._by_name[name]

    @property
    def key(self) -> str:
        """The key of the whole image."""
        return self.stage("image").key

    @property
    def tag(self) -> str:
        """The image's own name; a stack's image, and one that keeps the compiler, is another than the bare cell's."""
        parts = [self.cell.id, *([self.stack.name.replace("@", "-")] if self.stack else [])]
        return "envbuild:" + "-".join([*parts, *(["devel"] if self.lock.flavor == "devel" else [])])

    @property
    def compiles(self) -> bool:
        """Whether the build needs compilers."""
        return bool(self.lock.os_set("builder").wanted)

    @property
    def compiled_steps(self) -> tuple[Step, ...]:
        """The stack's steps that need the builder."""
        return tuple(step for step in self.stack.steps if step.compiles) if self.stack else ()

    @property
    def resolved_wheels(self) -> tuple[Wheel, ...]:
        """The components whose requirements come with them."""
        return tuple(c for c in self.components if not c.alone)

    @property
    def lone_wheels(self) -> tuple[Wheel, ...]:
        """The components whose requirements the stack states."""
        return tuple(c for c in self.components if c.alone)

    @property
    def external(self) -> tuple[str, ...]:
        """The stages that bring something from outside, and that `--build-context` may replace."""
        images = [i.stage for i in self.lock.images] or ["base"]
        sources = [f"src-{s.name}" for s in self.lock.sources] + [f"src-{s.name}" for s in self.lock.files]
        own = ["runtime", *(["builder"] if self.compiles else []), "torch"]
        return (*images, "debs", "wheels", "uv-wheel", *sources, *own)

    def has(self, name: str) -> bool:
        """Return whether the Python set `name` is part of this cell."""
        found = self.lock.python_set(name)
        return found is not None and bool(found.requirements)

    def index(self, name: str) -> str | None:
        """Return the index that the Python set `name` needs beside PyPI."""
        found = self.lock.python_set(name)
        return found.index if found else None


def plan_of(matrix: Matrix, locked: Locked, stack: Stack | None = None) -> Plan:
    """Lay out the build of a lock. Pure: no network, no clock, no engine.

    Raises:
        LockError: the stack is not the one that was locked, or the lock does not hold what its cell is made of.

    """
    lock = locked.lock
    cell = lock.as_cell
    _require_known(matrix, lock)
    if stack is not None and lock.stack_digest not in {None, stack.digest()}:
        shipped = stack.name.partition("@")[0] in stack_names()
        own = "; or name the file that it was made from: --stack FILE" if shipped else ""
        raise LockError(
            f"the stack {stack.name} has changed since this lock was made",
            where=f"lock {lock.digest[:19]}",
            hint=f"lock it again: envbuild lock with the same flags{own}",
        )
    inputs = inputs_of(matrix, cell, stack=stack, flavor=lock.flavor, te_source=lock.te_source)
    _require_inputs(lock, inputs)
    names = (*RECIPES, *([_FOR_ONE_SM] if any(c.only_sm for c in inputs.components) else []))
    recipes = {name: (data_dir("dockerfiles") / "recipe" / name).read_text(encoding="utf-8") for name in names}
    recipes |= _stack_recipes(stack) if stack else {}
    ngc = matrix.release("base", cell.versions["base"]).facts.kind == "ngc"
    os_python = matrix.release("os", cell.versions["os"]).facts.python
    version = cell.versions["python"]
    managed = os_python != version and not ngc
    site = f"/opt/venv/lib/python{version}/site-packages"
    view = CellView(matrix=matrix, cell=cell, sources=lock.asked_sources, repository=stack is not None)
    lists = _lists(locked, inputs, view)
    environment = _environment(view, lock, stack, site)
    labels = _labels(lock, cell)
    carried = {name: text for name, text in lists.items() if name.startswith("lock/")} | environment | labels
    placed, mpi = _placed(view, site), _compiled_mpi(view)
    return Plan(
        lock=lock,
        cell=cell,
        stack=stack,
        components=inputs.components,
        stages=_stages(lock, inputs, recipes, carried, placed=placed, mpi=mpi),
        recipes=recipes,
        lists=lists,
        environment=environment,
        labels=labels,
        workdir=stack.repository.path if stack else "/workspace",
        # an NGC image's Python is the one on its own PATH: conda's in the old ones, the OS' in the others
        python="python3" if ngc else f"/opt/python/bin/python{version}" if managed else f"/usr/bin/python{version}",
        managed_python=managed,
        placed=placed,
        mpi=mpi,
        brought=inputs.brought,
    )


def _unfit(lock: Lock, what: str) -> LockError:
    return LockError(
        f"the lock does not fit its cell: {what}",
        where=f"lock {lock.digest[:19]}",
        hint="build with the envbuild that made the lock, or lock again: envbuild lock with the same flags",
    )


def _require_known(matrix: Matrix, lock: Lock) -> None:
    """Raise LockError where the cell has a release that the matrix does not list."""
    for axis, version in lock.cell.items():
        if axis not in matrix.axes:
            raise _unfit(lock, f"the matrix has no axis {axis}")
        if not matrix.has(axis, version) and not matrix.axes[axis].open:
            raise _unfit(lock, f"the matrix lists no {axis} {version}")
        known = matrix.release(axis, version).commit if matrix.has(axis, version) else None
        if known and lock.commits.get(axis, known) != known:
            raise _unfit(lock, f"{axis} {version} is the commit {known}, the lock has {lock.commits[axis]}")


def _require_inputs(lock: Lock, inputs: Inputs) -> None:
    """Raise LockError where the lock has not what the build of its cell takes."""
    compiled = tuple(c.axis for c in inputs.components)
    if lock.components != compiled:
        raise _unfit(
            lock, f"it compiles {', '.join(lock.components) or 'nothing'}, the cell {', '.join(compiled) or 'nothing'}"
        )
    if {i.stage for i in lock.images} != {i.stage for i in inputs.images}:
        raise _unfit(lock, "it starts from other base images")
    if (lock.root.suite if lock.root else None) != inputs.root_suite:
        raise _unfit(lock, f"its root is {lock.root.suite if lock.root else 'none'}, the cell's is {inputs.root_suite}")
    for group in inputs.python:
        if group.requirements and lock.python_set(group.name) is None:
            raise _unfit(lock, f"it has no {group.name} packages")
    for wanted in inputs.trees:
        source = lock.source(wanted.name)
        if not isinstance(source, GitSource) or source.commit != wanted.commit:
            found = source.commit if isinstance(source, GitSource) else "none"
            raise _unfit(lock, f"the source of {wanted.name} is at {wanted.commit}, the lock has {found}")
    for name in (*(s.name for s in inputs.sdists), *(f.name for f in inputs.files)):
        if not isinstance(lock.source(name), FileSource):
            raise _unfit(lock, f"it has no source of {name}")


def _compiled_mpi(view: View) -> MpiFacts | None:
    facts: MpiFacts | None = view.release("mpi").facts if "mpi" in view.versions else None
    return facts if facts and facts.url else None


def _stack_recipes(stack: Stack) -> dict[str, str]:
    from envbuild.patching import apply_script

    recipes = {f"step-{s.name}": f"set -eu\n{s.run.strip()}\n" for s in stack.steps if s.run}
    recipes |= {f"check-{s.name}": f"set -eu\n{s.check.strip()}\n" for s in stack.steps if s.check}
    return recipes | ({"patch-tree": apply_script(patches_of(stack))} if stack.patches else {})


def _placed(view: View, site: str) -> tuple[tuple[str, str], ...]:
    """Return the modules that a component installs elsewhere than where its user imports them: its name, the file there."""
    return tuple(
        (name, f"{site}/{file}") for component in components_in(view) for name, file in component.placed(view).items()
    )


def _digest(text: str) -> str:
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


def _stages(
    lock: Lock,
    inputs: Inputs,
    recipes: Mapping[str, str],
    carried: Mapping[str, str],
    *,
    placed: Sequence[tuple[str, str]],
    mpi: MpiFacts | None,
) -> tuple[Stage, ...]:
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
    base = add(
        "base",
        "base system",
        image=image_inputs("base"),
        suite=[root.suite, root.epoch] if root else None,
        packages={p.name: [p.version, p.sha256] for p in root.packages} if root else None,
    )
    os_recipe = _digest(recipes["os-install"])
    runtime = add(
        "runtime",
        "OS packages",
        base=base.key,
        packages=os_inputs("runtime"),
        recipe=os_recipe,
        python=cell["python"],
        managed=_source_inputs(lock.source("python")),
    )
    python_recipe = _digest(recipes["python-install"] + recipes["compile-pyc"])
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
        [mpi.url, mpi.sha256, mpi.prefix, list(mpi.configure), _digest(recipes["build-native"])] if mpi else None
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
            recipe=_digest(recipes["build-wheel"]),
            **({"sm": [component.only_sm, _digest(recipes[_FOR_ONE_SM])]} if component.only_sm else {}),
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
        carried={name: _digest(text) for name, text in carried.items()},
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
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = lock.python_set("tools")
    if found is None or not found.packages:
        return sorted(found.requirements) if found else None
    names = {*_WHEEL_TOOLS, *(canonicalize_name(Requirement(each).name) for each in wanted)}
    return {p.name: p.version for p in found.packages if p.name in names}


def _lists(locked: Locked, inputs: Inputs, view: View) -> dict[str, str]:
    from envbuild.lock.python import requirements_text

    lock = locked.lock
    lists: dict[str, str] = {}
    for os_set in lock.os:
        lines = [f"{p.name}={p.version} {p.sha256}" for p in os_set.packages] or list(os_set.wanted)
        lines += [f"# {p.name}={p.version} {p.sha256}" for p in os_set.renewed]
        lists[f"os.{os_set.name}.txt"] = "".join(f"{line}\n" for line in lines)
    for python_set in lock.python:
        lists[f"python.{python_set.name}.txt"] = (
            requirements_text(python_set) if python_set.packages else "".join(f"{r}\n" for r in python_set.requirements)
        )
    lists["lock/lock.json"] = lock.model_dump_json(indent=1, exclude_defaults=True) + "\n"
    lists["lock/expected.json"] = json.dumps(expected(lock, inputs, view), indent=1, sort_keys=True) + "\n"
    for patch in patches_of(inputs.stack) if inputs.stack else ():
        lists[f"patches/{patch.filename}"] = patch.diff.decode()
    for name, text in tools_of(inputs.stack).items() if inputs.stack else ():
        lists[f"tools/{name}"] = text
    for name, text in sorted(locked.pylocks.items()):
        lists[f"lock/pylock.{name}.toml"] = text if text.endswith("\n") else text + "\n"
    return lists


def expected(lock: Lock, inputs: Inputs, view: View) -> dict[str, Any]:
    """Return what audit and smoke tests hold an image against: components, versions, modules, extensions."""
    components: dict[str, Any] = {}
    for component in components_in(view):
        if component.is_brought(view):
            components[component.axis] = {
                "distribution": component.axis,
                "version": lock.cell[component.axis],
                "module": component.module(view),
                "source": "base",
            }
    for wheel in inputs.components:
        components[wheel.axis] = {
            "distribution": wheel.distribution,
            "version": wheel.version,
            "module": wheel.module,
            # a stack's own lie inside their packages, and `module` is what imports
            "extensions": [] if wheel.alone else list(wheel.extensions),
        }
    for component in components_in(view):
        if (more := component.expected(view)) is not None and not component.is_brought(view):
            components[component.axis] = components.get(component.axis, {}) | dict(more)
    if inputs.stack is not None:
        for build in inputs.stack.builds:
            if build.version is None:  # what a tree calls itself is its own affair
                components[build.name] |= {"version": None, "commit": build.commit}
        components["stack"] = {
            "name": inputs.stack.name,
            "path": inputs.stack.repository.path,
            "commit": inputs.stack.repository.commit,
            "patches": list(inputs.stack.patches),
        }
    sets = [found for found in map(lock.python_set, ("torch", "env")) if found]
    packages = {package.name: package.version for each in sets for package in each.packages}
    return {
        "cell_id": lock.as_cell.id,
        "lock_digest": lock.digest,
        "flavor": lock.flavor,
        "cell": lock.cell,
        "packages": packages,
        "components": components,
        "matrix": lock.matrix,
    }


_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _environment(view: View, lock: Lock, stack: Stack | None, site: str) -> dict[str, str]:
    kind = view.release("base").facts.kind
    mpi = _compiled_mpi(view)
    first = ["/opt/venv/bin", *([f"{mpi.prefix}/bin"] if mpi else [])]
    devel = lock.flavor == "devel" and "nvcc" in view.versions
    if kind == "ngc":
        path = ":".join([*first, "$PATH"])  # conda, MPI and CUDA lie where the image's own PATH says
    else:
        path = ":".join([*first, *(["/usr/local/cuda/bin"] if devel else []), _SYSTEM_PATH])
    env = {"PATH": path, "VIRTUAL_ENV": "/opt/venv"}
    if devel:
        env["CUDA_HOME"] = "/usr/local/cuda"
    if mpi:
        env["LD_LIBRARY_PATH"] = f"{mpi.prefix}/lib" + (":$LD_LIBRARY_PATH" if kind == "ngc" else "")
    if view.versions["cuda"] != "cpu":
        # Which devices the NVIDIA container toolkit hands in when the user names none, and with which driver libraries.
        env |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    for component in components_in(view):
        env |= component.environment(view, site=site, devel=devel)
    own = {name: value.replace("{site}", site) for name, value in stack.environment.items()} if stack else {}
    return env | own


def _labels(lock: Lock, cell: Cell) -> dict[str, str]:
    labels = {
        "org.opencontainers.image.title": "envbuild " + cell.id,
        "io.envbuild.cell": cell.id,
        "io.envbuild.lock": lock.digest,
        "io.envbuild.complete": "true" if lock.complete else "false",
    }
    if lock.stack:
        labels["io.envbuild.stack"] = lock.stack
    return labels
