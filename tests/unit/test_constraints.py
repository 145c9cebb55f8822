"""What `pip install` in an image leaves as it is: the recipe that writes the versions, the image's pip, where both are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cell_inputs import inputs_for, plan_for

from envbuild.paths import data_dir
from envbuild.plan.dockerfile import dockerfile
from envbuild.plan.plan import CONSTRAINTS
from envbuild.plan.shell import script

RECIPE = data_dir("dockerfiles") / "recipe" / "constraints"
PIP = data_dir("dockerfiles") / "image" / "pip"


def distribution(site: Path, name: str, version: str) -> None:
    folder = site / f"{name}-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.fixture
def environment(tmp_path) -> Path:
    """A virtual environment on a base that has packages itself."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    distribution(site, "Torch", "2.13.0+cpu")
    distribution(site, "typing_extensions", "4.16.0")
    distribution(site, "old", "2004d")
    base = tmp_path / "base"
    base.mkdir()
    for name, version in (("numpy", "1.26.4"), ("torch", "1.0"), ("of-the-base", "3")):
        distribution(base, name, version)
    (site / "base.pth").write_text(f"{base}\n")
    return tmp_path


def written(environment: Path, *named: str, **variables: str) -> list[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))} | variables
    done = subprocess.run(
        [environment / "venv/bin/python", RECIPE, *named], env=env, capture_output=True, text=True, check=True
    )
    return [line for line in done.stdout.splitlines() if not line.startswith("# ") or "no version" in line]


def test_each_distribution_of_the_environment_is_held_and_those_of_the_base_that_are_named(environment):
    assert written(environment, "numpy") == [
        "numpy==1.26.4",
        "# old: no version",
        "torch==2.13.0+cpu",
        "typing-extensions==4.16.0",
    ]
    assert "numpy==1.26.4" not in written(environment)


def test_a_distribution_without_metadata_is_passed_over(environment):
    before = written(environment, "numpy")
    (environment / "base" / "left-1.dist-info").mkdir()
    site = next((environment / "venv" / "lib").glob("python*/site-packages"))
    (site / "cut_off-2.dist-info").mkdir()
    (site / "no_version-1.dist-info").mkdir()
    (site / "no_version-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: no-version\n")
    assert written(environment, "numpy") == sorted(
        [*before, "# no-version: no version"], key=lambda line: line.lstrip("# ")
    )


def test_a_constraints_file_of_the_base_image_stays_in_force(environment):
    own = environment / "own.txt"
    own.write_text("of-the-base==3\n")
    assert written(environment, PIP_CONSTRAINT=f"{own} /nonexistent")[0] == f"-c {own}"


def test_the_images_pip_is_uvs_and_names_the_file_when_an_install_is_refused(tmp_path):
    (tmp_path / "uv").write_text('#!/bin/sh\necho "$UV_DEFAULT_INDEX $*"\nexit "${FAIL:-0}"\n')
    (tmp_path / "uv").chmod(0o755)

    def pip(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "UV_CONSTRAINT": CONSTRAINTS} | variables
        return subprocess.run(["sh", PIP, *arguments], env=env, capture_output=True, text=True, check=False)

    done = pip("install", "a b", PIP_INDEX_URL="https://x.example/simple")
    assert (done.returncode, done.stdout, done.stderr) == (0, "https://x.example/simple pip install a b\n", "")
    refused = pip("install", "torch==1", FAIL="3")
    assert refused.returncode == 3
    assert CONSTRAINTS in refused.stderr
    assert not pip("list", FAIL="1").stderr


def test_the_file_is_written_before_anything_reads_its_variables():
    plan = plan_for(cuda="cpu")
    text = dockerfile(plan)
    assert plan.environment["PIP_CONSTRAINT"] == plan.environment["UV_CONSTRAINT"] == CONSTRAINTS
    assert text.index(f">/layer{CONSTRAINTS}") < text.index(f'PIP_CONSTRAINT="{CONSTRAINTS}"') < text.index("LABEL ")
    assert "/image/pip /layer/usr/local/bin/pip" in text
    assert CONSTRAINTS not in script(plan)  # a host's environment has no such file
    assert "image/pip" not in script(plan)


def test_a_base_with_its_own_pip_keeps_it():
    plan = plan_for(base="ngc-25.03", te="auto", apex="none")
    assert plan.held == ("numpy", "torch", "transformer-engine", "transformer-engine-torch")
    text = dockerfile(plan)
    assert f"recipe/constraints {' '.join(plan.held)} >{CONSTRAINTS}" in text
    assert "/usr/local/bin/uv" in text
    assert "/usr/local/bin/pip" not in text
    assert inputs_for(base="ngc-25.03", te="auto", apex="none").provided == ("numpy", "torch")
