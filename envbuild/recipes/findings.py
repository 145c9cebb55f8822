"""What is wrong in a recipe, as it is reported."""

from dataclasses import dataclass
from typing import Any

from envbuild.recipes.catalog import findings_catalog
from envbuild.recipes.model import Statement


@dataclass(frozen=True, kw_only=True)
class RecipeFinding:
    """One thing that is wrong.

    Attributes:
        line: the line to look at first.
        lines: every line that takes part.
        rule: a rule of the matrix, or a kind of finding of matrices/recipes/findings.toml.
        rules: every rule of the matrix that takes part, in the order of the argument.
        why: what is wrong.
        source: where that is known from.
        todo: what to do.

    """

    line: int
    lines: tuple[int, ...]
    rule: str
    rules: tuple[str, ...] = ()
    why: str
    source: str
    todo: str

    def as_json(self) -> dict[str, Any]:
        """Return the finding as the object that `--json` prints."""
        return {
            "line": self.line,
            "lines": list(self.lines),
            "rule": self.rule,
            "rules": list(self.rules),
            "why": self.why,
            "source": self.source,
            "todo": self.todo,
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found in a recipe, by line."""

    findings: tuple[RecipeFinding, ...]
    statements: tuple[Statement, ...]
    """What the recipe states, as it was understood."""
    unknown: tuple[Statement, ...]
    """Statements of releases that the matrix does not list, or has in no cell: they are not judged."""
    not_understood: tuple[tuple[int, str], ...] = ()
    """Lines that no reader made sense of, and the beginning of what stands there."""


def finding_of(rule: str, line: int, why: str, *, source: str | None = None, todo: str | None = None) -> RecipeFinding:
    kind = findings_catalog()[rule]
    return RecipeFinding(
        line=line, lines=(line,), rule=rule, why=why, source=source or kind.source, todo=todo or kind.todo
    )
