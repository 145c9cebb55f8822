"""Proposals for new releases: TOML for the end of an axis file, with what no metadata states marked `# to fill in:`."""

import datetime as dt
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.curate.findings import MatrixFinding
from envbuild.errors import DataError
from envbuild.matrix.model import AxisName
from envbuild.util.quote import comment

_GAP = "# to fill in: "


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One release that an upstream has and the matrix has not."""

    axis: AxisName
    version: str
    release: Mapping[str, Any]
    to_fill_in: tuple[str, ...] = ()
    """What no metadata states, for a person."""
    remarks: tuple[str, ...] = ()
    """What metadata states and no release holds: a rule or a cap to write."""

    def toml(self) -> str:
        """Return the release as TOML, what is missing as comments above it."""
        lines = [f"{_GAP}{comment(text)}" for text in self.to_fill_in]
        lines += [f"# metadata: {comment(text)}" for text in self.remarks]
        lines += ["[[release]]", *(f"{key} = {_value(value)}" for key, value in self.release.items() if value)]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, kw_only=True)
class Proposals:
    """Everything that was found, the upstreams that answered, and those that could not be asked."""

    found: tuple[Proposal, ...]
    asked: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()


def unfilled(folder: Path) -> Iterator[MatrixFinding]:
    """Yield what nobody filled in: each line of the axis files in `folder` that a proposal left for a person."""
    for path in sorted(folder.glob("*.toml")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.startswith(_GAP):
                text = f"to fill in: {line.removeprefix(_GAP)}; remove the line when it is done"
                yield MatrixFinding(level="error", where=f"{path.name}:{number}", text=text)


def append(folder: Path, proposals: Sequence[Proposal]) -> list[Path]:
    """Append `proposals` to the axis files of `folder`, changing no line that is there; return the files.

    Raises:
        DataError: an axis has no file, or its file lists the version already.

    """
    by_axis: dict[AxisName, list[Proposal]] = {}
    for proposal in proposals:
        by_axis.setdefault(proposal.axis, []).append(proposal)
    changed = []
    for axis, several in by_axis.items():
        path = folder / f"{axis}.toml"
        if not path.is_file():
            raise DataError(
                f"there is no file for the axis {axis}", where=str(path), hint="name the folder of a matrix"
            )
        text = path.read_text(encoding="utf-8")
        if re.search(r"^\[\[rule\]\]", text.partition("[[release]]")[2], re.MULTILINE):
            raise DataError(
                "the file has rules after its releases, so releases cannot be appended",
                where=str(path),
                hint="move its rules to rules.toml, or paste the proposals by hand",
            )
        for proposal in several:
            if f'version = "{proposal.version}"' in text:
                raise DataError(
                    f"{axis} {proposal.version} is listed already", where=str(path), hint="run the update again"
                )
        path.write_text(text.rstrip("\n") + "\n\n" + "\n".join(p.toml() for p in several), encoding="utf-8")
        changed.append(path)
    return changed


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return str(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)
