"""What an image carries of its plan: lists of packages, the lock, what is expected of it, labels."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from envbuild.components import components_in
from envbuild.components.base import View
from envbuild.lock.files import Locked
from envbuild.lock.inputs import Inputs
from envbuild.lock.model import Lock
from envbuild.matrix.cell import CELL_LABEL, Cell
from envbuild.matrix.fleet import gpus_in
from envbuild.paths import data_dir
from envbuild.stacks.model import Repository
from envbuild.stacks.parts import patches_of, tools_of

JUPYTER = "jupyter_server_config.json"
_1970 = datetime(1970, 1, 1, tzinfo=UTC)


def lists_of(locked: Locked, inputs: Inputs, view: View) -> dict[str, str]:
    """Return the texts that the build reads, by name; those below `lock/` and `image/` go into the image."""
    lock = locked.lock
    lists: dict[str, str] = {}
    for os_set in lock.os:
        lines = [f"{p.name}={p.version} {p.sha256}" for p in os_set.packages] or list(os_set.wanted)
        lines += [f"# {p.name}={p.version} {p.sha256}" for p in os_set.renewed]
        lists[f"os.{os_set.name}.txt"] = "".join(f"{line}\n" for line in lines)
    for python_set in lock.python:
        if python_set.packages:
            from envbuild.lock.python import requirements_text

            lists[f"python.{python_set.name}.txt"] = requirements_text(python_set)
        else:
            lists[f"python.{python_set.name}.txt"] = "".join(f"{r}\n" for r in python_set.requirements)
    lists["lock/lock.json"] = lock.model_dump_json(indent=1, exclude_defaults=True) + "\n"
    lists["lock/expected.json"] = json.dumps(expected(lock, inputs, view), indent=1, sort_keys=True) + "\n"
    for patch in patches_of(inputs.stack) if inputs.stack else ():
        lists[f"patches/{patch.filename}"] = patch.diff.decode()
    for name, text in tools_of(inputs.stack).items() if inputs.stack else ():
        lists[f"tools/{name}"] = text
    names = ["_envbuild_home.py", "_envbuild_home.pth"]
    names += [] if inputs.provided else ["pip"]  # such a base has pip
    names += [JUPYTER] if inputs.stack is not None and inputs.stack.jupyter else []
    for name in names:
        lists[f"image/{name}"] = (data_dir("dockerfiles") / "image" / name).read_text(encoding="utf-8")
    for name, text in sorted(locked.pylocks.items()):
        lists[f"lock/pylock.{name}.toml"] = text if text.endswith("\n") else text + "\n"
    return lists


def files_of(lists: Mapping[str, str], site: str) -> dict[str, str]:
    """Return the files of `image/` that lie among the packages or the OS': path in the image -> name.

    Args:
        lists: the texts of the plan.
        site: the environment's site-packages.

    """
    places = {
        f"{site}/_envbuild_home.py": "_envbuild_home.py",
        f"{site}/_envbuild_home.pth": "_envbuild_home.pth",
        f"/etc/jupyter/{JUPYTER}": JUPYTER,
    }
    return {path: name for path, name in places.items() if f"image/{name}" in lists}


def expected(lock: Lock, inputs: Inputs, view: View) -> dict[str, Any]:
    """Return what audit and smoke tests hold an image against: components, versions, modules, extensions."""
    components: dict[str, Any] = {}
    for component in components_in(view):
        if component.is_provided(view):
            components[component.axis] = {
                "distribution": component.axis,
                "version": lock.cell[component.axis],
                "module": component.module(view),
                "source": "base",
            }
    for wheel in inputs.components:
        components[wheel.axis] = {
            "distribution": wheel.distribution,
            "version": wheel.version,
            "module": wheel.module,
            # a stack's own lie inside their packages, and `module` is what imports
            "extensions": [] if wheel.alone else list(wheel.extensions),
        }
    for component in components_in(view):
        if (more := component.expected(view)) is not None and not component.is_provided(view):
            components[component.axis] = components.get(component.axis, {}) | dict(more)
    for component in components_in(view):
        if component.sms and len(gpus_in(lock.cell)) > 1 and component.axis in components:
            components[component.axis] |= {"sms": list(component.sms)}
    if inputs.stack is not None:
        for build in inputs.stack.builds:
            if build.version is None:  # what a tree calls itself is its own affair
                components[build.name] |= {"version": None, "commit": build.commit}
        components["stack"] = {
            "name": inputs.stack.name,
            "path": inputs.stack.repository.path,
            "commit": inputs.stack.repository.commit,
            "patches": list(inputs.stack.patches),
        }
    sets = [found for found in map(lock.python_set, ("torch", "env")) if found]
    packages = {package.name: package.version for each in sets for package in each.packages}
    return {
        "cell_id": lock.as_cell.id,
        "lock_digest": lock.digest,
        "flavor": lock.flavor,
        "cell": lock.cell,
        "packages": packages,
        "components": components,
        "matrix": lock.matrix,
    }


def labels_of(lock: Lock, cell: Cell, repository: Repository | None) -> dict[str, str]:
    """Return the labels of the image: ours, and OCI's annotations as far as the lock decides them."""
    labels = {
        "org.opencontainers.image.title": "envbuild " + cell.id,
        "org.opencontainers.image.version": cell.id,
        "org.opencontainers.image.created": f"{_1970 + timedelta(seconds=lock.epoch):%Y-%m-%dT%H:%M:%SZ}",
        CELL_LABEL: cell.id,
        "io.envbuild.lock": lock.digest,
        "io.envbuild.complete": "true" if lock.complete else "false",
    }
    base = next((image for image in lock.images if image.stage == "base"), None)
    if base is not None:
        labels["org.opencontainers.image.base.name"] = base.reference
        if base.digest:
            labels["org.opencontainers.image.base.digest"] = base.digest
    if lock.stack:
        labels["io.envbuild.stack"] = lock.stack
    if repository is not None:
        labels["org.opencontainers.image.source"] = repository.url
        labels["org.opencontainers.image.revision"] = repository.commit
    return labels
