"""`envbuild run` and `envbuild launch`: a container with the flags that training needs, on one host or several."""

import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from envbuild.cli.output import emit, json_option, note, show_notices
from envbuild.errors import UsageError
from envbuild.util.text import count_of

if TYPE_CHECKING:
    from envbuild.run.container import Container


def container_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a container."""
    options = (
        click.option(
            "--gpus",
            default="auto",
            show_default=True,
            metavar="auto|all|none|0,1",
            help="Give the container these GPUs.",
        ),
        click.option(
            "--mount", "mounts", multiple=True, metavar="SRC:DST[:ro]", help="Mount a folder or file of the host."
        ),
        click.option(
            "--env",
            "-e",
            "environment",
            multiple=True,
            metavar="NAME[=VALUE]",
            help="Set a variable; NAME alone passes on its value here.",
        ),
        click.option("--workdir", metavar="DIR", help="Start in this folder. [default: the image's]"),
        click.option("--network", default="host", show_default=True, help="Use this Docker network."),
        click.option(
            "--infiniband",
            type=click.Choice(["auto", "on", "off"]),
            default="auto",
            show_default=True,
            help="Give the container the RDMA devices.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Print the docker commands and start nothing; --json does this, too."
        ),
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


user_option = click.option(
    "--user",
    metavar="UID[:GID]",
    help="Run as this user, who need not exist in the image: HOME is then /tmp. [default: the image's, root]",
)
"""The option of the commands that run one container on this machine."""


@dataclass(frozen=True, kw_only=True)
class ContainerRequest:
    """What the flags of both commands ask for, as they were written."""

    image: str
    gpus: str
    mounts: tuple[str, ...]
    environment: tuple[str, ...]
    workdir: str | None
    network: str
    infiniband: Literal["auto", "on", "off"]
    dry_run: bool
    as_json: bool
    user: str | None = None

    @property
    def starts_nothing(self) -> bool:
        """Whether the commands are only printed."""
        return self.dry_run or self.as_json

    def container(self) -> "Container":
        """Return the container that the flags describe.

        Raises:
            UsageError: a flag has a value that cannot be.

        """
        from envbuild.run.container import (
            Container,
            parse_environment,
            parse_image,
            parse_mount,
            parse_network,
            parse_user,
        )

        return Container(
            image=parse_image(self.image),
            gpus=self.gpus,
            mounts=tuple(parse_mount(text) for text in self.mounts),
            environment=tuple(parse_environment(text) for text in self.environment),
            workdir=self.workdir,
            user=parse_user(self.user) if self.user is not None else None,
            network=parse_network(self.network),
            infiniband=self.infiniband,
        )


@dataclass(frozen=True, kw_only=True)
class RunRequest(ContainerRequest):
    """What `envbuild run` was asked for."""

    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LaunchRequest(ContainerRequest):
    """What `envbuild launch` was asked for."""

    script: tuple[str, ...]
    hostfile: Path
    launcher: Literal["torchrun", "mpirun", "deepspeed", "srun"]
    ssh_port: int | None
    master_port: int
    ssh_key: Path | None

    def require_read(self) -> None:
        """Raise UsageError where a flag is given that the launcher does not read: torchrun and srun need no login."""
        given = {"--ssh-port": self.ssh_port, "--ssh-key": self.ssh_key}
        for flag, value in given.items():
            if value is not None and self.launcher in {"torchrun", "srun"}:
                hint = "leave it out; it goes with --launcher mpirun or --launcher deepspeed"
                raise UsageError(f"--launcher {self.launcher} does not read it", where=flag, hint=hint)


@click.command
@click.argument("image", metavar="TAG")
@click.argument("command", metavar="-- CMD", nargs=-1, type=click.UNPROCESSED)
@user_option
@container_options
def run(**options: Any) -> None:
    """Run CMD in a container of the image TAG, with the GPUs, memory, network and mounts that training needs.

    TAG is an image of the engine, or the path of an OCI archive, an OCI layout, a .sif or a sandbox, which Apptainer runs.

    The exit code is CMD's. Without CMD the image's own command runs.
    """
    from envbuild.host import facts
    from envbuild.matrix.cell import CELL_LABEL
    from envbuild.run.gpus import sms_in_id, unserved
    from envbuild.run.runtime import runtime_for
    from envbuild.settings import load_settings

    asked = RunRequest(**options)
    settings = show_notices(load_settings())
    container = asked.container()
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    runtime = runtime_for(settings, asked.image)
    host = facts(settings)
    line = runtime.line(host, container, asked.command, terminal=terminal)
    for text in line.notes:
        note(f"note: {text}")
    if asked.starts_nothing:
        answer = {"command": list(line.command), "notes": list(line.notes)}
        emit(answer, as_json=asked.as_json, human=line.shown)
        return
    image = runtime.look_up(asked.image)
    runtime.require_runnable(image)
    if container.gpus != "none":
        sms = sms_in_id(image.labels.get(CELL_LABEL, ""))
        if text := unserved(sms, [(gpu.name, gpu.sm) for gpu in host.gpus]):
            note(f"note: {text}")
    sys.stdout.flush()
    # The client takes this process's place: signals reach it, and its exit code is the command's.
    os.execvpe(line.command[0], line.command, line.environ)  # noqa: S606


@click.command
@click.argument("image", metavar="TAG")
@click.argument("script", metavar="-- SCRIPT [ARGS]", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "--hostfile",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Run on the hosts in this file, one per line: `node1 slots=8`.",
)
@click.option(
    "--launcher",
    required=True,
    type=click.Choice(["torchrun", "mpirun", "deepspeed", "srun"]),
    help="Start the ranks with this program.",
)
@click.option(
    "--ssh-port",
    type=click.IntRange(1, 65535),
    help="mpirun, deepspeed: use this port for the sshd in the containers. [default: 53412]",
)
@click.option(
    "--master-port",
    default=29500,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Use this port for the ranks to find each other.",
)
@click.option(
    "--ssh-key",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="mpirun, deepspeed: log in between the containers with this private key. [default: a new one for each job]",
)
@container_options
def launch(**options: Any) -> int:
    """Run SCRIPT on every host of a hostfile, in a container of the image TAG.

    This machine must reach every host by ssh without a password, and every host must have the image. The hosts are
    assumed to have the same hardware and driver as this machine. For mpirun and deepspeed, every container runs an sshd
    on --ssh-port with keys made for this job. The exit code is the launcher's.

    With srun, Slurm reaches the hosts, and each finds its own GPUs and its runtime: Docker for a TAG, Apptainer for a .sif
    or a sandbox, pyxis for a .sqsh. One without a GPU ends the job, unless --gpus none says so.
    """
    from envbuild.host import facts
    from envbuild.run.container import shown
    from envbuild.run.launch import SSH_PORT, Job, is_local, new_job_name, plan_launch, read_hostfile, run_launch
    from envbuild.run.runtime import runtime_for
    from envbuild.settings import load_settings

    asked = LaunchRequest(**options)
    asked.require_read()
    settings = show_notices(load_settings())
    host = facts(settings)
    slurm = asked.launcher == "srun"
    # under Slurm each node counts its GPUs: this machine may be a login node
    nodes = read_hostfile(asked.hostfile, default_slots=0 if slurm else len(host.gpus) or 1)
    job = Job(
        nodes=nodes,
        launcher=asked.launcher,
        container=asked.container(),
        script=asked.script,
        name=new_job_name(),
        ssh_port=asked.ssh_port or SSH_PORT,
        master_port=asked.master_port,
        ssh_key=asked.ssh_key,
    )
    plan, notes = plan_launch(job, host, settings)
    for text in notes:
        note(f"note: {text}")
    if asked.starts_nothing:
        answer = [{"host": s.node, "command": list(s.command), "about": s.about, "stdin": s.stdin} for s in plan.steps]
        emit(
            {"job": job.name, "steps": answer, "notes": notes},
            as_json=asked.as_json,
            human=lambda: "\n".join(
                f"# {s.node}: {s.about}{f' (standard input: {s.stdin})' if s.stdin else ''}\n{shown(s.command)}"
                for s in plan.steps
            ),
        )
        return 0
    if not slurm and any(is_local(node.name) for node in nodes):
        runtime = runtime_for(settings, asked.image)
        runtime.require_runnable(runtime.look_up(asked.image))
    slots = sum(node.slots for node in nodes)
    processes = count_of(slots, "process", "processes") if slots else "as many processes as GPUs"
    note(f"job {job.name}: {count_of(len(nodes), 'host')}, {processes}, {shlex.join(asked.script)}")
    # A scheduler's SIGTERM must take the containers with it, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run_launch(job, host, settings, note)
