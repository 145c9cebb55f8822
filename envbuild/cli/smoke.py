"""`envbuild smoke`: run the smoke tests in an image or on this host, and record the results."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.building import TestCount
from envbuild.cli.gpus import gpus_option, require_gpus, timeout_option
from envbuild.cli.output import emit, json_option, marked, note, printed, progress_options, show_notices, use_cache
from envbuild.cli.smoke_command import ONLY_WITH_COMMAND, WithCommand, command_of, smoke_command
from envbuild.evidence.report import Device, Level, SmokeReport
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from envbuild.evidence.records import Evidence
    from envbuild.verify.target import HostTarget, ImageTarget

_LEVELS = tuple(level.value for level in Level)


@dataclass(frozen=True, kw_only=True)
class _Flags:
    """The flags of the command, as click has checked them."""

    image: str | None
    on_host: bool
    interpreter: Path | None
    expected_file: Path | None
    level: str
    nproc: int | None
    seed: int | None
    nodes: Path | None
    device: Device | None
    gpus: str
    timeout_s: float
    keyword: str | None
    junit: Path | None
    record: Path | None
    baseline: str | None
    as_json: bool


@click.command(cls=WithCommand)
@click.argument("image", metavar="[TAG] [-- COMMAND]", required=False)
@click.option("--host", "on_host", is_flag=True, help="Test an environment of this host instead of an image.")
@click.option(
    "--python",
    "interpreter",
    type=click.Path(path_type=Path, dir_okay=False),
    help="With --host: test the environment of this interpreter. [default: python3 of the PATH]",
)
@click.option(
    "--expected",
    "expected_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Compare with this list of what must be installed. [default: the image's or the active environment's]",
)
@click.option(
    "--level", type=click.Choice(_LEVELS), default="distributed", show_default=True, help="Test up to this level."
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Start this many ranks. [default: one per GPU; 2 on a CPU; --nodes: one per slot]",
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="Repeat the run with this seed. [default: a new one, which is printed]"
)
@click.option(
    "--nodes",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Start ranks on the hosts of this hostfile, too, by ssh; a line is `host slots=N`.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Run on the CPU or on GPUs; `cpu` tests what a CUDA image can do without a GPU. [default: by the image]",
)
@gpus_option("Run on these GPUs of the machine.")
@timeout_option("Stop after this many seconds.")
@click.option("-k", "keyword", help="Run only tests whose names match, like pytest's -k.")
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write JUnit XML to this file.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, file_okay=False),
    help="Add an evidence record to this folder, such as matrices/evidence.",
)
@click.option(
    "--baseline",
    metavar="RECORD",
    help="Fail where tokens per second are below 95 % of this record's, on the same model of GPU, and show what changed. "
    "RECORD is a file, or an id in matrices/evidence. Goes with --level bench or train.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=3),
    help="With a command: end each rank after this many steps of its optimizer. [default: 10]",
)
@click.option(
    "--mount", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="With a command: show it a folder of this host."
)
@click.option(
    "--env", "environment", multiple=True, metavar="NAME[=VALUE]", help="With a command: set a variable for it."
)
@click.option("--workdir", metavar="DIR", help="With a command: run it in this folder.")
@json_option
@progress_options
@click.pass_context
def smoke(ctx: click.Context, /, **flags: Any) -> None:
    """Run the smoke tests in the image TAG, or in a Python environment of this host.

    TAG is an image of the engine, or the path of an OCI archive, an OCI layout, a .sif or a sandbox, which Apptainer runs.

    Each level includes the ones before it. A component of the lock that is missing, wrong or silently slow fails; one
    that is not in the lock is skipped.
    """
    from envbuild.errors import EnvbuildError, UsageError
    from envbuild.evidence.baseline import next_to
    from envbuild.evidence.recording import from_report
    from envbuild.evidence.records import record_evidence
    from envbuild.paths import data_dir
    from envbuild.run.gpus import after_run
    from envbuild.run.launch import read_hostfile
    from envbuild.settings import load_settings
    from envbuild.verify.expectation import EXPECTED_IN_IMAGE, read_expected
    from envbuild.verify.junit import write_junit
    from envbuild.verify.smoke import SmokeRequest, run_smoke
    from envbuild.verify.target import look

    command = command_of(ctx)
    if command is not None:
        smoke_command(command, flags)
        return
    asked = _Flags(**{name: value for name, value in flags.items() if name not in ONLY_WITH_COMMAND})
    require_gpus(asked.gpus, asked.device, asked.nodes)
    target, expected_file = _target(asked)
    baseline = _baseline(asked)
    settings = show_notices(use_cache(load_settings()))
    for option, folder in (("--record", asked.record), ("--junit", asked.junit.parent if asked.junit else None)):
        if folder:
            _writable(folder, f"{option} {folder}")
    hosts = [node.name for node in read_hostfile(asked.nodes, default_slots=1)] if asked.nodes else []
    seen = look(target, settings, note)
    expected = read_expected(expected_file) if expected_file else seen.expected
    if expected is None:
        raise UsageError(
            f"{asked.image} contains no {EXPECTED_IN_IMAGE}, the list of what must be installed",
            where=asked.image,
            hint="give such a list with --expected",
        )
    request = SmokeRequest(
        target=target,
        expected=expected,
        level=Level(asked.level),
        nproc=asked.nproc or 0,
        seed=asked.seed,
        nodes=asked.nodes,
        timeout_s=asked.timeout_s,
        device=asked.device,
        gpus=asked.gpus,
        keyword=asked.keyword,
    )
    note(f"smoke tests in {asked.image}" if asked.image else "smoke tests on this host")
    report = run_smoke(request, settings, progress=_Shown(quiet=asked.as_json), seen=seen)
    if report.device == "cuda" and (text := after_run(report.cell, report.machine.get("gpus", ()))):
        note(f"note: {text}")
    altered = {"the shell": expected["altered"]} if expected.get("altered") else {}

    def evidence_of(report: SmokeReport) -> "Evidence":
        return from_report(
            report,
            nodes=hosts,
            adopted=expected.get("adopted"),
            built_with={**expected.get("built_with", {}), **altered},
            keyword=asked.keyword,
        )

    compared: dict[str, Any] = {}
    no_baseline: EnvbuildError | None = None
    if baseline and report.verdict in ("passed", "failed"):
        try:
            folders = (data_dir("matrices") / "locks", settings.cache_dir / "locks")
            compared, slow = next_to(evidence_of(report), *baseline, folders)
            reason = "; ".join(each for each in (report.reason, slow) if each)
            report = replace(report, verdict="failed", reason=reason) if slow else report
        except EnvbuildError as error:  # the run is kept and shown all the same, and its failure comes first
            no_baseline = error
    answer = report.as_json() | ({"baseline": compared} if compared else {})
    try:
        if asked.record:
            kept = record_evidence(evidence_of(report), asked.record)
            answer["evidence"] = str(kept)
            note(f"recorded in {kept}")
        if asked.junit:
            write_junit(report, asked.junit)
    finally:  # what cannot be written must not cost the verdict
        emit(answer, as_json=asked.as_json, human=lambda: _table(answer))
        report.raise_for_verdict()
    if no_baseline:
        raise no_baseline


def _target(asked: _Flags) -> "tuple[HostTarget | ImageTarget, Path | None]":
    """Return what is tested, and the file of its expectation where that is not in the image."""
    import shutil

    from envbuild.errors import HostError, UsageError
    from envbuild.verify.target import HostTarget, ImageTarget

    if asked.on_host == bool(asked.image):
        raise UsageError(
            "name an image, or give --host", hint="envbuild smoke TAG; envbuild smoke --host --expected FILE"
        )
    if asked.image:
        if asked.interpreter:
            raise UsageError("--python goes with --host; an image has its own", where="--python")
        return ImageTarget(reference=asked.image), asked.expected_file
    found = asked.interpreter or shutil.which("python3")
    expected_file = asked.expected_file or _expected_of(found)
    if expected_file is None:
        raise UsageError(
            "--host needs --expected FILE: nothing on this host lists what must be installed", where="--host"
        )
    if found is None:
        raise HostError("no python3 is on the PATH", where="--host", hint="name the interpreter with --python")
    return HostTarget(python=Path(found)), expected_file


def _baseline(asked: _Flags) -> "tuple[Evidence, Path] | None":
    """Return the record that the run is compared with and its file, before anything runs."""
    from envbuild.errors import UsageError
    from envbuild.evidence.baseline import check_baseline
    from envbuild.evidence.named import named_record
    from envbuild.paths import data_dir

    if asked.baseline is None:
        return None
    if Level(asked.level) not in (Level.BENCH, Level.TRAIN):
        raise UsageError(
            f"--baseline compares what the level bench measures, and this run goes to {asked.level}",
            where="--baseline",
            hint="add --level bench",
        )
    record, path = named_record(asked.baseline, data_dir("matrices") / "evidence")
    check_baseline(record, str(path))
    return record, path


def _writable(folder: Path, option: str) -> None:
    """Raise HostError where a file could not be written after the run."""
    import tempfile

    from envbuild.errors import HostError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HostError(
            f"nothing can be written to {folder}: {error.strerror}", where=option, hint="name another place"
        ) from None


def _expected_of(interpreter: "Path | str | None") -> Path | None:
    """Return the expectation that the shell rendering left next to the active environment, if `interpreter` is in it."""
    import os

    environment = os.environ.get("VIRTUAL_ENV")
    if not environment or not interpreter or not Path(interpreter).absolute().is_relative_to(environment):
        return None
    expected = Path(environment).parent / "envbuild" / "expected.json"
    return expected if expected.is_file() else None


class _Shown(TestCount):
    """Shows each test as it ends, on stderr, and how many there are."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self.quiet = quiet

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take an event of the suite."""
        if event["event"] == "collected":
            gpus = event["machine"].get("gpus", [])
            place = f"{count_of(len(gpus), 'GPU')}, driver {event['machine'].get('driver')}" if gpus else "no GPU"
            self._say(
                f"{event.get('cell_id')}: torch {event['machine'].get('torch')}, {place}, seed {event.get('seed')}"
            )
        elif event["event"] == "begin" and printed.work:
            printed.work.activity(event["id"])
        elif event["event"] == "test" and event["outcome"] != "skipped":
            failed = event["outcome"] == "failed"
            self._say(f"{'FAILED' if failed else 'passed'} {event['id']} ({event['seconds']:.1f} s)", failed=failed)
        super().__call__(event)

    def _say(self, text: str, *, failed: bool = False) -> None:
        if self.quiet:
            return
        if printed.work:
            printed.work.show_line(text, "bold red" if failed else "")
        else:
            note(text)


def _table(answer: Mapping[str, Any]) -> str:
    """Return the result as text: a line per level, the reasons, the bench tables, the verdict."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    out = StringIO()
    console = Console(file=out, width=120, highlight=False, color_system=None)
    levels = Table(title=marked(f"smoke {answer['cell_id']} on {answer['device']}"), title_justify="left")
    for name in ("level", "passed", "failed", "skipped", "seconds"):
        levels.add_column(name, justify="left" if name == "level" else "right")
    for level in _LEVELS:
        tests = [test for test in answer["tests"] if test["level"] == level]
        if tests:
            counts = [
                str(sum(test["outcome"] == outcome for test in tests)) for outcome in ("passed", "failed", "skipped")
            ]
            levels.add_row(level, *counts, f"{sum(test['seconds'] for test in tests):.1f}")
    console.print(levels)
    for test in answer["tests"]:
        for data in test["tables"]:
            table = Table(title=marked(data["title"]), title_justify="left")
            for position, column in enumerate(data["columns"]):
                table.add_column(marked(column), justify="left" if position == 0 else "right")
            for row in data["rows"]:
                table.add_row(*(marked(str(cell)) for cell in row))
            console.print(table)
    if "baseline" in answer:
        rates = Table(title=marked(f"against {answer['baseline']['record'][:23]}"), title_justify="left")
        for name in ("tokens per second", "baseline", "now", "part"):
            rates.add_column(name, justify="left" if name == "tokens per second" else "right")
        for rate in answer["baseline"]["rates"]:
            row = (f"{rate['baseline']:,.0f}", f"{rate['now']:,.0f}", f"{rate['part']:.1%}")
            rates.add_row(marked(rate["name"]), *row)
        console.print(rates)
        if answer["baseline"]["not_compared"]:
            names = ", ".join(answer["baseline"]["not_compared"])
            console.print(f"not compared, since only one of the two has it: {names}", markup=False, soft_wrap=True)
        if answer["baseline"]["locks_note"]:
            console.print(f"locks: {answer['baseline']['locks_note']}", markup=False, soft_wrap=True)
        for each in (*answer["baseline"]["runs_differ"], *(answer["baseline"]["locks_differ"] or ())):
            text = f"changed: {each['what']}: {each['first'] or '-'} -> {each['second'] or '-'}"
            console.print(text, markup=False, soft_wrap=True)
    skipped: dict[str, int] = {}
    for test in answer["tests"]:
        if test["outcome"] == "skipped":
            skipped[test["reason"]] = skipped.get(test["reason"], 0) + 1
    for reason, count in skipped.items():
        console.print(f"not proven ({count}): {reason}", markup=False)
    for test in answer["tests"]:
        if test["outcome"] == "failed":
            console.print(f"FAILED {test['id']}: {test['reason'].partition(chr(10))[0]}", markup=False)
    console.print(f"verdict: {answer['verdict']}" + (f": {answer['reason']}" if answer["reason"] else ""), markup=False)
    return out.getvalue().rstrip()
