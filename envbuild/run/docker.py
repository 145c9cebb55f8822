"""Docker as a runtime: images of the engine, in containers of the engine."""

import contextlib
from collections.abc import Iterator, Sequence

from envbuild.engine import guest as guests
from envbuild.engine.client import EngineClient
from envbuild.engine.image import Image
from envbuild.engine.podman import engine_of
from envbuild.errors import HostError
from envbuild.host import HostFacts
from envbuild.run.container import Container, run_flags, run_line
from envbuild.run.runtime import Guest, Line, Note
from envbuild.settings import Settings
from envbuild.util.names import shown
from envbuild.util.processes import ProcessResult, Stream


def require_runnable(client: EngineClient, image: Image) -> None:
    """Check that an image is for the engine's processor, or for one that it emulates.

    Raises:
        HostError: it is for another processor, or the engine does not answer.

    """
    if not image.platform or (here := client.machine().platform) in {"", image.platform}:
        return
    if image.platform not in client.platforms():
        raise HostError(
            f"the image is for {image.platform}, and this engine runs images for {here}",
            where=shown(image.reference),
            hint="run it on a machine of that kind, or choose a cell for this one with --arch",
        )


class DockerRuntime:
    """The engine of the settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def describe(self) -> str:
        """Return its name and version."""
        return f"docker {EngineClient(self.settings).version()}"

    def look_up(self, reference: str, note: Note = lambda _: None) -> Image:
        """Return the image that `reference` names now.

        Raises:
            HostError: the engine does not answer, or has no such image.

        """
        del note
        return guests.look_up(self.settings, reference)

    def require_runnable(self, image: Image) -> None:
        """Check that the image is for the engine's processor, or one that it emulates.

        Raises:
            HostError: it is for another processor, or the engine does not answer.

        """
        require_runnable(engine_of(self.settings), image)

    def flags(self, host: HostFacts, container: Container) -> tuple[list[str], list[str]]:
        """Return the flags for a container, and notes for the user.

        Raises:
            HostError: the container asks for something that is missing on this machine.

        """
        return run_flags(host, container, self.settings.gpu_access)

    def line(self, host: HostFacts, container: Container, command: Sequence[str], *, terminal: bool) -> Line:
        """Return the engine's `run` line; see `Runtime.line`."""
        flags, notes = self.flags(host, container)
        line = run_line(self.settings, container, command, flags, terminal=terminal)
        return Line(command=tuple(line), notes=tuple(notes))

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
        """Run `command` in a confined guest; see `Runtime.confined`."""
        return guests.run_guest(
            self.settings, purpose, image, command, entrypoint=entrypoint, seconds=seconds, limit=limit, stdin=stdin
        )

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
        """Make a container; see `Runtime.guest`."""
        flags, _ = self.flags(host, container)
        flags += [*(["--init"] if container.init else []), "--entrypoint", entrypoint]
        with guests.guest(self.settings, purpose, image.id, command, flags=flags, seconds=seconds) as name:
            line = Line(command=tuple(guests.start_line(self.settings, name)))
            yield Guest(line=line, remove=lambda: guests.remove(self.settings, name))

    def export(self, image: Image, *, seconds: float) -> contextlib.AbstractContextManager[Stream]:
        """Yield the image's file system as one tar; see `Runtime.export`."""
        return guests.export(self.settings, image, seconds=seconds)
