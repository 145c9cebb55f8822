"""Commits for a pull request: a new branch at HEAD, with the named files and nothing else."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

BRANCH = re.compile(r"[a-z0-9][a-z0-9-]{0,40}/[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
AUTHOR = ("envbuild-ci", "envbuild-ci@users.noreply.github.com")


def check_branch(name: str) -> str:
    """Return the name of a branch.

    Raises:
        SystemExit: it is none that these scripts make.

    """
    if not BRANCH.fullmatch(name) or ".." in name or name.endswith((".lock", ".")):
        sys.exit(f"error: {name!r} is no name for a branch: write it as evidence/2026-11-23-1")
    return name


def git(repository: Path, *command: str) -> str:
    """Run git in the repository and return what it prints.

    Raises:
        SystemExit: it failed.

    """
    # What is committed may come from elsewhere: no hook, no monitor and no signing of this machine applies to it.
    settled = ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "commit.gpgSign=false"]
    who = ["-c", f"user.name={AUTHOR[0]}", "-c", f"user.email={AUTHOR[1]}", "-c", "core.autocrlf=false"]
    command = ("git", "-C", str(repository), *settled, *who, *command)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {' '.join(command[-3:])}: {done.stderr.strip()}")
    return done.stdout.strip()


def commit(repository: Path, branch: str, paths: Sequence[Path], message: str) -> None:
    """Make the branch at HEAD, and commit these files of the working tree to it.

    Raises:
        SystemExit: something is staged already, or the branch is there.

    """
    if staged := git(repository, "diff", "--cached", "--name-only"):
        sys.exit(f"error: {staged.splitlines()[0]} is staged already; commit or unstage it first")
    git(repository, "switch", "--quiet", "--create", check_branch(branch))
    git(repository, "add", "--", *(str(path.relative_to(repository)) for path in paths))
    git(repository, "commit", "--quiet", "--message", message)
