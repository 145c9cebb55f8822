"""Flags of the formats for clusters: the job's name, cores and memory."""

import pytest
from test_cluster_formats import IMAGE, LOCK, STACK, objects, pods, render

from envbuild.errors import UsageError


@pytest.mark.parametrize(("kind", "flags"), [("jobset", LOCK), ("trainjob", LOCK), ("mpijob", STACK)])
def test_the_objects_have_the_name_that_is_asked_for(kind, flags):
    found = objects(*flags, *IMAGE, "--kind", kind, "--name", "trial-7")
    assert {each["metadata"]["name"] for each in found} == {"trial-7"}
    default = objects(*flags, *IMAGE, "--kind", kind)
    assert [each["metadata"]["labels"] for each in found] == [each["metadata"]["labels"] for each in default]
    text = render(*flags, *IMAGE, "--format", "kubernetes", "--kind", kind, "--name", "trial-7")
    assert ("--master-addr=trial-7-node-0-0.trial-7 " in text) == (kind == "jobset")
    if kind == "trainjob":
        assert found[1]["spec"]["runtimeRef"]["name"] == "trial-7"


def test_a_batch_job_has_the_name_that_is_asked_for():
    assert "#SBATCH --job-name=Trial_7.b\n" in render(*LOCK, "--format", "sbatch", "--name", "Trial_7.b")


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("kubernetes", "Trial"),
        ("kubernetes", "7th"),  # a service's name begins with a letter
        ("kubernetes", "a-"),
        ("kubernetes", "a.b"),
        ("kubernetes", "a\n"),
        ("kubernetes", "a" * 41),
        ("sbatch", "a b"),
        ("sbatch", "a/b"),
        ("sbatch", "-a"),
        ("sbatch", "a\n#SBATCH --nodes=9"),
        ("sbatch", "a" * 65),
    ],
)
def test_a_name_that_no_job_can_have_is_refused(form, name):
    image = IMAGE if form == "kubernetes" else ()
    error = render(*LOCK, "--format", form, *image, "--name", name, code=UsageError.exit_code)
    assert "is no name of a job" in str(error)
    assert error.where == "--name"


def test_the_longest_name_leaves_room_for_what_operators_add():
    (jobset,) = objects(*LOCK, *IMAGE, "--name", "a" * 40, "--nodes", "100000")
    assert len(f"{jobset['metadata']['name']}-node-0-99999-abcde") <= 63


def test_a_devcontainer_has_no_job_to_name():
    assert "--name" in str(render(*LOCK, "--format", "devcontainer", "--name", "a", code=UsageError.exit_code))


def containers(found):
    """Return the containers of objects by their names."""
    return {
        each["name"]: each
        for item in found
        for pod in pods(item)
        for each in [*pod.get("initContainers", ()), *pod["containers"]]
    }


@pytest.mark.parametrize(
    ("kind", "flags", "names"),
    [
        ("jobset", LOCK, {"driver-check", "node"}),
        ("trainjob", LOCK, {"driver-check", "node"}),
        ("mpijob", STACK, {"driver-check", "worker", "launcher"}),
    ],
)
def test_every_container_asks_for_cores_and_memory(kind, flags, names):
    """A quota of a namespace refuses a pod one container of which states none."""
    found = containers(objects(*flags, *IMAGE, "--kind", kind, "--cpus", "64", "--memory", "512Gi"))
    assert found.keys() == names
    for name, container in found.items():
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        own = {"cpu": "1", "memory": "2Gi"}
        asked = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": 8}
        assert resources["limits"] == (own if name == "launcher" else asked)
    one = containers(objects(*flags, *IMAGE, "--kind", kind, "--memory", "1.5Ti"))
    assert all("cpu" not in each["resources"]["limits"] for each in one.values())
    none = containers(objects(*flags, *IMAGE, "--kind", kind))
    assert "resources" not in none.get("launcher", {})
    assert none["driver-check"]["resources"]["limits"] == {"nvidia.com/gpu": 8}


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--cpus", value) for value in ("0", "0.0", "0m", "-1", "1.5m", "64Gi", "all", "1e3", "1.0001", "\u0661")),
        *(("--memory", value) for value in ("512", "0Gi", "512m", "512GB", "512 Gi", "Gi", "1Ei", "-1Gi", "\u0661Gi")),
    ],
)
def test_what_is_no_quantity_is_refused(flag, value):
    error = render(*LOCK, *IMAGE, "--format", "kubernetes", flag, value, code=UsageError.exit_code)
    assert "is no quantity" in str(error)
    assert error.where == flag


@pytest.mark.parametrize(("flag", "value"), [("--cpus", "1.5"), ("--cpus", "1500m"), ("--memory", "500G")])
def test_a_quantity_is_written_as_it_was_given(flag, value):
    node = containers(objects(*LOCK, *IMAGE, flag, value))["node"]
    assert node["resources"]["requests"][{"--cpus": "cpu", "--memory": "memory"}[flag]] == value
    error = render(*LOCK, "--format", "sbatch", flag, value, code=UsageError.exit_code)
    assert "does not read it" in str(error)


@pytest.mark.parametrize(("kind", "flags"), [("jobset", LOCK), ("trainjob", LOCK), ("mpijob", STACK)])
def test_a_module_is_pythons_in_every_kind(kind, flags):
    found = containers(objects(*flags, *IMAGE, "--kind", kind, "--", "-m", "pkg.train", "--lr", "1"))
    command = found["launcher" if kind == "mpijob" else "node"]["command"]
    assert command[3:] == ["sh", *(["python3"] if kind == "mpijob" else []), "-m", "pkg.train", "--lr", "1"]


@pytest.mark.parametrize("form", [("sbatch",), ("kubernetes", *IMAGE)])
def test_no_module_is_refused(form):
    error = render(*LOCK, "--format", *form, "--", "-m", code=UsageError.exit_code)
    assert "-m names no module" in str(error)


@pytest.mark.parametrize(("kind", "flags"), [("jobset", LOCK), ("trainjob", LOCK), ("mpijob", STACK)])
def test_every_pod_may_run_on_a_node_that_is_kept_for_gpus(kind, flags):
    """Also an MPIJob's launcher, which has no GPU: a cluster may have no other nodes."""
    found = [pod for each in objects(*flags, *IMAGE, "--kind", kind) for pod in pods(each)]
    assert len(found) == (2 if kind == "mpijob" else 1)
    for pod in found:
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    (cpu,) = pods(objects("--cuda", "cpu", "--unlocked", *IMAGE))
    assert "tolerations" not in cpu
