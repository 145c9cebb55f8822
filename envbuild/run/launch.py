"""One training job over several hosts: a container on each, and the launcher that the training code expects.

`torchrun` and `srun` start one process per host and need no login between containers. `mpirun` and `deepspeed` log in
from container to container: each gets an sshd on a port of its own, host keys made at its start and known to all others,
and one key for this job. No key is ever in an image, on a command line or on a host's disk.
"""

import contextlib
import os
import re
import secrets
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from envbuild.errors import HostError, UsageError
from envbuild.host import HostFacts
from envbuild.run.container import Container, run_flags
from envbuild.settings import Settings
from envbuild.util.bounded import read_text
from envbuild.util.names import shown
from envbuild.util.scratch import scratch

Launcher = Literal["torchrun", "mpirun", "deepspeed", "srun"]
LAUNCHERS: tuple[Launcher, ...] = ("torchrun", "mpirun", "deepspeed", "srun")

SSH_PORT = 53412
"""Port of the sshd in the containers: with host networking, the host's own sshd keeps 22."""
MASTER_PORT = 29500
FOLDER = "/run/envbuild"
"""Where a container keeps what the launch puts into it."""
NO_SSHD = 97
"""Exit code of the set-up where the image has no sshd; no shell or docker gives it."""
START_SECONDS = 120
"""How long a host may take to start its container."""

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}\Z|[0-9a-fA-F:]{2,45}\Z")
_HOSTFILE_LIMIT = 2**20  # bytes; a line of a thousand hosts takes 30 KiB


@dataclass(frozen=True, kw_only=True)
class Node:
    """One line of a hostfile."""

    name: str
    slots: int

    @property
    def is_address(self) -> bool:
        """Whether it is an IP address rather than a name."""
        return re.match(r"^(\d+\.){3}\d+$|^[0-9a-fA-F:]*:[0-9a-fA-F:]*$", self.name) is not None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to run, and where."""

    nodes: tuple[Node, ...]
    launcher: Launcher
    container: Container
    script: tuple[str, ...]
    """The training script and its arguments; a `.py` runs with the image's Python, anything else by itself."""
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


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command of a launch."""

    node: str
    """The host that it runs on, or `here`."""
    command: tuple[str, ...]
    about: str
    stdin: str | None = None
    """What is fed to it, in words."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The commands of a launch."""

    keepers: tuple[Step, ...] = ()
    """One per host, first: the containers, which live as long as these do."""
    setups: tuple[Step, ...] = ()
    """One per host: what a container needs before the job starts."""
    starts: tuple[Step, ...]
    """The job itself; its exit code is the first that is not 0."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them, in order."""
        return (*self.keepers, *self.setups, *self.starts)


def read_hostfile(path: Path, *, default_slots: int) -> tuple[Node, ...]:
    """Read a hostfile in the form of Open MPI and DeepSpeed (`HOST slots=8`) or of MPICH (`HOST:8`).

    Raises:
        UsageError: it cannot be read, names no host, or names one twice.

    """
    try:
        text = read_text(path, limit=_HOSTFILE_LIMIT)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the hostfile cannot be read: {error.strerror if isinstance(error, OSError) else error}",
            where=f"--hostfile {path}",
            hint="write one host per line: node1 slots=8",
        ) from error
    nodes: dict[str, Node] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, colon, count = words[0].rpartition(":")
        if not (colon and count.isdigit() and ":" not in name):
            name, count = words[0], ""
        unknown = False
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "slots":
                count = value
            elif key not in {"max-slots", "max_slots"}:  # Open MPI's, which bounds what nobody asks for here
                unknown = True
        if unknown or not _HOST.match(name) or not (count == "" or re.fullmatch(r"0{0,9}[1-9][0-9]{0,4}", count)):
            raise UsageError(
                f"{shown(line.strip(), 80)!r} names no host and slots",
                where=f"{path}:{number}",
                hint="write one host per line: node1 slots=8",
            )
        if name in nodes:
            raise UsageError(
                f"{name} is listed twice", where=f"{path}:{number}", hint="write one line per host, with all its slots"
            )
        nodes[name] = Node(name=name, slots=int(count) if count else default_slots)
    here = [name for name in nodes if re.match(r"localhost$|127\.|::1$", name)]
    if here and len(here) < len(nodes):
        raise UsageError(
            f"{here[0]} is another host to each of the hosts",
            where=f"--hostfile {path}",
            hint="write the name by which the others reach it",
        )
    if not nodes:
        raise UsageError(
            "the hostfile names no host", where=f"--hostfile {path}", hint="write one host per line: node1 slots=8"
        )
    return tuple(nodes.values())


def new_job_name() -> str:
    """Return a name for a job's containers that no other job has."""
    return f"envbuild-{secrets.token_hex(4)}"


def is_local(name: str) -> bool:
    """Return whether `name` is this machine, so that no ssh is needed to it."""
    if name in {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}:
        return True
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(name, None)}
    except OSError:
        return False
    for address in addresses:
        # An address is ours when a socket can be bound to it.
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe,
        ):
            probe.bind((address, 0))
            return True
    return False


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


def hostfile_text(job: Job) -> str:
    """Return the hostfile that the launcher in the first container reads."""
    return "".join(f"{node.name} slots={node.slots}\n" for node in job.nodes)


def _feed(path: str, text: str, mode: str = "600") -> str:
    marker = f"END-{secrets.token_hex(8)}"
    return f"cat > {path} <<'{marker}'\n{text.rstrip(chr(10))}\n{marker}\nchmod {mode} {path}\n"


def variables_script(job: Job, environment: dict[str, str]) -> str:
    """Return the shell script that puts the job's variables into a container; every process of the job reads them there.

    It is fed to `sh -s` in the container, so that no value shows on a command line.
    """
    exports = {"MASTER_ADDR": job.master, "MASTER_PORT": str(job.master_port)} | environment
    # Open MPI warns of an exported variable that is not set; the loader takes an empty one as none.
    lines = [
        'export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:-}"',
        *(f"export {n}={shlex.quote(v)}" for n, v in exports.items()),
    ]
    return f"set -eu\numask 077\nmkdir -p {FOLDER}\nchmod 755 {FOLDER}\n" + _feed(
        f"{FOLDER}/environment", "\n".join(lines)
    )


def login_script(job: Job, node: Node, *, private_key: str, public_key: str) -> str:
    """Return the shell script that makes a container ready for logins; its last line of output is the public host key.

    It is fed to `sh -s` in the container after `variables_script`, so that no key shows on a command line.
    """
    listen = f"-o ListenAddress={node.name}" if node.is_address else ""
    config = (
        f"Host *\n  Port {job.ssh_port}\n  IdentityFile {FOLDER}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {FOLDER}/known_hosts\n"
        "  StrictHostKeyChecking yes\n  LogLevel ERROR\n"
    )
    return f"""for tool in sshd ssh ssh-keygen; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "$tool" >/dev/null || {{ echo "envbuild: $tool is missing in the image" >&2; exit {NO_SSHD}; }}
done
mkdir -p /run/sshd ~/.ssh
chmod 755 /run/sshd
{_feed(f"{FOLDER}/key", private_key)}{_feed(f"{FOLDER}/authorized_keys", public_key)}{_feed(f"{FOLDER}/hostfile", hostfile_text(job), "644")}{_feed("~/.ssh/config", config)}. {FOLDER}/environment
# A login starts with an empty environment: it gets the image's, except what belongs to one session, and what spans lines.
env | grep -E '^[A-Za-z_][A-Za-z0-9_]*=' | grep -vE '^(HOME|PWD|OLDPWD|SHLVL|TERM|HOSTNAME|_)=' > ~/.ssh/environment || true
ssh-keygen -q -t ed25519 -N '' -f {FOLDER}/host_key </dev/null
"$(PATH="$PATH:/usr/sbin:/sbin" command -v sshd)" -f /dev/null -p {job.ssh_port} {listen} -h {FOLDER}/host_key -o AuthorizedKeysFile={FOLDER}/authorized_keys \\
    -o PidFile={FOLDER}/sshd.pid -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no \\
    -o KbdInteractiveAuthentication=no -o PermitUserEnvironment=yes -o StrictModes=no -o UsePAM=no -o MaxStartups=1000
cut -d' ' -f1,2 {FOLDER}/host_key.pub
"""


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
        "sh", "-c", f". {FOLDER}/environment; exec " + '"$@"', "sh", *command,
    ]  # fmt: skip


def plan_launch(job: Job, host: HostFacts, settings: Settings) -> tuple[Plan, list[str]]:
    """Return the commands of the launch, and notes for the user. Starts nothing.

    Raises:
        UsageError: the launcher cannot run this hostfile.
        HostError: the containers ask for something that this machine lacks; the other hosts are taken to be like it.

    """
    if job.launcher != "deepspeed" and len({node.slots for node in job.nodes}) > 1:
        raise UsageError(
            f"{job.launcher} starts as many processes on every host, and the hostfile gives them different slots",
            where="--hostfile",
            hint="give every host the same slots, or use --launcher deepspeed",
        )
    # Values reach the containers through standard input, so the command lines name no variable.
    flags, notes = run_flags(host, replace(job.container, environment=()))
    if job.launcher == "srun":
        return Plan(starts=(_srun(job, settings, flags),)), notes
    local = [is_local(node.name) for node in job.nodes]

    def on(rank: int, command: Sequence[str], about: str, stdin: str | None = None) -> Step:
        name = job.nodes[rank].name
        return Step(node=name, command=_on(name, command, local=local[rank]), about=about, stdin=stdin)

    ranks = range(len(job.nodes))
    keepers = tuple(on(rank, _keeper(job, rank, settings, flags), "the container, until this ends") for rank in ranks)
    shells = [
        [*settings.engine_command, "exec", "--interactive", _container_name(job, rank), "sh", "-s"] for rank in ranks
    ]
    if job.launcher == "torchrun":
        return Plan(
            keepers=keepers,
            setups=tuple(on(rank, shells[rank], "the job's variables", "a script that sets them") for rank in ranks),
            starts=tuple(
                on(rank, _inside(job, rank, settings, _torchrun(job, str(rank))), "the ranks of this host")
                for rank in ranks
            ),
        ), notes
    fed = "the job's variables, key and hostfile; then every container's public host key"
    launcher = _mpirun(job) if job.launcher == "mpirun" else _deepspeed(job)
    return Plan(
        keepers=keepers,
        setups=tuple(on(rank, shells[rank], "sshd with a host key of its own", fed) for rank in ranks),
        starts=(on(0, _inside(job, 0, settings, launcher), "the launcher, in the first container"),),
    ), notes


def _srun(job: Job, settings: Settings, flags: Sequence[str]) -> Step:
    inner = shlex.join(_torchrun(job, "RANK")).replace("--node-rank=RANK", '--node-rank="$SLURM_NODEID"')
    names = [word for item in job.container.environment for word in ("--env", item.partition("=")[0])]
    return Step(
        node="here",
        command=(
            "srun", f"--nodes={len(job.nodes)}", "--ntasks-per-node=1", "--nodelist=" + ",".join(n.name for n in job.nodes),
            "--export=ALL", "--kill-on-bad-exit=1", *settings.engine_command, "run", "--rm", "--pull", "never", *flags,
            "--env", "SLURM_NODEID", *names, job.container.image, "sh", "-c", "exec " + inner,
        ),
        about="one container per host; Slurm starts them and ends them together",
    )  # fmt: skip


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


def run_launch(job: Job, host: HostFacts, settings: Settings) -> int:
    """Run the job and return the exit code of its launcher; every container is gone when this returns or raises.

    Raises:
        UsageError, HostError: as `plan_launch`; or a host did not start its container, or its image has no sshd.

    """
    plan, _ = plan_launch(job, host, settings)
    if job.launcher == "srun":
        environment = {**os.environ, **variables(job.container)}
        return subprocess.run(plan.starts[0].command, env=environment, check=False).returncode
    with _keepers(plan.keepers) as keepers:
        script = variables_script(job, variables(job.container))
        if job.launcher == "torchrun":
            for step, keeper in zip(plan.setups, keepers, strict=True):
                _set_up(step, script, keeper)
        else:
            with _keys(job) as (private_key, public_key):
                known = []
                for step, keeper, node in zip(plan.setups, keepers, job.nodes, strict=True):
                    login = login_script(job, node, private_key=private_key, public_key=public_key)
                    host_key = _set_up(step, script + login, keeper).strip().splitlines()[-1]
                    name = node.name if job.ssh_port == 22 else f"[{node.name}]:{job.ssh_port}"
                    known.append(f"{name} {host_key}")
            for step in plan.setups:
                subprocess.run(
                    step.command, input=_feed(f"{FOLDER}/known_hosts", "\n".join(known)), text=True, check=True
                )
        return _run_together(plan.starts)


@contextlib.contextmanager
def _keepers(steps: Sequence[Step]) -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    try:
        for step in steps:
            running.append(  # noqa: PERF401 - each that started is ended
                subprocess.Popen(
                    step.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    # A session of its own: Ctrl-C reaches only this process, which ends the containers in order.
                    start_new_session=True,
                )
            )
        yield running
    finally:
        for process in running:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            if process.stderr is not None:
                process.stderr.close()


@contextlib.contextmanager
def _keys(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the private and the public key that the containers share, as text."""
    if job.ssh_key is not None:
        ran = subprocess.run(
            ["ssh-keygen", "-y", "-P", "", "-f", str(job.ssh_key)], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise HostError(
                f"the key {job.ssh_key} cannot be used: {ran.stderr.strip()}",
                where="--ssh-key",
                hint="name a private key without a passphrase, or leave the flag out",
            )
        yield job.ssh_key.read_text(encoding="utf-8"), ran.stdout
        return
    # In memory where there is such a folder: the key never touches a disk.
    memory = Path("/dev/shm")  # noqa: S108
    with scratch("key", memory if memory.is_dir() else None) as folder:
        path = folder / "key"
        try:
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", job.name, "-f", str(path)], check=True)
        except FileNotFoundError:
            raise HostError("there is no ssh-keygen", hint="sudo apt-get install openssh-client") from None
        keys = path.read_text(encoding="utf-8"), path.with_suffix(".pub").read_text(encoding="utf-8")
    yield keys


def _first_line(text: str) -> str:
    # docker ends its errors with an advice to read its help.
    return next((line for line in text.splitlines() if line.strip()), "no message")


def _set_up(step: Step, script: str, keeper: subprocess.Popen[str]) -> str:
    """Feed the set-up script to a container as soon as that runs; return what it printed."""
    end = time.monotonic() + START_SECONDS
    while True:
        if keeper.poll() is not None:
            said = keeper.stderr.read() if keeper.stderr else ""
            raise HostError(
                f"no container could be started: {_first_line(said)}",
                where=step.node,
                hint=f"`ssh {step.node} docker info` must work from here, and the image must be there: envbuild pull",
            )
        ran = subprocess.run(step.command, input=script, capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            return ran.stdout
        if ran.returncode == NO_SSHD:
            raise HostError(
                ran.stderr.strip().removeprefix("envbuild: "),
                where=step.node,
                hint="add openssh-server to the image's packages, or use --launcher torchrun, which needs no login",
            )
        if ran.returncode == 255:  # ssh's own failure
            raise HostError(
                f"the host cannot be reached: {_first_line(ran.stderr)}",
                where=step.node,
                hint=f"`ssh {step.node} docker info` must work from here without a password",
            )
        starting = "No such container" in ran.stderr or "is not running" in ran.stderr
        if not starting or time.monotonic() > end:
            raise HostError(
                f"the container did not get ready: {_first_line(ran.stderr)}",
                where=step.node,
                hint="the port of --ssh-port must be free on that host",
            )
        time.sleep(0.2)


def _run_together(steps: Sequence[Step]) -> int:
    """Run the commands side by side and return the first exit code that is not 0; the containers' end ends the others."""
    left = [subprocess.Popen(step.command, stdin=subprocess.DEVNULL, start_new_session=True) for step in steps]
    try:
        while left:
            for process in left:
                code = process.poll()
                if code:
                    return code
                if code == 0:
                    left.remove(process)
                    break
            else:
                time.sleep(0.1)
        return 0
    finally:
        for process in left:
            process.terminate()  # docker's client; what it started ends with its container
            process.wait()
