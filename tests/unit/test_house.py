"""The middle is pure: what chooses, what a component is and how an image is laid out ask nothing but their arguments."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "envbuild"
PURE = ("matrix", "solver", "components", "plan")
CLIENT = PACKAGE / "engine" / "client.py"
# Who else writes the start of a docker command line, and what for; none of them runs one that waits for an answer but `host`.
STARTS = {
    "settings",  # where the start is put together
    "host",  # a look at the engine for `doctor`, with every other look at the host
    "run",  # the lines that `run` and `launch` show and start the user's containers with
}
MODULES = {
    "asyncio",
    "http",
    "multiprocessing",
    "random",
    "secrets",
    "socket",
    "ssl",
    "subprocess",
    "time",
    "urllib",
    "urllib3",
}
CLOCK = {"now", "today", "utcnow", "fromtimestamp", "monotonic", "perf_counter"}

# The whole middle for one request, while every event that Python's audit hooks see is written down.
RUN = """
import json, sys
from envbuild.lock.inputs import inputs_of
from envbuild.lock.files import Locked
from envbuild.lock.make import unlocked
from envbuild.matrix.cell import Pin, Request
from envbuild.matrix.load import load_matrix
from envbuild.plan import apptainer, dockerfile, shell
from envbuild.plan.plan import plan_of
from envbuild.solver.solve import solve

seen = set()
sys.addaudithook(lambda event, _: seen.add(event))
matrix = load_matrix()
request = Request(pins=tuple(Pin(axis=a, spec=s, origin="test") for a, s in json.loads(sys.argv[1]).items()))
inputs = inputs_of(matrix, solve(matrix, request).cell)
plan = plan_of(matrix, Locked(lock=unlocked(matrix, inputs), pylocks={}))
for render in (dockerfile.dockerfile, dockerfile.bake, apptainer.definition, shell.script):
    render(plan)
print(json.dumps(sorted(seen)))
"""


@pytest.mark.parametrize(
    "pins", [{"cuda": "12.6", "te": "2.6"}, {"cuda": "13.0", "flash-attn-hopper": "auto"}, {"cuda": "cpu"}]
)
def test_choosing_and_planning_open_no_socket_and_start_no_process(pins):
    done = subprocess.run([sys.executable, "-c", RUN, json.dumps(pins)], capture_output=True, text=True, check=True)
    seen = json.loads(done.stdout)
    assert "open" in seen  # the data files: the hook sees what happens
    forbidden = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "urllib.")
    assert [event for event in seen if event.startswith(forbidden)] == []


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_imports_no_clock_no_network_and_no_process(package):
    for path in sorted((PACKAGE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in CLOCK, f"{path}:{node.lineno}"
            for name in names:
                assert name.partition(".")[0] not in MODULES, f"{path}:{node.lineno} imports {name}"


def docker_uses(source: str) -> list[str]:
    """Return what a module does to reach the engine by itself: the package, the SDK, or a command line."""
    found = []
    if not re.search(r"docker|python_on_whales|engine_command", source):
        return found
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [str(node.module)]
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            words = node.args if isinstance(node, ast.Call) else node.elts
            program = words[0].value if words and isinstance(words[0], ast.Constant) else None
            line = isinstance(node, ast.Call) and str(program).startswith("docker ")
            if program == "docker" or (line and ast.unparse(node.func) in {"os.system", "os.popen"}):
                found.append(f"line {node.lineno}: a command that starts with docker")
        elif isinstance(node, ast.Attribute) and node.attr == "engine_command":
            found.append(f"line {node.lineno}: the start of a docker command")
        found += [f"line {node.lineno}: {n}" for n in names if n.partition(".")[0] in {"docker", "python_on_whales"}]
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import docker",
        "from python_on_whales import DockerClient",
        "def f():\n    from python_on_whales.exceptions import DockerException",
        "run(['docker', 'ps'])",
        "words = ('docker', *more)",
        "probe.run('docker', 'info')",
        "os.system('docker ps')",
        "bounded([*settings.engine_command, 'ps'])",
    ],
)
def test_a_module_that_reaches_the_engine_is_seen(source):
    assert docker_uses(source)


def test_one_module_talks_to_the_engine():
    found = {path: docker_uses(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    assert found[CLIENT]
    others = {path.relative_to(PACKAGE): uses for path, uses in found.items() if uses and path != CLIENT}
    assert {str(path): uses for path, uses in others.items() if path.parts[0].removesuffix(".py") not in STARTS} == {}
    whales = [path for path, uses in found.items() if any("python_on_whales" in use for use in uses)]
    assert whales == [CLIENT]


# A module that is longer says in its docstring why that is right.
LONGEST = 400
REASON = "Long because "


def test_a_module_is_short_or_says_why_it_is_long():
    long = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        count = len(text.splitlines())
        if count <= LONGEST:
            continue
        docstring = ast.get_docstring(ast.parse(text)) or ""
        if not any(line.startswith(REASON) for line in docstring.splitlines()):
            long.append(f"{path.relative_to(PACKAGE)}: {count} lines")
    assert long == []
