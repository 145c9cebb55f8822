"""What the rows of a run come to: figures, each with its target, and their tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TIMES_ONE = 1.6
UPDATE_BYTES = 200_000_000
UPDATE_SHARE = 0.01
OVER_DOWNLOAD_S = 10.0
COMPILE_TIMES = 1.02


def shared(rows: Sequence[Mapping[str, Any]], blobs: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return the bytes of all published cells against those of the largest, for all and for each torch build of several.

    Args:
        rows: the cells, as `publish` returns them.
        blobs: the bytes of each blob of an image, by the image's digest.

    """
    published = [row for row in rows if row["outcome"] == "published"]
    families: dict[str, list[Mapping[str, Any]]] = {}
    for row in published:
        families.setdefault(row["torch"], []).append(row)
    groups = [("all", published)] if len(published) > 1 else []
    if len(families) > 1:
        groups += [(f"torch {torch}", held) for torch, held in families.items() if len(held) > 1]
    found = []
    for name, held in groups:
        union = {digest: size for row in held for digest, size in blobs[row["digest"]].items()}
        one = max(sum(blobs[row["digest"]].values()) for row in held)
        total = sum(union.values())
        found.append(
            {
                "of": name,
                "cells": [row["name"] for row in held],
                "bytes": total,
                "one": one,
                "times": round(total / one, 3),
                "met": total <= TIMES_ONE * one,
            }
        )
    return found


def new_bytes(rows: Sequence[Mapping[str, Any]], blobs: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return how many bytes of each published cell no earlier one has, by its name."""
    held: set[str] = set()
    found = {}
    for row in rows:
        if row["outcome"] == "published":
            own = blobs[row["digest"]]
            found[row["name"]] = sum(size for digest, size in own.items() if digest not in held)
            held |= own.keys()
    return found


def compiles(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the compile seconds of all cells, and those of their distinct wheels.

    A wheel is known by its sha256. It costs what its first compile took; a wheel that was kept from before costs nothing.
    """
    cells_s = wheels_s = 0.0
    seen: set[str] = set()
    uses = 0
    for row in rows:
        if row["outcome"] != "published":
            continue
        uses += len(row["wheels"])
        cells_s += sum(row["compiled"].values())
        for component, sha256 in row["wheels"].items():
            if sha256 not in seen:
                wheels_s += row["compiled"].get(component, 0.0)
            seen.add(sha256)
        # what has no record of a wheel, such as an MPI, is compiled for this cell alone
        wheels_s += sum(seconds for component, seconds in row["compiled"].items() if component not in row["wheels"])
    return {
        "cells_s": round(cells_s, 1),
        "wheels_s": round(wheels_s, 1),
        "times": round(cells_s / wheels_s, 3) if wheels_s else None,
        "wheels": len(seen),
        "uses": uses,
        "met": cells_s <= COMPILE_TIMES * wheels_s,
    }


def update(names: Sequence[str], down: int, image: int) -> dict[str, Any]:
    """Return what a client of the first cell downloads for the second."""
    return {
        "from": names[0],
        "to": names[1],
        "bytes": down,
        "image": image,
        "share": round(down / image, 4),
        "met": down <= UPDATE_BYTES,
        "share_met": down <= UPDATE_SHARE * image,
    }


def empty(
    flags: Sequence[str], report: Mapping[str, Any], down: int, download_s: float, verified_s: float, engine_s: float
) -> dict[str, Any]:
    """Return what an empty machine needs to have a published image.

    Args:
        flags: what it asked for.
        report: the answer of `envbuild image`.
        down: bytes from the registry.
        download_s: from the first of them to the last.
        verified_s: from the start of the command to the image that has its digest and its name.
        engine_s: what the engine alone takes to pull the same digest on an empty machine.

    """
    return {
        "flags": " ".join(flags),
        "origin": report["origin"],
        "verified": report["verified"]["by"],
        "bytes": down,
        "download_s": download_s,
        "engine_s": engine_s,
        "verified_s": verified_s,
        "whole_s": report["seconds"],
        "met": verified_s <= download_s + OVER_DOWNLOAD_S,
        "met_engine": verified_s <= engine_s + OVER_DOWNLOAD_S,
    }


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _met(met: bool) -> str:
    return "yes" if met else "**no**"


def for_people(report: Mapping[str, Any]) -> str:
    """Return the report of a run as tables in markdown."""
    parts = [_cells(report)]
    rows: list[list[str]] = []
    for each in report["shared"]:
        what = f"bytes of {len(each['cells'])} cells in the registry against the largest one ({each['of']})"
        value = f"{each['times']:.2f} times ({each['bytes']:,} and {each['one']:,})"
        rows.append([what, f"{TIMES_ONE} times", value, _met(each["met"])])
    if (found := report.get("update")) is not None:
        what = f"download of `{found['to']}` for a client that has `{found['from']}`"
        rows.append([what, f"{UPDATE_BYTES:,} bytes", f"{found['bytes']:,} bytes", _met(found["met"])])
        share = f"{found['share']:.1%} of {found['image']:,}"
        rows.append(["the same, of the image's bytes", f"{UPDATE_SHARE:.0%}", share, _met(found["share_met"])])
    if (found := report.get("empty")) is not None:
        what = f"`envbuild image {found['flags']}` on an empty machine: pulled and verified"
        value = f"{found['verified_s']:.1f} s; download {found['download_s']:.1f} s of {found['bytes']:,} bytes"
        rows.append([what, f"download + {OVER_DOWNLOAD_S:.0f} s", value, _met(found["met"])])
        value = f"{found['verified_s']:.1f} s; the engine alone {found['engine_s']:.1f} s"
        rows.append(["the same, against `docker pull` of the digest", "+ 10 s", value, _met(found["met_engine"])])
        rows.append(["the same with the audit, to the end of the command", "", f"{found['whole_s']:.1f} s", ""])
    found = report["compile"]
    value = f"{found['cells_s']:.0f} s and {found['wheels_s']:.0f} s"
    if found["times"] is not None:
        value = f"{found['times']:.2f} times ({value})"
    what = f"compile time of all cells against their distinct wheels ({found['wheels']} wheels, {found['uses']} uses)"
    rows.append([what, f"{COMPILE_TIMES} times", value, _met(found["met"])])
    if (found := report.get("second")) is not None:
        taken = ", ".join(found["taken"]) or "none"
        value = f"{sum(found['compiled'].values()):.0f} s; wheels from the registry: {taken}"
        what = f"compile time of `envbuild image {found['flags']}` on the second engine"
        rows.append([what, "0 s", value, _met(not found["compiled"])])
    if (found := report.get("builders")) is not None:
        what = f"`{found['name']}` built again on a second engine, with a separate key: `envbuild reproduce --sign`"
        value = (
            f"the same digest, {found['seconds']:.0f} s; then `trusted_builders = 2` pulls it, and was refused before"
        )
        rows.append([what, "", value, ""])
    parts.append(table(["figure", "target: at most", "measured", "met"], rows))
    stored = f"The registry's blobs, with locks, signatures, SBOMs, provenance and wheels: {report['storage_bytes']:,} bytes."
    parts.append(stored)
    if report["left_out"]:
        parts.append("Not measured:\n\n" + "\n".join(f"- {text}" for text in report["left_out"]))
    return "\n\n".join(parts)


def _cells(report: Mapping[str, Any]) -> str:
    head = ["cell", "flags", "outcome", "bytes", "new in the registry", "build", "of it compile", "publish", "pull"]
    rows = []
    for row in report["cells"]:
        outcome = row["outcome"] if not row.get("why") else f"{row['outcome']}: {' '.join(row['why'].split())[:160]}"
        if row["outcome"] != "published":
            rows.append([row["name"], f"`{' '.join(row['flags'])}`", outcome, *[""] * 6])
            continue
        pulled = report["pulls"].get(row["name"])
        rows.append(
            [
                row["name"],
                f"`{' '.join(row['flags'])}`",
                outcome + (f" ({row['stand_in']})" if row["stand_in"] else ""),
                f"{row['bytes']:,}",
                f"{row['new_bytes']:,}",
                f"{row['seconds']:.0f} s",
                f"{sum(row['compiled'].values()):.0f} s",
                f"{row['publish_seconds']:.0f} s",
                f"{pulled['seconds']:.0f} s, {pulled['bytes']:,} bytes" if pulled else "",
            ]
        )
    return table(head, rows)
