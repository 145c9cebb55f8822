"""Whether a build has room: the note before it starts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded import ENGINE, df

from envbuild.doctor.diagnosis import DISK_CPU_GIB, DISK_NEEDED_GIB
from envbuild.engine.builders import BuilderFacts
from envbuild.engine.machine import Machine
from envbuild.engine.room import little_room
from envbuild.matrix.cell import Cell
from envbuild.settings import Settings

ROOT = "/var/lib/docker"


def noted(free: float, *, cuda: str = "13.0", driver: str = "docker", root: str = ROOT, **settings: Any) -> str | None:
    client: Any = SimpleNamespace(
        settings=Settings(cache_dir=Path("/tmp/x"), **settings),
        machine=lambda: Machine(cores=2, memory_gib=8.0, root=root),
    )
    probe = ENGINE.but(commands={("df", root): df("ext4", free)})
    return little_room(client, BuilderFacts(driver=driver, options={}), Cell(versions={"cuda": cuda}), probe)


def test_a_disk_that_is_too_small_is_named_before_the_build() -> None:
    found = noted(DISK_NEEDED_GIB - 2)
    assert found is not None
    assert f"{DISK_NEEDED_GIB - 2} GiB are free where the engine keeps images ({ROOT})" in found
    assert f"takes at least {DISK_NEEDED_GIB} GiB" in found
    assert noted(DISK_NEEDED_GIB + 1) is None


def test_a_cpu_image_takes_less() -> None:
    assert noted(DISK_CPU_GIB + 1, cuda="cpu") is None
    assert noted(DISK_CPU_GIB - 1, cuda="cpu") is not None


@pytest.mark.parametrize(
    "more", [{"driver": "docker-container"}, {"engine_host": "ssh://me@other"}, {"root": ""}, {"root": "C:\\docker"}]
)
def test_a_disk_that_is_not_seen_from_here_is_not_judged(more: dict[str, Any]) -> None:
    assert noted(1, **more) is None
