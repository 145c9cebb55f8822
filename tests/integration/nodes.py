"""Two hosts for `launch` on one machine: containers with their own network, processes and sshd, as one small cluster of Slurm.

A node has Apptainer. Its `docker` is the machine's engine, whose containers get the node's network in place of the host's.
"""

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent / "conformance"
REPOSITORY = HERE.parents[2]
NAMES = ("node1", "node2")
PATH = "/opt/deps:/opt/envbuild"
"""Where a node's Python finds envbuild."""
DEEPSPEED = (
    *("deepspeed==0.19.8", "hjson", "msgpack", "psutil", "py-cpuinfo", "pydantic", "pydantic-core"),
    *("typing-inspection", "annotated-types", "tqdm", "einops", "ninja", "packaging"),
)
_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "munge", "openssh-server", "openssh-client", "apptainer", "python3"),
    *("docker-cli", "iproute2", "procps", "ca-certificates", "squashfuse"),
)


def sh(*words: str | Path, seconds: float = 600, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run a command; its failure fails the test with its words."""
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds)
    if check and ran.returncode:
        pytest.fail(f"{shlex.join(map(str, words))}: {ran.stderr[-2000:]}{ran.stdout[-1000:]}")
    return ran


def built(folder: Path, tag: str, *arguments: str) -> str:
    """Build the folder's Dockerfile by the engine under this name; return the name."""
    sh("docker", "build", "--quiet", "--provenance=false", *arguments, "--tag", tag, folder, seconds=900)
    return tag


def uv_target(folder: Path, python: str, *words: str | Path) -> None:
    """Install packages into a folder, for another Python than this one."""
    uv = Path(sys.executable).with_name("uv")
    sh(uv, "pip", "install", "--quiet", "--target", folder, "--python-version", python, *words)


def node_image(folder: Path, tag: str) -> str:
    """Build the image of a node: Debian 13 with Slurm, and with Apptainer of sid."""
    shutil.copytree(HERE / "node", folder, dirs_exist_ok=True)
    mirror = "http://deb.debian.org/debian"
    sh(
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(_PACKAGES)}", "--dpkgopt=force-unsafe-io",
        '--aptopt=APT::Default-Release "trixie"', '--aptopt=APT::Install-Recommends "false"', "--skip=output/dev",
        "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*", "trixie", folder / "node.tar",
        f"deb {mirror} trixie main", f"deb [check-valid-until=no] {mirror} sid main", seconds=1800,
    )  # fmt: skip
    uv_target(folder / "deps", "3.13", "--only-binary", ":all:", "-r", REPOSITORY / "pyproject.toml")
    try:
        return built(folder, tag)
    finally:
        shutil.rmtree(folder)


def training_image(folder: Path, tag: str, base: str) -> str:
    """Build the cell's CPU image with what mpirun and deepspeed take."""
    shutil.copytree(HERE / "image", folder, dirs_exist_ok=True)
    python = sh(
        "docker",
        "run",
        "--rm",
        "--entrypoint",
        "python3",
        base,
        "-c",
        "import sys; print('%d.%d' % sys.version_info[:2])",
    )
    uv_target(folder / "deepspeed", python.stdout.strip(), "--no-deps", *DEEPSPEED)
    try:
        return built(folder, tag, "--build-arg", f"BASE={base}")
    finally:
        shutil.rmtree(folder)


@dataclass
class Nodes:
    """The two nodes, running."""

    image: str
    prefix: str
    shared: Path
    """A folder that the machine and both nodes see at one path."""
    namespaces: dict[str, str] = field(default_factory=dict)
    """The node of each network namespace."""

    def start(self) -> None:
        """Start both, and wait until Slurm has them."""
        group = str(Path("/var/run/docker.sock").stat().st_gid)
        sh("docker", "network", "create", self.prefix)
        for name in NAMES:
            sh(
                "docker", "run", "--detach", "--privileged", "--init", "--name", f"{self.prefix}-{name}", "--hostname", name,
                "--network", self.prefix, "--network-alias", name, "--volume", f"{self.shared}:{self.shared}",
                "--volume", f"{REPOSITORY}:/opt/envbuild:ro", "--volume", "/var/run/docker.sock:/var/run/docker.sock",
                self.image, f"{self.prefix}-{name}", group,
            )  # fmt: skip
            self.on(name, "chmod 666 /dev/fuse")  # as udev leaves it on a host
            self.namespaces[self.on(name, "readlink /proc/self/ns/net")] = name
        end = time.monotonic() + 60
        while self.on("node1", "sinfo --noheader --format %T:%D", check=False) != "idle:2":
            if time.monotonic() > end:
                pytest.fail(self.on("node1", "sinfo; tail -20 /var/log/slurmctld.log /var/log/slurmd.log", check=False))
            time.sleep(0.3)

    def on(self, node: str, script: str, *, user: str = "root", check: bool = True) -> str:
        """Run a shell script on a node; return what it printed."""
        return sh(
            "docker", "exec", "--user", user, f"{self.prefix}-{node}", "sh", "-c", script, check=check
        ).stdout.strip()

    def launch(self, *words: str, slurm: bool) -> "subprocess.Popen[str]":
        """Start `envbuild launch` on node1 as a user, inside an allocation where Slurm starts it."""
        line = shlex.join(["python3", "-m", "envbuild", "launch", *words])
        script = f"cd {self.shared}; export PYTHONPATH={PATH} PYTHONDONTWRITEBYTECODE=1; "
        script += f"echo $$ > {self.shared}/pid; exec {'salloc --quiet --nodes=2 --exclusive ' if slurm else ''}{line}"
        return subprocess.Popen(
            ["docker", "exec", "--user", "trainer", "--env", "HOME=/home/trainer", f"{self.prefix}-node1", "sh", "-c", script],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def cut(self, node: str) -> None:
        """Let a node die as by a loss of power: its network first, so that no connection is closed, then all that runs there."""
        sh("docker", "network", "disconnect", "--force", self.prefix, f"{self.prefix}-{node}")
        jobs = sh("docker", "ps", "--quiet", "--filter", f"label=node={self.prefix}-{node}").stdout.split()
        sh("docker", "kill", *jobs, f"{self.prefix}-{node}", check=False)

    def left(self, mark: str) -> list[str]:
        """Return the processes of this machine whose command line has `mark`, but docker's clients; containers are part of it."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if any(mark in word for word in words) and "pytest" not in " ".join(words):
                    found.append(" ".join(words)[:200])
        return found

    def stop(self) -> None:
        """Remove them, with the containers of their jobs and the network."""
        for name in NAMES:
            jobs = sh("docker", "ps", "--all", "--quiet", "--filter", f"label=node={self.prefix}-{name}", check=False)
            sh("docker", "rm", "--force", *jobs.stdout.split(), f"{self.prefix}-{name}", check=False)
        sh("docker", "network", "rm", self.prefix, check=False)


def running(nodes: Nodes) -> Iterator[Nodes]:
    """Yield nodes that run, and stop them."""
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.stop()
