"""Export and load of one image on a separate engine: through an archive, as until 2026-11-22, and as the build does it.

An image of one large layer (a folder that you name) and three small ones; the engine is empty before each way, and the
build itself is not timed. For each step: wall time, CPU seconds of the engine and its containerd, bytes that they and the
client wrote. A second image, of which the smallest layer changed, shows what a rebuild costs. Both digests must be equal.
Needs root, and three times the folder's size of disk.

    sudo .venv/bin/python benchmarks/bench_export.py FOLDER [--json]
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from envbuild.engine.build import EXPORT
from envbuild.engine.client import EngineClient
from envbuild.engine.stored import write_listing
from envbuild.settings import load_settings

INSTALL = Path(__file__).resolve().parents[1] / "scripts" / "install-engine"
NAME = "b-export"
DOCKERFILE = """\
FROM scratch AS torch
COPY --from=small /zstd /
COPY --from=big / /opt/venv/
FROM torch
COPY --from=small / /extra/
ENTRYPOINT ["/zstd"]
"""


class Engine:
    """A second engine, and what it has used so far."""

    def __init__(self) -> None:
        started = subprocess.run([INSTALL, "--second", NAME], check=True, text=True, stdout=subprocess.PIPE)
        self.host = started.stdout.strip()
        run = Path(self.host.removeprefix("unix://")).parent
        self.processes = [int((run / name).read_text()) for name in ("docker.pid", "containerd.pid")]
        self.client = EngineClient(load_settings().model_copy(update={"engine_host": self.host}))

    def used(self) -> tuple[float, int]:
        """Return CPU seconds and bytes written since the engine started."""
        cpu, written = 0.0, 0
        for process in self.processes:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            cpu += sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")
            written += int(re.findall(r"^write_bytes: (\d+)", Path(f"/proc/{process}/io").read_text(), re.MULTILINE)[0])
        return cpu, written

    def docker(self, *words: str) -> str:
        """Run docker; return what it printed on both streams, whether it failed or not."""
        command = ["docker", "--host", self.host, *words]
        return subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the content of the large layer, such as a virtual environment")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    engine = Engine()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-export-") as place:
            report = measure(engine, options.folder, Path(place))
    finally:
        subprocess.run([INSTALL, "--stop", NAME], check=True, stdout=subprocess.DEVNULL)
    if options.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{'way':10}{'image':10}{'step':10}{'wall s':>8}{'CPU s':>8}{'engine MB':>11}{'client MB':>11}")
    for row in report["steps"]:
        values = f"{row['wall_s']:>8}{row['cpu_s']:>8}{row['engine_mb']:>11}{row['client_mb']:>11}"
        print(f"{row['way']:10}{row['image']:10}{row['step']:10}{values}")
    print(f"load while it ran: {report['load']}; digests equal: {report['equal']}")


def measure(engine: Engine, big: Path, place: Path) -> dict[str, object]:
    """Return the steps of both ways, and whether they gave the same digests."""
    steps: list[dict[str, object]] = []
    digests: dict[str, list[str]] = {}
    small, context = place / "small", place / "context"
    small.mkdir()
    context.mkdir()
    (context / "Dockerfile").write_text(DOCKERFILE)
    shutil.copy(shutil.which("zstd") or sys.executable, small / "zstd")
    archive = place / "image.tar"
    base = ["buildx", "build", "--provenance=false", "--build-arg", "SOURCE_DATE_EPOCH=1700000000"]
    base += ["--build-context", f"small={small}", "--build-context", f"big={big}", str(context)]

    def timed(way: str, image: str, step: str, act: Callable[[], object]) -> None:
        begun, (cpu, written) = time.monotonic(), engine.used()
        act()
        wall, (cpu_after, written_after) = time.monotonic() - begun, engine.used()
        client = archive.stat().st_size if step == "export" and archive.exists() else 0
        steps.append(
            {
                "way": way, "image": image, "step": step, "wall_s": round(wall, 1), "cpu_s": round(cpu_after - cpu, 1),
                "engine_mb": round((written_after - written) / 1e6), "client_mb": round(client / 1e6),
            }
        )  # fmt: skip

    for way in ("archive", "store"):
        engine.docker("buildx", "prune", "--all", "--force")
        for image in ("first", "changed"):
            (small / "more").write_text(image)
            tag = f"{NAME}:{image}"
            engine.docker(*base, "--output", "type=cacheonly")
            archive.unlink(missing_ok=True)
            if way == "archive":
                output = f"type=oci,dest={archive},name={tag},{EXPORT}"
                timed(way, image, "export", lambda: engine.docker(*base, "--output", output))  # noqa: B023
            else:
                output = f"type=image,name={tag}-built,unpack=false,{EXPORT}"
                timed(way, image, "export", lambda: engine.docker(*base, "--output", output))  # noqa: B023
                manifest = engine.client.image(f"{tag}-built").manifest
                assert manifest is not None
                write_listing(archive, manifest, tag)
            timed(way, image, "load", lambda: engine.client.load(archive))
            digests.setdefault(image, []).append(engine.client.image(tag).id)
        for image in ("first", "changed"):
            engine.docker("image", "rm", "--force", f"{NAME}:{image}", f"{NAME}:{image}-built")
    equal = all(len(set(found)) == 1 for found in digests.values())
    return {"steps": steps, "equal": equal, "digests": digests, "load": os.getloadavg()[2]}


if __name__ == "__main__":
    main()
