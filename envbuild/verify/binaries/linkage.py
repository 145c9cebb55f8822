"""Libraries, symbols and versions: what each binary needs, against what the loader would give it."""

import re
from collections import defaultdict

from envbuild.util.names import shown
from envbuild.util.text import count_of
from envbuild.verify.binaries.elf import Binary
from envbuild.verify.binaries.findings import BinaryFinding, named
from envbuild.verify.binaries.loader import is_host, is_system
from envbuild.verify.binaries.process import Process, is_core
from envbuild.verify.binaries.symbols import is_pythons, is_torchs, shown_symbol, string_abi

_CUDA = re.compile(
    r"lib(?:cudart|cublas(?:Lt)?|cudnn\w*|cufft|curand|cusolver(?:Mg)?|cusparse(?:Lt)?|nccl|nvrtc(?:-builtins)?"
    r"|nvJitLink|cupti|nvshmem_host|cufile|nvToolsExt)\.so\.[\d.]+"
)
_TORCH = re.compile(r"lib(?:torch(?:_cpu|_cuda\w*|_python|_nvshmem|_global_deps)?|c10(?:_cuda)?|caffe2\w*|shm)\.so")
_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_|manylinux(1|2010|2014)_")
_OLD_TAGS = {"1": (2, 5), "2010": (2, 12), "2014": (2, 17)}  # PEP 513, 571, 599
_SHOWN = 3
_CXX_LIBRARY = "libstdc++.so.6"
_CXX_STATE = b"_ZNSt6locale7classicEv"
"""`std::locale::classic()`: whoever defines it holds the state of C++'s streams and locales."""


def check_libraries(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return libraries that are nowhere, and a line on the rest."""
    findings, host, idle = [], set(), set()
    for path in process.extensions:
        missing = defaultdict(list)
        for needer, name in process.scopes[path].missing:
            missing[name].append(needer)
        for name, needers in missing.items():
            if is_host(name):
                host.add(name)
            elif not process.loader.complete and (is_system(name) or not _is_expected(process, name)):
                continue
            else:
                findings.append(_missing(process, path, name, needers[0]))
    if process.loader.complete:
        for path, binary in process.files.binaries.items():
            if path in process.used or binary.kind == "other" or binary.machine != process.loader.machine:
                continue
            if any(process.loader.find(n, (path,)) is None and n not in process.loaded for n in binary.needed):
                idle.add(path)
    text = f"{count_of(len(process.extensions), 'extension module')} and what {'it loads' if len(process.extensions) == 1 else 'they load'}"
    if host:
        text += f"; of the host: {', '.join(sorted(host))}"
    if idle:
        text += f"; {count_of(len(idle), 'other file needs', 'other files need')} what is not there, such as {named(min(idle))}"
    return findings, text


def _missing(process: Process, path: str, name: str, needer: str) -> BinaryFinding:
    by = "" if needer == process.files.real(path) else f", by way of {named(needer)}"
    text = f"{named(path)} needs {shown(name)}, which is nowhere{by}{_others(process, name)}"
    own = _is_cuda(name) or _TORCH.fullmatch(name) is not None
    if (place := process.by_soname.get(name)) is not None:
        # a package may open its libraries by their paths before it imports its modules
        text = f"{named(path)} needs {shown(name)}, which it does not find{by}: it is at {named(place)}"
        return BinaryFinding(text, own or process.is_compiled(path))
    # A wheel of an index may hold a module for those who have some other library: numba has one for TBB.
    return BinaryFinding(text, own or process.is_compiled(path))


def _is_expected(process: Process, name: str) -> bool:
    """Return whether a library would lie in a folder of packages that holds torch, if it were there at all."""
    return not process.alone and process.torch is not None and (_is_cuda(name) or _TORCH.fullmatch(name) is not None)


def _is_cuda(name: str) -> bool:
    return _CUDA.fullmatch(name) is not None


def _others(process: Process, name: str) -> str:
    """Return which other version of a missing library torch holds, for the message."""
    stem = name.partition(".so")[0]
    found = sorted(other for other in process.loaded if other.partition(".so")[0] == stem and other != name)
    return f" (torch has {shown(found[0])})" if found else ""


def check_symbols(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return symbols that nothing defines: another torch, another C++ ABI, or simply missing."""
    findings: list[BinaryFinding] = []
    done: set[str] = set()
    for path in process.extensions:
        scope = process.scopes[path]
        places = [process.files.binaries[place] for place in process.lookup(path)]
        absent = {name for _, name in scope.missing}
        lost: list[bytes] = []
        for each in scope.order:
            if each in done:
                continue
            binary = process.files.binaries[each]
            unknown = _undefined(process, binary, places)
            unknown = [n for n in unknown if not _may_be_elsewhere(process, n, absent)]
            # what torch's own libraries are missing is theirs to open later
            if unknown and (each == process.files.real(path) or process.is_compiled(each)):
                lost += unknown
            else:
                done.add(each)
        if lost:
            findings.append(_lost(process, path, lost))
    return findings, "every symbol that they need is defined by what they load"


def _undefined(process: Process, binary: Binary, places: list[Binary]) -> list[bytes]:
    left = list(binary.wanted)
    for place in places:
        process.loader.spend(len(left) + 1)
        left = [(name, version) for name, version in left if not place.defines(name, version)]
    return [name for name, _ in left]


def _may_be_elsewhere(process: Process, name: bytes, absent: set[str]) -> bool:
    """Return whether a symbol may be defined by a library that is not part of what is looked at.

    Without a system's own libraries only what torch must define can be judged: an old linker leaves `dlsym` without a
    version, and nothing says then whose it is.
    """
    if is_pythons(name):
        return not any(process.files.binaries[p].kind == "program" for p in process.everywhere)
    if any(_is_cuda(n) or _TORCH.fullmatch(n) or is_host(n) for n in absent):
        return True
    if process.loader.complete:
        return bool(absent)
    return process.torch is None or not is_torchs(name)


def _lost(process: Process, path: str, lost: list[bytes]) -> BinaryFinding:
    torchs = [name for name in lost if is_torchs(name)]
    examples = ", ".join(shown_symbol(name) for name in sorted(torchs or lost)[:_SHOWN])
    count = f"{len(torchs or lost)} symbols" if len(torchs or lost) > 1 else "a symbol"
    if not torchs:
        late = ", which shows only in a call" if is_core(path) else ""
        return BinaryFinding(f"{named(path)} needs {count} that nothing defines{late}: {examples}", not late)
    own = {string_abi(name) for name in torchs} - {""}
    theirs = _abi_of_torch(process)
    if len(own) == 1 and theirs and own != {theirs}:
        words = {"old": "before C++11", "new": "of C++11"}
        text = f"has the C++ ABI {words[own.pop()]}, torch has the one {words[theirs]}"
        return BinaryFinding(
            f"{named(path)} {text}: {count} of torch that it does not define, such as {examples}", True
        )
    text = f"was compiled against another torch: it needs {count} that this one does not define"
    return BinaryFinding(f"{named(path)} {text}: {examples}", True)


def _abi_of_torch(process: Process) -> str:
    counts = {"old": 0, "new": 0}
    for name in ("libc10.so", "libtorch_cpu.so", "libtorch.so"):
        path = process.loaded.get(name)
        for symbol in process.files.binaries[path].offered if path else ():
            if is_torchs(symbol) and (abi := string_abi(symbol)):
                counts[abi] += 1
    return max(counts, key=lambda abi: counts[abi]) if any(counts.values()) else ""


def check_versions(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return versions of symbols that a library does not have: a newer libc or libstdc++ than the one that is there."""
    findings: list[BinaryFinding] = []
    for path, binary in sorted(process.files.binaries.items()):
        if binary.kind == "other" or binary.machine != process.loader.machine:
            continue
        scope = process.scopes.get(path)
        for library, versions in sorted(binary.wanted_versions.items()):
            provider = scope.provided.get((process.files.real(path), library)) if scope else None
            if provider is None and (place := process.loader.find(library, (path,))) is not None:
                provider = process.files.real(place)
            has = process.files.binaries[provider].versions if provider is not None else frozenset()
            if absent := sorted(versions - has if has else (), key=_version):
                newest = max(
                    (v for v in has if v.partition("_")[0] == absent[-1].partition("_")[0]), key=_version, default=""
                )
                high = f"up to {shown(newest)}" if newest else "none"
                text = f"needs {shown(absent[-1])} of {shown(library)}, which has {high}"
                findings.append(
                    BinaryFinding(f"{named(path)} {text}", path in process.used or process.is_compiled(path))
                )
        findings += _against_tag(process, path, frozenset().union(*binary.wanted_versions.values()))
    return findings, "every version of a symbol is there"


def _against_tag(process: Process, path: str, versions: frozenset[str]) -> list[BinaryFinding]:
    """Hold a file's libc against the platform tag of its wheel (PEP 600)."""
    tags = process.tags(path)
    platform = process.files.wheel if process.alone else " ".join(re.findall(r"(?m)^Tag: (.*)$", tags))
    allowed = [(int(m[1]), int(m[2])) if m[1] else _OLD_TAGS[m[3]] for m in _MANYLINUX.finditer(platform)]
    needed = max((v for v in versions if v.startswith("GLIBC_2")), key=_version, default="")
    # Wheels of indexes stretch old tags. Where one is installed, its libc is there and decides.
    if not allowed or not needed or not process.is_compiled(path) or tuple(_version(needed)[1][:2]) <= max(allowed):
        return []
    high = max(allowed)
    text = f"needs {shown(needed)}, and its wheel says that {high[0]}.{high[1]} is enough"
    return [BinaryFinding(f"{named(path)} {text}", True)]


def _version(text: str) -> tuple[str, list[int]]:
    name, _, number = text.partition("_")
    return name, [int(part[:9]) for part in re.findall(r"\d+", number)]


def check_cxx_library(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return modules that hold a copy of the C++ library and offer it to all, next to the one that torch loads.

    The loader gives each name of such a copy to one of the two, and some of their state to both (STB_GNU_UNIQUE), so the
    streams of one read the locales of the other: `std::cout << 1` crashes. A compiler that links libstdc++ statically
    makes such modules, as one did in docs/results/gpu.md ("llm-jp's fused kernels").
    """
    findings = []
    # a folder of packages does not hold the library that its torch loads
    loaded = [process.files.binaries[path] for path in (*process.everywhere, *process.loaded.values())]
    shared = any(_CXX_LIBRARY in (binary.soname, *binary.needed) for binary in loaded)
    for path in sorted({*process.extensions, *process.used}):
        binary = process.files.binaries[path]
        if binary.soname == _CXX_LIBRARY or not binary.defines(_CXX_STATE, ""):
            continue
        text = (
            f"{named(path)} holds a copy of libstdc++ and offers it to all, so a call such as `std::cout << 1` can crash"
            f"{' next to the libstdc++.so.6 of torch' if shared else ''}: link it with libstdc++.so.6 (a compiler takes "
            "libstdc++.a where it has no libstdc++.so), or hide the copy with -Wl,--exclude-libs,ALL"
        )
        made_here = process.is_compiled(path) or not process.distribution(path)
        findings.append(BinaryFinding(text, shared and made_here))
    return findings, "no module offers a copy of the C++ library to others"
