"""The real engine and a real registry. Their absence fails a test: it never skips it."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import image_names
from python_on_whales import DockerClient
from root_support import debian_tar
from xdist.scheduler import LoadFileScheduling

from envbuild.engine.bootstrap import RootFS
from envbuild.engine.client import EngineClient, engine_client
from envbuild.settings import Settings

INSTALL = Path(__file__).resolve().parents[2] / "scripts" / "install-engine"
NEEDED_GB = 35
LOW_GB = 25
TOGETHER = re.compile(
    r"/test_(?:any_user|bundle|ci|conformance|cuda13|dev|export|headline|image|kills|own_stack|stack_images)\.py::"
)
"""Tests that build the same cell, or look at images which are not theirs; any other looks at its own alone."""


class _EngineAlone(LoadFileScheduling):
    """A file at a time for each worker, but one worker for all files of TOGETHER.

    (`--dist loadgroup` does nothing with pytest 9.2 and xdist 3.8: the one no longer reads the name that the other
    writes.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "engine" if TOGETHER.search(nodeid) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    """Keep the files of TOGETHER together."""
    return _EngineAlone(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """End where the engine has too little room. It is asked once, by the process that starts the workers."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly or shutil.which("docker") is None:
        return
    asked = subprocess.run(
        ["docker", "info", "--format={{.DockerRootDir}}"], capture_output=True, text=True, check=False
    )
    place = Path(asked.stdout.strip() or "/")
    free = shutil.disk_usage(place if place.is_dir() else "/").free / 1e9
    if free < NEEDED_GB:
        pytest.exit(
            f"{free:.0f} GB are free where the engine keeps images ({place}), and these tests need {NEEDED_GB}: "
            "docker buildx prune --all, docker image prune --all",
            returncode=1,
        )


@pytest.fixture(scope="session")
def engine() -> DockerClient:
    """The engine that `docker` speaks to."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.fail("no Docker engine answers: run scripts/install-engine")
    return DockerClient()


@pytest.fixture(scope="module", autouse=True)
def disk():
    """With PRUNE_TEST_CACHE=1, as in CI: empty the build cache where the disk fills up; the next module needs none of it."""
    place = "/var/lib/docker" if Path("/var/lib/docker").is_dir() else "/"
    if os.environ.get("PRUNE_TEST_CACHE") == "1" and shutil.disk_usage(place).free / 1e9 < LOW_GB:
        subprocess.run(["docker", "buildx", "prune", "--all", "--force"], capture_output=True, check=False)
        subprocess.run(["docker", "image", "prune", "--force"], capture_output=True, check=False)


@pytest.fixture(scope="session")
def client(engine, tmp_path_factory) -> EngineClient:
    """The client of envbuild for that engine."""
    return engine_client(Settings(cache_dir=tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def room(engine) -> Iterator[None]:
    """Leave an engine without this module's images and without any build cache: the next one needs the disk."""
    yield
    ours = image_names("envbuild-")
    if ours:  # by name: the same image may carry the user's own tag
        engine.image.remove(ours, force=True)
    engine.image.prune()
    engine.buildx.prune(all=True)


@pytest.fixture(scope="session")
def second_engine(engine) -> Iterator[DockerClient]:
    """An engine next to the first, with nothing in it."""
    for link in Path("/sys/class/net").glob("eb-t-*"):
        if (pid := link.name.removeprefix("eb-t-")).isdecimal() and not Path("/proc", pid).exists():
            subprocess.run([INSTALL, "--stop", f"t-{pid}"], capture_output=True, check=False)  # a killed run's
    name = f"t-{os.getpid()}"
    done = subprocess.run([INSTALL, "--second", name], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"no second engine:\n{done.stderr}")
    try:
        yield DockerClient(host=done.stdout.strip())
    finally:
        subprocess.run([INSTALL, "--stop", name], capture_output=True, check=True)


StartRegistry = Callable[..., str]


@pytest.fixture(scope="session")
def start_registry(tmp_path_factory) -> Iterator[StartRegistry]:
    """Start a registry on a free loopback port, with further `settings` in its file; return its HOST:PORT."""
    running = []

    def start(settings: str = "") -> str:
        if shutil.which("docker-registry") is None:
            pytest.fail("docker-registry is missing: run scripts/install-engine")
        folder = tmp_path_factory.mktemp("registry")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        config = folder / "config.yml"
        config.write_text(
            "version: 0.1\n"
            "log: {level: error}\n"
            f"storage: {{filesystem: {{rootdirectory: {folder}/data}}, delete: {{enabled: true}}}}\n"
            f"http: {{addr: '127.0.0.1:{port}', secret: for-tests}}\n" + settings
        )
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
        running.append((process, folder))
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"127.0.0.1:{port}"
            time.sleep(0.1)
        pytest.fail(f"docker-registry did not start:\n{(folder / 'log').read_text()}")

    yield start
    for process, folder in running:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def registry(start_registry) -> str:
    """HOST:PORT of an open registry on loopback."""
    return start_registry()


@pytest.fixture(scope="session")
def epoch() -> int:
    """A SOURCE_DATE_EPOCH, in 2023."""
    return 1_700_000_000


@pytest.fixture(scope="session")
def debian_root(tmp_path_factory, epoch) -> Iterator[RootFS]:
    """A bare Debian 12 root."""
    folder = tmp_path_factory.mktemp("root")
    yield debian_tar("bookworm", folder, epoch=epoch)
    shutil.rmtree(folder)
