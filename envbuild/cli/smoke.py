"""`envbuild smoke`: prove an image, or an environment of this host, and keep what was seen."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click

from envbuild.cli.output import emit, json_option, marked, note, tell

_LEVELS = ("import", "kernels", "step", "distributed", "bench")


@click.command
@click.argument("image", metavar="[TAG]", required=False)
@click.option("--host", "on_host", is_flag=True, help="Test an environment of this host instead of an image.")
@click.option(
    "--python",
    "interpreter",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Interpreter of the environment to test with --host; `python3` of the PATH by default.",
)
@click.option(
    "--expected",
    "expected_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What the lock says is there; an image and an active environment of the shell rendering carry their own.",
)
@click.option("--level", type=click.Choice(_LEVELS), default="distributed", show_default=True, help="How far to go.")
@click.option("--nproc", type=click.IntRange(min=1), help="Ranks; every GPU, two on a CPU, every slot of --nodes.")
@click.option("--seed", type=click.IntRange(min=0), help="Repeat the run of this seed; a fresh one, told, by default.")
@click.option(
    "--nodes",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Hostfile (`host slots=N`): start ranks there too, by ssh.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where to run; the cell decides by default. `cpu` proves of a CUDA image what runs without a GPU.",
)
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=1), default=3600.0, show_default=True, help="Seconds."
)
@click.option("-k", "keyword", help="Only tests whose names match, as pytest's -k.")
@click.option("--junit", type=click.Path(path_type=Path, dir_okay=False), help="Write JUnit XML to this file.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to add an evidence record to, such as matrices/evidence.",
)
@json_option
def smoke(
    *,
    image: str | None,
    on_host: bool,
    interpreter: Path | None,
    expected_file: Path | None,
    level: str,
    nproc: int | None,
    seed: int | None,
    nodes: Path | None,
    device: str | None,
    timeout_s: float,
    keyword: str | None,
    junit: Path | None,
    record: Path | None,
    as_json: bool,
) -> None:
    """Run the smoke tests in the image TAG, or in an environment of this host.

    Each level includes those before it. A component that the lock lists and that is missing, wrong or silently slow
    fails; one that the lock does not list is skipped.
    """
    import shutil

    from envbuild.errors import HostError, UsageError
    from envbuild.evidence.records import from_report, record_evidence
    from envbuild.evidence.report import Level
    from envbuild.run.launch import read_hostfile
    from envbuild.settings import load_settings
    from envbuild.verify import smoke as runner

    if on_host == bool(image):
        raise UsageError(
            "name an image, or say --host", hint="envbuild smoke TAG; envbuild smoke --host --expected FILE"
        )
    found = interpreter or shutil.which("python3")
    if on_host and expected_file is None:
        expected_file = _beside(found)
    if on_host and expected_file is None:
        raise UsageError("--host needs --expected FILE: a bare host carries no expectation", where="--host")
    if interpreter and not on_host:
        raise UsageError("--python goes with --host; an image has its own", where="--python")
    settings = tell(load_settings())
    target: runner.HostTarget | runner.ImageTarget
    if image:
        target = runner.ImageTarget(reference=image)
    else:
        if found is None:
            raise HostError("no python3 is on the PATH", where="--host", hint="name the interpreter with --python")
        target = runner.HostTarget(python=Path(found))
    for option, folder in (("--record", record), ("--junit", junit.parent if junit else None)):
        if folder:
            _writable(folder, f"{option} {folder}")
    hosts = [node.name for node in read_hostfile(nodes, default_slots=1)] if nodes else []
    seen = runner.look(target, settings)
    expected = runner.read_expected(expected_file) if expected_file else seen.expected
    if expected is None:
        raise UsageError(
            f"{image} carries no {runner.EXPECTED_IN_IMAGE}", where=image, hint="give the expectation with --expected"
        )
    with _Progress(quiet=as_json) as shown:
        report = runner.run_smoke(
            target,
            expected=expected,
            level=Level(level),
            nproc=nproc or 0,
            seed=seed,
            nodes=nodes,
            timeout_s=timeout_s,
            progress=shown,
            device=device,  # type: ignore[arg-type]  # click has checked the choice
            settings=settings,
            keyword=keyword,
            seen=seen,
        )
    answer = report.as_json()
    try:
        if record:
            altered = {"the shell": expected["altered"]} if expected.get("altered") else {}
            evidence = from_report(
                report,
                nodes=hosts,
                adopted=expected.get("adopted"),
                built_with={**expected.get("built_with", {}), **altered},
                keyword=keyword,
            )
            kept = record_evidence(evidence, record)
            answer["evidence"] = str(kept)
            note(f"recorded in {kept}")
        if junit:
            runner.write_junit(report, junit)
    finally:  # what cannot be written must not cost the verdict
        emit(answer, as_json=as_json, human=lambda: _table(answer))
        report.raise_for_verdict()


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


def _beside(interpreter: "Path | str | None") -> Path | None:
    """Return the expectation that the shell rendering left beside the active environment, if `interpreter` is its own."""
    import os

    environment = os.environ.get("VIRTUAL_ENV")
    if not environment or not interpreter or not Path(interpreter).absolute().is_relative_to(environment):
        return None
    expected = Path(environment).parent / "envbuild" / "expected.json"
    return expected if expected.is_file() else None


class _Progress:
    """Shows each test as it runs and as it ends, on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self.console = Console(stderr=True)
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
            disable=quiet or not self.console.is_terminal,
        )
        self.quiet = quiet
        self.task = self.bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a terminal that went away must not cost the record
            self.bar.__exit__(kind, error, trace)

    def __call__(self, event: Mapping[str, Any]) -> None:

        if event["event"] == "collected":
            self.bar.update(self.task, total=event["total"])
            gpus = event["machine"].get("gpus", [])
            place = f"{len(gpus)} GPU(s), driver {event['machine'].get('driver')}" if gpus else "no GPU"
            text = f"{event.get('cell_id')}: torch {event['machine'].get('torch')}, {place}, seed {event.get('seed')}"
            self._say(marked(text))
        elif event["event"] == "begin":
            self.bar.update(self.task, description=marked(event["id"]))
        elif event["event"] == "test":
            self.bar.advance(self.task)
            if event["outcome"] != "skipped":
                word = {"passed": "[green]passed[/]", "failed": "[bold red]FAILED[/]"}[event["outcome"]]
                self._say(f"{word} {marked(event['id'])} ({event['seconds']:.1f} s)")

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True)


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
