"""A bundle on a host without a network: an engine that holds nothing, in a network namespace that leads nowhere."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import run


class Host:
    """A namespace with its engine; the programs of a host that was given a bundle and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, f"eb-n-{os.getpid()}"
        self.socket = folder / "run" / "docker.sock"
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "run").mkdir()

    def inside(self, *command: str | Path) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.name}", *map(str, command)]

    def start(self) -> None:
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        subprocess.run(self.inside("ip", "link", "set", "lo", "up"), check=True)
        toml = self.folder / "containerd.toml"
        toml.write_text(
            f'version = 2\nroot = "{self.folder}/containerd"\nstate = "{self.folder}/run/containerd"\n'
            'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime"]\n'
            f'[grpc]\n  address = "{self.folder}/run/containerd.sock"\n'
        )
        daemon = {
            "hosts": [f"unix://{self.socket}"],
            "containerd": f"{self.folder}/run/containerd.sock",
            "data-root": f"{self.folder}/docker",
            "exec-root": f"{self.folder}/run/docker",
            "pidfile": f"{self.folder}/run/docker.pid",
            "features": {"containerd-snapshotter": True},
        }
        (self.folder / "daemon.json").write_text(json.dumps(daemon))
        self._daemon("containerd", "--config", toml)
        self._wait((self.folder / "run" / "containerd.sock").is_socket)
        self._daemon("dockerd", "--config-file", self.folder / "daemon.json")
        self._wait(lambda: not self.run("docker", "info", check=False).returncode)

    def _daemon(self, *command: str | Path) -> None:
        with (self.folder / f"{command[0]}.log").open("wb") as log:
            process = subprocess.Popen(self.inside(*command), stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)

    @staticmethod
    def _wait(ready) -> None:
        end = time.monotonic() + 120
        while not ready():
            assert time.monotonic() < end, "the engine without a network does not start"
            time.sleep(0.5)

    def run(self, *command: str | Path, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        own = {"HOME": str(self.folder), "PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TMPDIR": str(self.folder)}
        done = subprocess.run(
            self.inside(*command),
            env=own | {"DOCKER_HOST": f"unix://{self.socket}"} | env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or not done.returncode, done.stderr
        return done

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(60)
        subprocess.run(["ip", "netns", "delete", self.name], check=False)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([m for m in mounts if m.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def host(engine) -> Iterator[Host]:
    """A host without a network."""
    folder = Path(tempfile.mkdtemp(prefix="eb-n-"))  # short: sockets lie in it
    folder.chmod(0o755)  # as /tmp is: where apt's own user may not enter, mmdebstrap leaves two folders to root
    made = Host(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.mark.full
@pytest.mark.timeout(5400)
def test_a_host_without_a_network_runs_and_rebuilds_what_it_was_given(host, tmp_path):
    """By this user's image of the CPU cell, which is built where it is not there."""
    made = run("image", "--cuda", "cpu", "--json")
    assert made.code == 0, made.err
    tag, digest = made.answer["tag"], made.answer["digest"]
    written = run("bundle", tag, "--output", str(tmp_path / "cpu.bundle.tar"), "--json")
    assert written.code == 0, written.err
    assert written.answer["digest"] == digest

    with tarfile.open(tmp_path / "cpu.bundle.tar") as tar:
        tools = [member for member in tar if member.name.startswith("tool/")]
        tar.extractall(host.folder, tools, filter="data")
    python = host.folder / ".venv" / "bin" / "python"
    host.run(sys.executable, "-m", "venv", ".venv")
    host.run(python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", "tool", "envbuild")
    assert host.run("docker", "image", "ls", "--quiet").stdout == ""
    envbuild = host.folder / ".venv" / "bin" / "envbuild"
    wrong = host.run(envbuild, "unbundle", tmp_path / "cpu.bundle.tar", "cpu", "--sha256", "0" * 64, check=False)
    assert wrong.returncode == 4
    assert not (host.folder / "cpu").exists()
    bundle = tmp_path / "cpu.bundle.tar"
    opened = host.run(envbuild, "unbundle", bundle, "cpu", "--sha256", written.answer["sha256"], "--load", "--json")
    answer = json.loads(opened.stdout)
    assert (answer["image"], answer["digest"], answer["loaded"]) == (tag, digest, True)

    config = {"ENVBUILD_CONFIG": "cpu/config.toml"}
    ran = host.run(envbuild, "run", tag, "--", "python", "-c", "import torch; print(torch.__version__)", **config)
    assert "+cpu" in ran.stdout
    smoke = json.loads(host.run(envbuild, "smoke", tag, "--level", "import", "--json", **config).stdout)
    assert smoke["verdict"] == "passed"
    again = json.loads(host.run(envbuild, "reproduce", tag, "--json", **config).stdout)
    assert (again["again"], again["equal"]) == (digest, True)
