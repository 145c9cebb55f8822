"""Run the smoke suite in a container or on the bare host, follow it, and turn what it says into one report.

The suite (`smoke_tests/run.py`) speaks on stdout in lines `@smoke {json}`; it is mounted read-only, and so is a pinned
pytest, so that an image holds nothing its lock does not list.
"""

import contextlib
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from envbuild.errors import HostError, SmokeError, UsageError
from envbuild.evidence.report import Device, Level, Outcome, SmokeReport, Verdict, where_of
from envbuild.paths import data_dir
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown
from envbuild.util.processes import bounded, end_group, guarded
from envbuild.util.scratch import scratch
from envbuild.verify.events import LINE, MARK, read_event

if TYPE_CHECKING:
    from envbuild.engine.image import Image
    from envbuild.settings import Settings

EXPECTED_IN_IMAGE = "/opt/envbuild/expected.json"
"""Where a built image carries its expectation."""

_TESTS = 20_000
"""Tests of one run that are kept; the suite has fewer than 100."""
_LOG_LIMIT = 256 << 20
"""Bytes of a run that are kept; one that prints more is ended."""
_PYTEST_RAN_NOTHING = (4, 5)  # a usage error; nothing collected
_EXIT_HOST = 3  # smoke_tests/run.py: this host cannot run what was asked
_LAST_WORDS_S = 5.0  # for output that is still on its way when the suite's process has ended
_EXIT_S = 30.0  # for a suite that has told its end, or closed its output, to exit
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|Cannot allocate memory|ENOMEM", re.IGNORECASE)
# What pytest needs goes behind the environment's own packages on sys.path, so that those are the ones tested.
# What an environment may set for its own tests: with it the suite would run less than it says, or assert nothing.
_NOT_THE_SUITES = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONOPTIMIZE")
_FRONT = ("pytest", "_pytest", "pluggy", "iniconfig", "py.py")


@dataclass(frozen=True, kw_only=True)
class HostTarget:
    """The environment of an interpreter on this host."""

    python: Path


@dataclass(frozen=True, kw_only=True)
class ImageTarget:
    """An image that the engine holds."""

    reference: str


_COMPONENT = re.compile(rb'^COMPONENT = "([a-z0-9-]+)"$', re.MULTILINE)


def suite_hash(folder: Path | None = None, *, axes: Collection[str] | None = None) -> str:
    """Return the hash over every file that can change what the suite checks.

    Args:
        folder: the suite; this installation's by default.
        axes: what the cell has. A file that says whose component it tests (`COMPONENT = "mamba-ssm"`) counts only where
            the cell has that, so that a new component leaves the proof of other cells valid. Every file by default.

    """
    folder = folder or data_dir("smoke_tests")
    sha = hashlib.sha256()
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.suffix in {".py", ".txt"} and path.is_file()
    }
    for name in sorted(files):
        body = files[name].read_bytes()
        of = _COMPONENT.search(body)
        if axes is None or of is None or of[1].decode() in axes:
            sha.update(name.encode() + b"\0" + hashlib.sha256(body).digest())
    return "sha256:" + sha.hexdigest()


def pinned_pytest(python: tuple[int, int], settings: "Settings", *, suite: Path | None = None) -> Path:
    """Return the folder of the pytest that is mounted for an interpreter of this version; fetched once, hash-checked.

    Raises:
        HostError: it is not in the cache and cannot be fetched.

    """
    from envbuild.lock.python import uv_environment_here, uv_executable

    name = "pytest-py310.txt" if python >= (3, 10) else "pytest-py38.txt"
    pins = (suite or data_dir("smoke_tests")) / name
    # The interpreter's version decides only between markers and wheels, and all of these wheels are pure Python.
    folder = settings.cache_dir / "pytest" / hashlib.sha256(pins.read_bytes()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    links = [flag for link in settings.find_links for flag in ("--find-links", link)]
    with scratch("suite", folder.parent) as own:
        flat = own / "flat"
        command = [uv_executable(), "pip", "install", "--quiet", "--no-config", "--target", str(flat), "--no-deps"]
        command += ["--python", sys.executable, "--python-version", "3.10" if name.endswith("310.txt") else "3.8"]
        command += ["--require-hashes", "--only-binary", ":all:", *links, "--requirement", str(pins)]
        ran = bounded(command, env=uv_environment_here(settings), seconds=600.0, limit=1 << 20)
        if ran.code or ran.fault:
            said = ran.err.decode("utf-8", "replace").strip().splitlines()
            why = f"uv {ran.fault}" if ran.fault else said[-1] if said else "uv gave no reason"
            raise HostError(
                f"the suite's pytest cannot be fetched: {shown(why)}",
                where=str(pins),
                hint="give `index_url` or `find_links` in the settings an index that this host reaches",
            )
        new = own / "new"
        for part in sorted(flat.iterdir()):
            if part.name == "bin" or part.suffix == ".dist-info":
                continue
            place = new / ("front" if part.name in _FRONT else "back")
            place.mkdir(parents=True, exist_ok=True)
            part.rename(place / part.name)
        with contextlib.suppress(OSError):  # another run may have been quicker
            new.rename(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A target after a look at it: how to start the suite there, and what it carries."""

    told: Mapping[str, Any]
    python: tuple[int, int]
    expected: Mapping[str, Any] | None = None
    image: "Image | None" = None
    """What the tag named at the time of the look; this is what runs."""


_LOOK_S = 120.0
_LOOK_LIMIT = 16 << 20
_PROBE = (
    "import json,os,sys;p={0!r};"
    "print(json.dumps({{'python':list(sys.version_info[:2]),'executable':sys.executable,"
    "'expected':json.load(open(p)) if os.path.isfile(p) else None}}))"
)
_PYTHON_IN_IMAGE = 'exec "$(command -v python3 || command -v python)" "$@"'


def look(target: HostTarget | ImageTarget, settings: "Settings") -> _Target:
    """Ask the target for its Python and, if it is an image, for the expectation it carries.

    Raises:
        HostError: there is no such interpreter or image, or no engine that answers.
        SmokeError: the image has no Python.

    """
    from envbuild.engine.client import said_last
    from envbuild.engine.guest import look_up, run_guest

    probe = _PROBE.format(EXPECTED_IN_IMAGE if isinstance(target, ImageTarget) else "")
    image: Image | None = None
    if isinstance(target, HostTarget):
        try:
            said = bounded([str(target.python), "-c", probe], seconds=_LOOK_S, limit=_LOOK_LIMIT)
        except OSError as error:
            raise UsageError(f"{target.python} does not run: {error.strerror}", where="--python") from None
        told: dict[str, Any] = {"kind": "host"}
        where = where_of({**told, "interpreter": target.python})
    else:
        image = look_up(settings, target.reference)
        said = run_guest(
            settings,
            "look",
            image,
            ["-c", _PYTHON_IN_IMAGE, "sh", "-c", probe],
            entrypoint="sh",
            seconds=_LOOK_S,
            limit=_LOOK_LIMIT,
        )
        told = {"kind": "image", "reference": target.reference, "digest": image.digest}
        where = f"{target.reference} ({image.digest})"
    if said.fault:
        raise SmokeError(f"its Python {said.fault}", where=where)
    if said.code:
        raise SmokeError(f"its Python does not run: {said_last(said) or 'it said nothing'}", where=where)
    try:
        python, executable, expected = read_look(said.out)
    except ValueError as error:
        raise SmokeError(f"what its Python says cannot be read: {error}", where=where) from None
    return _Target(told={**told, "interpreter": executable}, python=python, expected=expected, image=image)


def read_look(out: bytes) -> tuple[tuple[int, int], str, dict[str, Any] | None]:
    """Return what the first look at a Python printed: its version, its path and the expectation that it found.

    Raises:
        ValueError: it printed something else.

    """
    line = next((text for text in reversed(out.splitlines()) if text.startswith(b"{")), None)
    if line is None:
        raise ValueError("no answer")
    found = parse_json(line, limit=_LOOK_LIMIT)
    match found:
        case {"python": [int(major), int(minor)], "executable": str(executable), "expected": dict() | None as expected}:
            pass
        case _:
            raise ValueError("not its version, path and expectation")
    if not (2 <= major < 100 and 0 <= minor < 1000) or isinstance(major, bool) or isinstance(minor, bool):
        raise ValueError("no version of Python")
    if expected is not None and (fault := _shape_fault(expected)):
        raise ValueError(f"no expectation: {fault}")
    return (major, minor), executable, expected


_SHAPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("cell", "packages", "components", "adopted", "built_with"), dict),
    "cell_id": str,
    "lock_digest": (str, type(None)),
    "altered": str,
}


def read_expected(path: Path) -> dict[str, Any]:
    """Read an expectation file.

    Raises:
        UsageError: it cannot be read or is no expectation.

    """
    try:
        with path.open("rb") as file:
            found = parse_json(file.read(_LOOK_LIMIT + 1), limit=_LOOK_LIMIT)
    except (OSError, ValueError) as error:
        raise UsageError(f"the expectation cannot be read: {error}", where=str(path)) from None
    if fault := _shape_fault(found):
        raise UsageError(f"this is no expectation: {fault}", where=str(path))
    assert isinstance(found, dict)  # noqa: S101 - it has the shape
    return found


def _shape_fault(found: Any) -> str:
    """Return what is wrong with the shape of an expectation; nothing where it is right."""
    if not isinstance(found, dict) or not {"cell", "packages", "components"} <= found.keys():
        return "it lacks cell, packages or components"
    for key, value in found.items():
        shape = _SHAPES.get(key)
        if shape and not isinstance(value, shape):
            return f"its {key} is no {'table' if shape is dict else 'text'}"
    return ""


def default_device(expected: Mapping[str, Any], level: Level) -> Device:
    """Return where the tests run unless told: on GPUs when the cell's torch is a CUDA build and the level needs them."""
    return "cuda" if _for_cuda(expected) and level is not Level.IMPORT else "cpu"


def _for_cuda(expected: Mapping[str, Any]) -> bool:
    return str(expected.get("cell", {}).get("cuda", "cpu")).lower() not in {"cpu", "none", ""}


def run_smoke(
    target: HostTarget | ImageTarget,
    *,
    expected: Mapping[str, Any],
    level: Level,
    nproc: int = 0,
    nodes: Path | None = None,
    seed: int | None = None,
    timeout_s: float = 3600.0,
    progress: Callable[[Mapping[str, Any]], None] = lambda _: None,
    device: Device | None = None,
    settings: "Settings | None" = None,
    keyword: str | None = None,
    environment: Mapping[str, str] | None = None,
    seen: _Target | None = None,
) -> SmokeReport:
    """Run the suite against `target` and return its report, whatever the verdict; an interrupt is one.

    Args:
        target: an image, or an interpreter of this host.
        expected: what the lock says the target holds (the file `ENVBUILD_EXPECTED` of the suite).
        level: how far to go.
        nproc: ranks; 0 is every GPU, two ranks on a CPU, every slot of `nodes`.
        nodes: a hostfile, to start ranks on several hosts as well.
        seed: of every random number; a fresh one by default.
        timeout_s: seconds for the whole run; the suite's launches have shorter limits of their own.
        progress: called with every event of the suite as it comes.
        device: `cpu` runs on CPUs what runs there even for a CUDA cell; by default the cell decides.
        settings: this user's own by default.
        keyword: only tests whose names match, as pytest's `-k`.
        environment: variables added to the suite's environment.
        seen: what `look` returned, when the caller has looked already.

    Raises:
        HostError: no engine, no such image, no pytest to mount.
        UsageError: `nodes` with an image (its containers on other hosts are `envbuild launch`'s business).
        SmokeError: the image has no Python that runs.

    """
    from envbuild.run.launch import read_hostfile
    from envbuild.settings import load_settings

    settings = settings or load_settings()
    if nodes is not None and isinstance(target, ImageTarget):
        raise UsageError(
            "--nodes starts ranks by ssh on the bare hosts, not in containers",
            where=f"--nodes {nodes}",
            hint="run `envbuild smoke --host --nodes …` inside the environment, or `envbuild launch TAG --hostfile …`",
        )
    if nodes is not None:
        slots = sum(node.slots for node in read_hostfile(nodes, default_slots=1))
        if nproc > slots:
            raise HostError(
                f"{nproc} ranks were asked for, the hosts have {slots} slots",
                where=f"--nodes {nodes}",
                hint="ask for fewer with --nproc, or name more hosts or slots",
            )
    device = device or default_device(expected, level)
    seen = seen or look(target, settings)
    folder = pinned_pytest(seen.python, settings)
    logs = settings.cache_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"smoke-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}.log"
    with scratch("smoke") as own, contextlib.ExitStack() as held:
        expectation = own / "expected.json"
        expectation.write_text(json.dumps(expected), encoding="utf-8")
        expectation.chmod(0o644)
        own.chmod(0o755)
        arguments = ["--level", level.value, "--device", device, "--nproc", str(nproc)]
        arguments += ["-k", keyword] if keyword else []
        arguments += ["--nodes", str(nodes.absolute())] if nodes else []
        arguments += ["--seed", str(seed)] if seed is not None else []
        began = time.monotonic()
        collected = _Collected(progress, for_cuda=_for_cuda(expected))
        try:
            if isinstance(target, HostTarget):
                started = _on_host(target, folder, expectation, arguments, environment or {})
            else:
                assert seen.image is not None  # noqa: S101 - a look at an image has it
                started = _in_container(
                    seen.image,
                    held,
                    folder=folder,
                    expectation=expectation,
                    arguments=arguments,
                    environment=environment or {},
                    device=device,
                    settings=settings,
                    timeout_s=timeout_s,
                )
        except HostError as error:  # a verdict about this host, to be kept as evidence like any other
            collected.refused = f"{error.what}{': ' + error.hint if error.hint else ''}"
            started = None
        code: int | None = None
        if started:
            with log.open("w", encoding="utf-8", errors="replace") as kept:
                code = _follow(started, collected, kept, timeout_s)
    verdict, reason = collected.judge(code, timeout_s)
    if keyword and code in _PYTEST_RAN_NOTHING and not collected.tests:
        raise UsageError(
            f"no test is named so: {collected.tail[-1] if collected.tail else 'pytest said nothing'}",
            where=f"-k {keyword!r}",
            hint="give a part of a test's name, or several with `and`, `or` and `not`",
        )
    start = collected.start
    return SmokeReport(
        target=_told(seen.told, start),
        cell_id=shown(str(expected.get("cell_id", ""))),
        cell=dict(expected.get("cell", {})),
        lock_digest=expected.get("lock_digest"),
        level=level.value,
        device=device,
        nproc=int(start.get("nproc", nproc)),
        verdict=verdict,
        reason=reason,
        suite=suite_hash(axes=expected.get("cell", {})),
        seed=start.get("seed"),
        machine=start.get("machine", {}),
        launchers=collected.launchers,
        tests=tuple(collected.tests),
        seconds=round(time.monotonic() - began, 1),
        log=str(log),
    )


def _told(told: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, Any]:
    machine = start.get("machine", {})
    more = {"os": machine.get("os"), "python": machine.get("python")} if told["kind"] == "host" else {}
    return {**told, **more}


@dataclass(kw_only=True)
class _Started:
    process: subprocess.Popen[str]
    remove: Callable[[], None]
    """Ends everything that belongs to the process, also what it started and left."""


class _Collected:
    """What the suite said."""

    def __init__(self, progress: Callable[[Mapping[str, Any]], None], *, for_cuda: bool = False) -> None:
        self.progress = progress
        self.for_cuda = for_cuda
        self.start: dict[str, Any] = {}
        self.launchers: list[str] = []
        self.tests: list[Outcome] = []
        self.running: str | None = None
        self.ended = False
        self.end_code: int | None = None
        self.timed_out = False
        self.interrupted = False
        self.refused: str | None = None
        self.broken: str | None = None
        self.tail: list[str] = []

    def line(self, text: str) -> None:
        said = read_event(text)
        if said is None:
            if text.strip() and not text.startswith(MARK):
                self.tail = [*self.tail[-19:], shown(text.rstrip(), 2000)]
            return
        if len(self.tests) >= _TESTS:
            return
        match said["event"]:
            case "collected":
                self.start = said
            case "begin":
                self.running = said["id"]
            case "test":
                self.running = None
                self.launchers = said.get("launchers", self.launchers)
                self.tests.append(
                    Outcome(**{name: said[name] for name in Outcome.__dataclass_fields__ if name in said})
                )
            case "verdict":
                self.start.setdefault("machine", said.get("machine", {}))
                # A CPU build of torch in a cell for CUDA is a fault of the environment, whatever the host has.
                if said["kind"] == "torch-broken" or (said["kind"] == "no-cuda-build" and self.for_cuda):
                    self.broken = said["what"]
                else:
                    self.refused = said["what"]
            case "end":
                self.ended = True
                self.end_code = said.get("code")
            case _:
                return
        self.progress(said)

    def judge(self, code: int | None, timeout_s: float) -> tuple[Verdict, str]:
        """Return the verdict and its reason, the exit code of the suite or the engine being `code`."""
        if self.refused:
            return "host", self.refused
        if self.broken:
            return "failed", self.broken
        if self.interrupted:
            return "interrupted", f"interrupted {self.place}"
        if self.timed_out and not self.ended:
            return "hung", f"{self.running or 'the suite'} did not end within {timeout_s:.0f} s"
        failed = [test for test in self.tests if test.outcome == "failed"]
        if not self.ended:
            return self._died(code)
        if not failed:
            # One that told its end and then could not exit is judged by what it told.
            code = self.end_code if code is None else code
            if code == 0 and any(test.outcome == "passed" for test in self.tests):
                return "passed", ""
            if code == 0 and self.tests:
                return "failed", f"no test ran: all {len(self.tests)} were skipped"
            if self.tests:
                return self._died(code)
            return "failed", f"no test ran (exit code {code}): {self.tail[-1] if self.tail else ''}"
        first = failed[0]
        text = f"{first.id}: {first.reason.partition(chr(10))[0]}"
        if len(failed) > 1:
            text += f" (and {len(failed) - 1} more)"
        if all(_OUT_OF_MEMORY.search(test.reason) for test in failed):
            return "host", f"out of memory in {text}"
        return "failed", text

    @property
    def place(self) -> str:
        """Where the suite is, as the end of a sentence."""
        if self.running:
            return f"in {self.running}"
        return f"after {self.tests[-1].id}" if self.tests else "before its first test"

    def _died(self, code: int | None) -> tuple[Verdict, str]:
        said = " | ".join(self.tail)
        for pattern, what in _ENGINE_SAYS:
            if re.search(pattern, said, re.IGNORECASE):
                return "host", f"{what}: {self.tail[-1]}"
        at = self.place
        if code in {137, -9}:
            return "host", f"the suite was killed {at}: the usual cause is memory exhausted"
        names = {139: "segmentation fault", -11: "segmentation fault", 134: "abort", -6: "abort"}
        why = f" ({names[code]})" if code in names else ""
        return (
            "failed",
            f"the suite died {at} with exit code {code}{why}: {self.tail[-1] if self.tail else 'no output'}",
        )


# What Docker and NVIDIA's hook say when a container with GPUs cannot start.
_ENGINE_SAYS = (
    (r"unsatisfied condition: (cuda|driver)", "the driver is too old for this image"),
    (r"could not select device driver", "containers cannot see this machine's GPUs"),
    (r"nvidia-container-cli: initialization error|nvml error", "the driver does not answer"),
    (r"unresolvable CDI devices|failed to inject CDI", "containers cannot see this machine's GPUs"),
    (r"no space left on device", "the disk is full"),
)


def _on_host(
    target: HostTarget, folder: Path, expectation: Path, arguments: Sequence[str], environment: Mapping[str, str]
) -> _Started:
    suite = data_dir("smoke_tests")
    process = subprocess.Popen(
        guarded(
            [str(part) for part in (target.python, suite / "run.py", "--expected", expectation, "--pytest", folder)]
            + [*arguments]
        ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={
            **{name: value for name, value in os.environ.items() if name not in _NOT_THE_SUITES},
            **environment,
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def remove() -> None:
        if process.poll() is None:
            # SIGINT lets the suite end its ranks; they also die with it, by the parent-death signal that each has set. A
            # shell's background job ignores SIGINT, and so does what it starts.
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            end_group(process, first=signal.SIGTERM if ignored else signal.SIGINT, patience=15.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # what the suite left behind
            os.killpg(process.pid, signal.SIGKILL)

    return _Started(process=process, remove=remove)


def _in_container(
    image: "Image",
    held: contextlib.ExitStack,
    *,
    folder: Path,
    expectation: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    device: Device,
    settings: "Settings",
    timeout_s: float,
) -> _Started:
    from envbuild.engine.guest import guest, remove, start_line
    from envbuild.host import facts
    from envbuild.run.container import Container, Mount, run_flags

    container = Container(
        image=image.id,
        gpus="all" if device == "cuda" else "none",
        mounts=(
            Mount(source=data_dir("smoke_tests"), target="/smoke", read_only=True),
            Mount(source=folder, target="/smoke-pytest", read_only=True),
            Mount(source=expectation, target="/smoke-expected.json", read_only=True),
        ),
        environment=tuple(
            f"{key}={value}"
            for key, value in {
                **dict.fromkeys(_NOT_THE_SUITES, ""),
                **environment,
                "PYTHONDONTWRITEBYTECODE": "1",
            }.items()
        ),
        # Two ranks on a CPU need no more than loopback, and a container without a network proves that nothing is fetched.
        network="host" if device == "cuda" else "none",
    )
    flags, _ = run_flags(facts(settings), container)
    command = ["-c", _PYTHON_IN_IMAGE, "sh", "/smoke/run.py"]
    command += ["--expected", "/smoke-expected.json", "--pytest", "/smoke-pytest", *arguments]
    made = guest(settings, "smoke", image.id, command, flags=[*flags, "--entrypoint", "sh"], seconds=timeout_s)
    name = held.enter_context(made)
    process = subprocess.Popen(
        guarded(start_line(settings, name)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def end() -> None:
        remove(settings, name)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()

    return _Started(process=process, remove=end)


def _follow(started: _Started, collected: _Collected, log: IO[str], timeout_s: float) -> int | None:
    lines: queue.Queue[str | None] = queue.Queue(maxsize=1000)  # a suite that prints faster than it is read waits
    stream = started.process.stdout
    assert stream is not None  # noqa: S101 - it was asked for

    def pump() -> None:
        for line in iter(lambda: stream.readline(LINE), ""):
            while not left_off.is_set():
                with contextlib.suppress(queue.Full):
                    lines.put(line, timeout=1.0)
                    break
            else:
                return
        with contextlib.suppress(queue.Full):
            lines.put(None, timeout=1.0)

    process, kept, left_off = started.process, 0, threading.Event()
    pumping = threading.Thread(target=pump, daemon=True)
    pumping.start()
    deadline = limit = time.monotonic() + timeout_s
    told_end = gone = False
    try:
        while (left := limit - time.monotonic()) > 0:
            try:
                line = lines.get(timeout=min(left, 1.0))
            except queue.Empty:
                line = ""
            if line is None:
                break
            if line:
                kept += len(line)
                if kept > _LOG_LIMIT:
                    collected.broken = f"it printed more than {_LOG_LIMIT:,} characters {collected.place}"
                    return None
                log.write(line)
                log.flush()
                collected.line(line)
            if not gone and process.poll() is not None:
                # What it left running may hold the pipe, and then its end never comes.
                gone, limit = True, min(limit, time.monotonic() + _LAST_WORDS_S)
            elif not told_end and collected.ended:
                told_end, limit = True, min(limit, time.monotonic() + _EXIT_S)
        if process.poll() is None and time.monotonic() >= deadline:
            collected.timed_out = True
            return None
        return process.wait(timeout=max(0.0, min(_EXIT_S, limit - time.monotonic())))
    except KeyboardInterrupt:
        collected.interrupted = True  # what it saw until then is kept like any other run's
        return None
    except subprocess.TimeoutExpired:
        return None
    finally:
        left_off.set()
        started.remove()
        pumping.join(5)
        if not pumping.is_alive():
            stream.close()


def write_junit(report: SmokeReport, path: Path) -> None:
    """Write the report as JUnit XML; what kept a run from passing, where no test says it, is the error of a case `run`."""
    from xml.etree import ElementTree as ET

    counts = report.counts
    broken = report.verdict in {"hung", "host"} or (report.verdict != "passed" and not counts["failed"])
    suite = ET.Element(
        "testsuite",
        name=f"envbuild smoke {report.cell_id}",
        tests=str(len(report.tests)),
        failures=str(counts["failed"]),
        skipped=str(counts["skipped"]),
        errors=str(int(broken)),
        time=str(report.seconds),
    )
    for test in report.tests:
        case = ET.SubElement(suite, "testcase", classname=test.level, name=test.id, time=str(test.seconds))
        if test.figures:
            properties = ET.SubElement(case, "properties")
            for name, figure in test.figures.items():
                ET.SubElement(properties, "property", name=name, value=json.dumps(figure))
        if test.outcome != "passed":
            node = ET.SubElement(case, "failure" if test.outcome == "failed" else "skipped")
            node.set("message", _printable(test.reason.partition("\n")[0]))
            node.text = _printable(test.reason)
    if broken:
        case = ET.SubElement(suite, "testcase", classname="run", name="run", time=str(report.seconds))
        ET.SubElement(case, "error", message=_printable(report.reason))
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = ET.ElementTree(suite)
    ET.indent(tree)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    # XML 1.0 has no way to write the other control characters, and compilers colour their output with them.
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "", text)
