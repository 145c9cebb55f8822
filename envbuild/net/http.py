"""Asking another host over HTTP: proxies, logins, redirects, bounds on size and time, and what is tried again.

urllib3 is imported when the first request is made: it takes longer to load than `envbuild --help` to run.
"""

import contextlib
import http.client
import random
import ssl
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import urljoin

from envbuild.errors import HostError
from envbuild.net.address import Address, host_of, place_of, read_address
from envbuild.net.exchange import Answer, Bounds, Upload
from envbuild.net.failures import BadAnswerError, NoAnswerError, no_answer, words_of
from envbuild.settings import Settings
from envbuild.util.names import shown

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

T = TypeVar("T")

_HOPS = 10
_RETRIED = frozenset({429, 500, 502, 503, 504})
_CHUNK = 1 << 18


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
        method: str = "GET",
        upload: Upload | None = None,
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
            method: of HTTP. A redirect is followed for GET and HEAD alone: no other host gets what is uploaded.
            upload: the body of the request. What is tried again is sent again, so it must be the same each time.

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
        asked = _Asked(
            headers=dict(headers or {}),
            login=login or address.login,
            bounds=bounds,
            hashed=hashed,
            method=method,
            upload=upload,
        )
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
            response = self._open(address, headers, asked, deadline)
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
                if asked.method not in {"GET", "HEAD"}:
                    raise BadAnswerError(address.host, f"redirects an upload to {place_of(target)}")
            finally:
                response.close()
            address = _redirected(address, target, hashed=asked.hashed)
        raise BadAnswerError(address.host, f"redirects more than {_HOPS} times")

    def _open(self, address: Address, headers: dict[str, str], asked: "_Asked", deadline: float) -> "BaseHTTPResponse":
        from urllib3 import Timeout
        from urllib3.exceptions import HTTPError

        bounds, upload = asked.bounds, asked.upload
        if upload:
            headers |= {"Content-Length": str(upload.size), "Content-Type": upload.media_type}
        elif asked.method in {"POST", "PUT"}:
            headers |= {"Content-Length": "0"}
        left = deadline - time.monotonic()
        if left <= 0:
            raise NoAnswerError(address.host, f"no answer within {bounds.total_s:g} s")
        try:
            return self._pool(address).urlopen(
                asked.method,
                address.url,
                body=_sent(upload, deadline) if upload else None,
                headers=headers,
                redirect=False,
                retries=False,
                preload_content=False,
                decode_content=False,
                timeout=Timeout(connect=min(bounds.connect_s, left), read=min(bounds.stall_s, left)),
            )
        except (HTTPError, OSError, http.client.HTTPException, ValueError) as error:
            raise no_answer(address.host, error, bounds) from None

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
                    f"the CA bundle cannot be read: {shown(words_of(error))}",
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
    method: str
    upload: Upload | None


def _sent(upload: Upload, deadline: float) -> Iterator[bytes]:
    """Yield the body of a request, until the time is over: a host that takes a byte now and then would hold us for good."""
    for chunk in upload.chunks():
        if time.monotonic() > deadline:
            raise OSError("the upload was not complete in time")
        yield chunk


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
        raise BadAnswerError(host, f"sends {announced} bytes, and at most {size} are accepted")
    taken = 0
    with time_limit(deadline - time.monotonic(), response.shutdown) as passed:
        while True:
            try:
                chunk = response.read1(_CHUNK, decode_content=False)
            except (HTTPError, OSError, http.client.HTTPException, ValueError) as error:
                if passed.is_set():
                    break
                raise no_answer(host, error, bounds) from None
            if not chunk or passed.is_set():
                break
            taken += len(chunk)
            if taken > bounds.size:
                raise BadAnswerError(host, f"sends more than {size}, and no more is accepted")
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
