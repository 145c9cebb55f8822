"""Plan -> Dockerfile and bake file."""

import json
from functools import cache
from typing import TYPE_CHECKING

from envbuild.paths import data_dir
from envbuild.plan.plan import Plan

if TYPE_CHECKING:
    from jinja2 import Template


_SEARCHED = ("PATH", "LD_LIBRARY_PATH")
OF_CONTAINERS = ("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES")
"""Variables that the NVIDIA container toolkit reads, and nothing in the image."""


def envquote(value: str) -> str:
    """Quote a value for ENV and LABEL, so that nothing in it is expanded or split."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def envpath(value: str, name: str) -> str:
    """Quote the value of a variable for ENV; a search path that ends in itself goes on with what the base image has."""
    if name in _SEARCHED and value.endswith(f":${name}"):
        return envquote(value.removesuffix(f"${name}"))[:-1] + f'${name}"'
    return envquote(value)


def shellpath(value: str, name: str) -> str:
    """Quote the value of a variable for a shell, which would run what stands between backquotes."""
    return envpath(value, name).replace("`", "\\`")


@cache
def template(name: str) -> "Template":
    """Return a template of dockerfiles/."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(data_dir("dockerfiles")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701
    )
    env.filters["envquote"] = envquote
    env.filters["envpath"] = envpath
    env.filters["shellpath"] = shellpath
    return env.get_template(name)


def dockerfile(plan: Plan) -> str:
    """Return the Dockerfile: one self-contained text, the same for the same lock everywhere."""
    text: str = template("Dockerfile.j2").render(plan=plan)
    return text


def bake(plan: Plan, *, dockerfile_name: str = "Dockerfile") -> str:
    """Return the bake file: a target for the image and one for each compiled wheel."""
    common = {"context": ".", "dockerfile": dockerfile_name, "args": {"SOURCE_DATE_EPOCH": str(plan.lock.epoch)}}
    targets: dict[str, object] = {
        "image": {
            **common,
            "target": "image",
            "tags": [plan.tag],
            "attest": ["type=provenance,disabled=true"],
        }
    }
    for component in plan.components:
        targets[f"wheel-{component.axis}"] = {
            **common,
            "target": f"wheel-{component.axis}",
            "attest": ["type=provenance,disabled=true"],
        }
    return json.dumps({"group": {"default": {"targets": ["image"]}}, "target": targets}, indent=1) + "\n"
