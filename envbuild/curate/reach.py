"""Whether cells exist that hold some releases, or that one rule alone refuses."""

from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Rule
from envbuild.solver.clauses import Cause, Clause, Clauses, compile_matrix
from envbuild.solver.search import solvable
from envbuild.util.frozen import replace


class Reach:
    """Whether cells exist, asked of the compiled matrix with every release free to be chosen."""

    def __init__(self, matrix: Matrix) -> None:
        compiled = compile_matrix(matrix)
        self.compiled: Clauses = compiled.unguarded
        # a request leaves these out unless it names them, and here every request counts
        self._open = {
            i: self.compiled.full[i] for i, axis in enumerate(self.compiled.axes) if axis.use in {"asked", "host"}
        }

    def any_cell(self, masks: dict[int, int], compiled: Clauses | None = None) -> bool:
        """Return whether some cell has each axis within its mask of releases; `compiled` replaces the matrix' clauses."""
        compiled = compiled or self.compiled
        return solvable(compiled, compiled.domains({**self._open, **masks}))

    def without(self, rule: Rule) -> tuple[Clauses, list[Clause]]:
        """Return the clauses less those of `rule`, and those."""
        own = [clause for clause in self.compiled.clauses if clause.cause.rule is rule]
        rest = tuple(
            clause
            if clause.cause.rule is not rule
            else Clause(((clause.literals[0][0], self.compiled.full[clause.literals[0][0]]),), Cause(kind="rule"))
            for clause in self.compiled.clauses
        )
        return replace(self.compiled, clauses=rest), own

    def refuses(self, rule: Rule) -> bool:
        """Return whether some cell is refused by `rule` and by nothing else."""
        rest, own = self.without(rule)
        for clause in own:
            # a clause is broken where every one of its axes has a value outside its mask
            masks: dict[int, int] = {}
            for axis, mask in clause.literals:
                masks[axis] = masks.get(axis, self.compiled.full[axis]) & ~mask & self.compiled.full[axis]
            if all(masks.values()) and self.any_cell(masks, rest):
                return True
        return False

    def applies(self, rule: Rule) -> bool:
        """Return whether some cell, refused by nothing else, has what `rule` speaks of."""
        rest, _ = self.without(rule)
        number = self.compiled.number
        masks = {number[axis]: self.compiled.mask(number[axis], spec) for axis, spec in rule.when.items()}
        if rule.component is not None and number[rule.component] not in masks:
            masks[number[rule.component]] = self.compiled.real[number[rule.component]]
        return all(masks.values()) and self.any_cell(masks, rest)
