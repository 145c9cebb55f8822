"""All cells that exist, projected on the axes one asks about."""

import itertools
from collections.abc import Iterator, Sequence

import clingo

from envbuild.errors import UsageError
from envbuild.matrix.cell import AUTO, Pin, Request
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName
from envbuild.solver.asked import read_request
from envbuild.solver.clauses import Clauses, bits
from envbuild.solver.program import Program
from envbuild.solver.propagation import propagate


def enumerate_cells(
    matrix: Matrix, axes: Sequence[AxisName], pins: Sequence[Pin] = (), *, repository: bool = False
) -> Iterator[dict[AxisName, str]]:
    """Yield every combination of versions on `axes` that some cell has, each once, in no particular order.

    Every axis of `axes` is in use in what is yielded, an axis of use `asked` or `host` as if asked for, unless a pin says
    `none` of it.

    Args:
        matrix: where to look.
        axes: the axes to distinguish; the others may have any value that fits.
        pins: filters, as a request would state them.
        repository: whether they are a stack's, as `Request.repository` has it.

    Raises:
        UsageError: an axis does not exist, or a pin matches no release.

    """
    named = {pin.axis for pin in pins}
    if not axes:
        raise UsageError("no axis to enumerate", hint="name at least one, e.g. cuda,torch,te")
    axes = list(dict.fromkeys(axes))  # one named twice would multiply what its releases alike stand for
    wanted = [Pin(axis=axis, spec=AUTO, origin="the axes to enumerate") for axis in axes if axis not in named]
    asked = read_request(matrix, Request(pins=(*pins, *wanted), repository=repository))
    compiled = asked.compiled
    domains = compiled.domains(asked.pinned())
    if not all(domains) or propagate(compiled, domains) is not None:
        return
    numbers = [compiled.number[axis] for axis in axes]
    # releases that every clause treats alike are distinguished only when a combination is spelled out
    alike = _alike(compiled, domains)
    domains = [sum(1 << members[0] for members in groups.values()) for groups in alike]
    members_of = [{members[0]: members for members in groups.values()} for groups in alike]
    with Program(compiled, domains, options=("--models=0", "--project=project")) as program:
        program.all_clauses()
        # one atom per value, named by axis and value, so that a model lists its few true ones
        atoms = []
        for number in numbers:
            for value in program.places.get(number, ()):
                symbol = clingo.Function("is", [clingo.Number(number), clingo.Number(value)])
                atom = program.backend.add_atom(symbol)
                program.backend.add_rule([atom], program.inside(number, 1 << value) or [])
                atoms.append(atom)
        program.backend.add_project(atoms)
    with program.control.solve(yield_=True) as handle:
        for model in handle:
            places = {number: domains[number].bit_length() - 1 for number in numbers}
            for symbol in model.symbols(atoms=True):
                number, value = (argument.number for argument in symbol.arguments)
                places[number] = value
            for chosen in itertools.product(*(members_of[number][places[number]] for number in numbers)):
                yield {
                    axis: release.version
                    for axis, number, value in zip(axes, numbers, chosen, strict=True)
                    if (release := compiled.values[number][value]) is not None
                }


def _alike(compiled: Clauses, domains: Sequence[int]) -> list[dict[tuple[int, ...], list[int]]]:
    """Return per axis its possible values, grouped by which of the open clauses they satisfy."""
    masks: list[set[int]] = [set() for _ in domains]
    for clause in compiled.clauses:
        if all(domains[axis] & ~mask for axis, mask in clause.literals):
            for axis, mask in clause.literals:
                masks[axis].add(mask & domains[axis])
    result = []
    for domain, found in zip(domains, masks, strict=True):
        ordered = sorted(found)
        groups: dict[tuple[int, ...], list[int]] = {}
        for value in bits(domain):
            groups.setdefault(tuple(mask >> value & 1 for mask in ordered), []).append(value)
        result.append(groups)
    return result
