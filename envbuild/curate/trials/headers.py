"""Trials of headers: whether each of torch's headers that a component's C++ includes is in torch's wheel.

No compiler is asked, so that a pair takes a fraction of a second. What stands behind a condition that is not known counts as
guarded.
"""

import ast
import posixpath
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from envbuild.components.base import HostSources
from envbuild.util.bounded import read_text
from envbuild.util.names import shown

CXX = (".cpp", ".cc", ".cxx")
_CODE = (*CXX, ".cu", ".cuh", ".h", ".hpp")
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(include|ifdef|ifndef|if|elif|else|endif)\b[ \t]*(.*)$", re.MULTILINE)
_HEADER = re.compile(r"<((?:torch|ATen|c10|caffe2|pybind11)/[^>]+)>")
_DEFINED = re.compile(r"defined\s*\(?\s*(\w+)\s*\)?")
_STANDARD = re.compile(r"-std=c\+\+(\d\d)\b")
_DEFINE = re.compile(r"-D\w+(?:=\w+)?")
UMBRELLA = "ATen/ATen.h"
"""The header that every extension includes, sooner or later."""
_STABLE = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")
"""The headers of torch's stable ABI, which do not include it."""
_REQUIRED = re.compile(r"__cplusplus\s*<\s*(\d{6})L")
_STANDARDS = {"201103": 11, "201402": 14, "201703": 17, "202002": 20, "202302": 23}
_WHERE = ("torch/include/", "torch/include/torch/csrc/api/include/")


@dataclass(frozen=True, kw_only=True)
class HeadersFound:
    """What one trial of headers found."""

    files: int
    present: int
    guarded: int
    missing: tuple[str, ...]
    """`FILE:LINE: <header>`."""


def code_files(folder: Path, sources: HostSources, torch: str = "", endings: Collection[str] = _CODE) -> list[Path]:
    """Return the files of the component's C++ that its build takes with this release of torch, in order."""
    found = (
        path
        for each in sources.folders
        for path in (folder / each).rglob("*")
        if path.suffix in endings and path.is_file()
    )
    left = set()
    for newer, (spec, older) in sources.instead.items():
        if (folder / newer).is_file():
            left.add(folder / (older if SpecifierSet(spec).contains(torch) else newer))
    return sorted(set(found) - left)


def stated_flags(folder: Path, sources: HostSources) -> tuple[tuple[str, ...], int | None]:
    """Return the macros that a build defines by default, as `-DNAME`, and the C++ standard that it states, if any.

    A flag behind `if` counts where the condition is `os.getenv(NAME, DEFAULT)` with a default that is not 0.
    """
    defines: list[str] = []
    standards: list[int] = []
    for text, tree in _build_files(folder, sources):
        functions = [
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == sources.cxx_flags
        ]
        for stating in [ast.get_source_segment(text, node) or "" for node in functions] or [text]:
            standards += [int(number) for number in _STANDARD.findall(stating)]
        defines += _defines(tree.body, on=True)
    return tuple(dict.fromkeys(defines)), max(standards, default=None)


def without_asserts(folder: Path, sources: HostSources) -> bool:
    """Return whether a build states `-DNDEBUG` somewhere, under whatever condition, and nowhere the opposite."""
    stated = set(_stated_words(folder, sources))
    return "-DNDEBUG" in stated and "-UNDEBUG" not in stated


def kernels_of(folder: Path, sources: HostSources, torch: str) -> list[Path]:
    """Return the .cu files that a build compiles with this release of torch, in order.

    A build that names most of them one by one compiles no others: releases left some behind.
    """
    found = code_files(folder, sources, torch, (".cu",))
    stated = {posixpath.basename(word) for word in _stated_words(folder, sources)}
    named = [path for path in found if path.name in stated]
    return named if 2 * len(named) > len(found) else found


def _stated_words(folder: Path, sources: HostSources) -> Iterator[str]:
    """Yield the words of every text in the files of a build; of comments none."""
    for _, tree in _build_files(folder, sources):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from node.value.split()


def _build_files(folder: Path, sources: HostSources) -> Iterator[tuple[str, ast.Module]]:
    """Yield text and syntax tree of each file that states a build's flags; what is missing or no Python is left out."""
    for name in sources.flags_in:
        try:
            text = read_text(folder / name)
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield text, tree


def _defines(body: list[ast.stmt], *, on: bool) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _defines(statement.body, on=on and _is_default(statement.test))
            continue
        inner = getattr(statement, "body", None)
        if isinstance(inner, list):
            yield from _defines(inner, on=on)
        elif on and isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign | ast.Return):
            for node in ast.walk(statement):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and _DEFINE.fullmatch(node.value):
                    yield node.value


def _is_default(test: ast.expr) -> bool:
    for node in ast.walk(test):
        called = isinstance(node, ast.Call) and ast.unparse(node.func) in {"os.getenv", "os.environ.get"}
        if called and isinstance(node, ast.Call) and len(node.args) == 2 and isinstance(node.args[1], ast.Constant):
            return str(node.args[1].value) not in {"0", "", "False", "None"}
    return False


def includes_of(text: str, defines: Collection[str]) -> Iterator[tuple[int, str, bool]]:
    """Yield line, header and whether it is surely included, for each header of torch that `text` names.

    Args:
        text: a C++ file.
        defines: names of macros that are surely defined; of others nothing is known.

    """
    stack: list[str] = []  # "on", "off" or "guarded" per open condition
    for match in _DIRECTIVE.finditer(text):
        word, rest = match[1], match[2].strip()
        if word in {"ifdef", "ifndef", "if"}:
            stack.append(_state(word, rest, defines))
        elif word == "elif" and stack:
            stack[-1] = "off" if stack[-1] == "on" else "guarded"
        elif word == "else" and stack:
            stack[-1] = {"on": "off", "off": "on"}.get(stack[-1], "guarded")
        elif word == "endif" and stack:
            stack.pop()
        elif word == "include" and "off" not in stack and (header := _HEADER.match(rest)):
            yield text.count("\n", 0, match.start()) + 1, header[1], "guarded" not in stack


def _state(word: str, rest: str, defines: Collection[str]) -> str:
    if word == "if":
        names = _DEFINED.fullmatch(rest)
        if not names:
            return "guarded"
        word, rest = "ifdef", names[1]
    name = rest.split()[0] if rest else ""
    if word == "ifdef":
        return "on" if name in defines else "guarded"
    return "off" if name in defines else "on"  # an include guard, or a platform that is not this one


def required_standard(text: str) -> int | None:
    """Return the C++ standard that a header of torch refuses to do without, such as 20; None where it names none."""
    found = _REQUIRED.search(text)
    return _STANDARDS.get(found[1][:6]) if found else None


def try_headers(
    folder: Path, sources: HostSources, torch_paths: Collection[str], required: int | None, *, torch: str = ""
) -> HeadersFound:
    """Look up each header of torch that the component's C++ includes.

    Args:
        folder: the component's source.
        sources: where its C++ lies.
        torch_paths: the files in torch's wheel.
        required: the C++ standard without which torch's headers refuse to be compiled.
        torch: the release, where the build takes other files with some releases.

    """
    stated = stated_flags(folder, sources)[1]
    missing = []
    names = {define.removeprefix("-D").partition("=")[0] for define in stated_flags(folder, sources)[0]}
    files = code_files(folder, sources, torch)
    present = guarded = 0
    refusing = False
    for path in files:
        try:
            text = read_text(path)
        except (OSError, ValueError):
            continue
        for line, header, sure in includes_of(text, names):
            refusing |= sure and not header.startswith(_STABLE)
            if any(where + header in torch_paths for where in _WHERE):
                present += 1
            elif sure:
                missing.append(shown(f"{path.relative_to(folder)}:{line}: <{header}>"))
            else:
                guarded += 1
    if refusing and stated is not None and required is not None and stated < required:
        # torch's cpp_extension adds its own standard only where a build states none
        standard = f"{sources.flags_in[0]} states -std=c++{stated}"
        missing.insert(0, f"{standard}, and torch's {UMBRELLA} refuses less than C++{required}")
    return HeadersFound(files=len(files), present=present, guarded=guarded, missing=tuple(missing))
