"""A stack's own proof: its commands, run inside the image once it is built."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from envbuild.engine.image import Image
from envbuild.errors import SmokeError
from envbuild.evidence.report import Device
from envbuild.host import facts
from envbuild.run.container import READ_COMPAT, Container
from envbuild.run.runtime import Runtime, runtime_for
from envbuild.settings import Settings
from envbuild.stacks.model import Use
from envbuild.util.names import shown
from envbuild.util.processes import bounded

_OUTPUT_LIMIT = 64 << 20
"""Bytes that one command may print."""
_LAST = 1 << 16
LIMIT_S = 900
"""Seconds that one command may take: some compile kernels first."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one command of the proof showed."""

    name: str
    run: str
    outcome: Literal["passed", "failed", "unproven"]
    """`unproven`: it needs a GPU, and there is none."""
    reason: str = ""


def show(settings: Settings, image: str, proof: Iterable[Use], device: Device) -> list[Shown]:
    """Run every command of `proof` in its own container without a network; return how each ended.

    Raises:
        HostError: there is no such image, or something that the container asks for is missing on this machine.

    """
    runtime = runtime_for(settings, image)
    found = runtime.look_up(image)  # one image for all of them, whatever the tag names meanwhile
    return [
        Shown(name=use.name, run=use.run, outcome="unproven", reason="it needs a GPU, and this host has none")
        if use.gpu and device == "cpu"
        else _run(settings, runtime, found, use, device)
        for use in proof
    ]


def raise_for(shown: Sequence[Shown], image: str) -> None:
    """Raise SmokeError for the first command that failed."""
    for each in shown:
        if each.outcome == "failed":
            raise SmokeError(
                f"the stack's proof {each.name!r} failed: {each.reason}",
                where=image,
                hint=f"the stack's file has the command under [[proof]]; run it in the image: envbuild run {image} -- …",
            )


def _run(settings: Settings, runtime: Runtime, image: Image, use: Use, device: Device) -> Shown:
    # Loopback is enough for its ranks, and what is fetched as it runs proves nothing of the image.
    gpus = "all" if device == "cuda" else "none"
    container = Container(image=image.id, gpus=gpus, network="none", infiniband="off", init=True)
    command = ["-c", READ_COMPAT + use.run]
    with runtime.guest("proof", image, facts(settings), container, command, entrypoint="sh", seconds=LIMIT_S) as guest:
        # What both of its streams say, in the order in which it says it.
        line = ["sh", "-c", 'exec "$@" 2>&1', "sh", *guest.line.command]
        ran = bounded(line, seconds=LIMIT_S, limit=_OUTPUT_LIMIT, env=guest.line.environ)
    if not ran.fault and ran.code == 0:
        return Shown(name=use.name, run=use.run, outcome="passed")
    lines = ran.out[-_LAST:].decode("utf-8", "replace").splitlines()
    last = next((text.strip() for text in reversed(lines) if text.strip()), "it printed nothing")
    why = f"it {ran.fault}" if ran.fault else f"exit {ran.code}"
    return Shown(name=use.name, run=use.run, outcome="failed", reason=f"{why}: {shown(last, 300)}")
