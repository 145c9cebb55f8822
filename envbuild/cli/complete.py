"""What a shell completes: the versions of an axis, the stacks.

Read from the data files alone: a shell waits at every key, so nothing here loads the matrix, its models or the solver.
"""

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from envbuild.paths import data_dir

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem

Complete = Callable[["click.Context", "click.Parameter", str], "list[CompletionItem]"]

_WORDS = {"asked": ("auto", "none"), "default": ("auto", "none"), "always": ("auto",)}
"""What an axis takes besides its releases, by its use."""


def values_of(axis: str) -> list[tuple[str, str]]:
    """Return what can stand after `--AXIS`, newest version first, each with what it means where that helps.

    Builds of one version for several CUDA variants (2.8.0+cu126) are one version; what a release takes only when it is
    named (an alpha, a commit) comes last. Nothing where the axis has no file or the file cannot be read.
    """
    import tomli

    try:
        stated = tomli.loads((data_dir("matrices") / f"{axis}.toml").read_text(encoding="utf-8"))
        head, releases = stated["axis"], stated["release"]
    except (OSError, ValueError, KeyError):
        return []
    found: dict[str, str] = {}
    by_version = head.get("scheme") != "name"
    for release in sorted(releases, key=_order, reverse=True) if by_version else releases:
        version = str(release["version"])
        found.setdefault(version.partition("+")[0] if by_version else version, "")
        for alias in release.get("aliases", ()):
            found.setdefault(str(alias), version)
    extra = ("auto",) if axis == "driver" else _WORDS.get(head.get("use"), ())
    return [*found.items(), *((word, "") for word in extra if word not in found)]


def _order(release: dict[str, Any]) -> tuple[bool, bool, list[int]]:
    """Return the key by which releases are sorted; PEP 440 itself would load a library for the same order."""
    version = str(release["version"])
    final = not release.get("asked") and re.fullmatch(r"[\d.]+(?:\+.*|\.post\d+)?", version) is not None
    return final, version[:1].isdigit(), [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:6]]


def completing(axis: str) -> Complete:
    """Return what completes the value of the flag of `axis`."""

    def complete(_context: "click.Context", _option: "click.Parameter", begun: str) -> "list[CompletionItem]":
        return list(_beginning(values_of(axis), begun))

    return complete


def complete_stack(_context: "click.Context", _option: "click.Parameter", begun: str) -> "list[CompletionItem]":
    """Complete `--stack`: a stack by its name, or a file."""
    from click.shell_completion import CompletionItem

    names = sorted(path.stem for path in (data_dir("matrices") / "stacks").glob("*.toml"))
    found = list(_beginning(((name, "") for name in names), begun))
    return found or [CompletionItem(begun, type="file")]


def complete_axis(_context: "click.Context", _argument: "click.Parameter", begun: str) -> "list[CompletionItem]":
    """Complete the name of an axis."""
    from envbuild.cli.axes import axis_names

    return list(_beginning(((name, "") for name in sorted(axis_names())), begun))


def _beginning(values: Any, begun: str) -> Iterator["CompletionItem"]:
    from click.shell_completion import CompletionItem

    for value, about in values:
        if value.lower().startswith(begun.lower()):
            yield CompletionItem(value, help=about or None)
