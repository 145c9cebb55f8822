"""The kinds of values that settings have, and what each must be so that a build's files can hold it."""

import contextlib
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from envbuild.util.names import SafeName, checked, is_one_line, shown

_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*", re.ASCII)
# What ends a value, or opens another, where one is written: apt.conf, sources.list, a script, a request's first line.
_UNQUOTABLE = re.compile(r"""[\s"'\\`]""")
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?"
# OpenID Connect Core 1.0, section 2: an issuer has a scheme, a host, and at most a port and a path.
_ISSUER = re.compile(rf"https://{_HOST}(?:/[^?#]*)?")
# What sigstore's authority writes into a certificate: the URI of a workload, an e-mail address, or USER!DOMAIN.
_SUBJECT = re.compile(rf"[A-Za-z][A-Za-z0-9+.-]*://{_HOST}(?:[/?#].*)?|[^@!/]+[@!]{_HOST}")
_BUILDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_IN_PATH = re.compile(r"""["\\]""")


def _writable_value(value: str, odd: re.Pattern[str], what: str) -> str:
    """Return `value` unless a build's files could not hold it; the message shows no part of it, which may be a password."""
    if odd.search(value) or not is_one_line(value):
        raise ValueError(f"it must hold no {what}, no line break and no control character")
    return value


def _url_text(value: str) -> str:
    return _writable_value(value, _UNQUOTABLE, "white space, no quote, no backslash")


def is_url(text: str) -> bool:
    """Return whether a text is an address of a kind that settings may hold."""
    return re.match(r"^(https?|file)://", text) is not None


def _url(value: str) -> str:
    _url_text(value)
    scheme, _, rest = value.partition("://")
    if not is_url(value) or not (rest.strip("/") if scheme == "file" else _has_host(rest)):
        raise ValueError("it must be a URL that starts with https://, http:// or file:// and names a host or a folder")
    return value.rstrip("/")


def _has_host(rest: str) -> bool:
    """Return whether what follows a URL's `://` names a host, after a login where there is one."""
    # A login may hold a slash, and a path an @: either may come first.
    texts = (rest, rest.rpartition("@")[2])
    return any(re.fullmatch(_HOST, re.split(r"[/?#]", text, maxsplit=1)[0]) for text in texts)


def _proxy(value: str) -> str:
    _url_text(value)
    # curl and apt read a bare host:port as an HTTP proxy, so machines carry such values.
    if not _has_host(value.partition("://")[2 if "://" in value else 0]):
        raise ValueError("it names no host, or a port that is no number; leave the setting out for none")
    return value if "://" in value else f"http://{value}"


def _hosts(value: str) -> str:
    # apt and curl take a list with spaces after its commas.
    return _writable_value(value, re.compile(r"""["'\\`]"""), "quote, no backslash")


def _anchored(value: str, info: ValidationInfo) -> str:
    """Return a path as absolute: `~` is the home, anything relative starts at the folder of the settings file."""
    if "://" in value:
        raise ValueError("it must be a path on this machine, not a URL of this kind")
    context = info.context or {}
    home: Path | None = context.get("home")
    if home is not None and (value == "~" or value.startswith("~/")):
        return str(home / value[2:])
    return str(Path(context.get("folder") or Path.cwd()) / value)


def _path_text(value: Any, info: ValidationInfo) -> Any:
    return _anchored(value, info) if isinstance(value, str) else value


def _folder(value: Path) -> Path:
    with contextlib.suppress(OSError):  # a name that no folder can have
        if value.is_dir():
            return value
    raise ValueError(f"there is no folder {shown(str(value))}")


def _file(value: Path) -> Path:
    _writable_value(str(value), _IN_PATH, "quote, no backslash")
    with contextlib.suppress(OSError):
        if value.is_file():
            return value
    raise ValueError(f"there is no file {shown(str(value))}")


def _link(value: str, info: ValidationInfo) -> str:
    if is_url(value):
        _url_text(value)
    if value.startswith("file://") and Path(unquote(urlsplit(value).path)).is_dir():
        value = unquote(urlsplit(value).path)  # so that its wheels are handed to a build
    return value if is_url(value) else str(_folder(Path(_anchored(value, info))))


def _registry(value: str) -> str:
    value = value.rstrip("/")
    if not _REGISTRY.fullmatch(value):
        raise ValueError(
            "it must be a host and an optional path in lower case, without scheme and tag: ghcr.io/acme/envbuild"
        )
    return value


def _identity(value: str) -> str:
    parts = value.split(",", 2)
    if len(parts) != 3 or not all(parts):
        raise ValueError(
            "it must be NAME,ISSUER,IDENTITY: ci,https://token.actions.githubusercontent.com,https://github…"
        )
    name, issuer, subject = parts
    try:
        checked(SafeName, name)
    except ValueError as error:
        raise ValueError(f"the name is none: {error}") from None
    _writable_value(value, _UNQUOTABLE, "white space, no quote, no backslash")
    if not issuer.startswith("https://"):
        raise ValueError("the issuer must start with https://")
    if not _ISSUER.fullmatch(issuer):
        raise ValueError("the issuer must name a host, such as https://token.actions.githubusercontent.com")
    if not _SUBJECT.fullmatch(subject):
        raise ValueError(
            "the identity must be an address with a host, such as https://github.com/…, or an e-mail address"
        )
    return value


def _builder(value: str) -> str:
    if not _BUILDER.fullmatch(value):
        raise ValueError(
            "it must be a builder's name of letters, digits and . _ + - that starts with a letter or digit"
        )
    return value


Url = Annotated[str, AfterValidator(_url)]
Link = Annotated[str, AfterValidator(_link)]
ProxyUrl = Annotated[str, AfterValidator(_proxy)]
ExistingFolder = Annotated[Path, BeforeValidator(_path_text), AfterValidator(_folder)]
ExistingFile = Annotated[Path, BeforeValidator(_path_text), AfterValidator(_file)]
Hosts = Annotated[str, AfterValidator(_hosts)]
Registry = Annotated[str, AfterValidator(_registry)]
Identity = Annotated[str, AfterValidator(_identity)]
"""`NAME,ISSUER,IDENTITY` in one text, so that the environment holds several of them."""
BuilderName = Annotated[str, AfterValidator(_builder)]
"""A builder of buildx, or a context of docker: a word of a command line, so that it is no option."""
OwnPath = Annotated[Path, BeforeValidator(_path_text)]
"""A path that need not exist."""
