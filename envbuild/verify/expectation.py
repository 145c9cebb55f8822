"""What a target is expected to hold: the file that a lock leaves for the suite, and where the tests then run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envbuild.errors import UsageError
from envbuild.evidence.report import Device, Level
from envbuild.util.foreign_json import parse_json

EXPECTED_IN_IMAGE = "/opt/envbuild/expected.json"
"""Where a built image carries its expectation."""
EXPECTED_LIMIT = 16 << 20
"""Bytes of an expectation that are read."""

_SHAPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("cell", "packages", "components", "adopted", "built_with"), dict),
    "cell_id": str,
    "lock_digest": (str, type(None)),
    "altered": str,
}

_OF_TEXTS: Mapping[str, type | tuple[type, ...]] = {"cell": (str, type(None)), "adopted": str, "built_with": str}
"""Tables, and what a value of each may be."""


def read_expected(path: Path) -> dict[str, Any]:
    """Read an expectation file.

    Raises:
        UsageError: it cannot be read or is no expectation.

    """
    try:
        with path.open("rb") as file:
            found = parse_json(file.read(EXPECTED_LIMIT + 1), limit=EXPECTED_LIMIT)
    except (OSError, ValueError) as error:
        raise UsageError(f"the list of what must be installed cannot be read: {error}", where=str(path)) from None
    if fault := shape_fault(found):
        raise UsageError(f"this is not a list of what must be installed: {fault}", where=str(path))
    assert isinstance(found, dict)  # noqa: S101 - it has the shape
    return found


def shape_fault(found: Any) -> str:
    """Return what is wrong with the shape of an expectation; nothing where it is right."""
    if not isinstance(found, dict) or not {"cell", "packages", "components"} <= found.keys():
        return "cell, packages or components are missing in it"
    for key, value in found.items():
        shape = _SHAPES.get(key)
        if shape and not isinstance(value, shape):
            return f"its {key} is no {'table' if shape is dict else 'text'}"
        if key in _OF_TEXTS and not all(isinstance(each, _OF_TEXTS[key]) for each in value.values()):
            return f"a value in its {key} is no text"
    return ""


def default_device(expected: Mapping[str, Any], level: Level) -> Device:
    """Return where the tests run by default: on GPUs when the cell's torch is a CUDA build and the level needs them."""
    return "cuda" if for_cuda(expected) and level is not Level.IMPORT else "cpu"


def for_cuda(expected: Mapping[str, Any]) -> bool:
    return str(expected.get("cell", {}).get("cuda", "cpu")).lower() not in {"cpu", "none", ""}
