"""The hosts of a launch: a hostfile read within bounds, and which of them is this machine."""

import contextlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from envbuild.errors import UsageError
from envbuild.util.bounded import read_text
from envbuild.util.names import shown

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z|[0-9a-fA-F:]{2,45}\Z")
_HOSTFILE_LIMIT = 2**20  # bytes; a line of a thousand hosts takes 30 KiB


@dataclass(frozen=True, kw_only=True)
class Node:
    """One line of a hostfile."""

    name: str
    slots: int
    """Ranks there; 0 for as many as it has GPUs, which a node of Slurm counts itself."""

    @property
    def is_address(self) -> bool:
        """Whether it is an IP address rather than a name."""
        return re.match(r"^(\d+\.){3}\d+$|^[0-9a-fA-F:]*:[0-9a-fA-F:]*$", self.name) is not None


def read_hostfile(path: Path, *, default_slots: int) -> tuple[Node, ...]:
    """Read a hostfile in the form of Open MPI and DeepSpeed (`HOST slots=8`) or of MPICH (`HOST:8`).

    Raises:
        UsageError: it cannot be read, names no host, or names one twice.

    """
    try:
        text = read_text(path, limit=_HOSTFILE_LIMIT)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the hostfile cannot be read: {error.strerror if isinstance(error, OSError) else error}",
            where=f"--hostfile {path}",
            hint="write one host per line: node1 slots=8",
        ) from error
    nodes: dict[str, Node] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, colon, count = words[0].rpartition(":")
        if not (colon and count.isdigit() and ":" not in name):
            name, count = words[0], ""
        unknown = False
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "slots":
                count = value
            elif key not in {"max-slots", "max_slots"}:  # Open MPI's, which limits what is not used here
                unknown = True
        if unknown or not _HOST.match(name) or not (count == "" or re.fullmatch(r"0{0,9}[1-9][0-9]{0,4}", count)):
            raise UsageError(
                f"{shown(line.strip(), 80)!r} names no host and slots",
                where=f"{path}:{number}",
                hint="write one host per line: node1 slots=8",
            )
        if name in nodes:
            raise UsageError(
                f"{name} is listed twice", where=f"{path}:{number}", hint="write one line per host, with all its slots"
            )
        nodes[name] = Node(name=name, slots=int(count) if count else default_slots)
    here = [name for name in nodes if re.match(r"localhost$|127\.|::1$", name)]
    if here and len(here) < len(nodes):
        raise UsageError(
            f"{here[0]} means another machine on each of the hosts",
            where=f"--hostfile {path}",
            hint="write the name by which the others reach it",
        )
    if not nodes:
        raise UsageError(
            "the hostfile names no host", where=f"--hostfile {path}", hint="write one host per line: node1 slots=8"
        )
    return tuple(nodes.values())


def is_local(name: str) -> bool:
    """Return whether `name` is this machine, so that no ssh is needed to it."""
    if name in {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}:
        return True
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    for address in addresses:
        # An address is ours when a socket can be bound to it.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe,
        ):
            probe.bind((address, 0))
            return True
    return False
