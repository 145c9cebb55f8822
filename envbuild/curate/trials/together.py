"""Several .cu files as one translation unit, in which a name that two of them define gets a number in each.

A number must change nothing else. So no name gets one that a condition of the preprocessor asks for, that is in a guarded header
of several files, that is a macro of another header, or that is a word in a header of torch or CUDA.
"""

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from envbuild.curate.trials.known import TOGETHER, Known

_HEADERS = (".h", ".hh", ".hpp", ".hxx", ".cuh", ".cu", ".inl", ".inc", ".ipp", ".def", ".cpp", ".cc", ".cxx", ".c")
_MACRO = re.compile(rb"^\s*#\s*(define|undef)\s+([A-Za-z_]\w*)", re.MULTILINE)
_INCLUDE = re.compile(rb'^\s*#\s*include\s*([<"])([^">\n]+)[">]', re.MULTILINE)
_DIRECTIVE = re.compile(rb"^\s*#\s*(?:if|ifdef|ifndef|elif|define|undef)\b.*$", re.MULTILINE)
_GUARD = re.compile(
    rb"\A(?:\s|//[^\n]*|/\*.*?\*/)*#\s*(?:pragma\s+once|ifndef\s+(\w+)\s*\n\s*#\s*define\s+\1)\b", re.DOTALL
)
_PLAIN = re.compile(r"[\w./+=@ -]+")
"""A path that an `#include` line and a command line hold as it is."""


def is_plain(unit: Path) -> bool:
    """Return whether the path of a file can stand in an `#include` line."""
    return _PLAIN.fullmatch(str(unit)) is not None


def code_under(root: Path) -> list[Path]:
    """Return every file of a component that an `#include` may name."""
    return sorted(path for path in root.rglob("*") if path.suffix in _HEADERS and path.is_file())


def included(file: Path) -> set[str]:
    """Return the names of the files that a file includes, without their folders."""
    return {os.fsdecode(path).rpartition("/")[2] for _, path in _INCLUDE.findall(file.read_bytes())}


class Together:
    """The .cu files of a component and their headers.

    Args:
        code: every file of the component that an `#include` may name.
        known: which names are numbered.

    """

    def __init__(self, code: Sequence[Path], known: Known) -> None:
        self._code = code
        self.known = known
        self._reached: dict[Path, list[Path]] = {}

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for path in self._code:
            found.setdefault(path.name, []).append(path)
        return found

    def reached(self, unit: Path) -> list[Path]:
        """Return a file and the component's headers that it includes, and that these include."""
        if unit not in self._reached:
            seen = {unit: None}
            left = [unit]
            while left:
                names = included(left.pop())
                new = [path for name in names for path in self._by_name.get(name, ()) if path not in seen]
                seen |= dict.fromkeys(new)
                left += new
            self._reached[unit] = list(seen)
        return self._reached[unit]

    def may_rename(self, name: str, units: Sequence[Path]) -> bool:
        """Return whether a number after a name, which is without its scope, changes nothing else in these files."""
        word = re.compile(rb"\b" + name.encode() + rb"\b")
        reaching: dict[Path, int] = {}
        for unit in units:
            for path in self.reached(unit):
                reaching[path] = reaching.get(path, 0) + 1
        for path, number in reaching.items():
            text = path.read_bytes()
            if not word.search(text):
                continue
            if any(word.search(line) for line in _DIRECTIVE.findall(text)) or (number > 1 and _GUARD.match(text)):
                return False
        return True

    def write(self, units: Sequence[Path], place: Path) -> Path:
        """Write the translation unit into the folder `place`."""
        lines = []
        for number, unit in enumerate(units):
            # what one file defines decides nothing in the next
            macros = [
                macro.decode() for macro in dict.fromkeys(macro for _, macro in _MACRO.findall(unit.read_bytes()))
            ]
            numbered = dict.fromkeys(name.rpartition("::")[2] for name in self.known.renamed(unit))
            lines += [f'#pragma push_macro("{macro}")' for macro in macros]
            for name in numbered:
                lines += [f"#ifdef {name}", f"#error {name}_of_{number} is a macro", "#endif"]
                lines.append(f"#define {name} {name}_of_{number}")
            lines.append(f'#include "{unit}"')
            lines += [f"#undef {name}" for name in numbered]
            lines += [f'#pragma pop_macro("{macro}")' for macro in reversed(macros)]
        made = place / TOGETHER
        made.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return made


def takes_away(unit: Path) -> bool:
    """Return whether a file undefines a macro that it has not defined itself."""
    defined = set[bytes]()
    for kind, macro in _MACRO.findall(unit.read_bytes()):
        if kind == b"undef" and macro not in defined:
            return True
        defined.add(macro)
    return False
