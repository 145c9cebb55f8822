"""What this machine already states for the same things: variables of uv, pip and proxies, pip.conf, apt's sources."""

import configparser
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from envbuild.settings.model import LIST_KEYS
from envbuild.settings.values import is_url
from envbuild.util.bounded import read_file, read_text
from envbuild.util.homes import home_of, xdg_folder

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


def split_value(key: str, text: str) -> str | list[str]:
    """Return the value, or the values, that a text states for a setting."""
    return text.split() if key in LIST_KEYS else text.strip()


def from_machine(env: Mapping[str, str], root: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value, origin) as other tools' configuration states it, strongest first."""
    for key, names in _MACHINE_VARIABLES.items():
        for name in names:
            text = env.get(name, "").strip()
            if not text:
                continue
            if name == "UV_FIND_LINKS":
                text = text.replace(",", " ")
            value = split_value(key, text)
            if name in {"UV_INDEX", "UV_DEFAULT_INDEX"}:  # uv lets an index carry a name: acme=https://…
                unnamed = [re.sub(r"^[\w.-]+=(?=\w+://)", "", item) for item in text.split()]
                value = unnamed if key in LIST_KEYS else unnamed[0]
            yield key, value, name
    yield from _from_pip(env, root)
    yield from _from_apt(root)


def _from_pip(env: Mapping[str, str], root: Path) -> Iterator[tuple[str, Any, str]]:
    home = home_of(env)
    user = xdg_folder(env, "XDG_CONFIG_HOME", ".config")
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
                    yield key, split_value(key, value), str(file)


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
            if key and is_url(uri):
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
