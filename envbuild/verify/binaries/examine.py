"""The binaries of a root -> what is wrong with them."""

from collections.abc import Callable, Iterator

from envbuild.errors import AuditError
from envbuild.verify.binaries.cuda import check_copies, check_gpu_code, check_opened, check_stubs
from envbuild.verify.binaries.files import Files
from envbuild.verify.binaries.findings import BinaryFinding, Result, result
from envbuild.verify.binaries.layout import check_extensions, check_paths, check_tags, check_unread
from envbuild.verify.binaries.linkage import check_cxx_library, check_libraries, check_symbols, check_versions
from envbuild.verify.binaries.loader import TooMuchError
from envbuild.verify.binaries.process import Process, RootExpectation

_CHECKS: dict[str, Callable[[Process], tuple[list[BinaryFinding], str]]] = {
    "binaries": check_unread,
    "libraries": check_libraries,
    "symbols": check_symbols,
    "versions of symbols": check_versions,
    "C++ library": check_cxx_library,
    "GPU code": check_gpu_code,
    "copies of CUDA": check_copies,
    "libraries opened by name": check_opened,
    "stubs of the driver": check_stubs,
    "search paths": check_paths,
    "Python's tags": check_tags,
    "extension modules": check_extensions,
}


_GPU_CODE = next(name for name, check in _CHECKS.items() if check is check_gpu_code)


def _outcomes(
    process: Process, name: str, check: Callable[[Process], tuple[list[BinaryFinding], str]]
) -> Iterator[Result]:
    sms = process.asked.sms
    if name != _GPU_CODE or len(sms) < 2:
        yield result(name, *check(process))
        return
    for sm in sms:  # what each GPU of a mixed fleet gets
        yield result(f"{name} for sm_{sm}", *check_gpu_code(process, sm))


def examine(files: Files, asked: RootExpectation) -> tuple[Result, ...]:
    """Return the outcome of every check of the binaries in `files`.

    Raises:
        AuditError: they name each other without an end.

    """
    try:
        process = Process(files, asked)
        return tuple(each for name, check in _CHECKS.items() for each in _outcomes(process, name, check))
    except TooMuchError as error:
        raise AuditError(f"the binaries cannot be checked: {error}") from None
