"""Python package indexes through the Simple API (PEP 503 and 691): which files a distribution has, with their hashes."""

import hashlib
import html.parser
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


def opener(settings: Settings) -> urllib.request.OpenerDirector:
    """Return an opener that honours the settings' CA bundle and proxies."""
    context = ssl.create_default_context(cafile=str(settings.ca_bundle) if settings.ca_bundle else None)
    proxies = {k: v for k, v in (("http", settings.http_proxy), ("https", settings.https_proxy)) if v}
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if proxies:
        handlers.append(urllib.request.ProxyHandler(proxies))
    return urllib.request.build_opener(*handlers)


def fetch(settings: Settings, url: str, *, accept: str | None = None) -> tuple[bytes, str]:
    """Return the body and content type of `url`.

    Raises:
        HostError: the host cannot be reached; the message names it.
        LockError: the host answered, and not with the file.

    """
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})  # noqa: S310
    host = urllib.parse.urlsplit(url).hostname or url
    try:
        with opener(settings).open(request, timeout=_TIMEOUT_S) as answer:
            return answer.read(), answer.headers.get_content_type()
    except urllib.error.HTTPError as error:
        raise LockError(
            f"{host} answered {error.code} {error.reason}",
            where=redact(url),
            hint="check the version, or the index in your settings",
        ) from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", error)
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
    return tuple(_from_json(body, url) if content_type == _JSON else _from_html(body, url))


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
