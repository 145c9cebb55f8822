"""Trials of .cu files: all of a component as one translation unit, and those that do not pass so by themselves.

torch's headers take nearly all the time of a file, and are read once for all. So an `#include` that a file forgot, or one that
another file has, is not noticed; as with C++ files.
"""

import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from envbuild.curate.trials import together
from envbuild.curate.trials.cuda import ERROR, NO_HALF, FrontEnd
from envbuild.curate.trials.known import Checked, Known
from envbuild.errors import HostError
from envbuild.util.scratch import scratch

_FATAL = re.compile(r"\b(?:fatal|catastrophic) error\b")
_AGAIN = re.compile(r"\balready (?:been )?(?:defined|declared)\b|\bredefinition\b|\binvalid redeclaration\b")
_WORD = re.compile(rb"[A-Za-z_]\w*")
_DEFINED = re.compile(r"""["']((?:(?:[A-Za-z_]\w*|<unnamed>)::)*[A-Za-z_]\w*)(?:[(<][^"']*)?["']""")
"""What is defined again: "load_store(T *, int)", "<unnamed>::Add", 'ndim'."""
_NUMBERED = re.compile(r"\b([A-Za-z_]\w*?)(?:_of_\d+)+\b")
_ROUNDS = 12
"""How often a group is read with other names."""


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
    root = cuda.root
    code = together.code_under(root)
    names = [os.path.relpath(unit, root) for unit in units]
    flags = tuple(flags)
    plain = [flag.replace(f"{root}/", "") for flag in flags]
    asked = (cuda.program, cuda.includes, *plain, *names, *(os.path.relpath(path, root) for path in code))
    if known := cuda.known.same(asked, root):
        yield from (KernelFile(root / name, checked) for name, checked in known.items())
        return
    cuda.known.start()
    found = {}
    for each in _each(cuda, together.Together(code, cuda.known), units, flags):
        found[os.path.relpath(each.path, root)] = each.checked
        yield each
    cuda.known.keep(asked, root, found)


def _each(
    cuda: FrontEnd, files: together.Together, units: Sequence[Path], flags: Sequence[str]
) -> Iterator[KernelFile]:
    macros: list[tuple[str, ...]] = [(), NO_HALF]
    with scratch("cuda") as place:
        groups = _apart(units, cuda.known)
        while groups:
            group = groups.pop()
            texts = _errors(cuda, files, group, flags, macros, place)
            if not texts:
                yield from (KernelFile(unit, Checked("passed")) for unit in group)
            elif len(group) > 1:
                groups += _smaller(group, texts)
            else:
                found = [cuda.judge(text) for text in texts]
                undecided = next((each for each in found if each.verdict == "undecided"), None)
                cuda.known.refuse(group[0])
                yield KernelFile(group[0], undecided or found[0])


def _errors(
    cuda: FrontEnd,
    files: together.Together,
    group: Sequence[Path],
    flags: Sequence[str],
    macros: list[tuple[str, ...]],
    place: Path,
) -> list[str]:
    """Return what the front end prints of a group with each of `macros`; nothing where it takes the group with one of them.

    Which of them a build asks for differs by extension. The one that passed is moved to the front: the next files want it, too.
    """
    texts = []
    for defines in macros:
        try:
            text = _read(cuda, files, group, (*flags, *defines), place)
        except HostError:
            if len(group) == 1:
                raise
            return ["it did not end"]
        if not text:
            macros.remove(defines)
            macros.insert(0, defines)
            return []
        texts.append(text)
        if _twice(text, group):  # whatever the macros are
            break
    return texts


def _read(cuda: FrontEnd, files: together.Together, group: Sequence[Path], flags: Sequence[str], place: Path) -> str:
    """Return what the front end prints of a group. A name that two of its files define gets a number in each; they are read again."""
    if len(group) == 1:
        return cuda.errors(group[0], flags, place)
    known = cuda.known
    text = ""
    for _ in range(_ROUNDS):
        text = cuda.errors(files.write(group, place), flags, place, first=False)
        numbered = {name.rpartition("::")[2] for unit in group for name in known.renamed(unit)}
        if not numbered and not text:
            return ""
        outside = known.words_outside()
        with_numbers = (match[1] for word in outside or () if (match := _NUMBERED.fullmatch(word)))
        new = [known.fix(name) for name in numbered & {*(outside or ()), *with_numbers, *_NUMBERED.findall(text)}]
        if not any(new) and text and outside is not None:
            new = [known.rename(unit, names) for unit, names in _names_in(text, group, files, outside)]
        if not any(new):
            return text
    return text or "there was no end of names"


def _names_in(
    text: str, group: Sequence[Path], files: together.Together, outside: Collection[str]
) -> Iterator[tuple[Path, set[str]]]:
    """Yield the files of a group that define, or include what defines, a name that another one does, with these names.

    Args:
        text: what the front end printed.
        group: the files.
        files: they and their headers.
        outside: the words of the headers of torch and CUDA, which get no number.

    """
    again = ((Path(match["path"]), _DEFINED.search(match["text"])) for match in _twice(text, group))
    for path, name in dict.fromkeys((path, found[1]) for path, found in again if found):
        last = name.rpartition("::")[2]
        if last in outside or _NUMBERED.fullmatch(last) or not files.may_rename(last, group):
            continue
        if path in group:
            mine = [unit for unit in group if last.encode() in set(_WORD.findall(unit.read_bytes()))]
        else:
            mine = [unit for unit in group if path in files.reached(unit)]
        yield from ((unit, {name}) for unit in mine)


def _apart(units: Sequence[Path], known: Known) -> list[list[Path]]:
    """Return the files in groups that may pass together.

    One that includes others of them defines what those define. One that did not pass before does not pass with others.
    """
    names = {unit.name for unit in units}
    alone = [
        unit for unit in units if known.is_refused(unit) or not together.is_plain(unit) or together.takes_away(unit)
    ]
    others = [unit for unit in units if unit not in alone]
    whole = [unit for unit in others if names & together.included(unit)]
    groups = [*([unit] for unit in alone), whole, [unit for unit in others if unit not in whole]]
    return [group for group in groups if group]


def _twice(text: str, group: Sequence[Path]) -> list[re.Match[str]]:
    """Return the errors about a name that two files of a group define, or a header of theirs that has no guard."""
    return [match for match in ERROR.finditer(text) if _AGAIN.search(match["text"])] if len(group) > 1 else []


def _smaller(group: Sequence[Path], texts: Sequence[str]) -> list[list[Path]]:
    """Return the parts of a group to read next: the files that an error names, and the others.

    A file goes by itself where it, or a header that it includes, defines what was defined before; each file does where none is
    known to. Two halves where the errors name no file, or reading ended at the first.
    """
    if again := {Path(match["path"]) for match in _twice(texts[-1], group)}:
        names = {path.name for path in again if path not in group}
        alone = [unit for unit in group if unit in again or names & together.included(unit)]
        rest = [unit for unit in group if unit not in alone]
        return [*([unit] for unit in alone), rest] if alone and rest else [[unit] for unit in group]
    places = min(({match["path"] for match in ERROR.finditer(text)} for text in texts), key=len)
    named = [unit for unit in group if str(unit) in places]
    if not 0 < len(named) < len(group) or any(map(_FATAL.search, texts)):
        named = list(group[len(group) // 2 :])
    return [named, [unit for unit in group if unit not in named]]
