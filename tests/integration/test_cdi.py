"""GPUs by CDI on the real engines: a specification of a device that mounts a file, which the container then sees.

No GPU is needed: the machine is described as having one. What the engines read, in `/etc/cdi`, is root's.
"""

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.host import Gpu, HostFacts, facts
from envbuild.run.container import Container
from envbuild.run.runtime import runtime_for
from envbuild.settings import Settings

pytestmark = [pytest.mark.engine]

FOLDER = Path("/etc/cdi")
SPECIFICATION = """\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- containerEdits:
    mounts:
    - containerPath: /given
      hostPath: {marker}
      options: [ro, nosuid, nodev, bind]
  name: all
"""


@pytest.fixture(params=["docker", "podman"])
def settings(request, tmp_path_factory) -> Settings:
    """Of one engine after the other."""
    if shutil.which(request.param) is None:
        if request.param == "podman":
            pytest.skip("there is no podman: apt-get install podman")
        pytest.fail("there is no docker: run scripts/install-engine")
    return Settings(cache_dir=tmp_path_factory.mktemp("cache"), engine=request.param, gpu_access="cdi")


@pytest.fixture
def image(settings: Settings, tmp_path: Path) -> Iterator[str]:
    """An image of `cat` and its libraries."""
    program = shutil.which("cat") or ""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    with tarfile.open(tmp_path / "root.tar", "w", dereference=True) as tar:
        for path in ("/bin/cat", *re.findall(r"(/\S+) \(", listed)):
            tar.add(program if path == "/bin/cat" else path, arcname=path)
    tag = f"envbuild-test-cdi:{os.getpid()}"
    subprocess.run([settings.engine, "import", tmp_path / "root.tar", tag], check=True, capture_output=True)
    if settings.engine == "podman":
        container = Container(image=tag, network="none", gpus="none")
        line = runtime_for(settings, tag).line(HostFacts(), container, ["cat", "/proc/version"], terminal=False)
        alone = subprocess.run(line.command, capture_output=True, text=True, check=False, timeout=120)
        if alone.returncode:
            pytest.skip(f"podman runs nothing here: {alone.stderr[-300:]}")
    yield tag
    subprocess.run([settings.engine, "image", "rm", "--force", tag], check=False, capture_output=True)


@pytest.fixture
def specification(tmp_path: Path) -> Iterator[Path]:
    """A CDI specification where the engines look; they read it as each container starts."""
    if os.geteuid() != 0:
        pytest.skip("only root writes to /etc/cdi")
    if any(path.exists() for path in FOLDER.glob("*nvidia*")):
        pytest.skip("this machine has a CDI specification")
    marker = tmp_path / "marker"
    marker.write_text("given\n")
    made = not FOLDER.exists()
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"envbuild-test-{os.getpid()}.yaml"
    path.write_text(SPECIFICATION.format(marker=marker))
    yield path
    path.unlink(missing_ok=True)
    if made:
        FOLDER.rmdir()


def ran(settings: Settings, image: str, host: HostFacts, **asked: str) -> "subprocess.CompletedProcess[str]":
    container = Container(image=image, network="none", **asked)
    line = runtime_for(settings, image).line(host, container, ["cat", "/given"], terminal=False)
    assert [word for word in line.command if word in {"--gpus", "--runtime"}] == []
    return subprocess.run(line.command, capture_output=True, text=True, check=False, timeout=120)


def test_a_container_is_given_the_device(settings: Settings, image: str, specification: Path) -> None:
    host = facts(settings).model_copy(update={"gpus": (Gpu(name="NVIDIA H100", sm="90"),)})
    assert host.toolkit.cdi_devices == ("nvidia.com/gpu=all",)
    first = ran(settings, image, host)
    assert (first.stdout, first.stderr) == ("given\n", "")
    assert ran(settings, image, host, gpus="all").stdout == "given\n"
    refused = ran(settings, image, host, gpus="none")
    assert "/given" in refused.stderr
    assert refused.returncode == 1
    specification.unlink()
    gone = ran(settings, image, host)  # of a host that was looked at before
    assert gone.returncode in {125, 126}
    assert re.search(r"unresolvable CDI devices", gone.stderr)
