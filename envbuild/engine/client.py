"""The one client of the Docker engine: images, containers, builds. Nothing else of envbuild talks to it.

What an engine says of itself, and names of images, go through python-on-whales. What can be large, slow or hostile goes
through the engine's own command line, which `util.processes` ends with us and reads within bounds; so does a build, since
only the command line gives `--progress=rawjson`. Both follow the user's context, DOCKER_HOST and ssh as `docker` does.
`envbuild.host` looks at the engine for `doctor`, and `envbuild.run` writes the lines that a user's containers start with.
"""

import contextlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.engine.builders import BuilderFacts, facts_of
from envbuild.engine.image import LIMIT, Image, parse_image_facts
from envbuild.engine.machine import GET_COMMAND, Machine, State
from envbuild.engine.place import as_path
from envbuild.engine.progress import Watch
from envbuild.errors import HostError
from envbuild.settings import Settings
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown
from envbuild.util.processes import ProcessResult, Stream, bounded, followed, streamed, uninterrupted

if TYPE_CHECKING:
    from python_on_whales import DockerClient

ENGINE_S = 120.0
"""Seconds that the engine may take for a step that is quick by itself; a busy disk makes it slow."""
QUICK_S = 60.0
_LEFT_S = 30.0
_SAVE_S = 3600.0
_OUTPUT_LIMIT = 1 << 20
"""Bytes that the engine may say of a step that has little to say."""
_OUTPUT_LINES = 400
"""Lines that are kept of a long step: what the engine says last is what went wrong, and a registry may have it say more."""

_START = "start Docker, or run scripts/install-engine (Debian, Ubuntu); `envbuild doctor` says what is missing"

_NOT_UNPACKED = "Error unpacking image"
"""How the engine prints that an image which it loaded cannot be run."""
_NO_IMAGE = re.compile(r"no such image|invalid reference|image not known", re.IGNORECASE)  # Docker, Docker, podman
_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64"}
"""Docker's name of an architecture, by the kernel's."""


class EngineError(HostError):
    """The engine did not do what it was asked."""

    def __init__(self, what: str, *, output: str, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what, where=where, hint=hint)
        self.output = output
        """The end of what it printed, as it is: not fit for a terminal."""


class NoImageError(HostError):
    """The engine has no such image."""


def last_words(output: str) -> str:
    """Return the last line of what a command printed on stderr; docker ends its own errors with a pointer to its help."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("Run 'docker ")]
    return lines[-1].strip() if lines else ""


def last_line(ran: ProcessResult) -> str:
    """Return the last line of what a command printed on stderr, fit for a terminal."""
    return shown(last_words(ran.err.decode("utf-8", "replace")))


class EngineClient:
    """The engine of the settings. Making one asks nothing; `engine_client` returns one whose engine answers."""

    _facts = staticmethod(parse_image_facts)

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._start = settings.engine_command

    @cached_property
    def _whales(self) -> "DockerClient":
        from python_on_whales import DockerClient

        host = self.settings.engine_host
        return DockerClient(host=host) if host else DockerClient()

    def _ask(self, *words: str, seconds: float, limit: int = _OUTPUT_LIMIT, stdin: bytes = b"") -> ProcessResult:
        return bounded([*self._start, *words], seconds=seconds, limit=limit, stdin=stdin)

    def _follow(self, *words: str) -> str:
        """Run a command that may take long and return the end of what it printed; interrupted, it ends before this raises.

        Raises:
            EngineError: it failed.

        """
        output: deque[str] = deque(maxlen=_OUTPUT_LINES)
        if followed([*self._start, *words], feed=output.append, stdout=True):
            raise EngineError(f"`{self._start[0]} {' '.join(words[:2])}` failed", output="".join(output))
        return "".join(output)

    # -- the engine and its builders

    def require(self) -> None:
        """Check that the engine answers, can build, and keeps images by digest.

        Raises:
            HostError: docker or buildx is missing, no engine answers, or it keeps images in its old store.

        """
        from python_on_whales.exceptions import DockerException

        if shutil.which(self._start[0]) is None:
            raise HostError("the docker command is missing", hint=_START)
        try:
            info = self._whales.system.info()
        except DockerException as error:
            output = shown(last_words(error.stderr or ""))
            raise HostError("no Docker engine answers" + (f": {output}" if output else ""), hint=_START) from error
        if not self._whales.buildx.is_installed():
            raise HostError("docker's buildx plugin is missing", hint=_START)
        if not any("snapshotter" in str(pair) or "containerd" in str(pair) for pair in (info.driver_status or [])):
            raise HostError(
                "the engine keeps images in its old store, which cannot hold these images by digest",
                where="/etc/docker/daemon.json",
                hint='add {"features": {"containerd-snapshotter": true}} and restart Docker',
            )

    def machine(self) -> Machine:
        """Return the machine that the engine runs on.

        Raises:
            EngineError: no engine answers.

        """
        from python_on_whales.exceptions import DockerException

        try:
            info = self._whales.system.info()
        except DockerException as error:
            raise EngineError("no Docker engine answers", output=error.stderr or "", hint=_START) from None
        memory = info.mem_total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        kind = _PLATFORMS.get(info.architecture or "", info.architecture)
        return Machine(
            cores=info.n_cpu or os.cpu_count() or 1,
            memory_gib=memory / 2**30,
            platform=f"linux/{kind}" if kind else "",
            root=str(info.docker_root_dir or ""),
        )

    def version(self) -> str:
        """Return the engine's version, such as `28.5.2`; `unknown` where it does not say."""
        result = self._ask("version", "--format", "{{.Server.Version}}", seconds=QUICK_S)
        found = result.out.decode("utf-8", "replace").strip()
        return found if re.fullmatch(r"[0-9][\w.+~-]{0,40}", found) else "unknown"

    def platforms(self, builder: str | None = None) -> tuple[str, ...]:
        """Return the platforms that a builder lists, those that it emulates included.

        Args:
            builder: its name; the engine's own by default, which lists what the engine's containers can be.

        Raises:
            EngineError: there is no such builder, or it does not answer.

        """
        # buildx has no JSON of one builder: `buildx ls` asks every builder that there is
        ran = self._ask("buildx", "inspect", builder or "default", seconds=QUICK_S)
        if ran.fault or ran.code:
            output = ran.err.decode("utf-8", "replace")
            raise EngineError(
                f"the builder does not answer: {ran.fault or last_line(ran)}", output=output, where=builder
            )
        lines = re.findall(r"^Platforms:(.*)$", ran.out.decode("utf-8", "replace"), re.MULTILINE)
        return tuple(shown(name.strip().rstrip("*"), 40) for line in lines for name in line.split(",") if name.strip())

    def builder(self) -> BuilderFacts:
        """Return what buildx says of the builder of the settings, as `facts_of` does."""
        named = [self.settings.builder] if self.settings.builder else []
        return facts_of(self.settings, self._ask("buildx", "inspect", *named, seconds=QUICK_S))

    def bake(
        self, file: Path, target: str, *, folder: Path, metadata: Path, cache: bool, watch: Watch
    ) -> dict[str, Any] | None:
        """Build one target of a bake file; return buildx's metadata, or None where there is none: `watch` knows why.

        Args:
            file: the bake file.
            target: one of its targets.
            folder: what relative paths of the bake file start from.
            metadata: where buildx writes what it made.
            cache: whether steps that ran before are taken from the builder's cache.
            watch: takes each line of the progress as it comes.

        """
        words = ["buildx", "bake", "--file", str(file), "--progress", "rawjson", "--metadata-file", str(metadata)]
        if self.settings.builder:
            words += ["--builder", self.settings.builder]
        if not cache:
            words.append("--no-cache")
        # Contexts, secrets and what is exported lie outside the folder that bake reads, on purpose.
        env = os.environ | {"BUILDX_BAKE_ENTITLEMENTS_FS": "0"}
        if followed([*self._start, *words, target], cwd=folder, env=env, feed=watch.feed):
            return None
        answer: dict[str, Any] = json.loads(metadata.read_text(encoding="utf-8"))
        return answer

    # -- images

    def image(self, reference: str) -> Image:
        """Return the image that `reference` names now. What the engine reports of it is read within bounds.

        Raises:
            NoImageError: the engine has none of that name.
            HostError: the engine does not answer, or says nothing sensible of it.

        """
        try:
            ran = self._ask("image", "inspect", "--", reference, seconds=QUICK_S, limit=LIMIT)
        except OSError:
            raise HostError(f"there is no {self._start[0]} command", hint=GET_COMMAND[self._start[0]]) from None
        if ran.fault:
            what = f"`{self._start[0]} image inspect` {ran.fault}"
            raise HostError(what, where=shown(reference), hint="`envbuild doctor` checks the engine")
        if ran.code:
            raise self._no_image(reference, ran)
        try:
            return self._facts(ran.out, reference)
        except ValueError as error:
            text = f"the engine describes the image in a way that cannot be read: {shown(str(error))}"
            raise HostError(text, where=shown(reference)) from None

    def _no_image(self, reference: str, ran: ProcessResult) -> HostError:
        output = ran.err.decode("utf-8", "replace").strip().splitlines()
        if any(_NO_IMAGE.search(line) for line in output):
            return NoImageError(
                f"there is no image {shown(reference)} here",
                where=self.settings.engine_host or os.environ.get("DOCKER_HOST"),
                hint=f"{as_path(reference)}`{self._start[0]} image ls` lists what is here; `envbuild image` and `envbuild pull` make or fetch the image of a cell",
            )
        what = shown(output[-1]) if output else "the engine does not answer"
        return HostError(what, hint="`envbuild doctor` shows how to fix it")

    def find_image(self, reference: str) -> Image | None:
        """Return the image that `reference` names now, or None.

        Raises:
            HostError: the engine does not answer, or says nothing sensible of it.

        """
        try:
            return self.image(reference)
        except NoImageError:
            return None

    def tags(self, repository: str) -> list[str]:
        """Return the names `repository:tag` that the engine has; none where it does not answer."""
        words = ("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository)
        with contextlib.suppress(OSError):
            return self._ask(*words, seconds=QUICK_S).out.decode("utf-8", "replace").splitlines()
        return []

    def tag(self, image: str, name: str) -> None:
        """Give an image a name.

        Raises:
            EngineError: there is no such image, or the name is none.

        """
        from python_on_whales.exceptions import DockerException

        try:
            self._whales.image.tag(image, name)
        except DockerException as error:
            what = f"the engine does not tag the image: {shown(last_words(error.stderr or ''))}"
            raise EngineError(what, output=error.stderr or "") from None

    def untag(self, name: str) -> None:
        """Take a name from an image; the image goes with its last name. Where that cannot be, it stays."""
        with uninterrupted(), contextlib.suppress(OSError):
            self._ask("image", "rm", "--", name, seconds=QUICK_S)

    def load(self, archive: Path) -> None:
        """Take the images of an archive into the engine, unpacked where they are for its platform.

        Raises:
            EngineError: it does not take or unpack them.

        """
        output = self._follow("image", "load", "--quiet", "--input", str(archive))
        if _NOT_UNPACKED in output:  # the command itself ends well then
            raise EngineError("the engine does not unpack the image", output=output)

    def save(self, image: str, archive: Path) -> None:
        """Write an image to an archive.

        Raises:
            HostError: the engine does not hand it over.

        """
        ran = self._ask("image", "save", "--output", str(archive), "--", image, seconds=_SAVE_S)
        if ran.fault or ran.code:
            raise HostError(f"the engine does not export the image: {shown(ran.fault or last_line(ran))}", where=image)

    def pull(self, reference: str) -> None:
        """Pull an image.

        Raises:
            EngineError: it could not be had; what the engine printed is in it.

        """
        self._follow("image", "pull", "--quiet", reference)

    def push(self, name: str) -> str:
        """Push an image and return what the engine printed.

        Raises:
            EngineError: the registry did not take it; what the engine printed is in it.

        """
        return self._follow("image", "push", name)

    # -- containers

    def create(self, name: str, image: str, command: Sequence[str], flags: Sequence[str]) -> ProcessResult:
        """Make a container that does not run yet; return what the engine printed."""
        words = ("create", "--name", name, "--pull", "never", *flags, "--", image, *command)
        with uninterrupted():  # a signal in between would leave a container that is made a moment later
            return self._ask(*words, seconds=ENGINE_S)

    def start_line(self, name: str, *, stdin: bool = False) -> list[str]:
        """Return the line that starts a container and stays with it: its output is the container's, and its exit code."""
        return [*self._start, "start", "--attach", *(["--interactive"] if stdin else []), name]

    def state(self, name: str) -> State:
        """Return how a container ended; as if it ended well where the engine does not say."""
        ran = self._ask("container", "inspect", "--format", "{{json .State}}", name, seconds=ENGINE_S, limit=LIMIT)
        try:
            return State.model_validate(parse_json(ran.out, limit=LIMIT))
        except ValueError:
            return State.model_validate({})

    def exported(
        self, name: str, *, seconds: float, damaged: tuple[type[Exception], ...] = ()
    ) -> contextlib.AbstractContextManager[Stream]:
        """Yield the whole file system of a container as a tar; see `streamed` for the arguments and errors."""
        return streamed([*self._start, "export", name], seconds=seconds, damaged=damaged)

    def copied(
        self, name: str, path: str, *, seconds: float, damaged: tuple[type[Exception], ...] = ()
    ) -> contextlib.AbstractContextManager[Stream]:
        """Yield a file or folder of a container as a tar; see `streamed` for the arguments and errors."""
        return streamed([*self._start, "cp", f"{name}:{path}", "-"], seconds=seconds, damaged=damaged)

    def labelled(self, label: str) -> Iterator[tuple[str, str]]:
        """Yield name and value of each container that has `label`, a stopped one too; none where no engine answers."""
        words = ("ps", "--all", "--no-trunc", "--filter", f"label={label}")
        try:
            ran = self._ask(*words, "--format", f'{{{{.Names}}}} {{{{.Label "{label}"}}}}', seconds=_LEFT_S)
        except OSError:
            return
        for line in ran.out.decode("utf-8", "replace").splitlines() if not ran.code else ():
            name, _, value = line.partition(" ")
            yield name, value

    def remove(self, name: str) -> None:
        """End a container and remove it with its volumes, if there is one, whatever signals come meanwhile."""
        tries, end = 3, time.monotonic() + _LEFT_S
        with uninterrupted(), contextlib.suppress(OSError):
            while tries:
                ran = self._ask("rm", "--force", "--volumes", name, seconds=QUICK_S)
                if (not ran.code and not ran.fault) or b"no such container" in ran.err.lower():
                    return
                # `--rm` had the engine begin by itself: it is gone soon
                if b"already in progress" in ran.err and time.monotonic() < end:
                    time.sleep(0.1)
                else:
                    tries -= 1


def engine_client(settings: Settings) -> EngineClient:
    """Return a client of the user's engine, which answers and can build.

    Raises:
        HostError: docker or buildx is missing, no engine answers, it keeps images in its old store, or it is podman.

    """
    from envbuild.engine.podman import engine_of

    client = engine_of(settings)
    client.require()
    return client
