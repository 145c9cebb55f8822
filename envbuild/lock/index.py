"""Python package indexes through the Simple API (PEP 503 and 691): which files a distribution has, with their hashes."""

import base64
import hashlib
import html.parser
import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.errors import HostError, LockError
from envbuild.settings import Settings, redact

_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_S = 60


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """One file of a distribution, as an index lists it."""

    filename: str
    url: str
    sha256: str | None
    upload_time: str | None = None


class _Proxies(urllib.request.ProxyHandler):
    """The settings' proxies, but for the hosts of their own `no_proxy`."""

    def __init__(self, proxies: dict[str, str], direct: str) -> None:
        super().__init__(proxies)
        self._direct = {"no": direct}

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:  # noqa: A002 - urllib's name
        if req.host and urllib.request.proxy_bypass_environment(req.host, self._direct):  # type: ignore[attr-defined]
            return None
        return super().proxy_open(req, proxy, type)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects that keep the login on its own host."""

    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        following = super().redirect_request(req, *answer)
        login = req.get_header("Authorization")
        if following and login and (following.type, following.host) == (req.type, req.host):
            following.add_unredirected_header("Authorization", login)
        return following


def opener(settings: Settings | None) -> urllib.request.OpenerDirector:
    """Return an opener that honours the settings' CA bundle and proxies; without settings the environment's proxies."""
    context = ssl.create_default_context()
    if settings and settings.ca_bundle:
        context.load_verify_locations(cafile=settings.ca_bundle)
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context), _Redirects()]
    if settings and (settings.http_proxy or settings.https_proxy):
        proxies = {k: v for k, v in (("http", settings.http_proxy), ("https", settings.https_proxy)) if v}
        handlers.append(_Proxies(proxies, settings.no_proxy or ""))
    return urllib.request.build_opener(*handlers)


def _split_login(url: str) -> tuple[str, str | None]:
    """Return the URL without its login, and that login as an Authorization header."""
    parts = urllib.parse.urlsplit(url)
    login, at, place = parts.netloc.rpartition("@")
    if not at:
        return url, None
    name, _, password = login.partition(":")  # a token alone is a name
    basic = base64.b64encode(urllib.parse.unquote(f"{name}:{password}").encode()).decode()
    return parts._replace(netloc=place).geturl(), f"Basic {basic}"


def request_for(settings: Settings, url: str, **headers: str) -> urllib.request.Request:
    """Return the request of `url`, with the login that it or the settings' index of that host carries."""
    bare, login = _split_login(url)
    host = urllib.parse.urlsplit(bare)[:2]
    for index in (settings.index_url, settings.torch_index, *settings.extra_index_urls):
        of_index, its_login = _split_login(index)
        if login is None and urllib.parse.urlsplit(of_index)[:2] == host:
            login = its_login
    request = urllib.request.Request(bare, headers=headers)  # noqa: S310
    if login:
        request.add_unredirected_header("Authorization", login)  # another host has no right to it
    return request


def fetch(settings: Settings, url: str, *, accept: str | None = None) -> tuple[bytes, str]:
    """Return the body and content type of `url`.

    Raises:
        HostError: the host cannot be reached; the message names it.
        LockError: the host answered, and not with the file.

    """
    host = urllib.parse.urlsplit(url).hostname or url
    try:
        request = request_for(settings, url, **({"Accept": accept} if accept else {}))
        with opener(settings).open(request, timeout=_TIMEOUT_S) as answer:
            return answer.read(), answer.headers.get_content_type()
    except urllib.error.HTTPError as error:
        raise LockError(
            f"{host} answered {error.code} {error.reason}",
            where=redact(url),
            hint="check the version, or the index in your settings",
        ) from error
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise HostError(
            f"{host} cannot be reached: {reason}",
            where=redact(url),
            hint="check the network, or name a mirror, proxy or CA bundle in your settings (docs/settings.md)",
        ) from error


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.hrefs += [value for name, value in attrs if name == "href" and value]


def _from_html(body: bytes, base: str) -> Iterator[IndexFile]:
    parser = _Links()
    parser.feed(body.decode("utf-8", "replace"))
    for href in parser.hrefs:
        url, _, fragment = urllib.parse.urljoin(base, href).partition("#")
        algorithm, _, digest = fragment.partition("=")
        name = urllib.parse.unquote(url.rsplit("/", 1)[-1])
        yield IndexFile(filename=name, url=url, sha256=digest if algorithm == "sha256" else None)


def _from_json(body: bytes, base: str) -> Iterator[IndexFile]:
    answer: dict[str, Any] = json.loads(body)
    for file in answer["files"]:
        yield IndexFile(
            filename=file["filename"],
            url=urllib.parse.urljoin(base, file["url"]),
            sha256=file.get("hashes", {}).get("sha256"),
            upload_time=file.get("upload-time"),
        )


def files_of(settings: Settings, distribution: str, *, index: str | None = None) -> tuple[IndexFile, ...]:
    """Return every file that `index` (the settings' own by default) lists for `distribution`, in its order."""
    url = f"{(index or settings.index_url).rstrip('/')}/{canonicalize_name(distribution)}/"
    body, content_type = fetch(settings, url, accept=f"{_JSON}, text/html;q=0.5")
    base, _ = _split_login(url)  # what a file's URL says goes into the lock
    return tuple(_from_json(body, base) if content_type == _JSON else _from_html(body, base))


def download(settings: Settings, url: str, sha256: str | None, folder: Path) -> tuple[Path, str]:
    """Return the file at `url`, kept under `folder` by its hash, and that hash.

    Raises:
        LockError: its content is not what `sha256` says.

    """
    name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1])
    if sha256:
        kept = folder / sha256 / name
        if kept.is_file() and hashlib.sha256(kept.read_bytes()).hexdigest() == sha256:
            return kept, sha256
    body, _ = fetch(settings, url)
    found = hashlib.sha256(body).hexdigest()
    if sha256 and found != sha256:
        raise LockError(
            f"{name} is not the file that the lock names: its sha256 is {found}, the lock says {sha256}",
            where=redact(url),
            hint="do not use it; ask the index's keepers, or lock again if the change is meant",
        )
    kept = folder / found / name
    kept.parent.mkdir(parents=True, exist_ok=True)
    part = kept.with_suffix(kept.suffix + ".part")
    part.write_bytes(body)
    part.rename(kept)
    return kept, found
