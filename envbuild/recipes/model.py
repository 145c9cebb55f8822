"""What a recipe states: its statements by line, the stages and the choices that they stand in, and what was not understood."""

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from envbuild.errors import DataError
from envbuild.matrix.model import AxisName
from envbuild.recipes.syntax import Effort

Kind = Literal["dockerfile", "requirements", "shell", "toml", "conda", "pyproject"]

Branch = tuple[tuple[str, str], ...]
"""The choices that a line stands in and the arm of each: of an if, a case, `||`, or the Python environments.

`!VALUE` is every arm but VALUE: of a variable that was found not to be equal to a literal. An arm whose last letter is `?`
is taken under a condition that was not understood.
"""

_LONGEST_VERSION = 200
"""Characters. `>=2.1,!=2.1.1,<3` has fifteen; a longer one is no version that anything has."""

_MOST_STATEMENTS = 1000
"""Public recipes have fifty."""

_TOO_MANY_DIGITS = re.compile(r"\d{19}")  # a date and a time have 14; int() refuses 4,301

ENVIRONMENT = "environment"
"""The choice whose arms are the Python environments."""

ARCHITECTURES = "architectures"
"""What a GPU is stated `of` where it is one that something is compiled for."""

ARCHITECTURE = "architecture"
"""What a GPU is stated `of` where it is the one that something is compiled for; what follows may be for another."""

COMMENT = "comment"
"""What a version is stated `of` that only a comment names."""

IMAGE = "image"
"""What a torch is stated `of` that comes with an image."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One release that a line states of an axis; `path` when it is only named by a search path."""

    axis: AxisName
    spec: str
    line: int
    path: bool = False
    newest: bool = False
    """No version is named, so it is whatever is newest on the day."""
    marker: str = ""
    """The environment marker of a requirement: where it is false, nothing is stated."""
    plain: bool = False
    """The OS of an image without a CUDA toolkit: no base of the matrix need be it."""
    source: bool = False
    """Built from a source tree: what PyPI's wheels need is not asked of it."""
    installed: bool = False
    """Installed by the recipe's own pip or conda, or built, and so gone when they remove it."""
    module: bool = False
    """Loaded by a site's `module load`."""
    toolkit: bool = False
    """A CUDA toolkit or a Python that lies on disk; another may lie next to it."""
    of: str = ""
    """What says so, where it is another package than the axis' own: torchvision, of torch."""
    branch: Branch = ()

    def may_hold_with(self, branch: Branch) -> bool:
        """Return whether no choice that both stand in went another way for this one than for what stands in `branch`."""
        return may_hold_with(self.branch, branch)


def may_hold_with(one: Branch, other: Branch) -> bool:
    """Return whether what is in one place may hold together with what is in another: no choice went both ways."""
    arms = dict(other)
    return all(choice not in arms or _may_be_one(arm, arms[choice]) for choice, arm in one)


def is_known_with(one: Branch, other: Branch, *, same: bool = False) -> bool:
    """Return whether what stands in one place is known to hold where what stands in the other does.

    Of two conditions that were not understood it is not known whether both can hold, unless one stands within the other.
    What an arm states of the `same` thing as the lines around it takes the place of that.
    """
    some, others = ({choice for choice, arm in branch if arm.endswith("?")} for branch in (one, other))
    nested = some == others if same else some <= others or others <= some
    return nested and may_hold_with(one, other)


def is_within(one: Branch, other: Branch) -> bool:
    """Return whether what stands in `one` is done only where what stands in `other` is."""
    return set(other) <= set(one)


def _may_be_one(arm: str, other: str) -> bool:
    if arm.startswith("!") or other.startswith("!"):
        return arm != f"!{other}" and other != f"!{arm}"
    return arm == other


def are_same(one: Statement, other: Statement) -> bool:
    """Return whether two statements are of one thing, of which there is one at a time: torch has its CUDA with it."""
    return one.axis == other.axis or {one.axis, other.axis} in ({"nvcc", "cuda"}, {"torch", "cuda"})


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A line that is wrong by itself, and the kind of finding that it is."""

    rule: str
    line: int
    what: str


@dataclass(eq=False)
class Stage:
    """A stage of a Dockerfile and what is known of its image."""

    line: int
    base: "Stage | None" = None
    """The stage that FROM names."""
    toolkit: bool | None = None
    """Whether the image holds a CUDA toolkit; None where the recipe does not say."""
    workdir: str = ""
    compat: str = ""
    """The CUDA, major.minor, whose cuda-compat is in the image."""
    environment: dict[str, str] = field(default_factory=dict)
    """The variables that ENV and ARG set."""

    def chain(self) -> "list[Stage]":
        """Return the stage and those that it is built on: what is stated in one of them holds in it."""
        stages, stage = list[Stage](), self
        while stage not in stages[-1:]:
            stages.append(stage)
            stage = stage.base or stage
        return stages


@dataclass
class Recipe:
    """What a recipe states."""

    kind: Kind
    lines: list[str]
    effort: Effort = field(default_factory=Effort)
    statements: dict[Statement, None] = field(default_factory=dict)
    """In the order in which they were read."""
    noted: list[Noted] = field(default_factory=list)
    variables: list[tuple[str, str, int]] = field(default_factory=list)
    """Environment variables: name, value, line."""
    packages: list[tuple[str, int]] = field(default_factory=list)
    """Python distributions that come from an index, by normalised name, and their lines."""
    stages: list[Stage] = field(default_factory=list)
    commands: list[tuple[int, str]] = field(default_factory=list)
    """The words of every command that is read, in one text, and its line."""
    branch: Branch = ()
    """Where the reading stands."""
    environment: str = ""
    """The Python environment that the reading stands in."""
    _by_axis: dict[str, dict[Statement, None]] = field(default_factory=dict)

    def stage(self, line: int) -> Stage | None:
        """Return the stage that `line` belongs to; None for what stands before the first, and holds in all."""
        place = bisect.bisect_right(self.stages, line, key=lambda stage: stage.line)
        return self.stages[place - 1] if place else None

    @property
    def within(self) -> Branch:
        """Where the reading stands, and in which environment: what an install there is part of."""
        return (*self.branch, (ENVIRONMENT, self.environment))

    @cached_property
    def text(self) -> str:
        """All commands, once the reading is done."""
        return "\n".join(text for _, text in self.commands)

    def before(self, axis: AxisName, line: int) -> Iterator[Statement]:
        """Yield what is stated of `axis` so far, in the stage of `line` or what that is built on."""
        stage = self.stage(line)
        chain = [*(stage.chain() if stage else ()), None]
        self.effort.spend(1)
        for s in self._by_axis.get(axis, ()):
            if self.stage(s.line) in chain and s.may_hold_with(self.within):
                yield s

    def state(
        self,
        axis: AxisName,
        spec: str,
        line: int,
        *,
        path: bool = False,
        newest: bool = False,
        marker: str = "",
        plain: bool = False,
        source: bool = False,
        installed: bool = False,
        module: bool = False,
        toolkit: bool = False,
        of: str = "",
    ) -> None:
        """Add a statement, once per line."""
        if len(spec) > _LONGEST_VERSION or _TOO_MANY_DIGITS.search(spec):
            self.effort.skip(line, spec)
            return
        self.effort.spend(1)
        if len(self.statements) >= _MOST_STATEMENTS:
            raise DataError(
                f"the recipe states versions on more than {_MOST_STATEMENTS} lines",
                hint="check its parts one by one",
            )
        branch = self.within if installed else self.branch
        found = Statement(
            axis=axis,
            spec=spec,
            line=line,
            path=path,
            newest=newest,
            marker=marker,
            plain=plain,
            source=source,
            installed=installed,
            module=module,
            toolkit=toolkit,
            of=of,
            branch=branch,
        )
        self.statements[found] = None
        self._by_axis.setdefault(axis, {})[found] = None

    def drop(self, found: Statement) -> None:
        """Take a statement back."""
        self.statements.pop(found, None)
        self._by_axis.get(found.axis, {}).pop(found, None)

    def note(self, rule: str, line: int, what: str) -> None:
        """Add a finding that needs no matrix."""
        self.noted.append(Noted(rule=rule, line=line, what=what))
