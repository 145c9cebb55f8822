"""The state while a script or a Dockerfile is read: variables, folder, stage, choices and clones."""

import itertools
import posixpath
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.recipes.model import ARCHITECTURE, ARCHITECTURES, IMAGE, Branch, Recipe, Stage, Statement, is_within

_CUDA_FOLDER = re.compile(r"\bcuda-(\d+(?:\.\d+)?)(?![\w-])")
_SEARCHED = re.compile(
    r"PATH|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|CUDA_HOME|CUDA_PATH|CUDACXX|\w+_ROOT"
)
_ARCH = re.compile(r"(\d+)\.?(\d)(?:\+PTX|a|f)?(?:-(?:real|virtual))?", re.IGNORECASE)


@dataclass(eq=False)
class Clone:
    """A source tree that a recipe clones, and what is done in it."""

    name: str
    line: int
    folder: str
    """The last part of its path."""
    made_in: str
    """The folder that was the current one."""
    ref: str | None = None
    fetched: str | None = None
    hopper: bool = False
    built: set[str] = field(default_factory=set)
    """What is built of it: its own package, or one next to that."""
    branch: Branch = ()
    environment: str = ""


class Reader:
    """A Dockerfile or a shell script, read from top to bottom."""

    def __init__(self, matrix: Matrix, recipe: Recipe) -> None:
        self.matrix = matrix
        self.recipe = recipe
        self.values: dict[str, str] = {}
        self.given: dict[str, str] = {}
        """What ARG before the first FROM sets."""
        self.exported: dict[str, str] = {}
        self.clones: list[Clone] = []
        self.stage = Stage(line=0)
        self.named: dict[str, Stage] = {}
        self.folder = ""
        self.before = ""
        self.pushed: list[str] = []
        self.depth = 0
        """How many texts that a command was given stand around the one that is read."""
        self._numbers = itertools.count()

    @contextmanager
    def choice(self) -> Iterator["Conditional"]:
        """Stand in a choice, arm by arm; afterwards what its arms set is not known."""
        choice, branch = Conditional(str(next(self._numbers)), self), self.recipe.branch
        try:
            yield choice
        finally:
            self.recipe.branch = branch
            choice.leave()

    @contextmanager
    def under(self, conditions: Mapping[str, str]) -> Iterator[None]:
        """Stand where variables were found to be equal to literals."""
        branch = self.recipe.branch
        held = {name for name, _ in branch}
        own = tuple((f"${name}", value) for name, value in conditions.items() if f"${name}" not in held)
        self.recipe.branch = (*branch, *own)
        try:
            yield
        finally:
            self.recipe.branch = branch

    def folder_at(self, place: str) -> str:
        """Return the folder that a command names, from the current one where it is relative."""
        return posixpath.normpath(posixpath.join("" if place.startswith(("~", "$")) else self.folder, place))[-4096:]

    def set_variable(self, name: str, value: str, line: int) -> None:
        """Take an environment variable for what it states."""
        recipe = self.recipe
        recipe.variables.append((name, value, line))
        versions = dict.fromkeys(_CUDA_FOLDER.findall(value) if _SEARCHED.fullmatch(name) else ())
        if versions or not name.endswith("PATH"):  # which keeps what it had behind what comes before that
            self._replace("nvcc", line, versions, of=name)
        for version in versions:
            recipe.state("nvcc", version, line, path=True, of=name)
        if name in {"TORCH_CUDA_ARCH_LIST", "NVTE_CUDA_ARCHS"}:
            self._architectures(value, line)

    def _replace(self, axis: AxisName, line: int, versions: Collection[str], *, of: str) -> None:
        """Drop what was stated `of` this and holds no longer, because `line` says `versions` wherever that held."""
        for found in [s for s in self.recipe.before(axis, line) if s.of == of and s.spec not in versions]:
            if is_within(found.branch, self.recipe.branch):
                self.recipe.drop(found)

    def _architectures(self, value: str, line: int) -> None:
        words = [a for a in re.split(r"[;, ]+", value.strip("'\"")) if a]
        found = dict.fromkeys(f"sm_{m[1]}{m[2]}" for m in map(_ARCH.fullmatch, words[:40]) if m)
        known = [gpu for gpu in found if self.matrix.has("gpu", gpu)]
        for gpu in known:  # each of several is compiled for, and none of them need be the GPU
            self.recipe.state("gpu", gpu, line, of=ARCHITECTURES if len(words) > 1 else ARCHITECTURE)

    def drop(self, axes: set[AxisName] | None, *, environment: bool = False, module: bool = False) -> None:
        """Drop what was stated and holds no longer, in this stage and what it is built on.

        Args:
            axes: those that are dropped; None for all.
            environment: only what the recipe's own pip or conda installed.
            module: only what `module load` loaded.

        """
        for axis in sorted(self.matrix.axes) if axes is None else sorted(axes):
            for found in list(self.recipe.before(axis, self.stage.line)):
                if (environment and found.installed) or (module and found.module):
                    self.recipe.drop(found)

    def renew(self, axis: AxisName, line: int, *, of: str = "") -> None:
        """Drop what an install that replaces what is there (`--upgrade`, `--force-reinstall`) takes the place of."""
        axes = {axis, "cuda"} if axis == "torch" and not of else {axis}
        for found in [s for each in sorted(axes) for s in self.recipe.before(each, line)]:
            if found.installed and found.of == of and found.line < line and is_within(found.branch, self.recipe.within):
                self.recipe.drop(found)

    def is_there(self, axis: AxisName, line: int) -> bool:
        """Return whether something of `axis` is installed before `line`, which pip leaves as it is."""
        recipe = self.recipe
        of_image = axis == "torch" and any(s.spec.startswith("ngc-") for s in recipe.before("base", line))
        return of_image or any(_is_release(s) for s in recipe.before(axis, line))


def _is_release(statement: Statement) -> bool:
    return statement.installed and not statement.newest and statement.of in {"", IMAGE}


class Conditional:
    """An if, a case or a list of commands with `||`: of what its arms state, one holds."""

    def __init__(self, number: str, reader: Reader) -> None:
        self._number, self._reader = number, reader
        self._outside = reader.recipe.branch
        self._before = dict(reader.values)
        self._changed: set[str] = set()
        self._arm = -1

    def turn(self, *, keep: bool = False, known: bool = False) -> None:
        """Go on to the next arm.

        Args:
            keep: variables are not again what they were before the first arm.
            known: when the arm is taken is known, or is given by `Reader.under`.

        """
        if self._arm >= 0 and not keep:
            self.leave()
            self._reader.values.clear()
            self._reader.values.update(self._before)
        self._arm += 1
        self._reader.recipe.branch = (*self._outside, (self._number, f"{self._arm}{'' if known else '?'}"))

    def leave(self) -> None:
        """Forget what the arms set: which way it goes is not known."""
        values = self._reader.values
        self._changed |= {name for name, value in values.items() if self._before.get(name) != value}
        for name in self._changed:
            values.pop(name, None)
