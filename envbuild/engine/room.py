"""Whether the builder is able to build, and its disk has room: a build that fills it fails after hours."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from envbuild.doctor.diagnosis import disk_for
from envbuild.engine.builders import BuilderFacts, require_able
from envbuild.host.hardware import disk_of
from envbuild.host.probe import LocalProbe, Probe
from envbuild.matrix.cell import Cell

if TYPE_CHECKING:
    from envbuild.engine.client import EngineClient


def require_ready(client: "EngineClient", facts: BuilderFacts, cell: Cell, note: Callable[[str], None]) -> None:
    """Check that buildx and the builder are new enough; note where the disk may be too small for the cell's image.

    Raises:
        HostError: one of them is too old.

    """
    require_able(client.settings, facts)
    if (text := little_room(client, facts, cell)) is not None:
        note(text)


def little_room(client: "EngineClient", facts: BuilderFacts, cell: Cell, probe: Probe | None = None) -> str | None:
    """Return a note where the engine's disk may be too small for the image of a cell, None where it is large enough.

    None also where the results of the steps lie on a disk that is not seen from here: another host's, or another builder's.

    Args:
        client: the engine's client.
        facts: of the builder.
        cell: whose image is built.
        probe: asks for the disk; this machine by default.

    """
    if not (client.settings.engine_is_here and facts.is_engines):
        return None
    root = client.machine().root
    disk = disk_of(probe or LocalProbe(), root) if root.startswith("/") else None
    needed = disk_for(cell)
    if disk is None or disk.free_gib >= needed:
        return None
    return (
        f"note: {disk.free_gib:.0f} GiB are free where the engine keeps images ({root}), and with nothing kept from "
        f"earlier builds this one takes at least {needed} GiB; `docker buildx prune` frees some"
    )
