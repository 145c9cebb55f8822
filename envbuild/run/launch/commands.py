"""The command lines of a launch: containers, set-up and ranks, for each launcher. Nothing is started here."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.errors import UsageError
from envbuild.host import HostFacts
from envbuild.plan.cluster import by_itself, for_deepspeed, for_torchrun, require_module
from envbuild.run.launch.beats import LOST_SECONDS
from envbuild.run.launch.containers import containers_of
from envbuild.run.launch.hosts import is_local
from envbuild.run.launch.job import Job, variables
from envbuild.run.launch.scripts import FOLDER
from envbuild.run.launch.slurm import srun_line
from envbuild.settings import Settings


@dataclass(frozen=True, kw_only=True)
class LaunchStep:
    """One command of a launch."""

    node: str
    """The host that it runs on, or `here`."""
    command: tuple[str, ...]
    about: str
    stdin: str | None = None
    """What is fed to it, in words."""


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """The commands of a launch."""

    keepers: tuple[LaunchStep, ...] = ()
    """One per host, first: the containers, which live as long as these do."""
    setups: tuple[LaunchStep, ...] = ()
    """One per host: what a container needs before the job starts."""
    starts: tuple[LaunchStep, ...]
    """The job itself; its exit code is the first that is not 0."""

    @property
    def steps(self) -> tuple[LaunchStep, ...]:
        """All of them, in order."""
        return (*self.keepers, *self.setups, *self.starts)


def _on(node: str, command: Sequence[str], *, local: bool) -> tuple[str, ...]:
    """Return the command line that runs `command` on a host."""
    return (
        tuple(command)
        if local
        else (
            "ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15",
            "-o", "ServerAliveInterval=10", "-o", f"ServerAliveCountMax={LOST_SECONDS // 10}", node, "--", shlex.join(command),
        )
    )  # fmt: skip


def _torchrun(job: Job, rank: int) -> list[str]:
    return [
        "torchrun",
        f"--nnodes={len(job.nodes)}",
        f"--nproc-per-node={job.nodes[0].slots}",
        f"--node-rank={rank}",
        *_meeting(job),
    ]


def _meeting(job: Job) -> list[str]:
    """Return torchrun's words that are the same on every host."""
    return [
        f"--master-addr={job.master}",
        f"--master-port={job.master_port}",
        *for_torchrun(job.script),
    ]


def _mpirun(job: Job) -> list[str]:
    exported = [
        "PATH",
        "LD_LIBRARY_PATH",
        "MASTER_ADDR",
        "MASTER_PORT",
        *variables(job.container),
    ]
    # torch.distributed's env:// reads RANK and its kin, which Open MPI spells differently.
    ranks = 'export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE" LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK"; exec "$@"'
    return [
        "mpirun",
        "--hostfile",
        f"{FOLDER}/hostfile",
        "-np",
        str(sum(node.slots for node in job.nodes)),
        "--map-by",
        f"ppr:{job.nodes[0].slots}:node",
        # One core per rank, the default, would starve data loaders and NCCL's threads.
        "--bind-to",
        "none",
        "--mca",
        "plm_rsh_args",
        f"-p {job.ssh_port}",
        *(word for name in dict.fromkeys(exported) for word in ("-x", name)),
        "sh",
        "-c",
        ranks,
        "sh",
        *by_itself(job.script),
    ]


def _deepspeed(job: Job) -> list[str]:
    # The port comes from ~/.ssh/config: deepspeed's --ssh_port is not in 0.10.0, and pdsh has no such flag.
    return [
        "deepspeed",
        "--hostfile",
        f"{FOLDER}/hostfile",
        "--master_addr",
        job.master,
        "--master_port",
        str(job.master_port),
        *for_deepspeed(job.script),
    ]


def plan_launch(job: Job, host: HostFacts, settings: Settings) -> tuple[LaunchPlan, list[str]]:
    """Return the commands of the launch, and notes for the user. Starts nothing.

    Raises:
        UsageError: the launcher cannot run this hostfile, or the program names no module.
        HostError: the containers ask for something that is missing on this machine; the other hosts are assumed to be like it.

    """
    require_module(job.script)
    if job.launcher != "deepspeed" and len({node.slots for node in job.nodes}) > 1:
        raise UsageError(
            f"{job.launcher} starts the same number of processes on every host, but the hostfile has different slots",
            where="--hostfile",
            hint="give every host the same slots, or use --launcher deepspeed",
        )
    if job.launcher == "srun":
        return LaunchPlan(starts=(_srun(job, settings),)), []
    made = containers_of(job, host, settings)
    notes = list(made.notes)
    if job.container.gpus == "auto" and not host.gpus:
        notes.append(
            "this machine has no GPU that answers, and every host is assumed to be like it: no container gets a GPU; "
            "start the launch on one of the GPU hosts, or write --gpus none"
        )
    local = [is_local(node.name) for node in job.nodes]

    def on(rank: int, command: Sequence[str], about: str, stdin: str | None = None) -> LaunchStep:
        name = job.nodes[rank].name
        return LaunchStep(node=name, command=_on(name, command, local=local[rank]), about=about, stdin=stdin)

    ranks = range(len(job.nodes))
    keepers = tuple(on(rank, made.keeper(rank), "the container, until this ends") for rank in ranks)
    shells = [made.shell(rank) for rank in ranks]
    if job.launcher == "torchrun":
        return LaunchPlan(
            keepers=keepers,
            setups=tuple(on(rank, shells[rank], "the job's variables", "a script that sets them") for rank in ranks),
            starts=tuple(on(rank, made.inside(rank, _torchrun(job, rank)), "the ranks of this host") for rank in ranks),
        ), notes
    fed = "the job's variables, key and hostfile; then every container's public host key"
    launcher = _mpirun(job) if job.launcher == "mpirun" else _deepspeed(job)
    return LaunchPlan(
        keepers=keepers,
        setups=tuple(on(rank, shells[rank], "sshd with its own host key", fed) for rank in ranks),
        starts=(on(0, made.inside(0, launcher), "the launcher, in the first container"),),
    ), notes


def _srun(job: Job, settings: Settings) -> LaunchStep:
    return LaunchStep(
        node="here",
        command=tuple(srun_line(job, settings, _meeting(job))),
        about="one container per host, with the GPUs that it has; Slurm starts them and ends them together",
    )
