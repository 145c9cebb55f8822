"""Python package indexes through the Simple API (PEP 503 and 691): which files a distribution has, with their hashes."""

import datetime as dt
import html
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.errors import LockError
from envbuild.net.address import host_of, place_of, without_login
from envbuild.net.data import read_object, table
from envbuild.net.download import file_name
from envbuild.net.fetch import fetch
from envbuild.settings import Settings
from envbuild.util.names import FileName, SafeName, Sha256, checked, shown

_JSON = "application/vnd.pypi.simple.v1+json"
_LONGEST_LINK = 8192

# An opening tag up to its `>`; one in a quoted value does not end it, as some indexes write `data-requires-python=">=3.8"`.
# Nothing in it is tried twice, and at any `<` that is not quoted the attempt ends: a page is read in one pass.
_ANCHOR = re.compile(r"""<a(?=[\s/])((?:[^<>"']++|"[^"]*+"|'[^']*+')*+)>""", re.IGNORECASE)
_ATTRIBUTE = re.compile(r"""([^\s"'=<>/]++)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s"'<>]++))?""")


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """One file of a distribution, as an index lists it. Name, address and hash are of the types of `util.names`."""

    filename: str
    url: str
    sha256: str | None
    upload_time: str | None = None
    """Starts with a day, YYYY-MM-DD."""


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What an index lists for one distribution, in its order."""

    files: tuple[IndexFile, ...]
    refused: tuple[str, ...] = field(default=())
    """The entries that were left out, each with the reason, fit for a terminal."""

    def __iter__(self) -> Iterator[IndexFile]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def why_not(self, *parts: str) -> str | None:
        """Return the first refused entry that names any of `parts`, with its reason."""
        return next((text for text in self.refused if any(part in text for part in parts)), None)


def _entry(name: object, url: object, digest: object, upload_time: object, base: str) -> IndexFile:
    """Return the entry; raises ValueError for one that cannot be used."""
    if not isinstance(url, str) or len(url) > _LONGEST_LINK:
        raise ValueError("its address is not text, or too long")
    full = urllib.parse.urljoin(base, url)
    ours, theirs = base.partition("://")[0], full.partition("://")[0]
    if theirs == "file" and ours != "file":
        raise ValueError("an index of another host names a file of this machine")
    of_url = file_name(full)
    filename = checked(FileName, of_url if name is None else name)
    if digest is not None:
        digest = checked(Sha256, digest.lower() if isinstance(digest, str) else digest)
    return IndexFile(filename=filename, url=full, sha256=digest, upload_time=_day(upload_time))


def _day(stated: object) -> str | None:
    if not isinstance(stated, str):
        return None
    try:
        dt.date.fromisoformat(stated[:10])
    except ValueError:
        return None
    return stated[:40]


def _listing(entries: Iterable[tuple[object, object, object, object]], base: str) -> Listing:
    """Return the entries (name, address, sha256, time of upload) that can be used, and what is wrong with the others."""
    files: list[IndexFile] = []
    refused: list[str] = []
    for name, url, digest, upload_time in entries:
        try:
            files.append(_entry(name, url, digest, upload_time, base))
        except ValueError as error:
            label = name if isinstance(name, str) else url if isinstance(url, str) else "an entry"
            if len(refused) < 1000:
                refused.append(f"{place_of(label[-300:])}: {shown(str(error))}")
    return Listing(files=tuple(files), refused=tuple(refused))


def _html_entries(text: str) -> Iterator[tuple[object, object, object, object]]:
    for anchor in _ANCHOR.finditer(_without_comments(text)):
        for attribute in _ATTRIBUTE.finditer(anchor[1]):
            if attribute[1].lower() == "href" and attribute[2]:
                value = attribute[2][1:-1] if attribute[2][0] in "\"'" else attribute[2]
                try:
                    href = html.unescape(value[: _LONGEST_LINK + 1]).strip()
                except ValueError:  # a character reference of 5000 digits
                    href = "\0"
                link, _, fragment = href.partition("#")
                algorithm, _, digest = fragment.partition("=")
                yield None, link, digest if algorithm == "sha256" else None, None


def _without_comments(text: str) -> str:
    kept, at = [], 0
    while (start := text.find("<!--", at)) >= 0:
        kept.append(text[at:start])
        end = text.find("-->", start + 4)
        if end < 0:
            return "".join(kept)
        at = end + 3
    return "".join([*kept, text[at:]])


def _json_entries(files: list[Any]) -> Iterator[tuple[object, object, object, object]]:
    for file in files:
        entry = table(file)
        # PEP 691 asks for the name; one that is no text is not made good by the address
        name = entry.get("filename")
        yield (
            "" if name is None else name,
            entry.get("url"),
            table(entry.get("hashes")).get("sha256"),
            entry.get("upload-time"),
        )


def read_page(body: bytes, content_type: str, base: str) -> Listing:
    """Return what a page of an index lists. Never fetches anything.

    Args:
        body: the page.
        content_type: the JSON of PEP 691, or anything else for HTML.
        base: where the page was read from, without a login; addresses on it are relative to that.

    Raises:
        LockError: it is no such page. An entry that cannot be used is left out and listed in `refused`.

    """
    if content_type != _JSON:
        return _listing(_html_entries(body.decode("utf-8", "replace")), base)
    try:
        files = read_object(body).get("files")
        if not isinstance(files, list):
            raise ValueError("it holds no list of files")  # noqa: TRY004, TRY301 - reported below
    except ValueError as error:
        raise LockError(
            f"the answer of {host_of(base)} is not a page of a package index: {error}",
            where=place_of(base),
            hint="check the index in your settings, or ask who runs it",
        ) from None
    return _listing(_json_entries(files), base)


def files_of(settings: Settings, distribution: str, *, index: str | None = None) -> Listing:
    """Return every file that `index` (the settings' own by default) lists for `distribution`.

    Raises:
        HostError: the index cannot be reached.
        LockError: it has no such distribution, or its answer is no page of an index.

    """
    try:
        name = checked(SafeName, canonicalize_name(distribution))
    except ValueError as error:
        raise LockError(f"no distribution has such a name: {error}", hint="correct the lock or the stack") from None
    url = f"{(index or settings.index_url).rstrip('/')}/{name}/"
    body, content_type = fetch(settings, url, accept=f"{_JSON}, text/html;q=0.5")
    return read_page(body, content_type, without_login(url))  # what a file's URL says goes into the lock
