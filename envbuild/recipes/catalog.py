"""What `envbuild check` knows beside the matrix: findings, patterns that are known to be wrong, and who reads a variable."""

import re
from functools import cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from envbuild.matrix.model import AxisName, Source, Spec
from envbuild.paths import data_dir
from envbuild.util.model import Model
from envbuild.util.toml import explain_validation, read_toml


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression: {error}") from None
    return value


class FindingRule(Model):
    """One kind of finding. Those with a `pattern` are found by it alone; the code finds the others."""

    id: str = Field(pattern=r"^recipe-[a-z0-9-]+$")
    why: str
    todo: str
    source: Source
    pattern: Annotated[str, AfterValidator(_check_pattern)] | None = None


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
    except ValidationError as error:
        raise explain_validation(error, path) from error


@cache
def variables() -> dict[str, Variable]:
    """Return the known environment variables by name."""
    path = data_dir("matrices") / "recipes" / "variables.toml"
    try:
        return {variable.name: variable for variable in _Variables.model_validate(read_toml(path)).variable}
    except ValidationError as error:
        raise explain_validation(error, path) from error
