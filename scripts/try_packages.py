#!/usr/bin/env python3
"""Ask pip and uv, in an image, what they would install for twenty popular packages, and print a table.

    scripts/try_packages.py IMAGE --pip pip.whl [--ca FILE] [PACKAGE …]

Nothing is installed (--dry-run). An install must leave every package of the image's constraints file as it is, or be refused
with a reason. Exits with 1 where one would change such a package, or
fails without naming one. A cell has the package's version and how many packages come with it, itself included.
"""

import argparse
import json
import re
import subprocess
import sys
import uuid
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


def changes(container: str, tool: str, done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return what would be installed or removed: version by name."""
    if tool == "pip":
        items = [each["metadata"] for each in json.loads(run(container, ["cat", REPORT]).stdout)["install"]]
        return {normal(each["name"]): each["version"] for each in items}
    lines = re.findall(r"^ [-+~] (\S+?)(?:==(\S+))?$", done.stderr, re.MULTILINE)
    return {normal(name): version for name, version in lines}


def verdict(container: str, tool: str, package: str, held: dict[str, str]) -> tuple[bool, str]:
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


def main() -> int:
    """Try each package, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image")
    parser.add_argument("packages", nargs="*", default=POPULAR)
    parser.add_argument("--pip", type=Path, required=True, help="a wheel of pip, which the image need not have")
    parser.add_argument("--ca", type=Path, help="certificates of the index")
    options = parser.parse_args()
    name = f"envbuild-try-{uuid.uuid4().hex[:8]}"
    flags = ["--rm", "--detach", "--network", "host", "--name", name, "-v", f"{options.pip.resolve()}:/try/pip.whl:ro"]
    if options.ca:
        flags += ["-v", f"{options.ca.resolve()}:/try/ca.crt:ro"]
        flags += [word for each in ("SSL_CERT_FILE", "PIP_CERT") for word in ("-e", f"{each}=/try/ca.crt")]
    subprocess.run(["docker", "run", *flags, options.image, "sleep", "7200"], check=True, stdout=subprocess.DEVNULL)
    try:
        lines = run(name, ["cat", CONSTRAINTS]).stdout.splitlines()
        held = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
        print(f"{len(held)} packages are held, {', '.join(f'{n} {v}' for n, v in held.items())}.\n", flush=True)
        print("| package | pip | uv |\n|---|---|---|", flush=True)
        good = 0
        for package in options.packages:
            found = [verdict(name, tool, package, held) for tool in TOOLS]
            good += all(right for right, _ in found)
            print(f"| {package} | {' | '.join(text.replace('|', '/') for _, text in found)} |", flush=True)
    finally:
        subprocess.run(["docker", "rm", "--force", name], check=False, capture_output=True)
    print(f"\n{good} of {len(options.packages)} leave them as they are, or are refused with the reason.")
    return 0 if good == len(options.packages) else 1


if __name__ == "__main__":
    sys.exit(main())
