"""Source distributions: where an index without an answer would have one, and what one asks for."""

import re
from pathlib import Path

from envbuild.components.base import Sdist
from envbuild.errors import LockError


def sdist_url(sdist: Sdist) -> str:
    """Return the address under which PyPI serves the sdist of a release."""
    name = sdist.distribution.replace("-", "_")
    return f"https://files.pythonhosted.org/packages/source/{name[0]}/{name}/{name}-{sdist.version}.tar.gz"


def requires_dist(sdist: Path) -> list[str]:
    """Return what the distribution asks for at run time, extras aside, as its PKG-INFO or its egg-info says."""
    import tarfile

    texts: dict[str, str] = {}
    with tarfile.open(sdist) as tar:
        for member in tar:
            if re.fullmatch(r"[^/]+/PKG-INFO|[^/]+/(src/)?[^/]+\.egg-info/requires\.txt", member.name):
                body = tar.extractfile(member)
                texts[member.name.rsplit("/", 1)[1]] = body.read().decode() if body else ""
    if "PKG-INFO" not in texts:
        raise LockError(f"{sdist.name} holds no PKG-INFO", where=str(sdist))
    stated = re.findall(r"^Requires-Dist: (.+)$", texts["PKG-INFO"].split("\n\n")[0], re.MULTILINE)
    # setuptools before 68 wrote the requirements of a source distribution to its egg-info alone
    return stated or [line for line in texts.get("requires.txt", "").split("\n[")[0].splitlines() if line]
