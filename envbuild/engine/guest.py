"""A guest: the container of an untrusted image, run once, within bounds, and removed afterwards.

A guest has a name that says what it is for and a label that says who made it. It is removed when its block ends, by
whatever; a guest that SIGKILL left behind goes when the next one is made.
"""

import contextlib
import re
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from envbuild.engine.client import ENGINE_S, last_line, last_words
from envbuild.engine.image import Image
from envbuild.engine.podman import engine_of
from envbuild.errors import HostError
from envbuild.settings import Settings
from envbuild.util.maker import Maker
from envbuild.util.names import shown
from envbuild.util.processes import ProcessResult, Stream, bounded

LABEL = "io.envbuild.maker"
"""Label of a guest: the process that made it."""
_NAME = re.compile(r"envbuild-(?:audit|look|export|smoke|proof|helpers|dev)-[0-9a-f]{12}")
MEMORY = "8g"
"""What a confined guest may take of the memory: importing every package of an image needs less than 2 GiB."""
SCRATCH = "/run/envbuild-scratch"
"""The one folder that a confined guest can write to."""

CONFINED = (
    *("--network", "none"),
    # The files of other users, such as apt's, must be seen; every other right of root is not needed to look and to import.
    *("--cap-drop", "ALL", "--cap-add", "DAC_OVERRIDE", "--security-opt", "no-new-privileges"),
    *("--pids-limit", "4096", "--memory", MEMORY, "--memory-swap", MEMORY, "--ulimit", "core=0"),
    # What it writes would fill the host's disk. Packages that make a cache as they are imported ask for these folders.
    *("--read-only", "--tmpfs", f"{SCRATCH}:size=512m,mode=1777"),
    *("--env", f"HOME={SCRATCH}", "--env", f"TMPDIR={SCRATCH}"),
    # An engine whose default runtime is nvidia's gives GPUs to an image that asks for them.
    *("--env", "NVIDIA_VISIBLE_DEVICES=void"),
    # Not what the image says: its user, its folder, its health check.
    *("--user", "0:0", "--workdir", "/", "--no-healthcheck"),
)
"""Flags of a guest that only looks at itself: no network, no rights, no disk, bounds on memory and processes."""

UNSTARTED = ("--network", "none", "--no-healthcheck", "--entrypoint", "/nothing")
"""Flags of a guest that is never started; an image without its own command makes no container otherwise."""


def look_up(settings: Settings, reference: str) -> Image:
    """Return the image that `reference` names now.

    Raises:
        HostError: the engine does not answer, has no such image, or says nothing sensible of it.

    """
    try:
        return engine_of(settings).image(reference)
    except HostError as error:
        from envbuild.engine.place import kind_of

        kind = kind_of(Path(reference))
        if kind is None:
            raise
        hint = f"`./{shown(reference)}` names the {kind} that lies here; without ./ it is a name in the engine"
        raise type(error)(error.what, where=error.where, hint=hint) from None


@contextlib.contextmanager
def guest(
    settings: Settings, purpose: str, image: str, command: Sequence[str], *, flags: Sequence[str], seconds: float
) -> Iterator[str]:
    """Make a container of `image` and return its name; it is removed at the end, with its volumes. It does not run yet.

    Args:
        settings: say where the engine is.
        purpose: `audit`, `look`, `export`, `smoke`, `proof`, `helpers` or `dev`; it shows in the name.
        image: id of an image, which no tag can move away from.
        command: what it runs when it is started.
        flags: of `docker create`; `--entrypoint` among them where the image's own must not run.
        seconds: how long its maker will have use for it.

    Raises:
        HostError: the engine made none.

    """
    remove_left(settings)
    name = f"envbuild-{purpose}-{uuid.uuid4().hex[:12]}"
    label = f"{LABEL}={Maker.here(seconds=seconds + 10 * ENGINE_S)}"
    client = engine_of(settings)
    try:
        # what it prints goes to us alone: the engine would keep all of it on its disk
        made = client.create(name, image, command, ["--label", label, "--log-driver", "none", *flags])
        if made.code or made.fault:
            raise not_started((made.fault and f"it {made.fault}") or last_line(made), image)
        yield name
    finally:
        client.remove(name)


def not_started(output: str, where: str) -> HostError:
    """Return the error for an engine that starts no container."""
    return HostError(
        f"the engine could not start a container: {shown(output) or 'it printed nothing'}",
        where=where,
        hint="`envbuild doctor` shows what is wrong with the engine; a full disk is the usual cause",
    )


def start_line(settings: Settings, name: str, *, stdin: bool = False) -> list[str]:
    """Return the command line that starts a guest and stays with it: its output is the guest's, and so is its exit code."""
    return engine_of(settings).start_line(name, stdin=stdin)


def run_guest(
    settings: Settings,
    purpose: str,
    image: Image,
    command: Sequence[str],
    *,
    entrypoint: str,
    seconds: float,
    limit: int,
    stdin: bytes = b"",
) -> ProcessResult:
    """Run `command` in a confined guest and return its output; `fault` names a limit that it broke.

    Raises:
        HostError: the engine could not start it.

    """
    flags = [*CONFINED, *(["--interactive"] if stdin else []), "--entrypoint", entrypoint]
    with guest(settings, purpose, image.id, command, flags=flags, seconds=seconds) as name:
        ran = bounded(start_line(settings, name, stdin=bool(stdin)), seconds=seconds, limit=limit, stdin=stdin)
        if ran.code and not ran.fault:
            state = engine_of(settings).state(name)
            if state.out_of_memory:
                return ProcessResult(
                    code=ran.code, out=ran.out, err=ran.err, fault=f"took more than {MEMORY} of memory"
                )
            # 126 and 127: what it should run is not there, or is no program. That is the image's affair.
            if state.error and state.code not in {126, 127}:
                raise not_started(last_line(ran), image.reference)
    return ran


@contextlib.contextmanager
def export(settings: Settings, image: Image, *, seconds: float) -> Iterator[Stream]:
    """Yield the image's whole file system as one tar; nothing of the image runs.

    What a VOLUME would hide is in it: no volume is mounted in a container that never starts.

    Raises:
        HostError: the engine made no container, or broke off.
        TimeoutError: it took longer than `seconds`.

    """
    with guest(settings, "export", image.id, (), flags=UNSTARTED, seconds=seconds) as name:
        try:
            with engine_of(settings).exported(name, seconds=seconds) as stream:
                yield stream
        except subprocess.CalledProcessError as error:
            output = shown(last_words(bytes(error.stderr).decode("utf-8", "replace")))
            raise HostError(f"the engine does not export the image's files: {output}", where=image.reference) from None


def remove(settings: Settings, name: str) -> None:
    """End the container `name` and remove it with its volumes, if there is one, whatever signals come meanwhile."""
    engine_of(settings).remove(name)


def remove_left(settings: Settings) -> None:
    """Remove the guests whose makers are gone: SIGKILL or a power cut ended those."""
    client = engine_of(settings)
    for name, label in client.labelled(LABEL):
        maker = Maker.parse(label)
        # The label alone proves nothing: an image can contain it, and then every container of it has it.
        if maker is not None and maker.gone and _NAME.fullmatch(name):
            client.remove(name)
