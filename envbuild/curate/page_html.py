"""The page as HTML: styles, script and data inside, nothing fetched."""

import json
from pathlib import Path
from typing import Any

from envbuild.components import COMPONENTS
from envbuild.curate.links import source_url
from envbuild.curate.page import Page
from envbuild.errors import HostError
from envbuild.matrix.model import GpuFacts, Release
from envbuild.matrix.spec import public_version
from envbuild.matrix.text import rule_text, spec_text

_ASSETS = Path(__file__).with_name("page_assets")

# What a stack's entry shows of its cell, in this order.
_SHOWN_OF_STACKS = ("cuda", *COMPONENTS, "python", "gpu", "base")


def page_data(page: Page) -> dict[str, Any]:
    """Return what the page's script works on: cells and reasons, by number."""
    rule_ids = [rule.id for rule in page.matrix.rules]
    number = {rule_id: n for n, rule_id in enumerate(rule_ids)}
    return {
        "rules": [[rule.id, rule.kind, rule.why] for rule in page.matrix.rules],
        "gpus": [[gpu.version, _gpu_names(gpu)] for gpu in page.gpus],
        "pythons": page.pythons,
        "cells": [
            {**cell, **{key: [number[rule_id] for rule_id in cell[key]] for key in ("rules", "together")}}
            for cell in page.cells
        ],
        "reasons": [[{**step, "source": _linked(step["source"])} for step in steps] for steps in page.reasons],
    }


def _linked(sources: str) -> list[tuple[str, str | None]]:
    """Return each of several sources, which a conflict joins with semicolons, with its address."""
    return [(source, source_url(source)) for source in sources.split("; ") if source]


def _gpu_names(gpu: Release) -> str:
    return ", ".join(gpu.facts.names) if isinstance(gpu.facts, GpuFacts) else ""


def render_page(page: Page) -> str:
    """Return the page as HTML: styles, script and data inside, nothing fetched."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_ASSETS),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters |= {"source_url": source_url, "spec": spec_text, "public": _public}
    environment.globals |= {"demand": rule_text, "gpu_names": _gpu_names, "stack_axes": _SHOWN_OF_STACKS}
    data = json.dumps(page_data(page), separators=(",", ":"), ensure_ascii=False)
    return environment.get_template("page.html.j2").render(
        page=page,
        # inside a script element only an end tag would end it
        data=data.replace("</", "<\\/"),
        style=(_ASSETS / "page.css").read_text(encoding="utf-8"),
        script=(_ASSETS / "page.js").read_text(encoding="utf-8"),
        possible=sum(n >= 0 for grid in page.grids for row in grid.entries for n in row),
    )


def _public(version: str) -> str:
    """Return a version without its variant, which the CUDA above the table says."""
    public = public_version(version)
    return str(public) if public is not None else version


def page_path(folder: Path) -> Path:
    """Make `folder` where it does not exist and return the path of the page in it.

    Raises:
        HostError: it cannot be made.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return folder / "index.html"


def write_page(text: str, path: Path) -> None:
    """Write the page to `path`, whole or not at all.

    Raises:
        HostError: it cannot be written.

    """
    try:
        part = path.with_name(".index.html.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> HostError:
    return HostError(
        f"the page cannot be written: {error.strerror}", where=str(path), hint="name a folder that you may write to"
    )
