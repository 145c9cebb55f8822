"""A folder of compiled wheels that pip and uv install from: an index per torch build and GPU.

A wheel's file name says nothing of the torch build and the GPU that it was compiled for, and two such wheels have the same
name. So there is an index for each, as PyTorch has one per CUDA: `DIR/torch2.11.0-cu130-sm90/`. Pages follow PEP 503
and, for a server that hands out JSON, PEP 691. The files lie once, by hash, under `DIR/files`.
"""

import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from envbuild.errors import LockError, UsageError
from envbuild.pipeline.wheels import ListedWheel, require_some
from envbuild.util.names import SafeName, checked, shown
from envbuild.util.scratch import scratch

_PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Index:
    """The wheels for one torch build and GPU."""

    name: str
    torch: str
    sm: int | None
    """SM number of the GPU; None where no wheel for this torch build has GPU code."""
    wheels: tuple[ListedWheel, ...]

    @property
    def projects(self) -> dict[str, list[ListedWheel]]:
        """The wheels by normalised project name, in order."""
        found: dict[str, list[ListedWheel]] = {}
        for wheel in sorted(self.wheels, key=lambda w: (w.file.project, w.file.version, w.file.name)):
            found.setdefault(wheel.file.project, []).append(wheel)
        return found

    @property
    def about(self) -> str:
        """What it is for, in words."""
        return f"torch {self.torch}, {'any GPU' if self.sm is None else f'sm_{self.sm}'}"


def indexes_of(wheels: Iterable[ListedWheel]) -> tuple[list[Index], list[ListedWheel]]:
    """Group wheels by torch build and GPU; return the groups, and the wheels whose torch build is not known.

    A wheel is in the index of each GPU that runs it as it is, and one without GPU code in each index of its torch build.
    Where a wheel of the same name was compiled for that GPU, it is that one, and before it one that was compiled for that GPU
    alone and not for a mixed fleet.

    Raises:
        UsageError: two wheels of one group have the same file name.

    """
    unknown: list[ListedWheel] = []
    by_torch: dict[str, list[ListedWheel]] = {}
    for wheel in wheels:
        (unknown if wheel.torch is None else by_torch.setdefault(wheel.torch, [])).append(wheel)
    found = []
    for torch, mine in sorted(by_torch.items()):
        sms: list[int | None] = [*sorted({sm for wheel in mine for sm in wheel.sms})]
        for sm in sms or [None]:
            members = [wheel for wheel in mine if sm is None or wheel.runs_on(sm)]
            exact = {wheel.file.name for wheel in members if sm in wheel.sms}
            members = [wheel for wheel in members if sm in wheel.sms or wheel.file.name not in exact]
            alone = {wheel.file.name for wheel in members if wheel.sms == {sm}}
            members = [wheel for wheel in members if wheel.sms == {sm} or wheel.file.name not in alone]
            _require_distinct(members)
            found.append(Index(name=_name_of(torch, sm), torch=torch, sm=sm, wheels=tuple(members)))
    return found, unknown


def _name_of(torch: str, sm: int | None) -> str:
    text = f"torch{torch.replace('+', '-')}" + ("" if sm is None else f"-sm{sm}")
    try:
        return checked(SafeName, text)
    except ValueError as error:
        raise UsageError(f"a wheel's torch build cannot name a folder: {error}") from None


def _require_distinct(wheels: Sequence[ListedWheel]) -> None:
    seen: dict[str, ListedWheel] = {}
    for wheel in wheels:
        other = seen.setdefault(wheel.file.name, wheel)
        if other is not wheel and other.kept.record.sha256 != wheel.kept.record.sha256:
            raise UsageError(
                f"two wheels for one torch build and GPU have the name {wheel.file.name}: {_difference(other, wheel)}",
                where=f"keys {other.kept.key[:16]} and {wheel.kept.key[:16]}",
                hint="choose: --key DIGITS names one, and --component, --torch and --python choose among the others",
            )


def _difference(one: ListedWheel, other: ListedWheel) -> str:
    mine, theirs = (w.kept.inputs.values if w.kept.inputs else {} for w in (one, other))
    names = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    return f"they differ in {', '.join(shown(name, 40) for name in names)}" if names else "they were compiled alike"


def export(wheels: Sequence[ListedWheel], folder: Path) -> tuple[list[Index], list[ListedWheel]]:
    """Write indexes of `wheels` to a new folder; return them, and the wheels that were left out: their torch build is not known.

    Raises:
        UsageError: the folder holds something, or two wheels have one name.
        LockError: there is no wheel, or one changed while it was copied.
        OSError: it cannot be written.

    """
    indexes, left_out = indexes_of(wheels)
    require_some([wheel for index in indexes for wheel in index.wheels], str(folder))
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageError(
            "this is no new or empty folder", where=shown(str(folder)), hint="name one that does not exist yet"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch("index", folder.parent) as private:
        made = private / "index"
        made.mkdir(mode=0o755)
        for wheel in {w.kept.record.sha256: w for index in indexes for w in index.wheels}.values():
            _copy(wheel, made / "files" / wheel.kept.record.sha256)
        for index in indexes:
            _write_index(index, made / index.name)
        _write(made / "index.html", _front(indexes))
        made.rename(folder)  # takes the place of an empty folder
    return indexes, left_out


def _copy(wheel: ListedWheel, folder: Path) -> None:
    folder.mkdir(parents=True)
    digest = hashlib.sha256()
    with wheel.kept.path.open("rb") as source, (folder / wheel.file.name).open("xb") as target:
        while piece := source.read(_PIECE):
            digest.update(piece)
            target.write(piece)
    if digest.hexdigest() != wheel.kept.record.sha256:
        raise LockError(f"{wheel.file.name} changed while it was copied", where=str(wheel.kept.folder))
    (folder / f"{wheel.file.name}.metadata").write_bytes(wheel.file.metadata)


def _write_index(index: Index, folder: Path) -> None:
    projects = index.projects
    meta = {"api-version": "1.1"}
    names = [{"name": name} for name in projects]
    _write(folder / "index.json", json.dumps({"meta": meta, "projects": names}, indent=1))
    links = "".join(f'<a href="{name}/">{name}</a><br>\n' for name in projects)
    _write(folder / "index.html", _page(index.about, f"<h1>{_text(index.about)}</h1>\n{links}"))
    for name, wheels in projects.items():
        files = [_file(wheel) for wheel in wheels]
        versions = list(dict.fromkeys(str(wheel.file.version) for wheel in wheels))
        page = {"meta": meta, "name": name, "versions": versions, "files": files}
        _write(folder / name / "index.json", json.dumps(page, indent=1))
        lines = "".join(_line(wheel, file) for wheel, file in zip(wheels, files, strict=True))
        _write(folder / name / "index.html", _page(f"{name}, {index.about}", f"<h1>{_text(name)}</h1>\n{lines}"))


def _file(wheel: ListedWheel) -> dict[str, Any]:
    """Return the wheel as PEP 691 and PEP 714 describe a file; keys that start with an underscore are ours."""
    sha256, name = wheel.kept.record.sha256, wheel.file.name
    found: dict[str, Any] = {
        "filename": name,
        "url": f"../../files/{sha256}/{quote(name)}",
        "hashes": {"sha256": sha256},
        "size": wheel.kept.size,
        "core-metadata": {"sha256": hashlib.sha256(wheel.file.metadata).hexdigest()},
        "yanked": False,
        "_torch": wheel.torch,
        "_gpu_code": list(wheel.gpus),
        "_key": wheel.kept.key,
    }
    if wheel.file.requires_python:
        found["requires-python"] = wheel.file.requires_python
    return found


def _line(wheel: ListedWheel, file: Mapping[str, Any]) -> str:
    requires = f' data-requires-python="{_text(file["requires-python"])}"' if "requires-python" in file else ""
    metadata = f"sha256={file['core-metadata']['sha256']}"
    facts = [
        f"torch {wheel.torch}",
        ", ".join(wheel.file.platforms),
        f"GPU code for {', '.join(wheel.gpus)}" if wheel.gpus else "no GPU code",
        *([wheel.kept.record.nvcc] if wheel.kept.record.nvcc else []),
        *([f"gcc {wheel.kept.record.gcc}"] if wheel.kept.record.gcc else []),
        f"key {wheel.kept.key}",
    ]
    return (
        f'<p><a href="{_text(file["url"])}#sha256={file["hashes"]["sha256"]}"{requires}'
        f' data-core-metadata="{metadata}" data-dist-info-metadata="{metadata}">{_text(wheel.file.name)}</a><br>\n'
        f"{_text('; '.join(facts))}</p>\n"
    )


def _front(indexes: Sequence[Index]) -> str:
    rows = "".join(
        f'<tr><td><a href="{_text(i.name)}/">{_text(i.name)}</a></td><td>{_text(i.about)}</td>'
        f"<td>{_text(', '.join(i.projects))}</td></tr>\n"
        for i in indexes
    )
    return _page("Compiled wheels", f"<h1>Compiled wheels</h1>\n<table>\n{rows}</table>\n")


def _page(title: str, body: str) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="pypi:repository-version" content="1.1">\n'
        f"<title>{_text(title)}</title>\n</head>\n<body>\n{body}</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return html.escape(re.sub(r"[^\x20-\x7e]", "?", text))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
