"""`envbuild bisect`: the axis that makes a test fail, between a cell that passes it and one that does not."""

import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.axes import keyword
from envbuild.cli.bisect_ends import cell_of
from envbuild.cli.gpus import gpus_option, require_gpus, timeout_option
from envbuild.cli.output import doing, emit, json_option, note, printed, progress_options, show_notices
from envbuild.cli.output import use_cache as used_cache
from envbuild.cli.smoke_command import COMMAND, WithCommand
from envbuild.components import absent
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from envbuild.engine.image import Image
    from envbuild.matrix.cell import Cell
    from envbuild.matrix.load import Matrix
    from envbuild.pipeline.bisect import Found, Judge
    from envbuild.settings import Settings
    from envbuild.solver.between import Stop

_NOT_JUDGED = 125
"""Exit code by which a test says that it cannot judge, as `git bisect run` has it."""
_KILLED = frozenset({130, 137, 143})  # by SIGINT, SIGKILL (as of a machine out of memory) or SIGTERM


@dataclass(frozen=True, kw_only=True)
class _Flags:
    """The flags of the command, as click has checked them."""

    good: str
    bad: str
    baseline: str | None
    mounts: tuple[str, ...]
    environment: tuple[str, ...]
    gpus: str
    timeout_s: float
    images: Path | None
    no_pull: bool
    dry_run: bool
    restart: bool
    as_json: bool


@click.command(cls=WithCommand)
@click.argument("good", metavar="GOOD")
@click.argument("bad", metavar="BAD [-- TEST]")
@click.option(
    "--baseline",
    metavar="RECORD",
    help="Without TEST, compare the bench with this record. [default: the run of GOOD that this command makes]",
)
@click.option("--mount", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="Show TEST a folder of this host.")
@click.option("--env", "environment", multiple=True, metavar="NAME[=VALUE]", help="Set a variable for TEST.")
@gpus_option("Run each test on these GPUs of the machine.")
@timeout_option("Stop when one run of the test takes longer than this many seconds.")
@click.option(
    "--images",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Take the images from this folder, where `envbuild image --output` wrote them, and build none; Apptainer runs them.",
)
@click.option("--no-pull", is_flag=True, help="Do not look for prebuilt images or compiled wheels in the registry.")
@click.option("--dry-run", is_flag=True, help="List the cells between the two, and build and test nothing.")
@click.option("--restart", is_flag=True, help="Forget the verdicts of earlier runs of the same search.")
@json_option
@progress_options
@click.pass_context
def bisect(ctx: click.Context, /, **flags: Any) -> None:
    """Find the axis that makes TEST fail, between the cells GOOD and BAD.

    GOOD and BAD are each the id of a cell that has a lock or a record here, a lock (its folder or lock.json), a stack
    (its cell; the repository does not count), or versions: "cuda=13.0 te=2.12".

    TEST runs in the image of a cell and passes with exit code 0. The search stops where it cannot judge (125) or was
    killed (130, 137, 143). Without TEST the bench of the smoke tests runs and is compared with GOOD's: a row below 95 %
    fails.

    The search walks from GOOD to BAD, one axis after the other, each step a cell that the matrix accepts; axes that only
    move together do. It halves that way: of n axes that differ, at most log2(n) + 2 runs of the test. Images and
    compiled wheels that are here already are used. Each verdict is kept as it comes, and the same command goes on after
    an interruption, or with the image that was missing from the folder of --images.

    Exits with 0 when the axis is found; 2 when the two are one cell or cannot be read, or the folder of --images cannot
    be used; 3 when the matrix accepts one of them no more; 7 when GOOD fails or BAD passes; 8 when an image is missing
    from --images; otherwise as `envbuild image` does.
    """
    from envbuild.errors import UsageError
    from envbuild.matrix.load import load_matrix
    from envbuild.pipeline.bisect import Log
    from envbuild.pipeline.bisect import bisect as searched
    from envbuild.run.container import parse_environment, parse_mount
    from envbuild.settings import load_settings
    from envbuild.solver.between import path_between

    asked = _Flags(**flags)
    test: tuple[str, ...] | None = ctx.meta.get(COMMAND)
    if test == ():
        raise UsageError("no test follows `--`", where="--", hint="envbuild bisect GOOD BAD -- python test.py")
    if test is None and (asked.mounts or asked.environment):
        raise UsageError("these are of a test, and none follows", where="--mount or --env", hint="add -- TEST")
    if test is not None and asked.baseline:
        raise UsageError("a baseline is of the bench, and a test follows", where="--baseline", hint="leave one out")
    require_gpus(asked.gpus, None, None)
    for text in asked.mounts:
        parse_mount(text)
    for text in asked.environment:
        parse_environment(text)
    settings = show_notices(used_cache(load_settings()))
    matrix = load_matrix()
    ends = [cell_of(text, name, matrix, settings) for text, name in ((asked.good, "GOOD"), (asked.bad, "BAD"))]
    stops = path_between(matrix, *ends)
    images = None if asked.images is None else _in_folder(asked.images, stops)
    if asked.dry_run:
        answer = {"stops": _stops(stops, {}, images), "found": None}
        emit(answer, as_json=asked.as_json, human=lambda: _text(answer))
        return
    folder = settings.cache_dir / "bisect" / _name(ends, asked, test, images)
    if asked.restart:
        shutil.rmtree(folder, ignore_errors=True)
    note(
        f"{count_of(len(stops) - 1, 'step')} from {stops[0].cell.id} to {stops[-1].cell.id}; verdicts are kept in {folder}"
    )
    tested = _command_test(settings, asked, test) if test is not None else _bench_test(settings, asked, folder)
    judge = _judge(matrix, asked, images, tested)
    found = searched(stops, judge, Log(folder / "log.jsonl"), note, lambda cell: _kept_under(cell, images))
    answer = _answer(found, images)
    emit(answer, as_json=asked.as_json, human=lambda: _text(answer))


def _name(
    ends: "Sequence[Cell]", asked: _Flags, test: tuple[str, ...] | None, images: "Mapping[str, Image] | None"
) -> str:
    """Return the name of a search: by its cells, its test, and what the test sees or compares with."""
    from envbuild.pipeline.bisect import key_of

    what: list[object] = [[key_of(cell) for cell in ends], test, asked.baseline, asked.mounts, asked.environment]
    if asked.images is not None:
        what.append(str(asked.images.absolute()))
    good = (images or {}).get(ends[0].id)
    if good is not None and test is None and asked.baseline is None:
        what.append({"baseline": good.digest})  # of another image of GOOD, every verdict is another
    if asked.gpus != "all":
        what.append({"gpus": asked.gpus})
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _kept_under(cell: "Cell", images: "Mapping[str, Image] | None") -> str:
    """Return what a verdict is kept under: the cell, and the digest of an image that lies in a folder, where others may come."""
    from envbuild.pipeline.bisect import key_of

    image = (images or {}).get(cell.id)
    return key_of(cell) if image is None else f"{key_of(cell)} {image.digest}"


def _in_folder(folder: Path, stops: "Sequence[Stop]") -> dict[str, "Image"]:
    """Return the images of the way that lie in a folder, by the id of the cell.

    Raises:
        UsageError: it cannot be read, it has two images of one cell, or the cells are of two flavors, which no image states.

    """
    from envbuild.errors import UsageError
    from envbuild.pipeline.image_folder import images_in
    from envbuild.util.names import shown

    flavors = {stop.cell.versions.get("flavor", "runtime") for stop in stops}
    if len(flavors) > 1:
        raise UsageError(
            "the flavor is no part of what an image states of its cell",
            where="--images",
            hint="bisect between two cells of one flavor",
        )
    if flavors != {"runtime"}:
        note(f"note: images do not state their flavor; those in {shown(str(folder))} must be {flavors.pop()}")
    here = images_in(folder.absolute(), note)
    for stop in stops:
        if len(found := here.get(stop.cell.id, ())) > 1:
            names = " and ".join(shown(Path(image.reference).name) for image in found)
            raise UsageError(
                f"{names} are images of one cell, {stop.cell.id}", where=str(folder), hint="leave one of them there"
            )
    return {stop.cell.id: here[stop.cell.id][0] for stop in stops if stop.cell.id in here}


def _judge(
    matrix: "Matrix",
    asked: _Flags,
    images: "Mapping[str, Image] | None",
    tested: Callable[[str], tuple[bool, str]],
) -> "Judge":
    """Return what finds or makes the image of a stop and tests it."""

    def judge(stop: "Stop", place: str) -> tuple[bool, str]:
        note(f"{place}: {stop.cell.id}")
        image = _made(matrix, stop.cell, asked) if images is None else _found(matrix, stop.cell, asked, images)
        doing("running the test")
        return tested(image)

    return judge


def _found(matrix: "Matrix", cell: "Cell", asked: _Flags, images: "Mapping[str, Image]") -> str:
    """Return where the cell's image lies in the folder of `--images`.

    Raises:
        HostError: it is not there.

    """
    from envbuild.errors import HostError
    from envbuild.solver.between import pins_of

    if cell.id in images:
        return images[cell.id].reference
    flags = shlex.join(word for pin in pins_of(matrix, cell) for word in (pin.origin, pin.spec))
    raise HostError(
        f"the image of {cell.id} is missing",
        where=str(asked.images),
        hint=f"write it there, then run the same command again: envbuild image {flags} --no-smoke --output {cell.id}.oci.tar",
    )


def _made(matrix: "Matrix", cell: "Cell", asked: _Flags) -> str:
    """Return the tag of the cell's image, made where it is not here.

    Raises:
        EnvbuildError: as `envbuild image`.

    """
    from envbuild.cli.image import Asked, Given, make_one
    from envbuild.solver.between import pins_of

    flags = {keyword(pin.axis): pin.spec for pin in pins_of(matrix, cell)}
    options = Asked(
        tag=None,
        locked_only=False,
        pull=not asked.no_pull,
        cache=True,
        smoke=False,
        push=False,
        substitutes={},
        digest=None,
        from_catalog=False,
        output=None,
        record=None,
        changed={},
    )
    report, failure = make_one(options, Given(flags=flags, lock_file=None, sources=()), notices=False)
    if failure is not None:
        raise failure
    return str(report["tag"])


def _command_test(settings: "Settings", asked: _Flags, test: tuple[str, ...]) -> Callable[[str], tuple[bool, str]]:
    from envbuild.errors import HostError, SmokeError
    from envbuild.run.container import parse_mount
    from envbuild.verify.command import run_test

    def show(text: str) -> None:
        if printed.work and not asked.as_json:
            printed.work.show_line(text)

    def run(tag: str) -> tuple[bool, str]:
        code, last = run_test(
            tag,
            test,
            settings,
            timeout_s=asked.timeout_s,
            mounts=tuple(parse_mount(text) for text in asked.mounts),
            environment=asked.environment,
            gpus="auto" if asked.gpus == "all" else asked.gpus,
            show=show,
        )
        if code == _NOT_JUDGED:
            raise SmokeError(f"the test cannot judge (exit code 125): {last}", where=tag)
        if code in _KILLED:
            raise HostError(
                f"the test was stopped from outside (exit code {code}), which is no verdict: {last}",
                where=tag,
                hint="see whether the memory was exhausted, then run the same command again",
            )
        return code == 0, "" if code == 0 else f"exit code {code}: {last}"

    return run


def _bench_test(settings: "Settings", asked: _Flags, folder: Path) -> Callable[[str], tuple[bool, str]]:
    """Return the bench as a test: the first run, GOOD's, is the baseline where no record is."""
    from envbuild.evidence.baseline import check_baseline, hold
    from envbuild.evidence.named import named_record
    from envbuild.evidence.recording import from_report
    from envbuild.evidence.records import record_evidence
    from envbuild.evidence.report import Level
    from envbuild.paths import data_dir
    from envbuild.verify.smoke import SmokeRequest, run_smoke
    from envbuild.verify.target import ImageTarget, look

    own = folder / "good"
    if asked.baseline:
        record, path = named_record(asked.baseline, data_dir("matrices") / "evidence")
        check_baseline(record, str(path))

    def run(tag: str) -> tuple[bool, str]:
        target = ImageTarget(reference=tag)
        seen = look(target, settings, note)
        doing("running the bench")  # and no longer unpacking
        expected = seen.expected or {}
        request = SmokeRequest(
            target=target,
            expected=expected,
            level=Level.BENCH,
            timeout_s=asked.timeout_s,
            gpus=asked.gpus,
            keyword="bench",  # no other test of the suite says which cell is slow
        )
        report = run_smoke(request, settings, seen=seen)
        if report.verdict in {"host", "hung", "interrupted"}:  # it is no verdict on the cell
            report.raise_for_verdict()
        if report.verdict != "passed":
            return False, report.reason
        evidence = from_report(report, built_with=dict(expected.get("built_with", {})), keyword=request.keyword)
        kept = sorted(own.glob("*.json")) if own.is_dir() else []
        if asked.baseline is None and not kept:
            check_baseline(evidence, tag)
            record_evidence(evidence, own)
            return True, ""
        baseline, place = named_record(asked.baseline or str(kept[0]), data_dir("matrices") / "evidence")
        slow = hold(evidence, baseline, str(place)).slow
        if not slow:
            return True, ""
        return False, f"slow: {slow[0].name} has {slow[0].part:.1%} of the baseline's tokens per second"

    return run


def _stops(
    stops: "Sequence[Stop]", verdicts: Mapping[int, Mapping[str, Any]], images: "Mapping[str, Image] | None"
) -> list[dict[str, Any]]:
    return [
        {
            "cell": stop.cell.id,
            **({} if images is None else {"image": images[stop.cell.id].reference if stop.cell.id in images else None}),
            "moved": [
                {
                    "axis": axis,
                    "good": stops[0].cell.versions.get(axis),
                    "bad": stops[-1].cell.versions.get(axis),
                }
                for axis in stop.moved
            ],
            **verdicts.get(place, {"verdict": None, "why": "", "kept": False}),
        }
        for place, stop in enumerate(stops)
    ]


def _answer(found: "Found", images: "Mapping[str, Image] | None") -> dict[str, Any]:
    verdicts = {
        each.place: {"verdict": "good" if each.good else "bad", "why": each.why, "kept": each.kept}
        for each in found.verdicts
    }
    return {"stops": _stops(found.stops, verdicts, images), "found": found.as_json()}


def _text(answer: Mapping[str, Any]) -> str:
    from envbuild.cli.show import table
    from envbuild.util.names import shown

    with_images = "image" in answer["stops"][0]
    rows: list[tuple[str, ...]] = [("cell", *(["image"] if with_images else []), "test", "what moved")]
    for stop in answer["stops"]:
        moved = ", ".join(_move(each) for each in stop["moved"])
        image = [shown(Path(stop["image"]).name) if stop["image"] else "missing"] if with_images else []
        verdict = (stop["verdict"] or "-") + (" (kept)" if stop["kept"] else "")
        rows.append((stop["cell"], *image, verdict, moved or "-"))
    lines = ["from GOOD to BAD", table(rows)]
    found = answer["found"]
    if found is not None:
        moves = " and ".join(_move(each) for each in found["axes"])
        together = ", which only move together" if len(found["axes"]) > 1 else ""
        lines.append(f"the test turns bad with {moves}{together}")
        if found["already_moved"]:
            text = ", ".join(found["already_moved"])
            lines.append(f"these had BAD's version already, and the fault may need them, too: {text}")
        lines.append(f"runs of the test: {found['runs']}")
    return "\n".join(lines)


def _move(each: Mapping[str, Any]) -> str:
    word = "runtime" if each["axis"] == "flavor" else absent(each["axis"])
    return f"{each['axis']} {each['good'] or word} -> {each['bad'] or word}"
