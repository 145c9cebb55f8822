"""What is not a matter of cells in a recipe: its compilers, drivers, downloads in a build, the place of a module."""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from packaging.version import Version

from envbuild.matrix.load import Matrix
from envbuild.matrix.model import Release
from envbuild.matrix.spec import matches, version_key
from envbuild.recipes.catalog import findings_catalog
from envbuild.recipes.compiled import compiles
from envbuild.recipes.findings import RecipeFinding, finding_of
from envbuild.recipes.held import Held, pin_of
from envbuild.recipes.model import Recipe, Statement, is_known_with

# How a recipe says with which of the installed compilers nvcc compiles.
_CHOSEN_COMPILER = re.compile(
    r"(?:-ccbin[= ]|--compiler-bindir[= ]|\b(?:CC|CXX|CUDAHOSTCXX|NVCC_CCBIN)[= ]|--install \S+ \S+ )[\"']?\S*?g(?:cc|\+\+)-(\d+)"
)

# How apex is compiled with its kernels.
_APEX_CUDA = re.compile(r"--cuda_ext\b|APEX_CUDA_EXT=1")


def compilers(matrix: Matrix, recipe: Recipe, statements: Sequence[Statement]) -> Iterator[RecipeFinding]:
    """Yield compilers that the recipe installs and chooses, and that its nvcc refuses. One that is not chosen is not used.

    A cell's gcc is its OS' own, so the rules of gcc are read here one by one.
    """
    chosen = {found for _, text in recipe.commands for found in _CHOSEN_COMPILER.findall(text)}
    installed = [s for s in statements if s.axis == "gcc" and s.spec in chosen]
    cudas = [s for s in statements if s.axis in {"nvcc", "cuda"}]
    for gcc, rule in itertools.product(installed, matrix.rules):
        if set(rule.when) != {"nvcc"} or "gcc" not in rule.needs:
            continue
        if matches(matrix.axes["gcc"], rule.needs["gcc"], Release(version=gcc.spec, source=rule.source)):
            continue
        for cuda in cudas:
            stated = Release(version=pin_of(cuda).spec, source=rule.source)
            applies = version_key(stated.version) and matches(matrix.axes["nvcc"], rule.when["nvcc"], stated)
            if applies and is_known_with(gcc.branch, cuda.branch):
                yield RecipeFinding(
                    line=gcc.line,
                    lines=tuple(sorted({gcc.line, cuda.line})),
                    rule=rule.id,
                    rules=(rule.id,),
                    why=f"gcc {gcc.spec} (line {gcc.line}) and {cuda.axis} {cuda.spec} (line {cuda.line}): {rule.why}",
                    source=rule.source,
                    todo="choose an older gcc, or leave the OS' own",
                )
                break


def fetches(matrix: Matrix, statements: Sequence[Statement]) -> Iterator[RecipeFinding]:
    """Yield builds that download the compiler they compile with, in addition to the stated toolkit."""
    stated = {s.line: pin_of(s).spec for s in statements if s.axis in {"nvcc", "cuda"}}
    for built in (s for s in statements if s.axis == "flash-attn-hopper"):
        axis = matrix.axes[built.axis]
        for release in matrix.releases[built.axis]:
            toolchain = release.facts.toolchain
            if toolchain is None or not matches(axis, built.spec, release):
                continue
            for line, cuda in stated.items():
                if re.fullmatch(r"\d+\.\d+", cuda) and toolchain.replaces(cuda):
                    names = " and ".join(each.url.rsplit("/", 1)[-1] for each in toolchain.archives.values())
                    finding = finding_of("recipe-build-fetches", built.line, "", source=release.source)
                    why = f"its setup.py takes {names} instead of CUDA {cuda} (line {line}): {findings_catalog()[finding.rule].why}"
                    yield replace(finding, why=why, lines=tuple(sorted({built.line, line})))
                    return


def drivers(
    held: Held, recipe: Recipe, statements: Sequence[Statement], refused: Sequence[RecipeFinding]
) -> Iterator[RecipeFinding]:
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
        installed = any(stage.compat == cuda for stage in recipe.stages) or any(
            s.axis == "base" and s.spec.startswith(("ngc-", "nvidia-cuda-")) for s in statements
        )
        branches = release.facts.compat_branches
        can = str(found.major) in branches
        reported = any(driver.line in f.lines and {s.line for s in cudas[cuda]} & {*f.lines} for f in refused)
        if reported or (can and (installed or re.search(rf"\b{package}\b|\bcuda-compat(?![\w-])", recipe.text))):
            continue
        kind = findings_catalog()["recipe-driver-below-cuda"]
        stated = " and ".join(f"{s.axis} {s.spec} (line {s.line})" for s in cudas[cuda])
        helps = f"only with the package {package} does branch {found.major} run it" if can else "no cuda-compat helps"
        yield RecipeFinding(
            line=driver.line,
            lines=lines,
            rule=kind.id,
            why=f"{kind.why}: CUDA {cuda}, of {stated}, runs from driver {floor}, and driver {driver.spec} "
            f"(line {driver.line}) is below it; {helps}",
            source=release.source,
            todo=f"a driver of at least {floor}" + (f", or install {package} on data-center boards" if can else ""),
        )


def _cuda_of(matrix: Matrix, statement: Statement, others: Sequence[Statement]) -> str | None:
    """Return the CUDA, major.minor, that a statement names by itself or by its build of torch; None when it leaves it open."""
    if statement.axis in {"cuda", "nvcc"}:
        version = re.fullmatch(r"(\d+\.\d+)(?:\.\d+)*", statement.spec)
        cudas: Collection[object] = {version[1]} if version and not statement.path else set()
    elif statement.axis == "torch":
        # without a label it is PyPI's, unless something else says which
        if "+" not in statement.spec and any(s.axis == "cuda" for s in others):
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


def toolkits(
    matrix: Matrix, recipe: Recipe, statements: Sequence[Statement], in_no_cell: Collection[Statement]
) -> Iterator[RecipeFinding]:
    """Yield toolkits that do not compile for the installed torch, where no cell is there to say so.

    torch refuses an nvcc of another major, apex one of another minor, too. A toolkit that no torch is built for (12.3) is in no
    cell, and what apex refuses is more than what the rules of cells say next to a torch.
    """
    stated = [s for s in statements if s.axis in {"torch", "cuda"} and s.installed and s not in in_no_cell]
    labels = [s for s in statements if s.axis == "cuda"][:1]
    of_torch = {(cuda, s.branch): s for s in stated if (cuda := _cuda_of(matrix, s, labels))}
    nvccs = {(s.spec, s.branch): s for s in statements if s.axis == "nvcc" and not s.path}
    if not nvccs or not of_torch or not compiles(recipe):  # the last one reads the whole recipe
        return
    apex = next((s for s in statements if s.axis == "apex" and _APEX_CUDA.search(recipe.text)), None)
    for nvcc, ((its, _), torch) in itertools.product(nvccs.values(), of_torch.items()):
        mine = re.match(r"(\d+)\.\d+", nvcc.spec)
        if mine is None or mine[0] == its or not is_known_with(nvcc.branch, torch.branch, same=True):
            continue
        if mine[1] != its.partition(".")[0]:
            known_by, members = "nvcc-is-cuda", [nvcc, torch] if nvcc in in_no_cell else []
        else:
            known_by, members = "apex-nvcc-equals-torch", [nvcc, torch, apex] if apex else []
        if not members:
            continue
        rule = next(rule for rule in matrix.rules if rule.id == known_by)
        lines = tuple(sorted({s.line for s in members}))
        yield RecipeFinding(
            line=lines[-1],
            lines=lines,
            rule=rule.id,
            rules=(rule.id,),
            why=f"nvcc {nvcc.spec} (line {nvcc.line}) and a torch for CUDA {its} (line {torch.line}) do not go together: {rule.why}",
            source=rule.source,
            todo=f"take a toolkit of CUDA {its}, or a torch for CUDA {mine[0]}",
        )
        return


def unplaced(matrix: Matrix, recipe: Recipe, statements: Sequence[Statement]) -> Iterator[RecipeFinding]:
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
                yield RecipeFinding(
                    line=built.line,
                    lines=tuple(sorted({built.line, te.line})),
                    rule=kind.id,
                    why=f"te {te.spec} (line {te.line}) imports {wanted[1]}: {kind.why}",
                    source=kind.source,
                    todo=f"copy hopper/{file} to {place} in site-packages after the build",
                )
                break
