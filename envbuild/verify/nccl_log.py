"""What NCCL says of itself under NCCL_DEBUG=INFO: its version, the network that it chose, the links of its channels, and why.

The lines are those of NCCL's sources from 2.14 to 2.29 (`src/net.cc`, later `src/plugin/net.cc` and `plugin_open.cc`;
`src/init.cc`; `src/transport/`; `src/misc/ibvwrap.cc`) and of AWS' plugin for EFA (aws-ofi-nccl, `src/nccl_ofi_net.cpp`).
A log is written in an untrusted container: whatever of it is shown goes through `shown`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from envbuild.util.names import shown

_LINE = re.compile(r"NCCL (?:INFO|WARN) (.*)")
_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"Using network (.+)")
_LINK = re.compile(r"\bvia ((?:P2P|SHM|NET|COLLNET)/.+)")
_PLUGIN_PATH = re.compile(r"(?:Plugin Path : |Successfully loaded external network plugin )(/\S+)")
_PLUGIN = re.compile(r"(?:Loaded net plugin (.+?) \((v\d+)\)|P2P plugin (\S+))")
_PLUGIN_VERSION = re.compile(r"NET/OFI Initializing (aws-ofi-nccl \S+)")
_SET = re.compile(r"(NCCL_\w+) set (?:by environment )?to (.+)")
_LINKS = 64
_LINES = 200_000
_TEXT = 160
_WORDS = 1000
_PLUGIN_FILE = "libnccl-net.so"

SOCKETS = "Socket"
"""NCCL's name of its network of TCP sockets."""

# What a line means, in the order in which one is the cause of the next. Of each, the first line that matches is quoted.
_NOT_FOUND = (
    re.compile(r"NET/Plugin ?: Could not find: ?(?P<name>[^.]*\.so(?: \S+\.so)*)"),
    re.compile(r"NET/Plugin ?: .*No plugin found \((?P<name>[^)]*)\)"),
    re.compile(r"NET/Plugin ?: Plugin load \((?P<name>[^)]*)\) returned 2 "),
    re.compile(r"NET/Plugin ?: No plugin found(?P<name>)"),
)
_NOT_LOADED = (
    re.compile(r"NET/Plugin ?: (?P<name>[^ :=]+\.so[^ :]*): (?P<why>.+)"),
    re.compile(r"NET/Plugin ?: Plugin load (?:\((?P<name>[^)]*)\) )?returned (?!2 )\d+ : (?P<why>.+)"),
)
_OTHER_VERSION = (
    re.compile(r"NET/Plugin ?: (?P<why>Failed to find ncclNetPlugin symbol .+)"),
    re.compile(r"(?P<why>External network plugin \S+ is unsupported.*)"),
)
_NOT_STARTED = re.compile(r"(?P<why>Failed to initialize NET plugin .+)")
_OFI = re.compile(r"NET/OFI (?P<why>.*(?:[Ff]ail|[Cc]ould ?n.t|[Nn]o eligible|not found|error|requires).*)")
_NO_VERBS = re.compile(r"Failed to open libibverbs\.so")
_NO_ADAPTER = re.compile(r"NET/IB : No device found")
_ADAPTER = re.compile(r"NET/IB : (?P<why>Unable to (?:open|query) device \S+)")


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """What the NCCL of one process reports."""

    version: str = ""
    networks: tuple[str, ...] = ()
    """Networks that communicators use: `IB`, `Socket`, `Libfabric`, in first-seen order."""
    links: Mapping[str, int] = field(default_factory=dict)
    """Channels by what they go over: `P2P/CUMEM`, `SHM/direct`, `NET/IB/GDRDMA`."""
    plugin: str = ""
    """The network plugin that was loaded, and the version of its interface: `Libfabric (v9)`."""
    plugin_path: str = ""
    plugin_version: str = ""
    set_by_environment: Mapping[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    """The lines that may say why a network was not taken."""


def read_log(text: str) -> NcclLog:
    """Read the log of one process; lines that are not NCCL's are passed over."""
    version = plugin = path = plugin_version = ""
    networks: dict[str, None] = {}
    links: dict[str, int] = {}
    variables: dict[str, str] = {}
    kept: dict[str, None] = {}
    for line in text.splitlines()[:_LINES]:
        if not version and (found := _VERSION.search(line[:_WORDS])):
            version = shown(found[1], 40)
        message = _LINE.search(line)
        if message is None:
            continue
        words = message[1][:_WORDS].strip()  # some of the patterns below take the square of its length
        if found := _NETWORK.match(words):
            networks[shown(found[1].strip(), 60)] = None
        elif found := _LINK.search(words):
            name = _link(found[1])
            if name in links or len(links) < _LINKS:
                links[name] = links.get(name, 0) + 1
        elif found := _SET.match(words):
            variables[shown(found[1], 60)] = shown(found[2].strip().rstrip("."), _TEXT)
        else:
            if found := _PLUGIN_PATH.search(words):
                path = shown(found[1].rstrip("."), _TEXT)
            if found := _PLUGIN.search(words):
                plugin = shown(f"{found[1]} ({found[2]})" if found[1] else found[3], 80)
            if found := _PLUGIN_VERSION.search(words):
                plugin_version = shown(found[1], 80)
            if words.startswith(("NET/", "Failed to ", "External ", "Plugin ")) and len(kept) < 400:
                kept[words] = None
    return NcclLog(
        version=version,
        networks=tuple(networks)[:8],
        links=links,
        plugin=plugin,
        plugin_path=path,
        plugin_version=plugin_version,
        set_by_environment=dict(list(variables.items())[:64]),
        lines=tuple(kept),
    )


def _link(text: str) -> str:
    """Return what a channel goes over, without the number of the adapter or the peer."""
    parts = [part for part in text.strip().split("/") if not re.match(r"\d", part)]
    return shown("/".join(parts), 60)


def why_sockets(
    log: NcclLog, *, efa: bool, verbs: Iterable[str], variables: Mapping[str, str], library_path: str
) -> str:
    """Return why NCCL took sockets on a machine that has InfiniBand or EFA, as far as its log and the process show.

    Args:
        log: of the process.
        efa: whether the adapters are EFA's, which NCCL uses through a plugin alone.
        verbs: names in the process' /dev/infiniband.
        variables: NCCL's variables in the process' environment.
        library_path: LD_LIBRARY_PATH of the process.

    """
    set_here = {**variables, **log.set_by_environment}
    for name, values in (("NCCL_NET", {"socket"}), ("NCCL_IB_DISABLE", {"1"}), ("NCCL_NET_PLUGIN", {"none"})):
        value = set_here.get(name, "")
        if value.lower() in values and (name != "NCCL_IB_DISABLE" or not efa) and (name != "NCCL_NET_PLUGIN" or efa):
            return f"{name}={value} is set"
    plugin = _of_plugin(log, library_path)
    if efa:
        return plugin or "NCCL says nothing of its network plugin"
    has_device = any(name.startswith("uverbs") for name in verbs)
    if _first(log, _NO_VERBS):
        return "libibverbs.so is not found in the image"
    if found := _first(log, _ADAPTER):
        return shown(f"NET/IB: {found['why']}", _TEXT)
    if not has_device:
        return "the process has no /dev/infiniband/uverbs*: the container got no device of the adapter"
    if _first(log, _NO_ADAPTER):
        filtered = set_here.get("NCCL_IB_HCA")
        return "NET/IB finds no device" + (f": NCCL_IB_HCA={shown(filtered, 80)} is set" if filtered else "")
    return plugin or "NCCL does not say why"


def _of_plugin(log: NcclLog, library_path: str) -> str:
    """Return what is wrong with the network plugin: not found, not loadable, of another version, or not starting."""
    where = "".join(
        f", {text}"
        for text in (
            log.plugin_path and f"path {log.plugin_path}",
            log.plugin_version and f"version {log.plugin_version}",
        )
        if text
    )
    if found := _first(log, *_NOT_LOADED):
        name, why = found["name"] or _PLUGIN_FILE, found["why"].strip().rstrip(".")
        if "nccl-net" not in name:  # a library that the plugin needs; from 2.22 to 2.25 the plugin is not named
            name, why = _PLUGIN_FILE, f"{name}: {why}"
        if "No such file" not in why or not why.startswith(("cannot open", name)):
            return shown(f"plugin {name} does not load: {why}", 2 * _TEXT) + where
    if found := _first(log, *_OTHER_VERSION):
        return shown(f"plugin of another version: {found['why'].strip()}", 2 * _TEXT) + where
    started = _first(log, _NOT_STARTED)
    if started or (log.plugin and _first(log, _OFI)):
        cause = _first(log, _OFI)
        text = (started or {"why": f"plugin {log.plugin} does not start"})["why"]
        return shown(text + (f": {cause['why']}" if cause else ""), 2 * _TEXT) + where
    if found := _first(log, *_NOT_FOUND) or _first(log, *_NOT_LOADED):
        name = found["name"].strip() or _PLUGIN_FILE
        looked = f" (LD_LIBRARY_PATH={library_path})" if library_path else " (LD_LIBRARY_PATH is not set)"
        return shown(f"plugin not found: {name}{looked}", 2 * _TEXT)
    return ""


def _first(log: NcclLog, *patterns: re.Pattern[str]) -> Mapping[str, str] | None:
    """Return the first line that one of the patterns matches, and its groups; those that matched nothing are empty."""
    for pattern in patterns:
        for line in log.lines:
            if found := pattern.search(line):
                return {"line": line} | {name: value or "" for name, value in found.groupdict().items()}
    return None
