"""The formats that run an image: sbatch, kubernetes, devcontainer."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envbuild.cli import cli
from envbuild.errors import EnvbuildError, UsageError
from envbuild.util import quote

ROOT = Path(__file__).resolve().parents[2]
LOCK = ("--lock", str(min((ROOT / "matrices/locks").glob("*-apex*-sm90-fc9f6c2f-*"))))
DIGEST = "sha256:" + "a" * 64
IMAGE = ("--image", "reg.example.org/team/te:1", "--digest", DIGEST)
STACK = ("--stack", "llama3-70b", "--unlocked")
# The fields of spec, as the published schemas of these kinds have them: jobset v1alpha2, trainer v1alpha1, mpi-operator v2beta1.
SPECS = {
    "JobSet": {
        "network": {"enableDNSHostnames", "publishNotReadyAddresses", "subdomain"},
        "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
        "replicatedJobs": {"name", "replicas", "template", "groupName", "dependsOn"},
    },
    "TrainingRuntime": {"mlPolicy": {"numNodes", "torch", "mpi"}, "template": {"metadata", "spec"}},
    "TrainJob": {
        "runtimeRef": {"apiGroup", "kind", "name"},
        "trainer": {"numNodes", "numProcPerNode", "image", "command", "args", "env", "resourcesPerNode"},
    },
    "MPIJob": {
        "slotsPerWorker": int,
        "mpiImplementation": str,
        "launcherCreationPolicy": str,
        "runPolicy": {"cleanPodPolicy", "backoffLimit"},
        "mpiReplicaSpecs": {"Launcher", "Worker"},
    },
}
VERSIONS = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "MPIJob": "kubeflow.org/v2beta1",
}
# The fields of an image's devcontainer.json, and their types, as the schema of containers.dev has them.
DEVCONTAINER = {
    "name": str, "image": str, "runArgs": list, "updateRemoteUserUID": bool, "postStartCommand": list,
    "forwardPorts": list, "portsAttributes": dict, "customizations": dict,
}  # fmt: skip
POD = {"restartPolicy", "initContainers", "containers", "volumes", "tolerations"}
CONTAINER = {"name", "image", "command", "workingDir", "env", "resources", "securityContext", "volumeMounts"}


def render(*flags, code=None):
    if code is not None:
        with pytest.raises(EnvbuildError) as caught:
            cli.main(["render", *flags], prog_name="envbuild", standalone_mode=False)
        assert caught.value.exit_code == code
        return caught.value
    done = CliRunner().invoke(cli, ["render", *flags], standalone_mode=False, catch_exceptions=False)
    return done.stdout


def objects(*flags):
    return list(yaml.safe_load_all(render("--format", "kubernetes", *flags)))


def pods(value):
    """Yield every pod in nested data."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for each in value.values():
            yield from pods(each)
    elif isinstance(value, list):
        for each in value:
            yield from pods(each)


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis", "docker"])
@pytest.mark.parametrize("flags", [LOCK, STACK, ("--cuda", "cpu", "--unlocked")])
def test_a_batch_script_parses_and_asks_for_gpus_where_the_cell_has_cuda(runtime, flags):
    text = render(*flags, "--format", "sbatch", "--runtime", runtime, "--nodes", "3")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=3" in head
    assert "#SBATCH --propagate=NONE" in head
    assert ("#SBATCH --gpus-per-node=8" in head) is ("cpu" not in flags)
    first = next(line for line in text.splitlines() if not line.startswith("#"))
    assert first == "set -euo pipefail"  # Slurm reads no #SBATCH after the first command


def test_a_batch_script_does_not_start_without_gpus(tmp_path):
    script = tmp_path / "job"
    script.write_text(render(*LOCK, "--format", "sbatch"))
    ran = subprocess.run(
        ["bash", str(script)], capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, check=False
    )
    assert ran.returncode == 8
    assert "no GPU" in ran.stderr


@pytest.mark.parametrize(
    "command", [("train.py", "--lr", "1"), ("-m", "pkg.train", "--lr", "1"), ("sh", "-c", "echo 'a b' $HOME; exit 3")]
)
def test_the_task_of_a_job_reaches_torchrun_with_its_words(tmp_path, command):
    """The script as bash runs it, with programs of Slurm and pyxis that run what they are given here."""
    script = tmp_path / "job"
    script.write_text(render("--cuda", "cpu", "--unlocked", "--format", "sbatch", "--runtime", "pyxis"))
    programs = {
        "scontrol": "echo node1; echo node2",
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; SLURM_NODEID=1 exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "12345", "NCCL_DEBUG": "INFO",
    }  # fmt: skip
    ran = subprocess.run(["bash", str(script), *command], capture_output=True, text=True, env=environment, check=True)
    expected = ["--nnodes=2", "--nproc-per-node=1", "--node-rank=1", "--master-addr=node1", "--master-port=22345"]
    assert ran.stdout.splitlines() == [*expected, *(["--no-python"] if command[0] == "sh" else []), *command]


@pytest.mark.parametrize(
    ("kind", "flags", "kinds"),
    [
        ("jobset", LOCK, ["JobSet"]),
        ("trainjob", LOCK, ["TrainingRuntime", "TrainJob"]),
        ("mpijob", STACK, ["MPIJob"]),
    ],
)
def test_the_objects_have_the_fields_of_their_kinds(kind, flags, kinds):
    found = objects(*flags, *IMAGE, "--kind", kind, "--rdma", "rdma/hca=4", "--nodes", "3", "--", "train.py", "$(A)")
    assert [each["kind"] for each in found] == kinds
    for each in found:
        assert each["apiVersion"] == VERSIONS[each["kind"]]
        assert each.keys() == {"apiVersion", "kind", "metadata", "spec"}
        fields = SPECS[each["kind"]]
        assert each["spec"].keys() <= fields.keys()
        for name, value in each["spec"].items():
            if isinstance(fields[name], type):
                assert isinstance(value, fields[name])
            else:
                for item in value if isinstance(value, list) else [value]:
                    assert item.keys() <= fields[name]
    all_pods = [pod for each in found for pod in pods(each)]
    nodes = [pod for pod in all_pods if "initContainers" in pod]
    assert len(nodes) == 1
    for pod in all_pods:
        assert pod.keys() <= POD
        for container in [*pod.get("initContainers", ()), *pod["containers"]]:
            assert container.keys() <= CONTAINER
            assert container["image"] == f"reg.example.org/team/te@{DIGEST}"
    (check,), (node,) = nodes[0]["initContainers"], nodes[0]["containers"]
    for container in (check, node):
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 4}
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert container["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert nodes[0]["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    starts = next(c["command"] for pod in all_pods for c in pod["containers"] if "train.py" in c["command"])
    assert starts[-1] == "$$(A)"  # Kubernetes reads it as $(A)


def test_kubernetes_needs_a_digest_and_a_registry(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("ENVBUILD_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("ENVBUILD_REGISTRY", raising=False)
    assert isinstance(render("--cuda", "cpu", "--unlocked", "--format", "kubernetes", code=2), UsageError)
    text = render("--cuda", "cpu", "--unlocked", "--format", "kubernetes", "--image", "reg.example.org/a:1")
    assert "NOT PINNED" in text
    assert "nvidia.com/gpu" not in text


@pytest.mark.parametrize(
    "flags",
    [
        ("--format", "shell", "--nodes", "2"),
        ("--format", "dockerfile", "--", "train.py"),
        ("--format", "sbatch", "--kind", "jobset"),
        ("--format", "sbatch", "--digest", DIGEST),
        ("--format", "sbatch", "--gpus-per-node", "0"),
        ("--format", "kubernetes", "--image", "x", "--digest", "sha256:1"),
        ("--format", "kubernetes", "--image", "X Y"),
        ("--format", "kubernetes", *IMAGE, "--rdma", "rdma"),
        ("--format", "kubernetes", *IMAGE, "--kind", "mpijob"),
    ],
)
def test_a_flag_that_cannot_be_is_refused(flags):
    assert isinstance(render(*LOCK, *flags, code=2), UsageError)


def test_the_check_refuses_another_lock():
    check = ROOT / "dockerfiles/cluster/check.py"
    ran = subprocess.run(
        [sys.executable, check, "sha256:x", "0", "", "cpu"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 4
    assert "holds lock" in ran.stderr
    assert subprocess.run([sys.executable, check, "", "0", "", "cpu"], check=False).returncode == 0


def test_a_devcontainer_asks_for_what_training_needs():
    found = json.loads(render(*LOCK, "--format", "devcontainer", *IMAGE))
    assert found["image"] == f"reg.example.org/team/te@{DIGEST}"
    assert found["runArgs"][0] == "--gpus=all"
    cell = ("--cuda", "13.0", "--te", "2.12", "--gpu", "h100", "--unlocked")
    compat = json.loads(render(*cell, "--driver", "550.54.15", "--format", "devcontainer"))
    assert "postStartCommand" in compat
    for each in (found, compat):
        assert {name: type(value) for name, value in each.items()}.items() <= DEVCONTAINER.items()
    assert "--gpus=all" not in json.loads(render("--cuda", "cpu", "--unlocked", "--format", "devcontainer"))["runArgs"]
    with pytest.raises(ValueError, match="devcontainer"):
        quote.devcontainer("${localEnv:HOME}")


# no list is in a list: these formats have none
scalars = st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]))
mappings = st.deferred(lambda: st.dictionaries(st.text(max_size=9), values, min_size=1, max_size=4))
values = scalars | mappings | st.lists(scalars | mappings, min_size=1, max_size=4)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # a busy machine is no defect of the text
@given(st.dictionaries(st.text(max_size=9), values, min_size=1, max_size=6))
def test_yaml_reads_as_the_same_values(value):
    assert yaml.safe_load("\n".join(quote.yaml_lines(value)) + "\n") == value


def test_yaml_keeps_a_script_readable():
    assert list(quote.yaml_lines({"a": "x: y\n  # z\n\n$(w)\n"})) == ["a: |", "  x: y", "    # z", "", "  $(w)"]
    with pytest.raises(ValueError, match="no text"):
        quote.yaml("\ud800")


@given(st.text("$(){}ab"))
def test_kubernetes_expands_nothing(text):
    """As its expansion reads a word: `$$` is `$`, `$(NAME)` a variable."""
    quoted, found, place = quote.kubernetes(text), "", 0
    while place < len(quoted):
        assert not quoted.startswith("$(", place)
        place += quoted.startswith("$$", place)
        found += quoted[place]
        place += 1
    assert found == text


KUBERNETES = ("--format", "kubernetes", "--image", "r.example.org/x:y", "--digest", f"sha256:{'a' * 64}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*KUBERNETES, "--rdma", "nvidia.com/gpu=4"], "is a resource of GPUs"),
        ([*KUBERNETES, "--claim", "Data:/data"], "is no claim"),
        ([*KUBERNETES, "--claim", "data:data"], "is no claim"),
        ([*KUBERNETES, "--mount", "/data:/data"], "does not read it"),
        (["--", "a\nb"], "no script can show"),
        (["--image", "a\nb.sif"], "no script can show"),
        (["--image", "envbuild:tag"], "is no file"),
        (["--image", "registry.example.org/x:y"], "names an engine's image"),
        (["--image", "./te.sqsh"], "is no image for apptainer"),
        (["--runtime", "pyxis", "--image", "te.sif"], "is no image for pyxis"),
        (["--mount", "data:/data"], "is no mount"),
        (["--mount", "/data:/data:rx"], "is no mount"),
        (["--mount", "/da\tta:/data"], "is no mount"),
        (["--runtime", "pyxis", "--mount", "/a,b:/data"], "pyxis takes no path"),
        (["--runtime", "pyxis", "--mount", "/a$b:/data"], "pyxis takes no path"),
        (["--runtime", "pyxis", "--mount", "/a`b`:/data"], "pyxis takes no path"),
    ],
)
def test_what_no_job_of_a_cluster_can_hold(words, says):
    form = () if "--format" in words else ("--format", "sbatch")
    error = render(*LOCK, *form, *words, code=UsageError.exit_code)
    assert says in str(error)


@pytest.mark.parametrize(
    ("runtime", "says"),
    [
        ("apptainer", "--mount 'type=bind,source=/my data,destination=/data,ro'"),
        ("docker", "--mount 'type=bind,source=/my data,target=/data,readonly'"),
        ("pyxis", "--container-mounts='/my data:/data:ro,'\"$folder:$folder\""),
    ],
)
def test_a_batch_script_mounts_folders_of_the_nodes(runtime, says):
    text = render(
        *LOCK, "--format", "sbatch", "--runtime", runtime, "--mount", "/my data:/data:ro", "--", "-m", "train"
    )
    assert says in text
    assert "#SBATCH --mem=0" in text
    assert ("--user" in text) == (runtime == "docker")


def test_kubernetes_mounts_claims_and_locks_memory_for_rdma_alone():
    flags = (*LOCK, *KUBERNETES)
    text = render(*flags, "--claim", "data:/data:ro", "--claim", "work:/work")
    assert text.count("claimName: data") == text.count("claimName: work") == 1
    assert len(re.findall(r'mountPath: "?/data"?$', text, re.MULTILINE)) == 2  # the check's container and the node's
    assert "IPC_LOCK" not in text
    assert "IPC_LOCK" in render(*flags, "--rdma", "rdma/hca=1")
    assert "--no-python" not in render(*flags, "--", "-m", "train")
    assert "--no-python" in render(*flags, "--", "train")


@pytest.mark.parametrize(
    ("uid", "home", "own"), [("1000780000", "gone", True), ("1000780000", "", False), ("0", "gone", False)]
)
def test_a_user_whom_the_image_does_not_know_has_a_home_in_kubernetes(tmp_path, uid, home, own):
    (jobset,) = objects(*IMAGE, *STACK)
    script = next(pods(jobset))["containers"][0]["command"][2]
    home = str(tmp_path / home)
    # the user is this one, but for the number and the name that `id` prints
    (tmp_path / "id").write_text(f'#!/bin/sh\nif [ "$1" = -u ]; then echo {uid}; else exit 1; fi\n')
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$HOME $USER"; if [ -w "$HOME" ]; then echo writes; fi\n')
    for name in ("id", "torchrun"):
        (tmp_path / name).chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": home,
        "TMPDIR": str(tmp_path),
        "USER": "" if own else "me",
    }
    script = script.replace("$(JOB_COMPLETION_INDEX)", "0").replace("$$", "$")
    done = subprocess.run(["sh", "-c", script, "sh", "a.py"], capture_output=True, text=True, check=True, env=env)
    found, name = done.stdout.splitlines()[0].split()
    assert name == ("envbuild" if own else "me")
    if own:
        assert Path(found).parent == tmp_path
        assert "writes" in done.stdout
    else:
        assert found == home
