"""Cold build of the CUDA 13.0 cell against a hand-written single-stage Dockerfile of the same pins, side by side.

Wall time, CPU seconds of the whole machine (run it on an idle one) and the size of both images. Takes about an hour on
two cores, and 40 GB of disk. The compiler and package caches of the engine are emptied first, so that both start cold.

    .venv/bin/python benchmarks/bench_build.py [--json] [--only envbuild|handwritten] [--cache DIR]

The images stay, as envbuild-bench:envbuild and envbuild-bench:handwritten; DIR keeps envbuild's cache of this run.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from envbuild.engine.bootstrap import bootstrap_root
from envbuild.engine.site import jobs
from envbuild.lock.find import find_lock
from envbuild.lock.python import uv_executable
from envbuild.lock.sources import SourceStore
from envbuild.net.download import download

CELL = {"axis_cuda": "13.0", "axis_te": "2.12"}
TARGET = 1.1


def cpu_seconds() -> float:
    """Return the CPU time that the machine has spent working since it started, seconds."""
    user, nice, system, *_ = (
        int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def timed(command: list[str], **kwargs: object) -> dict[str, float]:
    """Run `command`; return its wall time and the machine's CPU seconds meanwhile."""
    wall, cpu = time.monotonic(), cpu_seconds()
    subprocess.run(command, check=True, **{"stdout": subprocess.DEVNULL, **kwargs})  # type: ignore[call-overload]
    return {"wall_s": round(time.monotonic() - wall, 1), "cpu_s": round(cpu_seconds() - cpu, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=["envbuild", "handwritten"])
    parser.add_argument(
        "--cache", type=Path, help="a new folder for envbuild's cache; deleted at the end when not given"
    )
    options = parser.parse_args()

    from envbuild.cli.cell_options import asked_from

    asked = asked_from(dict(CELL), lock_file=None, sources=())
    found = find_lock(asked.settings, asked.inputs)
    if found is None:
        sys.exit("lock the cell first: envbuild lock --cuda 13.0 --te 2.12")
    locked, folder = found
    figures: dict[str, dict[str, float]] = {}
    report = None

    def cold() -> None:
        subprocess.run(["docker", "buildx", "prune", "--all", "--force"], check=True, stdout=subprocess.DEVNULL)

    # By hand first, so that what envbuild leaves in the engine's cache is there afterwards.
    if options.only != "envbuild":
        cold()
        with tempfile.TemporaryDirectory(prefix="bench-hand-") as place:
            context = Path(place)
            figures["handwritten"] = handwritten(asked, locked, context)
    if options.only != "handwritten":
        cold()
        with tempfile.TemporaryDirectory(prefix="bench-cache-") as temporary:
            cache = options.cache or Path(temporary)
            shutil.copytree(asked.settings.cache_dir / "files", cache / "files", dirs_exist_ok=True)
            command = [sys.executable, "-m", "envbuild", "image", "--cuda", "13.0", "--te", "2.12"]
            command += ["--lock", str(folder), "--locked", "--tag", "envbuild-bench:envbuild", "--no-smoke", "--json"]
            with (cache / "report.json").open("w+") as output:
                figures["envbuild"] = timed(command, env=os.environ | {"ENVBUILD_CACHE_DIR": str(cache)}, stdout=output)
                output.seek(0)
                report = json.load(output)
    if len(figures) == 2:
        figures["ratio"] = {
            k: round(figures["envbuild"][k] / figures["handwritten"][k], 3) for k in ("wall_s", "cpu_s")
        }
    if options.json:
        print(json.dumps({**figures, "report": report}, indent=1))
        return
    print(f"{'':14}{'wall':>10}{'CPU':>10}   target: at most {TARGET} times the hand-written one")
    for name, values in figures.items():
        unit = "" if name == "ratio" else " s"
        print(f"{name:14}{values['wall_s']:>8}{unit:2}{values['cpu_s']:>8}{unit:2}")


def handwritten(asked, locked, context: Path) -> dict[str, float]:  # noqa: ANN001
    """Build the hand-written Dockerfile with the lock's own pins."""
    settings, lock = asked.settings, locked.lock
    shutil.copy(Path(__file__).with_name("handwritten.Dockerfile"), context / "Dockerfile")
    shutil.copy(uv_executable(), context / "uv")
    shutil.copytree(SourceStore(settings=settings).checkout(lock.source("apex")), context / "apex", symlinks=True)
    sdist, _ = download(settings, lock.source("te").url, lock.source("te").sha256, settings.cache_dir / "files")
    with tarfile.open(sdist) as tar:
        tar.extractall(context, filter="data")
    next(context.glob("transformer_engine_torch-*")).rename(context / "te")

    def pins(name: str) -> str:
        return " ".join(f"{p.name}=={p.version}" for p in lock.python_set(name).packages)

    os_packages = " ".join(p.name for s in lock.os for p in s.packages)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    arguments = {
        "OS_PACKAGES": os_packages,
        "TORCH_REQUIREMENTS": pins("torch"),
        "TOOLS": pins("tools"),
        "TOOLCHAIN": pins("toolchain"),
        "ENV_REQUIREMENTS": pins("env"),
        "MAX_JOBS": str(jobs(settings, job_gib=3.0, cores=os.cpu_count() or 1, memory_gib=memory)),
    }
    wall, cpu = time.monotonic(), cpu_seconds()
    bootstrap_root(
        settings,
        suite=lock.root.suite,
        packages=(),
        epoch=lock.root.epoch,
        dest=context / "rootfs.tar",
        log=context / "bootstrap.log",
    )
    command = ["docker", "buildx", "build", "--progress=plain", "--no-cache", "--provenance=false"]
    command += [
        "--output",
        f"type=oci,dest={context / 'image.tar'},name=envbuild-bench:handwritten,compression=zstd,compression-level=1,force-compression=true",
    ]
    if settings.ca_bundle:
        command += ["--secret", f"id=ca,src={settings.ca_bundle}"]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    timed([*command, str(context)])
    timed(["docker", "load", "--quiet", "--input", str(context / "image.tar")])
    return {"wall_s": round(time.monotonic() - wall, 1), "cpu_s": round(cpu_seconds() - cpu, 1)}


if __name__ == "__main__":
    main()
