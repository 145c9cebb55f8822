"""Names of symbols: whose they are, which C++ ABI they are of, and how to print them."""

import re
from typing import Literal

from envbuild.util.names import shown

_OF_TORCH = re.compile(rb"_Z(?:T[VIS])?N?[VKRO]*(?:2at|3c10|5torch|6caffe2)\d")
_OF_PYTHON = re.compile(rb"_?Py[A-Z_]")
_NAME_START = re.compile(rb"\d+")
_NESTED = re.compile(rb"_Z(?P<what>T[VIS])?N?[VKRO]*")


def is_torchs(name: bytes) -> bool:
    """Return whether a symbol is of one of torch's C++ namespaces."""
    return _OF_TORCH.match(name) is not None


def is_pythons(name: bytes) -> bool:
    """Return whether a symbol is of CPython's C API."""
    return _OF_PYTHON.match(name) is not None


def string_abi(name: bytes) -> Literal["old", "new", ""]:
    """Return which `std::string` a mangled C++ name takes: the one before C++11, the one since, or none of them.

    The Itanium C++ ABI writes the first as `Ss`; the second is `std::__cxx11::basic_string`, which has no short form.
    """
    if not name.startswith(b"_Z"):
        return ""
    if b"7__cxx1112basic_string" in name:
        return "new"
    # `Ss` may also be a part of an identifier, which is written with its length before it
    rest, place = bytearray(), 2
    while match := _NAME_START.search(name, place):
        rest += name[place : match.start()] + b"."
        place = match.end() + int(match[0][:6])
    rest += name[place:]
    return "old" if b"Ss" in rest else ""


def shown_symbol(name: bytes) -> str:
    """Return a symbol for a message: `c10::Error::Error` of a mangled C++ name, or the name itself."""
    match = _NESTED.match(name)
    parts: list[str] = []
    place = match.end() if match else 0
    while match and (length := _NAME_START.match(name, place)):
        stop = length.end() + int(length[0][:6])
        parts.append(name[length.end() : stop].decode("ascii", "replace"))
        place = stop
    if not match or not parts:
        return shown(name.decode("ascii", "replace"), 100)
    if name[place : place + 2] in {b"C1", b"C2"}:
        parts.append(parts[-1])
    what = {b"TV": "vtable of ", b"TI": "type of ", b"TS": "type of "}.get(match["what"] or b"", "")
    return shown(what + "::".join(parts), 100)
