"""Kill `envbuild image` at random moments of every stage, run it again, and look at what is left.

    python tests/integration/kill_runs.py --kills 50 --seed 15 --report kills.jsonl

Each kill names a stage; the run is prepared so that the stage has work to do, killed (SIGKILL, TERM, INT or HUP, the
process alone or its whole group) at a random moment after the stage began, and started again. The second run must end
with the digest of an undisturbed one, and leave just the files, images and processes that an undisturbed one leaves.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TREE = """import regex, torch
print("loss", float(torch.ones(2).sum()), regex.search("a+", "caab").group())
"""
STACK = """
name = "{name}"
title = "A tree of one script, and one extension that is compiled"
about = "Small, and with every stage that a build may have."
source = "https://example.org/killed"

[repository]
name = "tree"
url = "https://example.invalid/tree.git"
commit = "{commit}"
path = "/workspace/tree"

[stated]
cuda = "cpu"

[[builds]]
name = "regex"
version = "2024.11.6"
source = "https://pypi.org/project/regex"
module = "regex"
extensions = ["_regex"]

[[proof]]
name = "trains"
run = "python train.py"
"""


@dataclass(frozen=True)
class Stage:
    """A stage to kill: what it prints when it begins, what goes beforehand so that it has work, and how often it is chosen."""

    begins: str
    gone: tuple[str, ...] = ()
    """Folders of the cache that are removed first."""
    flags: tuple[str, ...] = ()
    weight: int = 2
    smoke: bool = False
    """Whether the run needs the smoke tests to come to it."""


# A lock is made where that is what is killed; the others have it, and need not ask the archive whether it is still good.
QUICK = ("--no-smoke",)
HAVE = ("--no-smoke", "--locked")
WITHOUT_CACHE = ("--no-smoke", "--locked", "--no-cache")
STAGES: Mapping[str, Stage] = {
    "lock": Stage("pinning every input", gone=("locks",), flags=QUICK, weight=5),
    "source": Stage("looking up the source", gone=("locks", "git", "built"), flags=QUICK),
    "base": Stage("base system: started", gone=("roots", "built"), flags=HAVE, weight=6),
    "runtime": Stage("OS packages: started", gone=("built",), flags=WITHOUT_CACHE, weight=4),
    "builder": Stage("compilers and build tools: started", gone=("built",), flags=WITHOUT_CACHE),
    "torch": Stage("torch .*: started", gone=("built",), flags=WITHOUT_CACHE, weight=5),
    "compile": Stage("regex 2024.11.6: started", gone=("wheels", "built"), flags=WITHOUT_CACHE, weight=4),
    "wheel": Stage("regex 2024.11.6: (started|from cache)", gone=("wheels", "built"), flags=HAVE, weight=2),
    "env": Stage("Python environment: started", gone=("built",), flags=WITHOUT_CACHE, weight=2),
    "export": Stage("export: started", gone=("built",), flags=HAVE, weight=5),
    "load": Stage("load into the engine: started", gone=("built",), flags=HAVE, weight=5),
    "audit": Stage("audit$", gone=("proofs",), flags=("--locked",), weight=3),
    "smoke": Stage("smoke$", gone=("proofs",), flags=("--locked",), weight=3, smoke=True),
    "proof": Stage("the stack's own proof", gone=("proofs",), flags=("--locked",), weight=2, smoke=True),
}
# Seconds of a stage where the undisturbed run had it from a cache, on two quiet cores.
USUAL = {"lock": 20.0, "base": 30.0, "runtime": 12.0, "builder": 10.0, "torch": 20.0, "compile": 4.0, "env": 4.0}
USUAL |= {"source": 1.0, "wheel": 1.0, "audit": 8.0, "smoke": 25.0, "proof": 5.0}
# What a run says as it goes; each begins a stage, and the next one ends it.
_STAGE_LINE = re.compile(r": (?:started|done|from cache)\b|^audit|^smoke|^the stack's own proof|^\S+ing ")


@dataclass
class Kill:
    """One kill and what came of it."""

    number: int
    stage: str
    by: str
    whom: str
    delay: float
    last_line: str = ""
    code: int | None = None
    rerun_seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


@dataclass
class Run:
    """A command as it runs: its lines with the seconds at which they came."""

    process: subprocess.Popen
    lines: list[tuple[float, str]] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)
    changed: threading.Condition = field(default_factory=threading.Condition)
    out: list[str] = field(default_factory=list)

    def read_out(self) -> None:
        with self.process.stdout as stream:
            self.out.extend(stream)

    def read(self) -> None:
        with self.process.stderr as stream:
            for line in stream:
                with self.changed:
                    self.lines.append((time.monotonic() - self.begun, line.strip()))
                    self.changed.notify_all()
        with self.changed:
            self.lines.append((time.monotonic() - self.begun, ""))
            self.changed.notify_all()

    def wait_for(self, pattern: str, timeout: float) -> bool:
        """Wait until a line matches; False when the run ends before."""
        expression = re.compile(pattern)
        end = time.monotonic() + timeout
        seen = 0
        with self.changed:
            while True:
                for _, line in self.lines[seen:]:
                    if expression.search(line):
                        return True
                seen = len(self.lines)
                ended = bool(self.lines) and not self.lines[-1][1] and self.process.poll() is not None
                if ended or time.monotonic() > end:
                    return False
                self.changed.wait(1.0)

    @property
    def texts(self) -> list[str]:
        return [line for _, line in self.lines if line]


class Killer:
    """Its own cache, temporary folder, stack and tag on the shared engine."""

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder = folder
        self.say = say
        self.cache, self.temporary = folder / "cache", folder / "tmp"
        self.tag = f"envbuild-kills-{os.getpid()}:image"
        self.stack = f"killed-{os.getpid()}"  # no other build has it, and so no other container
        for each in (self.cache, self.temporary):
            each.mkdir(parents=True)
        tree = folder / "sources" / "tree"
        tree.mkdir(parents=True)
        (tree / "train.py").write_text(TREE)
        git = ["git", "-C", str(tree), "-c", "user.name=t", "-c", "user.email=t@example.org"]
        date = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "one"]):
            subprocess.run([*git, *command], check=True, capture_output=True, env=os.environ | date)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        (folder / "killed.toml").write_text(STACK.format(name=self.stack, commit=commit))
        self.env = os.environ | {
            "ENVBUILD_CACHE_DIR": str(self.cache),
            "ENVBUILD_SOURCES": str(folder / "sources"),
            "ENVBUILD_REGISTRY": "",
            "TMPDIR": str(self.temporary),
        }
        # A runner in the background ignores these, and so would what it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        self.digest = ""
        self.seconds: dict[str, float] = {}
        self.files: set[str] = set()

    def start(self, *flags: str) -> Run:
        command = [sys.executable, "-m", "envbuild", "image", "--stack", str(self.folder / "killed.toml")]
        process = subprocess.Popen(
            [*command, "--tag", self.tag, "--json", *flags],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        run = Run(process)
        threading.Thread(target=run.read, daemon=True).start()
        # so that a full pipe never holds the command
        threading.Thread(target=run.read_out, daemon=True).start()
        return run

    def finish(self, *flags: str) -> tuple[str, Run]:
        """Run to the end; return the digest."""
        run = self.start(*flags)
        code = run.process.wait(1500)
        run.wait_for("^$", 10)
        if code:
            raise AssertionError(f"exit {code}: " + "\n".join(run.texts[-15:]))
        return json.loads("".join(run.out))["digest"], run

    def reference(self, cache: Path | None = None) -> None:
        """Run undisturbed, from nothing or from a copy of `cache`: the digest, the files, how long each stage takes."""
        if cache is not None:
            shutil.copytree(cache, self.cache, dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(self.cache / "built", ignore_errors=True)
        self.digest, run = self.finish(*(QUICK if cache is not None else ()))
        begun_stages = [(at, line) for at, line in run.lines if _STAGE_LINE.search(line)] + [run.lines[-1]]
        for name, stage in STAGES.items():
            at = next((at for at, line in begun_stages if re.search(stage.begins, line)), None)
            ends = [then for then, _ in begun_stages if at is not None and then > at + 0.05]
            # a stage whose end nobody says is over when the next thing begins
            took = (ends[0] if ends else run.lines[-1][0]) - at if at is not None else 0.0
            self.seconds[name] = min(60.0, max(took, USUAL.get(name, 1.0)))
        self.files = self.kept_files()
        faults = self.left()
        if faults:
            raise AssertionError(f"an undisturbed run leaves something: {faults}")
        self.say(f"undisturbed: {self.digest} in {run.lines[-1][0]:.0f} s; stages {self.seconds}")

    def kill(self, number: int, name: str, by: signal.Signals, rng: random.Random) -> Kill:
        """Kill one run, run again, and return what was wrong."""
        stage = STAGES[name]
        kill = Kill(
            number=number,
            stage=name,
            by=by.name,
            whom=rng.choice(("process", "group")),
            delay=round(rng.uniform(0.0, self.seconds[name]), 2),
        )
        for folder in stage.gone:
            shutil.rmtree(self.cache / folder, ignore_errors=True)
        run = self.start(*stage.flags)
        try:
            if not run.wait_for(stage.begins, 600):
                kill.faults.append(f"never came to {name}: {run.texts[-5:]}")
            time.sleep(kill.delay)
            kill.last_line = run.texts[-1] if run.texts else ""
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if kill.whom == "group" else os.kill)(run.process.pid, by)
            kill.code = run.process.wait(120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                run.process.kill()
        run.wait_for("^$", 10)
        if any("Traceback" in line for line in run.texts):
            kill.faults.append("a traceback: " + " | ".join(run.texts[-3:]))
        # One that ended in the same moment has ended well.
        if kill.code not in ({-9, 0} if by is signal.SIGKILL else {130, 0}):
            kill.faults.append(f"exit {kill.code}: {run.texts[-2:]}")
        if by is not signal.SIGKILL:
            # It could clean up, and has.
            kill.faults += [f"before the next run: {fault}" for fault in (*self._temporary(), *self._processes())]
        begun = time.monotonic()
        try:
            again = [flag for flag in stage.flags if flag != "--no-cache"]
            digest, _ = self.finish(*again, *([] if stage.smoke or "--no-smoke" in again else ["--no-smoke"]))
            if digest != self.digest:
                kill.faults.append(f"another digest: {digest}")
        except AssertionError as error:
            kill.faults.append(f"the next run failed: {error}")
        kill.rerun_seconds = round(time.monotonic() - begun, 1)
        kill.faults += self.left()
        changed = self.kept_files() ^ self.files
        if changed:
            kill.faults.append(f"other files in the cache: {sorted(changed)[:8]}")
        return kill

    def left(self) -> list[str]:
        """Return what no finished run leaves."""
        return [*self._temporary(), *self._halves(), *self._processes(), *self._engine()]

    def kept_files(self) -> set[str]:
        """Return the cache's files, but for logs, proofs, times and what uv and git keep as they like."""
        apart = {"logs", "proofs", "times", "uv"}
        return {
            str(path.relative_to(self.cache))
            for path in self.cache.rglob("*")
            if path.relative_to(self.cache).parts[0] not in apart and "objects.git" not in path.parts
        }

    def _temporary(self) -> Iterator[str]:
        yield from (f"temporary: {path.name}" for path in self.temporary.iterdir())

    def _halves(self) -> Iterator[str]:
        for path in self.cache.rglob("*"):
            if re.search(r"^\.envbuild-|\.part$|^tmp_|\.tmp$", path.name) and "uv" not in path.parts:
                yield f"half made: {path.relative_to(self.cache)}"
        for record in self.cache.glob("wheels/*/record.json"):
            stated = json.loads(record.read_text())
            if hashlib.sha256((record.parent / stated["wheel"]).read_bytes()).hexdigest() != stated["sha256"]:
                yield f"half a wheel: {record.parent.name}"
        for root in self.cache.glob("roots/*.tar"):
            if hashlib.sha256(root.read_bytes()).hexdigest() != Path(f"{root}.sha256").read_text().strip():
                yield f"half a root: {root.name}"

    def _processes(self) -> Iterator[str]:
        """Yield what still runs of ours: the cache's folder is in the environment of everything that a run starts."""
        mark = f"ENVBUILD_CACHE_DIR={self.cache}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            try:
                if int(place.name) != os.getpid() and mark in (place / "environ").read_bytes().split(b"\0"):
                    words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words:  # else it has ended, and its parent has not looked yet
                        yield f"process {place.name}: {words[:120]}"
            except OSError:
                continue

    def _engine(self) -> Iterator[str]:
        repository = self.tag.partition(":")[0]
        tags = _docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository).split()
        yield from (f"image {tag}" for tag in tags if tag != self.tag)
        if self.tag not in tags:
            yield f"no image {self.tag}"
        # by the label: for the filter `ancestor`, docker looks at every container's image, and one may have just gone
        ours = f"--filter=label=io.envbuild.stack={self.stack}"
        listed = _docker("ps", "--all", ours, "--format={{.Names}} {{.Status}}")
        yield from (f"container {each}" for each in listed.splitlines())

    def close(self) -> None:
        """Remove the image and the folders."""
        subprocess.run(["docker", "image", "rm", "--force", self.tag], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def _docker(*args: str) -> str:
    return subprocess.run(["docker", *args], capture_output=True, text=True, check=True).stdout


def chosen(
    count: int, seed: int, stages: Sequence[str] = tuple(STAGES)
) -> tuple[list[tuple[str, signal.Signals]], random.Random]:
    """Return `count` pairs of a stage and a signal: stages by their weight, each at least once; signals in equal shares."""
    rng = random.Random(seed)
    weighted = [name for name in stages for _ in range(STAGES[name].weight)]
    names = (list(stages) + rng.sample(weighted, len(weighted)) * (count // len(weighted) + 1))[:count]
    rng.shuffle(names)
    signals = [SIGNALS[number % len(SIGNALS)] for number in range(count)]
    rng.shuffle(signals)
    return list(zip(names, signals, strict=True)), rng


def main() -> int:
    """Run the kills of the command line and print their counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--report", type=Path, help="a line of JSON for each kill")
    parser.add_argument("--cache", type=Path, help="the cache of an earlier run, to begin with a copy of it")
    parser.add_argument("--stages", nargs="+", choices=tuple(STAGES), default=tuple(STAGES), help="only these")
    options = parser.parse_args()
    pairs, rng = chosen(options.kills, options.seed, options.stages)
    killer = Killer(Path(tempfile.mkdtemp(prefix="envbuild-kills-")), lambda text: print(text, flush=True))
    done: list[Kill] = []
    try:
        killer.reference(options.cache)
        for number, (name, by) in enumerate(pairs, 1):
            kill = killer.kill(number, name, by, rng)
            done.append(kill)
            print(json.dumps(asdict(kill)), flush=True)
            if options.report:
                with options.report.open("a") as file:
                    file.write(json.dumps(asdict(kill)) + "\n")
    finally:
        killer.close()
        for what in ("by", "stage", "whom"):
            print(what, dict(collections.Counter(getattr(kill, what) for kill in done)))
        bad = [kill for kill in done if kill.faults]
        print(f"{len(done)} kills, {len(bad)} with faults; seed {options.seed}", flush=True)
    return 1 if bad or len(done) < options.kills else 0


if __name__ == "__main__":
    sys.exit(main())
