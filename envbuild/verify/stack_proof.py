"""A stack's own proof: its commands, run inside the image once it is built."""

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from envbuild.engine.container import Container, docker, remove_container, run_flags
from envbuild.engine.leftovers import mark
from envbuild.errors import SmokeError
from envbuild.host import facts
from envbuild.processes import followed
from envbuild.settings import Settings
from envbuild.stacks import Use
from envbuild.verify.smoke import Device

_LATE = 124  # what `timeout` exits with
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
    """Run every command of `proof` in a container of its own without a network; return how each ended.

    Raises:
        HostError: this machine lacks what the container asks for.

    """
    return [
        Shown(name=use.name, run=use.run, outcome="unproven", reason="it needs a GPU, and this host has none")
        if use.gpu and device == "cpu"
        else _run(settings, image, use, device)
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


def _run(settings: Settings, image: str, use: Use, device: Device) -> Shown:
    # Loopback is enough for its ranks, and what is fetched as it runs proves nothing of the image.
    container = Container(image=image, gpus="all" if device == "cuda" else "none", network="none", infiniband="off")
    name = f"envbuild-proof-{uuid.uuid4().hex[:12]}"
    flags, _ = run_flags(facts(settings), container)
    command = [*docker(settings), "run", "--rm", "--label", mark(), "--init", "--pull", "never", "--name", name]
    command += [*flags, image]
    said: list[str] = []
    try:
        code = followed([*command, "timeout", str(LIMIT_S), "sh", "-c", use.run], feed=said.append, stdout=True)
    finally:
        remove_container(settings, name)
    if code == 0:
        return Shown(name=use.name, run=use.run, outcome="passed")
    last = next((line.strip() for line in reversed(said) if line.strip()), "it printed nothing")
    why = f"not done within {LIMIT_S} s" if code == _LATE else f"exit {code}"
    return Shown(name=use.name, run=use.run, outcome="failed", reason=f"{why}: {last[:300]}")
