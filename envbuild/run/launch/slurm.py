"""The line of `srun`: every node finds its own GPUs and starts the image with what the image's form asks for.

Nothing of the machine that launches counts: a login node has no GPU, and often no runtime either.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from envbuild.engine.place import is_path
from envbuild.errors import UsageError
from envbuild.plan.cluster import FOR_ENROOT, FOR_ENROOTS_HOOKS, OF_THE_NODE
from envbuild.run.apptainer import LIMITS, bind_flags, shared_place
from envbuild.run.container import READ_COMPAT, Mount, require_names_gpus
from envbuild.run.launch.containers import require_docker
from envbuild.run.launch.job import Job, variables
from envbuild.settings import Settings
from envbuild.util.names import shown

VALUES = "ENVBUILD_JOB_"
"""In front of the names of the job's variables on the way into a container: a PATH or an LD_PRELOAD of the job is no
node's, and no script's variable. The container's shell gives them their names, right before the job."""
_OF_RUNTIME = ("NVIDIA_", "MELLANOX_")
"""Starts of the names that a runtime reads as it makes a container; they keep their names on the way."""
_READ_ONLY = ("BASHOPTS", "EUID", "PPID", "SHELLOPTS", "UID")
"""Names that bash lets nobody set."""

# $1 GPUs, $2 InfiniBand, $3 ranks of a node, $4 the job's name, $5 the names that its variables come by, $6 its nodes, $7 the
# setting `gpu_access`; then the words of the runtime. `nvidia-smi -L` lists what answers, and under Slurm's cgroups only what the job was given.
_NODE = r"""set -eu
asked=$1 rdma=$2 slots=$3 job=$4 names=$5 nodes=$6 by=$7
shift 7
die() {
    echo "envbuild: ${SLURMD_NODENAME:-$(uname -n)}: $1" >&2
    exit 8
}
nth() { # number $2 of the list $1, from 0; where there is no list, $2 itself
    list=${1:+$1,} at=$2
    [ -n "$list" ] || { echo "$2"; return; }
    while [ "$at" -gt 0 ]; do list=${list#*,} at=$((at - 1)); done
    echo "${list%%,*}"
}
mine='' seen='' count=0
if [ "$asked" != none ]; then
    count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ') || :
    [ "$count" -gt 0 ] || die 'no GPU answers here: ask Slurm for some (--gpus-per-node), or write --gpus none to run without'
    case $asked in
    auto | all) mine=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}} ;;
    *)
        # GPU 0 is the first of those that Slurm gave: another one of the node, and another one for CUDA
        given=${SLURM_STEP_GPUS:-${SLURM_JOB_GPUS:-}}
        if [ -n "$given" ]; then count=$(echo "$given" | tr , '\n' | grep -c .); fi
        for number in $(echo "$asked" | tr , ' '); do
            [ "$number" -lt "$count" ] || die "there is no GPU $number: this node has $count for this job"
            mine=${mine:+$mine,}$(nth "$given" "$number")
            seen=${seen:+$seen,}$(nth "${CUDA_VISIBLE_DEVICES:-}" "$number")
        done
        ;;
    esac
    if [ -n "$mine" ]; then count=$(echo "$mine" | tr , '\n' | grep -c .); fi
fi
if [ "$slots" -eq 0 ]; then slots=$((count > 0 ? count : 1)); fi
if [ "$rdma" = on ] && [ ! -d /dev/infiniband ]; then die 'there is no /dev/infiniband: leave out --infiniband on'; fi
if [ "$rdma" != off ] && [ -d /dev/infiniband ]; then rdma=on; else rdma=off; fi
# Slurm sorts the names of nodes: ranks follow the hostfile, whose first host is where they meet
rank=${SLURM_NODEID:-0} number=0
for name in $nodes; do
    if [ "$name" = "${SLURMD_NODENAME:-}" ]; then rank=$number; fi
    number=$((number + 1))
done
"""

_APPTAINER = """place=$1 inside=$2
shift 2
command -v apptainer >/dev/null || die 'there is no apptainer, which runs this image'
[ -e "$place" ] || die "there is no $place: put it into a folder that all nodes see"
own=$(mktemp -d "${TMPDIR:-/tmp}/envbuild.XXXXXX")
trap 'rm -rf "$own"' EXIT
mkdir "$own/home" "$own/work"
set -- --contain --cleanenv --pid --no-eval --home "$own/home:/root" --workdir "$own/work" "$@"
if [ "$(id -u)" -eq 0 ]; then set -- --no-privs "$@"; fi
case $asked/$by in
none/*) ;;
*/cdi) for number in $(echo "${mine:-all}" | tr , ' '); do set -- --device "nvidia.com/gpu=$number" "$@"; done ;;
*) set -- --nv "$@" ;;
esac
case $asked/$by in
none/* | */cdi) ;;
auto/* | all/*) if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then export APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"; fi ;;
*) export APPTAINERENV_CUDA_VISIBLE_DEVICES="$seen" APPTAINERENV_CUDA_DEVICE_ORDER=PCI_BUS_ID ;;
esac
if [ "$rdma" = on ]; then set -- --mount type=bind,source=/dev/infiniband,destination=/dev/infiniband "$@"; fi
export APPTAINERENV_ENVBUILD_RANK="$rank" APPTAINERENV_ENVBUILD_SLOTS="$slots"
code=0
sh -c "$LIMITS" sh apptainer exec "$@" "$place" sh -c "$inside" || code=$?
exit "$code"
"""

# The engine keeps a container whose client Slurm kills: it ends with its standard input, which that client holds open.
_DOCKER = """image=$1 inside=$2 engine=$3
shift 3
program=$(command -v "$engine") || die "there is no $engine, which runs this image: a .sif takes Apptainer in its place"
if [ "$by" = auto ] && ! command -v nvidia-container-runtime-hook >/dev/null && ! command -v nvidia-container-toolkit >/dev/null; then
    # where this engine looks: nowhere with CDI off
    while IFS= read -r folder; do
        for file in "$folder"/*.yaml "$folder"/*.json; do
            if [ -n "$folder" ] && grep -Eqs 'kind"?: *"?nvidia\\.com/gpu' "$file"; then by=cdi; fi
        done
    done < <("$program" "$@" info --format '{{range .CDISpecDirs}}{{println .}}{{end}}' </dev/null 2>/dev/null || :)
fi
set -- "$program" "$@" run --rm --init --interactive --pull never --name "$job-$rank" --ipc host --ulimit stack=67108864
FLAGS
if [ "$asked" != none ]; then
    if [ "$by" = cdi ]; then
        for number in $(echo "${mine:-all}" | tr , ' '); do set -- "$@" --device "nvidia.com/gpu=$number"; done
    elif [ -n "$mine" ]; then set -- "$@" --gpus "\\"device=$mine\\""; else set -- "$@" --gpus all; fi
else
    # an engine whose default runtime is nvidia gives GPUs to every image that asks for them
    set -- "$@" --env NVIDIA_VISIBLE_DEVICES=void
fi
if [ "$rdma" = on ]; then set -- "$@" --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1; fi
set -- "$@" --env ENVBUILD_RANK --env ENVBUILD_SLOTS --entrypoint sh
export ENVBUILD_RANK="$rank" ENVBUILD_SLOTS="$slots"
for name in $names; do set -- "$@" --env "$name"; done
exec 3<> <(:)
"$@" "$image" -c '
    exec 3<&0
    (cat <&3 >/dev/null; kill -TERM $$) &
    sh -c "$1" </dev/null 3<&- &
    wait $!' sh "$inside" <&3
"""

# Slurm gives the container all GPUs of the step: CUDA counts those that are named, and has them as 0, 1 …
_PYXIS = f"""inside=$1
unset {" ".join(OF_THE_NODE)}
case $asked in
none | auto | all) ;;
*) export CUDA_VISIBLE_DEVICES="$seen" CUDA_DEVICE_ORDER=PCI_BUS_ID ;;
esac
export ENVBUILD_RANK="$rank" ENVBUILD_SLOTS="$slots"
exec sh -c {shlex.quote(LIMITS)} sh sh -c "$inside"
"""


def srun_line(job: Job, settings: Settings, torchrun: Sequence[str]) -> list[str]:
    """Return the `srun` command. An image of the engine takes Docker, a .sif or a sandbox Apptainer, a .sqsh pyxis.

    Args:
        job: what is to run.
        settings: name the engine's command.
        torchrun: torchrun's words from the meeting point on.

    Raises:
        UsageError: the flag for GPUs names none; or the runtime has no such image, network, mount or choice of devices, or the
            engine is podman.

    """
    require_names_gpus(job.container.gpus)
    names = [node.name for node in job.nodes]
    line = [
        # without --ntasks, the number of an allocation (SLURM_NTASKS) counts
        "srun", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1", f"--nodelist={','.join(names)}",
        # one task has all cores of its node, and not one of them; a login node's limits stay there
        "--cpu-bind=none", "--propagate=NONE", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    asked = job.container
    runtime, inside = _runtime(asked.image), _inside(job, torchrun)
    node = [
        asked.gpus, asked.infiniband, str(job.nodes[0].slots), job.name, " ".join(_handed(job)), " ".join(names),
        settings.gpu_access,
    ]  # fmt: skip
    if runtime == "pyxis":
        return [*line, *_pyxis_flags(job), "sh", "-c", _NODE + _PYXIS, "sh", *node, inside]
    text, words = _apptainer(job, inside) if runtime == "apptainer" else _docker(job, settings, inside)
    return [*line, "--export=ALL", "bash", "-c", _NODE + text, "bash", *node, *words]


def _runtime(image: str) -> Literal["docker", "apptainer", "pyxis"]:
    if not is_path(image):
        return "docker"
    return "pyxis" if image.endswith(".sqsh") else "apptainer"


def _handed(job: Job) -> dict[str, str]:
    """Return the job's variables by the names that `srun` and the nodes know them by."""
    if _runtime(job.container.image) == "apptainer":
        return {f"APPTAINERENV_{name}": value for name, value in variables(job.container).items()}
    return {
        name if name.startswith(_OF_RUNTIME) else VALUES + name: value
        for name, value in variables(job.container).items()
    }


def _inside(job: Job, torchrun: Sequence[str]) -> str:
    """Return the text of the container's shell: the job's variables get their names, and the ranks start."""
    names = [name.removeprefix(VALUES) for name in _handed(job) if name.startswith(VALUES)]
    text = "".join(f'export {n}="${VALUES}{n}"; unset {VALUES}{n}; ' for n in names if n not in _READ_ONLY)
    text += READ_COMPAT + "exec "
    if rest := [f'"{name}=${VALUES}{name}"' for name in names if name in _READ_ONLY]:
        text += f"env {' '.join(rest)} "
    text += f'torchrun --nnodes={len(job.nodes)} --nproc-per-node="$ENVBUILD_SLOTS" '
    return text + f'--node-rank="$ENVBUILD_RANK" {shlex.join(torchrun)}'


def _apptainer(job: Job, inside: str) -> tuple[str, list[str]]:
    asked = job.container
    flags = [word for mount in asked.mounts for word in bind_flags(mount)]
    _require_host_network(job)
    if asked.workdir:
        flags += ["--cwd", asked.workdir]
    return _APPTAINER.replace('"$LIMITS"', shlex.quote(LIMITS)), [shared_place(asked.image), inside, *flags]


def _require_host_network(job: Job) -> None:
    if job.container.network != "host":
        raise UsageError("the ranks of several hosts meet in the hosts' network", where="--network", hint="write host")


def _docker(job: Job, settings: Settings, inside: str) -> tuple[str, list[str]]:
    require_docker(settings)
    asked = job.container
    flags = ["--network", asked.network]
    for mount in asked.mounts:
        flags += ["--volume", f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"]
    if asked.workdir:
        flags += ["--workdir", asked.workdir]
    engine, *words = settings.engine_command
    return _DOCKER.replace("FLAGS", f'set -- "$@" {shlex.join(flags)}'), [asked.image, inside, engine, *words]


def _pyxis_flags(job: Job) -> list[str]:
    asked = job.container
    place = Path(asked.image).expanduser().absolute()
    _require_host_network(job)
    if asked.infiniband == "off":
        raise UsageError(
            "pyxis gives every container the adapters of its node", where="--infiniband off",
            hint="leave it out, and keep NCCL from them: --env NCCL_IB_DISABLE=1",
        )  # fmt: skip

    def written(mount: Mount) -> str:
        both = (str(mount.source), mount.target)
        if any(mark in path for path in both for mark in ':,"$`'):
            raise UsageError(
                'pyxis takes no path with one of : , " $ `', where=f"--mount {shown(str(mount.source))}",
                hint="mount a folder above it",
            )  # fmt: skip
        return ":".join((*both, *(["ro"] if mount.read_only else [])))

    # pyxis hands on what srun exports, beyond --container-env
    hooks = sorted(name for name in os.environ if name.startswith(FOR_ENROOTS_HOOKS) and name.isidentifier())
    exported = dict.fromkeys((*FOR_ENROOT, "ENROOT_LOGIN_SHELL", *hooks, *_handed(job)))
    flags = [f"--export={','.join(exported)}", f"--container-image={place}"]
    flags += ["--no-container-mount-home", "--no-container-entrypoint"]
    if asked.mounts:
        flags.append("--container-mounts=" + ",".join(map(written, asked.mounts)))
    if asked.workdir:
        flags.append(f"--container-workdir={asked.workdir}")
    # the other names are no image's: they need no word, and enroot reads a value of several lines as several variables
    if names := [name for name in _handed(job) if not name.startswith(VALUES)]:
        flags.append("--container-env=" + ",".join(names))
    return flags


def srun_environment(job: Job, environ: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return the environment of `srun`: the job's variables in the form that the image's runtime reads. None is on a line."""
    # enroot's login shell reads /etc/profile, where Debian has its own PATH in place of the image's
    own = {"ENROOT_LOGIN_SHELL": "no"} if _runtime(job.container.image) == "pyxis" else {}
    return environ() | own | _handed(job)
