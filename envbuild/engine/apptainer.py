"""Apptainer's own commands: sandboxes and .sif files made and looked at. Nothing of an image runs here, and no network is asked."""

import json
import os
import re
import shutil
import stat
from collections import deque
from pathlib import Path
from typing import Any

from envbuild.engine import squashfs
from envbuild.errors import HostError
from envbuild.util.below import open_below, remove_below
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import last_text
from envbuild.util.processes import bounded, followed
from envbuild.util.text import plain

LABEL = "io.envbuild.image"
"""Label of a sandbox or .sif: which OCI image it was made from, as JSON."""
INSTALL = (
    "install Apptainer: https://apptainer.org/docs/admin/main/installation.html (Debian sid, EPEL and conda-forge have it), "
    "or Docker: scripts/install-engine (Debian, Ubuntu)"
)
FOLDER = ".singularity.d"
"""The folder in the root of a sandbox that Apptainer makes: its labels, and scripts that each start of a container runs."""
_LINKS = {
    ".exec": "actions/exec",
    ".run": "actions/run",
    ".shell": "actions/shell",
    ".test": "actions/test",
    "apptainer": "runscript",
    "environment": "env/90-environment.sh",
    "singularity": "runscript",
}
"""The links to it that Apptainer makes (its internal/pkg/build/sources/base_environment.go)."""
_LABELS = f"{FOLDER}/labels.json"
_JSON_LIMIT = 4 << 20
_LOOK_S = 60.0
_FILE_SYSTEM = re.compile(rb"\|(\d{1,15})-\d{1,15}\s*\|FS \(([^)\n]{0,80})\)")
_KEPT_LINES = 50
OWN_FAILURE = 255
"""Apptainer's exit code where it starts nothing. A program in the container can end with it, too."""
_FATAL = re.compile(r"^FATAL\s*:(.*)$", re.MULTILINE)
_OWN_VARIABLES = re.compile(r"(APPTAINER|SINGULARITY)")
_KEPT_VARIABLES = frozenset({"APPTAINER_CONFDIR"})


def program() -> str:
    """Return the name of the command.

    Raises:
        HostError: there is none.

    """
    if shutil.which("apptainer") is None:
        raise HostError("the command apptainer is missing", hint=INSTALL)
    return "apptainer"


def version() -> str:
    """Return the version of the command, such as `1.4.5`; `unknown` where it does not say."""
    result = bounded([program(), "--version"], seconds=_LOOK_S, limit=1 << 16)
    found = re.search(rb"version ([0-9][\w.+-]{0,40})", result.out)
    return found[1].decode() if found else "unknown"


def is_made(name: str, root: int) -> bool:
    """Return whether Apptainer put `name` into the root of a sandbox: its folder, or one of its links into that.

    Args:
        name: an entry of the root. The image is not trusted: it may have something else under this name.
        root: the open folder.

    """
    if name != FOLDER and name not in _LINKS:
        return False
    mode = os.lstat(name, dir_fd=root).st_mode
    if name == FOLDER:
        return stat.S_ISDIR(mode)
    return stat.S_ISLNK(mode) and os.readlink(name, dir_fd=root).removeprefix("/") == f"{FOLDER}/{_LINKS[name]}"


def own_environment(scratch: Path | None = None) -> dict[str, str]:
    """Return this process's environment without what would change how Apptainer runs: mounts, options and variables of others.

    Args:
        scratch: a folder for what a build unpacks on its way; as the site has it by default.

    """
    kept = {
        name: value for name, value in os.environ.items() if not _OWN_VARIABLES.match(name) or name in _KEPT_VARIABLES
    }
    places = {"APPTAINER_TMPDIR": str(scratch), "APPTAINER_CACHEDIR": str(scratch)} if scratch else {}
    return kept | places


def build(target: Path, source: str, *, scratch: Path, sandbox: bool) -> None:
    """Make a sandbox or a .sif out of an image.

    Args:
        target: what is made; it must not be there.
        source: as Apptainer names it: `oci:FOLDER`, a sandbox's or a .sif's path.
        scratch: a folder on a disk with room for the unpacked image, next to `target` where that is a folder.
        sandbox: whether a folder is made and not a .sif.

    Raises:
        HostError: Apptainer is missing, or it failed.

    """
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    command = [program(), "build", *(["--sandbox"] if sandbox else []), str(target), source]
    if followed(command, feed=lines.append, env=own_environment(scratch), stdout=True):
        raise HostError(
            f"Apptainer could not unpack the image: {last_words(''.join(lines))}",
            where=str(target),
            hint="it needs room for the unpacked image, and user namespaces where you are not root; `envbuild doctor` looks",
        )


def unpack_sif(path: Path, target: Path) -> None:
    """Unpack the file system of a .sif into the new folder `target`. Nothing of it is mounted or runs; see `squashfs.unpack`.

    Apptainer's own way starts a container with every right of root, which a host that gives fewer refuses.

    Raises:
        HostError: `unsquashfs` is missing or failed, or the disk has no room for it.
        ValueError: it is no .sif, its file system is of another kind, or it is out of bounds.

    """
    found = _FILE_SYSTEM.findall(_listed(path))
    systems = [start for start, kind in found if re.match(rb"Squashfs/\*System/", kind)]
    if len(systems) != 1:
        raise ValueError(f"it has {len(systems)} squashfs file systems to run, and one is needed")
    if len(found) > 1:  # Apptainer lays an overlay over the one that is read here
        raise ValueError(f"it has {len(found)} file systems, and what runs may be more than the one that is read")
    squashfs.unpack(path, int(systems[0]), target)


def _listed(path: Path) -> bytes:
    """Return the table of what a .sif holds.

    Raises:
        ValueError: it is no .sif.

    """
    listed = bounded([program(), "sif", "list", str(path)], seconds=_LOOK_S, limit=1 << 20, env=own_environment())
    if listed.code or listed.fault:
        raise ValueError(f"it is no .sif: {last_words(listed.err.decode('utf-8', 'replace'))}")
    return listed.out


def last_words(output: str) -> str:
    """Return the last line that Apptainer printed, fit for a terminal."""
    return last_text(output) or "it gave no reason"


def fatal(output: str) -> str | None:
    """Return what Apptainer's own failure says, a line that begins with FATAL; None where it printed none."""
    found = _FATAL.search(plain(output))
    return found[1].strip() if found else None


def labels_of_sandbox(folder: Path) -> dict[str, Any]:
    """Return the labels of a sandbox; empty where it has none.

    Raises:
        ValueError: they cannot be read.

    """
    try:
        handle = open_below(folder, _LABELS)
    except FileNotFoundError:
        return {}
    with os.fdopen(handle, "rb") as file:
        return _table(parse_json(file.read(_JSON_LIMIT + 1), limit=_JSON_LIMIT))


def add_label(folder: Path, text: str) -> None:
    """Write which image a sandbox of ours was made from. The image may have links in place of Apptainer's folder and file.

    Raises:
        ValueError: its labels cannot be read, or they are a link.

    """
    labels = labels_of_sandbox(folder) | {LABEL: text}
    remove_below(folder, _LABELS)
    handle = open_below(folder, _LABELS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(labels, indent=1))


def labels_of_sif(path: Path) -> dict[str, Any]:
    """Return the labels of a .sif, from the metadata in it; empty where it has none. Nothing of it is mounted or runs.

    Raises:
        ValueError: it is no .sif, or they cannot be read.
        HostError: Apptainer is missing.

    """
    env = own_environment()
    for number in re.findall(rb"^(\d{1,6})\s*\|.*\|JSON\.Generic\s*$", _listed(path), re.MULTILINE)[:20]:
        command = [program(), "sif", "dump", number.decode(), str(path)]
        dumped = bounded(command, seconds=_LOOK_S, limit=_JSON_LIMIT, env=env)
        if dumped.code or dumped.fault:
            continue
        found = parse_json(dumped.out, limit=_JSON_LIMIT)
        match found:
            case {"data": {"attributes": {"labels": dict() as labels}}}:
                return _table(labels)
            case _:
                continue
    return {}


def _table(value: Any) -> dict[str, Any]:
    match value:
        case dict():
            return value
        case _:
            raise ValueError("its labels are no table")
