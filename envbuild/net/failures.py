"""What goes wrong on the way to another host: as text, how often it is tried again, and as an error for the user."""

import http.client
import ssl
from collections.abc import Iterator

from envbuild.errors import EnvbuildError, HostError, LockError
from envbuild.net.address import host_of, place_of
from envbuild.net.exchange import Answer, Bounds
from envbuild.settings import redact
from envbuild.util.names import shown

REACH_HINT = "check the network, or name a mirror, proxy or CA bundle in your settings (docs/reference/settings.md)"


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


def words_of(error: BaseException) -> str:
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


def no_answer(host: str, error: BaseException, bounds: Bounds) -> NoAnswerError:
    """Say what went wrong, and how many attempts it is worth."""
    from urllib3 import exceptions

    chain = list(_inner(error))

    def has(*kinds: type[BaseException]) -> bool:
        return any(isinstance(part, kinds) for part in chain)

    proxy = "through the proxy, " if has(exceptions.ProxyError) else ""
    # of the system, or of http.client for a proxy that refuses: `Tunnel connection failed: 407 …`
    words = next((words_of(p) for p in chain if isinstance(p, OSError) and (p.strerror or type(p) is OSError)), None)
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


def failure_of(error: NoAnswerError | BadAnswerError, url: str) -> EnvbuildError:
    """Return the error that a user sees for `url`."""
    if isinstance(error, NoAnswerError):
        return HostError(str(error), where=place_of(url), hint=REACH_HINT)
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
    return HostError(what, where=place_of(url), hint=f"try again later; else {REACH_HINT}")
