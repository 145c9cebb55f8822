"""What is wrong with one command whatever the versions, seen from its words: kinds of matrices/recipes/findings.toml."""

import re
from collections.abc import Iterator, Sequence

_PACKAGE_MANAGERS = {"apt-get", "apt", "dnf", "microdnf", "yum", "zypper"}
_ALONE = re.compile(
    r"-[ditqP]+|--(?:detach|init|interactive|no-healthcheck|oom-kill-disable|privileged|publish-all|quiet|read-only|rm|tty)"
)
"""Options of `docker run` that take no value (docker-run(1))."""
_PORT = re.compile(r"(?:[^\s/]*:[\d$]|\d).*", re.DOTALL)
_CPUS = re.compile(r"--cpus-per-(?:rank|proc)\b")
_USER_PATH = re.compile(
    r"(?:/home/(?!user\b)[a-z][a-z0-9_-]{0,40}/|~/\.pyenv/versions/)\S{0,200}(?:python|pyenv|conda)"
)
_HOSTFILE = re.compile(r"(?:[\w.-]*[._-])?hostfile(?:\.txt)?", re.ASCII)
_KEY = re.compile(r"id_(?:rsa|ed25519|ecdsa)|authorized_keys")
_NO_NEW_KEY = re.compile(r"-[RFlHy]")
"""Options with which ssh-keygen makes no key (ssh-keygen(1))."""


def in_command(words: Sequence[str], *, image: bool) -> Iterator[tuple[str, int]]:
    """Yield the kinds of finding of a command, each with the number of the word that shows it.

    Args:
        words: the command and its arguments, without quotes, `sudo` and assignments before it.
        image: whether it runs as an image is built.

    """
    if words[0] in _PACKAGE_MANAGERS and "install" in words:
        first = words.index("install")
        found = (n for n in range(first, len(words)) if words[n] in {"nvidia-docker", "nvidia-docker2"})
        yield from (("recipe-nvidia-docker2", n) for n in found)
    elif words[0] == "nvidia-docker":
        yield "recipe-nvidia-docker2", 0
    if words[0] in {"docker", "nvidia-docker", "podman"} and words[1:2] == ["run"]:
        port = _published(words)
        if port is not None:
            yield "recipe-port-with-host-network", port
    yield from in_words(words)
    if image and words[0] == "ssh-keygen" and not (words[1:] and _NO_NEW_KEY.match(words[1])):
        yield "recipe-key-in-image", 0


def in_words(words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the kinds of finding that a word shows in whatever command it stands."""
    for number, word in enumerate(words):
        if _CPUS.match(word):
            yield "recipe-cpus-per-rank", number
        elif word == "torch.distributed.launch" and number and words[number - 1] == "-m":
            yield "recipe-local-rank-flag", number
        elif "/" in word and _USER_PATH.search(word):
            yield "recipe-user-path", number


def in_copy(places: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the kinds of finding of a COPY or an ADD, each with the number of the place that shows it."""
    names = [place.rstrip("/").rpartition("/")[2] for place in places]
    for rule, pattern in (("recipe-hostfile-in-image", _HOSTFILE), ("recipe-key-in-image", _KEY)):
        if (first := next((n for n, name in enumerate(names) if pattern.fullmatch(name)), None)) is not None:
            yield rule, first


def _published(words: Sequence[str]) -> int | None:
    """Return the word that publishes a port where the container shares the host's network, or None."""
    host, port, place = False, None, 2
    # the options end where the image's name stands; what follows is the program's
    while place < len(words) and words[place].startswith("-"):
        option, equals, value = words[place].partition("=")
        alone = equals or _ALONE.fullmatch(option) or (len(option) > 2 and not option.startswith("--"))
        shown = place if alone else place + 1
        if not alone:
            value = "".join(words[place + 1 : place + 2])
        if option in {"--net", "--network"}:
            host = host or value == "host"
        published = value if option in {"-p", "--publish"} else option[2:] if option.startswith("-p") else ""
        if port is None and _PORT.match(published):
            port = place
        place = shown + 1
    return port if host else None
