"""What the formats for clusters have in common: the image, its size in nodes and GPUs, the check before training."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.errors import UsageError
from envbuild.matrix.driver import lowest_driver
from envbuild.matrix.load import Matrix
from envbuild.paths import data_dir
from envbuild.plan.plan import Plan

MASTER_PORT = 29500
"""Where ranks meet inside a cluster's own network; torchrun's default."""

FOR_ENROOT = (
    *("PATH", "HOME", "USER", "LOGNAME", "CUDA_VISIBLE_DEVICES"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
)
"""Variables of a job that enroot reads on its node, or Slurm gives the job there: pyxis hands the rest of a job's
environment to the container, too, where the image does not set it."""
FOR_ENROOTS_HOOKS = ("ENROOT_", "NVIDIA_", "MELLANOX_")
"""Starts of the names that enroot and its hooks read as they make a container."""
OF_THE_NODE = tuple(name for name in FOR_ENROOT if name.startswith("XDG_"))
"""Those that name folders of the node, of which a container has none."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A folder that every node has, seen in the container."""

    source: str
    """Its absolute path on the nodes."""
    target: str
    """Its absolute path in the container."""
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where a plan's image runs, and what it runs there."""

    image: str
    """Its name in a registry or an engine, or the path of a file."""
    digest: str | None = None
    name: str | None = None
    """Of the job; that of the stack or the cell by default."""
    nodes: int = 2
    gpus: int = 8
    """Per node; 0 for a cell without CUDA."""
    command: tuple[str, ...] = ()
    """The training script or program with its arguments; without one, an all-reduce over all ranks."""
    rdma: tuple[str, int] | None = None
    """The resource by which Kubernetes gives InfiniBand adapters, and how many of them."""
    cpus: str | None = None
    """Cores of each node's container, as a quantity of Kubernetes."""
    memory: str | None = None
    """Its memory, as such a quantity."""
    shared: tuple[Shared, ...] = ()
    """Folders that a batch job of Slurm mounts next to that of `sbatch`."""
    claims: tuple[Shared, ...] = ()
    """PersistentVolumeClaims that Kubernetes mounts; the source of each is its name."""

    @property
    def reference(self) -> str:
        """The image as engines take it: by digest where that is known. CRI-O takes no tag next to a digest."""
        if self.digest is None:
            return self.image
        head, slash, last = self.image.rpartition("/")
        return f"{head}{slash}{last.partition(':')[0]}@{self.digest}"


def _is_pythons(word: str) -> bool:
    """Return whether a program that begins with `word` is Python's: a script, or `-m` and a module."""
    return word == "-m" or word.endswith(".py")


def require_module(program: Sequence[str]) -> None:
    """Raise UsageError for `-m` without a module after it."""
    if program and program[0] == "-m" and (len(program) == 1 or program[1].startswith("-")):
        raise UsageError("-m names no module", where="-- -m", hint="write -- -m MODULE [ARGS]")


def for_torchrun(program: Sequence[str]) -> list[str]:
    """Return a program and its arguments as torchrun takes them."""
    return list(program) if _is_pythons(program[0]) else ["--no-python", *program]


def for_deepspeed(program: Sequence[str]) -> list[str]:
    """Return a program and its arguments as DeepSpeed's launcher takes them."""
    if program[0] == "-m":
        return ["--module", *program[1:]]
    return list(program) if _is_pythons(program[0]) else ["--no_python", *program]


def by_itself(program: Sequence[str]) -> list[str]:
    """Return a program and its arguments as what starts any command takes them."""
    return ["python3", *program] if _is_pythons(program[0]) else list(program)


def uses_gpus(plan: Plan) -> bool:
    """Return whether the plan's torch runs on GPUs."""
    return plan.cell.versions["cuda"] != "cpu"


def name_of(plan: Plan) -> str:
    """Return a name for a job of the plan: a label of RFC 1123, at most 40 characters."""
    stated = plan.stack.name if plan.stack else plan.cell.id.rpartition("-")[2]
    return f"envbuild-{re.sub('[^a-z0-9]+', '-', stated.lower())}"[:40].rstrip("-")


def name_of_job(plan: Plan, cluster: Cluster) -> str:
    """Return the name of a job: two jobs of one plan need two, which only their user can give."""
    return cluster.name or name_of(plan)


def lock_of(plan: Plan) -> str:
    """Return the lock that the image must hold, or nothing where the plan has no complete lock."""
    return plan.lock.digest if plan.lock.complete else ""


def text_of(name: str) -> str:
    """Return a text of dockerfiles/cluster/."""
    return (data_dir("dockerfiles") / "cluster" / name).read_text(encoding="utf-8")


def check_words(matrix: Matrix, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Return the arguments of `check.py`."""
    return lock_of(plan), str(cluster.gpus), lowest_driver(matrix, plan.cell) or "", plan.cell.versions["cuda"]


def require_gpus(plan: Plan, cluster: Cluster) -> None:
    """Check that a job asks for GPUs where its cell has CUDA, and only there.

    Raises:
        UsageError: it does not.

    """
    if uses_gpus(plan) == bool(cluster.gpus):
        return
    if cluster.gpus:
        raise UsageError(
            "the cell has no CUDA", where="--gpus-per-node", hint="leave the flag out, or choose a cell with --cuda"
        )
    raise UsageError(
        "the cell trains on GPUs", where="--gpus-per-node 0", hint="give each node 1 or more, or use --cuda cpu"
    )
