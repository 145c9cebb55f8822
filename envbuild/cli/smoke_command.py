"""`envbuild smoke TAG -- COMMAND`: the report on a run of the user's own command."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from envbuild.cli.gpus import require_gpus
from envbuild.cli.output import emit, marked, note, printed, show_notices, use_cache

if TYPE_CHECKING:
    from envbuild.evidence.report import Device

COMMAND = "envbuild.command"
"""Under which the words that follow `--` are in the context's `meta`."""
_WITH_COMMAND = frozenset(
    {"image", "on_host", "device", "gpus", "timeout_s", "steps", "mounts", "environment", "workdir", "as_json"}
)
ONLY_WITH_COMMAND = ("steps", "mounts", "environment", "workdir")
"""Options that a command of the user's alone takes, by the names under which they reach `smoke`."""
_STEPS = 10


class WithCommand(click.Command):
    """A command whose arguments end at `--`; what follows is a command line of the user's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep what follows the first `--`, and parse the rest."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


def command_of(ctx: click.Context) -> tuple[str, ...] | None:
    """Return the command that follows `--`, or None where there is no `--`.

    Raises:
        UsageError: nothing follows it, or an option does not go with what was asked.

    """
    from envbuild.errors import UsageError

    found: tuple[str, ...] | None = ctx.meta.get(COMMAND)
    given = {
        parameter.name: parameter.opts[0]
        for parameter in ctx.command.params
        if parameter.name
        and isinstance(parameter, click.Option)
        and ctx.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    }
    if found is None:
        for name in ONLY_WITH_COMMAND:
            if name in given:
                raise UsageError(
                    "this option is of a command, and none follows",
                    where=given[name],
                    hint="envbuild smoke TAG -- COMMAND",
                )
        return None
    if not found:
        raise UsageError("no command follows `--`", where="--", hint="envbuild smoke TAG -- python pretrain_gpt.py …")
    for name, option in given.items():
        if name not in _WITH_COMMAND and name not in {"quiet", "verbose", "progress"}:
            raise UsageError(
                f"{option} is of the smoke tests, and a command of yours runs instead",
                where=option,
                hint="leave it out, or leave out `--` and the command",
            )
    return found


def smoke_command(command: tuple[str, ...], flags: Mapping[str, Any]) -> None:
    """Run a command of the user's for some steps and show what each rank did.

    Args:
        command: the command.
        flags: the options of `smoke`, as click has checked them.

    Raises:
        EnvbuildError: as `verify.command.run_command` and its report.

    """
    from envbuild.errors import UsageError
    from envbuild.run.container import parse_environment, parse_image, parse_mount
    from envbuild.settings import load_settings
    from envbuild.verify.command import CommandRequest, run_command

    image: str | None = flags["image"]
    device: Device | None = flags["device"]
    mounts: tuple[str, ...] = flags["mounts"]
    as_json: bool = flags["as_json"]
    gpus: str = flags["gpus"]
    require_gpus(gpus, device, None)
    if flags["on_host"] == bool(image):
        raise UsageError("name an image, or give --host", hint="envbuild smoke TAG -- COMMAND")
    if image is None and mounts:
        raise UsageError("a command on this host sees its folders as they are", where="--mount", hint="leave it out")
    request = CommandRequest(
        command=command,
        image=parse_image(image) if image else None,
        steps=flags["steps"] or _STEPS,
        timeout_s=flags["timeout_s"],
        gpus=gpus if gpus != "all" else {"cpu": "none", "cuda": "all", None: "auto"}[device],
        mounts=tuple(parse_mount(text) for text in mounts),
        environment=tuple(parse_environment(text) for text in flags["environment"]),
        workdir=flags["workdir"],
    )
    settings = show_notices(use_cache(load_settings()))
    note(f"running the command in {image}" if image else "running the command on this host")
    report = run_command(request, settings, show=_shown(quiet=as_json))
    answer = report.as_json()
    emit(answer, as_json=as_json, human=lambda: _text(answer))
    report.raise_for_verdict()


def _shown(*, quiet: bool) -> Any:
    def show(text: str) -> None:
        if quiet or not text:
            return
        if printed.work:
            printed.work.show_line(text)
        else:
            note(text)

    return show


def _text(answer: Mapping[str, Any]) -> str:
    """Return the report as text: a table of the ranks, and what is the same on all of them once."""
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    out = StringIO()
    console = Console(file=out, width=120, highlight=False, color_system=None)
    for names, rank in _alike(answer["ranks"]):
        table = Table(title=marked(names), title_justify="left", show_header=False)
        table.add_column("what")
        table.add_column("found", overflow="fold")
        for what, found in _rows(rank):
            table.add_row(marked(what), marked(found))
        console.print(table)
    for text in answer["unread"]:
        console.print(f"not read: {text}", markup=False, soft_wrap=True)
    console.print(f"verdict: {answer['verdict']}" + (f": {answer['reason']}" if answer["reason"] else ""), markup=False)
    return out.getvalue().rstrip()


def _alike(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the ranks whose rows are equal together: the name of the group, and one of them."""
    groups: dict[tuple[tuple[str, str], ...], list[Mapping[str, Any]]] = {}
    for rank in ranks:
        groups.setdefault(tuple(_rows(rank)), []).append(rank)
    found = []
    for members in groups.values():
        numbers = [str(each["rank"]) for each in members]
        names = ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(numbers[:32])
        more = f" and {len(numbers) - 32} more" if len(numbers) > 32 else ""
        found.append((f"{names}{more} of {members[0]['world']}: {members[0]['program']}", members[0]))
    return found


def _rows(rank: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what is shown of a rank, row by row."""
    transport, fp8 = rank["transport"], rank["fp8"]
    versions = ", ".join(f"{name} {value}" for name, value in rank["versions"].items() if value)
    low = ", ".join(fp8["recipes"]) if fp8["on"] else "off"
    backends = " and ".join(transport["backends"]) or "no process group"
    rows = [
        ("GPU", rank["gpu"] or "none"),
        ("versions", versions),
        ("steps", f"{rank['steps']}" + ("" if rank["profiled"] else " (no kernels seen)")),
        ("attention", "; ".join(rank["attention"]) or "none seen"),
        *(("not taken", text) for text in rank["not_taken"][:6]),
        ("fused kernels", _counts(rank["fused"]) or ("none ran" if rank["profiled"] and rank["gpu"] else "not seen")),
        ("FP8", low + (f"; kernels: {_counts(fp8['kernels'])}" if fp8["kernels"] else "")),
        ("process groups", backends),
    ]
    if "nccl" in transport["backends"] or transport["networks"]:
        plugin = " ".join(
            text for text in (transport["plugin"], transport["plugin_version"], transport["plugin_path"]) if text
        )
        rows += [
            ("NCCL's network", ", ".join(transport["networks"]) or "not seen"),
            ("NCCL's links", _counts(transport["links"]) or "none seen"),
            ("network plugin", plugin or "none"),
        ]
    rows += [("network adapters", ", ".join(rank["adapters"]) or "none")]
    rows += [("sockets", rank["sockets"])] if rank["sockets"] else []
    rows += [("not seen", text) for text in rank["problems"]]
    return rows


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({times})" for name, times in found.items())
