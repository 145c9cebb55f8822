"""What is installed here, without the pytest that was mounted beside it."""

import os
import re
import sys
from importlib import metadata
from typing import Dict, Optional, Tuple

from smokelib.expectation import normalise

ENV_MOUNTED = "ENVBUILD_SMOKE_PYTEST"  # folder of the mounted pytest: not part of the environment under test


def search_path() -> list:
    mounted = os.environ.get(ENV_MOUNTED)
    return [p for p in sys.path if not (mounted and os.path.abspath(p).startswith(os.path.abspath(mounted)))]


def distributions() -> Dict[str, str]:
    """Return every installed distribution's version by normalised name; the first on the path wins, as in imports."""
    found: Dict[str, str] = {}
    for dist in metadata.distributions(path=search_path()):
        name = dist.metadata["Name"]
        if name:
            found.setdefault(normalise(name), dist.version)
    return found


def version_of(name: str) -> Optional[str]:
    return distributions().get(normalise(name))


def release_of(name: str) -> Tuple[int, ...]:
    """Return the numbers of an installed distribution's version, (2, 12, 0); nothing where it is not installed."""
    return tuple(int(part) for part in re.findall(r"\d+", re.match(r"[\d.]*", version_of(name) or "").group()))


def same_version(installed: str, expected: str) -> bool:
    """Compare two versions; a local label (+cu130) counts only where both have one.

    PyPI's torch wheel says 2.11.0 in its metadata and 2.11.0+cu130 in torch.__version__.
    """
    left, _, left_local = installed.partition("+")
    right, _, right_local = expected.partition("+")
    return left == right and (not left_local or not right_local or left_local == right_local)


def of_release(installed: str, release: str) -> bool:
    """Whether a distribution's version is of a release: the same, or its post-release (2.6.0.post1 is of 2.6.0 and 2.6)."""
    digits = re.match(r"\d+(\.\d+)*", installed)
    wanted = re.match(r"\d+(\.\d+)*$", release.partition("+")[0])
    if not digits or not wanted or re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", installed[digits.end() :]):
        return same_version(installed, release)
    left, right = digits.group().split("."), wanted.group().split(".")
    size = max(len(left), len(right))
    return left + ["0"] * (size - len(left)) == right + ["0"] * (size - len(right))
