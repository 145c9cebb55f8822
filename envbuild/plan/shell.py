"""Plan -> one POSIX shell script that makes the same environment on a bare host, without root and without containers."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from envbuild.errors import UsageError
from envbuild.lock.model import COMPAT, Lock
from envbuild.matrix.spec import version_key
from envbuild.paths import data_dir
from envbuild.plan.dockerfile import OF_CONTAINERS, rendered
from envbuild.plan.plan import Plan
from envbuild.util import quote

HOST_PROVIDES = ("base", "devel")
"""The stages that a script takes from its host, images and OS packages with them."""
_OF_IMAGES = ("os.", "image/", "lock/pylock.", "lock/cuda-compat.sh")
"""Texts of the plan that a script has no use for."""
_RECIPES_OF_IMAGES = ("os-install", COMPAT, "constraints")
# plain-words: allow bring - the file's name is in rendered scripts
_HELPERS = ("bring", "adopt", "record", "uv-by-pip")
# What is the host's and not the script's: its system, its compiler, its nvcc.
_NOT_OF_A_HOST = (
    "base",
    "runtime",
    "torch",
    "env",
    "wheels",
    "tree",
    "compiled",
    "uv",
    "compiler",
    "nvcc",
    "lock",
    "constraints",
)
# Set by the script itself, of a file that images alone have, or read by container tools alone.
_OF_PIP = ("PIP_CONSTRAINT", "UV_CONSTRAINT")
_NOT_IN_ACTIVATE = ("PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_HOME", *_OF_PIP, *OF_CONTAINERS)
# The script's own folders below its prefix.
_OWN = ("venv", "envbuild", "cuda", "tools", "toolchain", "mpi")


def script(plan: Plan) -> str:
    """Return the script: one self-contained text, the same for the same lock everywhere.

    Raises:
        UsageError: the cell's torch exists inside an image alone.

    """
    if plan.provided:
        raise UsageError(
            f"torch {plan.cell.versions['torch']} of this cell exists only inside {plan.cell.versions['base']}, and no host has it",
            where="--format shell",
            hint="render it as a Dockerfile, or ask for a cell with another --base",
        )
    moved, repository = _moved(plan), _repository(plan)
    paths = {"/opt/venv": "$venv", **moved, "/usr/local/cuda": "$CUDA_HOME", "/tmp/envbuild-": "$state/tmp/"}  # noqa: S108
    lists = {n.removeprefix("lock/"): t for n, t in plan.lists.items() if not n.startswith(_OF_IMAGES)}
    return rendered(
        "shell.j2",
        plan=plan,
        missing=plan.lock.still_missing(HOST_PROVIDES),
        torch=_torch(plan.lock),
        cuda=_toolkit(plan),
        moved=list(moved.items()),
        repository=repository,
        compiles=bool(plan.components or plan.compiled_steps or plan.mpi),
        recipes={n: text for n, text in plan.recipes.items() if n not in _RECIPES_OF_IMAGES},
        verbatim={n: (data_dir("dockerfiles") / "host" / n).read_text(encoding="utf-8") for n in _HELPERS} | lists,
        keys=_keys(plan),
        environment={n: v for n, v in plan.environment.items() if n not in _NOT_IN_ACTIVATE},
        here=_expander(paths, repository),
        sh=lambda value: Markup(quote.shell(value)),  # noqa: S704
    )


def _torch(lock: Lock) -> str:
    """Return torch's version as the lock's wheel states it, or the cell's where there is no wheel yet."""
    found = lock.python_set("torch")
    return (
        next((p.version for p in found.packages if p.name == "torch"), lock.cell["torch"])
        if found
        else lock.cell["torch"]
    )


def _toolkit(plan: Plan) -> str | None:
    """Return major.minor of the CUDA toolkit that compiling takes, or None when nothing is compiled with one."""
    cell = plan.cell.versions
    if cell["cuda"] == "cpu" or not (plan.components or plan.compiled_steps or plan.lock.flavor == "devel"):
        return None
    parsed = version_key(cell.get("nvcc", cell["cuda"]))
    return ".".join(str(n) for n in parsed.release[:2]) if parsed else cell["cuda"]


def _moved(plan: Plan) -> dict[str, Markup]:
    """Return where the image's own folders lie on a host, as shell text."""
    return {plan.mpi.prefix: Markup("$prefix/mpi")} if plan.mpi and plan.mpi.prefix else {}


def _repository(plan: Plan) -> tuple[str, Markup] | None:
    """Return what finds the repository's path where it is a whole one, for `sed -E` and for `re`, and its folder as shell text."""
    if not plan.stack:
        return None
    path = plan.stack.repository.path
    name = path.rsplit("/", 1)[-1]
    whole = r"(^|[^A-Za-z0-9._/-]|-[IL])" + path.replace(".", r"\.") + r"(/|[^A-Za-z0-9._-]|$)"
    return whole, Markup("$prefix/{}{}").format("repository-" if name in _OWN else "", quote.plain(name))


def _expander(paths: Mapping[str, str], repository: tuple[str, str] | None) -> Callable[[str], Markup]:
    """Return what gives a value as a double-quoted word in which the image's paths are those of the host."""

    def here(value: str) -> Markup:
        quoted = quote.shell_double(value)
        # twice: of two paths in a row, the first takes the character between them
        for whole, folder in (repository, repository) if repository else ():
            quoted = re.sub(whole, rf"\1{folder}\2", quoted)
        for image, host in paths.items():
            quoted = quoted.replace(image, host)
        return Markup(f'"{quoted}"')  # noqa: S704

    return here


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def _keys(plan: Plan) -> dict[str, str]:
    """Return a key per step over the stage's inputs that the script installs; the script adds what it found of the host."""
    keys = {s.name: _digest({k: v for k, v in s.inputs.items() if k not in _NOT_OF_A_HOST}) for s in plan.stages}
    keys |= {name: _digest(plan.lists.get(f"python.{name}.txt")) for name in ("tools", "toolchain")}
    wheels = [keys[f"wheel-{c.axis}"] for c in plan.components]
    keys["env"] = _digest([keys["env"], wheels])
    if plan.mpi:
        keys["mpi"] = _digest([plan.mpi.url, plan.mpi.sha256, plan.mpi.configure, plan.recipes["build-native"]])
    if plan.stack:
        parts = [v for k, v in keys.items() if k.startswith(("tree-", "compiled-", "stack"))]
        keys["stack"] = _digest(parts)
    return keys
