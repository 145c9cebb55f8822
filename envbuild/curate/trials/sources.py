"""Trials of sources: each translation unit type-checked against torch's own headers, C++ by g++ and .cu files by `kernels`.

Nothing is compiled: the compiler parses and checks (`-fsyntax-only`). Headers come from the wheels of the set, torch's and
NVIDIA's, as pip would install them. torch's take most of the time, so they are parsed once into a precompiled one, and all
C++ files of a component are first checked as one translation unit. Where that does not pass, each half of them is.
"""

import re
import shutil
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version

from envbuild.components.base import HostSources
from envbuild.curate.trials.cuda import FrontEnd
from envbuild.curate.trials.files import Files
from envbuild.curate.trials.headers import CXX, code_files, kernels_of, stated_flags, without_asserts
from envbuild.curate.trials.kernels import check_kernels
from envbuild.curate.trials.precompiled import Precompiled
from envbuild.errors import HostError
from envbuild.lock.index import IndexFile
from envbuild.util.frozen import replace as changed
from envbuild.util.names import shown
from envbuild.util.processes import bounded
from envbuild.util.scratch import scratch

COMPILER = "g++"
_SECONDS = 1800.0
_ERROR = re.compile(r"^(?:[^\n]*?)([^/\n]+/[^/\n:]+:\d+(?::\d+)?: (?:fatal )?error: [^\n]*)$", re.MULTILINE)
_ENOUGH = 3
"""Files that fail, or that are the first and are not decided, after which the rest is not looked at."""


@dataclass(frozen=True, kw_only=True)
class SourcesFound:
    """What one trial of sources found."""

    units: int
    failed: tuple[str, ...]
    """The first error of each unit that does not pass."""
    standard: int
    cuda_files: int
    """.cu files."""
    cuda_by: str = ""
    """The front end that looked at them; empty where there was none."""
    cuda_checked: int = 0
    """Those that passed or failed."""
    undecided: tuple[str, ...] = ()
    """The first reason of each C++ file that could not be decided."""
    cuda_undecided: tuple[str, ...] = ()
    """And of each .cu file."""


def has_header(path: str) -> bool:
    """Return whether `path` in a wheel is a header to keep."""
    return "/include/" in path and not path.endswith((".so", ".a", ".cmake"))


def include_folders(files: Files, wheels: Sequence[IndexFile]) -> list[Path]:
    """Return the folders of headers of torch and CUDA in `wheels`."""
    found = []
    for wheel in wheels:
        if wheel.filename.startswith(("torch-", "nvidia_")):
            site = files.headers(wheel, has_header)
            every = (site / "torch/include", site / "torch/include/torch/csrc/api/include")
            found += [path for path in (*every, *sorted(site.glob("nvidia/*/include"))) if path.is_dir()]
    return found


_NOT_IN_SET = re.compile(r"fatal error: cu(?:blas|fft|rand|solver|sparse)\w*\.h: No such file or directory")
"""A header of a CUDA library that is not in the set: torch 1.13's wheel asks for no cuRAND and no cuSPARSE."""


def torch_standard(files: Files, torch: IndexFile) -> int:
    """Return the C++ standard that torch's cpp_extension asks for where a build states none."""
    text = files.text(torch, "torch/utils/cpp_extension.py")
    return max((int(number) for number in re.findall(r"-std=c\+\+(\d\d)", text)), default=14)


def try_sources(
    files: Files,
    folder: Path,
    sources: HostSources,
    *,
    torch: IndexFile,
    includes: Sequence[Path],
    precompiled: Precompiled,
    cuda: FrontEnd | None = None,
    cpp_passed: bool = False,
) -> SourcesFound | None:
    """Type-check every C++ and .cu file of a component, until three of them fail; None where it has none.

    Args:
        files: where headers are kept.
        folder: the component's source.
        sources: where its C++ lies.
        torch: torch's wheel.
        includes: folders of the headers of torch and CUDA.
        precompiled: where torch's precompiled headers are.
        cuda: what checks .cu files; None leaves them out.
        cpp_passed: whether its C++ files are known to pass, and only .cu files are left.

    Raises:
        HostError: there is no C++ compiler here, or it did not end.

    """
    release = torch.filename.split("-")[1].partition("+")[0]
    units = code_files(folder, sources, release, CXX)
    kernels = kernels_of(folder, sources, release)
    if not units and not kernels:
        return None
    if shutil.which(COMPILER) is None:
        raise HostError(f"there is no {COMPILER} here", hint="install g++, or leave out --kind sources")
    defines, stated = stated_flags(folder, sources)
    standard = stated or torch_standard(files, torch)
    own = [f"-I{folder / each}" for each in sources.includes]
    common = ["-DTORCH_EXTENSION_NAME=trial", "-DTORCH_API_INCLUDE_EXTENSION_H", *defines, *sources.defines]
    common += [f"-I{sysconfig.get_paths()['include']}"]
    every = [f"-std=c++{standard}", "-w", "-fPIC", *common, *(f"-isystem{path}" for path in includes)]
    errors = [] if cpp_passed else _check_units(units, every, own, folder, precompiled)
    undecided = [error for error in errors if _NOT_IN_SET.search(error)]
    failed = [error for error in errors if error not in undecided]
    found = SourcesFound(
        units=len(units), failed=tuple(failed), undecided=tuple(undecided), standard=standard, cuda_files=len(kernels)
    )
    if cuda is None or not kernels or len(failed) >= _ENOUGH:
        return found
    # the standard of C++ files is another one where a build has a function for it: here every one that it states counts
    alike = changed(sources, cxx_flags=None)
    highest = stated_flags(folder, alike)[1] or torch_standard(files, torch)
    flags = [f"-std=c++{highest}", *common, *own, *(["-DNDEBUG"] if without_asserts(folder, sources) else [])]
    checked, doubtful = 0, list[str]()
    for unit, (verdict, first) in check_kernels(cuda, kernels, flags):
        checked += verdict != "undecided"
        if verdict != "passed":
            (failed if verdict == "failed" else doubtful).append(shown(f"{unit.relative_to(folder)}: {first}", 500))
        if len(failed) >= _ENOUGH or (len(doubtful) >= _ENOUGH and not checked):
            break
    return replace(found, failed=tuple(failed), cuda_undecided=tuple(doubtful), cuda_by=cuda.name, cuda_checked=checked)


def _check_units(
    units: Sequence[Path], flags: Sequence[str], own: Sequence[str], folder: Path, precompiled: Precompiled
) -> list[str]:
    """Return the first error of each C++ file that fails, of three at most."""
    ready = precompiled.flags(COMPILER, flags) if units else ()
    failed: list[str] = []
    groups = [units] if units else []
    while groups and len(failed) < _ENOUGH:
        group = groups.pop()
        if len(group) == 1:
            error = _check(group[0], [*ready, *flags, *own])
            if error and ready:  # a unit is compiled alone: what a precompiled header defines must not decide
                error = _check(group[0], [*flags, *own])
            if error:
                failed.append(shown(f"{group[0].relative_to(folder)}: {error}", 500))
        elif not _pass_together(group, [*ready, *flags, *own]):
            middle = len(group) // 2  # two may define the same name: each half by itself
            groups += [group[middle:], group[:middle]]
    return failed


def _pass_together(units: Sequence[Path], flags: Sequence[str]) -> bool:
    """Return whether all C++ files pass as one translation unit."""
    with scratch("together") as place:
        together = place / "together.cpp"
        lines = (
            f'#undef TORCH_EXTENSION_NAME\n#define TORCH_EXTENSION_NAME trial_{number}\n#include "{unit}"\n'
            for number, unit in enumerate(units)
        )
        together.write_text("".join(lines), encoding="utf-8")
        return _check(together, flags) == ""


def _check(unit: Path, flags: Sequence[str]) -> str:
    return compile_with([COMPILER, "-fsyntax-only", *flags, str(unit)])


def compile_with(command: Sequence[str]) -> str:
    """Run a compiler; return its first error, empty when there is none."""
    done = bounded(command, seconds=_SECONDS, limit=64 << 20)
    if done.fault:
        raise HostError(f"{COMPILER} {done.fault}", hint="try again on a machine with more memory or time")
    if done.code == 0:
        return ""
    text = done.err.decode("utf-8", "replace")
    found = _ERROR.search(text)
    return found[1] if found else (text.strip().splitlines() or [f"it ended with {done.code}"])[0]


def compiler_version() -> str:
    """Return the compiler's first line; empty when there is none."""
    if shutil.which(COMPILER) is None:
        return ""
    return (
        bounded([COMPILER, "--version"], seconds=60.0, limit=1 << 20).out.decode("utf-8", "replace").partition("\n")[0]
    )


def cuda_tools(packages: Mapping[str, str], nvcc: str = "") -> tuple[str, ...]:
    """Return the requirements that hold the rest of CUDA's headers for the runtime in `packages` (name -> version).

    PyPI's wheels of CCCL before 12.5 have no `nv/target`, which CUDA's own headers include: 12.5's stands in for them. Of
    11.7 only the runtime is whole: the rest is 11.8's. With the release of an `nvcc`, such as 12.4, the runtime is that
    release's, too: an nvcc reads its own toolkit's headers.
    """
    for name, version in packages.items():
        if name.startswith("nvidia-cuda-runtime"):
            minor = nvcc or ".".join(version.split(".")[:2]).replace("11.7", "11.8")
            ending = name.removeprefix("nvidia-cuda-runtime")
            cccl = "12.5" if ending == "-cu12" and Version(minor) < Version("12.5") else minor
            tools = {"nvcc": minor, "cccl": cccl, "profiler-api": minor}
            tools |= ({} if ending else {"crt": minor}) | ({"runtime": nvcc} if nvcc else {})
            return tuple(f"nvidia-cuda-{tool}{ending}=={release}.*" for tool, release in tools.items())
    return ()
