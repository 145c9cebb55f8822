"""Trials of .cu files: all of a component as one translation unit, and those that do not pass so by themselves.

torch's headers take nearly all the time of a file, and are read once for all. So an `#include` that a file forgot, or one that
another file has, is not noticed; as with C++ files.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from envbuild.curate.trials.cuda import ERROR, NO_HALF, Checked, FrontEnd
from envbuild.util.scratch import scratch

_OF_A_KERNEL = re.compile(rb'^\s*#\s*include\s*"(?:[^"\n]*/)?([^"/\n]+\.cu)"', re.MULTILINE)


class KernelFile(NamedTuple):
    """A .cu file and what became of it."""

    path: Path
    checked: Checked


def check_kernels(cuda: FrontEnd, units: Sequence[Path], flags: Sequence[str]) -> Iterator[KernelFile]:
    """Type-check .cu files and yield what became of each, as soon as it is known.

    Args:
        cuda: what reads them.
        units: the files.
        flags: the C++ standard, macros and the component's own folders of headers.

    Raises:
        HostError: the front end did not end.

    """
    # which of the two a build asks for differs by extension; what passed last comes first
    macros: list[tuple[str, ...]] = [(), NO_HALF]
    with scratch("cuda") as place:
        groups = _apart(units)
        while groups:
            group = groups.pop()
            unit = group[0] if len(group) == 1 else _together(group, place)
            texts = []
            for defines in tuple(macros):
                text = cuda.errors(unit, (*flags, *defines), place)
                if not text:
                    macros = [defines, *(each for each in macros if each != defines)]
                    break
                texts.append(text)
            else:
                if len(group) > 1:
                    groups += _halves(group, texts)
                    continue
                found = [cuda.judge(text) for text in texts]
                yield KernelFile(unit, next((each for each in found if each.verdict == "undecided"), found[0]))
                continue
            yield from (KernelFile(each, Checked("passed")) for each in group)


def _apart(units: Sequence[Path]) -> list[list[Path]]:
    """Return the files in groups that may pass together: one that includes others of them defines what those define."""
    names = {unit.name.encode() for unit in units}
    whole = [unit for unit in units if names & set(_OF_A_KERNEL.findall(unit.read_bytes()))]
    return [group for group in (whole, [unit for unit in units if unit not in whole]) if group]


def _together(units: Sequence[Path], place: Path) -> Path:
    unit = place / "together.cu"
    unit.write_text("".join(f'#include "{each}"\n' for each in units), encoding="utf-8")
    return unit


def _halves(group: Sequence[Path], texts: Sequence[str]) -> list[list[Path]]:
    """Return a group in two: those with an error of their own, such as the second one that defines a name, and the others."""
    places = min(({match["path"] for match in ERROR.finditer(text)} for text in texts), key=len)
    named = [unit for unit in group if str(unit) in places]
    if not 0 < len(named) < len(group):
        named = list(group[len(group) // 2 :])
    return [named, [unit for unit in group if unit not in named]]
