"""Who made something that outlives its maker: a later run asks whether that process is gone, and removes what it left."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Maker:
    """Who made something that outlives a SIGKILL of its maker, so that a later run knows whether to remove it.

    A process id alone names another process after a while, and in another container or on another machine.
    """

    boot: str
    """First 12 digits of the kernel's boot id."""
    space: int
    """Number of the process id namespace."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process."""
    until: int
    """Seconds since 1970 after which the thing is not needed any more, whoever made it."""

    @classmethod
    def here(cls, *, seconds: float) -> Self:
        """Return this process; what it makes is of use for `seconds` at most."""
        boot, space = _place()
        return cls(
            boot=boot,
            space=space,
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
            until=int(time.time() + seconds),
        )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read what `str` of one gives; None where it is something else."""
        match = _MAKER.fullmatch(text)
        if match is None:
            return None
        space, pid, started, until = (int(part) for part in match.groups()[1:])
        return cls(boot=match[1], space=space, pid=pid, started=started, until=until)

    def __str__(self) -> str:
        """Return it as characters that a name, a label and a tag may hold."""
        return f"{self.boot}-{self.space}-{self.pid}-{self.started}-{self.until}"

    @property
    def gone(self) -> bool:
        """Whether the maker has ended, or its time is over. Of another machine's processes only the latter is known."""
        if time.time() > self.until:
            return True
        return (self.boot, self.space) == _place() and _started(self.pid) != self.started


_MAKER = re.compile(r"([0-9a-f]{12})-(\d{1,12})-(\d{1,10})-(\d{1,18})-(\d{1,12})", re.ASCII)


def _place() -> tuple[str, int]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:12]
    return boot, Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # the name, in brackets, may hold anything; a zombie (Z) or a dead one (X) does nothing more
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[19])
