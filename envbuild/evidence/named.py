"""The record that a user names, by a file or by its id; and what differs between two runs but for their results."""

import contextlib
import re
from pathlib import Path

from envbuild.errors import UsageError
from envbuild.evidence.place import place_of
from envbuild.evidence.records import Evidence, read_evidence
from envbuild.evidence.report import Level
from envbuild.lock.compare import Difference, differences_of
from envbuild.util.names import shown

_ID = re.compile(r"(?:sha256:|\d{8}T\d{6}Z-)?(?P<hex>[0-9a-f]{6,64})")
"""An id, its first digits, or the name of a record's file without its ending."""


def named_record(name: str, folder: Path) -> tuple[Evidence, Path]:
    """Return a record and its file.

    Args:
        name: a file, or of a record in `folder` its id, the first digits of it, at least 6, or its file's name without
            the ending.
        folder: where records are looked for by id.

    Raises:
        UsageError: there is none, or there are several.
        DataError: it does not load or was edited.

    """
    path, is_file = Path(name), False
    with contextlib.suppress(OSError, ValueError):  # no name of a file: too long, or with a zero byte
        is_file = path.is_file()
    if is_file:
        return read_evidence(path), path
    found = _ID.fullmatch(name)
    if found is None:
        raise UsageError(
            f"{shown(name)} is no file and no id of a record",
            hint=f"name a file, or at least 6 digits of an id, which stand behind the `-` of a file's name in {folder}",
        )
    # A file's name has 16 digits of the id; the rest is compared with the record itself.
    paths = sorted(folder.glob(f"*-{found['hex'][:16]}*.json"))
    records = [(read_evidence(each), each) for each in paths]
    fitting = [each for each in records if each[0].id.startswith(f"sha256:{found['hex']}")]
    if len(fitting) != 1:
        few = ", ".join(each.name for _, each in fitting[:5])
        raise UsageError(
            f"{len(fitting)} records have an id that begins with {found['hex']}: {few}"
            if fitting
            else f"no record has an id that begins with {found['hex']}",
            where=str(folder),
            hint="give more digits of it" if fitting else "name its file",
        )
    return fitting[0]


def run_differences(first: Evidence, second: Evidence) -> tuple[Difference, ...]:
    """Return what differs between two runs: the machine, what it reported of its software, the cell, how it was compiled.

    The hash of a suite covers its files up to the level of the run, so it says something of two runs of one level alone.
    The kernel that computed attention counts for the rows of the bench that both have.
    """
    apart = {"smoke suite"} if first.level != second.level else set[str]()
    same = first.same_image(second)
    if same:
        apart.add("ran")
    facts = [{name: fact for name, fact in _facts(each).items() if name not in apart} for each in (first, second)]
    if same and first.image != second.image:
        for each, record in zip(facts, (first, second), strict=True):
            each["compression of the image's layers"] = f"that of {record.image}"
    if not same:
        for each, layers in zip(facts, _layers(first, second), strict=False):
            each["layers of the image"] = layers
    kernels = [_attention_kernels(each) for each in (first, second)]
    for own, rows in zip(facts, kernels, strict=True):
        own |= {f"attention kernel: {name}": rows[name] for name in rows if all(name in each for each in kernels)}
    return differences_of(*facts)


def _layers(first: Evidence, second: Evidence) -> tuple[str, ...]:
    """Return how many layers each of two images has, and how many that the other has not; nothing where they are the same or not known."""
    layers = [each.content.layers if each.content else () for each in (first, second)]
    if not all(layers) or layers[0] == layers[1]:
        return ()
    own = [len(set(mine).difference(others)) for mine, others in (layers, layers[::-1])]
    names = ("the first", "the second")
    return tuple(
        f"{len(each)}, {count} of them not in {other}" if any(own) else f"{len(each)}, in the order of {mine}"
        for each, count, mine, other in zip(layers, own, names, names[::-1], strict=True)
    )


def altered(first: Evidence, second: Evidence) -> bool:
    """Return whether two images of one lock have other layers: one of them may not be what its lock says."""
    return bool(_layers(first, second)) and first.lock_digest is not None and first.lock_digest == second.lock_digest


def _attention_kernels(record: Evidence) -> dict[str, str]:
    """Return the kernel of each row of the bench, which its table names; `-` where none of the fused ones ran."""
    found = {}
    for table in (table for test in record.tests if test.level == Level.BENCH for table in test.tables):
        columns, rows = table.get("columns"), table.get("rows")
        if not isinstance(columns, list) or not isinstance(rows, list):
            continue
        for row in (dict(zip(map(str, columns), row, strict=False)) for row in rows if isinstance(row, list)):
            if "implementation" in row and "attention kernel" in row:
                found[shown(str(row["implementation"]), 80)] = shown(str(row["attention kernel"]), 80)
    return found


def _ran(record: Evidence) -> str:
    if record.image:
        return f"image {record.image}"
    if record.target.get("kind") == "image":
        return f"a .sif or a sandbox whose label states {shown(str(record.target.get('digest')), 80)}"
    return "an environment on a bare host"


def _facts(record: Evidence) -> dict[str, str]:
    gpus = ", ".join(f"{gpu.count}x {gpu.name}" for gpu in record.gpus)
    facts = {
        "GPU": gpus if record.device == "cuda" else "none: a CPU",
        "driver": record.driver or "",
        "ranks": str(record.nproc),
        "nodes": str(record.nodes),
        "ran": _ran(record),
        "runtime": str(record.target.get("runtime") or ""),
        "architecture": record.architecture,
        "OS": place_of(record)["os"],
        "smoke suite": record.suite,
        "lock": record.lock_digest or "",
    }
    facts |= {f"software: {name}": str(version) for name, version in record.software.items() if version is not None}
    facts |= {f"cell: {axis}": str(version) for axis, version in record.cell.items() if version is not None}
    facts |= {f"adopted: {name}": version for name, version in record.adopted.items()}
    facts |= {f"compiled with: {name}": value for name, value in record.built_with.items()}
    return facts


def gpu_of(record: Evidence) -> str:
    """Return the model of GPU that a run was on; several where there were several."""
    return " and ".join(sorted({gpu.name for gpu in record.gpus})) if record.device == "cuda" else "CPU"
