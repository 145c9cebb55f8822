"""A job from its first container to its last exit code; no container outlives it."""

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.engine import apptainer
from envbuild.errors import HostError
from envbuild.host import HostFacts
from envbuild.run.launch.beats import LOST_SECONDS, SILENT_SECONDS, Beats
from envbuild.run.launch.commands import LaunchStep, plan_launch
from envbuild.run.launch.job import Job, variables
from envbuild.run.launch.scripts import FOLDER, NO_SSHD, feed, login_script, variables_script
from envbuild.run.launch.under_slurm import run_srun
from envbuild.settings import Settings
from envbuild.util.scratch import scratch

Note = Callable[[str], None]
START_SECONDS = 120
"""How long a host may take to start its container."""
_PROGRESS = re.compile(r"(?:\x1b\[[0-9;]*m)*(?:INFO|WARNING|VERBOSE|DEBUG)\s*:")
_NO_FUSE = re.compile(r"/dev/fuse|squashfuse|fuse2fs exited")


def run_launch(job: Job, host: HostFacts, settings: Settings, note: Note = lambda _: None) -> int:
    """Run the job and return the exit code of its launcher; every container is gone when this returns or raises.

    Args:
        job: what runs.
        host: this machine.
        settings: name the engine's command.
        note: takes a line about a host that failed or went silent.

    Raises:
        UsageError, HostError: as `plan_launch`; or a host did not start its container, its image has no sshd, or it is lost.

    """
    plan, _ = plan_launch(job, host, settings)
    for program in dict.fromkeys(step.command[0] for step in plan.steps):
        _require(program)
    beats = Beats([node.name for node in job.nodes], note)
    if job.launcher == "srun":
        return run_srun(job, plan.starts[0], beats)
    with _keepers(plan.keepers, beats) as keepers:
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
                ran = _fed(step, feed(f"{FOLDER}/known_hosts", "\n".join(known)), START_SECONDS)
                if ran.returncode:
                    raise HostError(
                        f"the container takes no public keys of the others: {_first_line(ran.stderr)}",
                        where=step.node,
                        hint="its memory or disk may be full, or it ended: look at the engine's log there, and launch again",
                    )
        return _run_together(plan.starts, _Guard(plan.keepers, keepers, beats), note)


_STARTING = ("No such container", "is not running", "no instance found")
"""What Docker and Apptainer write while a container is not there yet."""
_PROGRAMS = {
    "apptainer": "install it: https://apptainer.org/docs/admin/main/installation.html",
    "docker": "run scripts/install-engine",
    "srun": "launch from a login node of Slurm, or use another --launcher",
    "ssh": "sudo apt-get install openssh-client",
    "ssh-keygen": "sudo apt-get install openssh-client",
}


def _require(program: str) -> None:
    """Raise HostError where a program that the launch starts is missing."""
    if shutil.which(program) is None:
        raise HostError(f"there is no {program}", where="PATH", hint=_PROGRAMS.get(program, "install it"))


@contextlib.contextmanager
def _keepers(steps: Sequence[LaunchStep], beats: Beats) -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    try:
        for step in steps:
            process = subprocess.Popen(
                step.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                # Its own session: Ctrl-C reaches only this process, which ends the containers in order.
                start_new_session=True,
            )
            running.append(process)
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            beats.listen(process.stdout, step.node)
        yield running
    finally:
        for process in running:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        silent = beats.silent(SILENT_SECONDS)
        for step, process in zip(steps, running, strict=False):
            try:
                process.wait(timeout=1 if step.node in silent else 30)
            except subprocess.TimeoutExpired:
                process.kill()  # the ssh to a host that is down
                process.wait()
            if process.stderr is not None:
                process.stderr.close()
        beats.close()


@contextlib.contextmanager
def _keys(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the private and the public key that the containers share, as text."""
    if job.ssh_key is not None:
        _require("ssh-keygen")
        ran = subprocess.run(
            ["ssh-keygen", "-y", "-P", "", "-f", str(job.ssh_key)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
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
        _require("ssh-keygen")
        line = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", job.name, "-f", str(path)]
        ran = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
        if ran.returncode:
            raise HostError(
                f"no key could be made: {_first_line(ran.stderr)}",
                where="ssh-keygen",
                hint="`df /dev/shm` shows whether there is room; or name a key: --ssh-key",
            )
        keys = path.read_text(encoding="utf-8"), path.with_suffix(".pub").read_text(encoding="utf-8")
    yield keys


def _first_line(text: str) -> str:
    """Return the line that says why a program failed: the first, since docker ends its errors with an advice to read its help.

    Apptainer prints what it does before that, in lines that begin with INFO or WARNING.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    others = [line for line in lines if not _PROGRESS.match(line)]
    return apptainer.fatal(text) or (others or lines or ["no message"])[0]


def _fed(step: LaunchStep, script: str, seconds: float) -> "subprocess.CompletedProcess[str]":
    """Feed a script to a container's shell.

    Raises:
        HostError: it did not end in time.

    """
    try:
        return subprocess.run(
            step.command, input=script, capture_output=True, text=True, errors="replace", check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise HostError(
            f"the container did not get ready within {START_SECONDS} s",
            where=step.node,
            hint=f"look at the load and the engine of {step.node}: a command in the container does not end",
        ) from None


def _set_up(step: LaunchStep, script: str, keeper: subprocess.Popen[str]) -> str:
    """Feed the set-up script to a container as soon as that runs; return what it printed."""
    end = time.monotonic() + START_SECONDS
    while True:
        if keeper.poll() is not None:
            output = keeper.stderr.read() if keeper.stderr else ""
            why = _first_line(output)
            hint = (
                f"`ssh {step.node} docker info` must work from here, and the image must be there: envbuild pull; or, for Apptainer, "
                "`apptainer --version`, with the .sif or the sandbox at the same path"
            )
            if _NO_FUSE.search(why):
                hint = "a .sif takes a /dev/fuse that its user may open; a sandbox takes none: envbuild image … --output FOLDER"
            raise HostError(f"no container could be started: {why}", where=step.node, hint=hint)
        ran = _fed(step, script, max(1, end - time.monotonic()))
        if ran.returncode == 0:
            return ran.stdout
        if ran.returncode == NO_SSHD:
            raise HostError(
                ran.stderr.strip().removeprefix("envbuild: "),
                where=step.node,
                hint="add openssh-server to the image's packages, or use --launcher torchrun, which needs no login",
            )
        starting = any(text in ran.stderr for text in _STARTING)
        if ran.returncode == 255 and not starting:  # ssh's own failure
            raise HostError(
                f"the host cannot be reached: {_first_line(ran.stderr)}",
                where=step.node,
                hint=f"`ssh {step.node} true` must work from here without a password",
            )
        if not starting or time.monotonic() > end:
            raise HostError(
                f"the container did not get ready: {_first_line(ran.stderr)}",
                where=step.node,
                hint="the port of --ssh-port must be free on that host",
            )
        time.sleep(0.2)


@dataclass(frozen=True)
class _Guard:
    """The containers of a job that runs."""

    steps: Sequence[LaunchStep]
    processes: Sequence["subprocess.Popen[str]"]
    beats: Beats

    def check(self) -> None:
        """Raise HostError where a host's container has ended or its host is lost; name a host that went silent."""
        for step, process in zip(self.steps, self.processes, strict=True):
            if process.poll() is not None:
                raise HostError(
                    "its container ended while the job ran: it was killed, its memory ran out, or its engine stopped",
                    where=step.node,
                    hint=f"look at the kernel's log and the engine's on {step.node}; the other hosts' containers were ended",
                )
        self.beats.look()
        for name in self.beats.silent(LOST_SECONDS):
            raise HostError(
                f"it has not answered for {LOST_SECONDS} s, and the job was ended", where=name,
                hint="take it out of the hostfile, and resume from the last checkpoint",
            )  # fmt: skip


def _run_together(steps: Sequence[LaunchStep], guard: _Guard, note: Note) -> int:
    """Run the commands next to each other and return the first exit code that is not 0; the containers' end ends the others."""
    left = {
        step.node: subprocess.Popen(step.command, stdin=subprocess.DEVNULL, start_new_session=True) for step in steps
    }
    try:
        while left:
            ended = next((name for name, process in left.items() if process.poll() is not None), None)
            if ended is None:
                guard.check()
                time.sleep(0.1)
                continue
            if code := left.pop(ended).returncode:
                # a container that died takes its ranks along, and is what to name
                for _ in range(10):
                    time.sleep(0.1)
                    guard.check()
                note(f"{ended}: the {'launcher' if len(steps) == 1 else 'ranks'} there ended with exit code {code}")
                return code
        return 0
    finally:
        for process in left.values():
            process.terminate()  # docker's client; what it started ends with its container
            process.wait()
