"""The client of podman, which runs, tests and pulls images as Docker does; it builds none here.

Podman has Docker's command line. What it says of images, of itself and of containers has another shape. It needs no service:
without root, each user has separate images and containers.
"""

import re
import resource
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from envbuild.engine.client import QUICK_S, EngineClient, EngineError, NoImageError, last_line
from envbuild.engine.image import LIMIT, Image, image_from
from envbuild.engine.machine import Machine
from envbuild.errors import HostError
from envbuild.settings import Settings
from envbuild.util.foreign_json import parse_json
from envbuild.util.names import shown
from envbuild.util.processes import ProcessResult

_INSTALL = "install it: sudo apt-get install podman (Debian, Ubuntu), sudo dnf install podman; or use Docker: unset ENVBUILD_ENGINE"
_HEX = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"[0-9][\w.+~-]{0,40}")


_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
_PID_MAX = 32768
"""The smallest number of processes that Linux gives out by itself; podman lowers its own limit to it."""


def own_limits() -> list[str]:
    """Return flags that keep a container's numbers of files and processes within this user's own.

    Podman otherwise asks for 1048576 of each, also where this process is root and may raise no limit, as root of a container
    may not: then no container starts.
    """
    found = []
    for name, number in _LIMITS.items():
        hard = resource.getrlimit(number)[1]
        if name == "nproc":
            hard = _PID_MAX if hard == resource.RLIM_INFINITY else min(hard, _PID_MAX)
        text = "-1" if hard == resource.RLIM_INFINITY else str(hard)
        found += ["--ulimit", f"{name}={text}:{text}"]
    return found


class _Host(BaseModel):
    architecture: str = Field("", alias="arch", max_length=64)
    cores: int = Field(1, alias="cpus", ge=1)
    memory: int = Field(0, alias="memTotal", ge=0)


class _Version(BaseModel):
    version: str = Field("", alias="Version", max_length=64)


class _Info(BaseModel):
    """What `podman info` says; more keys are of no concern here."""

    host: _Host
    version: _Version


def parse_podman_image(body: bytes, reference: str) -> Image:
    """Read what `podman image inspect` prints of one image: ids have no `sha256:` there, and the digest is a field.

    Raises:
        ValueError: it has another shape.

    """
    found = parse_json(body, limit=LIMIT)
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
        raise ValueError("not one image")
    facts: dict[str, Any] = found[0]
    name = facts.get("Id")
    if isinstance(name, str) and _HEX.fullmatch(name):
        facts["Id"] = f"sha256:{name}"
    if facts.get("Digest"):
        facts["Descriptor"] = {"mediaType": facts.get("ManifestType") or "", "digest": facts["Digest"]}
    return image_from(found, reference)


class PodmanClient(EngineClient):
    """The user's podman. Making one asks nothing."""

    _facts = staticmethod(parse_podman_image)

    def require(self) -> None:
        """Refuse to build.

        Raises:
            HostError: always.

        """
        raise HostError(
            "podman builds no images here: a build takes Docker with BuildKit",
            where="engine = podman",
            hint="unset ENVBUILD_ENGINE, or change `engine` in the settings; podman then pulls the image, or loads it: "
            "docker save TAG | podman load",
        )

    def info(self) -> _Info:
        """Return what podman says of its machine.

        Raises:
            HostError: it is missing, or says nothing sensible.

        """
        if shutil.which(self._start[0]) is None:
            raise HostError("the podman command is missing", hint=_INSTALL)
        ran = self._ask("info", "--format", "json", seconds=QUICK_S)
        if ran.fault or ran.code:
            text = f"podman does not answer: {ran.fault or last_line(ran)}"
            raise EngineError(text, output=ran.err.decode("utf-8", "replace"), hint="`podman info` shows why")
        try:
            return _Info.model_validate(parse_json(ran.out, limit=LIMIT))
        except (ValueError, ValidationError):
            raise HostError("`podman info` prints something else than podman's facts") from None

    def machine(self) -> Machine:
        """Return the machine that podman runs on.

        Raises:
            HostError: it does not answer.

        """
        host = self.info().host
        platform = f"linux/{shown(host.architecture, 64)}" if host.architecture else ""
        return Machine(cores=host.cores, memory_gib=host.memory / 2**30, platform=platform)

    def version(self) -> str:
        """Return podman's version, such as `4.3.1`; `unknown` where it does not say."""
        try:
            found = self.info().version.version
        except HostError:
            return "unknown"
        return found if _VERSION.fullmatch(found) else "unknown"

    def platforms(self, builder: str | None = None) -> tuple[str, ...]:
        """Return the platform of this machine: which others the kernel emulates podman does not say."""
        del builder
        return (self.machine().platform,)

    def tags(self, repository: str) -> list[str]:
        """Return the names `repository:tag` that podman has; it keeps a name without a registry below `localhost/`."""
        return [name.removeprefix("localhost/") for name in super().tags(repository)]

    def tag(self, image: str, name: str) -> None:
        """Give an image a name.

        Raises:
            EngineError: there is no such image, or the name is none.

        """
        ran = self._ask("image", "tag", "--", image, name, seconds=QUICK_S)
        if ran.fault or ran.code:
            output = ran.err.decode("utf-8", "replace")
            raise EngineError(f"podman does not tag the image: {ran.fault or last_line(ran)}", output=output)

    def create(self, name: str, image: str, command: Sequence[str], flags: Sequence[str]) -> ProcessResult:
        """Make a container that does not run yet; return what podman printed."""
        limits = () if any(flag.startswith("nofile=") for flag in flags) else own_limits()
        return super().create(name, image, command, [*flags, *limits])

    def _no_image(self, reference: str, ran: ProcessResult) -> HostError:
        found = super()._no_image(reference, ran)
        if isinstance(found, NoImageError):
            found.hint = (
                "`podman image ls` lists what podman has; `envbuild pull` fetches the image of a cell. Docker's images lie apart: "
                "`docker save TAG | podman load` carries one over"
            )
        return found

    def labelled(self, label: str) -> Iterator[tuple[str, str]]:
        """Yield name and value of each container that has `label`, a stopped one too; none where podman does not answer."""
        try:
            ran = self._ask(
                "ps", "--all", "--filter", f"label={label}", "--format", "json", seconds=QUICK_S, limit=LIMIT
            )
            found = parse_json(ran.out, limit=LIMIT) if not ran.code and not ran.fault else []
        except (OSError, ValueError):
            return
        for each in found if isinstance(found, list) else ():
            match each:
                case {"Names": [str(name), *_], "Labels": {**labels}} if isinstance(value := labels.get(label), str):
                    yield name, value
                case _:
                    pass


def engine_of(settings: Settings) -> EngineClient:
    """Return a client of the engine that the settings name, Docker or podman. Asks nothing."""
    return PodmanClient(settings) if settings.engine == "podman" else EngineClient(settings)


def pulling_client(settings: Settings) -> EngineClient:
    """Return a client of the user's engine, which answers and can pull.

    Raises:
        HostError: it is missing or does not answer, or Docker keeps images in its old store.

    """
    client = engine_of(settings)
    if isinstance(client, PodmanClient):
        client.info()
    else:
        client.require()
    return client
