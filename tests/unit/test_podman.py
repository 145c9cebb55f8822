"""Podman as the engine: what it says of images, the flags of its containers, and what it does not do."""

import json
import re
from pathlib import Path

import pytest
from recorded import BARE, GEFORCE, H200, Recording

from envbuild.cli import main
from envbuild.doctor.diagnosis import diagnose
from envbuild.engine.client import NoImageError
from envbuild.engine.podman import PodmanClient, engine_of, own_limits, parse_podman_image
from envbuild.errors import HostError, UsageError
from envbuild.host.model import Cdi, HostFacts, Podman
from envbuild.run.container import Container
from envbuild.run.podman import PodmanRuntime, podman_flags
from envbuild.run.runtime import runtime_for
from envbuild.settings import Settings

HEX = "147740c125517d3f5711e9d3143b43b01a3df1876927c4f8231fb53ec27616b4"
DIGEST = "sha256:26a4049bdeb4462c877a7f2bf70b715f557c79f0dd0d9110c5aecd79c32031c2"
# What podman 4.3.1 prints of an image, without what is of no concern here.
IMAGE = {
    "Id": HEX,
    "Digest": DIGEST,
    "RepoDigests": [f"docker.io/library/envbuild@{DIGEST}"],
    "Config": {"Env": ["VIRTUAL_ENV=/opt/venv"], "Labels": {"io.envbuild.cell": "cpu"}, "WorkingDir": "/workspace"},
    "Architecture": "amd64",
    "Os": "linux",
    "Size": 1421617298,
    "ManifestType": "application/vnd.oci.image.manifest.v1+json",
}
INFO = {
    "host": {"arch": "amd64", "cpus": 2, "memTotal": 2**34, "security": {"rootless": True}},
    "version": {"Version": "4.3.1"},
}
PODMAN = Settings(cache_dir=Path("/nowhere"), engine="podman")


def flags(host: HostFacts, **container: object) -> str:
    return " ".join(podman_flags(host, Container(image="img", **container))[0])


def with_podman(machine: Recording, **podman: object) -> HostFacts:
    return machine.facts().model_copy(update={"podman": Podman(version="4.3.1", **podman)})


def test_an_image_of_podman_has_the_digest_of_its_manifest():
    image = parse_podman_image(json.dumps([IMAGE]).encode(), "envbuild:cpu")
    assert (image.id, image.digest, image.platform) == (f"sha256:{HEX}", DIGEST, "linux/amd64")
    assert image.labels == {"io.envbuild.cell": "cpu"}
    assert image.repo_digests == (f"docker.io/library/envbuild@{DIGEST}",)


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"[1]", b"[{}]", json.dumps([IMAGE | {"Digest": "sha256:1"}]).encode(), b'[{"Id": "x"}]']
)
def test_an_answer_of_another_shape_is_no_image(body):
    with pytest.raises(ValueError, match=r"."):
        parse_podman_image(body, "x")


def test_the_settings_choose_the_engine():
    assert isinstance(runtime_for(PODMAN, "img"), PodmanRuntime)
    assert isinstance(engine_of(PODMAN), PodmanClient)
    # an address of Docker's is not podman's
    remote = PODMAN.model_copy(update={"engine_host": "ssh://me@builder"})
    assert remote.engine_command == ("podman",)
    assert remote.docker_command == ("docker", "--host", "ssh://me@builder")
    assert remote.engine_is_here


def test_podman_gives_gpus_by_cdi_alone():
    assert flags(with_podman(GEFORCE)).startswith("--device nvidia.com/gpu=all --security-opt label=disable --ipc host")
    assert flags(with_podman(GEFORCE), gpus="0").startswith("--device nvidia.com/gpu=0 ")
    assert "nvidia.com" not in flags(with_podman(GEFORCE), gpus="none")
    assert "nvidia.com" not in flags(with_podman(BARE))
    # Docker's hook is there, and podman has no use for it
    found, notes = podman_flags(with_podman(H200), Container(image="img"))
    assert "--gpus" not in found
    assert "nvidia-ctk cdi generate" in notes[0]
    with pytest.raises(HostError, match="no CDI specification") as caught:
        flags(with_podman(H200), gpus="all")
    assert "nvidia-ctk cdi generate" in caught.value.hint


def test_limits_are_lifted_only_where_podman_may():
    assert "memlock=-1" in flags(with_podman(BARE, lifts_limits=True))
    found = flags(with_podman(BARE, rootless=True))
    assert "memlock" not in found
    assert re.search(r"--ulimit nofile=(-1|\d+):", found)
    assert re.search(r"--ulimit nproc=\d+:", found)
    assert own_limits() == own_limits()
    notes = podman_flags(with_podman(H200, rootless=True), Container(image="img", gpus="none"))[1]
    assert "locked memory" in notes[0]


def test_a_user_is_one_for_podman_too():
    assert flags(with_podman(BARE), user="1234:0").endswith("--env LOGNAME=envbuild --user 1234:0")


def test_the_run_line_is_podmans(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("envbuild.host.collect.LocalProbe", lambda: BARE)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ENVBUILD_ENGINE", "podman")
    with pytest.raises(SystemExit) as left:
        main(["run", "img", "--dry-run", "--", "true"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("podman run --rm --pull never --interactive ")


def test_launch_refuses_podman(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("envbuild.host.collect.LocalProbe", lambda: BARE)
    monkeypatch.setenv("ENVBUILD_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ENVBUILD_ENGINE", "podman")
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    words = [
        "launch",
        "img",
        "--hostfile",
        str(tmp_path / "hosts"),
        "--launcher",
        "torchrun",
        "--dry-run",
        "--",
        "a.py",
    ]
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert "launch starts no containers of podman" in capsys.readouterr().err


def test_podman_builds_nothing():
    with pytest.raises(HostError, match="podman builds no images") as caught:
        engine_of(PODMAN).require()
    assert "podman load" in caught.value.hint


def test_an_image_that_podman_has_not_may_be_dockers(tmp_path, monkeypatch):
    """What podman 4.3.1 says of a name that it does not have."""
    says = "Error: inspecting object: unable to inspect image: envbuild:x: image not known"
    (tmp_path / "podman").write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 125\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(NoImageError, match="there is no image envbuild:x here") as caught:
        engine_of(PODMAN).image("envbuild:x")
    assert "docker save TAG | podman load" in caught.value.hint
    assert "envbuild image`" not in caught.value.hint  # podman builds none


def test_apptainer_takes_no_user():
    from envbuild.run.apptainer import container_flags

    with pytest.raises(UsageError, match="who calls it"):
        container_flags(BARE.facts(), Container(image="./x.sif", user="1000"), folder=Path("/nowhere"))


def test_doctor_names_podman():
    def stated(host: HostFacts) -> str:
        return " ".join(f.what for area in diagnose(host) if area.name == "podman" for f in area.findings)

    assert "no podman" in stated(BARE.facts())
    assert "podman 4.3.1, rootless" in stated(with_podman(BARE, rootless=True))
    assert "no CDI specification" in stated(with_podman(H200))
    assert "no CDI specification" not in stated(with_podman(GEFORCE))


def test_facts_of_a_host_with_podman():
    machine = BARE.but(commands={("podman", "info", "--format", "json"): json.dumps(INFO)})
    assert machine.facts().podman == Podman(
        version="4.3.1", rootless=True, cdi=Cdi(folders=("/etc/cdi", "/var/run/cdi"))
    )
    assert BARE.facts().podman is None
