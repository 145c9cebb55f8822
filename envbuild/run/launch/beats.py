"""Which host of a launch still answers: the container of each writes a line every two seconds, and the launch reads them.

A host that loses its power or its network closes no connection: ssh and Slurm wait for it, for minutes and more.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import IO

BEAT_SECONDS = 2
SILENT_SECONDS = 7
"""A host that was silent for so long is named, within 10 s of its death; its job goes on in case it comes back."""
LOST_SECONDS = 60
"""A host that was silent for so long is lost, and its job ends: a switch or a service restarts within that time."""
_LINE = 4096
"""Characters that are read of a line at once: a host may write anything."""

BEATING = (
    f"while echo beat; do sleep {BEAT_SECONDS}; done 2>/dev/null & beats=$!; cat >/dev/null; kill $beats 2>/dev/null"
)
"""A shell text that lives as long as its standard input is open, and writes beats meanwhile."""


class Beats:
    """What was heard of every host."""

    def __init__(self, nodes: Iterable[str], note: Callable[[str], None]) -> None:
        self._note = note
        self._heard: dict[str, float | None] = dict.fromkeys(nodes)
        self._named: set[str] = set()
        self._readers: list[threading.Thread] = []

    def listen(self, stream: IO[str], node: str | None = None) -> None:
        """Read beats until the stream ends: of `node`, or of the host that each line names.

        The stream replaces bytes that are no text (`errors="replace"`), so that they do not end the reading.
        """

        def read() -> None:
            with stream:
                for line in iter(lambda: stream.readline(_LINE), ""):
                    name = node or line.strip()
                    if name in self._heard:
                        self._heard[name] = time.monotonic()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        self._readers.append(reader)

    def close(self) -> None:
        """Wait for the ends of the streams, whose processes have ended."""
        for reader in self._readers:
            reader.join(timeout=1)

    def silent(self, seconds: float) -> list[str]:
        """Return the hosts that were heard once, and not for `seconds`."""
        now = time.monotonic()
        return [name for name, last in self._heard.items() if last is not None and now - last > seconds]

    def look(self) -> None:
        """Name each host that has gone silent, once; and again when it answers."""
        silent = set(self.silent(SILENT_SECONDS))
        for name in sorted(silent - self._named):
            self._note(f"{name} has not answered for {SILENT_SECONDS} s: the host or its network is down")
        for name in sorted(self._named - silent):
            self._note(f"{name} answers again")
        self._named = silent
