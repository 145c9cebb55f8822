"""One ELF file -> what the loader and a GPU would need of it. The file is not trusted.

pyelftools reads the header and the tables of segments and sections: it is Python, so that a hostile file can raise and
cannot corrupt this process. The tables of symbols and versions are unpacked here, each in one go: libtorch_cpu.so has
200,000 symbols, and an object for each takes minutes. Every offset and count of the file is bounded by its size.
"""

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, Literal

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile

from envbuild.util.names import shown
from envbuild.verify.binaries.gpu_code import GpuCode, GpuCodeError, read_gpu_code

MAGIC = b"\x7fELF"
MACHINES = {"EM_X86_64": "x86-64", "EM_AARCH64": "aarch64"}
_SEGMENTS, _SECTIONS = 1024, 65_536
_TABLE = 512 << 20
"""Bytes of one table at most; the names of libtorch_cpu.so's symbols have 30 MB."""
_SYMBOLS = 8_000_000
_VERSIONS = 65_536
_TAGS = 65_536
_LIBRARIES = 1000
"""Libraries that one file may need, and folders that it may search."""
_TEXT = 16_384
"""Bytes of one name or of one path list at most: a mangled C++ name may have thousands."""
_OVERLAP, _NAMES = 8, 16 << 20
"""Bytes of names that are taken of a table: this many times its own, and as many again. A linker lets a name be the end of
another one, and a version goes to many names."""
_SCANNED = 64 << 20
"""Bytes of constants that are searched for names of libraries."""

# Tags of the dynamic section (System V gABI, chapter 5; the GNU extensions in glibc's elf.h)
_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH, _FLAGS_1 = 1, 5, 10, 14, 15, 29, 0x6FFFFFFB
_NODEFLIB, _PIE = 0x800, 0x8000000
_VERDEF_BASE = 1
_HIDDEN = 0x8000
_SYMBOL = struct.Struct("<IBBHQQ")
# CUDA libraries open others of the same family by name. What they name is read of these files alone.
_OPENS = re.compile(r"libcudnn|libnvrtc|libnvJitLink|libcublas|libcusolver|libcusparse|libcufft")
_OPENED = re.compile(
    rb"(?<![\w.+-])lib(?:cudnn\w{0,40}|nvrtc(?:-builtins)?|nvJitLink|cublas(?:Lt)?|cusparse|cusolver)"
    rb"(?:\.alt)?\.so(?:\.\d{1,4}){0,3}(?=\x00)"
)


class ElfError(ValueError):
    """An ELF file that is damaged or out of bounds."""


@dataclass(frozen=True, kw_only=True)
class Binary:
    """One ELF file. Names of symbols are bytes, as the file has them."""

    kind: Literal["library", "program", "other"]
    machine: str
    """`x86-64`, `aarch64`, or as the ELF header names another one, which is not read any further."""
    size: int
    build_id: str = ""
    """In hex; empty where its linker wrote none."""
    interpreter: str = ""
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    """DT_RPATH, which the loader reads only where there is no DT_RUNPATH."""
    runpath: tuple[str, ...] = ()
    no_default: bool = False
    wanted: tuple[tuple[bytes, str], ...] = ()
    """Symbols that somebody else must define, without weak ones: name, and version or an empty text."""
    offered: frozenset[bytes] = frozenset()
    """Symbols that it defines: the name, and `name@version` where it has versions."""
    versions: frozenset[str] = frozenset()
    """Versions that it defines."""
    wanted_versions: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By the library that is to define them."""
    gpu: GpuCode | None = None
    opened: frozenset[str] = frozenset()
    """Libraries of CUDA that it names in its constants, to open them as it runs."""
    fault: str = ""
    """Why a part of it could not be read."""
    name_bytes: int = field(default=0, compare=False)
    """Bytes of the names that are kept of it."""

    def defines(self, name: bytes, version: str) -> bool:
        """Return whether the loader would bind a symbol to this file; one without versions serves any."""
        if version and self.versions:
            return name + b"@" + version.encode() in self.offered
        return name in self.offered


def read_elf(file: IO[bytes], name: str, size: int) -> Binary:
    """Read an ELF file.

    Args:
        file: the file, from its first byte; it can go back.
        name: its base name: what a library of CUDA opens is looked for in those alone.
        size: its size in bytes.

    Raises:
        ElfError: it is none, it is damaged, or it is out of bounds.

    """
    try:
        return _Reader(file, size).read(name)
    except ElfError:
        raise
    # what pyelftools raises on damaged files, and what Python raises on the numbers in them
    except (
        *(ELFError, ConstructError, struct.error, ValueError, OverflowError, OSError),
        *(KeyError, IndexError, AttributeError, TypeError, AssertionError, MemoryError, RecursionError),
    ) as error:
        raise ElfError(f"a damaged ELF file ({type(error).__name__}: {shown(str(error), 120)})") from None


class _Reader:
    def __init__(self, file: IO[bytes], size: int) -> None:
        self.file, self.size, self.name_bytes = file, size, 0
        file.seek(0)
        self.elf = ELFFile(file)

    def read(self, name: str) -> Binary:
        header = self.elf.header
        machine = str(header["e_machine"])
        kind = {"ET_DYN": "library", "ET_EXEC": "program"}.get(str(header["e_type"]), "other")
        if kind == "other" or machine not in MACHINES or self.elf.elfclass != 64 or not self.elf.little_endian:
            return Binary(kind="other", machine=MACHINES.get(machine, shown(machine, 40)), size=self.size)
        sections = self._sections()
        if any(name == ".dynamic" and h["sh_type"] == "SHT_NOBITS" for name, h in sections):  # debug information alone
            return Binary(kind="other", machine=MACHINES[machine], size=self.size)
        segments = self._segments()
        tags = self._tags(segments)
        loads = [s for s in segments if s["p_type"] == "PT_LOAD"]
        single = dict(tags)
        strings = b""
        if _STRTAB in single:
            strings = self._bytes(_offset_of(loads, single[_STRTAB]), single.get(_STRSZ, 0))
        flags = single.get(_FLAGS_1, 0)
        interpreter = next((s for s in segments if s["p_type"] == "PT_INTERP"), None)
        # A position-independent program is ET_DYN as a library is: one has an interpreter, or says so in its flags.
        # libc.so.6 has both an interpreter and its own name.
        if kind == "library" and (flags & _PIE or (interpreter is not None and _SONAME not in single)):
            kind = "program"
        fault, gpu = "", None
        wanted, offered, versions, wanted_versions = self._symbols(sections)
        try:
            gpu = read_gpu_code(self.file, self._places(sections))
        except GpuCodeError as error:
            fault = str(error)
        text = _Strings(strings)
        return Binary(
            kind="program" if kind == "program" else "library",
            machine=MACHINES[machine],
            size=self.size,
            build_id=self._build_id(sections),
            interpreter=self._interpreter(interpreter),
            soname=text.at(single[_SONAME]) if _SONAME in single else "",
            needed=tuple(dict.fromkeys(text.at(value) for tag, value in tags if tag == _NEEDED))[:_LIBRARIES],
            rpath=_paths(text.at(single[_RPATH])) if _RPATH in single else (),
            runpath=_paths(text.at(single[_RUNPATH])) if _RUNPATH in single else (),
            no_default=bool(flags & _NODEFLIB),
            wanted=wanted,
            offered=offered,
            versions=versions,
            wanted_versions=wanted_versions,
            gpu=gpu,
            opened=self._opened(sections) if _OPENS.match(name) else frozenset(),
            fault=fault,
            name_bytes=self.name_bytes,
        )

    def _bytes(self, offset: int, count: int, limit: int = _TABLE) -> bytes:
        if offset < 0 or count < 0 or count > limit or offset + count > self.size:
            raise ElfError("a table out of bounds")
        self.file.seek(offset)
        body = self.file.read(count)
        if len(body) != count:
            raise ElfError("a table that ends behind the end of the file")
        return body

    def _segments(self) -> list[Any]:
        count = self.elf.num_segments()
        if not 0 <= count <= _SEGMENTS:
            raise ElfError(f"{count} segments")
        return [self.elf.get_segment(number).header for number in range(count)]

    def _sections(self) -> list[tuple[str, Any]]:
        count = self.elf.num_sections()
        if not 0 <= count <= _SECTIONS or count * 64 > self.size:
            raise ElfError(f"{count} sections")
        # the header alone: a section's own class would read its content
        headers = [self.elf._get_section_header(number) for number in range(count)]  # noqa: SLF001
        index = self.elf.get_shstrndx()
        if not headers or index >= len(headers):
            return [("", header) for header in headers]
        names = _Strings(self._bytes(headers[index]["sh_offset"], headers[index]["sh_size"], 16 << 20))
        return [(names.at(header["sh_name"]), header) for header in headers]

    def _tags(self, segments: list[Any]) -> list[tuple[int, int]]:
        dynamic = next((s for s in segments if s["p_type"] == "PT_DYNAMIC"), None)
        if dynamic is None:
            return []
        body = self._bytes(dynamic["p_offset"], dynamic["p_filesz"] // 16 * 16, 16 * _TAGS)
        tags = []
        for tag, value in struct.iter_unpack("<QQ", body):
            if tag == 0:
                break
            tags.append((tag, value))
        return tags

    def _interpreter(self, segment: Any) -> str:
        if segment is None:
            return ""
        return _Strings(self._bytes(segment["p_offset"], min(segment["p_filesz"], _TEXT))).at(0)

    def _places(self, sections: list[tuple[str, Any]]) -> Iterator[tuple[int, int]]:
        for name, header in sections:
            if name == ".nv_fatbin" and header["sh_type"] != "SHT_NOBITS":
                offset, size = header["sh_offset"], header["sh_size"]
                if offset + size > self.size:
                    raise GpuCodeError("a section of GPU code out of bounds")
                yield offset, size

    def _table(self, header: Any) -> bytes:
        return self._bytes(header["sh_offset"], header["sh_size"])

    def _symbols(
        self, sections: list[tuple[str, Any]]
    ) -> tuple[tuple[tuple[bytes, str], ...], frozenset[bytes], frozenset[str], dict[str, frozenset[str]]]:
        """Return what is wanted, what is offered, the versions defined, and those that are wanted, by library."""
        by_type = {header["sh_type"]: header for _, header in reversed(sections)}
        table = by_type.get("SHT_DYNSYM")
        if table is None:
            return (), frozenset(), frozenset(), {}
        if table["sh_link"] >= len(sections) or table["sh_size"] // _SYMBOL.size > _SYMBOLS:
            raise ElfError("a table of symbols out of bounds")
        strings = self._table(sections[table["sh_link"]][1])
        text = _Strings(strings)
        names: dict[int, str] = {}
        defined, wanted_versions = set(), {}
        if (header := by_type.get("SHT_GNU_verdef")) is not None:
            defined = self._defined(self._table(header), text, names)
        if (header := by_type.get("SHT_GNU_verneed")) is not None:
            wanted_versions = self._needed_versions(self._table(header), text, names)
        body = self._table(table)
        count = len(body) // _SYMBOL.size
        header = by_type.get("SHT_GNU_versym")
        numbers: tuple[int, ...] = (0,) * count
        if header is not None:
            raw = self._table(header)
            numbers = struct.unpack(f"<{min(count, len(raw) // 2)}H", raw[: 2 * count])
        wanted: dict[tuple[bytes, str], None] = {}
        offered = set()
        end = len(strings)
        for (start, info, _, section, _, _), number in zip(
            _SYMBOL.iter_unpack(body[: count * _SYMBOL.size]), numbers, strict=False
        ):
            bind = info >> 4
            if bind == 0 or start == 0 or start >= end:  # local, or without a name
                continue
            name = text.taken(start)
            if not name:
                continue
            if section:
                offered.add(name)
                if defined and (version := names.get(number & ~_HIDDEN)):
                    offered.add(text.counted(name + b"@" + version.encode()))
            elif bind != 2:  # a weak one may stay without a definition
                wanted[name, names.get(number & ~_HIDDEN, "") if number & ~_HIDDEN > 1 else ""] = None
        self.name_bytes = text.bytes
        return tuple(wanted), frozenset(offered), frozenset(defined), wanted_versions

    def _defined(self, body: bytes, text: "_Strings", names: dict[int, str]) -> set[str]:
        found, offset = set(), 0
        for _ in range(_VERSIONS):
            _, flags, index, _, _, aux, step = struct.unpack_from("<HHHHIII", body, offset)
            (name,) = struct.unpack_from("<I", body, offset + aux)
            if not flags & _VERDEF_BASE:
                names[index & ~_HIDDEN] = text.at(name)
                found.add(names[index & ~_HIDDEN])
            if not step:
                return found
            offset += step
        raise ElfError(f"more than {_VERSIONS:,} versions")

    def _needed_versions(self, body: bytes, text: "_Strings", names: dict[int, str]) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        offset = total = 0
        while True:
            _, count, library, aux, step = struct.unpack_from("<HHIII", body, offset)
            place, versions = offset + aux, set()
            for _ in range(count):
                _, _, index, name, more = struct.unpack_from("<IHHII", body, place)
                names[index & ~_HIDDEN] = text.at(name)
                versions.add(names[index & ~_HIDDEN])
                total += 1
                if not more:
                    break
                place += more
            total += 1
            if total > _VERSIONS:
                raise ElfError(f"more than {_VERSIONS:,} versions")
            key = text.at(library)
            found[key] = found.get(key, frozenset()) | versions
            if not step:
                return found
            offset += step

    def _build_id(self, sections: list[tuple[str, Any]]) -> str:
        header = next((h for name, h in sections if name == ".note.gnu.build-id"), None)
        if header is None or not 16 < header["sh_size"] <= 1024:
            return ""
        return self._table(header)[16:].hex()

    def _opened(self, sections: list[tuple[str, Any]]) -> frozenset[str]:
        found: set[str] = set()
        for name, header in sections:
            if name == ".rodata" and header["sh_type"] != "SHT_NOBITS":
                size = min(header["sh_size"], _SCANNED, max(0, self.size - header["sh_offset"]))
                body = self._bytes(header["sh_offset"], size)
                found |= {match[0].decode("ascii", "replace") for match in _OPENED.finditer(body)}
        return frozenset(sorted(found)[:1000])


class _Strings:
    """A table of names. All that is taken of it is bounded: one byte of it can be in many names."""

    def __init__(self, body: bytes) -> None:
        self.body, self.bytes = body, 0
        self._kept: dict[int, bytes] = {}
        self._most = _OVERLAP * len(body) + _NAMES

    def at(self, offset: int) -> str:
        """Return the name at `offset`."""
        if offset >= len(self.body) or self.body.find(b"\0", offset, offset + _TEXT) < 0:
            raise ElfError("a name out of bounds")
        return self.taken(offset).decode("utf-8", "surrogateescape")

    def taken(self, offset: int) -> bytes:
        """Return the name at `offset`, the start of one that is too long, and nothing of one without an end."""
        name = self._kept.get(offset)
        if name is None:
            stop = self.body.find(b"\0", offset)
            name = self._kept[offset] = self.counted(
                self.body[offset : min(stop, offset + _TEXT)] if stop >= 0 else b""
            )
        return name

    def counted(self, name: bytes) -> bytes:
        """Count a name that is kept, and return it."""
        self.bytes += len(name)
        if self.bytes > self._most:
            raise ElfError("names that overlap more than a linker's do")
        return name


def _offset_of(loads: list[Any], address: int) -> int:
    for segment in loads:
        if segment["p_vaddr"] <= address < segment["p_vaddr"] + segment["p_filesz"]:
            return int(address - segment["p_vaddr"] + segment["p_offset"])
    raise ElfError("an address that no segment holds")


def _paths(text: str) -> tuple[str, ...]:
    return tuple(text.split(":"))[:_LIBRARIES]
