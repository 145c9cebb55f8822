"""Reading what a registry and docker's configuration state about logins: bytes in, values out; no request is made here.

A token or a secret is in no message.
"""

import base64
import binascii
import contextlib
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from envbuild.errors import HostError
from envbuild.net.data import read_object, table
from envbuild.settings import redact
from envbuild.util.names import FileUrl, SafeName, checked, shown

_LONGEST_HEADER = 8192
_LONGEST_TOKEN = 65536


@dataclass(frozen=True, kw_only=True)
class Challenge:
    """What a registry asks for (RFC 6750, or HTTP Basic)."""

    scheme: str
    """`bearer`, `basic` or another word, in lower case."""
    realm: str
    service: str
    scope: str


def read_challenge(header: str) -> Challenge:
    """Return what a WWW-Authenticate header asks for; of several challenges the first.

    Raises:
        HostError: it is too long to be one.

    """
    if len(header) > _LONGEST_HEADER:
        raise HostError("the registry asks for a login in a way that cannot be read: it is too long")
    scheme, _, rest = header.strip().partition(" ")
    fields: dict[str, str] = {}
    for name, value in re.findall(r'([A-Za-z_]++)="([^"]*+)"', rest):
        fields.setdefault(name.lower(), value)
    return Challenge(
        scheme=shown(scheme.lower(), 20),
        realm=fields.get("realm", ""),
        service=fields.get("service", ""),
        scope=fields.get("scope", ""),
    )


def is_loopback(host: str) -> bool:
    """Return whether `host`, without a port, is this machine."""
    return host in {"localhost", "::1", "[::1]"} or re.fullmatch(r"127(?:\.[0-9]{1,3}){3}", host) is not None


def token_url(challenge: Challenge, *, scope: str, plain: bool) -> str:
    """Return the address at which a token answers `challenge`.

    Args:
        challenge: a bearer challenge.
        scope: what is asked for, where the registry does not say.
        plain: whether http:// will do, to this machine alone: the registry itself is here.

    Raises:
        HostError: the realm is no address, carries a login, or would have a login travel unencrypted.

    """
    parts = None
    with contextlib.suppress(ValueError):
        parts = urlsplit(checked(FileUrl, challenge.realm))
    here = plain and parts is not None and parts.scheme == "http" and is_loopback(parts.hostname or "")
    if parts is None or not (here or parts.scheme == "https"):
        raise HostError(
            f"the registry gives out its tokens at {shown(redact(challenge.realm), 80)!r}, which is not an https:// address",
            hint="ask who runs the registry",
        )
    query = [*parse_qsl(parts.query), ("service", challenge.service), ("scope", challenge.scope or scope)]
    return parts._replace(query=urlencode(query, errors="replace"), fragment="").geturl()


def read_token(body: bytes) -> str:
    """Return the token of a token server's answer.

    Raises:
        HostError: it holds none.

    """
    try:
        answer = read_object(body)
    except ValueError as error:
        raise HostError(f"the registry's answer with a token cannot be read: {error}") from None
    token = answer.get("token") or answer.get("access_token")
    if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token) or len(token) > _LONGEST_TOKEN:
        raise HostError("the registry's answer holds no token")
    return token


def read_docker_config(body: bytes, key: str) -> tuple[str | None, str | None]:
    """Return what docker's config.json holds for the registry `key`: the name of its helper, and its Basic login.

    Raises:
        HostError: it is no such file, or what it holds for `key` is no login.

    """
    try:
        config = read_object(body)
        helper = table(config.get("credHelpers")).get(key) or config.get("credsStore")
        if helper is not None and helper != "":
            return checked(SafeName, helper), None
        stored = table(table(config.get("auths")).get(key)).get("auth")
        if stored is None or stored == "":
            return None, None
        if not isinstance(stored, str) or not base64.b64decode(stored, validate=True):
            raise ValueError("the login is not base64")  # noqa: TRY301 - the same message for both
    except binascii.Error:
        raise HostError("docker's logins cannot be read: the login is not base64") from None
    except ValueError as error:
        raise HostError(f"docker's logins cannot be read: {error}") from None
    return None, stored


def read_helper_answer(body: bytes) -> str:
    """Return the login that a credential helper answers, as an HTTP Basic header.

    Raises:
        HostError: it answers something else.

    """
    try:
        entry = read_object(body)
        name, secret = entry.get("Username"), entry.get("Secret")
        if not isinstance(name, str) or not isinstance(secret, str):
            raise ValueError("it holds no Username and Secret")  # noqa: TRY004, TRY301 - the same message for both
        return "Basic " + base64.b64encode(f"{name}:{secret}".encode()).decode()
    except ValueError as error:  # a lone surrogate is one, too
        reason = "it holds text that is none" if isinstance(error, UnicodeError) else error
        raise HostError(f"docker's credential helper gives no login: {reason}") from None
