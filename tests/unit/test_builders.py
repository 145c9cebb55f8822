"""What buildx says of a builder, and how many compile jobs follow from it."""

import re

import pytest

from envbuild.engine.builders import ASKED, asking, read_answer, read_builder, require_able
from envbuild.engine.machine import Machine
from envbuild.errors import HostError
from envbuild.settings import Settings

BIG = Machine(cores=64, memory_gib=256.0, platform="linux/amd64")

DOCKER = """Name:          default
Driver:        docker
Last Activity: 2026-11-23 09:43:01 +0000 UTC

Nodes:
Name:             default
Endpoint:         default
Status:           running
"""
REMOTE = """Name:          farm
Driver:        remote

Nodes:
Name:     farm0
Endpoint: tcp://10.0.0.1:1234
Status:   inactive
"""


def kubernetes(options: str) -> str:
    return (
        "Name:          kube\nDriver:        kubernetes\n\nNodes:\nName:                  kube0\n"
        f"Endpoint:              kubernetes:///kube?deployment=kube0\nDriver Options:        {options}\nStatus: running\n"
    )


def container(options: str, endpoint: str = "unix:///var/run/docker.sock") -> str:
    return (
        f"Name: box\nDriver: docker-container\n\nNodes:\nName: box0\nEndpoint: {endpoint}\nDriver Options: {options}\n"
    )


def test_whose_machine_counts():
    assert read_builder(DOCKER).is_engines
    for text, here in {
        DOCKER: True,
        container('memory="8g"'): True,
        container('memory="8g"', "default"): True,
        container('memory="8g"', "ssh://me@host"): False,
        container('memory="8g"', "tcp://10.0.0.1:2376"): False,
        REMOTE: False,
        kubernetes(""): False,
    }.items():
        assert read_builder(text).on_engines_machine is here
        assert read_builder(text).is_engines is (text is DOCKER)


@pytest.mark.parametrize(
    ("text", "cores", "memory"),
    [
        (DOCKER, 64, 256),
        (container('cpu-quota="150000" cpuset-cpus="0-2" memory="8g" cpu-period="100000"'), 1, 8),
        (container('cpuset-cpus="0-2,8"'), 4, 256),
        (container('cpu-quota="400000"'), 4, 256),
        (container('memory="512m"'), 64, 0.5),
        (kubernetes('limits.cpu="4" limits.memory="8Gi" requests.cpu="500m"'), 4, 8),
        (kubernetes('limits.cpu="2500m" limits.memory="4294967296"'), 2, 4),
        (kubernetes('limits.cpu="500m"'), 1, 256),
        (kubernetes('limits.cpu="128" limits.memory="1Ti"'), 64, 256),
        (kubernetes('limits.cpu="many" limits.memory="-1" cpuset-cpus="a-b" image="x=\\"y\\""'), 64, 256),
        (kubernetes('limits.cpu="0" limits.memory="0"'), 64, 256),
        ("", 64, 256),
    ],
)
def test_a_builder_has_no_more_than_its_maker_allows(text, cores, memory):
    found = read_builder(text).within(BIG)
    assert (found.cores, found.memory_gib) == (cores, memory)
    assert found.platform == BIG.platform


def test_a_step_on_the_builder_says_what_it_has():
    assert read_answer("cores 16\nkib 33554432\n") == Machine(cores=16, memory_gib=32.0)
    for text in ("", "cores 16\n", "cores x\nkib 1\n", "cores 16\nkib 1\nmore\n", "cores 1e9\nkib 1\n"):
        assert read_answer(text) is None
    text = asking("FROM a AS builder\n", "once")
    assert text.startswith("FROM a AS builder\n\nFROM builder AS ")
    assert f"FROM scratch AS {ASKED}\n" in text
    assert text != asking("FROM a AS builder\n", "twice")


@pytest.mark.parametrize(
    ("buildx", "nodes", "says"),
    [
        ("github.com/docker/buildx v0.13.1 788433953af10f2a698f5c07611dddce2e08c7a0", (), "buildx v0.13.1 is too old"),
        ("github.com/docker/buildx 0.14.1+ds1 0.14.1+ds1-1", (), "buildx 0.14.1+ds1 is too old"),
        ("github.com/docker/buildx v0.15.0 d3a53189f7e9c917eeff851c895b9aad5a66b108", (), None),
        (
            "github.com/docker/buildx 0.29.1+ds1 0.29.1+ds1-4",
            ("BuildKit version: v0.25.2", "BuildKit version: v0.13.0"),
            None,
        ),
        (
            "github.com/docker/buildx v0.29.1 x",
            ("BuildKit version: v0.25.2", "BuildKit version: v0.12.5"),
            "v0.12.5 is too old",
        ),
        ("github.com/docker/buildx v0.15.0 x", ("Buildkit:         v0.11.6",), "v0.11.6 is too old"),
        ("what is that", ("BuildKit version: unknown",), None),
    ],
)
def test_what_is_too_old_to_build_is_named_before_the_build(tmp_path, monkeypatch, buildx, nodes, says):
    """buildx before 0.15 writes its progress in a form that nothing here reads: the build fails at its very end."""
    (tmp_path / "docker").write_text(f"#!/bin/sh\n[ \"$*\" = 'buildx version' ] && echo '{buildx}'\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    facts = read_builder(DOCKER + "".join(f"{line}\n" for line in nodes))
    if says is None:
        require_able(Settings(cache_dir=tmp_path), facts)
        return
    with pytest.raises(HostError, match=re.escape(says)) as refused:
        require_able(Settings(cache_dir=tmp_path), facts)
    assert refused.value.hint
