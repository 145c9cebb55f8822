"""Clauses and sums as a clingo program, fed through its backend: no text, no grounding."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Self

import clingo

from envbuild.solver.clauses import Clauses, bits
from envbuild.solver.propagation import propagate


def runs(chosen: int, domain: int) -> Iterator[tuple[int, int]]:
    """Yield `chosen` (a subset of `domain`) as maximal runs [first, end) of positions within `domain`."""
    others = domain & ~chosen
    while chosen:
        low = chosen & -chosen
        above = others & ~(low - 1)
        first = (domain & (low - 1)).bit_count()
        if not above:
            yield first, domain.bit_count()
            return
        high = above & -above
        yield first, (domain & (high - 1)).bit_count()
        chosen &= ~(high - 1)


class Program:
    """A clingo program over what propagation left open.

    An axis with n possible values has n-1 order atoms, "the value is at place p or later", so a run of releases is two
    literals, and preferences, dates and ages are sums over the same atoms: the program grows linearly with the data.
    """

    def __init__(self, compiled: Clauses, domains: Sequence[int], *, options: Sequence[str] = ()) -> None:
        self.compiled = compiled
        self.domains = domains
        self.control = clingo.Control(["--seed=1", "--configuration=tweety", "--opt-heuristic=sign,model", *options])
        self.places: dict[int, list[int]] = {}
        """Axis -> value index at each place, for the axes that are still open."""
        self.order: dict[int, list[int]] = {}
        """Axis -> order atom of each place; place 0 has none."""
        self._inside: dict[tuple[int, int], list[int]] = {}
        """(axis, its values) -> what `inside` says of them: most sets are asked for by several clauses."""

    def __enter__(self) -> Self:
        self.backend = self.control.backend()
        self.backend.__enter__()  # type: ignore[no-untyped-call]
        for axis, domain in enumerate(self.domains):
            if domain & (domain - 1):
                self.places[axis] = list(bits(domain))
                atoms = [self.backend.add_atom() for _ in self.places[axis][1:]]
                self.order[axis] = [0, *atoms]
                self.backend.add_rule(atoms, [], choice=True)
                for lower, upper in itertools.pairwise(atoms):
                    self.backend.add_rule([], [upper, -lower])
        return self

    def __exit__(self, *exception: object) -> None:
        self.backend.__exit__(*exception)  # type: ignore[no-untyped-call]

    def _run(self, axis: int, first: int, end: int) -> list[int]:
        order = self.order[axis]
        return [*([order[first]] if first else []), *([-order[end]] if end < len(order) else [])]

    def inside(self, axis: int, mask: int) -> list[int] | None:
        """Return a conjunction of literals that says "`axis` has its value in `mask`"; None when it cannot."""
        domain = self.domains[axis]
        chosen = mask & domain
        if not chosen:
            return None
        if chosen == domain:
            return []
        literals = self._inside.get((axis, chosen))
        if literals is None:
            parts = [self._run(axis, first, end) for first, end in runs(chosen, domain)]
            if len(parts) == 1:
                literals = parts[0]
            else:
                literals = [self.backend.add_atom()]
                for part in parts:
                    self.backend.add_rule(literals, part)
            self._inside[axis, chosen] = literals
        return literals

    def forbid(self, literals: Sequence[tuple[int, int]], *assumed: int) -> None:
        """Refuse that every axis of the clause `literals` is outside its mask."""
        body = list(assumed)
        for axis, mask in literals:
            part = self.inside(axis, ~mask)
            if part is None:
                return  # this literal holds in every remaining cell
            body += part
        self.backend.add_rule([], body)

    def all_clauses(self) -> None:
        """Add every clause of the matrix that propagation has not settled."""
        domains = self.domains
        for clause in self.compiled.clauses:
            if all(domains[axis] & mask != domains[axis] for axis, mask in clause.literals):
                self.forbid(clause.literals)

    def both(self, parts: Sequence[Sequence[int]]) -> int:
        """Return an atom that holds when every literal of `parts` does."""
        atom = int(self.backend.add_atom())
        self.backend.add_rule([atom], list(itertools.chain.from_iterable(parts)))
        return atom

    def minimize(self, priority: int, literals: list[tuple[int, int]]) -> None:
        """Add a step of the order; a larger `priority` is decided first."""
        if literals:
            self.backend.add_minimize(priority, literals)

    def cost(self, axis: int, per_value: Sequence[int]) -> list[tuple[int, int]]:
        """Return literals whose weights sum to the cost of `axis`' value, less a constant."""
        literals = []
        if axis in self.order:
            steps = itertools.pairwise(per_value[value] for value in self.places[axis])
            for (before, after), atom in zip(steps, self.order[axis][1:], strict=True):
                if after != before:
                    literals.append((atom, after - before) if after > before else (-atom, before - after))
        return literals

    def solve(self, assumptions: Sequence[int] = ()) -> list[int] | None:
        """Return the value index of every axis in the (optimal) answer, or None."""
        answer: list[int] | None = None
        with self.control.solve(yield_=True, assumptions=assumptions) as handle:
            for model in handle:
                answer = self.read(model)
        return answer

    def core(self, assumptions: Sequence[int]) -> list[int] | None:
        """Return those of `assumptions` that the solver found to exclude one another, or None when they do not."""
        with self.control.solve(yield_=True, assumptions=assumptions) as handle:
            if handle.get().satisfiable:
                return None
            wanted = set(handle.core())
        return [literal for literal in assumptions if literal in wanted]

    def read(self, model: clingo.Model) -> list[int]:
        """Return the value index of every axis in `model`."""
        values = [domain.bit_length() - 1 for domain in self.domains]
        for axis, places in self.places.items():
            order = self.order[axis]
            low, high = 0, len(places) - 1
            while low < high:  # the order atoms are true up to the value's place
                middle = (low + high + 1) // 2
                if model.is_true(order[middle]):
                    low = middle
                else:
                    high = middle - 1
            values[axis] = places[low]
        return values


def any_cell(compiled: Clauses, domains: list[int]) -> list[int] | None:
    """Return the values of some cell within `domains` (narrowed in place), one index per axis, or None."""
    if any(not domain for domain in domains) or propagate(compiled, domains) is not None:
        return None
    with Program(compiled, domains) as program:
        if not program.order:
            return [domain.bit_length() - 1 for domain in domains]
        program.all_clauses()
    return program.solve()
