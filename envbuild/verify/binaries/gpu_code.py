"""GPU code inside an ELF file: for which architectures a library holds cubins and PTX.

nvcc puts its code into the section `.nv_fatbin`, as containers one after the other: a header of 16 bytes (magic
0xBA55ED50, version, length of the header, length of the rest), then entries, each a header of 64 bytes or more
(kind, length of the header, length of the content, SM number, flags) and its content. What lies in `__nv_relfatbin`
is there to be linked again and is never loaded. NVIDIA does not document the format; what is read here was compared
with what its own `cuobjdump` 13.5 says of the files that nvcc 13.0 writes (tests/integration/test_gpu_code.py). The
libraries of torch 1.13 (CUDA 11.7) and later have the same headers.

Only the headers are read, by Python. `cuobjdump` is native code: it would be fed with the files of an image that
anybody may have made, and it unpacks what it lists. So it is the reference of the tests and has no part in an audit.
"""

import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Literal

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ12xI8xQ")
_ENTRY_SIZE = 64
_PTX, _CUBIN = 1, 2
_SPECIFIC = 1 << 20
"""Flag of an entry: code of `sm_90a`, which no other architecture runs."""
_FAMILY = 1 << 21
"""Flag of an entry: code of `sm_100f`, which the architectures of one family run."""
_ENTRIES = 2_000_000
"""Entries of one file at most; libcublasLt 13.1 has 5,737."""
_SETS = 10_000
"""Different sets of architectures in one file at most; the largest that we know has 40."""
_HIGHEST_SM = 999
# Xavier, Orin, Thor: binaries of the other GPUs of their generation do not run there, nor theirs on those.
_EMBEDDED = frozenset({72, 87, 101, 110})

Suffix = Literal["", "a", "f"]
Support = Literal["native", "jit", "none"]


class GpuCodeError(ValueError):
    """A container that is damaged or out of bounds."""


@dataclass(frozen=True, order=True)
class Code:
    """Code for one architecture: `sm_90a` in a cubin, `compute_90` in PTX."""

    sm: int
    suffix: Suffix
    ptx: bool

    def __str__(self) -> str:
        return f"{'compute' if self.ptx else 'sm'}_{self.sm}{self.suffix}"

    def runs_on(self, sm: int) -> bool:
        """Return whether a GPU runs it: a cubin as it is, PTX after the driver has compiled it.

        Source: the CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility" and "Feature Set Compiler
        Targets". A cubin runs within its major architecture from its own minor on, PTX on every later architecture;
        with the suffix `a` both run on exactly one, with `f` on those of the same major from the named one on.
        """
        if self.suffix == "a" or (sm != self.sm and not self.ptx and _EMBEDDED & {sm, self.sm}):
            return sm == self.sm
        if self.suffix == "f" or not self.ptx:
            return sm // 10 == self.sm // 10 and sm >= self.sm
        return sm >= self.sm


@dataclass(frozen=True, kw_only=True)
class GpuCode:
    """The GPU code of one file: which architectures each container has code for, and how many have those."""

    containers: Mapping[frozenset[Code], int]

    @property
    def codes(self) -> tuple[Code, ...]:
        """Every architecture that some container has code for."""
        return tuple(sorted({code for codes in self.containers for code in codes}))

    def support(self, sm: int) -> Support:
        """Return what the file has for a GPU: code that runs as it is, PTX alone, or nothing.

        One container with code is enough: a library may hold kernels that are meant for another GPU alone.
        """
        fitting = [code for code in self.codes if code.runs_on(sm)]
        return "native" if any(not code.ptx for code in fitting) else "jit" if fitting else "none"

    def without(self, sm: int) -> int:
        """Return how many containers have nothing for a GPU."""
        return sum(n for codes, n in self.containers.items() if not any(code.runs_on(sm) for code in codes))


def read_gpu_code(file: IO[bytes], places: Iterable[tuple[int, int]]) -> GpuCode | None:
    """Read the containers of a file; None where there are none.

    Args:
        file: the ELF file; it can go back.
        places: offset and size of each section that holds containers.

    Raises:
        GpuCodeError: a container is damaged or out of bounds.

    """
    found: Counter[frozenset[Code]] = Counter()
    entries = 0
    for start, size in places:
        offset, end = start, start + size
        while offset + _HEADER.size <= end:
            magic, _, header, length = _HEADER.unpack(_read(file, offset, _HEADER.size))
            if magic != _MAGIC:
                # the linker may fill the gap between two object files; containers start at multiples of 8
                offset += 8
                entries += 1
            else:
                stop = offset + header + length
                if header < _HEADER.size or stop > end:
                    raise GpuCodeError("a container of GPU code that is longer than its section")
                codes, entries = _read_entries(file, offset + header, stop, entries)
                found[codes] += 1
                offset = stop
            if entries > _ENTRIES or len(found) > _SETS:
                raise GpuCodeError(f"more than {_ENTRIES:,} pieces of GPU code")
    found.pop(frozenset(), None)
    return GpuCode(containers=dict(found)) if found else None


def _read_entries(file: IO[bytes], offset: int, stop: int, entries: int) -> tuple[frozenset[Code], int]:
    codes = set()
    while offset + _ENTRY_SIZE <= stop:
        kind, _, header, length, sm, flags = _ENTRY.unpack_from(_read(file, offset, _ENTRY_SIZE))
        if header < _ENTRY_SIZE or offset + header + length > stop:
            raise GpuCodeError("a piece of GPU code that is longer than its container")
        entries += 1
        if entries > _ENTRIES:
            raise GpuCodeError(f"more than {_ENTRIES:,} pieces of GPU code")
        if kind in {_PTX, _CUBIN} and 0 < sm <= _HIGHEST_SM:
            suffix: Suffix = "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else ""
            codes.add(Code(sm=sm, suffix=suffix, ptx=kind == _PTX))
        offset += header + length
    return frozenset(codes), entries


def _read(file: IO[bytes], offset: int, count: int) -> bytes:
    file.seek(offset)
    body = file.read(count)
    if len(body) < count:
        raise GpuCodeError("GPU code that ends behind the end of its file")
    return body
