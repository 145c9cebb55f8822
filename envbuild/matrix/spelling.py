"""What people write for a release that the matrix spells otherwise: `H100`, `sm_90a`, `9.0`, `v2.6`, `2.6.*`, `cu126`.

Read only where the text as it stands matches no release, so that no spelling changes what a listed one means.
"""

import re
from collections.abc import Iterator, Sequence

from envbuild.matrix.model import Axis, BaseFacts, GpuFacts, Release
from envbuild.util.patterns import pattern

_TAG = pattern(r"(?:[A-Za-z]+[_-])?[vV]?(?=\d)")
"""What stands before the version in a git tag: `v2.6`, `core_v0.12.3`, `release_v2.12`."""
_STAR = pattern(r"\d+(\.\d+)*\.\*")
_CUDA = pattern(r"cu(?:da)?[ _-]?(\d{1,2})\.?(\d)(?:\.\d+)?", re.IGNORECASE)
"""A variant as torch's wheels, PyTorch's indexes and people write it: `cu126`, `cuda12.6`, `CUDA 12.6.3`."""
_PYTHON = pattern(r"(?:py|cp|python) ?3\.?(\d{1,2})", re.IGNORECASE)
_UBUNTU = pattern(r"(?:ubuntu[ -]?)?(\d\d)\.?(\d\d)", re.IGNORECASE)
_SEASON = pattern(r"\d\d\.\d\d")
_ARCH = pattern(r"(?:sm|compute)?[_ ]?(\d{2,3})[af]?", re.IGNORECASE)
"""`sm_90`, `sm_90a`, `compute_100f`, `90`: what is specific to an architecture or a family runs on the same GPU."""
_CAPABILITY = pattern(r"(\d{1,2})\.(\d)[af]?", re.IGNORECASE)
_NOISE = pattern(
    r"nvidia|geforce|tesla|generation|laptop|mobile|embedded|gpu|super|d|v2|server|workstation|edition|max|q|with|design|active"
    r"|blackwell|sff|pcie|sxm\d?|nvl\d*|hgx|ac|lc|3e|hbm\d?e?|\d+gb?",
    re.IGNORECASE,
)
"""Words of a board's name that do not decide its compute capability."""

_BUILD = re.compile(r"(\d{1,3}\.\d{1,3})\+(cpu|cu\d{2,4})")


def board_key(name: str) -> str:
    """Return what two spellings of one board share: `GeForce RTX 4090 Laptop GPU` and `rtx-4090` are `rtx4090`."""
    words = [word for word in re.split(r"[\s_-]+", name.strip()) if word]
    kept = [word for word in words if not _NOISE.fullmatch(word)]
    return "".join(kept or words).casefold()


def is_data_center(release: Release, text: str) -> bool:
    """Return whether `text` names a board of this architecture that is no GeForce."""
    facts = release.facts
    return isinstance(facts, GpuFacts) and board_key(text) in {board_key(name) for name in facts.names}


def is_geforce(release: Release, text: str) -> bool:
    """Return whether `text` names a GeForce or TITAN board of a release of the axis gpu."""
    facts = release.facts
    return isinstance(facts, GpuFacts) and board_key(text) in {board_key(name) for name in facts.geforce}


_SERVER = pattern(r"server", re.IGNORECASE)


def is_workstation(release: Release, text: str) -> bool:
    """Return whether `text` names a workstation board of this architecture; an edition for servers is none."""
    facts = release.facts
    if not isinstance(facts, GpuFacts) or _SERVER.search(text):
        return False
    return board_key(text) in {board_key(name) for name in facts.workstation}


def _whole(name: str) -> str:
    """Return the name of a board without NVIDIA's own and separators: every other word counts, unlike in `board_key`."""
    return re.sub(r"nvidia|[\s_-]+", "", name.casefold())


def board_of(release: Release, text: str, boards: Sequence[Release]) -> str | None:
    """Return the release of the axis board that the name of a board says; None where it says none.

    Args:
        release: the architecture.
        text: what a person or the driver calls the board.
        boards: the releases of the axis board.

    """
    if is_geforce(release, text):
        return "geforce"
    if is_workstation(release, text):
        return "workstation"
    if not is_data_center(release, text):
        return None
    for board in boards:
        if _whole(text) in map(_whole, (board.version, *board.aliases)):
            return board.version
    facts = release.facts
    other_boards = isinstance(facts, GpuFacts) and (facts.workstation or facts.geforce)
    return "data-center" if other_boards and facts.data_center else None


def has_arm_host(release: Release, text: str) -> bool:
    """Return whether `text`, which names a release of the axis gpu, names a board with an Arm processor of its host.

    `gh200` does, `h100` and `sm_90` do not; where every board of the release is one, any name of it does (`sm_121`).
    """
    facts = release.facts
    if not isinstance(facts, GpuFacts) or not facts.aarch64:
        return False
    if set(facts.aarch64) == {*facts.names, *facts.geforce}:
        return True
    return board_key(text) in {board_key(name) for name in facts.aarch64}


def spellings(axis: Axis, text: str, releases: Sequence[Release | None]) -> Iterator[str]:
    """Yield what `text` may mean on `axis`, the likeliest first; a caller takes the first that matches a release."""
    if axis.name == "gpu":
        yield from _gpu(text, releases)
    elif axis.name == "torch" and (found := _BUILD.fullmatch(text)):
        # a minor release of one build, 2.8+cu128: its last patch
        builds = [each.version for each in releases if each is not None and each.version.endswith(f"+{found[2]}")]
        patches = [each for each in builds if each.startswith(f"{found[1]}.")]
        yield from sorted(patches, key=lambda each: [int(part) for part in re.findall(r"\d+", each)], reverse=True)
    elif axis.name == "cuda" and (found := _CUDA.fullmatch(text)):
        yield f"{found[1]}.{found[2]}"
    elif axis.name == "python" and (found := _PYTHON.fullmatch(text)):
        yield f"3.{found[1]}"
    elif axis.name == "os" and (found := _UBUNTU.fullmatch(text)):
        yield f"ubuntu{found[1]}.{found[2]}"
    elif axis.name == "base" and text:
        if _SEASON.fullmatch(text):
            yield f"ngc-{text}"
        # an image as `docker pull` names it
        yield from (
            r.version
            for r in releases
            if r and isinstance(r.facts, BaseFacts) and _is_image(r.facts.builder or "", text)
        )
    if axis.scheme == "name":
        yield text.casefold()
        yield re.sub(r"[\s_]+", "-", text.strip().casefold())
    else:
        if found := _TAG.match(text):
            yield text[found.end() :]
        if _STAR.fullmatch(text):
            yield text.removesuffix(".*")
        yield text.casefold()  # CPU


def _is_image(image: str, text: str) -> bool:
    return text in {image, image.removeprefix("docker.io/"), image.rpartition("/")[2], image.rpartition(":")[2]}


_OLDER = {
    "Kepler": pattern(r"(sm|compute)?[ _]?3[0257]|3\.[0257]|k\d0c?|k\d0m|gk\d+\w*|kepler", re.IGNORECASE),
    "Maxwell": pattern(r"(sm|compute)?[ _]?5[023]|5\.[023]|m4|m[1-6]0|gtx9\d0(ti|m)?|maxwell", re.IGNORECASE),
    "Pascal": pattern(
        r"(sm|compute)?[ _]?6[012]|6\.[012]|p4|p6|p40|p100|gtx10\d0(ti)?|titanxp?|quadrop\d+|pascal", re.IGNORECASE
    ),
    "Jetson Orin": pattern(r"(sm|compute)?[ _]?87|8\.7|(jetson|agx|orin)*orin(nx|nano)?", re.IGNORECASE),
}
"""GPUs that people ask for and the matrix does not have."""


def unlisted_gpu(text: str) -> str | None:
    """Return why the matrix has no such GPU, where `text` names one that it leaves out; None otherwise."""
    key = board_key(text)
    family = next((name for name, named in _OLDER.items() if named.fullmatch(key) or named.fullmatch(text)), None)
    if family == "Jetson Orin":
        return "it is a Jetson Orin (sm_87), which torch's and Transformer Engine's wheels hold no code for"
    if family:
        return (
            f"it is a {family} GPU, which Transformer Engine's wheels hold no code for: they begin with Volta (sm_70)"
        )
    if key == "ampere":
        return "Ampere is sm_80 (A100, A30) or sm_86 (A40, A10, RTX 3090)"
    return None


def _gpu(text: str, releases: Sequence[Release | None]) -> Iterator[str]:
    if found := _CAPABILITY.fullmatch(text):
        yield f"sm_{found[1]}{found[2]}"
    if found := _ARCH.fullmatch(text):
        yield f"sm_{found[1]}"
    key = board_key(text)
    for release in releases:
        if release is None or not isinstance(release.facts, GpuFacts):
            continue
        aliases = {board_key(alias): alias for alias in release.aliases}
        names = {board_key(name) for name in (*release.facts.names, *release.facts.geforce)}
        if key in aliases or key in names:
            yield aliases.get(key, release.version)
