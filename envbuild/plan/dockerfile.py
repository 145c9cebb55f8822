"""Plan -> Dockerfile and bake file."""

import json
from functools import cache
from typing import TYPE_CHECKING

from envbuild.paths import data_dir
from envbuild.plan.plan import Plan

if TYPE_CHECKING:
    from jinja2 import Template


def envquote(value: str) -> str:
    """Quote a value for ENV and LABEL, so that nothing in it is expanded or split."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    return f'"{escaped}"'


def envpath(value: str) -> str:
    """Quote a search path for ENV; one that ends in its own variable goes on with what the base image has."""
    for name in ("PATH", "LD_LIBRARY_PATH"):
        if value.endswith(f":${name}"):
            return envquote(value.removesuffix(f"${name}"))[:-1] + f'${name}"'
    return envquote(value)


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
