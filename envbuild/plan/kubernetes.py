"""Plan -> objects of Kubernetes that train in the image: a JobSet, a TrainJob with its runtime, or an MPIJob.

Fields are those of jobset.x-k8s.io/v1alpha2, trainer.kubeflow.org/v1alpha1 and kubeflow.org/v2beta1.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from envbuild.errors import LockError, UsageError
from envbuild.matrix.load import Matrix
from envbuild.plan.cluster import (
    MASTER_PORT,
    Cluster,
    by_itself,
    check_words,
    for_torchrun,
    name_of,
    name_of_job,
    require_gpus,
    text_of,
)
from envbuild.plan.dockerfile import OF_CONTAINERS
from envbuild.plan.plan import Plan
from envbuild.util import quote

Kind = Literal["jobset", "trainjob", "mpijob"]
KINDS: tuple[Kind, ...] = ("jobset", "trainjob", "mpijob")

_GPU = "nvidia.com/gpu"
# What mpirun alone takes; a quota counts the launcher's container, too.
_LAUNCHER = {"cpu": "1", "memory": "2Gi"}
_READ_COMPAT = "if [ -f /opt/envbuild/cuda-compat.sh ]; then . /opt/envbuild/cuda-compat.sh; fi\n"
_LIMITS = 'ulimit -S -l "$(ulimit -H -l)" 2>/dev/null || :\n'
_SSHD = """mkdir -p /run/sshd
ssh-keygen -A >/dev/null
exec /usr/sbin/sshd -De -o StrictModes=no -o "SetEnv=PATH=$PATH LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
"""
# torch.distributed reads RANK and its kin, which each MPI spells in its own way.
_RANKS = {
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}


def manifest(matrix: Matrix, plan: Plan, cluster: Cluster, kind: Kind) -> str:
    """Return the objects as YAML.

    Raises:
        UsageError: the image does not have what an MPIJob needs, or the GPUs do not fit the cell.
        LockError: a value cannot be written into YAML.

    """
    require_gpus(plan, cluster)
    make: dict[Kind, Callable[[Matrix, Plan, Cluster], list[Any]]] = {
        "jobset": _jobset,
        "trainjob": _trainjob,
        "mpijob": _mpijob,
    }
    pinned = f"lock {plan.lock.digest}" if plan.lock.complete else "UNLOCKED: the check compares no lock"
    if cluster.digest is None:
        pinned += "; NOT PINNED: the image is named by its tag"
    head = f"envbuild: {plan.cell.id} ({plan.lock.flavor}{f', stack {plan.stack.name}' if plan.stack else ''})"
    try:
        texts = ["".join(f"{line}\n" for line in quote.yaml_lines(each)) for each in make[kind](matrix, plan, cluster)]
        return f"# {quote.comment(head)}\n# {quote.comment(pinned)}\n" + "---\n".join(texts)
    except ValueError as error:
        raise LockError(
            f"a value of the lock or stack cannot be written into the manifest: {error}",
            where="--format kubernetes",
            hint="do not run it; ask where the lock or the stack comes from",
        ) from error


def _meta(plan: Plan, cluster: Cluster) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": name_of(plan), "app.kubernetes.io/managed-by": "envbuild"}
    noted = {name: value for name, value in plan.labels.items() if name.startswith("io.envbuild.")}
    return {"name": name_of_job(plan, cluster), "labels": labels, "annotations": noted}


def _words(*words: str) -> list[str]:
    """Return words of `command` and `args`, in which Kubernetes replaces `$(NAME)`."""
    return [quote.kubernetes(word) for word in words]


def _script(text: str, *words: str) -> list[str]:
    return _words("sh", "-c", text, "sh", *words)


def _asked(cluster: Cluster) -> dict[str, str]:
    """Return the cores and the memory that are asked for."""
    return {name: value for name, value in (("cpu", cluster.cpus), ("memory", cluster.memory)) if value}


def _resources(given: Mapping[str, int | str]) -> dict[str, Any]:
    """Return the field of a container; limits equal requests, as GPUs need it, and a pod of them is evicted last."""
    return {"resources": {"requests": dict(given), "limits": dict(given)}} if given else {}


def _container(cluster: Cluster, name: str, command: list[str], **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name, "image": cluster.reference, "command": command, **more}
    given: dict[str, int | str] = dict(_asked(cluster))
    if cluster.gpus:
        given[_GPU] = cluster.gpus
    if cluster.rdma:
        given[cluster.rdma[0]] = cluster.rdma[1]
    made |= _resources(given)
    if cluster.rdma:
        # Registering memory with an adapter locks it; a pod has no field for the limit. For a user other than root the
        # right does nothing: there the node's runtime sets the limit.
        made["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    # NCCL and data loaders pass tensors through shared memory, of which a container gets 64 MiB by itself.
    made["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    for number, claim in enumerate(cluster.claims):
        read_only = {"readOnly": True} if claim.read_only else {}
        made["volumeMounts"].append({"name": f"claim-{number}", "mountPath": claim.target, **read_only})
    return made


def _pod(matrix: Matrix, plan: Plan, cluster: Cluster, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod of a node: the check of image, driver and GPUs first, and then its container."""
    check = _script(_READ_COMPAT + 'exec python3 -c "$@"\n', text_of("check.py"), *check_words(matrix, plan, cluster))
    return {
        "restartPolicy": "Never",
        "initContainers": [_container(cluster, "driver-check", check)],
        "containers": [dict(container)],
        "volumes": _volumes(cluster),
        **_tolerations(cluster),
    }


def _tolerations(cluster: Cluster) -> dict[str, Any]:
    """Return the field of a pod by which it may run on a node that is kept for GPUs."""
    return {"tolerations": [{"key": _GPU, "operator": "Exists", "effect": "NoSchedule"}] if cluster.gpus else []}


def _volumes(cluster: Cluster) -> list[dict[str, Any]]:
    claims = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim.source}}
        for number, claim in enumerate(cluster.claims)
    ]
    return [{"name": "shm", "emptyDir": {"medium": "Memory"}}, *claims]


def _program(cluster: Cluster) -> list[str]:
    return list(cluster.command) or ["python3", "-c", text_of("reduce.py")]


def _torchrun(cluster: Cluster, flags: str) -> list[str]:
    # OpenShift chooses the user: a number that the image does not know
    start = f"{_READ_COMPAT}{_LIMITS}{text_of('home.sh')}"
    return _script(f'{start}exec torchrun {flags}"$@"\n', *for_torchrun(_program(cluster)))


def _node_job(matrix: Matrix, plan: Plan, cluster: Cluster, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "parallelism": cluster.nodes,
        "completions": cluster.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": _pod(matrix, plan, cluster, container)},
    }


def _started(plan: Plan, cluster: Cluster, command: list[str]) -> dict[str, Any]:
    return _container(cluster, "node", command, workingDir=plan.workdir)


def _jobset(matrix: Matrix, plan: Plan, cluster: Cluster) -> list[Any]:
    name = name_of_job(plan, cluster)
    flags = (
        f"--nnodes={cluster.nodes} --nproc-per-node={cluster.gpus or 1} "
        f'--node-rank="$JOB_COMPLETION_INDEX" --master-addr={name}-node-0-0.{name} --master-port={MASTER_PORT} '
    )
    job = _node_job(matrix, plan, cluster, _started(plan, cluster, _torchrun(cluster, flags)))
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
    }
    return [
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _meta(plan, cluster), "spec": spec}
    ]


def _trainjob(matrix: Matrix, plan: Plan, cluster: Cluster) -> list[Any]:
    """Return a runtime, which holds the pod, and the job that names it; the operator sets torchrun's PET_ variables."""
    version = "trainer.kubeflow.org/v1alpha1"
    container = _started(plan, cluster, _torchrun(cluster, ""))
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    job = {"metadata": {"labels": step}, "spec": _node_job(matrix, plan, cluster, container)}
    meta = _meta(plan, cluster)
    runtime = {
        "apiVersion": version,
        "kind": "TrainingRuntime",
        "metadata": {**meta, "labels": {**meta["labels"], "trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": cluster.nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [{"name": "node", "template": job}]}},
        },
    }
    trainer: dict[str, Any] = {"numNodes": cluster.nodes, "numProcPerNode": cluster.gpus or 1}
    spec = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": meta["name"]},
        "trainer": trainer,
    }
    return [runtime, {"apiVersion": version, "kind": "TrainJob", "metadata": meta, "spec": spec}]


def _mpijob(matrix: Matrix, plan: Plan, cluster: Cluster) -> list[Any]:
    mpi = _require_mpi(plan)
    # No login of the launcher's container: it has no GPU, and waits until each worker's sshd answers.
    launcher = {
        "name": "launcher",
        "image": cluster.reference,
        "workingDir": plan.workdir,
        "command": _script(_mpirun(mpi, plan, cluster), *by_itself(_program(cluster))),
        "env": [
            {"name": "OMPI_ALLOW_RUN_AS_ROOT", "value": "1"},
            {"name": "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "value": "1"},
        ],
        **_resources({name: _LAUNCHER[name] for name in _asked(cluster)}),
    }
    # Where all nodes are kept for GPUs it would stay pending; what adds a toleration by itself does so where GPUs are asked for.
    starter = {"restartPolicy": "Never", "containers": [launcher], **_tolerations(cluster)}
    worker = _container(cluster, "worker", _script(_READ_COMPAT + _LIMITS + _SSHD), workingDir=plan.workdir)
    spec = {
        "slotsPerWorker": cluster.gpus or 1,
        "mpiImplementation": {"openmpi": "OpenMPI", "mpich": "MPICH"}[mpi],
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": {"spec": starter}},
            "Worker": {
                "replicas": cluster.nodes,
                "template": {"spec": _pod(matrix, plan, cluster, worker)},
            },
        },
    }
    return [{"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": _meta(plan, cluster), "spec": spec}]


def _mpirun(mpi: str, plan: Plan, cluster: Cluster) -> str:
    ranks, each = cluster.nodes * (cluster.gpus or 1), cluster.gpus or 1
    rank, size, local = _RANKS[mpi]
    start = f'export RANK="${rank}" WORLD_SIZE="${size}" LOCAL_RANK="${local}"; exec "$@"'
    first = (
        f"export MASTER_ADDR=$(head -n 1 /etc/mpi/hostfile | cut -d' ' -f1 | cut -d: -f1) MASTER_PORT={MASTER_PORT}\n"
    )
    ssh = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectionAttempts=10"
    if mpi == "mpich":
        return f"{first}export HYDRA_LAUNCHER_EXTRA_ARGS='{ssh}'\nexec mpirun -n {ranks} -ppn {each} sh -c '{start}' sh \"$@\"\n"
    # a login has none of the image's variables
    names = (
        "PATH",
        "LD_LIBRARY_PATH",
        "MASTER_ADDR",
        "MASTER_PORT",
        *(n for n in plan.environment if n not in OF_CONTAINERS),
    )
    passed = "".join(f" -x {quote.plain(name)}" for name in dict.fromkeys(names))
    return (
        f'{first}export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:-}}"\n'
        f"exec mpirun -np {ranks} --map-by ppr:{each}:node --bind-to none --mca plm_rsh_args '{ssh}'{passed} "
        f"sh -c '{start}' sh \"$@\"\n"
    )


def _require_mpi(plan: Plan) -> str:
    """Return which MPI the image has: openmpi or mpich.

    Raises:
        UsageError: it has none, or no sshd, by which the launcher reaches the workers.

    """
    asked = plan.cell.versions.get("mpi", "")
    found = next((name for name in _RANKS if asked.startswith(name)), None)
    if found is None:
        raise UsageError("the cell has no MPI", where="--kind mpijob", hint="add --mpi auto, or choose another --kind")
    packages = _installed(plan)
    if "openssh-server" not in packages:
        raise UsageError(
            "the image has no sshd, by which mpirun starts ranks on other nodes",
            where="--kind mpijob",
            hint="add openssh-server to `system` of the stack, or choose another --kind",
        )
    return found


def _installed(plan: Plan) -> frozenset[str]:
    def names() -> Iterator[str]:
        for each in plan.lock.os:
            yield from each.wanted
            yield from (package.name for package in each.packages)

    return frozenset(names())
