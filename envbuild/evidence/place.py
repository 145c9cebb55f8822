"""Where a run took place and what of the cell ran as its lock makes it: how far its record counts for another cell.

A record counts for the GPU architecture (SM), the host architecture, the Python, the MPI and the OS that it ran on, and for
components compiled as they were compiled: with the same choices, such as of flash-attention 3's kernels.
"""

import re
from collections.abc import Iterable, Mapping

from envbuild.components import CHOICES, COMPONENTS, SOFTWARE, absent
from envbuild.evidence.records import Evidence
from envbuild.matrix.cell import ARCHITECTURE, NONE, X86_64
from envbuild.matrix.fleet import gpus_in
from envbuild.matrix.model import AxisName
from envbuild.solver.proof import Proof

UNKNOWN = "unknown"
PLACE = ("gpu", ARCHITECTURE, "python", "mpi", "os", *CHOICES)
"""The axes of `place_of`: on what a run takes place, and how what it ran was compiled."""


def place_of(record: Evidence) -> dict[AxisName, str]:
    """Return on what the run took place, as axes of a cell: those of PLACE -> version or `none`.

    Python and, on a bare host, the OS are what the machine reported; an image's OS is its cell's.
    """
    return {
        "gpu": _gpu_of(record),
        ARCHITECTURE: record.architecture,
        "python": ".".join(_text(record.software.get("python") or record.target.get("python")).split(".")[:2]),
        "mpi": str(record.cell.get("mpi") or NONE),
        "os": _os_of(record),
        **{axis: str(record.cell.get(axis) or NONE) for axis in CHOICES},
    }


def place_wanted(versions: Mapping[AxisName, str]) -> dict[AxisName, str]:
    """Return the same of a cell: on what a run must take place to count for it."""
    defaults = {ARCHITECTURE: X86_64}
    return {axis: versions.get(axis, defaults.get(axis, NONE)) for axis in PLACE}


def _text(value: object) -> str:
    return value if isinstance(value, str) and value else UNKNOWN


def _gpu_of(record: Evidence) -> str:
    if record.device == "cpu" or not record.gpus:
        return NONE
    return " and ".join(sorted({f"sm_{gpu.sm.replace('.', '')}" for gpu in record.gpus}))


def _os_of(record: Evidence) -> str:
    stated = _text(record.cell.get("os"))
    if record.target.get("kind") != "host":
        return stated
    found = re.match(r"(?P<name>[A-Za-z]++)\D*+(?P<version>\d+(?:\.\d+)*)", _text(record.target.get("os")))
    if found is None:
        return UNKNOWN
    name, version = found["name"].lower(), found["version"]
    listed = re.fullmatch(r"([a-z]+)([\d.]+)", stated)
    if listed and listed[1] == name and f"{version}.".startswith(f"{listed[2]}."):
        return stated  # "Ubuntu 24.04.3 LTS" is the matrix' ubuntu24.04
    return name + ".".join(version.split(".")[: 2 if name == "ubuntu" else 1])


def altered_of(record: Evidence) -> frozenset[AxisName]:
    """Return the software axes that did not run as the lock makes them.

    What was compiled against a torch of the host is not the lock's; neither is anything compiled next to another adopted package.
    A switch of a compile concerns the components that read variables of its name, and every one where none does. An
    input that was replaced concerns the component whose source it is, and every one where it is no source of one.
    """
    if record.adopted:
        return frozenset(SOFTWARE)
    return frozenset(axis for name in record.built_with for axis in _read_by(name))


def replaced_of(record: Evidence) -> frozenset[AxisName]:
    """Return the software axes of which the run proves nothing, because the image's builder replaced what they come from.

    An input that is no source of one component, such as the base image, is one of them all.
    """
    return frozenset(axis for name in record.replaced for axis in _read_by(name))


def _read_by(switch: str) -> Iterable[AxisName]:
    if (source := switch.removeprefix("src-")) in SOFTWARE:
        return [source]
    axes = [axis for axis, component in COMPONENTS.items() if switch.startswith(component.switches or ("\0",))]
    return axes or SOFTWARE


def _is_same(axis: AxisName, record: Evidence, versions: Mapping[AxisName, str]) -> bool:
    """Return whether the run and a cell have a component, in one version: a choice for another says nothing of it."""
    return axis in versions and record.cell.get(axis) == versions[axis]


def differences(record: Evidence, versions: Mapping[AxisName, str]) -> dict[str, str]:
    """Return what of the run is not as in a cell, in words by kind; nothing where the record counts for it.

    Args:
        record: the run.
        versions: the cell, axis -> version.

    Returns:
        kind -> words. Kinds: `gpu`, `arch`, `python`, `mpi`, `os`, the axes of CHOICES, `target` (compiled for another GPU
        than it ran on), `adopted`, `switches`, `replaced`. A run on a CPU has no `gpu`, which it does not claim.

    """
    ran, wanted = place_of(record), place_wanted(versions)
    names = {"python": "Python", "mpi": "MPI", **{axis: axis for axis in CHOICES}}
    found = {}
    for axis, here in wanted.items():
        if ran[axis] == here or (axis == "gpu" and ran[axis] == NONE):
            continue
        if axis in CHOICES and not _is_same(CHOICES[axis], record, versions):
            continue
        was = absent(axis) if ran[axis] == NONE else ran[axis]
        there = "no MPI" if (axis, ran[axis]) == ("mpi", NONE) else f"{names.get(axis, '')} {was}".strip()
        found[axis] = f"{there} (here {absent(axis) if here == NONE else here})"
    made_for = gpus_in(record.cell)
    if ran["gpu"] != NONE and made_for and ran["gpu"] not in made_for:
        found["target"] = f"compiled for {', '.join(made_for)}"
    if record.adopted:
        found["adopted"] = f"{'torch' if 'torch' in record.adopted else 'packages'} adopted from the host"
    others = [name for name in record.built_with if not versions.keys().isdisjoint(_read_by(name))]
    replaced = [name for name in others if name in record.replaced]
    if replaced:
        found["replaced"] = f"{', '.join(replaced)} replaced by its builder"
    switches = [name for name in others if name not in replaced]
    if switches:
        count = len(switches)
        found["switches"] = f"{count} switch{'es' * (count > 1)} of a compile that the lock does not state"
    return found


def parts(record: Evidence) -> list[str]:
    """Return, in words, of which part of the tests alone the run speaks; nothing where it ran all to a training step."""
    found = [] if record.to_step else [f"level {record.level} alone"]
    return [*found, f"only -k {record.keyword!r}"] if record.keyword else found


def proof_of(record: Evidence, versions: Mapping[AxisName, str]) -> Proof:
    """Return the word that a record which passed gives a cell with its software: with a part of it replaced, none."""
    if not versions.keys().isdisjoint(replaced_of(record)):
        return Proof.STATED
    if record.device == "cpu" or not record.gpus:
        return Proof.TRIED if record.to_step and not record.keyword else Proof.STATED
    return Proof.ELSEWHERE if differences(record, versions) or parts(record) else Proof.HERE
