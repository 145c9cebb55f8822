"""Reading the answers of probes: nothing here fails, whatever a command printed."""

import json
import re
from typing import Any

from envbuild.host.probe import Probe


def output_of(probe: Probe, *command: str) -> str | None:
    """Return what a command that ended well printed, without the white space around it; None for any other."""
    ran = probe.run(*command)
    return ran.out.strip() if ran and ran.code == 0 and ran.out.strip() else None


def line_of(text: str | None) -> str | None:
    """Return a text without the white space around it; None when nothing is left."""
    return text.strip() or None if text else None


def match_of(pattern: str, text: str | None) -> str | None:
    """Return the first group of the first match of `pattern`, if there is one."""
    found = re.search(pattern, text or "")
    return found.group(1) if found else None


def number_of(text: str | None) -> int | None:
    """Return the number that a text of digits alone writes."""
    return int(text) if text and text.isdigit() else None


def json_object(text: str | None) -> dict[str, Any]:
    """Return the JSON object that a text holds; an empty one when it holds none."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
