"""CUDA in the binaries: GPU code for the cell's GPUs, copies and which wins, what is opened by name, stubs."""

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator

from envbuild.util.names import shown
from envbuild.util.text import count_of
from envbuild.verify.binaries.elf import Binary
from envbuild.verify.binaries.findings import BinaryFinding, named
from envbuild.verify.binaries.process import Process

_FAMILIES = re.compile(
    r"lib(?P<family>cudart|cublas|cudnn|cufft|curand|cusolver|cusparseLt|cusparse|nccl|nvrtc|nvJitLink|cupti"
    r"|nvshmem_host|cufile)"
    r"(?P<rest>\w*)\.so\.\d+"
)
_TOOLKIT = re.compile(r"(?:usr/local/cuda[^/]*|usr/lib/[^/]+-linux-gnu|usr/lib64)/.*")
_SERVES_ALL = re.compile(r"(?:^|/)(?:torch|transformer_engine)/")
_JUDGED = re.compile(r"torch/lib/libtorch_cuda(?:_linalg|_cu|_cpp)?\.so")
_OPTIONAL = {
    # pytorch/pytorch issue 187824: cuDNN 9.20 of the cu13 wheels names it, holds it not, and goes on without it
    "libcudnn_engines_tensor_ir": "cuDNN goes on without it",
}
_STUB = 1 << 20
"""Bytes that a stub of libcuda.so.1 has at most; the toolkit's have 60 to 180 kB, a driver's has 20 MB and more."""


def check_gpu_code(process: Process, *only: int) -> tuple[list[BinaryFinding], str]:
    """Hold the GPU code of each extension module, and of torch, against the cell's GPUs, or against `only` one of them."""
    findings, natives, held = [], 0, set()
    for_later, without = 0, set()
    for path, binary in sorted(process.files.binaries.items()):
        gpu = binary.gpu
        if gpu is None or not _is_judged(process, path):
            continue
        held |= set(gpu.codes)
        for_later += any(code.ptx and not code.suffix for code in gpu.codes)
        for sm in only or process.asked.sms:
            if sm not in process.asked.served.get(process.distribution(path), {sm}):
                without.add(process.distribution(path))
                continue
            support = gpu.support(sm)
            if support == "native":
                natives += 1
                continue
            codes = ", ".join(str(code) for code in gpu.codes[:12])
            if support == "jit":
                text = f"has no cubin for sm_{sm}: the driver compiles its PTX as it first runs ({codes})"
                findings.append(BinaryFinding(f"{named(path)} {text}", False))
            else:
                text = f"has no GPU code that sm_{sm} runs: {codes}"
                findings.append(BinaryFinding(f"{named(path)} {text}", _is_meant(process, path)))
    if not process.asked.sms:
        return findings, f"{', '.join(map(str, sorted(held))) or 'none'}; not checked for a GPU, since none was named"
    if not held:
        findings.append(
            BinaryFinding(
                "no extension module and no library of torch holds GPU code, so there was none to check", False
            )
        )
    text = f"{count_of(natives, 'binary', 'binaries')} with cubins for {', '.join(f'sm_{sm}' for sm in only or process.asked.sms)}"
    if only and only[-1] == process.asked.sms[-1]:
        text += f"; {for_later} of all hold PTX, which the driver compiles for later GPUs"
    return findings, "; ".join([text, *(f"{shown(name)} is for other GPUs alone" for name in sorted(without))])


def _is_judged(process: Process, path: str) -> bool:
    own = process.torch is not None and _JUDGED.fullmatch(path.removeprefix(process.torch)) is not None
    return own or path in process.extensions


def _is_meant(process: Process, path: str) -> bool:
    """Return whether a file must serve the cell's GPU: torch, a component, and all that is looked at by itself.

    Other packages hold modules for one generation of GPUs next to those for another.
    """
    name = process.distribution(path)
    named_here = name in process.asked.extensions or name in process.asked.compiled or not process.loader.complete
    return named_here or not name or _SERVES_ALL.search(path) is not None


def check_copies(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return libraries of CUDA that are there more than once, and which one a process gets."""
    findings = []
    by_name: dict[str, dict[str, Binary]] = defaultdict(dict)
    for path, binary in process.files.binaries.items():
        if _FAMILIES.fullmatch(binary.soname) and binary.machine == process.loader.machine:
            by_name[binary.soname][process.files.real(path)] = binary
    users: dict[str, set[str]] = defaultdict(set)
    for path, binary in process.files.binaries.items():
        for name in binary.needed:
            if name in by_name:
                users[name].add(path)
    single = 0
    for soname, copies in sorted(by_name.items()):
        if len({(b.build_id, b.size) for b in copies.values()}) < 2:
            single += 1
            continue
        reached = _reached(process, soname, users[soname])
        real = {path for path in reached if path in copies}
        if len({(copies[p].build_id, copies[p].size) for p in real}) < 2:
            single += 1
            continue
        wins = process.loaded.get(soname) or min(real)
        others = ", ".join(f"{named(path)} ({reached[path]})" for path in sorted(real - {wins}))
        text = f"{shown(soname)} is there twice: torch gets {named(wins)}; also {others}"
        meant = process.asked.devel and all(_TOOLKIT.fullmatch(path) for path in real - {wins})
        if not meant:
            findings.append(BinaryFinding(text, True))
    findings += _other_runtimes(process)
    return findings, f"{count_of(single, 'library', 'libraries')} of CUDA, each once where a process would look for it"


def _reached(process: Process, soname: str, users: set[str]) -> dict[str, str]:
    """Return each copy that some process would get, and how."""
    found: dict[str, str] = {}
    if (place := process.loader.find(soname, ())) is not None:
        found[process.files.real(place)] = "by the loader's own search"
    if soname in process.loaded:
        found.setdefault(process.loaded[soname], "with torch")
    for path in sorted(users):
        place = process.loader.find(soname, (path,))
        # a library next to its own user is a set by itself, which somebody else must reach first
        if place is not None and posixpath.dirname(place) != posixpath.dirname(path):
            found.setdefault(process.files.real(place), f"for {named(path)}")
    for folder in process.preload:
        if (real := process.loader.at(f"{folder}/{soname}")) is not None:
            found.setdefault(real, "below nvidia/, where torch looks")
    return found


def _other_runtimes(process: Process) -> Iterator[BinaryFinding]:
    """Yield extension modules that load another major version of CUDA's runtime than torch does."""
    theirs = {name for name in process.loaded if name.startswith("libcudart.so.")}
    for path, scope in process.scopes.items():
        own = {name for name in scope.named if name.startswith("libcudart.so.")}
        if theirs and own - theirs and any(name.startswith(("libtorch", "libc10")) for name in scope.named):
            text = f"{named(path)} loads {shown(min(own - theirs))}, torch has {shown(min(theirs))}"
            yield BinaryFinding(text, True)


def check_opened(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return libraries of CUDA that another one opens by name, and that are not there or of another set."""
    findings, count = [], 0
    for path, binary in sorted(process.files.binaries.items()):
        major = re.search(r"\.so\.(\d+)", binary.soname)
        family = _FAMILIES.fullmatch(binary.soname)
        if family is None or major is None or not binary.opened:
            continue
        by_stem: dict[str, set[str]] = defaultdict(set)
        for name in binary.opened:
            stem, _, version = name.partition(".so")
            by_stem[stem].add(name if version else f"{stem}.so.{major[1]}")
        for stem, names in sorted(by_stem.items()):
            if not stem.startswith(f"lib{family['family']}") or binary.soname in names:
                continue  # another family's: whoever needs that installs it
            count += 1
            place = next((p for n in sorted(names) if (p := process.loader.find(n, (path,))) is not None), None)
            here = posixpath.dirname(process.files.real(path))
            near = _near(process, here, stem)
            if place is not None and posixpath.dirname(process.files.real(place)) != here:
                text = f"{named(path)} opens {shown(min(names))}, and gets {named(place)}, which is of another set"
                findings.append(BinaryFinding(text, True))
            elif place is None and near is None:
                why = _OPTIONAL.get(stem)
                text = f"{named(path)} opens {shown(min(names))}, which is nowhere{f' ({why})' if why else ''}"
                findings.append(BinaryFinding(text, why is None))
    return findings, f"{count_of(count, 'library', 'libraries')} that others open by name"


def _near(process: Process, folder: str, stem: str) -> str | None:
    """Return a version of a library in a folder: what opens another knows its own folder, and tries several names."""
    start = f"{folder}/{stem}.so"
    process.loader.spend(len(process.files.binaries))
    return next((path for path in process.files.binaries if path.startswith(start)), None)


def check_stubs(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return stubs of the driver's library that a process would load instead of the driver's."""
    findings = []
    stubs = {
        path
        for path, binary in process.files.binaries.items()
        if binary.soname.startswith("libcuda.so") and (binary.size <= _STUB or "/stubs/" in f"/{path}")
    }
    for name in ("libcuda.so.1", "libcuda.so"):
        place = process.loader.find(name, ())
        if place is not None and process.files.real(place) in stubs:
            findings.append(BinaryFinding(f"{named(place)} is a stub, and comes before the driver's library", True))
    by_folder = defaultdict(list)
    for path in stubs:
        by_folder[posixpath.dirname(path)].append(path)
    for folder in (*process.loader.library_path, *process.loader.configured):
        found = by_folder.get(process.files.real(folder), [])
        # ldconfig makes a link by the name in the library, so that any file of such a folder is found
        findings += [
            BinaryFinding(f"{named(path)} is a stub in a folder that the loader searches", True)
            for path in sorted(found)
        ]
    users = defaultdict(list)
    for path, binary in sorted(process.files.binaries.items()):
        if any(name.startswith("libcuda.so") for name in binary.needed):
            place = process.loader.find("libcuda.so.1", (path,))
            if place is not None and process.files.real(place) in stubs:
                users[place].append(path)
    for place, paths in users.items():
        findings.append(
            BinaryFinding(f"{named(paths[0])} finds the stub {named(place)} instead of the driver's library", True)
        )
    for path in sorted(stubs):
        if path in process.loaded.values() or (process.distribution(path) and "/stubs/" not in f"/{path}"):
            findings.append(BinaryFinding(f"{named(path)} is a stub among Python's packages", True))
    return findings, "none that a process would load"
