"""Apptainer as a runtime: sandboxes and .sif files, without an engine, without a network and mostly without root.

A container sees no folder of the host but those that are mounted: its home and its /tmp are folders of envbuild's cache, or of
the run where a guest is made. Its image is read-only. Root gives up every right: an image may be untrusted.
"""

import contextlib
import io
import os
import platform
import re
import resource
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from envbuild.engine import apptainer, unpacked
from envbuild.engine.archive import ImageError
from envbuild.engine.image import Image
from envbuild.engine.place import kind_of
from envbuild.errors import HostError, UsageError
from envbuild.host import HostFacts
from envbuild.host.gpu_access import Choice
from envbuild.matrix.cell import DEBIAN_ARCH
from envbuild.run.container import Container, Mount, device_flags, gpus_and_access, wants_infiniband
from envbuild.run.runtime import Guest, Line, Note
from envbuild.settings import Settings
from envbuild.util import quote
from envbuild.util.names import shown
from envbuild.util.processes import ProcessResult, Stream, bounded, streamed
from envbuild.util.scratch import scratch

_ALWAYS = (
    # Nothing of the host: its home, /tmp and devices, its variables, its processes.
    *("--contain", "--cleanenv", "--pid"),
    # Values of variables are taken as they are, and not by a shell.
    "--no-eval",
)
# As Docker's containers have it: CUDA's and MPI's libraries take large stacks, RDMA locks memory. Both as far as this host lets.
LIMITS = 'ulimit -S -s 65536 2>/dev/null; ulimit -S -l "$(ulimit -H -l)" 2>/dev/null; ulimit -S -c 0; exec "$@"'
_NOT_STARTED = 255
"""Apptainer's exit code for its own failures."""
_NO_PROGRAM = re.compile(r"executable file not found|no such file or directory", re.IGNORECASE)


def bind_flags(mount: Mount) -> list[str]:
    """Return the flag of a mount; `--mount` reads CSV, so a comma in a path needs quotes.

    Raises:
        UsageError: a path holds a line break or another control character.

    """
    try:
        fields = quote.csv_fields(type="bind", source=str(mount.source), destination=mount.target)
    except ValueError as error:
        raise UsageError(str(error), where="--mount", hint="rename it, or mount a folder above it") from None
    return ["--mount", f"{fields},ro" if mount.read_only else fields]


def _variables(container: Container) -> dict[str, str]:
    """Return the variables that Apptainer takes out of its environment: none of their values is on a command line."""
    found = {}
    for item in container.environment:
        name, equals, value = item.partition("=")
        if equals or name in os.environ:
            found[f"APPTAINERENV_{name}"] = value if equals else os.environ[name]
    return found


def container_flags(
    host: HostFacts, container: Container, *, folder: Path | None, choice: Choice = "auto"
) -> tuple[list[str], dict[str, str], list[str]]:
    """Return the flags of `apptainer run`, the variables that it reads, and notes for the user.

    Args:
        host: this machine.
        container: what is asked of the container.
        folder: holds `home` and `work`, which the container sees as its home and above its /tmp; None where the caller adds them.
        choice: the setting `gpu_access`.

    Raises:
        HostError: the container asks for something that this machine does not have.
        UsageError: it asks for something that Apptainer cannot give.

    """
    if container.user:
        raise UsageError(
            "Apptainer runs as the user who calls it", where="--user", hint="leave the flag out, or run as that user"
        )
    notes: list[str] = []
    flags = [*_ALWAYS, *(["--no-privs"] if os.geteuid() == 0 else [])]
    if folder is not None:
        flags += ["--home", f"{folder / 'home'}:/root", "--workdir", str(folder / "work")]
    variables = _variables(container)
    gpus, access, message = gpus_and_access(host, "apptainer", container.gpus, choice)
    notes += [message] if message else []
    if gpus is not None and access.how == "cdi":
        flags += device_flags(gpus)
    elif gpus is not None:
        flags.append("--nv")  # the driver's libraries, as ldconfig finds them, and its devices
        if gpus != "all":
            variables["APPTAINERENV_CUDA_VISIBLE_DEVICES"] = gpus
            variables["APPTAINERENV_CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA's own order is not nvidia-smi's
    if container.network == "none":
        flags += ["--net", "--network", "none"]
    elif container.network != "host":
        raise UsageError(
            f"Apptainer has no network {container.network!r}", where="--network", hint="write host or none"
        )
    mounts = list(container.mounts)
    if wants_infiniband(host, container.infiniband):
        mounts.append(Mount(source=Path("/dev/infiniband"), target="/dev/infiniband"))
        if not _locks_memory():
            notes.append("this host limits locked memory: RDMA can fail to register memory (ulimit -l)")
    for mount in mounts:
        flags += bind_flags(mount)
    if container.workdir:
        flags += ["--cwd", container.workdir]
    return flags, variables, notes


def _locks_memory() -> bool:
    return resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY


def shared_place(reference: str) -> str:
    """Return the .sif or the sandbox that every host of a launch runs.

    Raises:
        UsageError: it is an archive or a layout, which would have to be unpacked on each host, or no image.

    """
    path = Path(reference).expanduser().absolute()
    kind = kind_of(path)
    if kind not in {"sif", "sandbox"}:
        what = f"is an OCI {kind}, which each host would have to unpack" if kind else "is no .sif and no sandbox"
        hint = "make a .sif in a folder that every host sees: envbuild image … --output FILE.sif"
        raise unpacked.no_image(path, reference, what=what, hint=hint)
    return str(path)


def place_here(settings: Settings, reference: str) -> str:
    """Return what a launch on this machine alone runs: an archive or a layout is unpacked for it; see `unpacked.look_up`."""
    path = Path(reference).expanduser().absolute()
    if kind_of(path) in {"archive", "layout"}:
        return place_of(unpacked.look_up(settings, reference))
    return shared_place(reference)


def place_of(image: Image) -> str:
    """Return the folder or file that Apptainer runs."""
    assert image.place is not None  # noqa: S101 - `look_up` of this runtime gives it
    return str(image.place)


class ApptainerRuntime:
    """The command `apptainer` of this host."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def describe(self) -> str:
        """Return its name and version."""
        return f"apptainer {apptainer.version()}"

    def look_up(self, reference: str, note: Note = lambda _: None) -> Image:
        """Return the image that a path names, unpacked; see `unpacked.look_up`."""
        return unpacked.look_up(self.settings, reference, note=note)

    def require_runnable(self, image: Image) -> None:
        """Check that the image is for this processor.

        Raises:
            HostError: it is not.

        """
        here = f"linux/{DEBIAN_ARCH.get(platform.machine(), platform.machine())}"
        if image.platform not in {"", here}:
            raise HostError(
                f"the image is for {image.platform}, and this machine is {here}",
                where=shown(image.reference),
                hint="run it on a machine of that kind, or choose a cell for this one with --arch",
            )

    def line(self, host: HostFacts, container: Container, command: Sequence[str], *, terminal: bool) -> Line:
        """Return the `apptainer run` line; see `Runtime.line`. Its home and /tmp are folders of the cache, and stay."""
        del terminal  # Apptainer takes the one that is there
        image = self.look_up(container.image)
        apptainer.program()
        folder = self.settings.cache_dir / "apptainer"
        _make(folder)
        flags, variables, notes = container_flags(host, container, folder=folder, choice=self.settings.gpu_access)
        words = ["run", *flags, place_of(image), *command]
        return Line(command=limited(words), environment=variables, base=_base(), notes=tuple(notes))

    def confined(
        self,
        purpose: str,
        image: Image,
        command: Sequence[str],
        *,
        entrypoint: str,
        seconds: float,
        limit: int,
        stdin: bytes = b"",
    ) -> ProcessResult:
        """Run `command` in a guest without a network, rights or folders of the host; see `Runtime.confined`.

        Its memory has no separate bound: Apptainer sets one only through systemd.
        """
        container = Container(image=image.id, gpus="none", network="none", workdir="/", infiniband="off")
        with self.guest(
            purpose, image, HostFacts(), container, command, entrypoint=entrypoint, seconds=seconds
        ) as made:
            result = bounded(made.line.command, seconds=seconds, limit=limit, stdin=stdin, env=made.line.environ)
        words = result.err.decode("utf-8", "replace")
        failed = result.code == _NOT_STARTED and not result.fault and apptainer.fatal(words) is not None
        if failed and not _NO_PROGRAM.search(words):
            raise HostError(
                f"Apptainer could not start a container: {apptainer.last_words(words)}",
                where=shown(image.reference),
                hint="`envbuild doctor` says what it needs; without root it needs user namespaces",
            )
        return result

    @contextlib.contextmanager
    def guest(
        self,
        purpose: str,
        image: Image,
        host: HostFacts,
        container: Container,
        command: Sequence[str],
        *,
        entrypoint: str,
        seconds: float,
    ) -> Iterator[Guest]:
        """Make folders for one run in a container; see `Runtime.guest`."""
        del seconds
        with scratch(purpose) as folder:
            _make(folder)
            flags, variables, notes = container_flags(host, container, folder=folder, choice=self.settings.gpu_access)
            words = ["exec", *flags, place_of(image), entrypoint, *command]
            line = Line(command=limited(words), environment=variables, base=_base(), notes=tuple(notes))
            yield Guest(line=line, remove=lambda: None)  # its processes are the line's own, and end with them

    @contextlib.contextmanager
    def export(self, image: Image, *, seconds: float) -> Iterator[Stream]:
        """Yield the image's file system as one tar; a .sif is unpacked for it, within bounds. See `Runtime.export`."""
        with contextlib.ExitStack() as held:
            root = Path(place_of(image))
            if not root.is_dir():
                own = held.enter_context(scratch("export"))
                try:
                    apptainer.unpack_sif(root, own / "root")
                except ValueError as error:
                    why = f"the .sif cannot be read: {shown(str(error))}"
                    raise ImageError(why, where=shown(image.reference)) from None
                root = own / "root"
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, handle)
            # by what they are: under the name of one of Apptainer's links an image may have anything
            names = sorted(each.name for each in root.iterdir() if not apptainer.is_made(each.name, handle))
            # what another user owns may be closed to us; a file that is not in the tar is missing, and the audit says so
            # and the names by its stdin: a root may have more of them than a command line holds
            listed = io.BytesIO(b"".join(os.fsencode(name) + b"\0" for name in names))
            words = ["--ignore-failed-read", "--format=posix", "--null", "--verbatim-files-from", "--files-from=-"]
            command = ["tar", "-C", str(root), *words, "-cf", "-"]
            try:
                with streamed(command, seconds=seconds, stdin=listed.read) as stream:
                    yield stream
            except subprocess.CalledProcessError as error:
                result = bytes(error.stderr).decode("utf-8", "replace")
                why = shown((result.strip().splitlines() or [signal.strsignal(error.returncode) or "it ended"])[-1])
                raise HostError(f"the image's files cannot be read: {why}", where=shown(image.reference)) from None


def _make(folder: Path) -> None:
    for name in ("home", "work"):
        (folder / name).mkdir(parents=True, exist_ok=True)


def limited(words: Sequence[str]) -> tuple[str, ...]:
    """Return the line of an `apptainer` command under the limits that training needs, as far as the host gives them."""
    return ("sh", "-c", LIMITS, "sh", "apptainer", *words)


def _base() -> dict[str, str]:
    return apptainer.own_environment()
