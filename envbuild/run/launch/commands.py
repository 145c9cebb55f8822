"""The command lines of a launch: containers, set-up and ranks, for each launcher. Nothing is started here."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envbuild.errors import UsageError
from envbuild.host import HostFacts
from envbuild.run.container import READ_COMPAT, run_flags
from envbuild.run.launch.hosts import is_local
from envbuild.run.launch.job import Job, variables
from envbuild.run.launch.scripts import FOLDER
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
        else ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", node, "--", shlex.join(command))
    )


def _program(script: Sequence[str]) -> list[str]:
    return ["python3", *script] if script[0].endswith(".py") else list(script)


def _torchrun(job: Job, rank: str) -> list[str]:
    return [
        "torchrun",
        f"--nnodes={len(job.nodes)}",
        f"--nproc-per-node={job.nodes[0].slots}",
        f"--node-rank={rank}",
        f"--master-addr={job.master}",
        f"--master-port={job.master_port}",
        *([] if job.script[0].endswith(".py") else ["--no-python"]),
        *job.script,
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
        *_program(job.script),
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
        *([] if job.script[0].endswith(".py") else ["--no_python"]),
        *job.script,
    ]


def _keeper(job: Job, rank: int, settings: Settings, flags: Sequence[str]) -> list[str]:
    # The container lives as long as its standard input is open: it ends with this process, however that ends.
    return [
        *settings.engine_command, "run", "--rm", "--pull", "never", "--interactive", "--name", _container_name(job, rank), *flags,
        "--entrypoint", "sh", job.container.image, "-c", "cat >/dev/null",
    ]  # fmt: skip


def _container_name(job: Job, rank: int) -> str:
    return f"{job.name}-{rank}"


def _inside(job: Job, rank: int, settings: Settings, command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` in a host's container, with the job's variables."""
    return [
        *settings.engine_command, "exec", "--env", "OMPI_ALLOW_RUN_AS_ROOT=1", "--env", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        *(["--workdir", job.container.workdir] if job.container.workdir else []), _container_name(job, rank),
        "sh", "-c", f"{READ_COMPAT}. {FOLDER}/environment; exec " + '"$@"', "sh", *command,
    ]  # fmt: skip


def plan_launch(job: Job, host: HostFacts, settings: Settings) -> tuple[LaunchPlan, list[str]]:
    """Return the commands of the launch, and notes for the user. Starts nothing.

    Raises:
        UsageError: the launcher cannot run this hostfile.
        HostError: the containers ask for something that is missing on this machine; the other hosts are assumed to be like it.

    """
    if job.launcher != "deepspeed" and len({node.slots for node in job.nodes}) > 1:
        raise UsageError(
            f"{job.launcher} starts the same number of processes on every host, but the hostfile has different slots",
            where="--hostfile",
            hint="give every host the same slots, or use --launcher deepspeed",
        )
    # Values reach the containers through standard input, so the command lines name no variable.
    flags, notes = run_flags(host, replace(job.container, environment=()))
    if job.launcher == "srun":
        return LaunchPlan(starts=(_srun(job, settings, flags),)), notes
    local = [is_local(node.name) for node in job.nodes]

    def on(rank: int, command: Sequence[str], about: str, stdin: str | None = None) -> LaunchStep:
        name = job.nodes[rank].name
        return LaunchStep(node=name, command=_on(name, command, local=local[rank]), about=about, stdin=stdin)

    ranks = range(len(job.nodes))
    keepers = tuple(on(rank, _keeper(job, rank, settings, flags), "the container, until this ends") for rank in ranks)
    shells = [
        [*settings.engine_command, "exec", "--interactive", _container_name(job, rank), "sh", "-s"] for rank in ranks
    ]
    if job.launcher == "torchrun":
        return LaunchPlan(
            keepers=keepers,
            setups=tuple(on(rank, shells[rank], "the job's variables", "a script that sets them") for rank in ranks),
            starts=tuple(
                on(rank, _inside(job, rank, settings, _torchrun(job, str(rank))), "the ranks of this host")
                for rank in ranks
            ),
        ), notes
    fed = "the job's variables, key and hostfile; then every container's public host key"
    launcher = _mpirun(job) if job.launcher == "mpirun" else _deepspeed(job)
    return LaunchPlan(
        keepers=keepers,
        setups=tuple(on(rank, shells[rank], "sshd with its own host key", fed) for rank in ranks),
        starts=(on(0, _inside(job, 0, settings, launcher), "the launcher, in the first container"),),
    ), notes


def _srun(job: Job, settings: Settings, flags: Sequence[str]) -> LaunchStep:
    inner = shlex.join(_torchrun(job, "RANK")).replace("--node-rank=RANK", '--node-rank="$SLURM_NODEID"')
    names = [word for item in job.container.environment for word in ("--env", item.partition("=")[0])]
    return LaunchStep(
        node="here",
        command=(
            "srun", f"--nodes={len(job.nodes)}", "--ntasks-per-node=1", "--nodelist=" + ",".join(n.name for n in job.nodes),
            "--export=ALL", "--kill-on-bad-exit=1", *settings.engine_command, "run", "--rm", "--pull", "never", *flags,
            "--env", "SLURM_NODEID", *names, job.container.image, "sh", "-c", "exec " + inner,
        ),
        about="one container per host; Slurm starts them and ends them together",
    )  # fmt: skip
