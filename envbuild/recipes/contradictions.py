"""Statements that no release, or no cell, fulfils together."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from envbuild.matrix.cell import Pin
from envbuild.matrix.load import Matrix
from envbuild.matrix.spec import matches
from envbuild.recipes.catalog import findings_catalog
from envbuild.recipes.compiled import compiles
from envbuild.recipes.findings import RecipeFinding, finding_of
from envbuild.recipes.held import Held, StatementKey, is_cpu, names_a_guarded_release, pin_of
from envbuild.recipes.model import ARCHITECTURES, Recipe, Statement, is_known_with
from envbuild.solver.conflict import Conflict


def contradictions(held: Held, recipe: Recipe, statements: Sequence[Statement]) -> Iterator[RecipeFinding]:
    """Yield each minimal contradiction: every pair that cannot stand together, then larger groups of what is left."""
    cells, torch = recipe.kind == "toml", _installs_torch(statements)
    # what is stated alike on several lines is one thing; its lines may stand in different arms
    places: dict[StatementKey, list[Statement]] = {}
    for s in statements if cells else _settled(held, statements):
        places.setdefault(StatementKey(s), []).append(s)
    distinct = list(places)
    # a release that is taken only by name (an NGC image) may be what lets two others stand together
    naming = [pin for each in distinct if names_a_guarded_release(held.matrix, pin := pin_of(places[each][0]))]
    apart: set[frozenset[int]] = set()
    clashes: dict[int, int] = {}
    shown: set[tuple[str, tuple[int, ...]]] = set()
    for a, b in itertools.combinations(range(len(distinct)), 2):
        pair = [places[distinct[a]], places[distinct[b]]]
        if not cells and not _comparable(held.matrix, recipe, pair[0][0], pair[1][0]):
            if pair[0][0].axis == pair[1][0].axis:
                apart.add(frozenset((a, b)))
            continue
        pins = pins_of([each[0] for each in pair], cells=cells, torch=torch)
        refused = not held.fits(pins) and not held.fits([*pins, *naming])
        together = held.compatible(*pair, known=not cells)
        if not together or (
            refused and not cells and not _binds(recipe, held.conflict(pins), [each[0] for each in pair])
        ):
            apart.add(frozenset((a, b)))
        elif refused:
            apart.add(frozenset((a, b)))
            clashes[a] = clashes.get(a, 0) + 1
            clashes[b] = clashes.get(b, 0) + 1
            members = [each[0] for each in together]
            lines = {each[0]: held.lines_of(each) for each in together}
            finding = _conflict_finding(held.matrix, held.conflict(pins), members, lines)
            if (finding.rule, finding.lines) not in shown:  # torch and its torchvision on one line say the same
                yield finding
            shown.add((finding.rule, finding.lines))
    alone = [n for n, each in enumerate(distinct) if cells or not _is_for_one(places[each][0])]
    rest = _without_clashes(alone, apart, clashes)
    while True:
        firsts = [places[distinct[n]][0] for n in rest]
        if not cells and not _all_comparable(held.matrix, recipe, firsts):
            return
        pins = pins_of(firsts, cells=cells, torch=torch)
        if held.fits(pins):
            return
        conflict = held.conflict(pins)
        refusing = set(conflict.pins)
        taking_part = [n for n, pin in zip(rest, pins, strict=True) if pin in refusing]
        members = [places[distinct[n]][0] for n in taking_part]
        if cells or _binds(recipe, conflict, members):
            yield _conflict_finding(
                held.matrix, conflict, members, {s: held.lines_of(places[StatementKey(s)]) for s in members}
            )
        rest.remove(taking_part[-1])


def unlisted_twice(view: Sequence[Statement], unlisted: Sequence[Statement]) -> Iterator[RecipeFinding]:
    """Yield two versions of one package of which the matrix does not list both: two numbers need no matrix."""
    for one in unlisted:
        for other in view:
            if (
                one is not other
                and one.axis == other.axis
                and all(s.installed and not s.newest and _EXACT.fullmatch(s.spec) for s in (one, other))
                and not one.of + other.of
                and _is_other(one.spec, other.spec)
                and is_known_with(one.branch, other.branch, same=True)
                and (other not in unlisted or one.line < other.line)
            ):
                members = sorted((one, other), key=lambda s: s.line)
                yield _doubled("recipe-stated-twice", members[1].line, members, {s: (s.line,) for s in members})


_EXACT = re.compile(r"\d+(?:\.\d+)+(?:\.?post\d+)?(?:\+\w+)?")


def _is_other(one: str, other: str) -> bool:
    public = [version.partition("+")[0].removesuffix(".0") for version in (one, other)]
    return public[0] != public[1]


def pins_of(statements: Sequence[Statement], *, cells: bool, torch: bool = False) -> list[Pin]:
    """Return what statements ask for together.

    torch compiles extensions with every nvcc of its CUDA's major, and warns at another minor: next to an installed torch
    a recipe's nvcc asks for its major alone. `torch` says that the recipe installs one elsewhere.
    """
    major = not cells and (torch or _installs_torch(statements))
    return [_major(s) if major and s.axis == "nvcc" else pin_of(s) for s in statements]


def _installs_torch(statements: Sequence[Statement]) -> bool:
    return any(s.axis in {"torch", "cuda"} and s.installed for s in statements)


def _major(statement: Statement) -> Pin:
    pin = pin_of(statement)
    found = re.match(r"(\d{1,3})\.\d", pin.spec)
    return replace(pin, spec=f">={found[1]},<{int(found[1]) + 1}") if found else pin


_WITH_DEV = re.compile(r"\bmegatron[-_.]core\[[^\[\]]*\bdev\b", re.IGNORECASE)


def _binds(recipe: Recipe, conflict: Conflict, members: Sequence[Statement]) -> bool:
    """Return whether the rules of a conflict bind a recipe that builds what they are about.

    Transformer Engine from source uses whatever cuDNN it finds. Megatron-LM's packages ask for a Transformer Engine in
    their extra `dev` alone (megatron-core 0.14.0, 0.15.3 and 0.16.1 on PyPI), and its source tree asks for none. An nvcc
    alone says nothing of the cuDNN of a torch, and where nothing is compiled it says nothing of torch's CUDA either: the
    wheel has its own.
    """
    if _toolkit_next_to_torch(members) and not compiles(recipe):
        return False
    rules = {step.rule for step in conflict.steps if step.pin is None}
    own_cudnn = any(s.axis == "nvcc" or (s.axis == "te" and s.source) for s in members)
    if own_cudnn and any(rule.startswith("te-cudnn") for rule in rules):
        return False
    from_tree = any(s.axis == "megatron" and s.source for s in members)
    asks_for_te = not from_tree and _WITH_DEV.search(recipe.text) is not None
    return asks_for_te or not any(rule.startswith("mcore-te") for rule in rules)


def _toolkit_next_to_torch(members: Sequence[Statement]) -> bool:
    """Return whether the members are a toolkit on disk and an installed torch, with what that torch needs, and no more."""
    return (
        any(s.axis == "nvcc" and not s.path for s in members)
        and any(s.axis in {"torch", "cuda"} and s.installed for s in members)
        and {s.axis for s in members} <= {"nvcc", "torch", "cuda", "python"}
    )


def _is_for_one(statement: Statement) -> bool:
    """Return whether a statement is checked against few others only."""
    return statement.of == ARCHITECTURES or statement.axis == "cudnn"


def _all_comparable(matrix: Matrix, recipe: Recipe, statements: Sequence[Statement]) -> bool:
    return all(_comparable(matrix, recipe, a, b) for a, b in itertools.combinations(statements, 2))


def _comparable(matrix: Matrix, recipe: Recipe, one: Statement, other: Statement) -> bool:
    """Return whether what the matrix says of two statements of a recipe holds for them."""
    if one.axis == other.axis == "gpu" and one.of and other.of:  # one thing is compiled for this, the next for that
        return False
    for a, b in ((one, other), (other, one)):
        if a.newest and b.axis == "os":  # compilers other than the OS' own are not read
            return False
        if a.of == ARCHITECTURES and b.axis not in {"nvcc", "cuda"}:
            return False
        if a.axis == "cudnn" and a.installed:  # a cuDNN that is installed later takes the place of torch's
            together = recipe.kind not in {"shell", "dockerfile"} or a.line == b.line
            return b.axis == "torch" and together and b.installed and not b.newest
        if a.axis == "torch" and b.axis == "cuda" and _may_be_unlisted(matrix, a.spec, b.spec):
            return False
    return True


@lru_cache(maxsize=256)
def _may_be_unlisted(matrix: Matrix, torch: str, cuda: str) -> bool:
    """Return whether torch may have a build for a CUDA that the matrix does not list: older torches have one."""
    axis, builds = matrix.axes["torch"], matrix.releases["torch"]
    with_cuda = [r.date for r in builds if r.date and r.needs.get("cuda") == cuda and "a0" not in r.version]
    public = torch.partition("+")[0]
    own = [r.date for r in builds if r.date and matches(axis, public, r)]
    return bool(own) and bool(with_cuda) and min(with_cuda) <= max(own)


def _settled(held: Held, statements: Sequence[Statement]) -> list[Statement]:
    """Leave out the toolkits and Pythons that lie next to the one that is used."""
    kept = list(statements)
    for axis in ("nvcc", "python"):
        several = [s for s in kept if s.axis == axis and s.toolkit]
        if len({_minor(s.spec) for s in several}) < 2:
            continue
        others = [s for s in kept if s.axis != axis and not (axis == "nvcc" and s.axis == "gpu")]
        named = {_minor(s.spec) for s in kept if s.axis == axis and s.path}
        used = [s for s in several if _minor(s.spec) in named or s.spec.partition(".")[0] in named]
        fitting = [
            s
            for s in several
            if all(
                held.fits(pins_of([s, each], cells=False))
                for each in dict.fromkeys(others)
                if held.compatible([s], [each])
            )
        ]
        chosen = used or fitting or several
        kept = [s for s in kept if s not in several or _minor(s.spec) == _minor(chosen[-1].spec)]
    return kept


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _without_clashes(numbers: Sequence[int], apart: set[frozenset[int]], clashes: dict[int, int]) -> list[int]:
    """Leave out the statements that contradict most others, until no pair of the rest does or is of two arms of a choice."""
    rest = list(numbers)
    while any(pair <= set(rest) for pair in apart):
        worst = max((n for pair in apart if pair <= set(rest) for n in pair), key=lambda n: (clashes.get(n, 0), n))
        rest.remove(worst)
    return rest


def other_cudas(unheld: Sequence[Statement], statements: Sequence[Statement]) -> Iterator[RecipeFinding]:
    """Yield search paths of another CUDA than one that is in no cell: two numbers need none to be compared."""
    for stated, path in itertools.product(unheld, statements):
        versions = [re.match(r"\d+\.\d+(?![^.])", s.spec) for s in (stated, path)]
        if (
            {stated.axis, path.axis} <= {"nvcc", "cuda"}
            and path.path > stated.path
            and is_known_with(path.branch, stated.branch, same=True)
            and all(versions)
            and len({version[0] for version in versions if version}) > 1
        ):
            members = sorted((stated, path), key=lambda s: s.line)
            yield _doubled("recipe-path-other-cuda", path.line, members, {s: (s.line,) for s in members})


def _doubled(
    rule: str, line: int, members: Sequence[Statement], places: Mapping[Statement, Sequence[int]]
) -> RecipeFinding:
    """Return the finding at `line` of one thing that `members`, each `places` on its own lines, state otherwise."""
    lines = tuple(sorted({line for s in members for line in places[s]}))
    return replace(finding_of(rule, line, f"{findings_catalog()[rule].why}: {_named(members, places)}"), lines=lines)


def _named(members: Sequence[Statement], places: Mapping[Statement, Sequence[int]]) -> str:
    parts = []
    for s in members:
        numbers = sorted({*places[s]})
        where = f"lines {', '.join(map(str, numbers))}" if len(numbers) > 1 else f"line {s.line}"
        parts.append(f"{s.axis} {s.spec} ({where}{', where none is named' if s.newest else ''})")
    return " and ".join(parts)


def _conflict_finding(
    matrix: Matrix, conflict: Conflict, members: Sequence[Statement], places: Mapping[Statement, Sequence[int]]
) -> RecipeFinding:
    """Return the finding of a conflict between `members`, each of which is `places` on its own lines."""
    lines = tuple(sorted({line for s in members for line in places[s]}))
    first = max(s.line for s in members)
    rules = [step for step in conflict.steps if step.pin is None and step.rule not in {"release", "derived"}]
    by_path = next((s for s in members if s.path), None)
    axes = {s.axis for s in members}
    # an index names the CUDA of the torch that it holds, which is another thing than a toolkit
    of_torch = by_path is None and any(s.axis == "cuda" and s.installed for s in members)
    same = len(axes) == 1 or (axes == {"nvcc", "cuda"} and not of_torch)
    if by_path and same:
        return _doubled("recipe-path-other-cuda", by_path.line, members, places)
    if same:
        return _doubled("recipe-stated-twice", first, members, places)
    # that a CPU build of torch would not do either does not matter, where none is stated
    cpu = set() if any(map(is_cpu, members)) else {rule.id for rule in matrix.rules if rule.topic == "cpu-build"}
    steps = [step for step in conflict.steps if step.pin is None and step.rule not in cpu]
    # the step that refuses comes last; its rule is what the finding is known by
    deciding = [(step.rule, step.source) for step in rules if step.rule not in cpu]
    texts = [step.text for step in steps]
    if not deciding and "nvcc" in axes:  # torch's CUDA is a fact of its release; that nvcc must be the same is the rule
        own = next(rule for rule in matrix.rules if rule.id == "nvcc-is-cuda")
        deciding = [(own.id, own.source)]
        texts.append(f"{own.why[:1].upper()}{own.why[1:]}.")
    rule, source = deciding[-1] if deciding else (steps[-1].rule, steps[-1].source)
    return RecipeFinding(
        line=first,
        lines=lines,
        rule=rule,
        rules=tuple(dict.fromkeys(name for name, _ in deciding)),
        why=f"{_named(members, places)} do not go together. " + " ".join(texts),
        source=source,
        todo=f"change one of the lines {', '.join(map(str, lines))}"
        if len(lines) > 1
        else "change one of the two versions",
    )
