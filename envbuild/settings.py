"""The one settings file and its environment.

A value comes from the first of: the environment (`ENVBUILD_<KEY>`), the settings file, what this machine already says for
the same thing (uv's and pip's configuration, proxy variables, apt's sources), the default. `Settings.origin` tells which.
"""

import configparser
import contextlib
import difflib
import os
import pwd
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
)

from envbuild.errors import DataError, HostError
from envbuild.util.bounded import read_file, read_text
from envbuild.util.names import is_one_line, shown
from envbuild.util.text import redact
from envbuild.util.toml import read_toml

__all__ = ["Settings", "config_path", "load_settings", "redact"]

_REGISTRY = re.compile(r"[a-z0-9][a-z0-9.-]*(:\d+)?(/[a-z0-9][a-z0-9._-]*)*", re.ASCII)


# What ends a value, or opens another, where one is written: apt.conf, sources.list, a script, a request's first line.
_UNQUOTABLE = re.compile(r"""[\s"'\\`]""")
_IN_PATH = re.compile(r"""["\\]""")


def _writable_value(value: str, odd: re.Pattern[str], what: str) -> str:
    """Return `value` unless a build's files could not hold it; the message shows no part of it, which may be a password."""
    if odd.search(value) or not is_one_line(value):
        raise ValueError(f"it must hold no {what}, no line break and no control character")
    return value


def _url_text(value: str) -> str:
    return _writable_value(value, _UNQUOTABLE, "white space, no quote, no backslash")


def _is_url(text: str) -> bool:
    return re.match(r"^(https?|file)://", text) is not None


def _url(value: str) -> str:
    _url_text(value)
    if not _is_url(value) or not value.partition("://")[2].strip("/"):
        raise ValueError("it must be a URL that starts with https://, http:// or file:// and names a host or a folder")
    return value.rstrip("/")


def _proxy(value: str) -> str:
    _url_text(value)
    # curl and apt read a bare host:port as an HTTP proxy, so machines carry such values.
    if not value.partition("://")[2 if "://" in value else 0].strip("/"):
        raise ValueError("it names no host; leave the setting out for none")
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
    if _is_url(value):
        _url_text(value)
    if value.startswith("file://") and Path(unquote(urlsplit(value).path)).is_dir():
        value = unquote(urlsplit(value).path)  # so that its wheels are handed to a build
    return value if _is_url(value) else str(_folder(Path(_anchored(value, info))))


def _registry(value: str) -> str:
    value = value.rstrip("/")
    if not _REGISTRY.fullmatch(value):
        raise ValueError(
            "it must be a host and an optional path in lower case, without scheme and tag: ghcr.io/acme/envbuild"
        )
    return value


Url = Annotated[str, AfterValidator(_url)]
Link = Annotated[str, AfterValidator(_link)]
ProxyUrl = Annotated[str, AfterValidator(_proxy)]
ExistingFolder = Annotated[Path, BeforeValidator(_path_text), AfterValidator(_folder)]
ExistingFile = Annotated[Path, BeforeValidator(_path_text), AfterValidator(_file)]


class Settings(BaseModel):
    """Where this machine takes things from and how much of it a build may use. Made by `load_settings`.

    Printing it, or `redacted`, never shows a credential; the attributes do hold them, for the tools that need them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    index_url: Url = Field("https://pypi.org/simple", description="Python package index (Simple API).")
    extra_index_urls: tuple[Url, ...] = Field((), description="Further package indexes, asked beside `index_url`.")
    torch_index: Url = Field(
        "https://download.pytorch.org/whl",
        description="Base of PyTorch's per-variant indexes; `/cu126`, `/cpu` and so on are appended.",
    )
    find_links: tuple[Link, ...] = Field((), description="Folders or URLs of pages that hold wheels and sdists.")
    debian_mirror: Url = Field("http://deb.debian.org/debian", description="Debian archive.")
    debian_security_mirror: Url = Field("http://deb.debian.org/debian-security", description="Debian security archive.")
    ubuntu_mirror: Url = Field("http://archive.ubuntu.com/ubuntu", description="Ubuntu archive.")
    http_proxy: ProxyUrl | None = Field(None, description="Proxy for http:// addresses.")
    https_proxy: ProxyUrl | None = Field(None, description="Proxy for https:// addresses.")
    no_proxy: Annotated[str, AfterValidator(_hosts)] | None = Field(
        None, description="Hosts that are reached without a proxy, separated by commas."
    )
    ca_bundle: ExistingFile | None = Field(
        None,
        description="PEM file of the certificates to trust, given to builds as a secret and never stored in an image.",
    )
    registry: Annotated[str, AfterValidator(_registry)] | None = Field(
        None, description="Prefix that prebuilt images are pulled from and pushed to, such as `ghcr.io/acme/envbuild`."
    )
    builder: str | None = Field(None, min_length=1, description="Name of the buildx builder to build with.")
    engine_host: str | None = Field(
        None,
        min_length=1,
        description="Address of the Docker engine, such as `unix:///run/docker.sock` or `ssh://me@host`.",
    )
    sources: ExistingFolder | None = Field(
        None, description="Folder of source trees or archives by commit, for a site that cannot reach the upstreams."
    )
    git_protocols: tuple[Literal["https", "ssh", "file"], ...] = Field(
        (), description="What source trees may be fetched by beside https: `ssh`, `file`."
    )
    debs: ExistingFolder | None = Field(
        None,
        description="Folder of `.deb` files, for a site without a package mirror; where it has all that a lock names and a stage lacks, no archive is asked.",
    )
    jobs: int | None = Field(
        None,
        ge=1,
        description="Compile jobs at once; chosen from the engine's cores and memory and the package's need when not set.",
    )
    memory_gib: float | None = Field(
        None, gt=0, description="Memory in GiB that a build may use; all of it when not set."
    )
    cache_dir: Annotated[Path, BeforeValidator(_path_text)] = Field(
        description="Folder of downloads, source trees and logs. Falls back to a folder under `$TMPDIR` when the home is "
        "missing or read-only."
    )

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    def origin(self, key: str) -> str:
        """Return where the value of `key` came from: a variable's name, a file's path, or `default`."""
        return self._origins.get(key, "default")

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know: a value that was passed over and why, a cache that had to move."""
        return self._notices

    @property
    def engine_is_here(self) -> bool:
        """Whether the Docker engine runs on this host, so that it sees this host's folders."""
        return (
            self.engine_host is None
            or re.match(r"unix://|\w+://(\w+@)?(localhost|127\.|\[::1\])", self.engine_host) is not None
        )

    @property
    def engine_command(self) -> tuple[str, ...]:
        """The start of every docker command line: the client, and the engine where one is set."""
        return ("docker", "--host", self.engine_host) if self.engine_host else ("docker",)

    def redacted(self) -> dict[str, Any]:
        """Return every setting as JSON values, URLs without their credentials."""

        def clean(value: Any) -> Any:
            if isinstance(value, list):
                return [clean(item) for item in value]
            return redact(value) if isinstance(value, str) else value

        return {key: clean(value) for key, value in self.model_dump(mode="json").items()}

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """Yield what `repr` shows: the redacted view."""
        yield from self.redacted().items()


LIST_KEYS = frozenset({"extra_index_urls", "find_links", "git_protocols"})
"""Settings that hold several values; in the environment they are separated by whitespace."""

_NOT_SETTINGS = frozenset(
    # the file of the settings, what shows tracebacks, and what the shell rendering reads
    {"ENVBUILD_CONFIG", "ENVBUILD_DEBUG"}
    | {f"ENVBUILD_{name}" for name in ("ADOPT_TORCH", "OFFLINE", "PREFIX", "PYTHON", "UV", "WHEELS")}
)

# Each setting -> the variables that other tools read the same thing from, strongest first.
_MACHINE_VARIABLES: dict[str, tuple[str, ...]] = {
    "index_url": ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"),
    "extra_index_urls": ("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"),
    "find_links": ("UV_FIND_LINKS", "PIP_FIND_LINKS"),
    "ca_bundle": ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"),
    "http_proxy": ("http_proxy", "HTTP_PROXY"),
    "https_proxy": ("https_proxy", "HTTPS_PROXY"),
    "no_proxy": ("no_proxy", "NO_PROXY"),
    "builder": ("BUILDX_BUILDER",),
    "engine_host": ("DOCKER_HOST",),
}
_PIP_KEYS = {
    "index_url": "index-url",
    "extra_index_urls": "extra-index-url",
    "find_links": "find-links",
    "ca_bundle": "cert",
}


def config_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the path of the settings file, whether it exists or not; None when this user has no home to hold one."""
    env = os.environ if environ is None else environ
    if env.get("ENVBUILD_CONFIG"):
        return Path(env["ENVBUILD_CONFIG"])
    folder = _xdg(env, "XDG_CONFIG_HOME", ".config")
    return folder / "envbuild" / "config.toml" if folder else None


def load_settings(*, environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> Settings:
    """Read the settings of this user on this machine. Reads files, touches no network.

    It writes nothing, but for the cache's folder under `$TMPDIR` where it falls back to that.

    Args:
        environ: the environment; this process's own by default.
        root: the folder that `/etc` is looked for in.

    Raises:
        DataError: the settings file or an `ENVBUILD_` variable holds an unknown key or a value that cannot be.
        HostError: the `cache_dir` that was set cannot be written.

    """
    env = os.environ if environ is None else environ
    notices: list[str] = []
    chosen: dict[str, tuple[Any, str]] = {}

    path = config_path(env)
    if path is not None and (env.get("ENVBUILD_CONFIG") or _exists(path)):
        chosen |= {key: (value, str(path)) for key, value in _from_file(path, env).items()}
    chosen |= _from_environment(env, notices)

    for key, value, origin in _from_machine(env, root):
        if key in chosen:
            continue
        try:
            chosen[key] = (_validated({key: value}, env)[key], origin)
        except ValidationError as error:
            notices.append(f"{key}: passing over the value of {origin}: {_message(error)}")

    if "cache_dir" in chosen:
        value, origin = chosen["cache_dir"]
        if not _writable(value):
            raise HostError(
                f"the cache folder {value} cannot be written",
                where=f"cache_dir from {origin}",
                hint="choose a folder that this user can write, or remove the setting",
            )
    else:
        chosen["cache_dir"] = (_default_cache(env, notices), "default")

    settings = Settings.model_validate({key: value for key, (value, _) in chosen.items()})
    settings._origins.update({key: origin for key, (_, origin) in chosen.items()})  # noqa: SLF001
    settings._notices = tuple(notices)  # noqa: SLF001
    return settings


def _validated(values: Mapping[str, Any], env: Mapping[str, str], folder: Path | None = None) -> dict[str, Any]:
    """Return `values` as the model reads them; raises pydantic's ValidationError."""
    context = {"home": _home(env), "folder": folder}
    model = Settings.model_validate({"cache_dir": "/", **values}, context=context)
    return {key: getattr(model, key) for key in values}


def _message(error: ValidationError) -> str:
    # Without the input that pydantic would show: it may hold a password.
    first = error.errors(include_url=False, include_input=False)[0]
    return redact(first["msg"].removeprefix("Value error, "))


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key[:60], Settings.model_fields, n=1)
    return f"did you mean {close[0]}? " if close else ""


def _from_file(path: Path, env: Mapping[str, str]) -> dict[str, Any]:
    raw = read_toml(path)
    for key in raw:
        if key not in Settings.model_fields:
            raise DataError(
                f"{shown(key, 60)!r} is not a setting",
                where=str(path),
                hint=f"{_nearest(key)}docs/settings.md lists the settings: {', '.join(Settings.model_fields)}",
            )
    try:
        return _validated(raw, env, path.absolute().parent)
    except ValidationError as error:
        key = str(error.errors(include_input=False)[0]["loc"][0])
        raise DataError(f"{key}: {_message(error)}", where=str(path), hint=f"correct {key} in that file") from None


def _from_environment(env: Mapping[str, str], notices: list[str]) -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name, text in sorted(env.items()):
        if not name.startswith("ENVBUILD_") or name in _NOT_SETTINGS or not text.strip():
            continue
        key = name.removeprefix("ENVBUILD_").lower()
        if key not in Settings.model_fields:
            # Not an error: a site may use such a name for something of its own.
            notices.append(f"{name} is not a setting: {_nearest(key)}docs/settings.md lists them")
            continue
        try:
            found[key] = (_validated({key: _split(key, text)}, env)[key], name)
        except ValidationError as error:
            raise DataError(f"{key}: {_message(error)}", where=name, hint=f"correct or unset {name}") from None
    return found


def _split(key: str, text: str) -> str | list[str]:
    return text.split() if key in LIST_KEYS else text.strip()


def _from_machine(env: Mapping[str, str], root: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value, origin) as other tools' configuration states it, strongest first."""
    for key, names in _MACHINE_VARIABLES.items():
        for name in names:
            text = env.get(name, "").strip()
            if not text:
                continue
            if name == "UV_FIND_LINKS":
                text = text.replace(",", " ")
            value = _split(key, text)
            if name in {"UV_INDEX", "UV_DEFAULT_INDEX"}:  # uv lets an index carry a name: acme=https://…
                unnamed = [re.sub(r"^[\w.-]+=(?=\w+://)", "", item) for item in text.split()]
                value = unnamed if key in LIST_KEYS else unnamed[0]
            yield key, value, name
    yield from _from_pip(env, root)
    yield from _from_apt(root)


def _from_pip(env: Mapping[str, str], root: Path) -> Iterator[tuple[str, Any, str]]:
    home = _home(env)
    user = _xdg(env, "XDG_CONFIG_HOME", ".config")
    explicit = env.get("PIP_CONFIG_FILE")
    # pip's own order, strongest first: PIP_CONFIG_FILE, the virtual environment, the user, the machine.
    files = [Path(explicit)] if explicit else []
    if explicit != os.devnull:
        files += [
            Path(sys.prefix) / "pip.conf",
            *([user / "pip" / "pip.conf"] if user else []),
            *([home / ".pip" / "pip.conf"] if home else []),
            root / "etc" / "pip.conf",
            root / "etc" / "xdg" / "pip" / "pip.conf",
        ]
    for file in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(read_text(file))
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue  # absent, or so broken that pip itself would not run
        for key, option in _PIP_KEYS.items():
            for section in ("install", "global"):  # the command's own section wins, as in pip
                value = parser.get(section, option, fallback=None) or parser.get(
                    section, option.replace("-", "_"), fallback=None
                )
                if value:
                    yield key, _split(key, value), str(file)


def _from_apt(root: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield the mirrors that this machine takes its own release from, when it is Debian or Ubuntu."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', _read(root / "etc" / "os-release"), re.MULTILINE))
    codename = release.get("VERSION_CODENAME")
    if release.get("ID") not in {"debian", "ubuntu"} or not codename:
        return
    suites = (
        {codename: "debian_mirror", f"{codename}-security": "debian_security_mirror"}
        if release["ID"] == "debian"
        else {codename: "ubuntu_mirror"}
    )
    folder = root / "etc" / "apt"
    try:
        parts = sorted((folder / "sources.list.d").iterdir())
    except OSError:
        parts = []
    for file in (folder / "sources.list", *parts):
        if file.suffix == ".sources":
            entries = _deb822(_read(file))
        elif file.suffix == ".list":
            entries = _one_line(_read(file))
        else:
            continue
        for uri, suite in entries:
            key = suites.get(suite)
            if uri.startswith("mirror+file:"):  # Debian's cloud images: a file of mirrors, the first one preferred
                listed = _read(root / uri.removeprefix("mirror+file:").lstrip("/")).split()[:1]
                uri = listed[0] if listed else ""  # noqa: PLW2901
            if key and _is_url(uri):
                yield key, uri, str(file)


def _deb822(text: str) -> Iterator[tuple[str, str]]:
    text = re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)
    for stanza in re.split(r"\n\s*\n", text):
        fields = {
            name.lower(): value.split()
            for name, value in re.findall(r"^([\w-]+):((?:.*)(?:\n[ \t].*)*)", stanza, re.MULTILINE)
        }
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            yield from ((uri, suite) for uri in fields.get("uris", []) for suite in fields.get("suites", []))


def _one_line(text: str) -> Iterator[tuple[str, str]]:
    for match in re.finditer(r"^[ \t]*deb[ \t]+(?:\[[^\]\n]*\][ \t]+)?(\S+)[ \t]+(\S+)", text, re.MULTILINE):
        yield match.group(1), match.group(2)


def _read(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _exists(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # a home that this user may not even look into
        return False


def _home(env: Mapping[str, str]) -> Path | None:
    text = env.get("HOME")
    if not text:
        try:
            text = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a container run under a number that no account has
            return None
    return Path(text) if Path(text).is_absolute() else None


def _xdg(env: Mapping[str, str], variable: str, below_home: str) -> Path | None:
    text = env.get(variable, "")
    if Path(text).is_absolute():  # the XDG specification has relative values ignored
        return Path(text)
    home = _home(env)
    return home / below_home if home else None


def _writable(folder: Path) -> bool:
    """Return whether `folder` can be written, or be made where it does not exist. Makes nothing."""
    for candidate in (folder, *folder.parents):
        if _exists(candidate):
            return candidate.is_dir() and os.access(candidate, os.W_OK | os.X_OK)
    return False


def _is_ours_alone(folder: Path) -> bool:
    """Make `folder` unless it is there; return whether it is a folder, no link, of this user, that no other may write to."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return False
        os.fchmod(handle, 0o700)  # others need not read it either
    finally:
        os.close(handle)
    return True


def _default_cache(env: Mapping[str, str], notices: list[str]) -> Path:
    base = _xdg(env, "XDG_CACHE_HOME", ".cache")
    if base is not None and _writable(base / "envbuild"):
        return base / "envbuild"
    place = Path(env.get("TMPDIR") or tempfile.gettempdir())
    folder = place / f"envbuild-{os.getuid()}"
    if not _is_ours_alone(folder):
        # Somebody else may have made it, in a folder that everybody can write: what it holds cannot be trusted.
        folder = Path(tempfile.mkdtemp(prefix="envbuild-", dir=place))
    reason = f"{base / 'envbuild'} cannot be written" if base else "this user has no home"
    notices.append(f"{reason}: the cache is {folder} for now; set cache_dir or ENVBUILD_CACHE_DIR to a lasting folder")
    return folder
