"""`envbuild dev --watch`: the command runs again after each edit, and has its imports done before the edit comes."""

import contextlib
import os
import posixpath
import re
import select
import signal
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from envbuild.engine.image import Image
from envbuild.errors import BuildError, HostError
from envbuild.host import HostFacts
from envbuild.paths import data_dir
from envbuild.run.container import ON_PYTHONPATH, READ_COMPAT, Container, Mount
from envbuild.run.dev.files import files_in, is_source
from envbuild.run.runtime import Guest, Runtime
from envbuild.util.below import OutsideError, read_found
from envbuild.util.names import shown
from envbuild.util.processes import end_group, guarded
from envbuild.util.scratch import scratch
from envbuild.util.text import count_of

HOOK = "/run/envbuild-dev"
"""Folder of a container, read-only there: `dockerfiles/dev/sitecustomize.py`, and `go` when a run is to begin."""
NOTES = "/run/envbuild-dev-notes"
"""Folder of a container that its processes write to; nothing on the host reads it."""
_PROGRAMS = re.compile(r"(?:.*/)?(?:python[0-9.]*|(torchrun))")
"""Programs that read nothing of the tree before its script."""
_ABBREVIATED = ("--no-p", "--no_p", "--mod", "--run-p", "--run_p")
"""Beginnings of options with which torchrun runs something else than a script of the tree; a beginning is enough for it.

`-m` is the same, short."""
_TAKE_A_VALUE = ("-W", "-X")
_HARMLESS = ("-u", "-B", "-O", "-OO", "-b", "-bb", "-d", "-q", "-s", "-v")
"""Options of Python with which it still reads PYTHONPATH and runs a script."""
_SETTINGS = (".yaml", ".yml", ".toml")
_TEXTS = (".py", ".pyi", *_SETTINGS)
_POLL_S = 0.15
_LARGEST_SETTINGS = 1 << 20
_SETTLED_S = 0.05
_MOST_LOOKS = 40
_PATIENCE_S = 10.0
_WHOLE_RUN_S = 30 * 86400.0

State = dict[str, tuple[int, int]]
"""Files of a tree: what shows a change (the time of the last one, or a sum of the bytes) and size, by path."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What runs again and again."""

    runtime: Runtime
    image: Image
    host: HostFacts
    container: Container
    """With the tree among its mounts."""
    command: tuple[str, ...]
    tree: Path
    """The folder that is mounted."""
    target: str
    """Where it is mounted."""
    prepare: Callable[[], object]
    """Compiles what an edit of the sources changes; raises EnvbuildError where they do not compile."""
    note: Callable[[str], object]


def state_of_files(tree: Path) -> State:
    """Return the files of a tree whose change starts a run: Python, C, C++ and CUDA, what builds these, YAML and TOML.

    Raises:
        HostError: there are too many files.

    """
    return {
        path: (_mark(tree, path, state), state.st_size)
        for path, state in files_in(tree)
        if path.endswith(_TEXTS) or is_source(path)
    }


def _mark(tree: Path, path: str, state: os.stat_result) -> int:
    """Return what shows a change: of YAML and TOML their bytes, since a run may write its settings again as they were."""
    if path.endswith(_SETTINGS) and state.st_size <= _LARGEST_SETTINGS:
        with contextlib.suppress(OSError, OutsideError):
            return _sum(tree, path, state.st_mtime_ns, state.st_size)
    return state.st_mtime_ns


@lru_cache(maxsize=20_000)
def _sum(tree: Path, path: str, written: int, size: int) -> int:
    del written, size  # another time or size is another file
    return zlib.crc32(read_found(tree, path, limit=_LARGEST_SETTINGS))


def changed(before: State, now: State) -> list[str]:
    """Return the paths that were written, made or removed between two states."""
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def made_by_a_run(before: State, now: State) -> set[str]:
    """Return which files that appeared while a run was on are taken for the run's own.

    Those are YAML and TOML, such as a copy of the settings next to the logs, and whatever lies in a folder that appeared, too.
    """
    folders = {str(PurePosixPath(path).parent) for path in before}
    return {
        path
        for path in now.keys() - before.keys()
        if path.endswith(_SETTINGS) or str(PurePosixPath(path).parent) not in folders
    }


def can_wait(command: Sequence[str], container: Container, tree: Path, target: str) -> bool:
    """Return whether a run may be started before the edit: each Python in it that would read the tree must wait.

    So the command is `python` or `torchrun` with a script of the tree, or `python -m` with a module of it. With a shell or
    another program its first lines would run too early. A file of the user's in a package's place may be edited, too.

    Args:
        command: what runs in the container.
        container: its mounts and the folder that it starts in.
        tree: the folder of the host that is mounted.
        target: where it is mounted.

    """
    parts = [PurePosixPath(mount.target).parts for mount in container.mounts]
    if any(part.endswith("-packages") for each in parts for part in each):
        return False
    program = _PROGRAMS.fullmatch(command[0])
    folder = PurePosixPath(container.workdir or target)

    def found(path: str) -> Path | None:
        place = posixpath.normpath(folder / path)
        below = place.removeprefix(target.rstrip("/") + "/")
        real = (tree / below).resolve()
        return real if below != place and real.is_relative_to(tree.resolve()) else None

    def is_script(path: str) -> bool:
        real = found(path)
        return real is not None and real.is_file()

    def is_module(name: str) -> bool:
        package, script = found(name), found(f"{name}.py")
        return (package is not None and package.is_dir()) or (script is not None and script.is_file())

    if program is None:
        return False
    if program[1]:
        if any(word.startswith(_ABBREVIATED) for word in command[1:]):
            return False
        words = [word for word in command[1:] if word == "-m" or word.endswith(".py")]
        return bool(words) and is_script(words[0])
    rest = iter(command[1:])
    for word in rest:
        if word in _TAKE_A_VALUE:
            next(rest, None)
        elif word == "-m":
            return is_module(next(rest, "").partition(".")[0] or "..")
        elif not word.startswith("-"):
            return is_script(word)
        elif not word.startswith(("-W", "-X")) and word not in _HARMLESS:
            return False
    return False


@dataclass(kw_only=True)
class _Run:
    """A container with the command in it."""

    process: "subprocess.Popen[bytes]"
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def end(self) -> None:
        """Ask the command to end by SIGTERM, and remove its container."""
        try:
            if self.process.poll() is None:
                end_group(self.process, first=signal.SIGTERM, patience=_PATIENCE_S)
        finally:
            self.held.close()


class Watch:
    """The loop of `envbuild dev --watch`."""

    def __init__(self, what: Watched, folder: Path) -> None:
        self.what = what
        self.folder = folder
        self.waits = can_wait(what.command, what.container, what.tree, what.target)
        self.state: State = {}
        self.of_runs: set[str] = set()
        """Files that runs made, whose changes are no edits."""
        self.interval = _POLL_S
        self.stdin_is_open = sys.stdin is not None and not sys.stdin.closed and _is_no_file(sys.stdin.fileno())

    def run(self) -> None:
        """Run the command, and again after each edit, until KeyboardInterrupt.

        Raises:
            HostError: the container cannot be made.

        """
        ready: _Run | None = None
        self._look()
        try:
            while True:
                run, ready = self._begin(ready), None
                try:
                    why = self._follow(run) if run else ""
                finally:
                    if run:
                        run.end()
                if run:  # what it wrote when it was asked to end
                    self._note_files_of_a_run(state_of_files(self.what.tree))
                if not why:
                    ready = self._start(go=False) if self.waits and run else None
                    why = self._next_edit(ready)
                self.what.note(f"note: {why}")
        finally:
            if ready:
                ready.end()

    def _begin(self, ready: _Run | None) -> _Run | None:
        """Compile what must be, and open the gate, or start a run where none waits; None where nothing compiles."""
        try:
            self.what.prepare()
        except BuildError as error:
            if ready:
                ready.end()
            self.what.note(f"error: {error.where}: {error.what}")
            if error.hint:
                self.what.note(f"to do: {error.hint}")
            return None
        if ready and ready.process.poll() is None:
            (self.folder / "hook" / "go").touch()
            return ready
        if ready:
            ready.end()
        return self._start(go=True)

    def _start(self, *, go: bool) -> _Run:
        (self.folder / "hook" / "go").unlink(missing_ok=True)
        if go:
            (self.folder / "hook" / "go").touch()
        what, held = self.what, contextlib.ExitStack()
        with held:
            guest: Guest = held.enter_context(
                what.runtime.guest(
                    "dev",
                    what.image,
                    what.host,
                    replace(
                        what.container,
                        mounts=(
                            *what.container.mounts,
                            Mount(source=self.folder / "hook", target=HOOK, read_only=True),
                            Mount(source=self.folder / "notes", target=NOTES),
                        ),
                        environment=(
                            *what.container.environment,
                            f"ENVBUILD_DEV_TREE={what.target}",
                            f"ENVBUILD_DEV_NOTES={NOTES}",
                        ),
                        init=True,
                    ),
                    ["-c", READ_COMPAT + ON_PYTHONPATH, HOOK, *what.command],
                    entrypoint="sh",
                    seconds=_WHOLE_RUN_S,
                )
            )
            environ = guest.line.environ
            process = subprocess.Popen(
                guarded(guest.line.command, patience=_PATIENCE_S, env=environ),
                env=environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches this process alone, which ends the container
            )
            return _Run(process=process, held=held.pop_all())

    def _follow(self, run: _Run) -> str:
        """Wait for the end of a run, an edit or Enter; return why it is to run again, nothing where it ended by itself."""
        why = ""
        while not why and run.process.poll() is None:
            why = self._look(on=True) or self._enter()
        if why:
            return f"{why}: stopped, and run again"
        self.what.note(f"note: exit code {run.process.returncode}; an edit or Enter runs it again, Ctrl-C ends this")
        return self._look(on=True)

    def _next_edit(self, ready: _Run | None) -> str:
        """Wait for an edit or Enter; return which."""
        while True:
            if why := self._look() or self._enter():
                return why
            if ready and ready.process.poll() is not None:
                self.what.note(
                    f"note: the next run did not wait, and ended with exit code {ready.process.returncode}: "
                    "from now on each run starts after the edit"
                )
                self.waits, ready = False, None

    def _look(self, *, on: bool = False) -> str:
        """Return which files changed since the last look, as a phrase; nothing where none did.

        Args:
            on: whether a run is on, which may make files.

        """
        start = time.monotonic()
        now = state_of_files(self.what.tree)
        # a tree on a slow file system is looked at less often
        self.interval = max(_POLL_S, 5 * (time.monotonic() - start))
        if on and self.state:
            self._note_files_of_a_run(now)
        found = [path for path in changed(self.state, now) if path not in self.of_runs]
        for _ in range(_MOST_LOOKS if found else 0):  # an editor or git may be about to write more
            time.sleep(_SETTLED_S)
            before, now = now, state_of_files(self.what.tree)
            if before == now:
                break
        self.state = now
        more = f" and {count_of(len(found) - 1, 'other file')}" if found[1:] else ""
        return f"{shown(found[0])}{more} changed" if found else ""

    def _note_files_of_a_run(self, now: State) -> None:
        """Take what appeared while a run was on for its own, unless it came with an edit, as by `git pull`."""
        own = made_by_a_run(self.state, now)
        if all(path in own or path in self.of_runs for path in changed(self.state, now)):
            self.of_runs |= own

    def _enter(self) -> str:
        """Wait for Enter as long as one look is away from the next; return the phrase for it, or nothing."""
        if not self.stdin_is_open:
            time.sleep(self.interval)
            return ""
        if not select.select([sys.stdin], [], [], self.interval)[0]:
            return ""
        with contextlib.suppress(OSError):  # of a terminal that is gone
            if os.read(sys.stdin.fileno(), 4096):
                return "Enter was pressed"
        self.stdin_is_open = False
        return ""


def _is_no_file(handle: int) -> bool:
    """Return whether Enter can come from a descriptor: it is a terminal, a pipe or a socket, and no file."""
    return not stat.S_ISREG(os.fstat(handle).st_mode)


@contextlib.contextmanager
def shared_folders() -> Iterator[Path]:
    """Make the folders that are mounted as `HOOK` and `NOTES`: `hook`, and `notes`, where every user may write.

    Raises:
        HostError: they cannot be made.

    """
    with contextlib.ExitStack() as held:
        try:
            folder = held.enter_context(scratch("dev"))
            (folder / "hook").mkdir()
            text = (data_dir("dockerfiles") / "dev" / "sitecustomize.py").read_bytes()
            (folder / "hook" / "sitecustomize.py").write_bytes(text)
            (folder / "hook" / "sitecustomize.py").chmod(0o644)  # for any user of a container, whatever the umask
            (folder / "hook").chmod(0o755)
            (folder / "notes").mkdir()
            (folder / "notes").chmod(0o1777)
        except OSError as error:
            raise HostError(
                f"the folder for --watch cannot be made: {error.strerror}",
                where=str(error.filename),
                hint="set TMPDIR to a folder with space",
            ) from None
        yield folder


def watch(what: Watched) -> None:
    """Run a command again after each edit, until Ctrl-C.

    Raises:
        HostError: the container cannot be made, or the tree has too many files.
        KeyboardInterrupt: Ctrl-C was pressed.

    """
    with shared_folders() as folder:
        Watch(what, folder).run()
