"""A page in memory, of a URL: over HTTP, or of a file:/// URL."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from envbuild.errors import HostError, LockError
from envbuild.net.address import login_for, place_of, read_address
from envbuild.net.exchange import PAGE, Answer, Bounds
from envbuild.net.failures import REACH_HINT, BadAnswerError, NoAnswerError, failure_of, refusal_of, words_of
from envbuild.net.http import Client
from envbuild.settings import Settings


def body_of(_: Answer, chunks: Iterator[bytes]) -> bytes:
    """Return the chunks as one; what `Client.ask` takes for a body that is kept in memory."""
    return b"".join(chunks)


def open_file_url(url: str) -> int:
    """Open the file that a file:/// URL names and return its descriptor.

    Raises:
        HostError: it cannot be read, or is no file.

    """
    try:
        # a FIFO without a writer would hold the open for good
        handle = os.open(Path(unquote(urlsplit(url).path)), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise HostError(f"a file cannot be read: {words_of(error)}", where=place_of(url), hint=REACH_HINT) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise HostError("a file cannot be read: it is a folder or a device", where=place_of(url), hint=REACH_HINT)
    return handle


def fetch(settings: Settings, url: str, *, accept: str | None = None, bounds: Bounds = PAGE) -> tuple[bytes, str]:
    """Return the body and content type of `url`; of a file:/// URL, `text/html`.

    Raises:
        HostError: the host cannot be reached or cannot serve now, or asks for a login; the message names it.
        LockError: the host does not have the page, or has one that is larger than `bounds`.

    """
    if url.startswith("file://"):
        with os.fdopen(open_file_url(url), "rb") as file:
            body = file.read(bounds.size + 1)
        if len(body) > bounds.size:
            raise LockError(f"the file has more than {bounds.size >> 20} MiB", where=place_of(url))
        return body, "text/html"
    try:
        login = login_for(settings, read_address(url))
    except ValueError:
        login = None  # `ask` says what is wrong with the address
    try:
        with Client(settings) as client:
            headers = {"Accept": accept} if accept else {}
            answer, taken = client.ask(url, body_of, bounds=bounds, headers=headers, login=login)
    except (NoAnswerError, BadAnswerError) as error:
        raise failure_of(error, url) from None
    if taken is None:
        raise refusal_of(answer, url)
    return taken, answer.content_type
