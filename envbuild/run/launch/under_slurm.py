"""A job under `srun`, from its start to its exit code. Inside an allocation, a second step says which nodes still answer."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

from envbuild.run.launch.beats import BEAT_SECONDS, SILENT_SECONDS, Beats
from envbuild.run.launch.commands import LaunchStep
from envbuild.run.launch.job import Job
from envbuild.run.launch.slurm import srun_environment
from envbuild.util.processes import end_group, guarded

_END_SECONDS = 40
"""How long srun may take to end the tasks: it waits 32 s for a node that is down."""


def run_srun(job: Job, step: LaunchStep, beats: Beats) -> int:
    """Run `srun` and return its exit code; its tasks are gone when this returns or raises, and end when this is killed."""
    environment = srun_environment(job, lambda: dict(os.environ))
    # Its own session: Ctrl-C reaches only this process, which ends srun in order.
    srun = subprocess.Popen(
        guarded(step.command, patience=_END_SECONDS, env=environment),
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with _watch(job, beats):
            while srun.poll() is None:
                beats.look()
                time.sleep(0.1)
        return srun.returncode
    finally:
        if srun.poll() is None:
            # srun kills the tasks on every node and then ends
            end_group(srun, first=signal.SIGTERM, patience=5 if beats.silent(SILENT_SECONDS) else _END_SECONDS)


@contextlib.contextmanager
def _watch(job: Job, beats: Beats) -> Iterator[None]:
    """Listen to every node by a step next to the job's; outside of an allocation there is none that it could join."""
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    names = ",".join(node.name for node in job.nodes)
    beating = f'while echo "$SLURMD_NODENAME"; do sleep {BEAT_SECONDS}; done 2>/dev/null'
    line = [
        "srun", f"--nodes={len(job.nodes)}", f"--ntasks={len(job.nodes)}", "--ntasks-per-node=1", f"--nodelist={names}",
        "--overlap", "--cpu-bind=none", "--mem=0", "--unbuffered", "--quiet", "sh", "-c", beating,
    ]  # fmt: skip
    process = subprocess.Popen(
        guarded(line, patience=2), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    beats.listen(process.stdout)
    try:
        yield
    finally:
        end_group(process, first=signal.SIGTERM, patience=2)
        beats.close()
