"""A job under `srun`, from its start to its exit code. Inside an allocation, a second step says which nodes still answer."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

from envbuild.run.launch.beats import BEAT_SECONDS, SILENT_SECONDS, Beats
from envbuild.run.launch.commands import LaunchStep
from envbuild.run.launch.job import Job
from envbuild.run.launch.slurm import srun_environment

_END_SECONDS = 40
"""How long srun may take to end the tasks: it waits 32 s for a node that is down."""


def run_srun(job: Job, step: LaunchStep, beats: Beats) -> int:
    """Run `srun` and return its exit code; its tasks are gone when this returns or raises."""
    # Its own session: Ctrl-C reaches only this process, which ends srun in order.
    srun = subprocess.Popen(
        step.command,
        env=srun_environment(job, lambda: dict(os.environ)),
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
            _end(srun, beats)


def _end(srun: "subprocess.Popen[bytes]", beats: Beats) -> None:
    srun.terminate()  # srun kills the tasks on every node and then ends
    try:
        srun.wait(timeout=5 if beats.silent(SILENT_SECONDS) else _END_SECONDS)
    except subprocess.TimeoutExpired:
        srun.kill()
        srun.wait()


@contextlib.contextmanager
def _watch(job: Job, beats: Beats) -> Iterator[None]:
    """Listen to every node by a step next to the job's; outside of an allocation there is none that it could join."""
    if "SLURM_JOB_ID" not in os.environ:
        yield
        return
    names = ",".join(node.name for node in job.nodes)
    beating = f'while echo "$SLURMD_NODENAME"; do sleep {BEAT_SECONDS}; done 2>/dev/null'
    process = subprocess.Popen(
        [
            "srun", f"--nodes={len(job.nodes)}", "--ntasks-per-node=1", f"--nodelist={names}", "--overlap", "--cpu-bind=none",
            "--mem=0", "--unbuffered", "--quiet", "sh", "-c", beating,
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None  # noqa: S101 - it is a pipe
    beats.listen(process.stdout)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        beats.close()
