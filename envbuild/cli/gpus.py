"""Options of the commands that run tests: on which GPUs, and for how long."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from envbuild.evidence.report import Device


def gpus_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--gpus` of a command that runs tests, with its help."""
    return click.option("--gpus", default="all", show_default=True, metavar="all|0,1", help=text)


def timeout_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--timeout` of a command that runs tests, in seconds, with its help."""
    seconds = click.FloatRange(min=1)
    return click.option("--timeout", "timeout_s", type=seconds, default=3600.0, show_default=True, help=text)


def require_gpus(gpus: str, device: "Device | None", nodes: Path | None) -> None:
    """Check what `--gpus` says, next to `--device` and `--nodes`; whether the machine has so many is asked later.

    Raises:
        UsageError: it names no GPUs, or some for a run that has others or none.

    """
    from envbuild.errors import UsageError
    from envbuild.run.container import require_names_gpus

    if gpus == "all":
        return
    if device == "cpu":
        raise UsageError("a run on the CPU sees no GPU", where="--gpus", hint="leave out --gpus, or --device cpu")
    if nodes:
        raise UsageError(
            "the hostfile says how many GPUs each host gives", where="--gpus", hint="leave out --gpus, or --nodes"
        )
    require_names_gpus(gpus, words=("all",))
