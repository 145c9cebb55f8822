"""Plan -> a batch script for Slurm that runs the image with Apptainer, with pyxis and enroot, or with Docker."""

from typing import Literal

from markupsafe import Markup

from envbuild.matrix.load import Matrix
from envbuild.plan.cluster import Cluster, check_words, name_of, require_gpus, text_of
from envbuild.plan.dockerfile import rendered
from envbuild.plan.plan import Plan
from envbuild.util import quote

Runtime = Literal["apptainer", "pyxis", "docker"]
RUNTIMES: tuple[Runtime, ...] = ("apptainer", "pyxis", "docker")
_TEXTS = ("check.py", "reduce.py", "rank.sh")


def batch_script(matrix: Matrix, plan: Plan, cluster: Cluster, runtime: Runtime) -> str:
    """Return the script: one task per node, which checks its image, driver and GPUs and then starts torchrun.

    Raises:
        UsageError: it asks for GPUs that the cell does not use, or for none.
        LockError: a value cannot be written into a script.

    """
    require_gpus(plan, cluster)
    lock, _, floor, cuda = check_words(matrix, plan, cluster)
    return rendered(
        "sbatch.j2",
        plan=plan,
        cluster=cluster,
        runtime=runtime,
        name=name_of(plan),
        image=cluster.reference if runtime == "docker" else cluster.image,
        workdir=plan.workdir if plan.stack else "",
        lock=lock,
        floor=floor,
        cuda=cuda,
        texts={name: text_of(name) for name in _TEXTS},
        sh=lambda value: Markup(quote.shell(value)),  # noqa: S704
    )
