"""The container that training runs in: one `docker run` line with the flags that it needs, and why each is there."""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild.doctor.diagnosis import MISSING, diagnose
from envbuild.engine.place import is_path
from envbuild.errors import HostError, UsageError
from envbuild.host import HostFacts
from envbuild.host.gpu_access import Choice, GpuAccess, Runtime, gpu_access
from envbuild.settings import Settings
from envbuild.util.text import count_of

Access = str
"""GPUs of a container: `auto` (all of them, where there are any), `all`, `none`, or numbers such as `0,1`."""

READ_COMPAT = "if [ -f /opt/envbuild/cuda-compat.sh ]; then . /opt/envbuild/cuda-compat.sh; fi; "
"""Start of a `sh -c` text that runs in a container without its image's entrypoint: it switches on cuda-compat where needed."""

ON_PYTHONPATH = 'PYTHONPATH="$0${PYTHONPATH:+:$PYTHONPATH}"; export PYTHONPATH; exec "$@"'
"""Text of a `sh -c` that puts the folder `$0` before the image's PYTHONPATH, which `sh` reads in the container, and runs the words after it."""

_ENVIRONMENT = re.compile(r"^[A-Za-z_]\w*(=.*)?$", re.DOTALL)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
_NETWORK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
_GPUS = re.compile(r"(0|[1-9][0-9]{0,5})(,(0|[1-9][0-9]{0,5}))*")
_USER = re.compile(r"([0-9]{1,10}|[a-z_][a-z0-9_-]{0,31})(:([0-9]{1,10}|[a-z_][a-z0-9_-]{0,31}))?")
_LARGEST_ID = 2**32 - 2

HOME_OF_ANY = "/tmp"  # noqa: S108 - the container's own: every user may write there, and no other container sees it
"""Home of a user whom the image does not know: caches of Triton, torch, matplotlib and Hugging Face go below it."""
NAME_OF_ANY = "envbuild"
"""Name of such a user: Python's `getpass.getuser`, which torch calls for a cache's name, fails without one."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A folder or file of the host, seen in the container."""

    source: Path
    target: str
    read_only: bool = False


def _checked(text: str, form: Callable[[str], object], what: str, *, where: str, hint: str) -> str:
    if not form(text):
        raise UsageError(f"{text!r} {what}", where=where, hint=hint)
    return text


def parse_image(text: str) -> str:
    """Check a tag, a digest or an id of an image as far as its characters go, or take a path; the runtime knows what is there.

    Raises:
        UsageError: it can be none of them.

    """
    if is_path(text):
        return text
    return _checked(text, _IMAGE.fullmatch, "is not an image", where="TAG", hint="`docker image ls` lists what is here")


def parse_network(text: str) -> str:
    """Check the name of a network of the engine, `host` and `none` among them, or `container:NAME`.

    Raises:
        UsageError: it is none.

    """
    hint = "write host, none or what `docker network ls` lists"
    return _checked(text, _NETWORK.fullmatch, "is not a network", where="--network", hint=hint)


def parse_mount(text: str) -> Mount:
    """Read `SRC:DST` or `SRC:DST:ro`.

    Raises:
        UsageError: it is not of that form, or SRC does not exist (docker would make it, owned by root).

    """
    source, *rest = text.split(":")
    if len(rest) not in {1, 2} or not source or not rest[0].startswith("/") or rest[1:] not in ([], ["ro"], ["rw"]):
        raise UsageError(
            f"{text!r} is not a mount",
            where="--mount",
            hint="write SRC:DST or SRC:DST:ro, DST an absolute path in the container",
        )
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise UsageError(
            f"there is no {path} to mount", where=f"--mount {text}", hint=f"make it first: mkdir -p {path}"
        )
    return Mount(source=path, target=rest[0], read_only=rest[1:] == ["ro"])


def parse_user(text: str) -> str:
    """Check `USER` or `USER:GROUP`, each a number or a name of the image.

    Raises:
        UsageError: it is neither.

    """
    hint = "write UID or UID:GID, such as 1000:1000; OpenShift's users are like 1000780000:0"

    def is_user(user: str) -> bool:
        # in this order: the pattern bounds the digits, and Python reads no number of more than 4300
        numbers = [part for part in user.split(":") if part.isdecimal()] if _USER.fullmatch(user) else None
        return numbers is not None and all(int(number) <= _LARGEST_ID for number in numbers)

    return _checked(text, is_user, "is not a user", where="--user", hint=hint)


def parse_environment(text: str) -> str:
    """Check `NAME` (the value is this process's own) or `NAME=VALUE`.

    Raises:
        UsageError: it is neither.

    """
    hint = "write NAME=VALUE, or NAME to pass on your own"
    return _checked(text, _ENVIRONMENT.match, "sets no variable", where="--env", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Container:
    """What is asked of a container."""

    image: str
    gpus: Access = "auto"
    mounts: tuple[Mount, ...] = ()
    environment: tuple[str, ...] = ()
    """`NAME=VALUE`, or `NAME` for a value that must not show on a command line."""
    workdir: str | None = None
    user: str | None = None
    """Who its processes are, `UID`, `UID:GID` or names of the image; the image's own user by default."""
    network: str = "host"
    infiniband: Literal["auto", "on", "off"] = "auto"
    init: bool = False
    """Whether a first process reaps what the command leaves: for a guest alone."""


def _fixes(host: HostFacts, *areas: str, choice: Choice = "auto") -> str | None:
    fixes = [
        fix
        for area in diagnose(host, choice)
        if area.name in areas
        for finding in area.findings
        if finding.status in {MISSING, "absent"}
        for fix in finding.fix
    ]
    return "; ".join(fixes) or None


def require_names_gpus(gpus: Access, *, words: Sequence[str] = ("all", "none", "auto")) -> None:
    """Raise UsageError where `gpus` is neither one of `words` nor numbers; whether there are so many is not asked."""

    def names(text: str) -> bool:
        numbers = text.split(",")
        return text in words or (_GPUS.fullmatch(text) is not None and len(set(numbers)) == len(numbers))

    hint = f"write {', '.join(words)}, or numbers, each once: 0,1"
    _checked(gpus, names, "names no GPUs", where="--gpus", hint=hint)


def wanted_gpus(host: HostFacts, gpus: Access) -> str | None:
    """Return which of the machine's GPUs a container gets, `all` or numbers; None for none.

    Raises:
        UsageError: `gpus` names none.
        HostError: GPUs were asked for, and there are none or fewer.

    """
    if gpus == "none" or (gpus == "auto" and not host.gpus):
        return None
    if not host.gpus:
        raise HostError("no GPU of this machine answers", where=f"--gpus {gpus}", hint=_fixes(host, "gpu"))
    wanted = "all" if gpus == "auto" else gpus
    require_names_gpus(wanted)
    if wanted != "all" and max(map(int, wanted.split(","))) >= len(host.gpus):
        raise HostError(
            f"this machine has {count_of(len(host.gpus), 'GPU')}, numbered from 0",
            where=f"--gpus {wanted}",
            hint="choose among them; `envbuild doctor` lists them",
        )
    return wanted


def gpus_and_access(
    host: HostFacts, runtime: Runtime, gpus: Access, choice: Choice
) -> tuple[str | None, GpuAccess, str | None]:
    """Return which GPUs a container gets (`all`, numbers, None for none), how, and a message for the user.

    The message says where `auto` gives none although there are some, or what CDI leaves open.

    Raises:
        UsageError: `gpus` names none.
        HostError: GPUs were asked for, and there are none or containers cannot have them.

    """
    wanted = wanted_gpus(host, gpus)
    if wanted is None:
        return None, GpuAccess(how="none"), None
    access = gpu_access(host, runtime, choice, tuple(f"nvidia.com/gpu={number}" for number in wanted.split(",")))
    if access.how != "none":
        return wanted, access, access.problem if access.how == "cdi" and access.problem else None
    # Docker has more than one way: what the machine is short of is in its area of the diagnosis
    whole = runtime == "docker" and choice != "cdi"
    hint = _fixes(host, "toolkit", choice=choice) if whole else "; ".join(access.fix) or None
    why = "" if whole else f" ({access.problem})"
    if gpus == "auto":
        fix = f": fix it with {hint}" if hint else ""
        return (
            None,
            access,
            f"the container runs without the {count_of(len(host.gpus), 'GPU')} of this machine{why}{fix}",
        )
    raise HostError(
        f"containers cannot see this machine's GPUs{'' if whole else f': {access.problem}'}",
        where=f"--gpus {gpus}",
        hint=hint,
    )


def device_flags(wanted: str) -> list[str]:
    """Return the flags that give a container GPUs by CDI, which Docker, podman and Apptainer have in common."""
    return [flag for number in wanted.split(",") for flag in ("--device", f"nvidia.com/gpu={number}")]


def gpu_flags(host: HostFacts, gpus: Access, choice: Choice = "auto") -> tuple[list[str], str | None]:
    """Return docker's flags for the GPUs, and a message for the user; see `gpus_and_access`.

    Raises:
        UsageError: `gpus` names none.
        HostError: GPUs were asked for, and there are none or containers cannot have them.

    """
    if gpus == "none":
        # An engine whose default runtime is nvidia gives GPUs to every image that says NVIDIA_VISIBLE_DEVICES=all.
        return (["--env", "NVIDIA_VISIBLE_DEVICES=void"] if host.toolkit.runtime == "active" else []), None
    wanted, access, message = gpus_and_access(host, "docker", gpus, choice)
    if wanted is None:
        return [], message
    if access.how == "gpus":
        # docker reads the value as CSV, so a list of devices needs its own quotes.
        return ["--gpus", "all" if wanted == "all" else f'"device={wanted}"'], message
    if access.how == "runtime":
        return ["--runtime", "nvidia", "--env", f"NVIDIA_VISIBLE_DEVICES={wanted}"], message
    return device_flags(wanted), message


def wants_infiniband(host: HostFacts, wanted: str) -> bool:
    """Whether a container gets the RDMA devices.

    Raises:
        HostError: they were asked for, and there are none.

    """
    if wanted == "off" or (wanted == "auto" and not host.infiniband_devices):
        return False
    if not host.infiniband_devices:
        raise HostError("this machine has no /dev/infiniband", where="--infiniband on", hint=_fixes(host, "infiniband"))
    return True


def infiniband_flags(host: HostFacts, wanted: str) -> list[str]:
    """Return the flags for the RDMA devices.

    Raises:
        HostError: they were asked for, and there are none.

    """
    # Registering memory with the adapter locks it.
    return ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK"] if wants_infiniband(host, wanted) else []


def common_flags(container: Container) -> list[str]:
    """Return the flags for mounts, variables, folder and user, which Docker and podman have in common."""
    flags: list[str] = []
    for mount in container.mounts:
        flags += ["--volume", f"{mount.source}:{mount.target}{':ro' if mount.read_only else ''}"]
    for item in (*container.environment, *_variables_of_user(container)):
        flags += ["--env", item]
    if container.workdir:
        flags += ["--workdir", container.workdir]
    return [*flags, *(["--user", container.user] if container.user else [])]


def _variables_of_user(container: Container) -> list[str]:
    """Return the variables that a user needs whom the image does not know, as far as nobody has set them.

    The home of such a user is `/` in Docker and the working folder in podman; neither can be written to.
    """
    if not re.match(r"0*[1-9]", container.user or ""):
        return []  # root, or a user of the image, who has a home there
    given = {item.partition("=")[0] for item in container.environment}
    needed = {"HOME": HOME_OF_ANY, "USER": NAME_OF_ANY, "LOGNAME": NAME_OF_ANY}
    return [f"{name}={value}" for name, value in needed.items() if name not in given]


def run_flags(host: HostFacts, container: Container, choice: Choice = "auto") -> tuple[list[str], list[str]]:
    """Return the flags of `docker run` (all that comes before the image), and notes for the user.

    Args:
        host: this machine.
        container: what is asked of the container.
        choice: the setting `gpu_access`.

    Raises:
        HostError: the container asks for something that is missing on this machine.

    """
    gpus, note = gpu_flags(host, container.gpus, choice)
    notes = [note] if note else []
    # NCCL and data loaders pass tensors through shared memory, of which a container gets 64 MiB by itself.
    flags = [*gpus, "--ipc", "host", "--ulimit", "stack=67108864"]
    if host.engine.rootless or host.engine.lifts_limits is False:
        if wants_infiniband(host, container.infiniband):
            notes.append("the engine may not lift the limit on locked memory: RDMA can fail to register memory")
    else:
        flags += ["--ulimit", "memlock=-1"]
    flags += ["--network", container.network, *infiniband_flags(host, container.infiniband)]
    return [*flags, *common_flags(container)], notes


def run_line(
    settings: Settings, container: Container, command: Iterable[str], flags: Iterable[str], *, terminal: bool
) -> list[str]:
    """Return the `docker run` or `podman run` line that runs `command` and removes the container after it.

    `terminal` says whether a person sits at both ends (`--tty`).
    """
    # --pull never: an image comes by `envbuild pull`, which shows who confirmed its digest.
    line = [
        *settings.engine_command,
        "run",
        "--rm",
        "--pull",
        "never",
        "--interactive",
        *(["--tty"] if terminal else []),
        *flags,
    ]
    return [*line, container.image, *command]


_SECRET = re.compile(r"^(\w*(?:KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL)\w*)=.*$", re.IGNORECASE | re.DOTALL)


def hidden(word: str) -> str:
    """Return a word of a command line, the value of a variable whose name looks secret hidden."""
    return _SECRET.sub(r"\1=***", word)


def shown(line: Iterable[str]) -> str:
    """Return a command line for people: quoted for the shell, the values of `--env` whose names suggest a secret hidden."""
    return shlex.join(hidden(word) for word in line)
