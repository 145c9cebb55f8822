"""The compiled wheels of this machine, as they are listed and chosen for an index."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.engine.wheel_file import WheelFile, check_wheel
from envbuild.engine.wheels import KeptWheel, kept_wheels
from envbuild.errors import LockError
from envbuild.settings import Settings
from envbuild.util.scratch import scratch
from envbuild.verify.binaries.files import read_wheel_binaries
from envbuild.verify.binaries.gpu_code import Code


@dataclass(frozen=True, kw_only=True)
class ListedWheel:
    """A kept wheel, with what its file says."""

    kept: KeptWheel
    file: WheelFile
    codes: tuple[Code, ...]
    """The GPU code that it holds; none where it has none."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """The architectures that it holds GPU code for, such as sm_90 or compute_90."""
        return tuple(str(code) for code in self.codes)

    @property
    def sms(self) -> frozenset[int]:
        """The SM numbers of its cubins."""
        return frozenset(code.sm for code in self.codes if not code.ptx)

    def runs_on(self, sm: int) -> bool:
        """Return whether a GPU runs it as it is, without PTX; what has no GPU code runs on any."""
        return not self.codes or any(code.runs_on(sm) for code in self.codes if not code.ptx)

    @property
    def torch(self) -> str | None:
        """The version of the torch build that it was compiled against, where that is known."""
        return self.kept.inputs.torch if self.kept.inputs else None

    def as_json(self) -> dict[str, Any]:
        """Return the wheel as JSON values."""
        return {
            "key": self.kept.key,
            "component": self.kept.record.component,
            "wheel": self.file.name,
            "sha256": self.kept.record.sha256,
            "size_bytes": self.kept.size,
            "torch": self.torch,
            "python": self.kept.inputs.python if self.kept.inputs else None,
            "platforms": list(self.file.platforms),
            "gpu_code": list(self.gpus),
            "nvcc": self.kept.record.nvcc,
            "gcc": self.kept.record.gcc,
            "inputs": dict(self.kept.inputs.values) if self.kept.inputs else None,
        }


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Which wheels are meant; an empty list means all. Each is a pattern of the shell's kind."""

    components: Sequence[str] = ()
    torch: Sequence[str] = ()
    pythons: Sequence[str] = ()
    keys: Sequence[str] = ()
    """First digits of keys."""

    def takes(self, wheel: KeptWheel) -> bool:
        """Return whether a wheel is one of them."""
        torch = wheel.inputs.torch if wheel.inputs else ""
        python = wheel.inputs.python if wheel.inputs else ""
        return (
            _any(wheel.record.component, self.components)
            and _any(torch, self.torch)
            and _any(python, self.pythons)
            and (not self.keys or any(wheel.key.startswith(key) for key in self.keys))
        )


def _any(text: str, patterns: Iterable[str]) -> bool:
    patterns = tuple(patterns)
    return not patterns or any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns)


ALL = Chosen()


def listed_wheels(settings: Settings, chosen: Chosen = ALL) -> tuple[list[ListedWheel], dict[str, str]]:
    """Return the chosen wheels of this machine, and why each folder of the store that is damaged is passed over.

    Every byte of a wheel is checked: against its record, and against the RECORD inside.
    """
    found = []
    wheels, faults = kept_wheels(settings)
    for wheel in wheels:
        if not chosen.takes(wheel):
            continue
        try:
            found.append(_looked_into(wheel))
        except ValueError as error:
            faults[wheel.folder.name] = str(error)
    return found, faults


def _looked_into(wheel: KeptWheel) -> ListedWheel:
    file = check_wheel(wheel.path, wheel.record.wheel)
    with scratch("binaries") as folder:
        binaries = read_wheel_binaries(wheel.path, folder).binaries.values()
    codes = {code for binary in binaries if binary.gpu for code in binary.gpu.codes}
    return ListedWheel(kept=wheel, file=file, codes=tuple(sorted(codes)))


def require_some(wheels: Sequence[ListedWheel], where: str) -> None:
    """Check that there is a wheel.

    Raises:
        LockError: there is none.

    """
    if not wheels:
        raise LockError(
            "no compiled wheel fits",
            where=where,
            hint="`envbuild wheels list` shows what is here; `envbuild image` compiles the wheels of a cell",
        )
