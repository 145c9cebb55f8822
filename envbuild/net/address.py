"""Addresses: a URL taken apart, its login, and how it is shown in a message."""

import base64
import contextlib
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from envbuild.settings import Settings, redact
from envbuild.util.names import shown

_PORTS = {"http": 80, "https": 443}


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
