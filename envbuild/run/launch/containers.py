"""The container of each host of a launch: how it is kept, and how a command gets into it, with Docker and with Apptainer."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from envbuild.engine.place import is_path
from envbuild.errors import UsageError
from envbuild.host import HostFacts
from envbuild.run.apptainer import LIMITS, container_flags, place_here, shared_place
from envbuild.run.container import READ_COMPAT, run_flags
from envbuild.run.launch.beats import BEATING
from envbuild.run.launch.hosts import is_local
from envbuild.run.launch.job import Job
from envbuild.run.launch.scripts import FOLDER
from envbuild.settings import Settings


class Containers(Protocol):
    """The containers of a job, one per host. Nothing is started here."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""

    def keeper(self, rank: int) -> list[str]:
        """Return the line that keeps a container as long as its standard input is open, however that ends."""

    def shell(self, rank: int) -> list[str]:
        """Return the line that runs a shell in a container, which reads a script."""

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return the line that runs `command` in a container, with the job's variables."""


def containers_of(job: Job, host: HostFacts, settings: Settings) -> Containers:
    """Return the containers of a job: of Apptainer where its image is a file or a folder, or else of the engine.

    Raises:
        UsageError: Apptainer does not start what the job asks for, or the engine is podman.
        HostError: they ask for something that is missing on this machine.

    """
    if is_path(job.container.image):
        return _Apptainer(job, host, settings)
    require_docker(settings)
    return _Docker(job, host, settings)


def require_docker(settings: Settings) -> None:
    """Raise UsageError where the engine is podman: these lines have Docker's flags."""
    if settings.engine == "podman":
        raise UsageError(
            "launch starts no containers of podman",
            where=settings.origin("engine"),
            hint="use Docker: unset ENVBUILD_ENGINE; or name a .sif or a sandbox, which Apptainer runs",
        )


def _program(job: Job, command: Sequence[str]) -> list[str]:
    del job
    return ["sh", "-c", f"{READ_COMPAT}. {FOLDER}/environment; exec " + '"$@"', "sh", *command]


@dataclass
class _Docker:
    job: Job
    host: HostFacts
    settings: Settings

    def __post_init__(self) -> None:
        # Values reach the containers through standard input, so the command lines name no variable.
        self._flags, notes = run_flags(self.host, replace(self.job.container, environment=()), self.settings.gpu_access)
        self.notes = tuple(notes)

    def keeper(self, rank: int) -> list[str]:
        return [
            *self.settings.engine_command, "run", "--rm", "--pull", "never", "--interactive", "--name", self._name(rank),
            *self._flags, "--entrypoint", "sh", self.job.container.image, "-c", BEATING,
        ]  # fmt: skip

    def shell(self, rank: int) -> list[str]:
        return [*self.settings.engine_command, "exec", "--interactive", self._name(rank), "sh", "-s"]

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        folder = self.job.container.workdir
        return [
            *self.settings.engine_command, "exec", "--env", "OMPI_ALLOW_RUN_AS_ROOT=1",
            "--env", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1", *(["--workdir", folder] if folder else []), self._name(rank),
            *_program(self.job, command),
        ]  # fmt: skip

    def _name(self, rank: int) -> str:
        return f"{self.job.name}-{rank}"


_KEEPER = f"""set -eu
name=$1 place=$2
shift 2
own=$(mktemp -d "${{TMPDIR:-/tmp}}/envbuild.XXXXXX")
# in memory where there is such a folder: keys and values never touch a disk
kept=$(mktemp -d /dev/shm/envbuild.XXXXXX 2>/dev/null || mktemp -d "$own/XXXXXX")
trap 'apptainer instance stop --timeout 2 "$name" >/dev/null 2>&1; rm -rf "$kept" "$own"' EXIT
trap 'exit 143' HUP INT TERM
mkdir "$own/home" "$own/home/.ssh" "$own/work" "$kept/run" "$kept/ssh"
set -- --home "$own/home:/root" --workdir "$own/work" "$@"
set -- --bind "$kept/run:{FOLDER}" --bind "$kept/ssh:/root/.ssh" "$@"
sh -c {shlex.quote(LIMITS)} sh apptainer instance start "$@" "$place" "$name" >/dev/null
{BEATING}
"""
"""Keeps an instance, with a home and a /tmp of the job, as long as its standard input is open, however that ends."""


@dataclass
class _Apptainer:
    job: Job
    host: HostFacts
    settings: Settings

    def __post_init__(self) -> None:
        if self.job.launcher in {"mpirun", "deepspeed"} and os.geteuid() == 0:
            raise UsageError(
                f"{self.job.launcher} logs in from container to container: root's sshd needs rights that root gives up in Apptainer",
                where="--launcher",
                hint="launch as another user, or use --launcher torchrun",
            )
        here = all(is_local(node.name) for node in self.job.nodes)
        self._place = (
            place_here(self.settings, self.job.container.image) if here else shared_place(self.job.container.image)
        )
        # the folder is the command's, not the instance's
        container = replace(self.job.container, environment=(), workdir=None)
        if self.settings.gpu_access == "cdi" and container.gpus != "none":
            raise UsageError(
                "launch gives GPUs in Apptainer by --nv alone: its instances take no CDI devices",
                where=self.settings.origin("gpu_access"),
                hint="unset gpu_access, or use --launcher srun, which starts no instances",
            )
        self._flags, _, notes = container_flags(self.host, container, folder=None, choice="native")
        if any(flag == "--nv" for flag in self._flags) and self.job.container.gpus not in {"auto", "all"}:
            raise UsageError(
                "a launch with Apptainer gives every host all of its GPUs",
                where="--gpus",
                hint="leave --gpus out, and give the slots in the hostfile; CUDA_VISIBLE_DEVICES chooses: --env",
            )
        self.notes = tuple(notes)

    def keeper(self, rank: int) -> list[str]:
        # an instance has its own process namespace, and no flag for it
        flags = [flag for flag in self._flags if flag != "--pid"]
        return ["sh", "-c", _KEEPER, "sh", self._name(rank), self._place, *flags]

    def shell(self, rank: int) -> list[str]:
        return [*self._exec(rank), "sh", "-s"]

    def inside(self, rank: int, command: Sequence[str]) -> list[str]:
        return [*self._exec(rank), *_program(self.job, command)]

    def _exec(self, rank: int) -> list[str]:
        root = ["--no-privs"] if os.geteuid() == 0 else []
        folder = ["--cwd", self.job.container.workdir] if self.job.container.workdir else []
        return ["apptainer", "exec", "--cleanenv", "--no-eval", *root, *folder, f"instance://{self._name(rank)}"]

    def _name(self, rank: int) -> str:
        return f"{self.job.name}-{rank}"
