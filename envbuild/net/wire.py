"""Pools of connections: urllib3, with the two bounds that it has no setting for.

urllib3 limits each read of a socket. A host that sends a byte now and then is within that limit for ever, so the head of an
answer has a limit as a whole here, and `time_limit` sets one for the rest.
"""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import urllib3
from urllib3 import connection, connectionpool
from urllib3.util import make_headers, parse_url


@contextlib.contextmanager
def time_limit(seconds: float, end: Callable[[], object]) -> Iterator[threading.Event]:
    """Call `end` from another thread when the body takes more than `seconds`; the event that it yields is then set."""
    passed = threading.Event()

    def stop() -> None:
        passed.set()
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            end()

    timer = threading.Timer(max(seconds, 0.0), stop)
    timer.daemon = True
    timer.start()
    try:
        yield passed
    finally:
        timer.cancel()


class _WholeHead:
    """A connection on which the whole head of an answer must come within the time that one read may take."""

    sock: socket.socket
    timeout: float

    def getresponse(self) -> urllib3.HTTPResponse:
        sock = self.sock
        with time_limit(self.timeout, lambda: sock.shutdown(socket.SHUT_RDWR)) as passed:
            try:
                answer: urllib3.HTTPResponse = super().getresponse()  # type: ignore[misc]
            except BaseException:
                # When urllib3 refuses a header, http.client has given the socket to a response that nothing can reach.
                if (handle := sock.detach()) >= 0:
                    os.close(handle)
                if passed.is_set():
                    raise TimeoutError("the head of the answer took too long") from None
                raise
        if passed.is_set():
            answer.close()
            raise TimeoutError("the head of the answer took too long")
        return answer


class _Plain(_WholeHead, connection.HTTPConnection):  # type: ignore[misc]
    pass


class _Secure(_WholeHead, connection.HTTPSConnection):  # type: ignore[misc]
    pass


class _PlainPool(connectionpool.HTTPConnectionPool):
    ConnectionCls = _Plain  # type: ignore[assignment]


class _SecurePool(connectionpool.HTTPSConnectionPool):
    ConnectionCls = _Secure  # type: ignore[assignment]


def open_pool(proxy: str | None, context: ssl.SSLContext | None) -> urllib3.PoolManager:
    """Return a pool that reaches hosts through `proxy`, or directly.

    Args:
        proxy: its URL, which may carry a login; without a scheme it is an HTTP proxy.
        context: what a TLS connection trusts; None for a pool that makes none.

    Raises:
        ValueError: the proxy's URL cannot be read, or is of no kind that is known.

    """
    if proxy is None:
        pool = urllib3.PoolManager(ssl_context=context)
    else:
        address = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        login = unquote(address.auth) if address.auth else None
        pool = urllib3.ProxyManager(
            address._replace(auth=None).url,
            proxy_headers=make_headers(proxy_basic_auth=login) if login else None,
            proxy_ssl_context=context,
            ssl_context=context,
        )
    pool.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecurePool}
    return pool
