"""An image of another processor: refused before it is built or run, unless the engine emulates that one."""

import json
from pathlib import Path

import pytest

from envbuild.engine.client import EngineClient, EngineError
from envbuild.errors import HostError
from envbuild.matrix.cell import Cell
from envbuild.pipeline.platform import require_platform
from envbuild.run.docker import require_runnable
from envbuild.settings import Settings

VERSIONS = {"cuda": "13.0", "python": "3.11", "torch": "2.11.0+cu130"}
X86, ARM = Cell(versions=VERSIONS), Cell(versions=VERSIONS | {"arch": "aarch64"})

# What docker prints: `system info` and `image inspect` as JSON, `buildx inspect` as text.
SCRIPT = """case "$*" in
*"buildx inspect"*farm*) printf 'Name: farm\\nDriver: remote\\n\\nNodes:\\nName: farm0\\nEndpoint: tcp://farm:1\\nStatus: running\\nPlatforms: linux/arm64*\\n' ;;
*"buildx inspect"*default*) printf 'Name: default\\nDriver: docker\\n\\nNodes:\\nName: default\\nEndpoint: default\\nStatus: running\\nPlatforms: {listed}\\n' ;;
*"buildx inspect"*) echo 'ERROR: no builder "gone" found' >&2; exit 1 ;;
*"image inspect"*) cat '{folder}/image.json' ;;
*info*) cat '{folder}/info.json' ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Make a client whose docker command answers as an engine of one kind does."""

    def made(*, processor: str, listed: str, image: str = "amd64", builder: str | None = None) -> EngineClient:
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n" + SCRIPT.format(listed=listed, folder=tmp_path))
        program.chmod(0o755)
        (tmp_path / "info.json").write_text(json.dumps({"Architecture": processor, "NCPU": 2, "MemTotal": 2**33}))
        inspected = [{"Id": "sha256:" + "0" * 64, "Os": "linux", "Architecture": image, "Config": {}}]
        (tmp_path / "image.json").write_text(json.dumps(inspected))
        monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
        return EngineClient(Settings(cache_dir=tmp_path, builder=builder))

    return made


def test_a_cell_of_the_engines_own_processor_is_built(engine):
    require_platform(engine(processor="x86_64", listed="linux/amd64"), X86)
    require_platform(engine(processor="aarch64", listed="linux/arm64"), ARM)


@pytest.mark.parametrize(
    ("processor", "listed", "cell", "wanted"),
    [
        ("x86_64", "linux/amd64, linux/386", ARM, "linux/arm64"),
        ("aarch64", "linux/arm64, linux/arm/v7", X86, "linux/amd64"),
    ],
)
def test_a_cell_of_another_processor_is_refused_and_both_are_named(engine, processor, listed, cell, wanted):
    with pytest.raises(HostError) as caught:
        require_platform(engine(processor=processor, listed=listed), cell)
    assert caught.value.exit_code == 8
    assert f"({wanted})" in caught.value.what
    assert listed in caught.value.what
    assert "emulate" in (caught.value.hint or "")


def test_an_engine_that_emulates_the_processor_builds_and_runs_it(engine):
    client = engine(processor="x86_64", listed="linux/amd64*, linux/arm64", image="arm64")
    require_platform(client, ARM)
    require_runnable(client, client.image("envbuild:one"))


def test_a_builder_of_that_processor_is_of_no_use_where_the_image_cannot_be_audited(engine):
    with pytest.raises(HostError, match=r"builder farm makes images for linux/arm64, .* cannot run one to audit it"):
        require_platform(engine(processor="x86_64", listed="linux/amd64", builder="farm"), ARM)
    require_platform(engine(processor="x86_64", listed="linux/amd64, linux/arm64", builder="farm"), ARM)


def test_a_builder_that_is_gone_is_named(engine):
    with pytest.raises(EngineError, match="no builder"):
        require_platform(engine(processor="x86_64", listed="linux/amd64", builder="gone"), ARM)


def runnable(client):
    require_runnable(client, client.image("envbuild:one"))


def test_an_image_of_another_processor_does_not_run(engine):
    runnable(engine(processor="aarch64", listed="linux/arm64", image="arm64"))
    with pytest.raises(HostError, match="is for linux/arm64, and this engine runs images for linux/amd64") as caught:
        runnable(engine(processor="x86_64", listed="linux/amd64", image="arm64"))
    assert caught.value.exit_code == 8


def test_a_builder_that_buildx_does_not_have_is_named_where_it_is_asked(engine):
    with pytest.raises(HostError, match="buildx has no builder named gone") as refused:
        engine(processor="x86_64", listed="linux/amd64", builder="gone").builder()
    assert "docker buildx ls" in refused.value.hint
    assert engine(processor="x86_64", listed="linux/amd64").builder().driver == ""
