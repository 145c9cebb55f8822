"""Small files out of an image that somebody else made: no container runs, no link is followed, everything is bounded."""

import re
import subprocess
import tarfile
from typing import IO, Protocol, cast

from envbuild.engine.client import EngineClient, last_words
from envbuild.engine.guest import UNSTARTED, guest
from envbuild.engine.image import Image
from envbuild.errors import HostError, LockError
from envbuild.util.names import shown

LIMIT = 16 * 2**20
"""Bytes that a folder of an image may hold, for `files_of_image`. A lock and its pylock files are a hundredth of it."""

_SECONDS = 120.0
_ABSENT = re.compile(r"could not find the file|no such file or directory", re.IGNORECASE)


def files_of_image(
    client: EngineClient,
    image: Image,
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
        image: as it was looked up: its name may move.
        folder: an absolute path in the image.
        wanted: what the names of the files look like.
        limit: how many bytes the whole folder may hold, what is not wanted included.
        seconds: how long reading it may take.

    Returns:
        Name -> content; empty where the image has no such folder.

    Raises:
        HostError: the engine does not answer in time, or fails.
        LockError: the folder holds more than `limit`, or something wanted is no regular file.

    """
    with guest(client.settings, "look", image.id, (), flags=UNSTARTED, seconds=seconds) as name:
        try:
            with client.copied(name, folder, seconds=seconds, damaged=(tarfile.TarError,)) as stream:
                return regular_files(_Limited(stream, limit), folder.rstrip("/").rpartition("/")[2], wanted)
        except TimeoutError:
            raise HostError(
                f"the engine did not export the image's files in {seconds:.0f} s",
                where=shown(image.reference),
                hint="`docker info` shows whether the engine answers; do not trust an image that delays this",
            ) from None
        except _TooMuchError:
            raise LockError(
                f"{folder} in the image holds more than {limit // 2**20} MiB",
                where=shown(image.reference),
                hint="no image that envbuild built holds that much there; do not use it",
            ) from None
        except NotRegularError as error:
            raise LockError(
                f"{folder}/{shown(str(error), 80)} in the image is not a regular file",
                where=shown(image.reference),
                hint="no image that envbuild built has links or devices there; do not use it",
            ) from None
        except tarfile.TarError as error:
            raise _unread(folder, image, f"not a tar: {error}") from None
        except subprocess.CalledProcessError as error:
            output = bytes(error.stderr).decode("utf-8", "replace")
            if _ABSENT.search(output):
                return {}
            raise _unread(folder, image, last_words(output)) from None


def _unread(folder: str, image: Image, why: str) -> HostError:
    what = f"the engine could not read {folder} of the image: {shown(why) or 'it gave no reason'}"
    return HostError(what, where=shown(image.reference))


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


class _Limited:
    """A stream of so many bytes at most."""

    def __init__(self, stream: Readable, limit: int) -> None:
        self._stream, self._left = stream, limit

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end.

        Raises:
            _TooMuchError: there are more bytes than may come.

        """
        body = self._stream.read(size)
        self._left -= len(body)
        if self._left < 0:
            raise _TooMuchError
        return body
