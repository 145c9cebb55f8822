"""Where the dynamic loader of a root would find a library, and what it would have loaded for a file.

As ld.so(8) says: what is loaded already under that name; DT_RPATH of the file and of those that loaded it, where it
has no DT_RUNPATH; LD_LIBRARY_PATH; DT_RUNPATH; the folders of /etc/ld.so.conf; the default folders. The
configuration is read, and not the cache that ldconfig made of it. Subfolders for particular processors
(`glibc-hwcaps`) are not looked at.
"""

import fnmatch
import posixpath
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from envbuild.verify.binaries.elf import Binary
from envbuild.verify.binaries.files import Files

_TRIPLETS = {"x86-64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
_INCLUDES = 200
"""Lines `include` that are followed in /etc/ld.so.conf."""
_CONFIGURED = 500
"""Folders of /etc/ld.so.conf that are searched; NVIDIA's images have ten."""
_STEPS = 10_000_000
"""Files and symbols that are looked up for one root; torch 2.13 with all that it needs takes 0.4 million."""
_ORIGIN = re.compile(r"\$(?:ORIGIN\b|\{ORIGIN\})")
_LIB = re.compile(r"\$(?:LIB\b|\{LIB\})")

_SYSTEM = re.compile(
    r"lib(?:c|m|dl|pthread|rt|util|resolv|nsl|crypt|anl)\.so\.\d+|ld-linux-[\w-]+\.so\.\d"
    r"|lib(?:gcc_s|stdc\+\+|gomp|atomic)\.so\.\d+|linux-vdso\.so\.1"
)
_HOST = re.compile(
    r"lib(?:cuda|nvidia-[\w-]+|nvoptix|nvcuvid)\.so\.\d+"
    r"|lib(?:ibverbs|mlx[45]|rdmacm|fabric|psm2?|efa|uc[a-z]|pmix|mpi\w*|oshmem|open-rte|open-pal|hwloc|numa)\.so[\d.]*"
)


def is_system(name: str) -> bool:
    """Return whether a library is part of every Linux system that takes manylinux wheels, as libc is."""
    return _SYSTEM.fullmatch(name) is not None


def is_host(name: str) -> bool:
    """Return whether a library comes with the driver or the fabric of a host, and not with an image."""
    return _HOST.fullmatch(name) is not None


class TooMuchError(ValueError):
    """A root whose binaries name each other so often that following them would not end."""


@dataclass(kw_only=True)
class Scope:
    """What is loaded for one file: itself first, then what it needs, breadth first, as symbols are looked up."""

    order: list[str] = field(default_factory=list)
    """Real paths."""
    missing: list[tuple[str, str]] = field(default_factory=list)
    """A file, and the name of a library that it needs and that is nowhere."""
    provided: dict[tuple[str, str], str] = field(default_factory=dict)
    """A file and a name that it needs -> the file that it gets."""
    named: dict[str, str] = field(default_factory=dict)
    """Names under which a library is loaded -> its real path."""


class Loader:
    """The loader of one root.

    Args:
        files: what the root holds.
        library_path: LD_LIBRARY_PATH of its processes.

    """

    def __init__(self, files: Files, library_path: Sequence[str] = ()) -> None:
        self.files = files
        self.library_path = tuple(library_path)
        self.steps = 0
        counts: dict[str, int] = {}
        for binary in files.binaries.values():
            if binary.kind != "other":
                counts[binary.machine] = counts.get(binary.machine, 0) + 1
        self.machine = max(sorted(counts), key=lambda name: counts[name], default="x86-64")
        self.configured = tuple(islice(self._configured("etc/ld.so.conf"), _CONFIGURED))
        triplet = _TRIPLETS.get(self.machine, "")
        self.defaults = tuple(f"/{top}lib{end}" for end in (f"/{triplet}", "64", "") for top in ("", "usr/"))
        self._memo: dict[tuple[str, str], str | None] = {}
        self.complete = self.find("libc.so.6", ()) is not None
        """Whether the root holds a whole system: a wheel and a folder of packages have no libc."""

    def spend(self, steps: int) -> None:
        """Count what is looked up.

        Raises:
            TooMuchError: it is more than any image takes.

        """
        self.steps += steps
        if self.steps > _STEPS:
            raise TooMuchError(f"its binaries name each other more than {_STEPS:,} times")

    def binary(self, path: str) -> Binary:
        """Return the binary at a real path."""
        return self.files.binaries[path]

    def at(self, path: str) -> str | None:
        """Return the real path of the library of this root's processor at `path`; None where there is none."""
        real = self.files.real(path)
        found = self.files.binaries.get(real)
        return real if found is not None and found.kind != "other" and found.machine == self.machine else None

    def folders(self, by: Sequence[str]) -> Iterator[str]:
        """Yield the folders that are searched for what a file needs.

        Args:
            by: the file, then the one that loaded it, and so on. Paths as they were found.

        """
        first = self.files.binaries.get(self.files.real(by[0])) if by else None
        if first is not None and not first.runpath:
            for path in by:
                binary = self.files.binaries.get(self.files.real(path))
                if binary is not None and not binary.runpath:
                    yield from self._expanded(binary.rpath, path)
        yield from self.library_path
        if first is not None:
            yield from self._expanded(first.runpath, by[0])
        if first is None or not first.no_default:
            yield from self.configured
            yield from self.defaults

    def find(self, name: str, by: Sequence[str]) -> str | None:
        """Return the path at which the loader finds a library, its last link not followed; None where it is nowhere."""
        if "/" in name:
            return name.strip("/") if self.at(name) is not None else None
        for folder in self.folders(by):
            self.spend(1)
            key = (folder, name)
            if key not in self._memo:
                path = posixpath.join(folder.strip("/"), name).strip("/")
                self._memo[key] = path if self.at(path) is not None else None
            if (found := self._memo[key]) is not None:
                return found
        return None

    def load(self, root: str, loaded: Mapping[str, str], more: Sequence[str] = ()) -> Scope:
        """Return what is loaded for the file `root` in a process that has other libraries already.

        Args:
            root: a path in the root.
            loaded: names of libraries that the process holds -> their real paths.
            more: folders that somebody loads from by path, where the loader itself finds nothing.

        """
        scope = Scope()
        start = self.files.real(root)
        seen = {start}
        left: deque[tuple[str, ...]] = deque([(root,)])
        while left:
            chain = left.popleft()
            real = self.files.real(chain[0])
            binary = self.files.binaries[real]
            scope.order.append(real)
            self.spend(len(binary.needed))
            for name in binary.needed:
                path = scope.named.get(name) or loaded.get(name) or self.find(name, chain)
                for folder in more if path is None else ():
                    path = path or (f"{folder}/{name}" if self.at(f"{folder}/{name}") else None)
                if path is None:
                    scope.missing.append((real, name))
                    continue
                target = self.files.real(path)
                scope.provided[real, name] = target
                scope.named[name] = target
                if target not in seen:
                    seen.add(target)
                    if soname := self.files.binaries[target].soname:
                        scope.named.setdefault(soname, target)
                    left.append((path, *chain[:32]))
        return scope

    def _expanded(self, paths: Sequence[str], by: str) -> Iterator[str]:
        origin = "/" + posixpath.dirname(by)
        for path in paths:
            if path:
                full = _LIB.sub(f"lib/{_TRIPLETS.get(self.machine, '')}", _ORIGIN.sub(lambda _: origin, path))
                yield posixpath.normpath(full) if full.startswith("/") else full

    def _configured(self, start: str) -> Iterator[str]:
        left, count = [start], 0
        while left and count < _INCLUDES:
            count += 1
            for line in self.files.texts.get(self.files.real(left.pop(0)), "").splitlines():
                words = line.partition("#")[0].split()
                if len(words) == 2 and words[0] == "include":
                    pattern = posixpath.normpath(posixpath.join("/etc", words[1])).strip("/")
                    names = {*self.files.texts, *(n for n in self.files.links if n.startswith("etc/"))}
                    left += sorted(name for name in names if fnmatch.fnmatchcase(name, pattern))[:_INCLUDES]
                elif words and words[0].startswith("/"):
                    yield words[0].partition("=")[0]
