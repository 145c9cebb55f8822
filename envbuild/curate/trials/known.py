"""What a run of trials knows of .cu files: what was read before is not read again.

Releases of a component have many kernels in common, and torch's headers take nearly all the time of each.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from envbuild.evidence.trials import Verdict

TOGETHER = "together.cu"
"""The file that includes several .cu files, to read them as one translation unit."""
_MARKER = re.compile(rb'^# \d+ "(?P<path>[^"\n]*)"')

_WORD = re.compile(rb"[A-Za-z_]\w*")


class Checked(NamedTuple):
    """What became of one file."""

    verdict: Verdict
    first: str = ""


class _Component(NamedTuple):
    """The files of a component that were read, by their hashes, and what became of its .cu files."""

    files: dict[str, str]
    found: dict[str, Checked]


@dataclass
class Known:
    """What a run of trials knows of preprocessed files.

    A front end says the same of the same text. Paths that differ by release (the component's folder) and by run (the scratch
    folder) do not count.
    """

    answers: dict[str, str] = field(default_factory=dict)
    """Hash of what was read -> what the front end printed of it; empty where it took it."""
    _components: dict[tuple[object, ...], list[_Component]] = field(default_factory=dict)
    _read: dict[Path, str] | None = field(default_factory=dict)
    """File of the component -> hash, of what was read since `start`; None where that is not known."""
    _renamed: dict[str, set[str]] = field(default_factory=dict)
    """Hash of a .cu file -> the names that it defines as another one does."""
    _fixed: set[str] = field(default_factory=set)
    _text: tuple[bytes, Path] | None = None
    """The last preprocessed text, and the component's folder."""
    _refused: set[str] = field(default_factory=set)

    def fix(self, name: str) -> bool:
        """Note that a name, without its scope, gets no number in any file; return whether that is new."""
        new = name not in self._fixed
        self._fixed.add(name)
        return new

    def rename(self, unit: Path, names: Iterable[str]) -> bool:
        """Note names that a .cu file, or a header that it includes, defines as another one does; return whether one is new."""
        known = self._renamed.setdefault(_hash(unit.read_bytes()), set())
        new = {name for name in names if name.rpartition("::")[2] not in self._fixed} - known
        known |= new
        return bool(new)

    def renamed(self, unit: Path) -> list[str]:
        """Return the names that are noted for a .cu file with this content, and may get a number."""
        names = self._renamed.get(_hash(unit.read_bytes()), ())
        return sorted(name for name in names if name.rpartition("::")[2] not in self._fixed)

    def refuse(self, unit: Path) -> None:
        """Note that a .cu file with this content did not pass by itself."""
        self._refused.add(_hash(unit.read_bytes()))

    def is_refused(self, unit: Path) -> bool:
        """Return whether one with this content did not."""
        return _hash(unit.read_bytes()) in self._refused

    def start(self) -> None:
        """Note from here on which files of a component are read."""
        self._read = {}

    def note_files(self, text: bytes | None, root: Path) -> None:
        """Note the files in `root` that a preprocessed text comes from; None where that is not known."""
        self._text = None if text is None else (text, root)
        files = None if text is None else _files_in(text, root)
        if files is None or self._read is None or not all(file.is_file() for file in files):
            self._read = None
        else:
            self._read |= {path: _hash(path.read_bytes()) for path in files if path not in self._read}

    def words_outside(self) -> frozenset[str] | None:
        """Return the words of the last preprocessed text that come from no file of the component; None where there is none."""
        return None if self._text is None else _words_outside(*self._text)

    def keep(self, asked: tuple[object, ...], root: Path, found: Mapping[str, Checked]) -> None:
        """Keep what became of a component's .cu files, next to the files that were read since `start`.

        Args:
            asked: how they were read: the front end, its flags and the files' names.
            root: the component's folder.
            found: path in the component -> what became of it.

        """
        if self._read:
            files = {str(path.relative_to(root)): known for path, known in self._read.items()}
            self._components.setdefault(asked, []).append(_Component(files, dict(found)))

    def same(self, asked: tuple[object, ...], root: Path) -> dict[str, Checked]:
        """Return what became of the .cu files of a component with the same files as the one in `root`; empty if none is known."""
        for component in self._components.get(asked, []):
            if all(
                (file := root / path).is_file() and _hash(file.read_bytes()) == known
                for path, known in component.files.items()
            ):
                return component.found
        return {}


def _files_in(text: bytes, root: Path) -> list[Path]:
    """Return the files in `root` that a preprocessed text comes from."""
    start = f'"{root}/'.encode()
    lines = (line for line in text.split(b"\n") if line.startswith(b"# ") and start in line)
    paths = dict.fromkeys(match["path"] for line in lines if (match := _MARKER.match(line)))
    return [Path(os.fsdecode(path)) for path in paths]


def _words_outside(text: bytes, root: Path) -> frozenset[str]:
    start = f"{root}/".encode()
    words = set[bytes]()
    # the first part comes before any marker
    for part in re.split(rb'^(?=# \d+ ")', text, flags=re.MULTILINE):
        marker = _MARKER.match(part)
        if marker is None or not (marker["path"].startswith(start) or marker["path"].endswith(f"/{TOGETHER}".encode())):
            words |= set(_WORD.findall(part))
    return frozenset(word.decode() for word in words)


def anonymous(text: bytes, folders: Sequence[Path]) -> bytes:
    """Return a text in which each of `folders` is a number."""
    for number, folder in enumerate(folders):
        text = text.replace(f"{folder}/".encode(), f"<{number}>/".encode())
    return text


def named(text: str, folders: Sequence[Path]) -> str:
    """Return the text that `anonymous` was given."""
    for number, folder in enumerate(folders):
        text = text.replace(f"<{number}>/", f"{folder}/")
    return text


def key_of(command: Sequence[str], text: bytes) -> str:
    """Return what a front end's answer is kept under: the hash of how it is called, and of what it reads."""
    return _hash("\0".join(command).encode() + b"\0" + text)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
