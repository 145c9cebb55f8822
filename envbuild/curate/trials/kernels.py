"""Trials of .cu files: all of a component as one translation unit, and those that do not pass so by themselves.

torch's headers take nearly all the time of a file, and are read once for all. So an `#include` that a file forgot, or one that
another file has, is not noticed; as with C++ files.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from envbuild.curate.trials.cuda import ERROR, NO_HALF, Checked, FrontEnd
from envbuild.errors import HostError
from envbuild.util.scratch import scratch

_MACRO = re.compile(rb"^\s*#\s*define\s+([A-Za-z_]\w*)", re.MULTILINE)
_FATAL = re.compile(r"\b(?:fatal|catastrophic) error\b")
_AGAIN = re.compile(r"\balready (?:been )?(?:defined|declared)\b|\bredefinition\b|\binvalid redeclaration\b")
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
    macros: list[tuple[str, ...]] = [(), NO_HALF]
    with scratch("cuda") as place:
        groups = _apart(units)
        while groups:
            group = groups.pop()
            texts = _errors(cuda, group, flags, macros, place)
            if not texts:
                yield from (KernelFile(unit, Checked("passed")) for unit in group)
            elif len(group) > 1:
                groups += _smaller(group, texts)
            else:
                found = [cuda.judge(text) for text in texts]
                undecided = next((each for each in found if each.verdict == "undecided"), None)
                yield KernelFile(group[0], undecided or found[0])


def _errors(
    cuda: FrontEnd, group: Sequence[Path], flags: Sequence[str], macros: list[tuple[str, ...]], place: Path
) -> list[str]:
    """Return what the front end prints of a group with each of `macros`; nothing where it takes the group with one of them.

    Which of them a build asks for differs by extension. The one that passed is moved to the front: the next files want it, too.
    """
    unit = group[0] if len(group) == 1 else _together(group, place)
    texts = []
    for defines in macros:
        try:
            text = cuda.errors(unit, (*flags, *defines), place, first=len(group) == 1)
        except HostError:
            if len(group) == 1:
                raise
            return ["it did not end"]
        if not text:
            macros.remove(defines)
            macros.insert(0, defines)
            return []
        texts.append(text)
        if _twice(text, group):
            break
    return texts


def _apart(units: Sequence[Path]) -> list[list[Path]]:
    """Return the files in groups that may pass together: one that includes others of them defines what those define."""
    names = {unit.name.encode() for unit in units}
    whole = [unit for unit in units if names & set(_OF_A_KERNEL.findall(unit.read_bytes()))]
    return [group for group in (whole, [unit for unit in units if unit not in whole]) if group]


def _together(units: Sequence[Path], place: Path) -> Path:
    unit = place / "together.cu"
    lines = []
    for each in units:
        lines.append(f'#include "{each}"')
        # what one file defines decides nothing in the next
        macros = dict.fromkeys(_MACRO.findall(each.read_bytes()))
        lines += [f"#undef {macro.decode()}" for macro in macros]
    unit.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return unit


def _twice(text: str, group: Sequence[Path]) -> bool:
    """Return whether an error is about a name that a header of several files defines each time: it has no guard."""
    units = {str(unit) for unit in group}
    return len(group) > 1 and any(
        match["path"] not in units and _AGAIN.search(match["text"]) for match in ERROR.finditer(text)
    )


def _smaller(group: Sequence[Path], texts: Sequence[str]) -> list[list[Path]]:
    """Return the parts of a group to read next: the files that an error names, and the others.

    Each file by itself where a header has no guard; two halves where the errors name no file, or reading ended at the first.
    """
    if _twice(texts[-1], group):
        return [[unit] for unit in group]
    places = min(({match["path"] for match in ERROR.finditer(text)} for text in texts), key=len)
    named = [unit for unit in group if str(unit) in places]
    if not 0 < len(named) < len(group) or any(map(_FATAL.search, texts)):
        named = list(group[len(group) // 2 :])
    return [named, [unit for unit in group if unit not in named]]
