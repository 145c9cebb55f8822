"""The CUDA 13.0 cell, for real: cold next to a hand-written Dockerfile, on a second engine, bumped, killed and continued.

About two hours on two cores, 30 GB of disk. Needs a clone of apex under the setting `sources` where GitHub is out of reach.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import interrupted, run

BENCH = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_build.py"
CELL = ("--cuda", "13.0", "--te", "2.12")

pytestmark = [pytest.mark.full, pytest.mark.timeout(3 * 3600), pytest.mark.usefixtures("room")]


def answer(*args: str, env: dict[str, str]) -> dict[str, Any]:
    done = run(*args, "--json", env=env, timeout=None)
    assert done.code == 0, done.err
    return done.answer


def seconds(report: dict[str, Any], stage: str) -> float:
    return next(s["seconds"] for s in report["stages"] if s["name"] == stage and s["executed"])


def ran(report: dict[str, Any]) -> set[str]:
    return {s["name"] for s in report["stages"] if s["executed"]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> dict[str, str]:
    return {"ENVBUILD_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def bench(engine, cache) -> dict[str, Any]:
    """Both cold builds; their figures, and envbuild's own report of its one."""
    command = [sys.executable, str(BENCH), "--json", "--cache", cache["ENVBUILD_CACHE_DIR"]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    engine.image.remove("envbuild-bench:handwritten", force=True)
    print(done.stdout)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made(bench) -> dict[str, Any]:
    return bench["report"]


def test_a_cold_build_costs_what_a_hand_written_one_does(bench):
    assert bench["ratio"]["wall_s"] <= 1.1, bench
    assert bench["ratio"]["cpu_s"] <= 1.1, bench


def test_another_engine_makes_the_same_digest(made, second_engine, tmp_path):
    """Cold, too: its root, downloads, wheels and layers are all made again."""
    env = {"ENVBUILD_CACHE_DIR": str(tmp_path), "DOCKER_HOST": second_engine.client_config.host}
    lock = ("--lock", made["lock"]["folder"], "--locked")
    try:
        other = answer("image", *CELL, *lock, "--no-smoke", env=env)
    finally:  # what it holds is as large as the first engine's, and the tests below build too
        second_engine.system.prune(all=True)
        second_engine.buildx.prune(all=True)
    assert other["origin"] == "built"
    assert other["digest"] == made["digest"]


def test_the_image_holds_what_was_asked_for_and_no_more(made):
    assert made["cell"]["te"].startswith("2.12")
    assert "apex" in made["cell"]
    assert made["audit"]["defects"] == 0
    size = next(c for c in made["audit"]["checks"] if c["name"] == "size")
    assert size["verdict"] == "passed", size
    passed = {c["name"] for c in made["audit"]["checks"] if c["verdict"] == "passed"}
    assert passed >= {"no compiler", "one CUDA", "nothing left over", "size"}


def test_it_runs_on_a_processor(made, cache):
    smoked = answer("smoke", made["tag"], "--device", "cpu", env=cache)
    assert smoked["verdict"] == "passed"


def test_another_megatron_runs_no_compiler(made, cache):
    bumped = answer(
        "image", *pins(made), "--megatron", "auto", "--tag", "envbuild-test:megatron", "--no-smoke", env=cache
    )
    assert not [name for name in ran(bumped) if name.startswith("build-")], ran(bumped)


def test_a_killed_compile_goes_on_where_it_was(made, engine, cache):
    """Another TE version runs TE's stages and the assembly alone; killed in the middle, it repeats little of its compile."""
    other = pins(made, te="2.11")
    answer("lock", *other, env=cache)
    whole = seconds(made, "build-te")
    command = ("image", *other, "--tag", "envbuild-test:te", "--no-smoke")
    interrupted(*command, env=cache, stage="te 2.", seconds=whole / 2)
    bumped = answer(*command, env=cache)
    touched = {name for name in ran(bumped) if name.startswith(("build-", "wheel-"))}
    assert touched <= {"build-te", "wheel-te"}, touched
    assert not ran(bumped) & {"base", "runtime", "builder", "torch"}
    repeated = (whole / 2 + seconds(bumped, "build-te") - whole) / whole
    print(f"of {whole:.0f} s of compile, killed at the half, {repeated:.0%} were repeated")
    assert repeated <= 0.3


def pins(made: dict[str, Any], **other: str) -> list[str]:
    """The flags of the cell that was made, with `other` in place of some."""
    axes = ("cuda", "te", "torch", "python", "os", "apex", "gpu", "toolchain")
    chosen = {axis: made["cell"].get(axis, "none") for axis in axes} | other
    return [part for axis, version in chosen.items() for part in (f"--{axis}", version)]
