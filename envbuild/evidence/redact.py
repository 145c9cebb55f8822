"""What a record must not hold: names and addresses of hosts, names of users, paths of the machine."""

import contextlib
import getpass
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
# An address of a host begins with four digits (fe80, 2001): less would be a slice of Python, `[1::2]`.
_IPV6 = re.compile(r"(?<![\w:.])[\da-fA-F]{4}:[\da-fA-F:]*[\da-fA-F](?!\w|:\w)")
# Four numbers with dots are a version, too (cuDNN 9.19.0.56): behind the name of a library, a comparison, or words that
# the suite says of versions.
_BEFORE_VERSION = re.compile(
    r"""(?: (?<![\w/@.-])(?:nvidia|cuda|cudnn|cublas|cufft|curand|cusolver|cusparse|cufile|nccl|nvrtc|nvcc|torch|triton
          |flash|apex|te|transformer|megatron|deepspeed)(?:[-_][\w.+-]*)? (?:\s+(?:is|version))? [\s=<>~!(-]+
        | \b(?:the\ (?:lock|cell)\ says|above|below|versions?|older\ than|newer\ than) \s+
        | \w(?:[=~!<>]=)
        | \bv
        )$""",
    re.IGNORECASE | re.VERBOSE,
)
_AFTER_VERSION = re.compile(r", the (?:lock|cell) says |-(?:py|cp)\d")


def redacted(value: Any, nodes: Sequence[str]) -> Any:
    """Return `value` with each text free of what names this machine, its user or the hosts `nodes`."""
    return _scrub(value, _names(nodes), _addresses(nodes))


def _is_version(found: re.Match[str]) -> bool:
    text = found.string
    if re.match(r":\d|<\d|/\d", text[found.end() :]):  # a port, NCCL's interface, a network
        return False
    return bool(
        _BEFORE_VERSION.search(text[max(0, found.start() - 80) : found.start()])
        or _AFTER_VERSION.match(text, found.end())
    )


def _scrub(value: Any, secrets: Sequence[str], addresses: set[str]) -> Any:
    """Take names and addresses of hosts, names of users, and the paths of this machine, out of every text in `value`."""

    def address(found: re.Match[str]) -> str:
        for text in (found[0], found[0].rpartition(":")[0]):  # a port may follow
            with contextlib.suppress(ValueError):
                read = ipaddress.ip_address(text)
                other = read.is_loopback or read.is_unspecified or (read.version == 4 and _is_version(found))
                return found[0] if other and text not in addresses else "***"
        return found[0]

    if isinstance(value, str):
        for secret in secrets:
            value = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", "***", value)
        value = re.sub(r"/(?:home|Users)/[^/\s'\"]+", "~", value)
        value = _IPV6.sub(address, _IPV4.sub(address, value))
        # A path keeps its last three parts: enough to find the file in a package.
        return re.sub(r"(?<![\w.])(?:/[\w.+@-]+)+((?:/[\w.+@-]+){3})", r"…\1", value)
    if isinstance(value, Mapping):
        return {key: _scrub(item, secrets, addresses) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_scrub(item, secrets, addresses) for item in value]
    return value


def _addresses(nodes: Iterable[str]) -> set[str]:
    """Return the addresses of this machine and of the nodes, as far as they can be known."""
    found: set[str] = set()
    with contextlib.suppress(OSError):  # the kernel's own list: a machine's name need not resolve to all of them
        routes = Path("/proc/net/fib_trie").read_text(encoding="ascii")
        found.update(re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", routes))
    for name in nodes:
        with contextlib.suppress(OSError, UnicodeError):
            found.update(str(each[4][0]) for each in socket.getaddrinfo(name, None))
    return {each for each in found if not each.startswith("127.") and each != "::1"}


def _names(nodes: Iterable[str]) -> list[str]:
    names = set(nodes) | {socket.gethostname(), socket.gethostname().partition(".")[0]}
    with contextlib.suppress(KeyError, OSError):
        names.add(getpass.getuser())
    # "root" and "localhost" name nobody, and stand in many a message for other reasons.
    return sorted({name for name in names if len(name) > 2} - {"root", "localhost"}, key=len, reverse=True)
