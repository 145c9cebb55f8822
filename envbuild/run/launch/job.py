"""What is to run, and where."""

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild.run.container import Container
from envbuild.run.launch.hosts import Node

Launcher = Literal["torchrun", "mpirun", "deepspeed", "srun"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "mpirun", "deepspeed", "srun")

SSH_PORT = 53412
"""Port of the sshd in the containers: with host networking, the host's own sshd keeps 22."""
MASTER_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run, and where."""

    nodes: tuple[Node, ...]
    launcher: Launcher
    container: Container
    script: tuple[str, ...]
    """The training script and its arguments; a `.py`, or `-m` and a module, runs with the image's Python,
    anything else by itself."""
    name: str
    """Of the containers."""
    ssh_port: int = SSH_PORT
    master_port: int = MASTER_PORT
    ssh_key: Path | None = None
    """Private key that the containers log in to each other with; one is made for this job when None."""

    @property
    def master(self) -> str:
        """The host that ranks meet at."""
        return self.nodes[0].name


def new_job_name() -> str:
    """Return a name for a job's containers that no other job has."""
    return f"envbuild-{secrets.token_hex(4)}"


def variables(container: Container) -> dict[str, str]:
    """Return the container's variables with their values; a bare NAME takes this process's own, if it is set."""
    pairs = {}
    for item in container.environment:
        name, equals, value = item.partition("=")
        if equals:
            pairs[name] = value
        elif name in os.environ:
            pairs[name] = os.environ[name]
    return pairs
