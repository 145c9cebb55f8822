"""What runs images: the one interface of Docker, podman and Apptainer, and which of them an argument asks for."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from envbuild.engine.image import Image
from envbuild.engine.place import is_path
from envbuild.host import HostFacts
from envbuild.run.container import Container, hidden
from envbuild.settings import Settings
from envbuild.util.processes import ProcessResult, Stream

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A command line that runs something in a container."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the command needs on top of `base`: some are secrets, and so none is on the command line."""
    base: Mapping[str, str] | None = None
    """What it inherits; this process's own environment by default."""
    notes: tuple[str, ...] = ()
    """What the user should know."""

    @property
    def environ(self) -> dict[str, str]:
        """Return the whole environment of the command."""
        return dict(os.environ if self.base is None else self.base) | dict(self.environment)

    def shown(self) -> str:
        """Return the line for people: quoted for the shell, values of variables whose names look secret hidden."""
        pairs = [f"{name}={value}" for name, value in sorted(self.environment.items())]
        return shlex.join([*(hidden(pair) for pair in pairs), *(hidden(word) for word in self.command)])


@dataclass(frozen=True, kw_only=True)
class Guest:
    """A container that was made for one command of ours, and that goes when its block ends."""

    line: Line
    """Starts it and stays with it: its output is the container's, and so is its exit code."""
    remove: Callable[[], None]
    """Ends it, as far as the end of the line's processes does not."""


class Runtime(Protocol):
    """What runs images."""

    def describe(self) -> str:
        """Return its name and version: `docker 28.5.2`, `podman 5.4.2`, `apptainer 1.4.5`."""

    def look_up(self, reference: str, note: Note = ...) -> Image:
        """Return the image that `reference` names now.

        Raises:
            EnvbuildError: there is none, or the runtime is missing.

        """

    def require_runnable(self, image: Image) -> None:
        """Check that the image is for a processor that is here or emulated.

        Raises:
            HostError: it is not.

        """

    def line(self, host: HostFacts, container: Container, command: Sequence[str], *, terminal: bool) -> Line:
        """Return the line that runs `command` for a user; `terminal` says whether a person sits at both ends.

        Raises:
            HostError: the container asks for something that this machine does not have.

        """

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
        """Run `command` without a network or rights, within bounds, and return its result; `fault` names a bound it broke.

        Raises:
            HostError: it could not be started.

        """

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
    ) -> AbstractContextManager[Guest]:
        """Make a container of `image` that will run `command` for `seconds` at most.

        Raises:
            HostError: it could not be made, or asks for something that this machine does not have.

        """

    def export(self, image: Image, *, seconds: float) -> AbstractContextManager[Stream]:
        """Yield the image's whole file system as one tar; nothing of the image runs.

        Raises:
            HostError: the runtime does not hand it over.
            TimeoutError: it took longer than `seconds`.

        """


def runtime_for(settings: Settings, reference: str) -> Runtime:
    """Return what runs the image that an argument names: Apptainer for a file or a folder, or else the engine. Asks nothing."""
    if is_path(reference):
        from envbuild.run.apptainer import ApptainerRuntime

        return ApptainerRuntime(settings)
    if settings.engine == "podman":
        from envbuild.run.podman import PodmanRuntime

        return PodmanRuntime(settings)
    from envbuild.run.docker import DockerRuntime

    return DockerRuntime(settings)
