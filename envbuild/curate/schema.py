"""JSON Schemas of the data files, so that an editor completes them and marks mistakes as they are typed."""

import json
from pathlib import Path
from typing import Any

from envbuild.matrix.model import FACTS, AxisFile, PackagesFile, RuleFile
from envbuild.util.model import Model, NoFacts

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _of(model: type[Model], title: str) -> dict[str, Any]:
    return {"$schema": DIALECT, **model.model_json_schema(by_alias=True), "title": title}


def _axis_schema() -> dict[str, Any]:
    schema = _of(AxisFile, "One axis of the compatibility matrix: matrices/AXIS.toml")
    cases = []
    for axis, facts in FACTS.items():
        part = facts.model_json_schema(by_alias=True)
        schema["$defs"].update(part.pop("$defs", {}))
        schema["$defs"][facts.__name__] = part
        cases.append((axis, facts.__name__))
    schema["$defs"][NoFacts.__name__] = NoFacts.model_json_schema()

    def where(condition: dict[str, Any], facts: str) -> dict[str, Any]:
        named = {"properties": {"axis": {"properties": {"name": condition}}}}
        held = {"properties": {"release": {"items": {"properties": {"facts": {"$ref": f"#/$defs/{facts}"}}}}}}
        return {"if": named, "then": held}

    # the facts of a release depend on the axis that the file is about
    schema["allOf"] = [
        *(where({"const": axis}, facts) for axis, facts in cases),
        where({"not": {"enum": sorted(FACTS)}}, NoFacts.__name__),
    ]
    return schema


def schemas() -> dict[str, dict[str, Any]]:
    """Return every published schema by name; `axis` is for the file of any axis."""
    from envbuild.stacks.model import Stack

    return {
        "axis": _axis_schema(),
        "packages": _of(PackagesFile, "Caps on Python packages, and impostors: matrices/packages.toml"),
        "rules": _of(RuleFile, "Relations between axes: matrices/rules.toml"),
        "stack": _of(Stack, "A training stack: matrices/stacks/NAME.toml, or a user's own"),
    }


def as_text(schema: dict[str, Any]) -> str:
    """Return `schema` as the bytes that are published: sorted, indented, with a final newline."""
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_schemas(folder: Path) -> list[Path]:
    """Write every schema to `folder` as NAME.schema.json and return the files, changed or not."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, schema in schemas().items():
        path = folder / f"{name}.schema.json"
        path.write_text(as_text(schema), encoding="utf-8")
        written.append(path)
    return written
