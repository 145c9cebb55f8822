"""The compiled wheels that this machine keeps: each with its build record and with what it was compiled from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.engine.kept import inputs_file, wheel_fault
from envbuild.plan.stages import digest_of
from envbuild.settings import Settings
from envbuild.util.below import OutsideError, read_below, read_file
from envbuild.util.foreign_json import parse_json
from envbuild.util.model import Field, Model
from envbuild.util.names import FileName, Line, SafeName, Sha256, shown

_BYTES = 1 << 20
"""Bytes of a record, and of a list of inputs; each has fewer than 10,000."""
FOLDER = re.compile(r"([a-z0-9][a-z0-9-]*)-([0-9a-f]{32})", re.ASCII)
"""The name of a kept wheel's folder: component and the first half of its key."""


class BuildRecord(Model):
    """What a build says of the wheel that it made: `record.json` next to the wheel."""

    component: SafeName
    wheel: FileName
    sha256: Sha256
    extensions: tuple[Line, ...] = Field(default=(), max_length=10_000)
    gcc: Line | None = None
    nvcc: Line | None = None
    ptxas: Line | None = None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a wheel was compiled from: the text that its key is the sha256 of, read."""

    text: str
    stage: str
    values: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The wheel's key."""
        return digest_of(self.text)

    @property
    def component(self) -> str:
        """The component that was compiled."""
        return self.stage.removeprefix("wheel-")

    @property
    def torch(self) -> str:
        """The version of the torch build that it was compiled against."""
        stated = self.values.get("torch")
        return str(stated[0] if isinstance(stated, list) and stated else stated)

    @property
    def python(self) -> str:
        """The Python, such as 3.12."""
        return str(self.values.get("python"))

    @property
    def gaps(self) -> tuple[str, ...]:
        """The inputs that are not named by a hash or a version: what such a key names may be one thing here and another there."""
        torch, nvcc, found = self.values.get("torch"), self.values.get("nvcc"), []
        if not self.values.get("source"):
            found.append("its source")
        if not (isinstance(torch, list) and len(torch) > 1):
            found.append("torch's build")
        toolkit = nvcc[-1] if isinstance(nvcc, list) and nvcc else nvcc
        if toolkit is not None and not (isinstance(toolkit, dict) or str(toolkit).startswith("sha256:")):
            found.append("the CUDA toolkit")
        found += [name for name in ("compiler", "tools") if not isinstance(self.values.get(name), dict)]
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class KeptWheel:
    """A sound wheel of the store."""

    folder: Path
    record: BuildRecord
    inputs: Inputs | None
    """None for a wheel of an envbuild that did not note them; the next build that uses it does."""
    size: int
    """Bytes of the wheel."""

    @property
    def key(self) -> str:
        """Its key; the first 32 digits where its inputs are not known."""
        return self.inputs.key if self.inputs else self.folder.name[-32:]

    @property
    def path(self) -> Path:
        """The wheel."""
        return self.folder / self.record.wheel


def parse_record(body: bytes) -> BuildRecord:
    """Return a build record.

    Raises:
        ValueError: it is none.

    """
    return BuildRecord.model_validate(parse_json(body, limit=_BYTES))


def parse_inputs(body: bytes) -> Inputs:
    """Return what a wheel was compiled from. That it is the text of a key is the caller's to compare.

    Raises:
        ValueError: it is no such text.

    """
    value = parse_json(body, limit=_BYTES)
    stage, values = (value.get("stage"), value.get("inputs")) if isinstance(value, dict) else (None, None)
    if (
        not isinstance(stage, str)
        or not re.fullmatch(r"wheel-[a-z0-9][a-z0-9-]{0,63}", stage)
        or not isinstance(values, dict)
    ):
        raise ValueError("it names no inputs of a wheel")
    return Inputs(text=body.decode("utf-8"), stage=stage, values=values)


def inputs_of_wheel(folder: Path) -> Inputs | None:
    """Return the inputs that are noted of a kept wheel, None where there are none, or where they are not those of its key."""
    try:
        found = parse_inputs(read_file(inputs_file(folder), limit=_BYTES))
    except (OSError, OutsideError, ValueError):
        return None
    return found if folder.name == f"{found.component}-{found.key[:32]}" else None


def read_kept(folder: Path) -> KeptWheel:
    """Return the kept wheel in a folder of the store, every byte of it checked against its record.

    Raises:
        ValueError: it is not what its record says.

    """
    name = FOLDER.fullmatch(folder.name)
    if name is None:
        raise ValueError("its folder is not named by a component and a key")
    if (fault := wheel_fault(folder)) is not None:
        raise ValueError(fault)
    try:
        record = parse_record(read_below(folder, "record.json", limit=_BYTES))
        size = (folder / record.wheel).stat().st_size
    except (OSError, OutsideError) as error:
        raise ValueError(shown(str(error))) from None
    if record.component != name[1]:
        raise ValueError(f"its record is one of {shown(record.component)}")
    return KeptWheel(folder=folder, record=record, inputs=inputs_of_wheel(folder), size=size)


def kept_wheels(settings: Settings) -> tuple[list[KeptWheel], dict[str, str]]:
    """Return every sound wheel of this machine, by component and key, and why each other folder is none, by its name."""
    found, faults = [], {}
    try:
        folders = sorted((settings.cache_dir / "wheels").iterdir())
    except OSError:
        return [], {}
    for folder in folders:
        if not FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
            continue
        try:
            found.append(read_kept(folder))
        except ValueError as error:
            faults[folder.name] = str(error).partition("\n")[0]
    return found, faults
