"""The logins that `docker login` keeps, in docker's config.json or with a credential helper."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from envbuild.errors import HostError
from envbuild.net.answers import read_docker_config, read_helper_answer
from envbuild.util.processes import bounded

_LARGEST_CONFIG = 4 << 20
_LARGEST_ANSWER = 1 << 20
_HELPER_S = 30.0


def docker_login(key: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return what `docker login` keeps for the registry `key`, as an HTTP Basic header, or None.

    Raises:
        HostError: docker's configuration or its helper cannot be read.

    """
    env = os.environ if environ is None else environ
    path = Path(env.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        body = _read_config(path)
        helper, stored = (None, None) if body is None else read_docker_config(body, key)
        if helper:
            return _ask_helper(helper, key)
    except HostError as error:
        raise HostError(error.what, where=str(path), hint=error.hint or "correct it, or run docker login") from None
    return f"Basic {stored}" if stored else None


def _read_config(path: Path) -> bytes | None:
    try:
        # the user's own file, which may be a link; a FIFO would hold the open for good
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            body = file.read(_LARGEST_CONFIG + 1) if stat.S_ISREG(os.fstat(handle).st_mode) else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostError(f"docker's logins cannot be read: {error.strerror}") from None
    if body is None or len(body) > _LARGEST_CONFIG:
        raise HostError("docker's logins cannot be read: it is no file, or a very large one")
    return body


def _ask_helper(helper: str, key: str) -> str | None:
    program = f"docker-credential-{helper}"
    try:
        ran = bounded([program, "get"], seconds=_HELPER_S, limit=_LARGEST_ANSWER, stdin=key.encode())
    except FileNotFoundError:
        raise HostError(f"docker's credential helper {program} is not installed") from None
    except OSError as error:
        raise HostError(f"docker's credential helper {program} fails: {error.strerror}") from None
    if ran.fault:
        raise HostError(f"docker's credential helper {program} gave no answer: it {ran.fault}")
    # a helper says with its exit code that it has no login
    return None if ran.code else read_helper_answer(ran.out)
