#!/usr/bin/env python3
"""Run the command of envbuild that the variable ACTION_ARGS holds, and keep its JSON answer as the output `answer`.

action.yml calls this. envbuild is installed once per job, from the folder that this script is in, into a virtual environment
below RUNNER_TEMP. The exit code is that of the command.
"""

import os
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRINTS_ONLY = frozenset({"run", "launch", "dev"})
"""Commands that with --json print what they would start, and start nothing."""


def installed(folder: Path) -> Path:
    """Return the command `envbuild` of an environment in `folder`, which is made where it is not there."""
    command = folder / "bin" / "envbuild"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", ROOT]
        subprocess.run(pip, check=True)
    return command


def run(command: Sequence[str | Path], args: str, output: Path | None) -> int:
    """Run envbuild with the words of `args`, show its answer, and add that to the file of the step's outputs.

    `run`, `launch` and `dev` start what they are asked to start: their output is shown as it comes, and is no answer, as
    is that of `--version`. Where `args` has --json, they print what they would start, and that is the answer.

    Returns:
        The exit code of the command; 2 where `args` is empty or ends within a quote.

    """
    try:
        words = shlex.split(args)
    except ValueError as error:
        print(f"error: the input `args` cannot be read: {error}", file=sys.stderr)
        return 2
    if not words:
        print(
            "error: the input `args` is empty\n  to do: write a command, such as `resolve --cuda 13.0`", file=sys.stderr
        )
        return 2
    place = words.index("--") if "--" in words else len(words)
    if "--json" not in words[:place]:
        name = next((word for word in words[:place] if not word.startswith("-")), None)
        if name is None or name in PRINTS_ONLY:
            code = subprocess.run([*command, *words], check=False).returncode
            return code if code >= 0 else 128 - code
        words.insert(place, "--json")
    done = subprocess.run([*command, *words], stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    if output is not None:
        # a line of the answer cannot be this mark, and so cannot end the output and begin another
        mark = f"end-{secrets.token_hex(16)}"
        with output.open("a", encoding="utf-8") as file:
            file.write(f"answer<<{mark}\n{done.stdout.rstrip(chr(10))}\n{mark}\n")
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def main() -> int:
    """Run the command of ACTION_ARGS."""
    folder = Path(os.environ.get("RUNNER_TEMP") or tempfile.gettempdir()) / "envbuild-action"
    output = os.environ.get("GITHUB_OUTPUT")
    return run([installed(folder)], os.environ.pop("ACTION_ARGS", ""), Path(output) if output else None)


if __name__ == "__main__":
    sys.exit(main())
