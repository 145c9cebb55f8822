"""What `envbuild check` knows besides the matrix: findings, companions, and who reads a variable."""

from functools import cache
from typing import Literal

from envbuild.matrix.model import AxisName, Source, Spec
from envbuild.paths import data_dir
from envbuild.util.model import Field, Model
from envbuild.util.toml import explain_validation, read_toml


class FindingRule(Model):
    """One kind of finding."""

    id: str = Field(pattern=r"^recipe-[a-z0-9-]+$")
    why: str
    todo: str
    source: Source


class Variable(Model):
    """An environment variable and who reads it."""

    name: str
    read_by: str | None = None
    """None: nothing does."""
    instead: str | None = None
    """The variable that is read, where this one is mistaken for it."""
    when: Literal["build", "run", "both"] = "run"
    only_with: dict[AxisName, Spec] = {}
    """Axes on which it is read; elsewhere nothing reads it."""
    toolkit: bool = False
    """Whether it names the CUDA toolkit's folder or compiler."""
    source: Source


class Companion(Model):
    """A package of which each release goes with one release of an axis."""

    name: str
    axis: AxisName
    releases: dict[str, str]
    """Its own major.minor, and that of the axis."""
    source: Source


class _Companions(Model):
    companion: tuple[Companion, ...]


class _Findings(Model):
    finding: tuple[FindingRule, ...]


class _Variables(Model):
    variable: tuple[Variable, ...]


@cache
def findings_catalog() -> dict[str, FindingRule]:
    """Return the kinds of finding by id."""
    path = data_dir("matrices") / "recipes" / "findings.toml"
    try:
        return {rule.id: rule for rule in _Findings.model_validate(read_toml(path)).finding}
    except ValueError as error:
        raise explain_validation(error, path) from error


@cache
def variables() -> dict[str, Variable]:
    """Return the known environment variables by name."""
    path = data_dir("matrices") / "recipes" / "variables.toml"
    try:
        return {variable.name: variable for variable in _Variables.model_validate(read_toml(path)).variable}
    except ValueError as error:
        raise explain_validation(error, path) from error


@cache
def companions() -> dict[str, Companion]:
    """Return the packages whose release fixes that of an axis, by name."""
    path = data_dir("matrices") / "recipes" / "companions.toml"
    try:
        return {each.name: each for each in _Companions.model_validate(read_toml(path)).companion}
    except ValueError as error:
        raise explain_validation(error, path) from error
