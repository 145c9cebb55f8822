"""Front ends that read CUDA: they type-check the host side of .cu files against torch's own headers.

For CUDA 13 that is NVIDIA's own: PyPI's wheel of nvcc holds it, and its two first steps are run (the preprocessor and
cudafe++), so that no kernel is compiled. PyPI's wheels of older CUDA hold no nvcc: there it is one of this machine that the
caller names, or else clang, where the machine has one. clang is not what compiles these files in a build. What it alone
objects to is not decided.
"""

import platform
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.version import Version

from envbuild.curate.trials.files import Files
from envbuild.curate.trials.known import Checked, Known, anonymous, key_of, named
from envbuild.errors import HostError, UsageError
from envbuild.lock.index import IndexFile
from envbuild.util.names import shown
from envbuild.util.processes import bounded
from envbuild.util.scratch import scratch

NO_HALF = tuple(
    f"-D__CUDA_NO_{name}__"
    for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
)
"""What torch's cpp_extension defines for nvcc, and what some builds take back with -U."""
_CLANGS = (*(f"clang++-{number}" for number in range(24, 15, -1)), "clang++")
_NVCC = "nvcc"
_STEPS = ("cudafe++", _NVCC, "nvcc.profile")
_RELEASE = re.compile(r"\brelease (\d{1,2}\.\d{1,2}),")
_OLDEST = Version("11.8")
"""The first CUDA whose headers are all on PyPI."""
_FROM_PYPI = 13
"""The first CUDA of which PyPI's wheels hold nvcc."""
_MADE = ".cpp4.ii"
_NVCC_FATAL = re.compile(r"^nvcc fatal *: *(.+)$", re.MULTILINE)
_SECONDS = 1800.0
_LIMIT = 64 << 20
_ROOTS = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/", "THC/", "TH/")
"""Where torch's wheels have headers."""
ERROR = re.compile(
    r"^(?P<path>[^\n:(]+)(?::|\()(?P<line>\d+)(?::\d+)?\)?: (?:fatal |catastrophic )?error[^:\n]*: (?P<text>.*)$",
    re.MULTILINE,
)
_TORCH = ("torch/include", "torch/include/torch/csrc/api/include")
_WORD = re.compile(rb"[A-Za-z_]\w*")
_NO_HEADER = re.compile(r"'?([^':\s]+)'?(?:: No such file or directory| file not found)")
_STANDARD = re.compile(r"C\+\+ ?\d\d")
_NAMESPACE = re.compile(r"\b(?:at|c10|torch|caffe2)::|\bnamespace ['\"](?:at|c10|torch|caffe2)\b")
_ABSENT = re.compile(r"no (?:member|type|template) named '(\w+)' in (?:namespace )?'(?:at|c10|torch|caffe2)\b")


class _Steps(NamedTuple):
    """The two first steps of an nvcc, as command lines, and the file that the first one writes."""

    preprocess: list[str]
    made: Path
    check: list[str]


@dataclass(frozen=True)
class FrontEnd:
    """What checks .cu files.

    Args:
        name: whose it is.
        program: nvcc or clang++.
        includes: folders of the headers of torch and CUDA.
        root: the folder of the component.
        known: what the trials before found.

    """

    name: Literal["nvcc", "clang"]
    program: Path
    includes: tuple[Path, ...] = field(repr=False)
    root: Path = Path("/nowhere")
    known: Known = field(default_factory=Known, repr=False, compare=False)

    def errors(self, unit: Path, flags: Sequence[str], place: Path, *, first: bool = True) -> str:
        """Type-check the host side of `unit`; return what the front end prints where it does not take it, else nothing.

        Args:
            unit: the .cu file.
            flags: the C++ standard, macros and folders of headers.
            place: a folder for what is written on the way.
            first: whether the first error is enough; an nvcc prints up to 100 all the same.

        Raises:
            HostError: the front end did not end.

        """
        flags = (*flags, *(f"-isystem{path}" for path in self.includes))
        if self.name == "clang":
            return _printed(self._by_clang(unit, (*flags, "-ferror-limit=1") if first else flags, place))
        steps = self._by_nvcc(unit, flags, place)
        if isinstance(steps, str):
            return steps
        if refused := _printed(steps.preprocess):
            self.known.note_files(None, self.root)
            return refused
        folders = (place, self.root)
        text = steps.made.read_bytes()
        self.known.note_files(text, self.root)
        key = key_of([anonymous(word.encode(), folders).decode() for word in steps.check], anonymous(text, folders))
        answers = self.known.answers
        if key in answers:
            return named(answers[key], folders)
        found = _printed(steps.check)
        if not found or ERROR.search(found):
            answers[key] = anonymous(found.encode(), folders).decode()
        else:  # it was killed, perhaps
            self.known.note_files(None, self.root)
        return found

    def _by_clang(self, unit: Path, flags: Sequence[str], place: Path) -> list[str]:
        # what clang takes for a toolkit: it reads the version there
        toolkit = place / "toolkit"
        for name in ("bin", "include"):
            (toolkit / name).mkdir(parents=True, exist_ok=True)
        for path in self.includes:
            if (path / "cuda.h").is_file() and not (toolkit / "include/cuda.h").exists():
                (toolkit / "include/cuda.h").symlink_to(path / "cuda.h")
        start = [
            str(self.program),
            "-x",
            "cuda",
            "--cuda-host-only",
            "-fsyntax-only",
            "-nocudalib",
            "-w",
            # what is wrong in a template that nothing instantiates, as in one of cutlass's, stops no build by nvcc
            "-fdelayed-template-parsing",
        ]
        return [*start, f"--cuda-path={toolkit}", "--no-cuda-version-check", "--cuda-gpu-arch=sm_90", *flags, str(unit)]

    def _by_nvcc(self, unit: Path, flags: Sequence[str], place: Path) -> _Steps | str:
        """Return the two first steps of nvcc, or why there are none."""
        start = [
            str(self.program),
            "--dryrun",
            "--keep",
            "--keep-dir",
            str(place),
            "-ccbin",
            "g++",
            "-arch=sm_90",
            "-w",
        ]
        start += ["-allow-unsupported-compiler", "--expt-relaxed-constexpr", "--expt-extended-lambda"]
        # nvcc takes no -isystemPATH in one word
        start += [f"-isystem={path / 'cccl'}" for path in self.includes if (path / "cccl").is_dir()]
        own = [re.sub(r"^-isystem(?!=)", "-isystem=", flag) for flag in flags]
        dry = bounded([*start, *own, "-c", str(unit), "-o", str(place / "unused.o")], seconds=60.0, limit=_LIMIT)
        says = dry.err.decode("utf-8", "replace")
        lines = [line[3:] for line in says.splitlines() if line.startswith("#$ ")]
        unknown = "the steps of this nvcc are not known"
        if fatal := _NVCC_FATAL.search(says):
            return fatal[1]
        try:
            words = [shlex.split(line) for line in lines if _MADE in line]
        except ValueError:
            return unknown
        first = next((each for each in words if "-E" in each), None)
        second = next((each[1:] for each in words if each[0] == "cudafe++"), None)
        if first is None or second is None:
            return unknown
        # in CUDA 11 another step writes that file, which is left out here
        extra = [] if "--gen_module_id_file" in second else ["--gen_module_id_file"]
        made = next(Path(word) for word in first if word.endswith(_MADE))
        return _Steps(first, made, [str(self.program.with_name("cudafe++")), *extra, *second])

    def judge(self, text: str) -> Checked:
        """Return what becomes of a file of which the front end printed `text`.

        Failed is what torch's headers decide: a header or a name that they do not have, or a C++ standard that they refuse.
        What else the front end objects to may come from how it is run here, and is not decided.
        """
        found = ERROR.search(text)
        if found is None:
            return Checked("undecided", f"{self.name}: {text.splitlines()[0]}")
        path, message = Path(found["path"]), found["text"]
        first = f"{'/'.join(path.parts[-2:])}:{found['line']}: {message}"
        if self._shows(path, message):
            return Checked("failed", first)
        return Checked("undecided", f"not decided by {self.name}: {first}")

    def _shows(self, path: Path, message: str) -> bool:
        """Return whether the error is about torch's headers, and none of the front end's own."""
        ours = any(path.is_relative_to(folder) for folder in self._of_torch)
        if missing := _NO_HEADER.search(message):
            return missing[1].startswith(_ROOTS)
        if _STANDARD.search(message):
            return ours
        if self.name == "clang":
            absent = _ABSENT.search(message)
            return absent is not None and absent[1] not in self._words
        return ours or _NAMESPACE.search(message) is not None

    @cached_property
    def _of_torch(self) -> tuple[Path, ...]:
        return tuple(path for path in self.includes if any(path.match(each) for each in _TORCH))

    @cached_property
    def _words(self) -> frozenset[str]:
        """Every word of torch's headers: what is not there under any condition is not there."""
        files = (path for path in self._of_torch[0].rglob("*") if path.is_file()) if self._of_torch else ()
        return frozenset(word.decode() for path in files for word in set(_WORD.findall(path.read_bytes())))


def _printed(command: Sequence[str]) -> str:
    """Run a step; return what it prints where it fails, else nothing."""
    done = bounded(command, seconds=_SECONDS, limit=_LIMIT)
    if done.fault:
        raise HostError(f"{Path(command[0]).name} {done.fault}", hint="try again on a machine with more memory or time")
    if not done.code:
        return ""
    return (done.err + done.out).decode("utf-8", "replace").strip() or f"{Path(command[0]).name} ended with {done.code}"


@dataclass(frozen=True, kw_only=True)
class OwnNvcc:
    """An nvcc of this machine, and its release: 12.4."""

    release: str
    program: Path

    @property
    def major(self) -> str:
        """CUDA's major version."""
        return self.release.partition(".")[0]


def own_nvcc(program: Path) -> OwnNvcc:
    """Return the nvcc `program` with its release.

    Raises:
        UsageError: it is none, or one of a CUDA whose nvcc PyPI has, or whose headers PyPI does not have.

    """
    program = program.absolute()
    if not program.with_name("cudafe++").is_file():  # a link to it, perhaps
        program = program.resolve()
    try:
        text = bounded([str(program), "--version"], seconds=60.0, limit=1 << 20).out.decode("utf-8", "replace")
    except OSError:
        text = ""
    found = _RELEASE.search(text)
    if found is None or not program.with_name("cudafe++").is_file():
        raise UsageError(
            f"{shown(str(program))} is not an nvcc with cudafe++ next to it",
            where="--nvcc",
            hint="name the program, such as /usr/bin/nvcc",
        )
    own = OwnNvcc(release=found[1], program=program)
    if int(own.major) >= _FROM_PYPI or Version(own.release) < _OLDEST:
        raise UsageError(
            f"{shown(str(program))} is nvcc {own.release}",
            where="--nvcc",
            hint=f"name one from {_OLDEST} on; from CUDA {_FROM_PYPI} on, the nvcc of PyPI is used",
        )
    return own


def own_nvccs(programs: Sequence[Path]) -> list[OwnNvcc]:
    """Return the nvccs with their releases.

    Raises:
        UsageError: as `own_nvcc` does; or two are of one CUDA major version.

    """
    found = [own_nvcc(program) for program in programs]
    if len({nvcc.major for nvcc in found}) < len(found):
        raise UsageError(
            "two are of one CUDA major version", where="--nvcc", hint="name one for CUDA 11 and one for CUDA 12"
        )
    return found


@cache
def require_reads(cuda: FrontEnd) -> None:
    """Check that a front end reads the headers of CUDA's runtime: one that does not decides nothing of any file.

    Raises:
        HostError: it does not.

    """
    with scratch("cuda") as place:
        unit = place / "runtime.cu"
        unit.write_text("#include <cuda_runtime.h>\n", encoding="utf-8")
        if text := cuda.errors(unit, ("-std=c++17",), place):
            first = cuda.judge(text).first
            raise HostError(
                f"{shown(str(cuda.program))} does not read CUDA's own headers: {shown(first)}",
                where="--nvcc",
                hint="name another nvcc, or leave it out",
            )


def front_end(files: Files, wheels: Sequence[IndexFile], includes: Sequence[Path]) -> FrontEnd | None:
    """Return what checks .cu files with the headers of `wheels`: their own nvcc, or else this machine's clang.

    None where there is neither, or where `includes` do not hold CUDA's headers.

    Raises:
        LockError: the wheel of nvcc cannot be read, or is not what the index states.
        HostError: it cannot be downloaded or kept.

    """
    if not any((path / "cuda_runtime.h").is_file() for path in includes):
        return None
    nvcc = next((wheel for wheel in wheels if wheel.filename.startswith("nvidia_cuda_nvcc-")), None)
    if nvcc is not None and platform.machine() == "x86_64":
        paths = [path for path in files.paths(nvcc) if "/bin/" in path and path.rpartition("/")[2] in _STEPS]
        if len(paths) == len(_STEPS):
            folder = files.programs(nvcc, paths)
            program = folder / next(path for path in paths if path.endswith(f"/{_NVCC}"))
            return FrontEnd("nvcc", program, tuple(includes))
    found = clang()
    return FrontEnd("clang", Path(found), tuple(includes)) if found else None


def clang() -> str | None:
    """Return the newest clang++ of this machine from 16 on, or the one without a number; None when there is none."""
    return next((path for name in _CLANGS if (path := shutil.which(name))), None)


def clang_version() -> str:
    """Return clang's first line; empty when there is none."""
    found = clang()
    if found is None:
        return ""
    return bounded([found, "--version"], seconds=60.0, limit=1 << 20).out.decode("utf-8", "replace").partition("\n")[0]
