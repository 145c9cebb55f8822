"""One training job over several hosts: a container on each, and the launcher that the training code expects.

`torchrun` and `srun` start one process per host and need no login between containers. `mpirun` and `deepspeed` log in
from container to container: each gets an sshd on its own port, host keys made at its start and known to all others,
and one key for this job. No key is ever in an image, on a command line or on a host's disk.
"""

from envbuild.run.launch.commands import LaunchPlan, LaunchStep, plan_launch
from envbuild.run.launch.hosts import Node, is_local, read_hostfile
from envbuild.run.launch.job import LAUNCHERS, MASTER_PORT, SSH_PORT, Job, Launcher, new_job_name, variables
from envbuild.run.launch.scripts import hostfile_text, login_script, variables_script
from envbuild.run.launch.supervise import run_launch

__all__ = [
    "LAUNCHERS",
    "MASTER_PORT",
    "SSH_PORT",
    "Job",
    "LaunchPlan",
    "LaunchStep",
    "Launcher",
    "Node",
    "hostfile_text",
    "is_local",
    "login_script",
    "new_job_name",
    "plan_launch",
    "read_hostfile",
    "run_launch",
    "variables",
    "variables_script",
]
