"""Finding what is wrong in a recipe: its statements against the matrix, and what is wrong whatever the versions."""

import bisect
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from packaging.markers import Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.version import Version

from envbuild.errors import DataError, UsageError
from envbuild.matrix.asked import Asked, read_request
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.clauses import compile_matrix
from envbuild.matrix.conflict import Conflict, explain_conflict
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import AxisName, BaseFacts, Release, Rule
from envbuild.matrix.packages import impostors
from envbuild.matrix.program import solvable
from envbuild.matrix.spec import matches, version_key
from envbuild.recipes.catalog import findings_catalog, variables
from envbuild.recipes.read import Branch, Recipe, Stage, Statement, may_hold_beside


@dataclass(frozen=True, kw_only=True)
class Finding:
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

    findings: tuple[Finding, ...]
    statements: tuple[Statement, ...]
    """What the recipe states, as it was understood."""
    unknown: tuple[Statement, ...]
    """Statements of releases that the matrix does not list, or has in no cell: nothing is said of them."""


def check_recipe(matrix: Matrix, recipe: Recipe) -> Report:
    """Return every finding in `recipe`."""
    matrix = _for_axes(matrix) if recipe.kind == "toml" else _for_recipes(matrix)
    understood = {s: _as_released(matrix, s) for s in recipe.statements}
    asked = {_Said(read): read for read in understood.values()}
    if len(asked) > _DIFFERENT:
        raise DataError(
            f"the recipe states more than {_DIFFERENT} different versions", hint="check its parts one by one"
        )
    listed = {said for said, read in asked.items() if _is_known(matrix, read)}
    lines = _joined(recipe, [read for read in understood.values() if _Said(read) in listed])
    known = list(lines)
    effort: dict[str, int] = {}
    plain, of_source = _Held(matrix, lines, effort), _Held(_of_source(matrix), lines, effort)
    # a gcc that a script installs comes beside the OS' own, which is what the axis speaks of
    argued = [s for s in known if not s.plain and (s.axis != "gcc" or recipe.kind == "toml")]
    in_no_cell = {s for s in argued if not plain.fits([_pin(s)])}
    argued_set = set(argued) - in_no_cell
    together: dict[Finding, None] = {}
    brings = any("/.flashattn/nvidia" in line for line in recipe.lines)  # what FA3's setup.py would download
    for view in _views(recipe, known):
        # PyPI's core wheels say nothing of a build from source
        held = of_source if any(s.axis == "te" and s.source for s in view) else plain
        refused = list(_contradictions(held, [s for s in view if s in argued_set]))
        refused += _other_cudas([s for s in view if s not in argued_set], view)
        together |= dict.fromkeys([*refused, *_drivers(plain, recipe, view, refused)])
        together |= dict.fromkeys(_unplaced(matrix, recipe, view) if recipe.kind != "toml" else ())
        together |= dict.fromkeys(_compilers(matrix, recipe, view) if recipe.kind != "toml" else ())
        together |= dict.fromkeys(_fetches(matrix, view) if recipe.kind != "toml" and not brings else ())
    found = [
        *together,
        *_by_itself(matrix, recipe),
        *(_by_pattern(recipe) if recipe.kind != "toml" else ()),
        *_by_variable(matrix, recipe, known),
    ]
    found.sort(key=lambda finding: (finding.line, finding.rule))
    return Report(
        findings=tuple(found),
        statements=tuple(recipe.statements),
        unknown=tuple(
            s
            for s, read in understood.items()
            if _Said(read) not in listed or (read in in_no_cell and s.axis != "driver")  # of which _drivers speaks
        ),
    )


def _joined(recipe: Recipe, statements: Iterable[Statement]) -> dict[Statement, tuple[int, ...]]:
    """Return the first of each group of statements that differ in their lines alone, and all its lines."""
    groups: dict[tuple[object, ...], list[Statement]] = {}
    for s in statements:
        stage = recipe.stage(s.line)
        groups.setdefault((replace(s, line=0, text=""), id(stage)), []).append(s)
    if len(groups) > _PLACES:
        raise DataError(f"the recipe states versions in more than {_PLACES} places", hint="check its parts one by one")
    return {each[0]: tuple(s.line for s in each) for each in groups.values()}


_BESIDE_CPU = {"cpu-without-driver", "cpu-without-nvcc"}
"""What a CPU build of torch has no use for; a machine or an image that has it is no contradiction."""


def _without(matrix: Matrix, dropped: Callable[[Rule], bool]) -> Matrix:
    return replace(matrix, rules=tuple(rule for rule in matrix.rules if not dropped(rule)))


# Kept, for the next recipe: what is compiled of a matrix is kept on it.
@lru_cache(maxsize=2)
def _for_axes(matrix: Matrix) -> Matrix:
    """Return the matrix as a TOML of axes is held against it, which asks for one of envbuild's own cells."""
    return _without(matrix, lambda rule: rule.id in _BESIDE_CPU)


@lru_cache(maxsize=2)
def _of_source(matrix: Matrix) -> Matrix:
    """Return the matrix as a Transformer Engine that the recipe compiles is held against it."""
    return _without(matrix, lambda rule: rule.topic == "te-cuda-major")


@lru_cache(maxsize=2)
def _for_recipes(matrix: Matrix) -> Matrix:
    """Return the matrix as a Dockerfile, a script or a requirements file is held against it.

    It may start from any image, which may hold any nvcc, and may put its own Transformer Engine and apex in the place of an
    NGC image's.
    """
    matrix = _without(matrix, lambda rule: rule.id in _BESIDE_CPU or rule.topic == "needs-nvcc")
    image = Release(version="another-image", source="https://hub.docker.com/", facts=BaseFacts(kind="root"))
    rules = [_replaceable(rule) if rule.topic == "ngc-fixed" else rule for rule in matrix.rules]
    return replace(matrix, rules=tuple(rules), releases={**matrix.releases, "base": (*matrix.releases["base"], image)})


def _replaceable(rule: Rule) -> Rule:
    """Return an NGC image's rule without the components that a recipe may build anew in it."""
    own = {"te", "apex"}
    return rule.model_copy(
        update={
            "needs": {axis: spec for axis, spec in rule.needs.items() if axis not in own},
            "without": tuple(axis for axis in rule.without if axis not in own),
        }
    )


def _views(recipe: Recipe, statements: Sequence[Statement]) -> Iterator[list[Statement]]:
    """Yield the statements that hold together: those of a stage and what it is built on, under one marker."""
    bases = [stage.base for stage in recipe.stages]
    markers = {s.marker for s in statements if s.marker and _may_hold(s.marker, statements)}
    lasts: list[Stage | None] = [stage for stage in recipe.stages if stage not in bases]
    for last in lasts or [None]:
        stages = [*(last.chain() if last else ()), None]
        for marker in sorted(markers) or [""]:
            yield [s for s in statements if recipe.stage(s.line) in stages and s.marker in {"", marker}]


def _may_hold(marker: str, statements: Sequence[Statement]) -> bool:
    """Return whether `marker` holds on Linux with a Python that is stated; it may where none is."""
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    pythons = [s.spec for s in statements if s.axis == "python" and re.fullmatch(r"\d+\.\d+", s.spec)]
    stated = [{"python_version": python, "python_full_version": f"{python}.0"} for python in pythons]
    if "python" in marker and not stated:
        return True
    try:
        return any(Marker(marker).evaluate(linux | python) for python in stated or [{}])
    except (UndefinedComparison, UndefinedEnvironmentName):
        return False


def _as_released(matrix: Matrix, statement: Statement) -> Statement:
    """Return the statement with its release spelled as the matrix has it."""
    spec = _newest(matrix, statement.axis) if statement.newest else _spelled(matrix, statement.axis).get(statement.spec)
    return replace(statement, spec=spec) if spec else statement


@lru_cache(maxsize=64)
def _newest(matrix: Matrix, axis: AxisName) -> str | None:
    """Return what pip or git would bring today, as far as the matrix knows."""
    listed = [r for r in matrix.releases.get(axis, ()) if r.date and (axis != "torch" or r.facts.index == "pypi")]
    return max(listed, key=lambda r: (r.date, r.version)).version if listed else None


@lru_cache(maxsize=64)
def _spelled(matrix: Matrix, axis: AxisName) -> dict[str, str]:
    """Return the releases that have another version on PyPI than in the matrix, by that."""
    named = ((getattr(r.facts, "pypi", None), r.version) for r in reversed(matrix.releases.get(axis, ())))
    return {pypi: version for pypi, version in named if pypi and pypi != version}


def _pin(statement: Statement) -> Pin:
    # an extension's nvcc has to be torch's CUDA, so what is said of one is asked of the other
    axis = "cuda" if statement.axis == "nvcc" else statement.axis
    minor = re.fullmatch(r"(\d+\.\d+)(?:\.\d+)*", statement.spec) if statement.axis == "nvcc" else None
    return Pin(axis=axis, spec=minor[1] if minor else statement.spec, origin=statement.axis)


_CUDA_RECIPE = Pin(axis="cuda", spec=">=1", origin="(a recipe for GPUs)")
"""Leaves the CPU builds of torch out, which no recipe means that does not say so."""


def _is_known(matrix: Matrix, statement: Statement) -> bool:
    try:
        read_request(matrix, Request(pins=(_pin(statement),)))
    except UsageError:
        return False
    return True


def _is_cpu(stated: Statement | Pin) -> bool:
    return (stated.axis == "cuda" and stated.spec in {"cpu", "none"}) or stated.spec.endswith("+cpu")


class _Said(tuple[object, ...]):
    """What makes two statements the same, wherever they stand."""

    __slots__ = ()

    def __new__(cls, s: Statement) -> Self:
        return super().__new__(cls, (s.axis, s.spec, s.path))


_DIFFERENT = 200
"""How many different versions a recipe may state. Real recipes state 20."""

_PLACES = 2000
"""In how many places (stages, arms of a choice) a recipe may state versions."""

_SOLVED = 400
"""How many sets of versions are held against the matrix for one recipe: 2 ms each. Real recipes need 60."""

_PAIRED = 200_000
"""How many pairs of lines are compared by the choices that they stand in."""


class _Held:
    """A matrix and what has been held against it: the same question is asked once, and their number has a bound."""

    def __init__(self, matrix: Matrix, lines: Mapping[Statement, tuple[int, ...]], effort: dict[str, int]) -> None:
        self.matrix = matrix
        self.lines = lines
        """Every line on which a statement stands."""
        self._effort = effort
        self._fits: dict[frozenset[Pin], bool] = {}
        self._conflicts: dict[frozenset[Pin], Conflict] = {}

    def _spend(self, what: str, limit: int) -> None:
        self._effort[what] = self._effort.get(what, 0) + 1
        if self._effort[what] > limit:
            raise DataError(
                "the recipe states too many different versions to compare", hint="check its parts one by one"
            )

    def _asked(self, pins: Sequence[Pin]) -> Asked:
        cpu = any(map(_is_cpu, pins))
        # a pin of nvcc is asked of the axis cuda; beside a CPU build an nvcc contradicts nothing
        own = [pin for pin in pins if not (cpu and pin.origin == "nvcc")]
        return read_request(self.matrix, Request(pins=(*own, *(() if cpu else (_CUDA_RECIPE,)))))

    def lines_of(self, statements: Iterable[Statement]) -> tuple[int, ...]:
        """Return every line on which one of `statements` stands."""
        return tuple(line for s in statements for line in self.lines[s])

    def fits(self, pins: Sequence[Pin]) -> bool:
        """Return whether some cell has all of `pins`."""
        key = frozenset(pins)
        if key not in self._fits:
            self._spend("solved", _SOLVED)
            asked = self._asked(pins)
            self._fits[key] = solvable(*asked.of([pin for pin, _, _ in asked.masks]))
        return self._fits[key]

    def conflict(self, pins: Sequence[Pin]) -> Conflict:
        """Return why no cell has all of `pins`."""
        key = frozenset(pins)
        if key not in self._conflicts:
            self._spend("solved", _SOLVED)
            self._conflicts[key] = explain_conflict(self._asked(pins), first_only=True)
        return self._conflicts[key]

    def beside(self, some: Sequence[Statement], others: Sequence[Statement]) -> list[list[Statement]]:
        """Return those of `some` and of `others` that may hold beside one of the other, or nothing where none do."""
        kept: tuple[dict[Statement, None], dict[Statement, None]] = ({}, {})
        branches = [dict.fromkeys(s.branch for s in each) for each in (some, others)]
        meeting: tuple[set[Branch], set[Branch]] = (set(), set())
        for one, other in itertools.product(*branches):
            self._spend("paired", _PAIRED)
            if may_hold_beside(one, other):
                meeting[0].add(one)
                meeting[1].add(other)
        for each, met, into in zip((some, others), meeting, kept, strict=True):
            into.update(dict.fromkeys(s for s in each if s.branch in met))
        return [list(kept[0]), list(kept[1])] if kept[0] and kept[1] else []


def _contradictions(held: _Held, statements: Sequence[Statement]) -> Iterator[Finding]:
    """Yield each minimal contradiction: every pair that cannot stand together, then larger groups of what is left."""
    # what is said alike on several lines is one thing; its lines may stand in different arms
    said: dict[_Said, list[Statement]] = {}
    for s in statements:
        said.setdefault(_Said(s), []).append(s)
    distinct = list(said)
    # a release that is taken only by name (an NGC image) may be what lets two others stand together
    naming = [pin for each in distinct if _names_a_guarded_release(held.matrix, pin := _pin(said[each][0]))]
    apart: set[frozenset[int]] = set()
    clashes: dict[int, int] = {}
    for a, b in itertools.combinations(range(len(distinct)), 2):
        pair = [said[distinct[a]], said[distinct[b]]]
        pins = [_pin(each[0]) for each in pair]
        refused = not held.fits(pins) and not held.fits([*pins, *naming])
        beside = held.beside(*pair)
        if not beside:
            apart.add(frozenset((a, b)))
        elif refused:
            apart.add(frozenset((a, b)))
            clashes[a] = clashes.get(a, 0) + 1
            clashes[b] = clashes.get(b, 0) + 1
            members = [each[0] for each in beside]
            lines = {each[0]: held.lines_of(each) for each in beside}
            yield _told(held.matrix, held.conflict(pins), members, lines)
    rest = _without_clashes(range(len(distinct)), apart, clashes)
    while not held.fits([_pin(said[distinct[n]][0]) for n in rest]):
        conflict = held.conflict([_pin(said[distinct[n]][0]) for n in rest])
        pins = [*conflict.pins]
        taking_part = [n for n in rest if _pin(said[distinct[n]][0]) in pins]
        firsts = [said[distinct[n]][0] for n in taking_part]
        yield _told(held.matrix, conflict, firsts, {s: held.lines_of(said[_Said(s)]) for s in firsts})
        rest.remove(taking_part[-1])


def _names_a_guarded_release(matrix: Matrix, pin: Pin) -> bool:
    compiled = compile_matrix(matrix)
    return bool(compiled.named(compiled.number[pin.axis], pin.spec))


def _without_clashes(numbers: Sequence[int], apart: set[frozenset[int]], clashes: dict[int, int]) -> list[int]:
    """Leave out the statements that contradict most others, until no pair of the rest does or is of two arms of a choice."""
    rest = list(numbers)
    while any(pair <= set(rest) for pair in apart):
        worst = max((n for pair in apart if pair <= set(rest) for n in pair), key=lambda n: (clashes.get(n, 0), n))
        rest.remove(worst)
    return rest


def _other_cudas(unheld: Sequence[Statement], statements: Sequence[Statement]) -> Iterator[Finding]:
    """Yield search paths of another CUDA than one that is in no cell: two numbers need none to be compared."""
    for stated, path in itertools.product(unheld, statements):
        versions = [re.match(r"\d+\.\d+(?![^.])", s.spec) for s in (stated, path)]
        if (
            {stated.axis, path.axis} <= {"nvcc", "cuda"}
            and path.path > stated.path
            and path.may_hold_beside(stated.branch)
            and all(versions)
            and len({version[0] for version in versions if version}) > 1
        ):
            members = sorted((stated, path), key=lambda s: s.line)
            yield _doubled("recipe-path-other-cuda", path.line, members, {s: (s.line,) for s in members})


def _doubled(rule: str, line: int, members: Sequence[Statement], said: Mapping[Statement, Sequence[int]]) -> Finding:
    """Return the finding at `line` of one thing that `members`, each `said` on its own lines, state otherwise."""
    lines = tuple(sorted({line for s in members for line in said[s]}))
    return replace(_finding(rule, line, f"{findings_catalog()[rule].why}: {_named(members, said)}"), lines=lines)


def _named(members: Sequence[Statement], said: Mapping[Statement, Sequence[int]]) -> str:
    parts = []
    for s in members:
        numbers = sorted({*said[s]})
        where = f"lines {', '.join(map(str, numbers))}" if len(numbers) > 1 else f"line {s.line}"
        parts.append(f"{s.axis} {s.spec} ({where}{', where none is named' if s.newest else ''})")
    return " and ".join(parts)


def _told(
    matrix: Matrix, conflict: Conflict, members: Sequence[Statement], said: Mapping[Statement, Sequence[int]]
) -> Finding:
    """Return the finding of a conflict between `members`, each of which is `said` on its own lines."""
    lines = tuple(sorted({line for s in members for line in said[s]}))
    first = max(s.line for s in members)
    rules = [step for step in conflict.steps if step.pin is None and step.rule not in {"release", "derived"}]
    by_path = next((s for s in members if s.path), None)
    axes = {s.axis for s in members}
    same = len(axes) == 1 or axes == {"nvcc", "cuda"}
    if by_path and same:
        return _doubled("recipe-path-other-cuda", by_path.line, members, said)
    if same:
        return _doubled("recipe-stated-twice", first, members, said)
    # that a CPU build of torch would not do either is beside the point, where none is stated
    cpu = set() if any(map(_is_cpu, members)) else {rule.id for rule in matrix.rules if rule.topic == "cpu-build"}
    steps = [step for step in conflict.steps if step.pin is None and step.rule not in cpu]
    # the step that refuses comes last; its rule is what the finding is known by
    deciding = [(step.rule, step.source) for step in rules if step.rule not in cpu]
    if not deciding and "nvcc" in axes:  # torch's CUDA is a fact of its release; that nvcc must be the same is the rule
        deciding = [(rule.id, rule.source) for rule in matrix.rules if rule.id == "nvcc-is-cuda"]
    rule, source = deciding[-1] if deciding else (steps[-1].rule, steps[-1].source)
    return Finding(
        line=first,
        lines=lines,
        rule=rule,
        rules=tuple(dict.fromkeys(name for name, _ in deciding)),
        why=f"{_named(members, said)} do not go together. " + " ".join(step.text for step in steps),
        source=source,
        todo=f"change one of the lines {', '.join(map(str, lines))}"
        if len(lines) > 1
        else "change one of the two versions",
    )


# How a recipe says with which of the installed compilers nvcc compiles.
_CHOSEN_COMPILER = re.compile(
    r"(?:-ccbin[= ]|--compiler-bindir[= ]|\b(?:CC|CXX|CUDAHOSTCXX|NVCC_CCBIN)[= ]|--install \S+ \S+ )[\"']?\S*?g(?:cc|\+\+)-(\d+)"
)


def _compilers(matrix: Matrix, recipe: Recipe, statements: Sequence[Statement]) -> Iterator[Finding]:
    """Yield compilers that the recipe installs beside the OS' own and that its nvcc refuses.

    A cell's gcc is its OS' own, so the rules of gcc are read here one by one.
    """
    chosen = {found for command in recipe.commands.values() for found in _CHOSEN_COMPILER.findall(command.text)}
    compilers = [s for s in statements if s.axis == "gcc" and (not chosen or s.spec in chosen)]
    for gcc, cuda in itertools.product(compilers, [s for s in statements if s.axis in {"nvcc", "cuda"}]):
        for rule in matrix.rules:
            if set(rule.when) != {"nvcc"} or "gcc" not in rule.needs:
                continue
            stated = Release(version=_pin(cuda).spec, source=rule.source)
            applies = (
                gcc.may_hold_beside(cuda.branch)
                and version_key(stated.version)
                and matches(matrix.axes["nvcc"], rule.when["nvcc"], stated)
            )
            found = Release(version=gcc.spec, source=rule.source)
            if applies and not matches(matrix.axes["gcc"], rule.needs["gcc"], found):
                lines = tuple(sorted({gcc.line, cuda.line}))
                yield Finding(
                    line=gcc.line,
                    lines=lines,
                    rule=rule.id,
                    rules=(rule.id,),
                    why=f"gcc {gcc.spec} (line {gcc.line}) and {cuda.axis} {cuda.spec} (line {cuda.line}): {rule.why}",
                    source=rule.source,
                    todo="install an older gcc, or leave the OS' own",
                )


def _fetches(matrix: Matrix, statements: Sequence[Statement]) -> Iterator[Finding]:
    """Yield builds that download the compiler they compile with, beside the stated toolkit."""
    stated = {s.line: _pin(s).spec for s in statements if s.axis in {"nvcc", "cuda"}}
    for built in (s for s in statements if s.axis == "flash-attn-hopper"):
        axis = matrix.axes[built.axis]
        for release in matrix.releases[built.axis]:
            toolchain = release.facts.toolchain
            if toolchain is None or not matches(axis, built.spec, release):
                continue
            for line, cuda in stated.items():
                if re.fullmatch(r"\d+\.\d+", cuda) and toolchain.replaces(cuda):
                    names = " and ".join(each.url.rsplit("/", 1)[-1] for each in toolchain.archives.values())
                    told = _finding("recipe-build-fetches", built.line, "", source=release.source)
                    why = f"its setup.py takes {names} instead of CUDA {cuda} (line {line}): {findings_catalog()[told.rule].why}"
                    yield replace(told, why=why, lines=tuple(sorted({built.line, line})))
                    return


def _drivers(
    held: _Held, recipe: Recipe, statements: Sequence[Statement], refused: Sequence[Finding]
) -> Iterator[Finding]:
    """Yield drivers below what the stated CUDA needs, where nothing installs cuda-compat and no rule refuses them."""
    matrix, cudas = held.matrix, dict[str, list[Statement]]()
    for statement in statements:
        if cuda := _cuda_of(matrix, statement, statements):
            cudas.setdefault(cuda, []).append(statement)
    for driver, cuda in itertools.product([s for s in statements if s.axis == "driver"], cudas):
        release, found = matrix.release("cuda", cuda), version_key(driver.spec)
        newest = max(release.facts.driver_full.values(), key=Version, default=None)
        floor, package = release.facts.driver_minor or newest, f"cuda-compat-{cuda.replace('.', '-')}"
        if found is None or floor is None or found >= Version(floor):
            continue
        lines = tuple(sorted({*held.lines_of([driver, *cudas[cuda]])}))
        brought = any(stage.compat == cuda for stage in recipe.stages) or any(
            s.axis == "base" and s.spec.startswith(("ngc-", "nvidia-cuda-")) for s in statements
        )
        branches = release.facts.compat_branches
        can = str(found.major) in branches
        told = any(driver.line in f.lines and {s.line for s in cudas[cuda]} & {*f.lines} for f in refused)
        if told or (can and (brought or re.search(rf"\b{package}\b|\bcuda-compat(?![\w-])", recipe.text))):
            continue
        kind = findings_catalog()["recipe-driver-below-cuda"]
        stated = " and ".join(f"{s.axis} {s.spec} (line {s.line})" for s in cudas[cuda])
        helps = f"only with the package {package} does branch {found.major} run it" if can else "no cuda-compat helps"
        yield Finding(
            line=driver.line,
            lines=lines,
            rule=kind.id,
            why=f"{kind.why}: CUDA {cuda}, of {stated}, runs from driver {floor}, and driver {driver.spec} "
            f"(line {driver.line}) is below it; {helps}",
            source=release.source,
            todo=f"a driver of at least {floor}" + (f", or install {package} on data-center boards" if can else ""),
        )


def _cuda_of(matrix: Matrix, statement: Statement, beside: Sequence[Statement]) -> str | None:
    """Return the CUDA, major.minor, that a statement names by itself or by its build of torch; None when it leaves it open."""
    if statement.axis in {"cuda", "nvcc"}:
        version = re.fullmatch(r"(\d+\.\d+)(?:\.\d+)*", statement.spec)
        cudas: Collection[object] = {version[1]} if version and not statement.path else set()
    elif statement.axis == "torch":
        # without a label it is PyPI's, unless something else says which
        if "+" not in statement.spec and any(s.axis == "cuda" for s in beside):
            return None
        cudas = _cudas_of_torch(matrix, statement.spec)
    else:
        return None
    cuda = next(iter(cudas)) if len(cudas) == 1 else None
    return cuda if isinstance(cuda, str) and version_key(cuda) and matrix.has("cuda", cuda) else None


@lru_cache(maxsize=256)
def _cudas_of_torch(matrix: Matrix, spec: str) -> Collection[object]:
    axis, builds = matrix.axes["torch"], matrix.releases["torch"]
    return {
        build.needs.get("cuda")
        for build in builds
        if matches(axis, spec, build) and ("+" in spec or build.facts.index == "pypi")
    }


def _unplaced(matrix: Matrix, recipe: Recipe, statements: Sequence[Statement]) -> Iterator[Finding]:
    """Yield builds of flash-attention 3 whose module nothing puts where the stated Transformer Engine imports it."""
    builds = [s for s in statements if s.axis == "flash-attn-hopper"]
    for built, te in itertools.product(builds, [s for s in statements if s.axis == "te"]):
        modules = {
            (release.facts.fa3_distribution, release.facts.fa3_module)
            for release in matrix.releases["te"]
            if matches(matrix.axes["te"], te.spec, release)
        }
        for release in matrix.releases[built.axis]:
            place = release.facts.place
            if place is None or not matches(matrix.axes[built.axis], built.spec, release):
                continue
            folder, _, file = place.rpartition("/")
            wanted = (release.facts.distribution, place.removesuffix(".py").replace("/", "."))
            if modules == {wanted} and not (file in recipe.text and re.search(rf"\b{folder}\b", recipe.text)):
                kind = findings_catalog()["recipe-fa3-not-placed"]
                yield Finding(
                    line=built.line,
                    lines=tuple(sorted({built.line, te.line})),
                    rule=kind.id,
                    why=f"te {te.spec} (line {te.line}) imports {wanted[1]}: {kind.why}",
                    source=kind.source,
                    todo=f"copy hopper/{file} to {place} in site-packages after the build",
                )
                break


def _by_itself(matrix: Matrix, recipe: Recipe) -> Iterator[Finding]:
    catalog = findings_catalog()
    for noted in recipe.noted:
        kind = catalog[noted.rule]
        yield _finding(kind.id, noted.line, f"{noted.what}: {kind.why}" if noted.what else kind.why)
    known = impostors(matrix)
    for name, line in recipe.packages:
        if name in known:
            impostor = known[name]
            yield Finding(
                line=line,
                lines=(line,),
                rule="recipe-impostor",
                why=impostor.why,
                source=impostor.source,
                todo=f"install {impostor.instead} at a commit",
            )


def _finding(rule: str, line: int, why: str, *, source: str | None = None, todo: str | None = None) -> Finding:
    kind = findings_catalog()[rule]
    return Finding(line=line, lines=(line,), rule=rule, why=why, source=source or kind.source, todo=todo or kind.todo)


def _by_pattern(recipe: Recipe) -> Iterator[Finding]:
    for kind in findings_catalog().values():
        if kind.pattern is None:
            continue
        pattern = re.compile(kind.pattern)
        for command in recipe.commands.values():
            run = "RUN " if command.script else ""
            found = [number for number, text in command.parts if pattern.search(_in_capitals(run + text))]
            for number in found or _completing(pattern, command.parts):
                yield _finding(kind.id, number, kind.why)


def _in_capitals(command: str) -> str:
    """Return the command with docker's instruction in capitals: docker takes it in either case."""
    return re.sub(r"^\s*(?:add|copy|run)\b", lambda word: word[0].upper(), command, flags=re.IGNORECASE)


def _completing(pattern: re.Pattern[str], parts: Sequence[tuple[int, str]]) -> Iterator[int]:
    """Yield the line at which `pattern` is found in a command of several lines, when they are read up to it."""

    def is_found(count: int) -> bool:
        return pattern.search(_in_capitals(" ".join(text.strip() for _, text in parts[:count]))) is not None

    if len(parts) > 1 and is_found(len(parts)):
        yield parts[bisect.bisect_left(range(len(parts)), x=True, key=lambda n: is_found(n + 1))][0]


def _by_variable(matrix: Matrix, recipe: Recipe, known: Sequence[Statement]) -> Iterator[Finding]:
    catalog = variables()
    for name, _, line in recipe.variables:
        variable = catalog.get(name)
        if variable is None:
            continue
        stage = recipe.stage(line)
        if variable.read_by is None:
            todo = f"set {variable.instead}" if variable.instead else None
            yield _finding("recipe-unread-variable", line, f"nothing reads {name}", source=variable.source, todo=todo)
        elif variable.toolkit and stage and stage.toolkit is False:
            yield _finding(
                "recipe-toolkit-variable", line, f"{name}: {findings_catalog()['recipe-toolkit-variable'].why}"
            )
        for axis, spec in variable.only_with.items():
            stated = [s for s in known if s.axis == axis and _in_one_image(stage, recipe.stage(s.line))]
            if stated and not any(_may_be(matrix, s, spec) for s in stated):
                yield _finding(
                    "recipe-unread-variable",
                    line,
                    f"{axis} {stated[0].spec} (line {stated[0].line}) does not read {name}: it is read by {variable.read_by}",
                    source=variable.source,
                )


def _in_one_image(one: Stage | None, other: Stage | None) -> bool:
    return one is None or other is None or one in other.chain() or other in one.chain()


def _may_be(matrix: Matrix, statement: Statement, spec: Any) -> bool:
    axis = matrix.axes[statement.axis]
    if matrix.has(statement.axis, statement.spec):  # a tag, not the beginning of other versions
        return matches(axis, spec, matrix.release(statement.axis, statement.spec))
    return any(
        matches(axis, statement.spec, release) and matches(axis, spec, release)
        for release in matrix.releases[statement.axis]
    )
