"""Where the binaries lie and where they search: Python's tags, paths of a build machine, missing extensions."""

import posixpath
import re
from collections import defaultdict

from envbuild.util.names import shown
from envbuild.util.text import count_of
from envbuild.verify.binaries.findings import BinaryFinding, named
from envbuild.verify.binaries.process import Process

_MODULE = re.compile(r"(?P<stem>[^.]+)\.(?P<tag>[^/]+)\.so")
_CPYTHON = re.compile(r"cpython-(?P<digits>\d{2,4})(?P<flags>[a-z]*)(?:-.*)?")
_PYTHON = re.compile(r"(?:^|/)python(?P<version>3\.\d+t?)/(?:site-packages|dist-packages|lib-dynload)/")
# Where compiles happen, and where nothing is kept.
_BUILD = re.compile(
    r"/(?:tmp|var/tmp|src|out|build|home|root|project|workspace|__w|data"
    r"|dev/shm|run|mnt|opt/(?:tools|toolchain|_internal))(?:/.*)?"
)

_EMPTIED = re.compile(r"/(?:var/)?tmp(?:/|$)")


def check_tags(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return extension modules that this root's Python does not import: of another Python, or of another processor."""
    findings = []
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for path in process.files.binaries:
        folder, _, name = path.rpartition("/")
        if match := _MODULE.fullmatch(name):
            modules[f"{folder}/{match['stem']}".lstrip("/")][match["tag"]] = path
    for tags in modules.values():
        version = _version_at(process, next(iter(tags.values())))
        foreign = {tag: m for tag in tags if (m := _CPYTHON.fullmatch(tag)) is not None}
        wanted = version.replace(".", "")
        # a package may hold a module for each of several Pythons
        if not version or len(foreign) < len(tags) or any(m["digits"] + m["flags"] == wanted for m in foreign.values()):
            continue
        text = f"is not for Python {shown(version)}, which does not import it"
        findings += [BinaryFinding(f"{named(tags[tag])} {text}", True) for tag in sorted(foreign)]
    for path, binary in sorted(process.files.binaries.items()):
        if process.loader.machine != binary.machine and _CPYTHON.match(posixpath.basename(path).partition(".")[2]):
            findings.append(
                BinaryFinding(
                    f"{named(path)} is for {shown(binary.machine)}, the rest for {process.loader.machine}", True
                )
            )
    return findings, f"{count_of(len(modules), 'module')}, each for the Python that it lies with"


def _version_at(process: Process, path: str) -> str:
    """Return the Python that imports from a file's folder, as `3.12`; empty where nothing says which."""
    if match := _PYTHON.search(path):
        return match["version"]
    if process.alone:
        found = re.search(r"-cp3(\d+)-(?:cp3\d+(t?)|none)-", process.files.wheel)
        return f"3.{found[1]}{found[2] or ''}" if found else ""
    if process.torch is None or not path.startswith(process.torch):
        return ""
    return process.python


def check_paths(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return search paths in binaries that lead to the machine that they were compiled on."""
    findings = []
    for path, binary in sorted(process.files.binaries.items()):
        for folder in binary.runpath or binary.rpath:
            inside = process.files.real(folder) in process.files.folders
            if not _BUILD.fullmatch(posixpath.normpath(folder)) or (inside and not _EMPTIED.match(folder)):
                continue
            # Many wheels of indexes have such a path, and find their libraries next to them.
            missing = [n for n in binary.needed if _is_lost(process, path, n)]
            text = f"{named(path)} searches {shown(folder)}, a folder of the machine that it was compiled on"
            if missing:
                text += f", and {shown(missing[0])} is nowhere else"
            if process.is_compiled(path) or (missing and path in process.extensions):
                findings.append(BinaryFinding(text, True))
    return findings, "no search path of a build machine in what was compiled here, and none that anything depends on"


def _is_lost(process: Process, path: str, name: str) -> bool:
    from envbuild.verify.binaries.loader import is_host, is_system

    if name in process.loaded or is_host(name) or (is_system(name) and not process.loader.complete):
        return False
    return process.loader.find(name, (path,)) is None


def check_extensions(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return extension modules that a distribution must hold and does not."""
    findings, found = [], 0
    stems = defaultdict(set)
    for path in process.files.binaries:
        stems[posixpath.basename(path).partition(".")[0]].add(path)
    for name, modules in sorted(process.asked.extensions.items()):
        if name not in process.distributions:
            continue
        missing = [each for each in modules if each.rpartition(".")[2] not in stems]
        found += len(modules) - len(missing)
        if missing:
            what = "all its extension modules" if len(missing) == len(modules) else shown(", ".join(missing))
            findings.append(BinaryFinding(f"{shown(name)} is there without {what}", True))
    return findings, f"{found} that components must hold"


def check_unread(process: Process) -> tuple[list[BinaryFinding], str]:
    """Return binaries that could not be read."""
    findings = [BinaryFinding(f"{named(path)}: {why}", False) for path, why in sorted(process.files.unread.items())]
    findings += [
        BinaryFinding(f"{named(p)}: {b.fault}", False) for p, b in sorted(process.files.binaries.items()) if b.fault
    ]
    return findings, f"{count_of(len(process.files.binaries), 'ELF file')}"
