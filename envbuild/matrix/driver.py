"""What a driver means for a cell: every feature, minor-version compatibility, a compat package, or no start at all."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from envbuild.components.torch import TorchFacts
from envbuild.errors import UsageError
from envbuild.matrix.cell import X86_64, Cell
from envbuild.matrix.fleet import gpus_in
from envbuild.matrix.load import Matrix
from envbuild.matrix.model import BaseFacts, CudaFacts, GpuFacts, Release
from envbuild.matrix.spec import version_key
from envbuild.util.frozen import Frozen

if TYPE_CHECKING:
    from packaging.version import Version

Verdict = Literal["full", "minor-version", "needs-compat", "refused"]


class DriverVerdict(Frozen):
    """A verdict with its reason and the source of the fact that decides it."""

    verdict: Verdict
    driver: str
    why: str
    source: str


class Compat(Frozen):
    """NVIDIA's package cuda-compat of a CUDA release, and the drivers that it extends."""

    cuda: str
    branch: str
    """Driver branch whose libraries it holds, e.g. 580 for CUDA 13.0."""
    branches: tuple[str, ...]
    """Driver branches of hosts on which it is needed, and supported."""
    floor: str
    """The first driver that needs no package."""

    @property
    def package(self) -> str:
        """The package's name, e.g. cuda-compat-13-0."""
        return f"cuda-compat-{self.cuda.replace('.', '-')}"

    @property
    def folder(self) -> str:
        """Where the package puts its libraries."""
        return f"/usr/local/cuda-{self.cuda}/compat"


def parse_driver(text: str) -> "Version":
    """Return a driver version for comparing; 560.28.03 and 560.28.3 are the same.

    Raises:
        UsageError: `text` is not a driver version.

    """
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        raise UsageError(
            f"{text!r} is not a driver version", where="--driver", hint="write it as nvidia-smi does, e.g. 560.35.05"
        ) from None


def driver_verdict(matrix: Matrix, cell: Cell, driver: str | None = None) -> DriverVerdict | None:
    """Return what `driver` means for `cell`.

    Args:
        matrix: where the driver floors and the branches of cuda-compat are stated.
        cell: its torch says which update of the toolkit's libraries runs.
        driver: the host's version; the cell's own `driver` by default.

    Returns:
        None when no driver is known.

    Raises:
        UsageError: `driver` is not a version.

    """
    driver = driver or cell.versions.get("driver")
    if driver is None:
        return None
    from packaging.version import Version

    found = parse_driver(driver)
    release = matrix.release("cuda", cell.versions["cuda"])
    cuda = release.version
    if version_key(cuda) is None:
        return DriverVerdict(
            verdict="full", driver=driver, why=f"a {cuda} build needs no driver", source=release.source
        )
    assert isinstance(release.facts, CudaFacts)  # noqa: S101
    facts = release.facts
    gpus = _gpus(matrix, cell)
    for gpu in gpus:
        if (unknown := _unknown(gpu, found)) is not None:
            return DriverVerdict(verdict="refused", driver=driver, why=unknown, source=gpu.source)
    toolkit, full = _full_floor(matrix, cell, facts)
    if full is not None and found >= Version(full):
        return DriverVerdict(
            verdict="full",
            driver=driver,
            why=f"CUDA {toolkit} has every feature from driver {full}{_modules(gpus, cell)}",
            source=release.source,
        )
    if facts.driver_minor is not None and found >= Version(facts.driver_minor):
        major = cuda.partition(".")[0]
        missing = f"below {full}, where CUDA {toolkit} has every feature" if full else "no source states its full floor"
        return DriverVerdict(
            verdict="minor-version",
            driver=driver,
            why=f"every CUDA {major} runs from driver {facts.driver_minor} by minor-version compatibility; {missing}: "
            f"newer driver features and the driver's own PTX compiler are missing{_modules(gpus, cell)}",
            source=release.source,
        )
    floor = facts.driver_minor or full
    data_center = _data_center(matrix, cell)
    branch = str(found.major)
    if branch in facts.compat_branches and data_center:
        return DriverVerdict(
            verdict="needs-compat",
            driver=driver,
            why=f"below {floor}, and driver branch {branch} runs CUDA {cuda} with the package "
            f"cuda-compat-{cuda.replace('.', '-')} on data-center GPUs{_taken_for(cell, gpus)}, {_switch(matrix, cell)}{_modules(gpus, cell)}",
            source=release.source,
        )
    if branch in facts.compat_branches:
        reason = f"cuda-compat supports branch {branch} on data-center GPUs and some NGC-ready RTX boards only"
    elif facts.compat_branches:
        reason = f"cuda-compat for {cuda} supports the branches {', '.join(facts.compat_branches)}, not {branch}"
    else:
        reason = f"no cuda-compat for {cuda} is known to support branch {branch}"
    return DriverVerdict(
        verdict="refused",
        driver=driver,
        why=f"CUDA {cuda} needs driver {floor} or newer, and {reason}",
        source=release.source,
    )


def _full_floor(matrix: Matrix, cell: Cell, facts: CudaFacts) -> tuple[str, str | None]:
    """Return the toolkit update that the cell runs, and its floor; the newest listed update where nothing states one."""
    torch = matrix.release("torch", cell.versions["torch"]).facts
    toolkit = torch.toolkit if isinstance(torch, TorchFacts) else None
    if _is_ngc(matrix, cell):  # its torch is NVIDIA's own build, with the toolkit of the image
        toolkit = cell.versions.get("nvcc")
    if toolkit in facts.driver_full:
        return toolkit, facts.driver_full[toolkit]
    from packaging.version import Version

    newest = max(facts.driver_full.items(), key=lambda item: Version(item[1]), default=None)
    return newest if newest is not None else (cell.versions["cuda"], None)


def compat_of(matrix: Matrix, cell: Cell) -> Compat | None:
    """Return the package cuda-compat of the cell's CUDA, or None where no driver is known that it would extend."""
    release = matrix.release("cuda", cell.versions["cuda"])
    facts = release.facts
    if not isinstance(facts, CudaFacts) or facts.driver_minor is None or not facts.compat_branches:
        return None
    from packaging.version import Version

    newest = max(facts.driver_full.values(), key=Version)
    return Compat(
        cuda=release.version,
        branch=str(Version(newest).major),
        branches=facts.compat_branches,
        floor=facts.driver_minor,
    )


def lowest_driver(matrix: Matrix, cell: Cell) -> str | None:
    """Return the lowest driver that starts the cell's CUDA without cuda-compat; None where no source states one."""
    facts = matrix.release("cuda", cell.versions["cuda"]).facts
    if not isinstance(facts, CudaFacts):
        return None
    torch = matrix.release("torch", cell.versions["torch"]).facts
    toolkit = torch.toolkit if isinstance(torch, TorchFacts) else None
    return facts.driver_minor or facts.driver_full.get(toolkit or "")


def required_driver(matrix: Matrix, cell: Cell, compat: Compat | None) -> str | None:
    """Return which drivers an image needs, as NVIDIA_REQUIRE_CUDA states it; None where no source states the lowest one.

    Words with a space between them are alternatives, and a comma joins what must hold together: `driver>=525.60.13
    driver>=470,driver<471`. The container toolkit compares versions number by number.

    Args:
        matrix: where the lowest drivers are stated.
        cell: its CUDA, and its GPUs, whose first driver branch may be a later one.
        compat: the package that extends older drivers, where the image has it.

    """
    lowest = lowest_driver(matrix, cell)
    if lowest is None:
        return None
    firsts = [
        g.facts.first_driver for g in _gpus(matrix, cell) if isinstance(g.facts, GpuFacts) and g.facts.first_driver
    ]
    known = min(firsts, key=int, default="0")  # an image for several GPUs starts where the first of them does
    if int(known) > int(lowest.partition(".")[0]):
        lowest = known
    older = [b for b in (compat.branches if compat else ()) if int(b) >= int(known)]
    return " ".join([f"driver>={lowest}", *(f"driver>={b},driver<{int(b) + 1}" for b in older)])


def carries_compat(matrix: Matrix, cell: Cell) -> bool:
    """Return whether an image for the cell's own `driver` has to contain cuda-compat; NVIDIA's PyTorch images have it."""
    if _is_ngc(matrix, cell):
        return False
    verdict = driver_verdict(matrix, cell)
    return verdict is not None and verdict.verdict == "needs-compat"


def _is_ngc(matrix: Matrix, cell: Cell) -> bool:
    facts = matrix.release("base", cell.versions["base"]).facts
    return isinstance(facts, BaseFacts) and facts.kind == "ngc"


def _switch(matrix: Matrix, cell: Cell) -> str:
    if _is_ngc(matrix, cell):
        return "which the base image has and its own start script switches on"
    return "which the image contains and switches on as it starts, on hosts with such a driver alone"


def needs_compat(release: Release, driver: str) -> bool:
    """Return whether a `driver` starts a CUDA release with the cuda-compat package alone, if at all."""
    facts, found = release.facts, version_key(driver)
    if not isinstance(facts, CudaFacts) or facts.driver_minor is None or found is None:
        return False
    lowest = version_key(facts.driver_minor)
    return lowest is not None and found < lowest


def _gpus(matrix: Matrix, cell: Cell) -> tuple[Release, ...]:
    return tuple(matrix.release("gpu", name) for name in gpus_in(cell.versions))


def _unknown(gpu: Release, found: "Version") -> str | None:
    """Return why a driver does not know a GPU, or None when nothing says so."""
    facts = gpu.facts
    if not isinstance(facts, GpuFacts):
        return None
    if facts.first_driver and found.major < int(facts.first_driver):
        return f"{gpu.version} is known to driver branch {facts.first_driver} and later; no cuda-compat changes that"
    if facts.last_driver and found.major > int(facts.last_driver):
        return f"driver branch {facts.last_driver} is the last that knows {gpu.version}"
    return None


def _modules(gpus: Sequence[Release], cell: Cell) -> str:
    """Name the GPUs, or the boards with an Arm processor where the cell is for one, that the open kernel modules alone drive."""
    return "".join(
        f"; {' and '.join(gpu.facts.open_modules_on) or gpu.version} needs the driver of NVIDIA's open kernel modules "
        f"({gpu.facts.open_modules})"
        for gpu in gpus
        if isinstance(gpu.facts, GpuFacts)
        and gpu.facts.open_modules
        and (not gpu.facts.open_modules_on or cell.arch != X86_64)
    )


def _taken_for(cell: Cell, gpus: Sequence[Release]) -> str:
    """Say that a GPU is taken for a data-center one where its architecture is on other boards, too, and no board is named."""
    if cell.versions.get("board"):
        return ""
    several = [g.version for g in gpus if isinstance(g.facts, GpuFacts) and (g.facts.workstation or g.facts.geforce)]
    return f" ({' and '.join(several)} is taken for one; --gpu BOARD says which it is)" if several else ""


def _data_center(matrix: Matrix, cell: Cell) -> bool:
    # without a GPU nothing says that cuda-compat may be used
    board = cell.versions.get("board")
    if board in {"geforce", "workstation"}:
        return False
    if board is not None:
        return True  # the rules have refused what no data-center GPU is of
    gpus = _gpus(matrix, cell)
    return bool(gpus) and all(isinstance(gpu.facts, GpuFacts) and gpu.facts.data_center for gpu in gpus)
