"""A mixed fleet: GPUs of several architectures that one image is for, as one release of the axis gpu.

Its version names the architectures, the oldest first: `sm_80+sm_90+sm_100`. No data file lists one; it is made of the listed
releases as it is asked for. What a rule needs of the GPU, every GPU of the fleet must have, and a rule about one of them
applies.
"""

from collections.abc import Callable, Iterable, Mapping

from envbuild.matrix.model import GpuFacts, Release
from envbuild.util.frozen import Frozen

GPU = "gpu"
"""The axis."""
JOIN = "+"
"""What stands between the architectures of a fleet's version."""


class Fleet(Frozen):
    """What the release of a fleet states: its GPUs, the oldest architecture first."""

    members: tuple[Release, ...]

    @property
    def sms(self) -> tuple[str, ...]:
        """The SM numbers, ascending, such as `80` and `90`."""
        return tuple(release.facts.sm for release in self.members)


def pieces(text: str) -> tuple[str, ...]:
    """Return the GPUs that a request names: `a100,h100` is two, `h100` one; an empty piece stays."""
    return tuple(piece.strip() for piece in text.replace(JOIN, ",").split(","))


def names_fleet(text: str) -> bool:
    """Return whether a request names more than one GPU."""
    return len(pieces(text)) > 1


def gpus_in(versions: Mapping[str, object]) -> tuple[str, ...]:
    """Return the releases of the axis gpu that a cell is for, the oldest architecture first; none where it has no GPU.

    A cell that an image or a record states may have anything there: what is no text is no GPU.
    """
    gpu = versions.get(GPU)
    return tuple(gpu.split(JOIN)) if gpu and isinstance(gpu, str) else ()


def label_of(version: str) -> str:
    """Return a release of the axis gpu as a cell's id names it: `sm90`, `sm80-sm90-sm100`."""
    return version.replace("_", "").replace(JOIN, "-")


def members_of(release: Release) -> tuple[Release, ...]:
    """Return the GPUs of a release of the axis gpu: a fleet's, or the release itself."""
    return release.facts.members if isinstance(release.facts, Fleet) else (release,)


def fleet_of(members: Iterable[Release], asked_as: str = "") -> Release:
    """Return the release that stands for GPUs of different architectures, or the only one of them.

    Args:
        members: listed releases of the axis gpu, in any order; one that comes twice counts once.
        asked_as: how a request calls the fleet, where it calls it something else.

    """
    found = {release.version: release for release in members}
    ordered = sorted(found.values(), key=lambda release: int(release.facts.sm))
    if len(ordered) == 1:
        return ordered[0]
    version = JOIN.join(release.version for release in ordered)
    return Release.trusted(
        version=version,
        source=ordered[-1].source,
        aliases=(asked_as,) if asked_as not in {"", version} else (),
        facts=Fleet(members=tuple(ordered)),
    )


def fleet_by_version(version: str, listed: Callable[[str], Release | None]) -> Release | None:
    """Return the fleet that a cell names, or None where `version` is none of the listed GPUs, each once and in order.

    Args:
        version: as a cell has it, `sm_80+sm_90`.
        listed: returns the listed release of a version, or None.

    """
    names = version.split(JOIN)
    members = [listed(name) for name in names]
    if len(names) < 2 or not all(release is not None and isinstance(release.facts, GpuFacts) for release in members):
        return None
    made = fleet_of(release for release in members if release is not None)
    return made if made.version == version else None
