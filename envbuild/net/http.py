"""Asking another host over HTTP: proxies, logins, redirects, bounds on size and time, and what is tried again.

urllib3 is imported when the first request is made: it takes longer to load than `envbuild --help` to run.
"""

import base64
import contextlib
import http.client
import os
import random
import ssl
import stat
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from envbuild.errors import EnvbuildError, HostError, LockError
from envbuild.settings import Settings, redact
from envbuild.util.names import shown

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

T = TypeVar("T")

_HOPS = 10
_RETRIED = frozenset({429, 500, 502, 503, 504})
_CHUNK = 1 << 18
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much an answer may be and how long it may take."""

    size: int
    """Bytes of a body."""
    connect_s: float = 20.0
    stall_s: float = 60.0
    """Seconds without a byte, and seconds for the whole head of an answer."""
    total_s: float = 300.0
    """Seconds for everything, attempts and pauses included."""
    attempts: int = 5
    pause_s: float = 0.5
    """Seconds before the second attempt; twice as long before each further one."""
    longest_pause_s: float = 30.0
    """What a host may ask for by Retry-After."""


PAGE = Bounds(size=64 << 20)
"""An index page, a METADATA file."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a host said before the body."""

    status: int
    reason: str
    """Fit for a terminal."""
    headers: Mapping[str, str]
    """Names in lower case; a header that came several times is one, with commas. The values are foreign text."""

    @property
    def good(self) -> bool:
        """Whether the body is what was asked for."""
        return 200 <= self.status < 300

    @property
    def content_type(self) -> str:
        """The type without its parameters, in lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class NoAnswerError(Exception):
    """A host gave no answer, or not the whole of it."""

    def __init__(self, host: str, reason: str, *, attempts: int = 1) -> None:
        super().__init__(f"{host} cannot be reached: {reason}")
        self.host = host
        self.reason = reason
        self.attempts = attempts
        """How many attempts are worth it in all."""


class BadAnswerError(Exception):
    """A host answered in a way that cannot be used: too long, or a redirect that is not followed."""

    def __init__(self, host: str, reason: str) -> None:
        super().__init__(f"{host} {reason}")
        self.host = host
        self.reason = reason


@dataclass(frozen=True, kw_only=True)
class Address:
    """A URL taken apart."""

    url: str
    """Without login and fragment."""
    login: str | None
    """The URL's login, as an Authorization header."""
    origin: tuple[str, str, int]
    """Scheme, host and port: what a login belongs to."""
    netloc: str

    @property
    def host(self) -> str:
        """The host's name, fit for a terminal."""
        return shown(self.origin[1])


def read_address(url: str) -> Address:
    """Take an http:// or https:// URL apart.

    Raises:
        ValueError: it is none. The message does not repeat the URL, which may carry a login.

    """
    if not url.isprintable() or " " in url:
        raise ValueError("its address holds a space or a control character")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError:
        raise ValueError("its address cannot be read") from None
    if parts.scheme not in _PORTS or not host:
        raise ValueError("its address is neither http:// nor https://")
    login, at, place = parts.netloc.rpartition("@")
    header = None
    if at:
        name, _, password = login.partition(":")  # a token alone is a name
        header = "Basic " + base64.b64encode(unquote(f"{name}:{password}").encode()).decode()
    return Address(
        url=parts._replace(netloc=place, fragment="").geturl(),
        login=header,
        origin=(parts.scheme, host, port if port is not None else _PORTS[parts.scheme]),
        netloc=place,
    )


def without_login(url: str) -> str:
    """Return `url` without its login; one that cannot be read as it is."""
    try:
        return read_address(url).url
    except ValueError:
        return url


def place_of(url: str) -> str:
    """Return `url` for a message: no login, no query (it may hold a token), no control character."""
    head, mark, _ = redact(url).partition("?")
    return shown(head + ("?…" if mark else ""), 300)


def host_of(url: str) -> str:
    """Return the host of `url` for a message; the whole URL where it names none."""
    try:
        return shown(urlsplit(url).hostname or place_of(url))
    except ValueError:
        return place_of(url)


def login_for(settings: Settings, address: Address) -> str | None:
    """Return the login that `address` carries, or the settings' index of the same scheme, host and port."""
    if address.login:
        return address.login
    for index in (settings.index_url, settings.torch_index, *settings.extra_index_urls):
        with contextlib.suppress(ValueError):
            known = read_address(index)
            if known.login and known.origin == address.origin:
                return known.login
    return None


class Client:
    """A series of requests. Its connections are kept until it is closed.

    Args:
        settings: the proxies and the CA bundle; the environment's proxies where it names none.
        direct: whether no proxy is used at all.

    """

    def __init__(self, settings: Settings | None, *, direct: bool = False) -> None:
        self._settings = settings
        self._direct = direct
        self._pools: dict[tuple[str | None, bool], PoolManager] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in self._pools.values():
            pool.clear()
        self._pools.clear()

    def ask(
        self,
        url: str,
        take: Callable[[Answer, Iterator[bytes]], T],
        *,
        bounds: Bounds,
        headers: Mapping[str, str] | None = None,
        login: str | None = None,
        hashed: bool = False,
    ) -> tuple[Answer, T | None]:
        """Ask for `url` and hand the body of a good answer to `take`, as it comes.

        What passes is tried again, from the start: a reset, a stall, a body that ends early, 429 and 5xx. A name that is
        not known, a refused connection and a certificate that is not trusted are not.

        Args:
            url: http:// or https://; a login in it is used, and sent to its own host alone.
            take: gets the answer and the chunks of its body; called again for each attempt.
            bounds: for the body and the time.
            headers: sent to every host that redirects lead to.
            login: an Authorization header for the scheme, host and port of `url`; the URL's own by default.
            hashed: whether the caller knows the hash of the body. Without it, a redirect from https to http is refused.

        Returns:
            The last answer, and what `take` returned; None for an answer that is not good.

        Raises:
            NoAnswerError: the host cannot be reached.
            BadAnswerError: the answer is larger than the bounds, or a redirect cannot be followed.

        """
        try:
            address = read_address(url)
        except ValueError as error:
            raise NoAnswerError(host_of(url), str(error)) from None
        deadline = time.monotonic() + bounds.total_s
        asked = _Asked(headers=dict(headers or {}), login=login or address.login, bounds=bounds, hashed=hashed)
        for attempt in range(1, bounds.attempts + 1):
            pause = min(bounds.pause_s * 2 ** (attempt - 1), bounds.longest_pause_s)
            pause += random.uniform(0, pause / 4)  # noqa: S311 - so that many clients do not come back at once
            try:
                answer, taken = self._once(address, take, asked, deadline)
                last = attempt == bounds.attempts or answer.status not in _RETRIED
                pause = min(_retry_after(answer) or pause, bounds.longest_pause_s)
                if last or time.monotonic() + pause > deadline:
                    return answer, taken
            except NoAnswerError as error:
                if attempt >= min(error.attempts, bounds.attempts) or time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
        raise NoAnswerError(address.host, "no attempt was allowed")

    def _once(
        self, address: Address, take: Callable[[Answer, Iterator[bytes]], T], asked: "_Asked", deadline: float
    ) -> tuple[Answer, T | None]:
        home = address.origin
        for _ in range(_HOPS):
            headers = {"Accept-Encoding": "identity", "User-Agent": "envbuild"} | asked.headers
            if asked.login and address.origin == home:  # another host, scheme or port has no right to it
                headers["Authorization"] = asked.login
            response = self._open(address, headers, asked.bounds, deadline)
            try:
                answer = Answer(
                    status=response.status,
                    reason=shown(response.reason or ""),
                    headers={name.lower(): response.headers[name] for name in response.headers},
                )
                target = response.get_redirect_location()
                if not target:
                    if not answer.good:
                        return answer, None
                    with contextlib.closing(_chunks(response, address.host, asked.bounds, deadline)) as chunks:
                        return answer, take(answer, chunks)
            finally:
                response.close()
            address = _redirected(address, target, hashed=asked.hashed)
        raise BadAnswerError(address.host, f"redirects more than {_HOPS} times")

    def _open(
        self, address: Address, headers: Mapping[str, str], bounds: Bounds, deadline: float
    ) -> "BaseHTTPResponse":
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        left = deadline - time.monotonic()
        if left <= 0:
            raise NoAnswerError(address.host, f"no answer within {bounds.total_s:g} s")
        try:
            return self._pool(address).urlopen(
                "GET",
                address.url,
                headers=headers,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=Timeout(connect=min(bounds.connect_s, left), read=min(bounds.stall_s, left)),
            )
        except (HTTPError, OSError, http.client.HTTPException, ValueError) as error:
            raise _no_answer(address.host, error, bounds) from None

    def _pool(self, address: Address) -> "PoolManager":
        from envbuild.net.wire import open_pool

        proxy = None if self._direct else self._proxy(address)
        secure = address.origin[0] == "https" or (proxy or "").startswith("https:")
        pool = self._pools.get((proxy, secure))
        if pool is None:
            try:
                pool = open_pool(proxy, self._context() if secure else None)
            except ValueError:
                raise NoAnswerError(address.host, "the address of the proxy cannot be used") from None
            self._pools[proxy, secure] = pool
        return pool

    def _proxy(self, address: Address) -> str | None:
        from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

        scheme, settings = address.origin[0], self._settings
        if settings and (settings.http_proxy or settings.https_proxy):
            if proxy_bypass_environment(address.netloc, {"no": settings.no_proxy or ""}):
                return None
            return settings.http_proxy if scheme == "http" else settings.https_proxy
        if proxy_bypass_environment(address.netloc):
            return None
        proxy: str | None = getproxies_environment().get(scheme)
        return proxy

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        bundle = self._settings.ca_bundle if self._settings else None
        if bundle:
            try:
                context.load_verify_locations(cafile=bundle)
            except (OSError, ValueError) as error:
                raise HostError(
                    f"the CA bundle cannot be read: {shown(_words(error))}",
                    where=str(bundle),
                    hint="name a PEM file of certificates in ca_bundle",
                ) from None
        return context


@dataclass(frozen=True, kw_only=True)
class _Asked:
    headers: dict[str, str]
    login: str | None
    bounds: Bounds
    hashed: bool


def _redirected(address: Address, target: str, *, hashed: bool) -> Address:
    try:
        # bytes that are no ASCII are percent-encoded by urllib3, as browsers do
        following = read_address(urljoin(address.url, target))
    except ValueError:
        raise BadAnswerError(address.host, f"redirects to an address that cannot be used: {place_of(target)}") from None
    if address.origin[0] == "https" and following.origin[0] == "http" and not hashed:
        # anybody on the way could change what comes from there, and nothing else would show it
        raise BadAnswerError(address.host, f"redirects from https to {place_of(following.url)}")
    return replace(following, login=None)


def _chunks(response: "BaseHTTPResponse", host: str, bounds: Bounds, deadline: float) -> Generator[bytes]:
    """Yield the body as it is on the wire: nothing is unpacked, so that no small answer becomes a large one."""
    from urllib3.exceptions import HTTPError

    from envbuild.net.wire import time_limit

    size = f"{bounds.size / (1 << 20):g} MiB"
    announced = getattr(response, "length_remaining", None)
    if announced is not None and announced > bounds.size:
        raise BadAnswerError(host, f"sends {announced} bytes, and at most {size} are taken")
    taken = 0
    with time_limit(deadline - time.monotonic(), response.shutdown) as passed:
        while True:
            try:
                chunk = response.read1(_CHUNK, decode_content=False)
            except (HTTPError, OSError, http.client.HTTPException, ValueError) as error:
                if passed.is_set():
                    break
                raise _no_answer(host, error, bounds) from None
            if not chunk or passed.is_set():
                break
            taken += len(chunk)
            if taken > bounds.size:
                raise BadAnswerError(host, f"sends more than {size}, and no more is taken")
            yield chunk
    if passed.is_set():
        raise NoAnswerError(host, f"the answer was not complete within {bounds.total_s:g} s")


def _retry_after(answer: Answer) -> float | None:
    """Return the seconds that a host asks to wait, None where it does not or cannot be understood."""
    from urllib3 import Retry
    from urllib3.exceptions import InvalidHeader

    stated = answer.headers.get("retry-after")
    if stated is None:
        return None
    try:
        return Retry().parse_retry_after(stated[:100])
    except (InvalidHeader, ValueError, OverflowError, TypeError):
        return None


def _words(error: BaseException) -> str:
    """Return what an error of the system says, without the name of its class."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _inner(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and what it came from: urllib3 wraps the system's errors once or twice."""
    waiting, seen = [error], 0
    while waiting and seen < 10:
        current = waiting.pop(0)
        seen += 1
        yield current
        parts = (current.__cause__, getattr(current, "original_error", None), *current.args)
        waiting += [part for part in parts if isinstance(part, BaseException)]


def _no_answer(host: str, error: BaseException, bounds: Bounds) -> NoAnswerError:
    """Say what went wrong, and how many attempts it is worth."""
    from urllib3 import exceptions

    chain = list(_inner(error))

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(part, kinds) for part in chain)

    proxy = "through the proxy, " if has(exceptions.ProxyError) else ""
    # of the system, or of http.client for a proxy that refuses: `Tunnel connection failed: 407 …`
    words = next((_words(p) for p in chain if isinstance(p, OSError) and (p.strerror or type(p) is OSError)), None)
    attempts = bounds.attempts
    if has(exceptions.NewConnectionError, ssl.SSLCertVerificationError):
        attempts = 1
        reason = words or str(chain[-1]).rpartition(": ")[2]
    elif has(exceptions.ConnectTimeoutError):
        # a host behind a silent firewall is asked twice, not five times
        attempts, reason = 2, f"no connection within {bounds.connect_s:g} s"
    elif has(exceptions.ReadTimeoutError, TimeoutError):
        reason = f"nothing came for {bounds.stall_s:g} s"
    elif has(exceptions.IncompleteRead, exceptions.InvalidChunkLength, http.client.IncompleteRead):
        reason = "the answer ended before its end"
    elif has(ConnectionError, ssl.SSLEOFError, exceptions.ProtocolError):
        reason = words or "the connection ended without an answer that is HTTP"
    elif has(exceptions.SSLError, ssl.SSLError):
        attempts, reason = 1, words or "TLS failed"
    else:
        attempts, reason = 1, words or "its address or its answer cannot be read"
    return NoAnswerError(host, proxy + shown(redact(reason)), attempts=attempts)


_REACH_HINT = "check the network, or name a mirror, proxy or CA bundle in your settings (docs/settings.md)"


def failure_of(error: NoAnswerError | BadAnswerError, url: str) -> EnvbuildError:
    """Return the error that a user sees for `url`."""
    if isinstance(error, NoAnswerError):
        return HostError(str(error), where=place_of(url), hint=_REACH_HINT)
    return LockError(str(error), where=place_of(url), hint="check the address, or the index in your settings")


# The host answered that it does not have this. Indexes that lie in a store of objects, as PyTorch's do, answer 403 for it.
_NOT_THERE = frozenset({403, 404, 410})


def refusal_of(answer: Answer, url: str) -> EnvbuildError:
    """Return the error for an answer that is not good: LockError where the host does not have it, else HostError."""
    what = f"{host_of(url)} answered {answer.status} {answer.reason}".rstrip()
    if answer.status in _NOT_THERE:
        return LockError(what, where=place_of(url), hint="check the version, or the index in your settings")
    if answer.status in {401, 407}:
        return HostError(
            what, where=place_of(url), hint="put the login into the address in your settings, or the proxy's"
        )
    return HostError(what, where=place_of(url), hint=f"try again later; else {_REACH_HINT}")


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
        raise HostError(f"a file cannot be read: {_words(error)}", where=place_of(url), hint=_REACH_HINT) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise HostError("a file cannot be read: it is a folder or a device", where=place_of(url), hint=_REACH_HINT)
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
