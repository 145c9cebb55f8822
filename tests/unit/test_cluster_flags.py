"""Flags of the formats for clusters: the job's name."""

import pytest
from test_cluster_formats import IMAGE, LOCK, STACK, objects, render

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
