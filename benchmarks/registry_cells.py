"""The cells that a registry is filled with, and how each is made and published.

Most are made as they are. Where a base image or a torch is out of reach, another takes its place, as the tests of the stacks
do it (`tests/integration/stack_support.py`): an Ubuntu root with Debian's CUDA, and PyPI's torch of the same release.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry_site import ROOT, Site, StepError, environment

from envbuild.lock.files import Locked, read_lock, write_lock

sys.path.insert(0, str(ROOT / "tests" / "integration"))

HOST, AUDIT = 8, 6
"""The exit codes of `envbuild` where something is out of reach, and where the audit found a defect."""
ROOM_GB = 20.0
"""What a cell needs at most next to the build cache of the cells before."""
STAND_IN_GB = 40.0
"""The same where a CUDA toolkit is unpacked and packed again."""


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """What takes the place of a cell's base images and torch."""

    torches: Sequence[tuple[str, str, str, str, str]] = ()
    """Wheels of PyPI: requirement, Python, the version and the CUDA that it states instead, manylinux tag."""
    devel: tuple[str, str, str] | None = None
    """The suite of Debian whose CUDA it is, the version that it states, the Ubuntu below."""
    base: str = ""
    """An Ubuntu; what `devel` is where this is empty; `ngc` for a base with Python 3.8 and torch 1.8."""
    text: str = ""
    """What it is, for people."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell to publish."""

    name: str
    flags: tuple[str, ...]
    stand_in: StandIn | None = None
    smoke: bool = False


_CU126 = ("trixie", "12.6")
_PYPI_TORCH = "PyPI's torch of the same release"
CELLS: tuple[Cell, ...] = (
    Cell(name="cpu", flags=("--cuda", "cpu")),
    Cell(name="te-2.11", flags=("--cuda", "13.0", "--te", "2.11", "--apex", "none")),
    Cell(name="te-2.12", flags=("--cuda", "13.0", "--te", "2.12", "--apex", "none")),
    Cell(name="te-2.12-apex", flags=("--cuda", "13.0", "--te", "2.12", "--apex", "auto")),
    Cell(
        name="cu126",
        flags=("--cuda", "12.6", "--te", "2.6", "--torch", "2.7.1", "--apex", "none"),
        stand_in=StandIn(
            torches=(("torch==2.7.1", "3.12", "2.7.1+cu126", "12.6", "_2_28"),),
            devel=(*_CU126, "noble"),
            base="noble",
            text=f"base: Ubuntu 24.04; nvcc: Debian 13's 12.4, which states 12.6; {_PYPI_TORCH}",
        ),
    ),
    Cell(
        name="gpt2-3d",
        flags=("--stack", "gpt2-3d"),
        stand_in=StandIn(base="ngc", text="base: Ubuntu 20.04 with PyPI's torch 1.8.0 in the place of NGC's"),
    ),
    Cell(
        name="megatron-gpt3",
        flags=("--stack", "megatron-gpt3"),
        stand_in=StandIn(
            torches=(("torch==2.8.0", "3.10", "2.8.0+cu126", "12.6", "_2_28"),),
            devel=(*_CU126, "jammy"),
            base="jammy",
            text=f"base: Ubuntu 22.04; nvcc: Debian 13's 12.4, which states 12.6; {_PYPI_TORCH}",
        ),
    ),
    Cell(
        name="llm-jp",
        flags=("--stack", "llm-jp"),
        stand_in=StandIn(
            torches=(
                ("torch==2.0.1", "3.10", "2.0.1+cu118", "11.8", "1"),
                ("torchvision==0.15.2", "3.10", "0.15.2+cu118", "11.8", "1"),
            ),
            devel=("bookworm", "11.8", "jammy"),
            text=f"base: Ubuntu 22.04 with Debian 12's CUDA 11.8; {_PYPI_TORCH}",
        ),
    ),
)


def publish(site: Site, cell: Cell) -> dict[str, Any]:
    """Make the image of a cell, publish it, and remove it from the engine; return what is known of it.

    What goes wrong is a part of the answer: `outcome` is then `out of reach` or `failed`, and `why` says more.
    """
    began = time.monotonic()
    row: dict[str, Any] = {"name": cell.name, "flags": list(cell.flags), "stand_in": ""}
    if cell.stand_in:
        row["stand_in"] = cell.stand_in.text
    tag = f"envbuild-registry:{cell.name}"
    if site.free_gb < (STAND_IN_GB if cell.stand_in and cell.stand_in.devel else ROOM_GB):
        site.docker(site.publisher, "buildx", "prune", "--all", "--force")
    try:
        with _made(site, cell, tag) as report:
            row |= {key: report[key] for key in ("id", "digest", "size_bytes", "seconds")}
            row |= {"torch": report["cell"]["torch"], "compiled": compiled(report)}
            defects = [check["text"] for check in report["audit"]["checks"] if check["verdict"] == "failed"]
            if defects:
                row["stand_in"] += f"; the audit finds: {'; '.join(defects)}"
            row["wheels"] = _wheels_in(site, tag)
        site.say(f"{cell.name}: publishing")
        signed = time.monotonic()
        named = ["--digest", row["digest"]] if cell.stand_in else []
        named += ["--even-if-failed"] if defects else []
        done = site.envbuild(site.publisher, "catalog", "publish", tag, *named)
        row |= {"outcome": "published", "documents": done["documents"]}
        row["publish_seconds"] = round(time.monotonic() - signed, 1)
    except StepError as error:
        row |= {"outcome": "out of reach" if error.code == HOST else "failed", "why": str(error)}
    finally:
        _remove(site, tag)
    row["whole_seconds"] = round(time.monotonic() - began, 1)
    return row


def compiled(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of each stage that compiled something for an image, by component."""
    begin = "build-"
    found = [stage for stage in report["stages"] if stage["name"].startswith(begin) and stage["executed"]]
    return {stage["name"].removeprefix(begin): stage["seconds"] for stage in found}


def _wheels_in(site: Site, tag: str) -> dict[str, str]:
    """Return the sha256 of each wheel that was compiled for an image, now or earlier, by component."""
    script = 'for each in /opt/envbuild/built/*.json; do [ ! -e "$each" ] || cat "$each"; done'
    text = site.docker(site.publisher, "run", "--rm", "--entrypoint", "sh", tag, "-c", script)
    return {record["component"]: record["sha256"] for record in read_objects(text)}


def read_objects(text: str) -> Iterator[dict[str, Any]]:
    """Return the JSON objects of a text that has one after the other."""
    decoder, place = json.JSONDecoder(), 0
    while (rest := text[place:].lstrip()) != "":
        found, length = decoder.raw_decode(rest)
        place = len(text) - len(rest) + length
        yield found


def _remove(site: Site, tag: str) -> None:
    """Remove an image and every name of it: the next one needs the room."""
    for name in (tag, site.registry):
        held = site.docker(site.publisher, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", name).split()
        if held:
            site.docker(site.publisher, "image", "rm", "--force", *held)


@contextmanager
def _made(site: Site, cell: Cell, tag: str) -> Iterator[dict[str, Any]]:
    words = ["image", *cell.flags, "--tag", tag]
    if not cell.smoke:
        words.append("--no-smoke")
    if cell.stand_in is None:
        site.say(f"{cell.name}: building")
        yield site.envbuild(site.publisher, *words)
        return
    with ExitStack() as stack:
        more, env = _prepared(site, cell, cell.stand_in, stack)
        site.say(f"{cell.name}: building")
        report = site.envbuild(env, *words, *more, accepted=(0, AUDIT))
        require_known(cell, report)
        yield report


def require_known(cell: Cell, report: Mapping[str, Any]) -> None:
    """Check that the audit found of a cell with a stand-in what is known of it: PyPI's torch may have no code for its GPU.

    Such an image is published with what the audit found, and one with another defect is not.

    Raises:
        StepError: the audit found something else, or it did not take place.

    """
    from stack_support import DEFECTS, defects_of

    if "audit" not in report:
        raise StepError(str(report.get("what", "the image was not audited")), AUDIT)
    found, known = defects_of(report["audit"]), DEFECTS.get(cell.name, {})
    if found != known:
        text = "; ".join(f"{name}: {'; '.join(findings)}" for name, findings in found.items())
        raise StepError(f"the audit does not find what is known of the stand-in, but {text or 'no defect'}", AUDIT)


def _prepared(site: Site, cell: Cell, given: StandIn, stack: ExitStack) -> tuple[list[str], dict[str, str]]:
    """Make what takes the place of what is out of reach; return further flags of `image`, and its environment."""
    import pytest  # what a test would skip or fail with
    from root_support import ubuntu_root
    from stack_support import cuda_image, gpt2_base, torch_wheel

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stand-in-", dir=site.folder)))
    env = dict(site.publisher)
    stack.enter_context(environment(env))
    wheels = folder / "wheels"
    wheels.mkdir()
    try:
        for torch in given.torches:
            site.say(f"{cell.name}: fetching {torch[0]}")
            torch_wheel(wheels, *torch)
        if given.torches:
            env["ENVBUILD_FIND_LINKS"] = str(wheels)
        site.say(f"{cell.name}: locking")
        lock = folder / "lock"
        _lock(site, env, cell, lock)
        site.say(f"{cell.name}: making the base images")
        devel = base = ""
        if given.devel:
            suite, stated, ubuntu = given.devel
            devel = cuda_image(folder, suite, stated, ubuntu)
        if given.base == "ngc":
            base = gpt2_base(folder)
        elif given.base:
            base = stack.enter_context(ubuntu_root(given.base, folder / "plain", ()))
    except (AssertionError, OSError, pytest.fail.Exception) as error:
        raise StepError(f"no stand-in: {str(error)[-300:]}", HOST) from error
    stages = {"base": base or devel, "devel": devel or base}
    _complete(site, env, lock, stages)
    contexts = [f"--build-context={stage}=docker-image://{image}" for stage, image in stages.items()]
    return ["--lock", str(lock), *contexts], env


def _lock(site: Site, env: Mapping[str, str], cell: Cell, folder: Path) -> None:
    """Lock a cell where nothing but its base images is out of reach.

    Raises:
        StepError: more is.

    """
    try:
        site.envbuild(env, "lock", *cell.flags, "--out", str(folder))
    except StepError as error:
        if error.code != HOST or not (folder / "lock.json").exists():
            raise
    missing = [each for each in read_lock(folder).lock.missing if each.kind != "image"]
    if missing:
        shutil.rmtree(folder)
        raise StepError("; ".join(each.what for each in missing)[:300], HOST)


def _complete(site: Site, env: Mapping[str, str], folder: Path, stages: Mapping[str, str]) -> None:
    """Give a lock the digests of the images that stand in for its bases: only a complete lock can be published."""
    locked = read_lock(folder)
    images = tuple(
        image.model_copy(
            update={"digest": site.docker(env, "image", "inspect", "-f", "{{.Id}}", stages[image.stage]).strip()}
        )
        for image in locked.lock.images
    )
    lock = locked.lock.model_copy(update={"images": images, "missing": ()})
    write_lock(Locked(lock=lock, pylocks=locked.pylocks), folder)
