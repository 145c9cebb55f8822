"""The page as HTML: styles, script and data inside, nothing fetched."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from envbuild.components import COMPONENTS
from envbuild.curate.links import source_url
from envbuild.curate.page import Page
from envbuild.curate.page_proof import ran_in
from envbuild.errors import HostError
from envbuild.matrix.cell import NONE
from envbuild.matrix.driver import parse_driver
from envbuild.matrix.model import CudaFacts, GpuFacts, Release
from envbuild.matrix.spec import names_of, public_version
from envbuild.matrix.text import rule_text, spec_text

_ASSETS = Path(__file__).with_name("page_assets")
_SCRIPTS = ("flags.js", "page.js", "panel.js", "start.js")
"""In the order in which they run, as one script."""

# What a stack's entry shows of its cell, in this order.
_SHOWN_OF_STACKS = ("cuda", *COMPONENTS, "python", "gpu", "base")


def page_data(page: Page) -> dict[str, Any]:
    """Return what the page's script works on: cells and reasons, by number.

    Most of what cells hold, hundreds of others hold, too: each such value stands once in `shared`, and `cells` are rows of
    numbers. A row is of the columns that `fields` names; those of `plain` hold the value itself.
    """
    rule_ids = [rule.id for rule in page.matrix.rules]
    number = {rule_id: n for n, rule_id in enumerate(rule_ids)}
    shared = _Shared()
    rows = []
    for cell in page.cells:
        full = {**cell, **{key: [number[rule_id] for rule_id in cell[key]] for key in ("rules", "together")}}
        full["pairs"] = [shared.number(pair) for pair in cell["pairs"]]
        full["versions"] = [shared.number([axis, version]) for axis, version in cell["versions"].items()]
        rows.append([full[field] if field in _PLAIN else shared.number(full[field]) for field in _FIELDS])
    return {
        "rules": [[rule.id, rule.kind, rule.why] for rule in page.matrix.rules],
        "gpus": [[gpu.version, _gpu_names(gpu), list(gpu.aliases), *_gpu_facts(gpu)] for gpu in page.gpus],
        "pythons": page.pythons,
        "flags": [*sorted(page.matrix.axes), "prefer", "stack"],
        "stacks": [each["stack"].name for each in page.stacks],
        "drivers": [release.version for release in page.matrix.releases.get("driver", ())],
        "cuda": {grid.cuda: _driver_facts(page, grid.cuda) for grid in page.grids},
        "names": {
            axis: {
                release.version: names
                for release in page.matrix.releases[axis]
                if (names := [*names_of(release)[1:], *([release.commit] if release.commit else [])])
            }
            for axis in ("cuda", "torch", "te", "python")
        },
        "fields": _FIELDS,
        "plain": sorted(_PLAIN),
        "shared": shared.values,
        "cells": rows,
        "reasons": [[{**step, "source": _linked(step["source"])} for step in steps] for steps in page.reasons],
        "proof": page.proof,
        "published": [
            [one.cell.get("cuda"), one.cell.get("torch"), one.cell.get("te", NONE), one.id, one.reference, one.platform]
            for one in page.published
        ],
    }


_FIELDS = (
    "cuda",
    "torch",
    "te",
    "id",
    "versions",
    "rules",
    "together",
    "standing",
    "tried",
    "pairs",
    "on",
    "no_gpu",
    "no_python",
)
_PLAIN = frozenset({"id"})


class _Shared:
    """Values that JSON can hold, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, value: Any) -> int:
        key = json.dumps(value, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(value)
        return self._numbers[key]


def _gpu_facts(gpu: Release) -> tuple[Any, ...]:
    """Return a GPU's boards, those that cuda-compat is not for, those with an Arm host, and what its driver must be."""
    facts = gpu.facts
    if not isinstance(facts, GpuFacts):
        return [], [], [], None
    driver = {
        "first": int(facts.first_driver) if facts.first_driver else None,
        "last": int(facts.last_driver) if facts.last_driver else None,
        "dataCenter": facts.data_center,
    }
    return [*facts.names, *facts.geforce], [*facts.geforce, *facts.workstation], list(facts.aarch64), driver


def _driver_facts(page: Page, cuda: str) -> dict[str, Any]:
    facts = page.matrix.release("cuda", cuda).facts
    if not isinstance(facts, CudaFacts):
        return {"floor": None, "branches": []}
    floor = facts.driver_minor or min(facts.driver_full.values(), key=parse_driver, default=None)
    return {"floor": floor, "branches": facts.compat_branches}


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
    environment.globals |= {"ran_in": ran_in}
    data = json.dumps(page_data(page), separators=(",", ":"), ensure_ascii=False)
    script = "".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}}})();'
    return environment.get_template("page.html.j2").render(
        page=page,
        # inside a script element only an end tag, or a comment's start, could change what is read as what
        data=data.replace("<", "\\u003c"),
        style=(_ASSETS / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
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
