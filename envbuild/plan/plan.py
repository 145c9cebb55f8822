"""Lock -> plan: the stages that make the image, each with a key over exactly the inputs that can change its result."""

import re
from collections.abc import Mapping
from functools import cached_property

from envbuild.components import components_in
from envbuild.components.base import View, Wheel
from envbuild.components.mpi import MpiFacts
from envbuild.errors import LockError
from envbuild.lock.files import Locked
from envbuild.lock.inputs import inputs_of
from envbuild.lock.model import COMPAT, Lock
from envbuild.matrix.cell import DEBIAN_ARCH, X86_64, Cell
from envbuild.matrix.driver import Compat, required_driver
from envbuild.matrix.load import Matrix
from envbuild.matrix.view import CellView
from envbuild.paths import data_dir
from envbuild.plan.carried import files_of, labels_of, lists_of
from envbuild.plan.fit import require_inputs, require_known
from envbuild.plan.layers import Layer, layers_of
from envbuild.plan.stages import LAYER, Stage, stages_of
from envbuild.stacks.load import stack_names
from envbuild.stacks.model import Stack, Step
from envbuild.stacks.parts import digest_of, patches_of
from envbuild.util import quote
from envbuild.util.frozen import Frozen
from envbuild.util.names import image_tag

RECIPES = ("os-install", "python-install", "compile-pyc", "constraints", "build-wheel", "build-native")
CONSTRAINTS = "/opt/envbuild/constraints.txt"
"""The versions that pip and uv leave as they are in the image."""
WORKSPACE = "/workspace"


class Plan(Frozen):
    """Everything that the renderers need: stages, recipes, lists and the image's metadata."""

    lock: Lock
    cell: Cell
    stack: Stack | None
    components: tuple[Wheel, ...]
    stages: tuple[Stage, ...]
    recipes: Mapping[str, str]
    lists: Mapping[str, str]
    files: Mapping[str, str]
    """Those of the lists that lie among the packages or the OS': path in the image -> name below `image/`."""
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    workdir: str
    python: str
    managed_python: bool
    placed: tuple[tuple[str, str], ...]
    mpi: MpiFacts | None
    """The MPI that the build compiles."""
    provided: tuple[str, ...]
    """Distributions that the base image contains; its Python's packages are then seen by the environment."""
    held: tuple[str, ...]
    """Distributions of the base image whose versions the cell states."""
    compat: Compat | None
    """NVIDIA's package for older drivers, where the image carries it."""
    layers: tuple[Layer, ...]
    """The layers of the locked Python packages; none where they are installed together."""
    own_os: bool
    """Whether the image has the OS as one layer; otherwise it keeps the base image's layers, settings and labels."""

    @property
    def in_place(self) -> tuple[Step, ...]:
        """The stack's steps that run in the image itself, and may write anywhere in it."""
        return tuple(s for s in self.stack.steps if s.run and not s.compiles) if self.stack else ()

    @property
    def dated(self) -> bool:
        """Whether each layer has fixed times as it is made, so that nothing has to be rewritten at an export."""
        return bool(self.layers) and self.own_os and not self.compat and not self.in_place

    def layers_in(self, of: str) -> tuple[Layer, ...]:
        """Return the layers of the set `of`."""
        return tuple(layer for layer in self.layers if layer.of == of)

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
        return tag_of(self.lock)

    @property
    def platform(self) -> str | None:
        """The platform as Docker names it, e.g. linux/arm64, where the files state one; a file of x86_64 states none."""
        return None if self.cell.arch == X86_64 else f"linux/{DEBIAN_ARCH[self.cell.arch]}"

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
        """The stages that take something from outside, and that `--build-context` may replace."""
        images = [i.stage for i in self.lock.images] or ["base"]
        sources = [f"src-{s.name}" for s in self.lock.sources] + [f"src-{s.name}" for s in self.lock.files]
        own = ["runtime", *(["builder"] if self.compiles else []), "torch"]
        return (*images, "debs", "wheels", "uv-wheel", *sources, *own)

    @property
    def workspace(self) -> str | None:
        """The folder of the image that any user may write to; None where the stack's repository is there."""
        return None if self.stack and self.stack.repository.path == WORKSPACE else WORKSPACE

    @property
    def constraints(self) -> str:
        """The image's file with the versions that pip and uv leave as they are."""
        return CONSTRAINTS

    def has(self, name: str) -> bool:
        """Return whether the Python set `name` is part of this cell."""
        found = self.lock.python_set(name)
        return found is not None and bool(found.requirements)

    def index(self, name: str) -> str | None:
        """Return the index that the Python set `name` needs besides PyPI."""
        found = self.lock.python_set(name)
        return found.index if found else None


def tag_of(lock: Lock) -> str:
    """Return the name of the image that a lock makes."""
    parts = [lock.as_cell.id, *([lock.stack.replace("@", "-")] if lock.stack else [])]
    parts += ["devel"] if lock.flavor == "devel" else []
    return "envbuild:" + image_tag("-".join([*parts, *([] if lock.source(COMPAT) is None else ["compat"])]))


def plan_of(matrix: Matrix, locked: Locked, stack: Stack | None = None) -> Plan:
    """Lay out the build of a lock. Pure: no network, no clock, no engine.

    Raises:
        LockError: the stack is not the one that was locked, or the lock does not hold what its cell is made of.

    """
    lock = locked.lock
    cell = lock.as_cell
    require_known(matrix, lock)
    if stack is not None and lock.stack_digest not in {None, digest_of(stack)}:
        shipped = stack.name.partition("@")[0] in stack_names()
        own = "; or name the file that it was made from: --stack FILE" if shipped else ""
        raise LockError(
            f"the stack {stack.name} has changed since this lock was made",
            where=f"lock {lock.digest[:19]}",
            hint=f"lock it again: envbuild lock with the same flags{own}",
        )
    carries = lock.source(COMPAT) is not None
    inputs = inputs_of(matrix, cell, stack=stack, flavor=lock.flavor, te_source=lock.te_source, compat=carries)
    require_inputs(lock, inputs)
    layers = layers_of(lock, [_normal(c.distribution) for c in inputs.components])
    names = (
        *RECIPES,
        *([LAYER] if layers else []),
        *sorted({name for c in inputs.components for name in c.recipes}),
        *([COMPAT] if inputs.compat else []),
    )
    recipes = {name: (data_dir("dockerfiles") / "recipe" / name).read_text(encoding="utf-8") for name in names}
    recipes |= _stack_recipes(stack) if stack else {}
    ngc = matrix.release("base", cell.versions["base"]).facts.kind == "ngc"
    os_python = matrix.release("os", cell.versions["os"]).facts.python
    version = cell.versions["python"]
    managed = os_python != version and not ngc
    site = f"/opt/venv/lib/python{version}/site-packages"
    view = CellView(matrix=matrix, cell=cell, sources=lock.asked_sources, repository=stack is not None)
    lists = lists_of(locked, inputs, view)
    if inputs.compat:
        lists["lock/cuda-compat.sh"] = _switch(inputs.compat)
    own_os = lock.root is not None or (lock.flavor == "runtime" and not ngc)
    environment = _environment(view, lock, stack, site, inputs.compat, own_os=own_os)
    labels = labels_of(lock, cell, stack.repository if stack else None)
    carried = (
        {name: text for name, text in lists.items() if name.startswith(("lock/", "image/"))} | environment | labels
    )
    placed, mpi = _placed(view, site), _compiled_mpi(view)
    return Plan(
        lock=lock,
        cell=cell,
        stack=stack,
        components=inputs.components,
        stages=stages_of(lock, inputs, recipes, carried, placed=placed, mpi=mpi),
        recipes=recipes,
        lists=lists,
        files=files_of(lists, site),
        environment=environment,
        labels=labels,
        workdir=stack.repository.path if stack else WORKSPACE,
        # an NGC image's Python is the one on its own PATH: conda's in the old ones, the OS' in the others
        python="python3" if ngc else f"/opt/python/bin/python{version}" if managed else f"/usr/bin/python{version}",
        managed_python=managed,
        placed=placed,
        mpi=mpi,
        provided=inputs.provided,
        held=_held(view, inputs.provided),
        compat=inputs.compat,
        layers=layers,
        own_os=own_os,
    )


def _normal(name: str) -> str:
    """Return a distribution's name as a lock has it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _switch(compat: Compat) -> str:
    """Return the script that switches the package on where the host's driver needs it."""
    text = (data_dir("dockerfiles") / "image" / "cuda-compat.sh").read_text(encoding="utf-8")
    values = {"folder": [compat.folder], "cuda": [compat.cuda], "floor": [compat.floor], "branches": compat.branches}
    for name, words in values.items():
        text = text.replace(f"@{name}@", " ".join(map(quote.plain, words)))
    return text


def _compiled_mpi(view: View) -> MpiFacts | None:
    facts: MpiFacts | None = view.release("mpi").facts if "mpi" in view.versions else None
    return facts if facts and facts.url else None


def _stack_recipes(stack: Stack) -> dict[str, str]:
    from envbuild.patches.script import apply_script

    recipes = {f"step-{s.name}": f"set -eu\n{s.run.strip()}\n" for s in stack.steps if s.run}
    recipes |= {f"check-{s.name}": f"set -eu\n{s.check.strip()}\n" for s in stack.steps if s.check}
    return recipes | ({"patch-tree": apply_script(patches_of(stack))} if stack.patches else {})


def _held(view: View, provided: tuple[str, ...]) -> tuple[str, ...]:
    """Return the distributions of the base image whose versions the cell states."""
    of_components = (
        c.distributions or (c.axis,) for c in components_in(view) if c.axis in view.versions and c.is_provided(view)
    )
    return tuple(sorted({*provided, *(name for names in of_components for name in names)}))


def _placed(view: View, site: str) -> tuple[tuple[str, str], ...]:
    """Return the modules that a component installs elsewhere than where its user imports them: its name, the file there."""
    return tuple(
        (name, f"{site}/{file}") for component in components_in(view) for name, file in component.placed(view).items()
    )


_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _environment(
    view: CellView, lock: Lock, stack: Stack | None, site: str, compat: Compat | None, *, own_os: bool
) -> dict[str, str]:
    kind = view.release("base").facts.kind
    mpi = _compiled_mpi(view)
    first = ["/opt/venv/bin", *([f"{mpi.prefix}/bin"] if mpi else [])]
    devel = lock.flavor == "devel" and "nvcc" in view.versions
    if kind == "ngc":
        path = ":".join([*first, "$PATH"])  # conda, MPI and CUDA lie where the image's own PATH says
    else:
        path = ":".join([*first, *(["/usr/local/cuda/bin"] if devel else []), _SYSTEM_PATH])
    env = {"PATH": path, "VIRTUAL_ENV": "/opt/venv", "PIP_CONSTRAINT": CONSTRAINTS, "UV_CONSTRAINT": CONSTRAINTS}
    if devel:
        env["CUDA_HOME"] = "/usr/local/cuda"
    if mpi:
        env["LD_LIBRARY_PATH"] = f"{mpi.prefix}/lib" + (":$LD_LIBRARY_PATH" if kind == "ngc" else "")
    if compat:
        env["LD_LIBRARY_PATH"] = ":".join(["/opt/envbuild/compat", *filter(None, [env.get("LD_LIBRARY_PATH")])])
    if view.versions["cuda"] != "cpu":
        # Which devices the NVIDIA container toolkit hands in when the user names none, and with which driver libraries.
        env |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        # a base of NVIDIA that is kept as it is states its own
        if own_os and (drivers := required_driver(view.matrix, view.cell, compat)) is not None:
            env["NVIDIA_REQUIRE_CUDA"] = drivers
    for component in components_in(view):
        env |= component.environment(view, site=site, devel=devel)
    own = {name: value.replace("{site}", site) for name, value in stack.environment.items()} if stack else {}
    return env | own
