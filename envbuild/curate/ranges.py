"""A wheel on an index, read by range requests: its list of files, one file, or many that lie close together."""

import contextlib
import io
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Self

from envbuild.errors import LockError
from envbuild.lock.index import IndexFile
from envbuild.net.address import login_for, place_of, read_address
from envbuild.net.exchange import PAGE, Answer
from envbuild.net.failures import BadAnswerError, NoAnswerError, failure_of, refusal_of
from envbuild.net.http import Client
from envbuild.settings import Settings
from envbuild.util.names import shown

_CHUNK = 1 << 16
_LARGE_CHUNK = 4 << 20
"""Bytes of one request where many files, or one long one, are read in a row."""
_HTTP_PARTIAL = 206
_LONGEST_MEMBER = 64 << 20
"""Bytes of a file within a wheel that is kept in memory, and of the wheel's own directory."""


class _Ranges(io.RawIOBase):
    """A remote file, read in chunks as zipfile asks for them."""

    def __init__(self, client: Client, settings: Settings, url: str) -> None:
        self._client = client
        self._url = url
        self._login = login_for(settings, read_address(url))
        self._at = 0
        self._held = (0, b"")
        self.chunk = _CHUNK
        """Bytes that one request asks for at least."""
        _, self._size = self._part(0, 0)

    def _part(self, first: int, last: int) -> tuple[bytes, int]:
        """Return the bytes from `first` to `last`, both included, and the size of the whole file."""
        asked = last - first + 1

        def take(answer: Answer, chunks: Iterator[bytes]) -> tuple[bytes, int]:
            if answer.status != _HTTP_PARTIAL:
                raise OSError("the index does not answer range requests")
            stated = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", answer.headers.get("content-range", ""))
            if not stated or int(stated[1]) != first:
                raise OSError("the index answers another range than the one asked for")
            return b"".join(chunks), int(stated[3])

        answer, taken = self._client.ask(
            self._url,
            take,
            bounds=replace(PAGE, size=asked),
            headers={"Range": f"bytes={first}-{last}"},
            login=self._login,
        )
        if taken is None:
            raise refusal_of(answer, self._url)
        if len(taken[0]) != asked:
            raise OSError("the index answers another range than the one asked for")
        return taken

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:  # plain-words: allow tell - the name that file objects have
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = min(size if size >= 0 else self._size, self._size - self._at)
        if size <= 0:
            return b""
        start, held = self._held
        if not (start <= self._at and self._at + size <= start + len(held)):
            if size > _LONGEST_MEMBER:
                raise OSError(f"it holds a part of more than {_LONGEST_MEMBER >> 20} MiB")
            end = min(self._size, self._at + max(size, self.chunk)) - 1
            body, whole = self._part(self._at, end)
            if whole != self._size:
                raise OSError("it changed while it was read")
            start, held = self._held = (self._at, body)
        data = held[self._at - start : self._at - start + size]
        self._at += len(data)
        return data


# What zipfile raises for an archive that is damaged, or made to confuse it.
_UNREADABLE = (
    OSError,
    EOFError,
    KeyError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)


class RemoteWheel:
    """A wheel whose directory is read when the block begins.

    Raises:
        HostError: the index cannot be reached or cannot serve now.
        LockError: the index serves no ranges of it, or it is damaged.

    """

    def __init__(self, settings: Settings, wheel: IndexFile) -> None:
        self._settings = settings
        self._wheel = wheel
        self._client = Client(settings)

    def __enter__(self) -> Self:
        self._client.__enter__()
        try:
            with self._explained():
                self._ranges = _Ranges(self._client, self._settings, self._wheel.url)
                self._archive = zipfile.ZipFile(self._ranges)
        except BaseException:
            self._client.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._archive.close()
        self._client.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except NoAnswerError as error:
            raise failure_of(error, self._wheel.url) from None
        except (BadAnswerError, *_UNREADABLE) as error:
            raise LockError(
                f"{self._wheel.filename} cannot be read: {shown(str(error) or type(error).__name__)}",
                where=place_of(self._wheel.url),
                hint="try again, or with an index that answers range requests",
            ) from None

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of its files."""
        return tuple(self._archive.namelist())

    def read(self, name: str) -> bytes:
        """Return the bytes of the file `name`, at most 64 MiB; raises LockError where it cannot be read."""
        with self._explained(), self._archive.open(name) as file:
            body = file.read(_LONGEST_MEMBER + 1)
            if len(body) > _LONGEST_MEMBER:
                raise OSError(f"its {shown(name)} has more than {_LONGEST_MEMBER >> 20} MiB")
        return body

    def read_many(self, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
        """Yield each of `names` with its bytes, in the order of the archive, many to a request."""
        wanted = [self._archive.getinfo(name) for name in set(names)]
        with self._large_chunks():
            for info in sorted(wanted, key=lambda each: each.header_offset):
                yield info.filename, self.read(info.filename)

    def stream(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of the file `name` piece by piece; it may be of any size."""
        with self._large_chunks(), self._explained(), self._archive.open(name) as file:
            while piece := file.read(1 << 20):
                yield piece

    @contextlib.contextmanager
    def _large_chunks(self) -> Iterator[None]:
        self._ranges.chunk = _LARGE_CHUNK
        try:
            yield
        finally:
            self._ranges.chunk = _CHUNK
