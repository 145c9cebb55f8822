#!/usr/bin/env python3
"""Ask pip and uv, in an image, what they would install for twenty popular packages, and print a table.

    scripts/try_packages.py IMAGE --pip pip.whl [--ca FILE] [PACKAGE …]
    scripts/try_packages.py IMAGE --install [--ca FILE] [PACKAGE …]
    scripts/try_packages.py --lock FOLDER [--lock FOLDER …] [PACKAGE …]

Without --install nothing is installed (--dry-run). An install must leave every package of the image's constraints file
as it is, or be refused with a reason. Exits with 1 where one would change such a package, or fails without naming one. A cell has the package's
version and how many packages come with it, itself included.

With --install the image's uv installs each package in a separate container. Then what the constraints file names must
have the versions that it states, by the metadata of what is installed, and the package's modules are imported.

With --lock no image is needed: uv resolves each package for the lock's Python, with the lock's packages as constraints. An
index knows no `+cu126`, so a version counts without it.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

POPULAR = (
    *("transformers", "datasets", "trl", "peft", "accelerate", "wandb", "tensorboard", "einops", "sentencepiece"),
    *("tiktoken", "pandas", "scipy", "matplotlib", "jupyterlab", "hydra-core", "lightning", "deepspeed", "pytest"),
    *("mlflow", "ray"),
)
CONSTRAINTS = "/opt/envbuild/constraints.txt"
REPORT = "/tmp/report.json"
TOOLS = {
    "pip": ["python", "/try/pip.whl/pip", "install", "--dry-run", "--report", REPORT],
    "uv": ["uv", "pip", "install", "--dry-run"],
}


def normal(name: str) -> str:
    """Return a distribution's name as PEP 503 writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(container: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in the container."""
    line = ["docker", "exec", container, *command]
    return subprocess.run(line, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def pins(constraints: str) -> dict[str, str]:
    """Print and return what a constraints file holds: version by name."""
    lines = constraints.splitlines()
    held = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    print(f"{len(held)} packages are held, {', '.join(f'{n} {v}' for n, v in held.items())}.\n", flush=True)
    return held


def changes(container: str, tool: str, done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return what would be installed or removed: version by name."""
    if tool == "pip":
        items = [each["metadata"] for each in json.loads(run(container, ["cat", REPORT]).stdout)["install"]]
        return {normal(each["name"]): each["version"] for each in items}
    lines = re.findall(r"^ [-+~] (\S+?)(?:==(\S+))?$", done.stderr, re.MULTILINE)
    return {normal(name): version for name, version in lines}


def verdict(container: str, tool: str, held: dict[str, str], package: str) -> tuple[bool, str]:
    """Return whether an install of the package goes as it should, and a cell of the table."""
    done = run(container, [*TOOLS[tool], package])
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines()]
        why = [line for line in lines if any(f"{name}=={version}" in line for name, version in held.items())]
        return bool(why), f"refused: {why[0]}" if why else f"failed: {' '.join(lines)[-300:]}"
    new = changes(container, tool, done)
    moved = [f"{name} {held[name]} to {version}" for name, version in new.items() if name in held]
    if moved:
        return False, "would change " + ", ".join(moved)
    return True, f"{new.get(normal(package), '-')} ({len(new)})" if new else "is there"


LOOK = """
import contextlib, importlib, importlib.metadata, io, json, sys
package, *held = sys.argv[1:]
modules = [
    name
    for name, owners in importlib.metadata.packages_distributions().items()
    if package in {each.lower().replace("_", "-").replace(".", "-") for each in owners} and name.isidentifier()
    and not name.startswith("_")
]
errors = []
with contextlib.redirect_stdout(io.StringIO()):
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            errors.append(f"{name}: {type(error).__name__}: {error}")
versions = {}
for name in [package, *held]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        versions[name] = importlib.metadata.version(name)
print(json.dumps({"modules": modules, "errors": errors, "versions": versions}))
"""


def installed(image: str, flags: Sequence[str], held: dict[str, str], package: str) -> tuple[bool, str]:
    """Install a package in a separate container; return whether all that is held stays, and the row's other cells."""
    name = f"envbuild-try-{uuid.uuid4().hex[:8]}"
    subprocess.run(
        ["docker", "run", *flags, "--name", name, image, "sleep", "7200"], check=True, stdout=subprocess.DEVNULL
    )
    try:
        done = run(name, ["uv", "pip", "install", package])
        if done.returncode:
            return False, f"failed: {' '.join(done.stderr.split())[-300:]} | | "
        new = re.findall(r"^ \+ (\S+?)==", done.stderr, re.MULTILINE)
        seen = run(name, ["python", "-c", LOOK, normal(package), *held])
        if seen.returncode:
            return False, f"cannot be looked at: {' '.join(seen.stderr.split())[-300:]} | | "
        found = json.loads(seen.stdout.splitlines()[-1])
        moved = [
            f"{each} {held[each]} to {found['versions'].get(each)}"
            for each in held
            if found["versions"].get(each) != held[each]
        ]
        imported = found["errors"][0][:200] if found["errors"] else ", ".join(found["modules"])
        good = not moved and not found["errors"] and bool(found["modules"])
        cells = [f"{found['versions'].get(normal(package))} ({len(new)})", "; ".join(moved) or "as they were", imported]
        return good, " | ".join(cell.replace("|", "/") for cell in cells)
    finally:
        subprocess.run(["docker", "rm", "--force", name], check=False, capture_output=True)


def of_installs(image: str, flags: Sequence[str], packages: Sequence[str]) -> int:
    """Install each package, print the table, and return the exit code."""
    shown = subprocess.run(
        ["docker", "run", "--rm", image, "cat", CONSTRAINTS], capture_output=True, text=True, check=True
    )
    held = pins(shown.stdout)
    print("| package | installed | packages of the image | imported |\n|---|---|---|---|", flush=True)
    good = 0
    for package in packages:
        right, row = installed(image, flags, held, package)
        good += right
        print(f"| {package} | {row} |", flush=True)
    print(f"\n{good} of {len(packages)} are installed next to what is held, and their modules can be imported.")
    return 0 if good == len(packages) else 1


def tabulate(packages: Sequence[str], ways: Sequence[Callable[[str], tuple[bool, str]]]) -> int:
    """Try each package in each way, print the rows and their sum, and return the exit code."""
    good = 0
    for package in packages:
        cells = [way(package) for way in ways]
        good += all(right for right, _ in cells)
        print(f"| {package} | {' | '.join(text.replace('|', '/') for _, text in cells)} |", flush=True)
    print(f"\n{good} of {len(packages)} leave them as they are, or are refused with the reason.")
    return 0 if good == len(packages) else 1


def held_by(lock: Path) -> tuple[str, dict[str, str]]:
    """Return the Python of a lock, and the version of each package that an image of it holds."""
    python = json.loads((lock / "lock.json").read_text(encoding="utf-8"))["cell"]["python"]
    files = [tomllib.loads((lock / f"pylock.{name}.toml").read_text(encoding="utf-8")) for name in ("torch", "env")]
    return python, {normal(p["name"]): p["version"].partition("+")[0] for file in files for p in file["packages"]}


def resolution(python: str, held: dict[str, str], constraints: Path, package: str) -> tuple[bool, str]:
    """Return whether the package fits next to what is held, or is refused with the reason, and a cell of the table."""
    command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_36", "--constraint", str(constraints), "-"]
    done = subprocess.run(command, input=package, capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split())
        named = any(f"{name}=={version}" in why for name, version in held.items())
        return named, f"{'refused' if named else 'failed'}: {why[-300:]}"
    every = dict(line.split("==") for line in done.stdout.split() if "==" in line)
    new = {name: version for name, version in every.items() if name not in held}
    return True, f"{every[normal(package)]} ({len(new)})" if new else "is there"


def of_locks(locks: list[Path], packages: list[str]) -> int:
    """Print the table of the locks, and return the exit code."""
    found = [held_by(lock) for lock in locks]
    for number, (lock, (python, held)) in enumerate(zip(locks, found, strict=True), 1):
        print(f"{number}: {lock.name}, Python {python}, {len(held)} packages are held", flush=True)
    print(f"\n| package | {' | '.join(map(str, range(1, len(locks) + 1)))} |\n|{'---|' * (len(locks) + 1)}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        ways = []
        for number, (python, held) in enumerate(found):
            constraints = Path(place, str(number))
            constraints.write_text("".join(f"{name}=={version}\n" for name, version in held.items()), encoding="utf-8")
            ways.append(partial(resolution, python, held, constraints))
        return tabulate(packages, ways)


def main() -> int:
    """Try each package, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="IMAGE, PACKAGE …", help="the image, and the packages to ask for")
    parser.add_argument("--lock", type=Path, action="append", help="a folder of a lock, in place of an image")
    parser.add_argument("--install", action="store_true", help="install each package, in a separate container")
    parser.add_argument("--pip", type=Path, help="a wheel of pip, which the image need not have")
    parser.add_argument("--ca", type=Path, help="certificates of the index")
    options = parser.parse_intermixed_args()
    if options.lock:
        return of_locks(options.lock, options.words or list(POPULAR))
    if not options.words or not (options.pip or options.install):
        parser.error("give an IMAGE and --pip or --install, or --lock")
    image, packages = options.words[0], options.words[1:] or POPULAR
    name = f"envbuild-try-{uuid.uuid4().hex[:8]}"
    flags = ["--rm", "--detach", "--network", "host"]
    if options.ca:
        flags += ["-v", f"{options.ca.resolve()}:/try/ca.crt:ro"]
        flags += [word for each in ("SSL_CERT_FILE", "PIP_CERT") for word in ("-e", f"{each}=/try/ca.crt")]
    if options.install:
        return of_installs(image, flags, packages)
    flags += ["--name", name, "-v", f"{options.pip.resolve()}:/try/pip.whl:ro"]
    subprocess.run(["docker", "run", *flags, image, "sleep", "7200"], check=True, stdout=subprocess.DEVNULL)
    try:
        held = pins(run(name, ["cat", CONSTRAINTS]).stdout)
        print("| package | pip | uv |\n|---|---|---|", flush=True)
        return tabulate(packages, [partial(verdict, name, tool, held) for tool in TOOLS])
    finally:
        subprocess.run(["docker", "rm", "--force", name], check=False, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
