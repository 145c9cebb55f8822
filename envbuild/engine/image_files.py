"""Small files out of an image that somebody else made: no container runs, no link is followed, everything is bounded."""

import contextlib
import re
import select
import signal
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, TYPE_CHECKING, Protocol, cast

from envbuild.errors import HostError, LockError
from envbuild.util.names import shown
from envbuild.util.processes import end_group

if TYPE_CHECKING:
    from python_on_whales import DockerClient

LIMIT = 16 * 2**20
"""Bytes that a folder of an image may hold, for `files_of_image`. A lock and its pylock files are a hundredth of it."""

_SECONDS = 120.0
# A container whose maker was killed is removed by the next run; no living one keeps its container this long.
_LEFT_S = 3600
_NAME = re.compile(r"envbuild-look-(\d{1,12})-[0-9a-f]{32}")
_ABSENT = re.compile(r"could not find the file|no such file or directory", re.IGNORECASE)


def files_of_image(
    client: "DockerClient",
    image: str,
    folder: str,
    wanted: re.Pattern[str],
    *,
    limit: int = LIMIT,
    seconds: float = _SECONDS,
) -> dict[str, bytes]:
    """Return the files that lie directly in `folder` of `image` and whose whole name matches `wanted`.

    Nothing of the image runs: the engine makes a container of it, streams the folder as a tar, and the container is
    removed again, after Ctrl-C too. What is not wanted is passed over and never written anywhere.

    Args:
        client: the engine that holds the image.
        image: its name, or better its id: a name may move.
        folder: an absolute path in the image.
        wanted: what the names of the files look like.
        limit: how many bytes the whole folder may hold, what is not wanted included.
        seconds: how long all of it may take.

    Returns:
        Name -> content; empty where the image has no such folder.

    Raises:
        HostError: the engine does not answer in time, has no such image, or fails.
        LockError: the folder holds more than `limit`, or something wanted is no regular file.

    """
    docker = list(client.client_config.docker_cmd)
    deadline = time.monotonic() + seconds
    _remove_left(docker)
    name = f"envbuild-look-{int(time.time())}-{uuid.uuid4().hex}"
    # In a thread, which no signal interrupts: a container is made whole, and then removed.
    maker = ThreadPoolExecutor(1)
    try:
        maker.submit(_make, docker, name, image, deadline).result()
        return _read(docker, f"{name}:{folder}", folder, wanted, image=image, limit=limit, deadline=deadline)
    except (TimeoutError, subprocess.TimeoutExpired):
        raise HostError(
            f"the engine did not hand out the image's files in {seconds:.0f} s",
            where=shown(image),
            hint="`docker info` says whether the engine answers; an image that holds this up is not to be trusted",
        ) from None
    finally:
        try:
            maker.shutdown()
        finally:
            try:
                _remove(docker, name)
            except BaseException:
                _remove(docker, name)  # the first one may have been interrupted before it began
                raise


def _read(
    docker: Sequence[str],
    place: str,
    folder: str,
    wanted: re.Pattern[str],
    *,
    image: str,
    limit: int,
    deadline: float,
) -> dict[str, bytes]:
    """Stream the folder at `place` (CONTAINER:PATH) and return its wanted files."""
    with _output([*docker, "cp", place, "-"]) as process:
        assert process.stdout is not None  # noqa: S101 - it was asked for
        assert process.stderr is not None  # noqa: S101
        stream = _Bounded(process.stdout, limit=limit, deadline=deadline)
        told = ""
        try:
            found = regular_files(stream, folder.rstrip("/").rpartition("/")[2], wanted)
            failed = process.wait(max(0.1, deadline - time.monotonic()))
        except _TooMuchError:
            raise LockError(
                f"{folder} in the image holds more than {limit // 2**20} MiB",
                where=shown(image),
                hint="no image that envbuild built holds that much there; do not use it",
            ) from None
        except tarfile.TarError as error:
            failed, found, told = 1, {}, f"not a tar: {error}"
            with contextlib.suppress(subprocess.TimeoutExpired):  # it failed itself, most likely, and says why
                process.wait(5)
            _end(process)
        except NotRegularError as error:
            raise LockError(
                f"{folder}/{shown(str(error), 80)} in the image is no regular file",
                where=shown(image),
                hint="no image that envbuild built has links or devices there; do not use it",
            ) from None
        if not failed:
            return found
        said = process.stderr.read(4000).decode("utf-8", "replace")
        if _ABSENT.search(said):
            return {}
        told = said.strip().splitlines()[-1] if said.strip() else told
        raise HostError(
            f"the engine could not read {folder} of the image: {shown(told) or 'it gave no reason'}", where=shown(image)
        )


class Readable(Protocol):
    """What is read once, from its start to its end."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none at the end."""


def regular_files(stream: Readable, folder: str, wanted: re.Pattern[str]) -> dict[str, bytes]:
    """Return the wanted files directly below `folder` in a tar that is read once, from its start to its end.

    Raises:
        NotRegularError: a wanted name is a link, a folder or a device, or comes twice; the text is the name.
        tarfile.TarError: it is no tar.

    """
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as tar:
            for member in tar:
                parent, _, name = member.name.rpartition("/")
                if parent != folder or not wanted.fullmatch(name):
                    continue
                body = tar.extractfile(member) if member.isreg() and not member.issparse() else None
                if body is None or name in found:
                    raise NotRegularError(name)
                found[name] = body.read()
                if len(found[name]) != member.size:
                    raise tarfile.ReadError("unexpected end of data")
            while stream.read(65536):  # what follows the end belongs to the limit, too
                pass
    except tarfile.TarError:
        raise
    except (ValueError, OverflowError, EOFError) as error:  # fields of a header that tarfile does not check
        if isinstance(error, NotRegularError):
            raise
        raise tarfile.ReadError(str(error)) from None
    return found


class NotRegularError(ValueError):
    """Something that should be a regular file is none."""


class _TooMuchError(Exception):
    """More bytes came than may come."""


class _Bounded:
    """The output of a process, up to a number of bytes and a moment."""

    def __init__(self, pipe: IO[bytes], *, limit: int, deadline: float) -> None:
        self._pipe = pipe
        self._left = limit
        self._deadline = deadline

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end.

        Raises:
            TimeoutError: the moment has come.
            _TooMuchError: there are more bytes than may come.

        """
        patience = self._deadline - time.monotonic()
        if patience <= 0 or not select.select([self._pipe], [], [], patience)[0]:
            raise TimeoutError
        body = self._pipe.read(size)
        self._left -= len(body)
        if self._left < 0:
            raise _TooMuchError
        return body


@contextlib.contextmanager
def _output(command: Sequence[str]) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a command whose output is read as it comes; however this ends, the command has ended."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        end_group(process, first=signal.SIGKILL, patience=5.0)  # it has nothing to clean up


def _make(docker: Sequence[str], name: str, image: str, deadline: float) -> None:
    """Make a container that is never started."""
    # The command is there for an image without one; nothing ever runs it.
    words = ("create", "--name", name, "--network", "none", "--pull", "never", "--", image, "/none")
    done = subprocess.run(
        [*docker, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        check=False,
        timeout=max(0.1, deadline - time.monotonic()),
    )
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise HostError(
            f"the engine could not open the image: {shown(lines[-1]) if lines else 'it gave no reason'}",
            where=shown(image),
        )


def _remove(docker: Sequence[str], *names: str) -> None:
    # In a session of its own: it goes on when a second Ctrl-C ends this.
    removing = subprocess.Popen(
        [*docker, "rm", "--force", "--volumes", *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        removing.wait(60)


def _remove_left(docker: Sequence[str]) -> None:
    """Remove what runs that were killed left: by name, as an image may carry any label."""
    words = ("ps", "--all", "--filter", "name=^envbuild-look-", "--filter", "status=created", "--format", "{{.Names}}")
    try:
        listed = subprocess.run([*docker, *words], capture_output=True, text=True, check=False, timeout=20)
    except subprocess.TimeoutExpired:
        return
    matches = [_NAME.fullmatch(line.strip()) for line in listed.stdout.splitlines()]
    left = [match[0] for match in matches if match and time.time() - int(match[1]) > _LEFT_S]
    if left:
        _remove(docker, *left)
