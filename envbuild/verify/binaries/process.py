"""A Python process that has imported torch: what it holds, where symbols are looked up, and what it would import."""

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from packaging.utils import canonicalize_name

from envbuild.verify.binaries.elf import Binary
from envbuild.verify.binaries.files import Files
from envbuild.verify.binaries.loader import Loader, Scope

# torch/__init__.py, `_preload_cuda_deps`: what it opens by path below nvidia/ in site-packages, in this order
_PRELOADED = re.compile(
    r"lib(?:cublasLt|cublas|cudnn|nvrtc|nvrtc-builtins|cudart|cupti|cufft|curand|nvJitLink|cusparse|cusparseLt|cusolver"
    r"|nccl|nvshmem_host|cufile|nvToolsExt)\.so\.[\d.]+"
)
_NVIDIA_LIB = re.compile(r"(?P<site>.*?)nvidia/[^/]+/lib")
_TORCH_C = re.compile(r"(?P<site>(?:.*/)?)torch/_C\.[^/]*so")
_GLOBAL_DEPS = "torch/lib/libtorch_global_deps.so"
_CORE = "libtransformer_engine.so"
"""Opened by transformer_engine for all to see, before its extension for torch is imported."""
_PYTHON = re.compile(r"python3\.\d+")
_RECORD = re.compile(r"(?P<site>(?:.*/)?)(?P<name>[^/]+?)-(?P<version>[^/-]+)\.dist-info/(?P<file>RECORD|WHEEL)")
_IN_PACKAGES = re.compile(r"(?:^|/)(?:site-packages|dist-packages)/")


@dataclass(frozen=True, kw_only=True)
class RootExpectation:
    """What a root is checked for."""

    sms: tuple[int, ...] = ()
    """SM numbers of the GPUs that it is for; empty where that is not known."""
    served: Mapping[str, Collection[int]] = field(default_factory=dict)
    """Distribution -> those of `sms` that it is for, where the others of a mixed fleet go without it."""
    library_path: tuple[str, ...] = ()
    """LD_LIBRARY_PATH of its processes."""
    extensions: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Distribution -> extension modules that it must hold."""
    compiled: frozenset[str] = frozenset()
    """Distributions that were compiled for it, and not fetched from an index."""
    devel: bool = False
    """Whether it keeps a whole CUDA toolkit next to torch's libraries on purpose."""


class Process:
    """What was found in a root, and what a Python process that has imported torch holds of it."""

    def __init__(self, files: Files, asked: RootExpectation) -> None:
        self.files, self.asked = files, asked
        self.loader = Loader(files, asked.library_path)
        self._of: dict[str, str] = {}
        self._tags: dict[str, str] = {}
        self.distributions: dict[str, str] = {}
        """Name -> the folder that its files are in."""
        self._read_distributions()
        self.loaded: dict[str, str] = {}
        """Names of the libraries that torch has loaded -> their real paths."""
        self.everywhere: list[str] = []
        """Files whose symbols every other file sees: Python's own, and what torch opens for all."""
        self._start()

    @property
    def alone(self) -> bool:
        """Whether this is one wheel: what it needs comes from others."""
        return bool(self.files.wheel)

    def distribution(self, path: str) -> str:
        """Return the distribution that lists a file in its RECORD; empty where none does."""
        return self._of.get(path, "")

    def tags(self, path: str) -> str:
        """Return the text of the WHEEL file of a file's distribution."""
        return self._tags.get(self.distribution(path), "")

    def is_compiled(self, path: str) -> bool:
        """Return whether a file was compiled for this root: of a distribution that was, of a wheel, or of no RECORD.

        What an index has may hold dead search paths and modules that few can load; what was compiled here must not.
        """
        distribution = self.distribution(path)
        if self.alone or distribution in self.asked.compiled:
            return True
        in_packages = not self.loader.complete or _IN_PACKAGES.search(path) is not None
        return not distribution and in_packages and path.startswith(tuple(self.distributions.values()) or "")

    @cached_property
    def torch(self) -> str | None:
        """The folder that holds torch, with its last slash; None where there is no torch."""
        sites = sorted(m["site"] for path in self.files.binaries if (m := _TORCH_C.fullmatch(path)))
        return min(sites, key=lambda site: (not site.startswith("opt/venv/"), site), default=None)

    @cached_property
    def extensions(self) -> dict[str, Binary]:
        """Extension modules of Python, and libraries of operators that torch loads, by path."""
        return dict(self._extensions())

    def _extensions(self) -> Iterator[tuple[str, Binary]]:
        for path, binary in sorted(self.files.binaries.items()):
            if binary.kind != "library" or binary.machine != self.loader.machine:
                continue
            stem = posixpath.basename(path).partition(".")[0]
            torchs = any(name.startswith(("libtorch", "libc10")) for name in binary.needed)
            own = self.torch is not None and path.startswith(f"{self.torch}torch/lib/")
            module = b"PyInit_" + stem.encode("utf-8", "surrogateescape") in binary.offered
            if module or (torchs and not own) or is_core(path):
                yield path, binary

    @cached_property
    def scopes(self) -> dict[str, Scope]:
        """What is loaded for each extension module, after torch."""
        # Transformer Engine opens what it needs by path, as torch does
        return {
            path: self.loader.load(path, self.loaded, self.preload if "transformer_engine" in path else ())
            for path in self.extensions
        }

    @cached_property
    def used(self) -> frozenset[str]:
        """Real paths of all that some extension module loads."""
        return frozenset(path for scope in self.scopes.values() for path in scope.order) | frozenset(self.everywhere)

    @cached_property
    def python(self) -> str:
        """The Python that torch was compiled for, as `3.12`; empty where its module does not say."""
        start = f"{self.torch}torch/_C.cpython-"
        names = (path[len(start) :] for path in sorted(self.files.binaries) if path.startswith(start))
        found = next((m for name in names if (m := re.match(r"3(\d+)(t?)-", name))), None)
        return f"3.{found[1]}{found[2]}" if found else ""

    @cached_property
    def by_soname(self) -> dict[str, str]:
        """Return where a library of each name lies, wherever that is."""
        return {b.soname or posixpath.basename(path): path for path, b in sorted(self.files.binaries.items())}

    @cached_property
    def preload(self) -> tuple[str, ...]:
        """The folders that torch loads CUDA's libraries from by path."""
        site = self.torch
        return tuple(sorted(f for f in self.files.folders if site is not None and _is_preload(f, site)))

    def _start(self) -> None:
        programs = [
            path
            for path, binary in self.files.binaries.items()
            if binary.kind == "program" and _PYTHON.fullmatch(posixpath.basename(path))
        ]
        # the one that the environment's own link leads to, where there is one
        links = [path for path in self.files.links if re.fullmatch(r"opt/venv/bin/python3?(?:\.\d+)?", path)]
        own = [self.files.real(path) for path in links]
        for path in [p for p in own if p in programs] or sorted(programs):
            self.everywhere += [p for p in self.loader.load(path, {}).order if p not in self.everywhere]
        if self.torch is None:
            return
        deps = self.torch + _GLOBAL_DEPS
        if deps in self.files.binaries:
            scope = self.loader.load(deps, {}, self.preload)
            self.everywhere += [p for p in scope.order if p not in self.everywhere]
            self._keep(scope)
        stems = {name.partition(".so")[0] for name in self.loaded}
        for path in sorted(self.files.binaries):
            folder, _, name = path.rpartition("/")
            if folder in self.preload and _PRELOADED.fullmatch(name) and name.partition(".so")[0] not in stems:
                self.loaded.setdefault(self.files.binaries[path].soname or name, path)
        for path in sorted(self.files.binaries):
            if (match := _TORCH_C.fullmatch(path)) and match["site"] == self.torch:
                self._keep(self.loader.load(path, self.loaded, self.preload))

    def _keep(self, scope: Scope) -> None:
        for path in scope.order:
            names = {self.files.binaries[path].soname or posixpath.basename(path)}
            names |= {name for name, real in scope.named.items() if real == path}
            for name in names:
                self.loaded.setdefault(name, path)

    def lookup(self, path: str) -> tuple[str, ...]:
        """Return where symbols of an extension module and of what it loads are looked up, in order."""
        core: list[str] = []
        if is_core(path):
            core = list(self.loaded.values())  # it opens them for all to see before its own library
        elif "transformer_engine" in path:
            core = [p for each in self.extensions if is_core(each) for p in self.scopes[each].order]
        return tuple(dict.fromkeys((*self.everywhere, *core, *self.scopes[path].order)))

    def _read_distributions(self) -> None:
        from envbuild.verify.installed import read_record

        for place, text in sorted(self.files.texts.items()):
            match = _RECORD.fullmatch(place)
            if match is None:
                continue
            name = canonicalize_name(match["name"])
            self.distributions.setdefault(name, match["site"])
            if match["file"] == "WHEEL":
                self._tags[name] = text
                continue
            try:
                rows = read_record(text)
            except ValueError:
                continue  # the audit of RECORDs names it
            for row in rows:
                self._of.setdefault(posixpath.normpath(match["site"] + row.path), name)


def is_core(path: str) -> bool:
    """Return whether a file is Transformer Engine's library, whose symbols are bound as they are called."""
    return posixpath.basename(path) == _CORE


def _is_preload(folder: str, site: str) -> bool:
    match = _NVIDIA_LIB.fullmatch(folder)
    return match is not None and match["site"] == site
