"""A guest: the container of an image that may be anybody's, run once, within bounds, and gone afterwards.

A guest has a name that says what it is for and a label that says who made it. It is removed when its block ends, by
whatever; a guest that SIGKILL left behind goes when the next one is made.
"""

import contextlib
import re
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from envbuild.errors import HostError
from envbuild.run.container import docker, last_words, require_image
from envbuild.settings import Settings
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import Digest, shown
from envbuild.util.processes import Maker, Said, Stream, bounded, streamed, uninterrupted

LABEL = "io.envbuild.maker"
"""Label of a guest: the process that made it."""
_NAME = re.compile(r"envbuild-(?:audit|look|export|smoke|proof)-[0-9a-f]{12}")
_ENGINE_S = 120.0
"""Seconds that the engine may take for a step that is quick by itself; a busy disk makes it slow."""
_INSPECT_LIMIT = 16 << 20
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


class _Config(BaseModel):
    labels: dict[str, str] | None = Field(None, alias="Labels")
    volumes: dict[str, Any] | None = Field(None, alias="Volumes")
    environment: list[str] | None = Field(None, alias="Env")


class _Descriptor(BaseModel):
    digest: Digest


class _Inspected(BaseModel):
    id: Digest = Field(alias="Id")
    config: _Config | None = Field(None, alias="Config")
    descriptor: _Descriptor | None = Field(None, alias="Descriptor")


class _State(BaseModel):
    code: int = Field(0, alias="ExitCode")
    error: str = Field("", alias="Error")
    out_of_memory: bool = Field(False, alias="OOMKilled")


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image of the engine, as it was when it was looked up; a tag may name another a moment later."""

    reference: str
    """What the user named."""
    id: str
    """What the engine runs, whatever the tag names by then."""
    digest: str
    """The manifest's digest; the id where the engine keeps no manifests."""
    labels: dict[str, str]
    volumes: tuple[str, ...]
    """Paths where a container gets a volume instead of what the image has there."""
    environment: tuple[str, ...] = ()
    """Variables of its processes, each `NAME=value`."""


def parse_image_facts(body: bytes, reference: str) -> Image:
    """Read what `docker image inspect` prints of one image.

    Raises:
        ValueError: it has another shape.

    """
    found = parse_json(body, limit=_INSPECT_LIMIT)
    if not isinstance(found, list) or len(found) != 1:
        raise ValueError("not one image")
    try:
        facts = _Inspected.model_validate(found[0])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    config = facts.config or _Config.model_validate({})
    return Image(
        reference=reference,
        id=facts.id,
        digest=facts.descriptor.digest if facts.descriptor else facts.id,
        labels=config.labels or {},
        volumes=tuple(sorted(config.volumes or ())),
        environment=tuple(config.environment or ()),
    )


def look_up(settings: Settings, reference: str) -> Image:
    """Return the image that `reference` names now.

    Raises:
        HostError: the engine does not answer, has no such image, or says nothing sensible of it.

    """
    body = require_image(settings, reference)
    try:
        return parse_image_facts(body, reference)
    except ValueError as error:
        raise HostError(
            f"the engine describes the image in a way that cannot be read: {shown(str(error))}", where=reference
        ) from None


@contextlib.contextmanager
def guest(
    settings: Settings, purpose: str, image: str, command: Sequence[str], *, flags: Sequence[str], seconds: float
) -> Iterator[str]:
    """Make a container of `image` and return its name; it is removed at the end, with its volumes. It does not run yet.

    Args:
        settings: say where the engine is.
        purpose: `audit`, `look`, `export`, `smoke` or `proof`; it shows in the name.
        image: id of an image, which no tag can move away from.
        command: what it runs when it is started.
        flags: of `docker create`; `--entrypoint` among them where the image's own must not run.
        seconds: how long its maker will have use for it.

    Raises:
        HostError: the engine made none.

    """
    remove_left(settings)
    name = f"envbuild-{purpose}-{uuid.uuid4().hex[:12]}"
    label = f"{LABEL}={Maker.here(seconds=seconds + 10 * _ENGINE_S)}"
    line = [*docker(settings), "create", "--name", name, "--pull", "never", "--label", label]
    # what it prints goes to us alone: the engine would keep all of it on its disk
    line += ["--log-driver", "none", *flags, "--", image, *command]
    try:
        with uninterrupted():  # a signal in between would leave a container that is made a moment later
            made = bounded(line, seconds=_ENGINE_S, limit=1 << 20)
        if made.code or made.fault:
            raise not_started((made.fault and f"it {made.fault}") or said_last(made), image)
        yield name
    finally:
        remove(settings, name)


def not_started(said: str, where: str) -> HostError:
    """Return the error for an engine that starts no container."""
    return HostError(
        f"the engine could not start a container: {shown(said) or 'it said nothing'}",
        where=where,
        hint="`envbuild doctor` says what is wrong with the engine; a full disk is the usual cause",
    )


def said_last(said: Said) -> str:
    """Return the last line of what a command said on stderr, fit for a terminal."""
    return shown(last_words(said.err.decode("utf-8", "replace")))


def start_line(settings: Settings, name: str, *, stdin: bool = False) -> list[str]:
    """Return the command line that starts a guest and stays with it: its output is the guest's, and so is its exit code."""
    return [*docker(settings), "start", "--attach", *(["--interactive"] if stdin else []), name]


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
) -> Said:
    """Run `command` in a confined guest and return what it said; `fault` tells of a bound that it broke.

    Raises:
        HostError: the engine could not start it.

    """
    flags = [*CONFINED, *(["--interactive"] if stdin else []), "--entrypoint", entrypoint]
    with guest(settings, purpose, image.id, command, flags=flags, seconds=seconds) as name:
        said = bounded(start_line(settings, name, stdin=bool(stdin)), seconds=seconds, limit=limit, stdin=stdin)
        if said.code and not said.fault:
            state = _state(settings, name)
            if state.out_of_memory:
                return Said(code=said.code, out=said.out, err=said.err, fault=f"took more than {MEMORY} of memory")
            # 126 and 127: what it should run is not there, or is no program. That is the image's affair.
            if state.error and state.code not in {126, 127}:
                raise not_started(said_last(said), image.reference)
    return said


def _state(settings: Settings, name: str) -> _State:
    said = bounded(
        [*docker(settings), "container", "inspect", "--format", "{{json .State}}", name],
        seconds=_ENGINE_S,
        limit=_INSPECT_LIMIT,
    )
    try:
        return _State.model_validate(parse_json(said.out, limit=_INSPECT_LIMIT))
    except ValueError:
        return _State.model_validate({})


@contextlib.contextmanager
def export(settings: Settings, image: Image, *, seconds: float) -> Iterator[Stream]:
    """Yield the image's whole file system as one tar; nothing of the image runs.

    What a VOLUME would hide is in it: no volume is mounted in a container that never starts.

    Raises:
        HostError: the engine made no container, or broke off.
        TimeoutError: it took longer than `seconds`.

    """
    # an image without a command of its own makes no container otherwise
    flags = ["--network", "none", "--no-healthcheck", "--entrypoint", "/nothing"]
    with guest(settings, "export", image.id, (), flags=flags, seconds=seconds) as name:
        try:
            with streamed([*docker(settings), "export", name], seconds=seconds) as stream:
                yield stream
        except subprocess.CalledProcessError as error:
            said = shown(last_words(bytes(error.stderr).decode("utf-8", "replace")))
            raise HostError(f"the engine does not hand the image's files over: {said}", where=image.reference) from None


def remove(settings: Settings, name: str) -> None:
    """End the container `name` and remove it with its volumes, if there is one, whatever signals come meanwhile."""
    with uninterrupted(), contextlib.suppress(OSError):
        for _ in range(3):
            said = bounded([*docker(settings), "rm", "--force", "--volumes", name], seconds=60.0, limit=1 << 20)
            if not said.code and not said.fault:
                return
            if b"no such container" in said.err.lower():
                return


def remove_left(settings: Settings) -> None:
    """Remove the guests whose makers are gone: SIGKILL or a power cut ended those."""
    line = [*docker(settings), "ps", "--all", "--no-trunc", "--filter", f"label={LABEL}"]
    try:
        said = bounded([*line, "--format", f'{{{{.Names}}}} {{{{.Label "{LABEL}"}}}}'], seconds=30.0, limit=1 << 20)
    except OSError:
        return
    for line_ in said.out.decode("utf-8", "replace").splitlines() if not said.code else ():
        name, _, label = line_.partition(" ")
        maker = Maker.parse(label)
        # The label alone says nothing: an image can bring it, and then every container of it has it.
        if maker is not None and maker.gone and _NAME.fullmatch(name):
            remove(settings, name)
