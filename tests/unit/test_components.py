"""The registry of components: complete, in one order, and the only place that decides by a component's name."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import envbuild
from envbuild import components
from envbuild.components import AXIS_OF_DISTRIBUTION, COMPONENTS
from envbuild.components.base import Component
from envbuild.matrix.load import load_matrix
from envbuild.paths import data_dir

PACKAGE = Path(envbuild.__file__).parent

# Where a component's axis may stand as a string outside envbuild/components, and why.
NAMED = {
    "cli/axes.py": ({"torch"}, "a driver alone says that the image is for GPUs, where no torch is named"),
    "cli/run.py": ({"deepspeed"}, "the launcher of that name"),
    "cli/smoke.py": ({"torch"}, "the lock's set of Python packages"),
    "run/launch/containers.py": ({"deepspeed"}, "the launcher of that name"),
    "run/launch/commands.py": ({"deepspeed"}, "the launcher of that name"),
    "run/launch/job.py": ({"deepspeed"}, "the launcher of that name"),
    "lock/inputs.py": ({"mpi", "torch"}, "the set of Python packages; MPI is no wheel: packages, a prefix, a compile"),
    "lock/make.py": ({"torch"}, "the set of Python packages"),
    "lock/model.py": ({"te", "torch"}, "the set of Python packages; the field te_source of every lock"),
    "curate/index_checks.py": ({"te", "torch"}, "their several distributions have their own checks"),
    "curate/coverage.py": ({"flash-attn-hopper", "te", "torch"}, "the axes of the coverage report and its requests"),
    "matrix/spelling.py": ({"torch"}, "2.8+cu128 names a build of a minor release"),
    "matrix/driver.py": ({"torch"}, "what the driver is compared with"),
    "curate/page.py": ({"apex", "te", "torch"}, "the axes of the page's grids"),
    "curate/page_reasons.py": ({"te", "torch"}, "the pairs of axes whose conflicts the page names first"),
    "curate/page_html.py": ({"te", "torch"}, "the axes of the page's grids"),
    "curate/page_proof.py": ({"te", "torch"}, "the axes of the page's grids"),
    "curate/torch_builds.py": ({"torch"}, "its builds are on several indexes"),
    "curate/update.py": (
        {"apex", "megatron", "te", "torch"},
        "their upstreams say more than a distribution's versions",
    ),
    "engine/details.py": ({"mpi", "torch"}, "the stages of those names"),
    "plan/carried.py": ({"torch"}, "the set of Python packages"),
    "plan/layers.py": ({"torch"}, "the set of Python packages, and the largest distribution of all"),
    "plan/kubernetes.py": ({"mpi", "torch"}, "the launchers of those names; MPIJob needs an MPI"),
    "cli/wheels.py": ({"torch"}, "what compiled wheels are linked to"),
    "engine/exports.py": ({"torch"}, "the stage that compiled wheels share"),
    "engine/wheels.py": ({"torch"}, "what compiled wheels are linked to"),
    "pipeline/wheel_index.py": ({"torch"}, "what compiled wheels are linked to"),
    "pipeline/wheels.py": ({"torch"}, "what compiled wheels are linked to"),
    "plan/stages.py": ({"mpi", "torch"}, "the stage and set torch; MPI is a stage and no wheel"),
    "plan/plan.py": ({"mpi", "torch"}, "the stage and set torch; MPI is a stage and no wheel"),
    "plan/compiled_dockerfile.py": ({"mpi", "torch"}, "the same, as the template names them"),
    "plan/shell.py": ({"mpi", "torch"}, "the stage and set torch; a host may have both"),
    "stacks/model.py": ({"deepspeed"}, "the launcher of that name"),
    "supply/inventory.py": ({"mpi", "torch"}, "the set of Python packages; MPI is no wheel"),
    "supply/owners.py": ({"mpi"}, "MPI is no wheel: its files are those of a prefix"),
    "verify/audit.py": ({"torch"}, "the set of Python packages"),
    "verify/contents.py": ({"torch"}, "the set of Python packages"),
    "verify/judge.py": ({"te", "torch"}, "headers that TE reads as it runs; torch's own libraries"),
    "evidence/recording.py": ({"torch"}, "the versions that a machine reports"),
    "evidence/place.py": ({"mpi", "torch"}, "the MPI that a run was on; the torch of a host that it adopted"),
    "curate/trials/names.py": ({"torch"}, "a module that names are looked up in"),
    "curate/trials/pairs.py": ({"megatron", "te"}, "the one pair without torch that is tried"),
    "curate/trials/subject.py": ({"torch"}, "of torch, one release stands for a minor"),
    "evidence/pairs.py": ({"te", "torch"}, "what the other components are compiled against, or import"),
    "evidence/trials.py": ({"torch"}, "of torch, one release stands for a minor"),
}


def named(path: Path) -> set[str]:
    """Return the axes of components that stand as strings in a module, docstrings aside."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = (n.value for n in nodes if isinstance(n, ast.Constant) and id(n) not in alone)
    return {value for value in strings if isinstance(value, str) and value in COMPONENTS}


def test_nothing_else_decides_by_a_components_name():
    # recipes reads the names that other people's recipes use
    apart = {"components", "recipes"}
    modules = (path for path in PACKAGE.rglob("*.py") if not apart & set(path.relative_to(PACKAGE).parts))
    found = {str(path.relative_to(PACKAGE)): names for path in modules if (names := named(path))}
    assert found == {module: names for module, (names, _) in NAMED.items()}


def test_no_template_lists_components():
    # torch is a stage and a set of packages; MPI is a stage; a host's own cuDNN would clash with TE's; the script's help names
    # the switches of FA3's setup.py; the page has a grid by torch and TE
    stages = {("Dockerfile.j2", "mpi"), ("Dockerfile.j2", "torch"), ("shell.j2", "mpi"), ("shell.j2", "torch")}
    texts = {p.name: p.read_text() for folder in (PACKAGE, data_dir("dockerfiles")) for p in folder.rglob("*.j2")}
    code = {name: "".join(re.findall(r"{[{%].*?[%}]}", text)) for name, text in texts.items()}
    found = {(name, axis) for name, text in code.items() for axis in COMPONENTS if f'"{axis}"' in text}
    page = {("page.html.j2", "te"), ("page.html.j2", "torch")}
    assert found == stages | page | {("shell.j2", "te"), ("shell.j2", "flash-attn-hopper")}


def test_a_name_in_a_module_is_found_and_one_in_its_docstring_is_not(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""te"""\nX = {"apex": 1}\nif y == "mpi":\n    """torch"""\n')
    assert named(module) == {"apex", "mpi"}


def test_every_module_is_a_component_with_an_axis():
    modules = {module.name for module in pkgutil.iter_modules(components.__path__)} - {"base"}
    assert {type(c).__module__.rpartition(".")[2] for c in COMPONENTS.values()} == modules
    axes = load_matrix().axes
    for axis, component in COMPONENTS.items():
        assert isinstance(component, Component)
        assert axis == component.axis
        assert axis in axes, f"no file of matrices/ defines the axis {axis}"
        assert type(component).__module__.rpartition(".")[2] == axis.replace("-", "_")


def test_the_registry_is_in_order_and_no_two_share_a_place_a_label_or_a_distribution():
    places = [component.place for component in COMPONENTS.values()]
    assert places == sorted(set(places))
    labels = [component.label for component in COMPONENTS.values() if component.label]
    assert len(labels) == len(set(labels))
    distributions = [name for component in COMPONENTS.values() for name in component.distributions]
    assert len(distributions) == len(set(distributions)) == len(AXIS_OF_DISTRIBUTION)


@pytest.mark.parametrize("axis", [axis for axis, c in COMPONENTS.items() if c.upstream.distribution])
def test_what_an_index_is_asked_for_is_the_cells_to_decide(axis):
    assert AXIS_OF_DISTRIBUTION[COMPONENTS[axis].upstream.distribution] == axis
