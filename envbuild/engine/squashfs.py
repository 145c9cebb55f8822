"""The file system of a .sif, unpacked within bounds: it is foreign, and a few KiB of it can be TiBs of files."""

import re
import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from envbuild.engine.layers import LIMITS, require_room
from envbuild.errors import HostError
from envbuild.util.foreign_tar import Bounds
from envbuild.util.names import last_text
from envbuild.util.processes import followed

# As `unsquashfs -lln` lists an entry: mode, owner, size (of a device its numbers), time, path. A path with a line break can
# add lines that look like one, and take none away.
_ENTRY = re.compile(r"[bcdlps-][rwxsStT-]{9} +\d+/\d+ +(?:(?P<size>\d{1,20})|\d+, *\d+) ")
_KEPT_LINES = 50


@dataclass
class _Counted:
    """What a listing has come to, compared with the bounds as it grows."""

    limits: Bounds
    bytes: int = 0
    members: int = 0

    def add(self, line: str) -> None:
        """Count one line of the listing.

        Raises:
            ValueError: it is more than any image is.

        """
        entry = _ENTRY.match(line)
        if entry is None:
            return
        self.members += 1
        self.bytes += int(entry["size"] or 0)
        if self.members > self.limits.members:
            raise ValueError(f"it unpacks to more than {self.limits.members:,} files")
        if self.bytes > self.limits.bytes:
            raise ValueError(f"it unpacks to more than {self.limits.bytes / 2**30:,.0f} GiB")


def unpack(path: Path, offset: int, target: Path, limits: Bounds = LIMITS) -> None:
    """Unpack the squashfs that starts at `offset` of `path` into the new folder `target`, once its listing is within the bounds.

    Nothing of it is mounted or runs. A file that has several names counts once for each.

    Raises:
        HostError: `unsquashfs` is missing or failed, or the disk has no room for it.
        ValueError: it is out of bounds, or cannot be listed.

    """
    if shutil.which("unsquashfs") is None:
        raise HostError("the command unsquashfs is missing", hint="install squashfs-tools: Apptainer needs it, too")
    counted = _Counted(limits=limits)
    lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def take(line: str) -> None:
        lines.append(line)
        counted.add(line)

    start = ["-offset", str(offset)]
    if followed(["unsquashfs", "-lln", *start, str(path)], feed=take, stdout=True) or not counted.members:
        raise ValueError(f"its file system cannot be listed: {_last(lines)}")
    require_room(
        target.parent, "the .sif", counted.bytes, counted.members, "make room there, or name another disk in TMPDIR"
    )
    command = ["unsquashfs", "-no-progress", "-no-xattrs", *start, "-dest", str(target), str(path)]
    if followed(command, feed=lines.append, stdout=True):
        raise HostError(f"the .sif could not be unpacked: {_last(lines)}", where=str(path))


def _last(lines: deque[str]) -> str:
    return last_text("".join(lines)) or "unsquashfs gave no reason"
