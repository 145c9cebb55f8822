"""What prebuilt images cost: a registry is filled with real cells, and a second engine with an empty cache pulls them by flags.

    python benchmarks/bench_registry.py                                        # all cells; hours, 60 GB of disk, root
    python benchmarks/bench_registry.py --cell cpu --cell te-2.11 --cell te-2.12 --minutes 40
    python benchmarks/bench_registry.py --cell mine='--cuda 13.0 --te 2.12 --megatron auto' --cell cpu --figure pulls

Starts a registry with a relay in front that counts bytes, and an engine. There it makes every cell with `envbuild image` and
publishes it, signed, with `envbuild catalog publish`. Then it starts a second engine, and pulls by flags with the registry's
address and the public key alone. Prints tables in markdown; progress goes to stderr. A cell that cannot be made on this
machine is a row of the table and ends nothing. At the end the engines, the registry and all files are removed.

The default cells: {cells}.

With --folder, the registry's data, the caches and the results stay there, and a later run with the same folder makes only the
cells that are not published yet, and adds its figures to the earlier ones. Exits with 0 when all figures were measured, met or not, and 1 when one is missing.
"""

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from registry_builders import two_builders
from registry_cells import CELLS, Cell, compiled, publish
from registry_figures import compiles, empty, for_people, new_bytes, shared, update
from registry_site import Site, StepError

from envbuild.registry.repository import Repository
from envbuild.util.foreign_json import parse_json

EMPTY = "--cuda 13.0 --te 2.12"
SECOND = "--cuda 13.0 --te 2.11 --apex auto"
UPDATE = ("te-2.11", "te-2.12")
REBUILT = "cpu"
FIGURES = ("update", "pulls", "empty", "second", "builders")


def cell_of(text: str) -> Cell:
    """Return the cell that `--cell` names: one of ours, or NAME=FLAGS."""
    name, equals, flags = text.partition("=")
    if equals:
        return Cell(name=name, flags=tuple(shlex.split(flags)))
    for cell in CELLS:
        if cell.name == name:
            return cell
    raise argparse.ArgumentTypeError(f"no cell {name!r}: one of {', '.join(c.name for c in CELLS)}, or NAME='FLAGS'")


def parsed() -> argparse.Namespace:
    """Return the options."""
    text = str(__doc__).format(cells=", ".join(cell.name for cell in CELLS))
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", type=cell_of, metavar="NAME", help="a cell of ours, or NAME='FLAGS'")
    parser.add_argument(
        "--wheels", type=Path, help="a folder of kept wheels, such as ~/.cache/envbuild/wheels: saves their compile"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell after so many minutes")
    parser.add_argument("--update", nargs=2, default=UPDATE, metavar="CELL", help="what a client has, and pulls next")
    parser.add_argument("--empty", default=EMPTY, metavar="FLAGS", help=f"what an empty machine asks for [{EMPTY}]")
    parser.add_argument("--second", default=SECOND, metavar="FLAGS", help=f"what the second engine builds [{SECOND}]")
    parser.add_argument("--rebuilt", default=REBUILT, metavar="CELL", help=f"what a second builder signs [{REBUILT}]")
    parser.add_argument("--figure", action="append", choices=FIGURES, help="measure this on the second engine [all]")
    parser.add_argument("--folder", type=Path, help="keep everything here, and go on from what is here")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--verbose", action="store_true", help="show what the commands print")
    return parser.parse_args()


def main() -> int:
    """Run, and print the report."""
    options = parsed()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = options.folder.absolute() if options.folder else Path(tempfile.mkdtemp(prefix="bench-registry-"))
    try:
        with Site(folder=folder, verbose=options.verbose) as site:
            report = measure(site, options)
    except StepError as error:
        sys.exit(f"bench_registry.py: error: {error}")
    except KeyboardInterrupt:
        return 130
    finally:
        if not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(report, indent=1) if options.json else for_people(report))
    return 1 if report["left_out"] else 0


def measure(site: Site, options: argparse.Namespace) -> dict[str, Any]:
    """Fill the registry, pull from it, and return the report."""
    if options.wheels and not (site.folder / "publisher" / "wheels").exists():
        shutil.copytree(options.wheels, site.folder / "publisher" / "wheels")
    rows = fill(site, options.cell or CELLS, options.minutes)
    site.stop("publisher")  # the second engine needs the room
    cells = {row["name"]: row for row in rows if row["outcome"] == "published"}
    blobs = {row["digest"]: blobs_of(site, row["digest"]) for row in cells.values()}
    new = new_bytes(rows, blobs)
    for name, row in cells.items():
        row |= {"bytes": sum(blobs[row["digest"]].values()), "new_bytes": new[name]}
    earlier = site.kept("report", {})
    report: dict[str, Any] = {
        name: earlier[name] for name in ("update", "empty", "second", "builders") if name in earlier
    }
    report |= {
        "cells": rows,
        "shared": shared(rows, blobs),
        "compile": compiles(rows),
        "storage_bytes": sum(f.stat().st_size for f in (site.folder / "registry").rglob("data") if f.is_file()),
        "pulls": earlier.get("pulls", {}),
        "left_out": [],
    }
    takes: dict[str, Callable[[], Any]] = {
        "update": lambda: updated(site, options.update, cells, report["pulls"]),
        "pulls": lambda: pull_rest(site, cells, report["pulls"]),
        "empty": lambda: from_nothing(site, shlex.split(options.empty)),
        "second": lambda: second(site, shlex.split(options.second)),
        "builders": lambda: two_builders(site, published(cells, options.rebuilt)),
    }
    for name in takes if options.figure is None else options.figure:
        try:
            report[name] = takes[name]()
        except StepError as error:
            site.say(f"{name}: {error}")
            report["left_out"].append(f"{name}: {error}")
        site.keep("report", report)
    return report


def fill(site: Site, cells: Sequence[Cell], minutes: float) -> list[dict[str, Any]]:
    """Make and publish every cell that an earlier run has not published; return a row for each, published or not."""
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in site.kept("rows", [])}
    for number, cell in enumerate(cells, 1):
        if rows.get(cell.name, {}).get("outcome") == "published":
            continue
        if time.monotonic() - site.began > minutes * 60:
            row = {
                "name": cell.name,
                "flags": list(cell.flags),
                "stand_in": "",
                "outcome": "not begun",
                "why": "no time",
            }
        else:
            site.say(f"cell {number} of {len(cells)}: {cell.name}: {shlex.join(cell.flags)}")
            row = publish(site, cell)
            site.say(
                f"{cell.name}: {row['outcome']} {row.get('why', '')} ({row['whole_seconds']:.0f} s, {site.free_gb:.0f} GB free)"
            )
        rows[cell.name] = row
        site.keep("rows", list(rows.values()))
    return list(rows.values())


def blobs_of(site: Site, digest: str) -> dict[str, int]:
    """Return the bytes of each blob that an image consists of, the manifest too, from the registry."""
    with Repository(site.registry) as repository:
        manifest = repository.manifest(digest)
        if manifest is None:
            raise StepError(f"the registry does not hold {digest}", 1)
        stated = parse_json(manifest.body, limit=len(manifest.body))
    blobs = {each["digest"]: each["size"] for each in (stated["config"], *stated["layers"])}
    return blobs | {digest: len(manifest.body)}


def published(cells: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the row of a published cell.

    Raises:
        StepError: it is not published.

    """
    if name not in cells:
        raise StepError(f"{name} is not published", 1)
    return cells[name]


def updated(
    site: Site, names: Sequence[str], cells: Mapping[str, Mapping[str, Any]], pulls: dict[str, Any]
) -> dict[str, Any]:
    """Pull two cells one after the other into an empty engine; return what the second one costs."""
    rows = [published(cells, name) for name in names]
    site.fresh_client()
    for row in rows:
        pulled(site, row, pulls)
    return update(names, pulls[names[1]]["bytes"], rows[1]["bytes"])


def pull_rest(site: Site, cells: Mapping[str, Mapping[str, Any]], pulls: dict[str, Any]) -> dict[str, Any]:
    """Pull every cell that was not pulled yet."""
    for name, row in cells.items():
        if name not in pulls:
            pulled(site, row, pulls)
    return pulls


def pulled(site: Site, row: Mapping[str, Any], pulls: dict[str, Any]) -> None:
    """Pull a cell by its flags into the second engine, next to what that has; note seconds and bytes."""
    if "client" not in site.engines or site.free_gb < 15:
        site.fresh_client()
    site.say(f"{row['name']}: pulling by flags")
    site.relay.reset()
    began = time.monotonic()
    answer = site.envbuild(site.client, "pull", *row["flags"])
    seconds = round(time.monotonic() - began, 1)
    if (answer["digest"], answer["verified"]["by"]) != (row["digest"], "catalog"):
        raise StepError(f"{row['name']}: pulled {answer['digest']}, verified by {answer['verified']['by']}", 1)
    pulls[row["name"]] = {"seconds": seconds, "bytes": site.relay.traffic.down, "verified": answer["verified"]["text"]}


def from_nothing(site: Site, flags: Sequence[str]) -> dict[str, Any]:
    """Ask an empty machine for a published image; then have the engine alone pull the same digest on an empty machine."""
    if not site.envbuild(site.publisher, "catalog", *flags)["entries"]:
        raise StepError(f"no published image fits {shlex.join(flags)}", 1)
    site.fresh_client()
    site.say(f"an empty machine: envbuild image {shlex.join(flags)}")
    notes: list[dict[str, Any]] = []
    site.relay.reset()
    words = ("image", *flags, "--no-smoke", "--progress", "json")
    answer = site.envbuild(site.client, *words, events=notes)
    traffic = site.relay.traffic
    if answer["origin"] != "pulled":
        raise StepError(f"{shlex.join(flags)} was not pulled: it was {answer['origin']}", 1)
    verified = next(float(event["at"]) for event in notes if event.get("text") == "audit")
    site.fresh_client()
    site.say("an empty machine: docker pull of the same digest")
    began = time.monotonic()
    site.docker(site.client, "pull", "--quiet", f"{site.registry}@{answer['digest']}")
    engine = round(time.monotonic() - began, 1)
    return empty(flags, answer, traffic.down, traffic.seconds, verified, engine)


def second(site: Site, flags: Sequence[str]) -> dict[str, Any]:
    """Push the wheels; build a cell of these wheels that is not published, where only the registry is shared."""
    site.say("pushing the wheels")
    pushed = site.envbuild(site.publisher, "wheels", "push")["pushed"]
    if not pushed:
        raise StepError("no wheel was compiled", 1)
    site.fresh_client()
    site.say(f"the second engine builds: envbuild image {shlex.join(flags)}")
    answer = site.envbuild(site.builder, "image", *flags, "--no-smoke")
    if answer["origin"] != "built":
        raise StepError(f"{shlex.join(flags)} is published: it was {answer['origin']}", 1)
    return {
        "flags": shlex.join(flags),
        "pushed": len(pushed),
        "taken": [each["component"] for each in answer["wheels_taken"]],
        "compiled": compiled(answer),
        "seconds": answer["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
