"""Plan -> a batch script for Slurm that runs the image with Apptainer, with pyxis and enroot, or with Docker."""

from typing import Literal

from markupsafe import Markup

from envbuild.errors import UsageError
from envbuild.matrix.load import Matrix
from envbuild.plan.cluster import (
    FOR_ENROOT,
    FOR_ENROOTS_HOOKS,
    OF_THE_NODE,
    Cluster,
    Shared,
    check_words,
    name_of_job,
    require_gpus,
    text_of,
)
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
        name=name_of_job(plan, cluster),
        image=cluster.reference if runtime == "docker" else cluster.image,
        workdir=plan.workdir if plan.stack else "",
        lock=lock,
        floor=floor,
        cuda=cuda,
        mounts=_pyxis_mounts(cluster) if runtime == "pyxis" else [_mount(each, runtime) for each in cluster.shared],
        for_enroot=FOR_ENROOT,
        for_enroots_hooks=FOR_ENROOTS_HOOKS,
        of_the_node=OF_THE_NODE,
        texts={name: text_of(name) for name in _TEXTS},
        sh=lambda value: Markup(quote.shell(value)),  # noqa: S704
    )


def _mount(shared: Shared, runtime: Runtime) -> str:
    """Return the value of `--mount`, which Apptainer and Docker read as CSV."""
    target, read_only = ("destination", "ro") if runtime == "apptainer" else ("target", "readonly")
    fields = quote.csv_fields(**{"type": "bind", "source": shared.source, target: shared.target})
    return f"{fields},{read_only}" if shared.read_only else fields


def _pyxis_mounts(cluster: Cluster) -> str:
    """Return the start of the value of `--container-mounts`; each mount ends with a comma.

    Raises:
        UsageError: a path has a comma, which pyxis cannot take.

    """
    for each in cluster.shared:
        if any(mark in each.source + each.target for mark in ',"$`'):
            raise UsageError('pyxis takes no path with one of , " $ `', where="--mount", hint="name a path without one")
    return "".join(f"{each.source}:{each.target}{':ro' if each.read_only else ''}," for each in cluster.shared)
